"""Are the values that were loaded those of the files? Samples read and dequantised another way say so.

The other way: the safetensors library, numpy's float64 and the formats' definitions, a value at a time. Nothing of the
loader or of the kernels' own dequantisation is in it, but for the packed experts, which are unpacked first.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open

from engine.model.expert_stacks import InnerSlice, split_name
from engine.model.shard_files import ShardFiles, read_headers
from engine.model.stored_forms import beside, four_bits_of
from engine.model.tensor_specs import tensor_specs
from engine.model.weights import scale_name
from kernels.expert_weights import LANES, ExpertWeights, Format, dequantize_experts

if TYPE_CHECKING:
    from engine.model.config import DeepSeekV4Config
    from engine.model.parts import WeightPart
    from engine.model.shard import Shard

_ROWS = 64  # of a matrix that are compared
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Array = np.ndarray[Any, Any]


def compare_samples(
    parts: Iterable[WeightPart], args: argparse.Namespace, config: DeepSeekV4Config, shard: Shard
) -> dict[str, Any]:
    """Return how many matrices of `parts` were compared, how many values, and which differ: `args.samples` of them."""
    count, files = args.samples, read_headers(args.model)
    matrices = [name for name, spec in tensor_specs(config).items() if len(spec.shape) == 2]
    held = shard.experts(config)
    matrices = [name for name in matrices if (place := split_name(name)) is None or place[1] in held]
    draw = random.Random(0)
    experts = [name for name in matrices if split_name(name)]
    others = [name for name in matrices if not split_name(name)]
    chosen = {*draw.sample(experts, min(count // 2, len(experts)))}
    chosen |= {*draw.sample(others, min(count - len(chosen), len(others)))}
    compared, values, faults = 0, 0, list[str]()
    for _, tensors in parts if chosen else ():
        for name in sorted(chosen):
            loaded = _loaded(name, tensors, shard, config)
            if loaded is None:
                continue
            chosen.discard(name)
            wanted = _wanted(name, files, config, shard, loaded.shape[0])
            compared, values = compared + 1, values + loaded.size
            # What is dequantised is rounded once more, to the dtype it is used in.
            bound = 2.0**-8 if args.dtype == "bfloat16" else 2.0**-23
            if not np.all(np.abs(loaded - wanted) <= bound * np.abs(wanted)):
                faults.append(f"{name}: off by {np.abs(loaded - wanted).max():g} of {np.abs(wanted).max():g}")
    faults += [f"{name}: was not loaded" for name in sorted(chosen)]
    return {"compared": compared, "values": values, "faults": faults}


def _loaded(name: str, tensors: Mapping[str, torch.Tensor], shard: Shard, config: DeepSeekV4Config) -> Array | None:
    """Return the first rows of a matrix as it was loaded, float64; None: it is not among these tensors."""
    place = split_name(name)
    if place is None:
        if name not in tensors:
            return None
        part = tensors[name][:_ROWS].double().cpu()
        scale = tensors.get(scale_name(name))
        if scale is not None and tensors[name].dtype == torch.float8_e4m3fn:
            spread = scale.double().cpu().repeat_interleave(128, 0)[: part.shape[0]]
            part = part * spread.repeat_interleave(128, 1)[:, : part.shape[1]]
        return part.numpy()
    stack, expert, matrix = place
    at, local = shard.experts(config).index(expert), shard.of(config)
    rows = local.moe_intermediate_size if matrix != "w2" else local.hidden_size
    first = rows if matrix == "w3" else 0
    if stack in tensors:
        whole = tensors[stack][at]
    elif f"{stack}.codes" in tensors:
        fields = [tensors[f"{stack}.{field}"][at, None] for field in ("codes", "scales", "factors")]
        format: Format = "nvfp4" if fields[1].shape[3] == LANES["nvfp4"] else "mxfp4"
        whole = dequantize_experts(ExpertWeights(format, *fields))[0]
    else:
        return None
    return whole[first : first + rows][:_ROWS].double().cpu().numpy()


def _wanted(name: str, files: ShardFiles, config: DeepSeekV4Config, shard: Shard, rows: int) -> Array:
    """Return the same rows as the files have them, dequantised by the definitions, float64."""
    shape = tensor_specs(config)[name].shape
    place = split_name(name)
    if place is None or shard.by_expert:
        cut = shard.cut(name, shape)
    else:
        cut = InnerSlice.of(config, shard.index, shard.count).within(place[2])
    first, columns = cut[0].indices(shape[0])[0], cut[1]
    here = slice(first, first + rows)
    stored, format = files.tensors[name], four_bits_of(files.tensors, name)
    raw = _raw(files, name)[here]
    if format is not None:
        pairs = raw.view(np.uint8)
        codes = np.stack([_E2M1[pairs & 15], _E2M1[pairs >> 4]], -1).reshape(len(pairs), -1)
        group = 16 if format == "nvfp4" else 32
        if format == "nvfp4":
            scale = _e4m3(_raw(files, beside(name, "weight_scale"))[here]) * float(
                _raw(files, beside(name, "weight_scale_2")).reshape(-1)[0]
            )
        else:
            scale = _scale(files, name)[here]
        values = codes * np.repeat(scale, group, 1)
    elif stored.dtype == "F8_E4M3":
        scale = np.repeat(_scale(files, name), 128, 0)[here]
        values = _e4m3(raw) * np.repeat(scale, 128, 1)[:, : raw.shape[1]]
    else:
        values = raw.astype(np.float64)
    return np.asarray(values[:, columns])


def _raw(files: ShardFiles, name: str) -> Array:
    """Return a tensor's values, or bytes of types that numpy has not; bfloat16 as float32."""
    with safe_open(files.paths[files.tensors[name].file], framework="pt") as file:
        tensor = file.get_tensor(name)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    elif tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)
    return tensor.numpy()  # type: ignore[no-any-return]


def _scale(files: ShardFiles, name: str) -> Array:
    raw = _raw(files, beside(name, "scale"))
    return raw.astype(np.float64) if raw.dtype == np.float32 else 2.0 ** (raw.astype(np.float64) - 127)


def _e4m3(byte: Array) -> Array:
    """Return what bytes of e4m3 mean: a sign, four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = (byte >> 3 & 15).astype(np.float64), (byte & 7).astype(np.float64)
    size = np.where(exponent > 0, 2.0 ** (exponent - 7) * (1 + mantissa / 8), 2.0**-6 * mantissa / 8)
    return np.where(byte & 0x80, -size, size)
