"""StepProjection: what a decode step measured on an H200 would take on four RTX PRO 6000. A projection; no torch here.

    step = sum of max(bytes / bandwidth, instructions / issue rate) over the parts, on the new card
         + what the measured step took beyond the same sum on the H200: launches, dependences
         + two all-reduces a layer, over PCIe

Bytes and what is read are step_floor's, instructions per weight or key kernels.instructions'. What has no count there
(gate, the hyper-connections' finish, top-k, cache write, sampling) has its bytes where step_floor has any, and is in
the fixed part for the rest. Times of a part's kernels do not overlap those of others.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.step_floor import MXFP4_BYTES, NVFP4_BYTES, Formats, Part, StepFloor

GROUP = 4  # cards
LANES = 128  # of a multiprocessor, that begin an instruction in each cycle
_KIB = 1024
_BFLOAT16_BYTES = 2
# Microseconds of an all-reduce over PCIe on four such cards, as published for one-shot kernels and for NCCL.
SIZES = tuple(kib * _KIB for kib in (1, 4, 8, 16, 32, 64, 128, 256, 512))
ONE_SHOT_US = (6.1, 6.5, 6.4, 7.7, 9.2, 11.8, 17.6, 28.7, 51.0)
NCCL_US = (13.5, 13.2, 13.9, 14.7, 15.6, 71.2, 24.7, 40.9, 71.7)


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """arch: column of the instruction counts.   bandwidth: bytes a second, as reached.   clock_hz: under load."""

    name: str
    arch: str
    bandwidth: float
    multiprocessors: int
    clock_hz: float

    @property
    def issue_rate(self) -> float:
        """Lane instructions a second."""
        return self.multiprocessors * LANES * self.clock_hz


H200 = Chip("H200", "sm_90", 4.3e12, 132, 1.98e9)
RTX_PRO_6000 = Chip("RTX PRO 6000", "sm_120", 1.597e12, 188, 2.4e9)  # Server Edition


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """Microseconds that a part's bytes and its instructions take on a chip, all calls of a step together."""

    bytes_us: float
    issue_us: float

    @property
    def us(self) -> float:
        return max(self.bytes_us, self.issue_us)

    @property
    def by(self) -> str:
        return "bytes" if self.bytes_us >= self.issue_us else "issue"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProjectedStep:
    """measured, projected: bound of each part on either chip, by its name.   The rest: milliseconds, see the module."""

    batch: int
    context: int
    measured_ms: float
    measured: dict[str, Bound]
    projected: dict[str, Bound]
    all_reduce_ms: float
    nccl_ms: float
    slower: float

    @property
    def measured_sum_ms(self) -> float:
        return sum(bound.us for bound in self.measured.values()) / 1000

    @property
    def sum_ms(self) -> float:
        return sum(bound.us for bound in self.projected.values()) / 1000

    @property
    def fixed_ms(self) -> float:
        """What the step took beyond its sum; 0 if it took less, which says that instructions are counted too high."""
        return max(0.0, self.measured_ms - self.measured_sum_ms)

    @property
    def step_ms(self) -> float:
        return self.sum_ms + self.fixed_ms + self.all_reduce_ms

    @property
    def scaled_ms(self) -> float:
        """The step if nothing were fixed and all of it as much slower as memory is: what it should not exceed."""
        return self.measured_ms * self.slower + self.all_reduce_ms

    @property
    def tokens_per_s(self) -> float:
        """Output of the whole group."""
        return 1000 * self.batch / self.step_ms

    def to_json(self) -> dict[str, Any]:
        """Return all of it, times in the units of their names."""
        return {
            "batch": self.batch,
            "context": self.context,
            "measured_ms": self.measured_ms,
            "measured_sum_ms": self.measured_sum_ms,
            "fixed_ms": self.fixed_ms,
            "sum_ms": self.sum_ms,
            "all_reduce_ms": self.all_reduce_ms,
            "all_reduce_nccl_ms": self.nccl_ms,
            "step_ms": self.step_ms,
            "tokens_per_s": self.tokens_per_s,
            "scaled_ms": self.scaled_ms,
            "parts": {
                name: {
                    "measured_on": dataclasses.asdict(self.measured[name]) | {"bound": self.measured[name].by},
                    "projected": dataclasses.asdict(bound) | {"bound": bound.by},
                }
                for name, bound in self.projected.items()
            },
        }


class StepProjection:
    """floor: of a rank of a group of four.   counts: per_unit of load_counts()."""

    def __init__(
        self, floor: StepFloor, counts: Mapping[str, Any], *, measured_on: Chip = H200, card: Chip = RTX_PRO_6000
    ) -> None:
        """Raises ValueError for ranks and formats whose kernels have not been counted."""
        if floor.shards != GROUP:
            raise ValueError(
                f"shards {floor.shards}: instructions are counted for one of {GROUP} ranks; measure --simulate-rank 0/4"
            )
        for field in dataclasses.fields(Formats):
            value, wanted = getattr(floor.formats, field.name), [getattr(Formats(), field.name)]
            if field.name == "expert":
                wanted = [NVFP4_BYTES, MXFP4_BYTES]
            if value not in wanted:
                raise ValueError(
                    f"formats.{field.name} {value} bytes: instructions are counted for "
                    f"{' or '.join(map(str, wanted))}; measure a rank with packed weights and rows"
                )
        self.floor, self.measured_on, self.card = floor, measured_on, card
        self._counts = counts

    @property
    def most(self) -> int:
        """The largest batch whose kernels have been counted."""
        return max(map(int, self._counts[self.card.arch]))

    def step(self, batch: int, context: int, measured_ms: float) -> ProjectedStep:
        """Return the projection of a measured step. Raises ValueError for a batch beyond `most`."""
        parts = self.floor.parts(batch, context)
        model = self.floor.model
        size = batch * model.hidden_size * _BFLOAT16_BYTES
        calls = 2 * len(model.compress_ratios)
        return ProjectedStep(
            batch=batch,
            context=context,
            measured_ms=measured_ms,
            measured={part.name: self.bound(part, batch, self.measured_on) for part in parts},
            projected={part.name: self.bound(part, batch, self.card) for part in parts},
            all_reduce_ms=calls * all_reduce_us(size, ONE_SHOT_US) / 1000,
            nccl_ms=calls * all_reduce_us(size, NCCL_US) / 1000,
            slower=self.measured_on.bandwidth / self.card.bandwidth,
        )

    def bound(self, part: Part, batch: int, chip: Chip) -> Bound:
        """Return what a part of a step of `batch` tokens is bound by. Raises ValueError for a batch beyond `most`."""
        if batch > self.most:
            raise ValueError(f"batch {batch}: instructions are counted up to {self.most} tokens of a step")
        counts = self._counts[chip.arch]
        per_unit = counts[str(min(tokens for tokens in map(int, counts) if tokens >= batch))]
        instructions = sum(per_unit[name] * count for name, count in part.reads.items())
        return Bound(1e6 * part.num_bytes / chip.bandwidth, 1e6 * instructions / chip.issue_rate)


def all_reduce_us(num_bytes: float, measured: Sequence[float]) -> float:
    """Return microseconds of an all-reduce of `num_bytes`, between the sizes measured and as they end beyond them."""
    if num_bytes <= SIZES[0]:
        return measured[0]
    at = next((at for at, size in enumerate(SIZES) if size >= num_bytes), len(SIZES) - 1)
    low, high = SIZES[at - 1], SIZES[at]
    return measured[at - 1] + (measured[at] - measured[at - 1]) * (num_bytes - low) / (high - low)


def load_counts() -> dict[str, Any]:
    """Return what kernels.instructions has written: `per_unit` and where it comes from."""
    text = importlib.resources.files("kernels").joinpath("instructions.json").read_text(encoding="utf-8")
    counts: dict[str, Any] = json.loads(text)
    return counts
