"""What a made-up checkpoint holds, tensor by tensor, in the official stored forms, and how its bytes are drawn.

Names and shapes come from deploy.tiny_model.tensor_table, as do the spreads that keep activations near 1 and gates
spreading tokens. Routed experts get four bits (MXFP4, or NVFP4 but for those of `mtp.*`, as published), other linear
layers e4m3 with a scale of two per tile, all else what it has there. Every tensor, of any seed, has bytes of its own;
they do not depend on who draws which piece, or in which order. No torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import math
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy import tiny_model
from engine.model.published import PUBLISHED
from engine.model.shard_files import DTYPE_BITS
from engine.model.stored_forms import DRAFT, GROUP, FourBits, beside

LIKE = ("v4-flash", "tiny")
_TILE = 128
_QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [_TILE, _TILE]}
_NVFP4 = {"moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": GROUP["nvfp4"]}
_IN_E4M3 = (".wq_a", ".wq_b", ".attn.wkv", ".wo_a", ".wo_b", ".e_proj", ".h_proj")
_DRAWS = 1 << 16
_E4M3_SPREAD = 32.0  # of its codes' values, which end at 448
_E2M1_SPREAD = 2.93  # of codes that are all equally likely
_E4M3_SCALES = (0x28, 0x48)  # 0.25 to 4


class Law(NamedTuple):
    """How elements are drawn.

    bytes      any          normal   around a, spread b     e4m3   codes, normal
    range      a to b, as bytes     uniform   a to b        ids    a distinct ones of b
    """

    kind: Literal["bytes", "normal", "e4m3", "range", "uniform", "ids"]
    a: float = 0
    b: float = 0


class Drawn(NamedTuple):
    """A tensor to be written. dtype: as safetensors says.   key: of its draw; two of one key are equal."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    law: Law
    key: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8

    @property
    def row_elements(self) -> int:
        """Elements that are drawn together."""
        return self.shape[-1] if self.law.kind == "ids" else 1


def make_config(like: str, *, layers: int, experts: FourBits, has_mtp: bool) -> dict[str, Any]:
    """Return the config.json of the first `layers` layers of a model, 0 for all. Raises ValueError if it has fewer."""
    if like == "tiny":
        raw = dict(tiny_model.CONFIG)
    else:
        file = importlib.resources.files("engine.model") / PUBLISHED["DeepSeek-V4-Flash"][0]
        raw = json.loads(file.read_text(encoding="utf-8"))
    if layers > raw["num_hidden_layers"]:
        raise ValueError(f"--layers {layers}: {like} has {raw['num_hidden_layers']}; lower it, or leave it out for all")
    layers = layers or raw["num_hidden_layers"]
    return raw | {
        "num_hidden_layers": layers,
        "num_hash_layers": min(raw["num_hash_layers"], layers),
        "compress_ratios": raw["compress_ratios"][:layers] + [0] * has_mtp,
        "num_nextn_predict_layers": int(has_mtp),
        "expert_dtype": "fp4",
        "quantization_config": _QUANTIZED | (_NVFP4 if experts == "nvfp4" else {}),
    }


def tensors_of(config: dict[str, Any], experts: FourBits) -> Iterator[Drawn]:
    """Yield every tensor of the checkpoint, layer by layer, scales behind their weights."""
    for tensor in tiny_model.tensor_table(config):
        name, shape = tensor.name, tensor.shape
        if ".experts." in name:
            yield from _four_bits(name, shape, "mxfp4" if name.startswith(DRAFT) else experts)
        elif name.removesuffix(".weight").endswith(_IN_E4M3) or ".shared_experts." in name:
            yield Drawn(name, "F8_E4M3", shape, Law("e4m3"), name)
            tiles = tuple(math.ceil(size / _TILE) for size in shape)
            yield _binary_scales(beside(name, "scale"), tiles, shape[1] ** -0.5 / _E4M3_SPREAD)
        elif tensor.dtype == "experts":
            yield Drawn(name, "I64", shape, Law("ids", shape[1], config["n_routed_experts"]), name)
        else:
            dtype = "F32" if tensor.dtype == "float32" else "BF16"
            yield Drawn(name, dtype, shape, Law("normal", tensor.mean, tensor.std), name)


def _four_bits(name: str, shape: tuple[int, ...], format: FourBits) -> Iterator[Drawn]:
    rows, columns = shape
    scales = (rows, columns // GROUP[format])
    is_nvfp4 = format == "nvfp4"
    yield Drawn(name, "U8" if is_nvfp4 else "I8", (rows, columns // 2), Law("bytes"), name)
    if not is_nvfp4:
        yield _binary_scales(beside(name, "scale"), scales, columns**-0.5 / _E2M1_SPREAD)
        return
    key = beside(name, "weight_scale")
    yield Drawn(key, "F8_E4M3", scales, Law("range", *_E4M3_SCALES), key)
    factor = columns**-0.5 / 4
    for suffix, low, high in (("weight_scale_2", factor / 2, factor * 1.5), ("input_scale", 0.002, 0.02)):
        key = beside(name, suffix)
        yield Drawn(key, "F32", (), Law("uniform", low, high), key.replace(".w3.", ".w1."))  # of both, as published


def _binary_scales(name: str, shape: tuple[int, ...], scale: float) -> Drawn:
    """Return two neighbouring powers of two as e8m0, equally likely, whose mean square is near that of `scale`."""
    top = round(math.log2(scale / math.sqrt(0.625))) + 127
    return Drawn(name, "F8_E8M0", shape, Law("range", top - 1, top), name)


def draw(tensor: Drawn, seed: int, start: int, count: int) -> NDArray[Any]:
    """Return `count` elements of a tensor as they are stored, from element `start`, which begins a piece.

    Pieces of other sizes have other values: callers keep to one size.
    """
    words = hashlib.sha256(f"{seed} {tensor.key} {start}".encode()).digest()
    rng = np.random.Generator(np.random.SFC64(np.frombuffer(words, "<u4")))
    law = tensor.law
    if law.kind == "ids":
        rows = count // tensor.row_elements
        odds = rng.random((rows, int(law.b)), dtype=np.float32)
        return np.argpartition(odds, int(law.a) - 1, axis=1)[:, : int(law.a)].astype("<i8")
    num_random = count if law.kind == "bytes" else 2 * count
    words8 = rng.integers(0, 1 << 64, size=-(-num_random // 8), dtype=np.uint64, endpoint=False)
    if law.kind == "bytes":
        return words8.view(np.uint8)[:count]
    return _table(law, tensor.dtype)[words8.view(np.uint16)[:count]]


@functools.lru_cache(maxsize=64)
def _table(law: Law, dtype: str) -> NDArray[Any]:
    """Return 65,536 elements, as stored, that are equally likely."""
    even = (np.arange(_DRAWS) + 0.5) / _DRAWS
    if law.kind == "range":
        return (law.a + np.floor(even * (law.b - law.a + 1))).astype(np.uint8)
    if law.kind == "uniform":
        return (law.a + even * (law.b - law.a)).astype("<f4")
    if law.kind == "e4m3":
        return _to_e4m3(_E4M3_SPREAD * _normal())
    values = (law.a + law.b * _normal()).astype("<f4")
    return values if dtype == "F32" else tiny_model.to_bfloat16(values)


@functools.cache
def _normal() -> NDArray[np.float64]:
    law = NormalDist()
    return np.array([law.inv_cdf((i + 0.5) / _DRAWS) for i in range(_DRAWS)])


def _to_e4m3(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the codes nearest to values."""
    codes = np.arange(0x7F)
    exponents, digits = codes >> 3, codes & 7
    held = np.where(exponents, (1 + digits / 8) * 2.0 ** (exponents - 7), digits * 2.0**-9)
    nearest = np.searchsorted((held[1:] + held[:-1]) / 2, np.abs(values))
    return (nearest + 0x80 * (values < 0)).astype(np.uint8)
