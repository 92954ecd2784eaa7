"""A checkpoint folder: which tensor lies in which file, and in which stored form.

Stored forms of a matrix, told by what lies there and not by what config.json calls it:

    BF16, F16, F32
    F8_E4M3           with a `.scale` per tile (128x128)
    I8 or U8, MXFP4   two e2m1 a byte, with a `.scale` per 32 columns
    I8 or U8, NVFP4   two e2m1 a byte, with a `.weight_scale` (F8_E4M3) per 16 columns and a `.weight_scale_2` (F32)

`.scale` is F8_E8M0 (read as raw exponent bytes: a numeric copy to an integer type would zero them) or F32. What they
hold is for stored_values.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from engine.model.config import DeepSeekV4Config
from engine.model.expert_stacks import InnerSlice, Packing, size_problem, split_name
from engine.model.shard_files import read_headers
from engine.model.stored_values import beside
from engine.model.tensor_specs import TensorSpec
from kernels.expert_weights import GROUP, Format

FLOATS = ("BF16", "F16", "F32")
SCALES = ("F8_E8M0", "U8", "F32")
FOUR_BITS = ("I8", "U8")
_AGAIN = "export the checkpoint again, or take a published one"
_SHOWN = 20


class WeightsError(ValueError):
    """The checkpoint does not hold what the config promises. The text lists the tensors."""


class _Part(NamedTuple):
    """A tensor beside a quantised weight: the types and shapes in which it may be stored."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class Checkpoint:
    """The weight files of a folder. Raises WeightsError for files that are not whole, ConfigError for missing ones."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, read_headers(folder)
        self.where = self.files.tensors
        refuse(folder, self.files.problems)

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return (stored dtype, shape)."""
        stored = self.where[name]
        return stored.dtype, stored.shape

    def check_headers(self, specs: dict[str, TensorSpec], config: DeepSeekV4Config) -> None:
        """Raise WeightsError for tensors that are missing, superfluous, or of a wrong type or shape."""
        problems: list[str] = []
        others_beside: set[str] = set()
        has_input_scales = any(n.endswith(".input_scale") and not n.startswith("mtp.") for n in self.where)
        for name, spec in specs.items():
            if name not in self.where:
                problems.append(f"{name}: missing, wanted {list(spec.shape)}")
                continue
            stored, shape = self.header(name)
            wanted, parts = self._stored_form(name, stored, spec, config)
            if wanted is None:
                problems.append(f"{name}: stored as {stored}, which is not a form of a {spec.kind} tensor")
            elif shape != wanted:
                problems.append(f"{name}: shape {list(shape)} as {stored}, wanted {list(wanted)}")
            if beside(name, "weight_scale") in parts and has_input_scales:
                parts[beside(name, "input_scale")] = _Part(("F32",), ((), (1,)))
            others_beside.update(parts)
            for key, part in parts.items():
                problems.extend(self._part_problems(key, part))
        known = specs.keys() | others_beside
        others = [n for n in self.where if n not in known and not n.startswith("mtp.")]
        problems.extend(f"{n}: not part of this model" for n in others)
        refuse(self.folder, problems)

    def _part_problems(self, name: str, part: _Part) -> Iterator[str]:
        if name not in self.where:
            why = "others of this checkpoint have one" if name.endswith("input_scale") else "its weight is quantised"
            yield f"{name}: missing, {why}; {_AGAIN}"
            return
        stored, shape = self.header(name)
        if stored not in part.dtypes:
            yield f"{name}: stored as {stored}, wanted one of {', '.join(part.dtypes)}"
        if shape not in part.shapes:
            yield f"{name}: shape {list(shape)}, wanted {list(part.shapes[0])}"

    def names_with(self, name: str) -> list[str]:
        """Return a weight's name and those of the tensors that are read with it."""
        suffixes = ("scale", "weight_scale", "weight_scale_2", "input_scale")
        found = [key for key in (beside(name, suffix) for suffix in suffixes) if key in self.where]
        return [name, *(found if self.header(name)[0] not in (*FLOATS, "I64", "I32") else [])]

    def _stored_form(
        self, name: str, stored: str, spec: TensorSpec, config: DeepSeekV4Config
    ) -> tuple[tuple[int, ...] | None, dict[str, _Part]]:
        """Return the shape of the stored tensor, None where there is no such form, and what must lie beside it."""
        if spec.kind == "ids":
            return (spec.shape if stored in ("I64", "I32") else None), {}
        if stored in FLOATS:
            return spec.shape, {}
        if spec.kind == "matrix" and stored == "F8_E4M3":
            rows, columns = config.weight_block_size
            tiles = (-(-spec.shape[0] // rows), -(-spec.shape[1] // columns))
            return spec.shape, {beside(name, "scale"): _Part(SCALES, (tiles,))}
        format = self.four_bit_format(name)
        if spec.kind != "matrix" or format is None or spec.shape[1] % GROUP[format]:
            return None, {}
        scale_shape = (spec.shape[0], spec.shape[1] // GROUP[format])
        parts = {beside(name, "scale"): _Part(SCALES, (scale_shape,))}
        if format == "nvfp4":
            parts = {
                beside(name, "weight_scale"): _Part(("F8_E4M3",), (scale_shape,)),
                beside(name, "weight_scale_2"): _Part(("F32",), ((), (1,))),
            }
        return (spec.shape[0], spec.shape[1] // 2), parts

    def four_bit_format(self, name: str) -> Format | None:
        """Return the format of a matrix of four-bit codes, None for another. The scales beside it tell."""
        stored = self.header(name)[0]
        if stored not in FOUR_BITS:
            return None
        if any(beside(name, suffix) in self.where for suffix in ("weight_scale", "weight_scale_2")):
            return "nvfp4"
        return "nvfp4" if stored == "U8" and beside(name, "scale") not in self.where else "mxfp4"

    def packings(self, specs: dict[str, TensorSpec], config: DeepSeekV4Config, inner: InnerSlice) -> dict[str, Packing]:
        """Return how the experts' matrices can be kept, by stack, as far as headers tell."""
        found: dict[str, Packing] = {}
        for name in specs:
            place = split_name(name)
            if place is None:
                continue
            stack, format = place[0], self.four_bit_format(name)
            before = found.get(stack) or Packing(format, size_problem(stack, config, inner))
            reason = before.reason
            if not reason and format is None:
                reason = f"{name} is stored as {self.header(name)[0]}, not in four bits"
            if not reason and format == "mxfp4" and self.header(beside(name, "scale"))[0] == "F32":
                reason = f"{beside(name, 'scale')} is stored as F32, which the kernels don't read"
            both = "nvfp4" if "nvfp4" in (before.format, format) else format
            found[stack] = Packing(None, reason) if reason else Packing(both)
        return found

    def is_e4m3(self, name: str, config: DeepSeekV4Config) -> bool:
        """Return whether a matrix is stored as e4m3 in tiles of 128 x 128, which decode kernels read as they are."""
        return self.header(name)[0] == "F8_E4M3" and tuple(config.weight_block_size) == (128, 128)


def refuse(folder: str | Path, problems: list[str]) -> None:
    """Raise WeightsError if there are problems."""
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightsError(f"{folder}: {len(problems)} tensors don't fit config.json:\n  {shown}{more}")
