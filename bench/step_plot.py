"""The plot of `isthmus bench step`: step time over batch, measured, at its floor, by both fits, by a stock server."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from bench.step_law import Experts
from engine.flags import ConfigError
from kernels.table import counted

STOCK_MS = (40.0, 31.0)  # a + b N of the server that this one replaces, four RTX PRO 6000


def require_matplotlib() -> None:
    """Raises ConfigError if plots can't be drawn here."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--png: matplotlib is not installed; pip install -e '.[plot]', or write --json here and draw it elsewhere "
            "with --from FILE --png FILE"
        )


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the plot; the form is that of `path`'s ending, PNG or SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    batches = sorted({run["batch"] for run in report["runs"]})
    smooth = np.geomspace(batches[0], batches[-1], 200) if len(batches) > 1 else np.array(batches, float)
    axes.plot(smooth, STOCK_MS[0] + STOCK_MS[1] * smooth, color="0.6", label="stock server, 40 + 31 N (4 GPUs)")
    for at, (context, law) in enumerate(report["step_laws"].items()):
        runs = [run for run in report["runs"] if run["context"] == int(context)]
        x, color, name = [run["batch"] for run in runs], f"C{at}", f"{int(context):,} tokens"
        spread = [[run["step_ms"] - run["p10_ms"] for run in runs], [run["p90_ms"] - run["step_ms"] for run in runs]]
        axes.errorbar(x, [run["step_ms"] for run in runs], yerr=spread, fmt="o", color=color, label=f"{name}, measured")
        axes.plot(x, [run["floor_ms"] for run in runs], "--", color=color, label=f"{name}, floor")
        if law["a_ms"] is None:
            continue
        label = f"{law['a_ms']:.2f} + {law['b_ms']:.3f} N"
        axes.plot(smooth, law["a_ms"] + law["b_ms"] * smooth, ":", color=color, label=label)
        if law["experts"] is not None:
            fit = law["experts"]
            distinct = Experts(fit["total"], fit["chosen"]).distinct(smooth)
            label = f"{fit['a_ms']:.2f} + {fit['c_ms']:.3f} U(N) + {fit['d_ms']:.3f} N"
            axes.plot(smooth, fit["a_ms"] + fit["c_ms"] * distinct + fit["d_ms"] * smooth, color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("sequences in the step, N")
    axes.set_ylabel("milliseconds a decode step")
    conditions = report["conditions"]
    axes.set_title(
        f"{conditions['device']}, rank {conditions['shard']}, {counted(conditions['layers'], 'layer')}", fontsize=10
    )
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    figure.savefig(path)
