"""StepProfiler: runs torch.profiler over some steps and leaves a Chrome trace. RankProfile: the same inside a rank.

Kernels are recorded by CUPTI's activity interface, which needs no root and sees the kernels of replayed graphs. Steps
take longer under it, kernels hardly do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from engine.kernel_bill import KernelBill, Trace, make_bill, read_trace
from engine.model.moe import keeps_packed
from engine.plan import Profile, Profiled, StepPlan
from engine.served_model import served_model, shard_of
from engine.step_floor import Part, StepFloor, formats_of
from kernels.gpu_timer import Device, describe

if TYPE_CHECKING:
    from engine.runner import ModelRunner


class StepProfiler:
    """One trace, from `start` to `stop`, which must be called by the same thread."""

    def __init__(self, device: torch.device, path: Path) -> None:
        """path: of the trace, whose folder exists."""
        self._device, self._path = device, path
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        # Graphs that were captured before must outlive the profiler's tear-down and its next start.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
        self._profile = profile(activities=activities)

    def start(self) -> None:
        """Begin with what is launched from now on."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.start()

    def stop(self) -> Trace:
        """Wait for the device, write the trace and return what ran. Raises ValueError if nothing did."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        return read_trace(self._path)


class RankProfile:
    """A profile that a leader has asked this rank for; `on_plan` and `on_result` frame each step."""

    def __init__(self, runner: ModelRunner, request: Profile, path: Path) -> None:
        self._runner, self._request, self._path = runner, request, path
        self._profiler: StepProfiler | None = None
        self._begun = 0.0
        self._numbers: set[int] = set()  # of plans that it has seen and that have not been collected
        self._plans = self._results = self._tokens = self._rows = self._positions = 0

    def on_plan(self, plan: StepPlan) -> None:
        """Hear of a plan before it is launched; the profile begins with the first that has steps."""
        if not plan.steps:
            return
        if self._profiler is None:
            self._profiler = StepProfiler(self._runner.device, self._path)
            self._profiler.start()
            self._begun = time.perf_counter()
        self._numbers.add(plan.number)
        self._plans += 1
        self._rows += len(plan.steps)
        self._tokens += sum(len(step.token_ids) for step in plan.steps)
        self._positions += sum(step.start + len(step.token_ids) for step in plan.steps)

    def on_result(self, number: int) -> Profiled | None:
        """Hear that the tokens of a plan have been collected; return the answer when there have been enough."""
        self._results += number in self._numbers
        self._numbers.discard(number)
        # One more than asked for: the first may have begun before the profile, and is no whole step then.
        return self.finish() if self._results > self._request.steps else None

    def finish(self) -> Profiled:
        """End the profile with the steps that it has seen."""
        rank, number = 0, self._request.number
        if self._profiler is None:
            return Profiled(rank=rank, number=number, error="no step has run; profile while requests do")
        seconds = time.perf_counter() - self._begun
        try:
            trace = self._profiler.stop()
        except ValueError as problem:
            return Profiled(rank=rank, number=number, error=str(problem))
        batch, context = self._rows / self._plans, self._positions / self._rows
        device = describe(self._runner.device) if trace.is_device else None
        floor = floor_of(self._runner).parts(batch, context) if self._tokens == self._rows else []
        bill = make_bill(trace, steps=self._plans, floor=floor, device=device)
        report = report_of(bill, device, floor, batch=batch, context=context, step_ms=1000 * seconds / self._plans)
        return Profiled(rank=rank, number=number, report=msgspec.json.encode(report | {"trace": str(self._path)}))


def floor_of(runner: ModelRunner) -> StepFloor:
    """Return the floor of a loaded runner's decode steps."""
    config, model = runner.config, served_model(runner.config).config
    shard = shard_of(config, model)
    formats = formats_of(config, model, runner.cache.layout, keeps_packed=keeps_packed(runner.device))
    return StepFloor(model, formats, shards=shard.count)


def report_of(
    bill: KernelBill, device: Device | None, floor: Sequence[Part], *, batch: float, context: float, step_ms: float
) -> dict[str, Any]:
    """Return a profile as JSON takes it. step_ms: as measured on the host; device: None where there is no GPU."""
    return {
        "device": device.name if device else "CPU",
        "bandwidth": device.bandwidth if device else None,
        "floor_parts": {part.name: {"bytes": part.num_bytes, "flops": part.flops} for part in floor},
        "batch": batch,
        "context": context,
        "step_ms": step_ms,
        "bill": bill.to_json(),
    }
