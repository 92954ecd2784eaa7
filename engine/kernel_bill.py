"""KernelBill: where the time of a decode step goes, from a Chrome trace of some steps, beside the floor of each part.

On a device several kernels run at once: a launch with programmatic dependence begins while the one before is at work,
and waits for it. Each instant belongs to the kernel that has been running longest; what a kernel is billed is then what
it adds behind those before it, and the lines add up to the step. On the CPU operations call one another, and each
instant belongs to the innermost. Instants at which nothing runs are lines of their own, inside a step and between two.

Traces are what torch.profiler writes. No torch here: a stored trace can be read anywhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.kernel_parts import FIRST_OF_STEP, LAST_OF_STEP, parts_of, short
from engine.step_floor import Ceilings, Part

IDLE_INSIDE = "device idle inside a step"
IDLE_BETWEEN = "device idle between steps"
OUTSIDE = "outside operations"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Launch(NamedTuple):
    """One kernel, copy or operation of a trace. Times in microseconds.   grid: of a kernel, as "132x16"."""

    name: str
    start: float
    end: float
    grid: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Launches in the order in which they began. is_device: they ran on a GPU; else they are operations of the CPU."""

    launches: list[Launch]
    is_device: bool


@dataclasses.dataclass(slots=True)
class Kernel:
    """Launches of one kernel with one grid. calls, us: of a step."""

    calls: float = 0.0
    us: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A part of the step. kernels: by name and grid.   us: of a step.   floor_us: None where there is no floor."""

    part: str
    kernels: dict[str, Kernel]
    us: float
    floor_us: float | None

    @property
    def calls(self) -> float:
        return sum(kernel.calls for kernel in self.kernels.values())

    @property
    def over_floor(self) -> float | None:
        """Achieved over floor; None without a floor."""
        return self.us / self.floor_us if self.floor_us else None


@dataclasses.dataclass(frozen=True, slots=True)
class KernelBill:
    """lines: dearest first; they add up to step_us, the mean length of `steps` whole steps under the profiler."""

    lines: list[Line]
    step_us: float
    steps: int

    def speedup(self, line: Line) -> float:
        """Return how many times faster the step would be if the line were free; infinity if it is all there is."""
        left = self.step_us - line.us
        return self.step_us / left if left > 0 else float("inf")

    @property
    def floor_us(self) -> float:
        return sum(line.floor_us or 0.0 for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        """Return the bill with derived figures; none is infinite or NaN."""
        return {
            "steps": self.steps,
            "step_us": self.step_us,
            "floor_us": self.floor_us,
            "lines": [
                {
                    "part": line.part,
                    "share": line.us / self.step_us,
                    "calls": line.calls,
                    "us_per_call": line.us / line.calls if line.calls else None,
                    "us": line.us,
                    "floor_us": line.floor_us,
                    "over_floor": line.over_floor,
                    "speedup_if_free": self.speedup(line) if line.us < self.step_us else None,
                    "kernels": {
                        name: {"calls": kernel.calls, "us": kernel.us}
                        for name, kernel in sorted(line.kernels.items(), key=lambda item: -item[1].us)
                    },
                }
                for line in self.lines
            ],
        }


def read_trace(path: Path) -> Trace:
    """Return the launches of a Chrome trace: those of the device, else the operations of the busiest thread.

    Raises ValueError for a file that is no trace, or holds neither.
    """
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: no Chrome trace ({error}); give a file that isthmus profile --trace has written"
        ) from None
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            by_kind[event.get("cat", "")].append(event)
    found = [event for kind in _ON_DEVICE for event in by_kind[kind]]
    is_device = bool(by_kind["kernel"])
    if not is_device:
        threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
        for event in by_kind["cpu_op"]:
            threads[event["tid"]].append(event)
        found = max(threads.values(), key=len, default=[])
    if not found:
        raise ValueError(f"{path}: neither kernels nor operations in it; profile while steps run")
    launches = [
        Launch(e["name"], float(e["ts"]), float(e["ts"]) + float(e["dur"]), _grid(e.get("args", {}))) for e in found
    ]
    return Trace(sorted(launches, key=lambda launch: (launch.start, -launch.end)), is_device)


def _grid(args: dict[str, Any]) -> str:
    """Return the grid of a kernel without the dimensions that are 1."""
    return "x".join(str(size) for size in args.get("grid", ()) if size != 1)


def make_bill(trace: Trace, *, steps: int, floor: Sequence[Part] = (), device: Ceilings | None = None) -> KernelBill:
    """Return the bill of a trace.

    steps: in the trace, where its kernels do not tell. On a device a step ends with a kernel of its own; what lies
    before the first end and behind the last one is no whole step and is left out.
    floor: of the mean step, see StepFloor.parts.   device: whose ceilings; None: no floor is shown.
    """
    launches, begin = trace.launches, trace.launches[0].start
    ends = [at for at, launch in enumerate(launches) if launch.name == LAST_OF_STEP]
    if len(ends) > 1:
        begin, steps = launches[ends[0]].end, len(ends) - 1
        launches = launches[ends[0] + 1 : ends[-1] + 1]
    if trace.is_device:
        parts, (own, idle) = parts_of([launch.name for launch in launches]), _by_oldest(launches, begin)
        between = _between_steps(launches, idle, is_between=len(ends) > 1)
        lost = {IDLE_BETWEEN: between, IDLE_INSIDE: sum(idle) - between}
    else:
        parts, (own, outside) = [launch.name for launch in launches], _by_innermost(launches)
        lost = {OUTSIDE: outside}

    us: dict[str, float] = defaultdict(float)
    kernels: dict[str, dict[str, Kernel]] = defaultdict(lambda: defaultdict(Kernel))
    for launch, part, length in zip(launches, parts, own, strict=True):
        us[part] += length / steps
        kernel = kernels[part][f"{short(launch.name)} {launch.grid}".rstrip()]
        kernel.calls, kernel.us = kernel.calls + 1 / steps, kernel.us + length / steps
    us |= {name: length / steps for name, length in lost.items()}
    floors = {part.name: part.floor_us(device) for part in floor} if device else {}
    lines = [Line(part, dict(kernels[part]), length, floors.get(part) or None) for part, length in us.items()]
    lines += [Line(part, {}, 0.0, least) for part, least in floors.items() if part not in us and least]
    return KernelBill(sorted(lines, key=lambda line: -line.us), sum(us.values()), steps)


def _by_oldest(launches: Sequence[Launch], begin: float) -> tuple[list[float], list[float]]:
    """Return what each launch adds behind those that began before it, and how long nothing ran before it."""
    own, idle, until = [], [], begin
    for launch in launches:
        idle.append(max(0.0, launch.start - until))
        own.append(max(0.0, launch.end - max(launch.start, until)))
        until = max(until, launch.end)
    return own, idle


def _by_innermost(launches: Sequence[Launch]) -> tuple[list[float], float]:
    """Return the own time of operations that call one another, and how long none ran between the first and the last."""
    own = [launch.end - launch.start for launch in launches]
    outside, until = 0.0, launches[0].start
    callers: list[int] = []
    for at, launch in enumerate(launches):
        while callers and launches[callers[-1]].end <= launch.start:
            callers.pop()
        if callers:
            own[callers[-1]] -= launch.end - launch.start
        else:
            outside += max(0.0, launch.start - until)
            until = max(until, launch.end)
        callers.append(at)
    return [max(0.0, length) for length in own], outside


def _between_steps(launches: Sequence[Launch], idle: Sequence[float], *, is_between: bool) -> float:
    """Return how long nothing ran between a step's last kernel and the next one's first.

    is_between: the launches begin there.
    """
    total = 0.0
    for launch, length in zip(launches, idle, strict=True):
        total += length if is_between else 0.0
        is_between = launch.name == LAST_OF_STEP or (is_between and launch.name != FIRST_OF_STEP)
    return total
