"""In which form each tensor of a checkpoint is stored, and whether that fits the config, by headers alone. No torch.

Stored forms of a matrix, told by what lies there and not by what config.json calls it:

    BF16, F16, F32
    F8_E4M3           with a `.scale` per tile (128x128)
    I8 or U8, MXFP4   two e2m1 a byte, with a `.scale` per 32 columns
    I8 or U8, NVFP4   two e2m1 a byte, with a `.weight_scale` (F8_E4M3) per 16 columns and a `.weight_scale_2` (F32)

`.scale` is F8_E8M0 (read as raw exponent bytes: a numeric copy to an integer type would zero them) or F32. What they
hold is for stored_values.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from engine.model.config import DeepSeekV4Config
from engine.model.shard_files import ShardFiles, StoredTensor, read_headers
from engine.model.tensor_specs import TensorSpec, tensor_specs
from kernels.table import counted

FourBits = Literal["nvfp4", "mxfp4"]
GROUP: dict[FourBits, int] = {"nvfp4": 16, "mxfp4": 32}  # columns that share a scale
FLOATS = ("BF16", "F16", "F32")
SCALES = ("F8_E8M0", "U8", "F32")
FOUR_BITS = ("I8", "U8")
DRAFT = "mtp."  # what tensors of drafting blocks are called; they are read past
BESIDE = ("scale", "weight_scale", "weight_scale_2", "input_scale")
_SHOWN = 20
_AGAIN = "export the checkpoint again, or take a published one"


class WeightsError(ValueError):
    """The checkpoint does not hold what the config promises. The text lists the tensors."""


class _Part(NamedTuple):
    """A tensor beside a quantised weight: the types and shapes in which it may be stored."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def beside(name: str, suffix: str) -> str:
    """Return the name of what lies beside a weight."""
    return f"{name.removesuffix('.weight')}.{suffix}"


def names_with(tensors: Mapping[str, StoredTensor], name: str) -> list[str]:
    """Return a weight's name and those of the tensors that are read with it."""
    if tensors[name].dtype in (*FLOATS, "I64", "I32"):
        return [name]
    return [name, *(key for key in (beside(name, suffix) for suffix in BESIDE) if key in tensors)]


def four_bits_of(tensors: Mapping[str, StoredTensor], name: str) -> FourBits | None:
    """Return the format of a matrix of four-bit codes, None for another. The scales beside it tell."""
    stored = tensors[name].dtype
    if stored not in FOUR_BITS:
        return None
    if any(beside(name, suffix) in tensors for suffix in ("weight_scale", "weight_scale_2")):
        return "nvfp4"
    return "nvfp4" if stored == "U8" and beside(name, "scale") not in tensors else "mxfp4"


def form_of(tensors: Mapping[str, StoredTensor], name: str) -> str:
    """Return what people call the form of a tensor: mxfp4, nvfp4, e4m3, bf16, …"""
    four_bits, stored = four_bits_of(tensors, name), tensors[name].dtype
    return four_bits or {"F8_E4M3": "e4m3", "I64": "int64", "I32": "int32"}.get(stored, stored.lower())


def check_forms(files: ShardFiles, specs: Mapping[str, TensorSpec], config: DeepSeekV4Config) -> list[str]:
    """Return what is wrong: tensors that are missing, superfluous, or of a wrong type or shape, each by name.

    specs: of the whole model.
    """
    tensors = files.tensors
    problems: list[str] = []
    others_beside: set[str] = set()
    has_input_scales = any(n.endswith(".input_scale") and not n.startswith(DRAFT) for n in tensors)
    for name, spec in specs.items():
        if name not in tensors:
            problems.append(f"{name}: missing, wanted {list(spec.shape)}")
            continue
        stored, shape = tensors[name].dtype, tensors[name].shape
        wanted, parts = _stored_form(tensors, name, spec, config)
        if wanted is None:
            problems.append(f"{name}: stored as {stored}, which is not a form of a {spec.kind} tensor")
        elif shape != wanted:
            problems.append(f"{name}: shape {list(shape)} as {stored}, wanted {list(wanted)}")
        if beside(name, "weight_scale") in parts and has_input_scales:
            parts[beside(name, "input_scale")] = _Part(("F32",), ((), (1,)))
        others_beside.update(parts)
        for key, part in parts.items():
            problems.extend(_part_problems(tensors.get(key), key, part))
    known = specs.keys() | others_beside
    others = [n for n in tensors if n not in known and not n.startswith(DRAFT)]
    return problems + [f"{n}: not part of this model" for n in others]


def check_folder(folder: str | Path, config: DeepSeekV4Config) -> list[str]:
    """Return what is wrong with a folder's weight files, tensors among it, by headers; of files alone if it is those.

    Raises ConfigError for files that are not there.
    """
    files = read_headers(folder)
    return files.problems or check_forms(files, tensor_specs(config), config)


def listed(folder: str | Path, problems: list[str]) -> str:
    """Return problems as the text of one error."""
    shown = "\n  ".join(problems[:_SHOWN])
    more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    remedy = "take config.json and all files of one revision"
    what = counted(len(problems), "tensor or file doesn't", "tensors or files don't")
    return f"{folder}: {what} fit config.json; {remedy}:\n  {shown}{more}"


def _part_problems(stored: StoredTensor | None, name: str, part: _Part) -> Iterator[str]:
    if stored is None:
        why = "others of this checkpoint have one" if name.endswith("input_scale") else "its weight is quantised"
        yield f"{name}: missing, {why}; {_AGAIN}"
        return
    if stored.dtype not in part.dtypes:
        yield f"{name}: stored as {stored.dtype}, wanted one of {', '.join(part.dtypes)}"
    if stored.shape not in part.shapes:
        yield f"{name}: shape {list(stored.shape)}, wanted {list(part.shapes[0])}"


def _stored_form(
    tensors: Mapping[str, StoredTensor], name: str, spec: TensorSpec, config: DeepSeekV4Config
) -> tuple[tuple[int, ...] | None, dict[str, _Part]]:
    """Return the shape of the stored tensor, None where there is no such form, and what must lie beside it."""
    stored = tensors[name].dtype
    if spec.kind == "ids":
        return (spec.shape if stored in ("I64", "I32") else None), {}
    if stored in FLOATS:
        return spec.shape, {}
    if spec.kind != "matrix":
        return None, {}
    if stored == "F8_E4M3":
        rows, columns = config.weight_block_size
        tiles = (-(-spec.shape[0] // rows), -(-spec.shape[1] // columns))
        return spec.shape, {beside(name, "scale"): _Part(SCALES, (tiles,))}
    format = four_bits_of(tensors, name)
    if format is None or spec.shape[1] % GROUP[format]:
        return None, {}
    scale_shape = (spec.shape[0], spec.shape[1] // GROUP[format])
    parts = {beside(name, "scale"): _Part(SCALES, (scale_shape,))}
    if format == "nvfp4":
        parts = {
            beside(name, "weight_scale"): _Part(("F8_E4M3",), (scale_shape,)),
            beside(name, "weight_scale_2"): _Part(("F32",), ((), (1,))),
        }
    return (spec.shape[0], spec.shape[1] // 2), parts
