"""What the bench makes of times, with a clock of our own; its times themselves need a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from kernels import bench as benching
from kernels import sanitize
from kernels.bench import COPIES, Bench, Surroundings, collect, measure
from kernels.gpu_timer import Device

CPU = torch.device("cpu")
DEVICE = Device("a device", bandwidth=1e12, bf16=1e14, l2=1 << 16, source="made up")


class Clock:
    """A timer for which a launch costs what it returns, in microseconds; everything else costs 100."""

    def __init__(self):
        self.graphs = []

    def __call__(self, launches):
        costs = [launch() for launch in launches]
        costs = [cost if isinstance(cost, float) else 100.0 for cost in costs]
        self.graphs.append(costs)
        return [sum(costs)] * 5


def bench(op, cost, *, chain=None, **counts):
    return Bench(
        "attention", op, "B=1", lambda device, i: lambda: cost + i / 10, chain=chain, **{"bytes": 10**6, **counts}
    )


def rows_of(one, chain):
    clock = Clock()
    rows = measure(one, chain, Surroundings.prepare(DEVICE, CPU, clock), DEVICE, "abc")
    return {row.condition: row for row in rows}, clock


MEAN = 7.0 + sum(range(COPIES)) / COPIES / 10  # of the rotated inputs


@pytest.mark.parametrize("condition", ["alone", "cold", "chain"])
def test_every_condition_gives_the_cost_of_the_operation_itself(condition):
    one = bench("a", 7.0, chain="layer")
    rows, _ = rows_of(one, [bench("before", 3.0, chain="layer"), one, bench("after", 5.0, chain="layer")])
    assert rows[condition].us == pytest.approx(MEAN, abs=0.01)


def test_launches_rotate_over_all_inputs():
    one = bench("a", 7.0)
    _, clock = rows_of(one, [one])
    alone = clock.graphs[1]  # after the flush
    assert alone == [7.0 + i / 10 for i in range(COPIES)]


def test_a_chain_keeps_its_order_between_the_neighbours():
    one = bench("a", 7.0, chain="layer")
    _, clock = rows_of(one, [bench("before", 3.0, chain="layer"), one])
    whole, rest = clock.graphs[3:5]
    assert whole[:4] == [100.0, 3.0, 7.0, 100.0] and rest[:3] == [100.0, 3.0, 100.0]


@pytest.mark.parametrize(("counts", "floor"), [({"bytes": 10**6}, 1.0), ({"bytes": 10**6, "flops": 10**9}, 10.0)])
def test_the_floor_is_the_longer_of_bytes_and_operations(counts, floor):
    one = bench("a", 20.0, **counts)
    rows, _ = rows_of(one, [one])
    assert rows["alone"].floor_us == floor
    assert rows["alone"].fraction == pytest.approx(floor / (MEAN + 13), abs=0.001)


def test_shipped_benches_and_samples_are_well_formed():
    benches = collect("benches") + collect("samples")
    assert all(one.group in benching.GROUPS and one.bytes > 0 and one.flops >= 0 for one in benches)
    for which in ("benches", "samples"):
        names = [(one.op, one.shape) for one in collect(which)]
        assert len(names) == len(set(names)), f"{which} of the same name and shape can't be told apart"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [lambda: benching.main(["--group", "attention"]), lambda: sanitize.main([])])
def test_without_a_gpu_it_says_so(command, capsys, monkeypatch):
    monkeypatch.setattr(benching, "collect", lambda which="benches": [bench("a", 1.0)])
    monkeypatch.setattr(sanitize, "collect", lambda which: [bench("a", 1.0)])
    assert command() == 1
    assert "no CUDA device here" in capsys.readouterr().err


def test_list_prints_what_would_be_measured(capsys, monkeypatch):
    monkeypatch.setattr(benching, "collect", lambda: [bench("a", 1.0), bench("b", 1.0, flops=7)])
    assert benching.main(["--group", "attention", "--filter", "b", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["b", "B=1", "-", "1,000,000", "7"]


def test_a_failing_kernel_costs_only_its_own_row(monkeypatch, capsys, tmp_path):
    def broken(device, i):
        raise ValueError("misaligned")

    monkeypatch.setattr(benching, "collect", lambda: [Bench("attention", "bad", "B=1", broken, 1), bench("a", 7.0)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch, "device", lambda *_: CPU)
    monkeypatch.setattr(benching, "warm_clocks", lambda target: None)
    monkeypatch.setattr(benching, "describe", lambda target: DEVICE)
    monkeypatch.setattr(benching, "graph_timer", Clock())
    assert benching.main(["--group", "attention", "--json", str(tmp_path / "rows.json")]) == 1
    said = capsys.readouterr()
    assert "FAIL bad B=1: ValueError: misaligned" in said.err and "7.35" in said.out
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["condition"] for row in rows] == ["alone", "cold", "chain"]
    assert {"op", "shape", "us", "floor_us", "commit", "device"} <= set(rows[0])
