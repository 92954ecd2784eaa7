"""The projection of measured decode steps to four RTX PRO 6000: from a report of `bench step`, into it, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.report import number
from bench.step_plot import STOCK_MS
from engine.flags import ConfigError
from engine.model.config import DeepSeekV4Config
from engine.model.shard import Shard
from engine.step_floor import Formats, StepFloor
from engine.step_projection import GROUP, Chip, StepProjection, load_counts

_NOTES = """\
sum       max(bytes / bandwidth, instructions / issue rate) of each part, added up
fixed     what the measured step took beyond its sum: launches, dependences, parts whose instructions are not counted
exchange  all-reduces of the group over PCIe, one-shot kernels as measured by others on four such cards
at most   if nothing were fixed, and all of the measured step as much slower as memory is, exchange added
stock     a step of the stock server on four such cards, 40 + 31 N ms, over the projected one"""


def project(report: dict[str, Any]) -> dict[str, Any]:
    """Return the `projection` of a report of `bench step`. Raises ConfigError where it can't be projected, and why."""
    conditions = report["conditions"]
    counts = load_counts()
    try:
        model = msgspec.convert(conditions["model"], DeepSeekV4Config)
        shards = Shard.parse(conditions["shard"]).count
        projection = StepProjection(
            StepFloor(model, Formats(**conditions["formats"]), shards=shards), counts["per_unit"]
        )
        if projection.measured_on.name not in conditions["device"]:
            raise ValueError(f"device {conditions['device']}: wanted a report measured on an H200")
        found = [
            projection.step(run["batch"], run["context"], run["step_ms"]).to_json()
            for run in report["runs"]
            if run["batch"] <= projection.most
        ]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"--project: {error}") from error
    return {
        "what": "a projection, not measured",
        "cards": GROUP,
        "card": _chip(projection.card),
        "measured_on": _chip(projection.measured_on),
        "counts": {"commit": counts["commit"], "triton": counts["triton"]},
        "runs": found,
        "left_out": [run["batch"] for run in report["runs"] if run["batch"] > projection.most],
    }


def show_projection(projection: dict[str, Any], console: Console) -> None:
    """Print the steps, and for each context what every part of them takes on the card and is bound by."""
    card, measured = projection["card"], projection["measured_on"]
    console.print(
        f"Projection, not measured: decode steps of {projection['cards']} {card['name']} from those of an "
        f"{measured['name']}; instructions counted at commit {projection['counts']['commit']}",
        markup=False,
    )
    for chip in (measured, card):
        console.print(
            f"{chip['name']}: {chip['bandwidth'] / 1e9:,.0f} GB/s, {chip['issue_rate'] / 1e12:.1f}e12 instructions/s",
            markup=False,
        )
    heads = (f"{measured['name']} ms", "its sum", "fixed", "sum", "exchange", "step ms", "tokens/s", "at most", "stock")
    table = Table("batch", "context", *heads, box=None, header_style="bold")
    for column in table.columns:
        column.justify = "right"
    for run in projection["runs"]:
        stock_ms = STOCK_MS[0] + STOCK_MS[1] * run["batch"]
        names = ("measured_ms", "measured_sum_ms", "fixed_ms", "sum_ms", "all_reduce_ms", "step_ms")
        table.add_row(
            f"{run['batch']}",
            f"{run['context']:,}",
            *(number(run[name], 2) for name in names),
            number(run["tokens_per_s"], 0),
            number(run["scaled_ms"], 2),
            f"{number(stock_ms / run['step_ms'], 0)} x",
        )
    console.print(table)
    for parts in _part_tables(projection):
        console.print(parts)
    console.print(_NOTES, markup=False)
    if projection["left_out"]:
        left = ", ".join(map(str, projection["left_out"]))
        console.print(f"not projected: batch {left}, for which no instructions are counted", markup=False)


def _part_tables(projection: dict[str, Any]) -> Iterator[Table]:
    for context in dict.fromkeys(run["context"] for run in projection["runs"]):
        runs = [run for run in projection["runs"] if run["context"] == context]
        table = Table(f"µs at {context:,}", box=None, header_style="bold")
        for run in runs:
            table.add_column(f"batch {run['batch']}", justify="right")
        for name in runs[0]["parts"]:
            bounds = [run["parts"][name]["projected"] for run in runs]
            times = [max(bound["bytes_us"], bound["issue_us"]) for bound in bounds]
            cells = [f"{number(us, 0)} {bound['bound']}" for us, bound in zip(times, bounds, strict=True)]
            table.add_row(name, *cells)
        yield table


def _chip(chip: Chip) -> dict[str, Any]:
    return dataclasses.asdict(chip) | {"issue_rate": chip.issue_rate}
