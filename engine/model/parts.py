"""Parts of a model's tensors, a layer at a time, as they become complete while weight files are read.

Who reads says what a unit becomes (`take`); here its bytes are brought to where it wants them, parts are counted, and
what is going on is told. See lots.py for how files are read.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.lots import Check, Unit, plan_lots, read_lots, staging_bytes

Tensors = dict[str, Tensor]
WeightPart = tuple[int | None, Tensors]
Take = Callable[[Unit, Tensors, Tensors], None]
_TELL_EVERY_S = 1.0


class LoadStats(NamedTuple):
    """read_bytes: of the files.   staging_bytes: of host memory that was read into, all that is ever on its way."""

    read_bytes: int
    seconds: float
    staging_bytes: int


class PartReader:
    """Reads units. stats: of all that was read, once it was."""

    def __init__(
        self,
        units: list[Unit],
        paths: Mapping[str, Path],
        *,
        device: torch.device,
        say: Callable[[str], None],
        check: Check | None = None,
    ) -> None:
        """device: where tensors are wanted.   say: gets a line of text about once a second.   check: see read_lots."""
        self._units, self._paths, self._device, self._say, self._check = units, paths, device, say, check
        self.stats = LoadStats(0, 0.0, 0)

    def parts(self, take: Take, *, on_device: bool = True) -> Iterator[WeightPart]:
        """Yield (part, its tensors), each part once, when `take` has had its last unit.

        take(unit, raw, tensors) puts what a unit holds into its part's tensors. raw: by name, as stored, on the device;
        single numbers on the host; views of memory that is overwritten later. on_device=False: bytes stay on the host,
        to see how fast files are read. Raises OSError that names a file, and what `check` raises.
        """
        left = collections.Counter(unit.part for unit in self._units)
        tensors: dict[int | None, Tensors] = {part: {} for part in left}
        lots = plan_lots(self._units)
        progress = _Progress(sum(lot.num_bytes for lot in lots), self._say)
        for lot, buffer in read_lots(lots, self._paths, pins=self._device.type == "cuda", check=self._check):
            source = buffer.to(self._device, non_blocking=True) if on_device else buffer
            for unit in lot.units:
                take(unit, lot.tensors(unit, source, buffer), tensors[unit.part])
                left[unit.part] -= 1
            for part in {unit.part for unit in lot.units if not left[unit.part]}:
                yield part, tensors.pop(part)
            if self._device.type == "cuda":  # the buffer is overwritten from here on
                torch.cuda.current_stream(self._device).synchronize()
            progress.add(lot.num_bytes)
        self.stats = LoadStats(progress.done, progress.seconds, staging_bytes(lots))


def layer_of(name: str) -> int | None:
    """Return the layer that a tensor belongs to, None for one that belongs to none."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def split_parts(tensors: Tensors) -> Iterator[WeightPart]:
    """Yield tensors as a PartReader does, emptying `tensors`."""
    while tensors:
        part = layer_of(next(iter(tensors)))
        yield part, {name: tensors.pop(name) for name in list(tensors) if layer_of(name) == part}


class _Progress:
    """Says how far reading is, how fast it goes and how long it will take."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._total, self._say, self._began = total, say, time.monotonic()
        self.done, self._told = 0, self._began

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def add(self, num_bytes: int) -> None:
        self.done += num_bytes
        now = time.monotonic()
        if now - self._told < _TELL_EVERY_S:
            return
        self._told, rate = now, self.done / self.seconds
        self._say(
            f"weights: {self.done / 1e9:.1f} of {self._total / 1e9:.1f} GB read, {rate / 1e9:.2f} GB/s, "
            f"{(self._total - self.done) / rate:.0f} s left"
        )
