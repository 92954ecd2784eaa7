"""The oracle's quantised checkpoints, `mx` and `geo`, in every form in which a checkpoint may be stored.

`FORMS` has them by name. Each changes how values are stored and no value: `convert` proves that, tensor by tensor and
to the bit, with a decoder of its own that shares nothing with the engine's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
HERE = Path(__file__).resolve().parent
TILE, E4M3_TOP = 128, 8  # powers of two that e4m3 holds end with 2^8
BESIDE = (".scale", ".weight_scale", ".weight_scale_2", ".input_scale")
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
_EXPERT = re.compile(r"layers\.\d+\.ffn\.experts\.(\d+)\.(w\d)\.weight")


@dataclasses.dataclass(frozen=True)
class Form:
    """change: of the stored tensors, in place.   kept: formats in which w13 and w2 stay for decode kernels, if sizes
    allow; None: dequantised.   is_nvfp4: what config.json says.   spread: over several files, with an index."""

    change: Callable[[Tensors], object]
    kept: tuple[str | None, str | None] = ("mxfp4", "mxfp4")
    is_nvfp4: bool = False
    spread: bool = False


def convert(stored: Tensors, form: str) -> Tensors:
    """Return a checkpoint's tensors in a form. Raises ValueError for one whose value would be another."""
    changed = dict(stored)
    FORMS[form].change(changed)
    names, before = ({n for n in tensors if not n.endswith(BESIDE)} for tensors in (changed, stored))
    wrong = names ^ before | {n for n in names & before if not _same(value_of(changed, n), value_of(stored, n))}
    if wrong:
        raise ValueError(f"{form}: {len(wrong)} tensors have other values than stored, {min(wrong)} among them")
    return changed


def write(folder: Path, form: str, stored: Tensors, config: dict[str, object]) -> Path:
    """Write a checkpoint in a form and return its folder. stored, config: as the oracle has them."""
    tensors, kind = convert(stored, form), FORMS[form]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_four_bits().nvfp4_config(config) if kind.is_nvfp4 else config))
    files: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        files.setdefault(_file_of(name) if kind.spread else "model.safetensors", {})[name] = tensor.contiguous()
    for file, part in files.items():
        save_file(part, folder / file)
    if kind.spread:
        weight_map = {name: file for file, part in files.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def value_of(tensors: Tensors, name: str) -> torch.Tensor:
    """Return what a tensor stands for, float64 or int64, by the definitions of the formats."""
    stored, base = tensors[name], name.removesuffix(".weight")
    if stored.dtype in (torch.int32, torch.int64):
        return stored.long()
    if stored.dtype == torch.float8_e4m3fn:
        return stored.double() * _spread_out(_number(tensors[f"{base}.scale"]), TILE, TILE, stored.shape)
    if stored.dtype not in (torch.int8, torch.uint8):
        return stored.double()
    byte = stored.view(torch.uint8).long()
    code = torch.stack([byte & 15, byte >> 4], -1).flatten(1)
    value = _E2M1[code & 7] * (1 - 2 * (code >> 3))
    value = torch.where(code == 8, -0.0, value)
    if f"{base}.weight_scale" in tensors:
        scale = tensors[f"{base}.weight_scale"].double() * tensors[f"{base}.weight_scale_2"].double()
        return value * _spread_out(scale, 1, 16, value.shape)
    return value * _spread_out(_number(tensors[f"{base}.scale"]), 1, 32, value.shape)


def _number(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype == torch.float32:
        return scale.double()
    return torch.exp2(scale.view(torch.uint8).double() - 127)


def _spread_out(scale: torch.Tensor, rows: int, columns: int, shape: torch.Size) -> torch.Tensor:
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits are, the signs of zeros too."""
    return a.shape == b.shape and torch.equal(a.view(torch.int64), b.view(torch.int64))


def _four_bits():
    if "engine_four_bits" not in sys.modules:
        spec = importlib.util.spec_from_file_location("engine_four_bits", HERE / "four_bits.py")
        sys.modules["engine_four_bits"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["engine_four_bits"])
    return sys.modules["engine_four_bits"]


def _file_of(name: str) -> str:
    """Return one of three: scales apart from what they scale, w3 apart from w1."""
    which = 1 if name.endswith(BESIDE) else 2 if ".w3." in name else 3
    return f"model-{which:05}-of-00003.safetensors"


# ---------------------------------------------------------------- changes


def _quantised(tensors: Tensors, *, experts: bool | None = None) -> list[str]:
    """Return the names of quantised matrices. experts: of routed experts, of others; None: of both."""
    kinds = (torch.float8_e4m3fn, torch.int8, torch.uint8)
    names = [n for n in tensors if n.endswith(".weight") and tensors[n].dtype in kinds and not n.startswith("mtp.")]
    return [n for n in names if experts in (None, _EXPERT.fullmatch(n) is not None)]


def _replace(tensors: Tensors, name: str, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
    """Store a matrix anew, with a scale or with none."""
    base = name.removesuffix(".weight")
    for suffix in BESIDE:
        tensors.pop(f"{base}{suffix}", None)
    tensors[name] = weight
    if scale is not None:
        tensors[f"{base}.scale"] = scale


def _as_float(dtype: torch.dtype, *, experts: bool | None = None) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in _quantised(tensors, experts=experts):
            _replace(tensors, name, value_of(tensors, name).to(dtype))

    return change


def _all_float32(tensors: Tensors) -> None:
    _as_float(torch.float32)(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            tensors[name] = tensor.float()


def _as_e4m3(dtype: torch.dtype) -> Callable[[Tensors], None]:
    """Experts in tiles, the largest value of each in e4m3's highest power of two. dtype: of the scales."""

    def change(tensors: Tensors) -> None:
        for name in _quantised(tensors, experts=True):
            _replace(tensors, name, *_tiles(value_of(tensors, name), dtype))

    return change


def _tiles(value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = value.shape
    largest = value.abs().view(rows // TILE, TILE, columns // TILE, TILE).amax((1, 3))
    scale = torch.exp2(torch.floor(torch.log2(largest)) - E4M3_TOP)
    codes = (value / _spread_out(scale, TILE, TILE, value.shape)).to(torch.float8_e4m3fn)
    return codes, scale.float().to(dtype)


def _nvfp4(pattern: str = r"layers\..*\.experts\..*\.weight", **options: object) -> Callable[[Tensors], object]:
    return lambda tensors: _four_bits().to_nvfp4(tensors, pattern, **options)


def _nvfp4_factors_differ(tensors: Tensors) -> None:
    """w3's factors are not w1's, as an exporter that calibrates each matrix leaves them."""
    _nvfp4()(tensors)
    for name in [n for n in tensors if n.endswith(".w3.weight_scale_2")]:
        scale = name.removesuffix("_2")
        tensors[scale] = (tensors[scale].float() / 2).to(torch.float8_e4m3fn)
        tensors[name] = tensors[name] * 2
        if tensors[name] == tensors[name.replace(".w3.", ".w1.")]:  # they differed, and now do not
            tensors[scale] = (tensors[scale].float() / 2).to(torch.float8_e4m3fn)
            tensors[name] = tensors[name] * 2


def _nvfp4_scalars_of_one(tensors: Tensors) -> None:
    _nvfp4()(tensors)
    for name in [n for n in tensors if n.endswith((".weight_scale_2", ".input_scale"))]:
        tensors[name] = tensors[name].reshape(1)


def _float32_scales(*, experts: bool) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in _quantised(tensors, experts=experts):
            _replace(tensors, name, tensors[name], _number(tensors[name.removesuffix("weight") + "scale"]).float())

    return change


def _unsigned_bytes(tensors: Tensors) -> None:
    """Exporters that don't know E8M0, or write codes as U8; ids of experts in 32 bits."""
    for name, tensor in tensors.items():
        if tensor.dtype in (torch.float8_e8m0fnu, torch.int8):
            tensors[name] = tensor.view(torch.uint8)
        elif tensor.dtype == torch.int64:
            tensors[name] = tensor.int()


def _expert_by_expert(tensors: Tensors) -> None:
    """Every expert in another form than the one before."""
    for name in _quantised(tensors, experts=True):
        which = int(_EXPERT.fullmatch(name)[1]) % 4
        if which == 1:
            _nvfp4(re.escape(name))(tensors)
        elif which == 2:
            _replace(tensors, name, value_of(tensors, name).bfloat16())
        elif which == 3:
            _replace(tensors, name, *_tiles(value_of(tensors, name), torch.float32))


FORMS: dict[str, Form] = {
    "stored": Form(lambda tensors: None),  # FP8 with E8M0 scales, MXFP4 experts in I8
    "bytes": Form(_unsigned_bytes),
    "spread": Form(lambda tensors: None, spread=True),
    "fp8-f32-scales": Form(_float32_scales(experts=False)),
    "mxfp4-f32-scales": Form(_float32_scales(experts=True), kept=(None, None)),
    "bf16": Form(_as_float(torch.bfloat16), kept=(None, None)),
    "bf16-experts": Form(_as_float(torch.bfloat16, experts=True), kept=(None, None)),
    "bf16-dense": Form(_as_float(torch.bfloat16, experts=False)),
    "f16": Form(_as_float(torch.float16), kept=(None, None)),
    "f32": Form(_all_float32, kept=(None, None)),
    "fp8-experts": Form(_as_e4m3(torch.float32), kept=(None, None)),  # as the base model's
    "fp8-experts-e8m0": Form(_as_e4m3(torch.float8_e8m0fnu), kept=(None, None)),
    "nvfp4": Form(_nvfp4(), kept=("nvfp4", "nvfp4"), is_nvfp4=True),
    "nvfp4-spread": Form(_nvfp4(), kept=("nvfp4", "nvfp4"), is_nvfp4=True, spread=True),
    "nvfp4-weights-only": Form(_nvfp4(input_scale=None), kept=("nvfp4", "nvfp4"), is_nvfp4=True),
    "nvfp4-scalars-of-one": Form(_nvfp4_scalars_of_one, kept=("nvfp4", "nvfp4"), is_nvfp4=True),
    "nvfp4-factors-differ": Form(_nvfp4_factors_differ, kept=("nvfp4", "nvfp4"), is_nvfp4=True),
    "nvfp4-w13": Form(_nvfp4(r"layers\..*\.experts\..*\.w[13]\.weight"), kept=("nvfp4", "mxfp4"), is_nvfp4=True),
    "nvfp4-w2": Form(_nvfp4(r"layers\..*\.experts\..*\.w2\.weight"), kept=("mxfp4", "nvfp4"), is_nvfp4=True),
    "nvfp4-w1": Form(_nvfp4(r"layers\..*\.experts\..*\.w1\.weight"), kept=("nvfp4", "mxfp4"), is_nvfp4=True),
    "nvfp4-some-experts": Form(
        _nvfp4(r"layers\..*\.experts\.[13579]\..*\.weight"), kept=("nvfp4", "nvfp4"), is_nvfp4=True
    ),
    "expert-by-expert": Form(_expert_by_expert, kept=(None, None), is_nvfp4=True),
}
