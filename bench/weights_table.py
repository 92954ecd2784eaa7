"""What `isthmus bench weights` has measured, as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.report import number
from kernels.table import counted


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    conditions, load, cache = report["conditions"], report["load"], report["cache"]
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{conditions['device']}, commit {conditions['commit']}, {conditions['date']}: rank {conditions['shard']}, "
        f"{counted(conditions['layers'], 'layer')}, {conditions['file_bytes'] / 1e9:.2f} GB in "
        f"{counted(conditions['files'], 'file')}",
        markup=False,
    )
    table = Table(box=None, header_style="bold")
    for head in ("", "GB", "s", "GB/s", "cached"):
        table.add_column(head, justify="left" if not head else "right")

    def add(what: str, size: int, run: dict[str, Any]) -> None:
        table.add_row(what, number(size / 1e9, 2), number(run["seconds"], 2), number(run["bytes_per_s"] / 1e9, 2),
                      f"{100 * run['cached']:.0f}%")  # fmt: skip

    copy, ratio = report["copy_bytes_per_s"], report["peak_over_in_flight"]
    add("disk", report["read_bytes"], report["disk"])
    table.add_row("copy", "", "", number(None if copy is None else copy / 1e9, 2), "")
    add("load", report["read_bytes"], load)
    if report["warm"]:
        add("load, page cache warm", report["read_bytes"], report["warm"])
    if cache:
        add("load, writing the weight cache", report["read_bytes"], cache["keeping"])
        add("disk, weight cache", cache["read_bytes"], cache["disk"])
        add("load from the weight cache", cache["read_bytes"], cache["load"])
    console.print(table)
    console.print(
        f"of bound {100 * report['of_bound']:.0f}%; in flight {load['in_flight_bytes'] / 1e6:,.0f} MB, "
        f"peak {load['peak_bytes'] / 1e6:,.0f} MB ({'with the model' if ratio is None else f'{ratio:.2f} x'}), "
        f"once {report['once_bytes'] / 1e6:,.0f} MB; "
        f"{_told(report['samples'])}"
    )
    if cache:
        console.print(
            f"weight cache: {cache['written_bytes'] / 1e9:.2f} GB written in {cache['extra_seconds']:.2f} s more; "
            f"of bound {100 * cache['of_bound']:.0f}%; {_told(cache['samples'])}"
        )
    for fault in (report["samples"]["faults"] + (cache["samples"]["faults"] if cache else []))[:20]:
        console.print(f"  {fault}", markup=False)


def _told(samples: dict[str, Any]) -> str:
    return f"{counted(samples['compared'], 'sample')}, {samples['values']:,} values, {len(samples['faults'])} differ"
