"""From safetensors to tensors the model can multiply: official names, checked, dequantised but for packed experts.

tensor_specs.py is the table of what a checkpoint must hold; loading reads exactly that and refuses the rest: anything
missing, unused, misshapen or not finite is listed by name before a worker serves. `mtp.*` (drafting) is read past.
stored_forms.py knows how tensors are stored, stored_values.py what they then hold, lots.py how they are read.

For decode kernels routed experts may stay in four bits (expert_stacks.py), and other matrices in e4m3. All else is
dequantised in float32 and then cast to the compute dtype. A rank of a group keeps its part (shard.py) of what it reads.
Of routed experts and of the largest matrices it reads no other rows; other tensors are checked whole, whoever needs
which rows of them.

Bytes go to the device as they are stored and become tensors there; host memory has only those that are on their way.
Tensors come in parts, a layer at a time: a model that takes each as it comes (model.py) joins and narrows matrices of
one layer in the memory that those of the layer before have left, so that no holes remain.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from engine.model.checkpoint import WeightsError, open_checkpoint, packings, refuse
from engine.model.config import DeepSeekV4Config
from engine.model.expert_stacks import PARTS, ExpertStacks, InnerSlice, split_name
from engine.model.lots import LARGE_BYTES, LOT_BYTES, Piece, Unit, place_of
from engine.model.parts import LoadStats, PartReader, Tensors, WeightPart, layer_of
from engine.model.shard import TILE, Shard, cut_shape, tiles_of
from engine.model.stored_forms import DRAFT, FLOATS, GROUP, beside, four_bits_of, names_with
from engine.model.stored_values import (
    LostValues,
    UnusableTensor,
    read_e4m3,
    read_four_bits,
    read_sound_four_bits,
    read_values,
)
from engine.model.tensor_specs import tensor_specs
from kernels.expert_weights import Format
from kernels.table import counted

_PACKED_BYTES = 32 << 20  # of experts, packed at once: ten times as much of the device is needed meanwhile


class LoadedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """tensors: by official name, experts as ExpertStacks has them: `…experts.w13` and `…experts.w2`, packed or not.

    skipped: names of `mtp.*` tensors that were read past.   num_bytes: of `tensors`.   packed: formats of the experts'
    matrices that stay in four bits, by stack.   dequantized: why others do not, where packing was asked for.
    """

    tensors: Tensors
    skipped: tuple[str, ...]
    num_bytes: int
    packed: dict[str, Format]
    dequantized: dict[str, str]


def load_weights(
    folder: str | Path,
    config: DeepSeekV4Config,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keeps_packed: bool = False,
    shard: Shard | None = None,
    progress: Callable[[str], None] | None = None,
) -> LoadedWeights:
    """Return all weights of a checkpoint folder at once; see WeightLoader."""
    loader = WeightLoader(
        folder, config, dtype=dtype, device=device, keeps_packed=keeps_packed, shard=shard, progress=progress
    )
    tensors = {name: tensor for _, part in loader.parts() for name, tensor in part.items()}
    return LoadedWeights(
        tensors=tensors,
        skipped=loader.skipped,
        num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        packed=loader.packed,
        dequantized=loader.dequantized,
    )


class _Matrix(NamedTuple):
    """A tensor that is no routed expert's, or some rows of it; to: rows of this rank's tensor, None for all."""

    name: str
    to: slice | None = None


class _Experts(NamedTuple):
    """Some routed experts of a layer, by number."""

    prefix: str
    numbers: list[int]


class WeightLoader:
    """Reads a checkpoint for one rank. skipped: as LoadedWeights has it, from the beginning; the others at the end."""

    def __init__(
        self,
        folder: str | Path,
        config: DeepSeekV4Config,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        keeps_packed: bool = False,
        shard: Shard | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """Read all headers. Raises WeightsError listing what is wrong with them, ConfigError for missing files.

        device: of the tensors, also while they are checked and packed.   keeps_packed: keep experts of four bits
        packed, as far as possible, and other matrices of e4m3, whose float32 scales are `….scale`.   shard: of which
        part; None: the whole.
        """
        self._config, self._dtype, self._device, self._keeps_packed = config, dtype, torch.device(device), keeps_packed
        self._shard, self._say = shard or Shard(), progress or (lambda _: None)
        self._specs = tensor_specs(config)
        cut = (0, 1) if self._shard.by_expert else (self._shard.index, self._shard.count)
        try:
            self._inner, self._held = InnerSlice.of(config, *cut), self._shard.experts(config)
        except ValueError as problem:
            raise WeightsError(f"{folder}: {problem}") from None
        self._files = open_checkpoint(Path(folder), self._specs, config)
        self._stored = self._files.tensors
        kept = packings(self._stored, self._specs, config, self._inner) if keeps_packed else {}
        self._experts = ExpertStacks(config, self._inner, kept, dtype=dtype, device=self._device, held=self._held)
        self.skipped = tuple(sorted(name for name in self._stored if name.startswith(DRAFT)))
        self.stats = LoadStats(0, 0.0, 0)
        self._problems = dict[str, UnusableTensor]()

    @property
    def packed(self) -> dict[str, Format]:
        return self._experts.formats

    @property
    def dequantized(self) -> dict[str, str]:
        return self._experts.dequantized

    def parts(self) -> Iterator[WeightPart]:
        """Yield (layer, its tensors) as they become complete, None for what belongs to no layer; each once.

        Raises WeightsError listing tensors with values that can't be served, once all have been read: none of their
        parts comes, but others may have come before.
        """
        reader, num_bytes = self.reader(self._say), 0
        problems = self._problems = {}
        try:
            for part, tensors in reader.parts(self._take):
                tensors |= self._experts.take(part)
                num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
                if not problems:
                    yield part, tensors
        except OSError as error:
            raise WeightsError(f"{self._files.folder}: can't be read: {error}") from None
        refuse(self._files.folder, [str(problem) for problem in problems.values()])
        self.stats = reader.stats
        self._tell(num_bytes)

    def reader(self, say: Callable[[str], None]) -> PartReader:
        """Return what reads the bytes that this rank needs."""
        return PartReader(self._units(), self._files.paths, device=self._device, say=say)

    def _units(self) -> list[Unit]:
        """Return what is to be read for this rank."""
        units, experts = [], collections.defaultdict[str, list[int]](list)
        for name, spec in self._specs.items():
            place = split_name(name)
            if place is not None:
                if place[1] in self._held and place[2] == "w1":
                    experts[name.partition(".experts.")[0] + ".experts"].append(place[1])
            elif self._is_large(name):
                units += self._rows_of(name, spec.shape)
            else:
                units.append(Unit(_Matrix(name), layer_of(name), self._pieces(name)))
        for prefix, numbers in experts.items():
            units += self._experts_of(prefix, numbers)
        return units

    def _experts_of(self, prefix: str, numbers: list[int]) -> Iterator[Unit]:
        """Yield units of a layer's experts, as many in each as a lot holds: they are packed together."""

        def unit(numbers: list[int]) -> Unit:
            pieces = tuple(piece for name in _names(prefix, numbers) for piece in self._pieces(name))
            return Unit(_Experts(prefix, numbers), layer_of(prefix), pieces)

        numbers = sorted(numbers, key=lambda number: place_of(unit([number])))
        together = max(1, LOT_BYTES // unit(numbers[:1]).num_bytes)
        for start in range(0, len(numbers), together):
            yield unit(numbers[start : start + together])

    def _is_large(self, name: str) -> bool:
        """Return whether a matrix is read some rows at a time."""
        stored = self._stored[name]
        return stored.dtype in FLOATS and len(stored.shape) == 2 and stored.num_bytes > LARGE_BYTES

    def _rows_of(self, name: str, shape: tuple[int, ...]) -> list[Unit]:
        """Return units of rows of a large matrix: those that this rank needs."""
        rows, stored = self._shard.cut(name, shape)[0], self._stored[name]
        first, last, _ = rows.indices(shape[0])
        step = max(1, LARGE_BYTES * shape[0] // stored.num_bytes)
        return [
            Unit(
                _Matrix(name, slice(start - first, min(start + step, last) - first)),
                layer_of(name),
                (Piece.of(name, stored, slice(start, min(start + step, last))),),
            )
            for start in range(first, last, step)
        ]

    def _pieces(self, name: str) -> tuple[Piece, ...]:
        """Return a weight and what lies beside it; of an expert in four bits the codes of this rank's rows only."""
        place, rows = split_name(name), slice(None)
        if place is not None and self._reads_four_bits(name):
            rows = self._inner.within(place[2])[0]
        first, *others = names_with(self._stored, name)
        return Piece.of(first, self._stored[first], rows), *(Piece.of(other, self._stored[other]) for other in others)

    def _reads_four_bits(self, name: str) -> bool:
        """Return whether a routed expert's matrix is read as codes: scales in bytes, none of a group that is cut."""
        scale, format = self._stored.get(beside(name, "scale")), four_bits_of(self._stored, name)
        if format is None or (scale is not None and scale.dtype == "F32"):
            return False
        ends = (self._inner.start, self._inner.stop) if name.endswith(".w2.weight") else ()
        return all(end % GROUP[format] == 0 for end in ends)

    def _take(self, unit: Unit, raw: Tensors, tensors: Tensors) -> None:
        """Put what a unit holds into `tensors`, or among the experts; note what can't be served."""
        if isinstance(unit.key, _Experts):
            prefix, numbers = unit.key
            together = max(1, _PACKED_BYTES * len(numbers) // unit.num_bytes)
            for start, (stack, matrices) in itertools.product(range(0, len(numbers), together), PARTS.items()):
                some = _Experts(prefix, numbers[start : start + together])
                if not self._took_together(some, stack, matrices, raw):
                    for name in _names(*some, matrices):
                        self._noted(self._take_expert, name, raw)
        elif unit.key.to is None:
            self._noted(self._take_matrix, unit.key.name, raw, tensors)
        else:
            self._noted(self._take_rows, unit.key.name, unit.key.to, raw, tensors)

    def _noted(self, take: Callable[..., None], *args: Any) -> None:
        try:
            take(*args)
        except LostValues as found:  # of a matrix whose rows come in several units, all are one problem
            key = f"{found.name} {found.why}"
            before = self._problems.get(key)
            lost = found.lost + (before.lost if isinstance(before, LostValues) else 0)
            self._problems[key] = LostValues(found.name, lost, found.values, found.why)
        except UnusableTensor as problem:
            self._problems[str(problem)] = problem

    def _took_together(self, some: _Experts, which: str, matrices: tuple[str, ...], raw: Tensors) -> bool:
        """Pack matrices of several experts at once; False: they need to be looked at one by one."""
        stack = f"{some.prefix}.{which}"
        format = self._experts.formats.get(stack)
        if format is None:
            return False
        found = []
        for matrix in matrices:
            names = list(_names(some.prefix, some.numbers, (matrix,)))
            if any(four_bits_of(self._stored, name) != format for name in names):
                return False
            sound = read_sound_four_bits(names, format, raw, self._inner.within(matrix))
            if sound is None:
                return False
            found.append(sound)
        return self._experts.put_many(stack, some.numbers, found)

    def _take_expert(self, name: str, raw: Tensors) -> None:
        place = split_name(name)
        assert place is not None
        part, format = self._inner.within(place[2]), four_bits_of(self._stored, name)
        if format is not None and self._reads_four_bits(name):
            self._experts.put(name, read_four_bits(name, format, raw, part, self._dtype))
        else:
            self._experts.put(name, read_values(name, self._specs[name], raw, self._config, self._dtype)[part])

    def _take_matrix(self, name: str, raw: Tensors, tensors: Tensors) -> None:
        spec = self._specs[name]
        part = self._shard.cut(name, spec.shape)
        has_tiles = tuple(self._config.weight_block_size) == (TILE, TILE)
        keeps = self._keeps_packed and self._stored[name].dtype == "F8_E4M3" and has_tiles
        tiles = tiles_of(part, spec.shape) if keeps else None
        if tiles is not None:
            codes, scale = read_e4m3(name, spec, raw, self._config, self._dtype)
            tensors[name], tensors[scale_name(name)] = codes[part].clone(), scale[tiles].contiguous()
            return
        dtype = self._dtype_of(name)
        values = read_values(name, spec, raw, self._config, dtype)[part]
        tensors[name] = values.to(self._device, dtype, copy=True).contiguous()

    def _take_rows(self, name: str, to: slice, raw: Tensors, tensors: Tensors) -> None:
        spec = self._specs[name]
        part, dtype = self._shard.cut(name, spec.shape), self._dtype_of(name)
        if name not in tensors:
            tensors[name] = torch.empty(cut_shape(spec.shape, part), dtype=dtype, device=self._device)
        tensors[name][to] = read_values(name, spec, raw, self._config, dtype)[:, part[1]]

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor which is not kept as it is stored is used in."""
        kind = self._specs[name].kind
        if kind == "float32" and self._is_large(name) and self._stored[name].dtype == "BF16":
            return torch.bfloat16  # the model would make it that (layers.narrow), after a copy of twice the size
        return {"matrix": self._dtype, "float32": torch.float32, "ids": torch.int64}[kind]

    def _tell(self, num_bytes: int) -> None:
        """Say what was loaded and how, and which experts do not stay in four bits though they were to."""
        say, read, dtype = self._say, self.stats, str(self._dtype).removeprefix("torch.")
        say(
            f"weights: {counted(len(self._specs), 'tensor')}, {num_bytes / 1e9:.3f} GB as {dtype}, "
            f"{read.read_bytes / 1e9:.3f} GB read in {read.seconds:.1f} s"
        )
        for format, count in sorted(collections.Counter(self.packed.values()).items()):
            what = counted(count, "matrix of experts stays", "matrices of experts stay")
            say(f"weights: {what} in four bits ({format})")
        if self.dequantized:
            stack, reason = next(iter(self.dequantized.items()))
            more = f" (and {len(self.dequantized) - 1} more)" if len(self.dequantized) > 1 else ""
            say(f"weights: no decode kernels for {stack}{more}, its experts are dequantised: {reason}")
        if self.skipped:
            say(f"weights: read past {counted(len(self.skipped), 'tensor')} of mtp.* (draft blocks are not used)")


def scale_name(name: str) -> str:
    """Return what the scales of a matrix `….weight` are called among loaded tensors."""
    return name.removesuffix("weight") + "scale"


def _names(prefix: str, numbers: list[int], matrices: tuple[str, ...] = ("w1", "w2", "w3")) -> Iterator[str]:
    """Yield the names of experts' matrices, of one expert after the other."""
    return (f"{prefix}.{number}.{matrix}.weight" for number in numbers for matrix in matrices)
