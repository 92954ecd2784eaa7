"""Runs of the benchmark against scripted servers, in simulated time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.ladder import Ladder, Plan
from bench.lengths import Lengths
from bench.progress import Progress
from bench.prompts import TextPrompts, TokenPrompts
from bench.workload import Workload

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    """Import a file of this folder: tests are no package."""
    spec = importlib.util.spec_from_file_location(f"bench_tests_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scripted_server = _load("scripted_server")
virtual_time = _load("virtual_time")

Measure = Callable[..., dict[str, Any]]


def plan_for(url: str, *, input_len: str = "16", output_len: str = "40", **options: Any) -> Plan:
    prompts = TextPrompts(None) if options.get("api") == "chat" else TokenPrompts()
    workload = Workload(Lengths.parse(input_len), Lengths.parse(output_len), prompts, seed=0)
    return Plan(url=url, workload=workload, **({"warmup": 0} | options))


async def _measure(script: Any, options: dict[str, Any], bodies: list[dict[str, Any]]) -> dict[str, Any]:
    server = scripted_server.ScriptedServer(script)
    url = await server.start()
    try:
        return await Ladder(plan_for(url, **options), progress=Progress(quiet=True)).run()
    finally:
        bodies += server.bodies
        await server.close()


@pytest.fixture(scope="session")
def measure() -> Measure:
    """Return a function of a script's fields and a plan's options (as `plan`) that returns a report.

    bodies: a list that takes what the server was sent.
    """

    def run(*, plan: dict[str, Any], bodies: list[dict[str, Any]] | None = None, **script: Any) -> dict[str, Any]:
        received: list[dict[str, Any]] = [] if bodies is None else bodies
        report: dict[str, Any] = virtual_time.run(_measure(scripted_server.Script(**script), plan, received))
        return report

    return run


@pytest.fixture(scope="session")
def virtual_run() -> Callable[[Any], Any]:
    run: Callable[[Any], Any] = virtual_time.run
    return run


@pytest.fixture(scope="session")
def server_type() -> Any:
    """Return (ScriptedServer, Script)."""
    return scripted_server.ScriptedServer, scripted_server.Script


@pytest.fixture(scope="session")
def stock(measure: Measure) -> dict[str, Any]:
    """The report on a server whose step takes 40 + 31 N ms, and that computes prompts of a second each in between."""
    return measure(
        prefill_s=1.0,
        prefill_blocks=True,
        plan={"concurrencies": (1, 16, 64), "output_len": "50", "num_requests": None},
    )
