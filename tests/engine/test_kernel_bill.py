"""The kernel bill of a trace written by hand: whose time is whose, and that nothing is hidden."""

import ast
import json
from pathlib import Path

import pytest

from engine.kernel_bill import IDLE_BETWEEN, IDLE_INSIDE, OUTSIDE, Kernel, Launch, Trace, make_bill, read_trace
from engine.kernel_parts import PARTS, PRODUCTS, is_exchange, parts_of, short
from engine.step_floor import Part

KERNELS = Path(__file__).parents[2] / "kernels"
LAYER = [
    ("spread_kernel", "hyper-connections"),
    ("finish_kernel", "hyper-connections"),
    ("few_kernel", "projections"),
    ("few_kernel", "projections"),
    ("cache_write_kernel", "cache write"),
    ("few_kernel", "projections"),
    ("logits_kernel", "indexer"),
    ("attention_kernel", "attention"),
    ("few_kernel", "output"),
    ("many_kernel", "output"),
    ("spread_kernel", "hyper-connections"),
    ("finish_kernel", "hyper-connections"),
    ("few_kernel", "shared expert"),
    ("gate_kernel", "gate"),
    ("up_kernel", "routed experts"),
    ("few_kernel", "shared expert"),
    ("down_kernel", "routed experts"),
]
END = [
    ("spread_kernel", "hyper-connections"),
    ("few_kernel", "head"),
    ("scan_kernel", "sampling"),
    ("choose_kernel", "sampling"),
    ("end_step_kernel", "begin and end"),
]


class Device:
    bandwidth, bf16 = 1e12, 1e15


def trace(*launches):
    return Trace([Launch(*launch) for launch in launches], is_device=True)


def us_of(bill):
    return {line.part: line.us for line in bill.lines}


def test_products_are_told_apart_by_what_stands_around_them():
    kernels, parts = zip(*LAYER, *LAYER, *END, strict=True)
    assert parts_of(kernels) == list(parts)


def test_exchanges_stand_between_parts_and_change_none():
    """Behind attention's output and behind the experts, whichever way sums go."""
    exchange = [("one_shot_kernel", "exchange"), ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "exchange")]
    places = [at for at, (kernel, _) in enumerate(LAYER) if kernel == "many_kernel"]
    layer = [*LAYER[: places[0] + 1], exchange[0], *LAYER[places[0] + 1 :], exchange[1]]
    kernels, parts = zip(*layer, *layer, *END, strict=True)
    assert parts_of(kernels) == list(parts)


def test_every_kernel_of_ours_has_a_part():
    names = {
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and not node.name.startswith("_")
        if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    stand_ins = {"sublayer_kernel"}  # of kernels/hyper_connection_bench.py
    billed = {kernel for kernels in PARTS.values() for kernel in kernels} | {*PRODUCTS, *filter(is_exchange, names)}
    assert names - billed == stand_ins


def test_an_unknown_kernel_is_a_line_of_its_own_under_a_name_that_fits():
    name = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1>>(int)"
    )
    assert short(name) == "vectorized_elementwise_kernel Fill"
    bill = make_bill(trace(("new_kernel", 0, 3), ("up_kernel", 3, 4)), steps=1)
    assert us_of(bill)["new_kernel"] == 3


def test_a_kernel_that_waits_for_the_one_before_is_billed_for_what_it_adds():
    bill = make_bill(trace(("attention_kernel", 0, 10), ("up_kernel", 1, 12), ("sum_kernel", 2, 9)), steps=1)
    assert us_of(bill) == {"attention": 10, "routed experts": 2, IDLE_INSIDE: 0, IDLE_BETWEEN: 0}


def test_lines_add_up_to_whole_steps_and_what_is_cut_off_does_not_count():
    step = [("begin_step_kernel", 0, 2), ("up_kernel", 3, 6), ("end_step_kernel", 6, 8), ("Memcpy DtoH", 9, 9.5)]
    launches = [(name, start + 20 * n, end + 20 * n) for n in range(3) for name, start, end in step]
    bill = make_bill(trace(*launches[1:]), steps=99)
    assert bill.steps == 2
    assert bill.step_us == pytest.approx(20)
    assert us_of(bill) == {
        "begin and end": pytest.approx(4),
        "routed experts": pytest.approx(3),
        "Memcpy DtoH": pytest.approx(0.5),
        IDLE_BETWEEN: pytest.approx(11.5),
        IDLE_INSIDE: pytest.approx(1),
    }


def test_calls_floor_and_ceiling_stand_beside_the_time():
    bill = make_bill(
        trace(("up_kernel", 0, 4), ("down_kernel", 4, 6), ("attention_kernel", 6, 8)),
        steps=2,
        floor=[Part("routed experts", 1, 1e6, 0), Part("gate", 1, 2e6, 0)],
        device=Device(),
    )
    dearest, attention, gate, *_ = sorted(bill.lines, key=lambda line: (-line.us, -(line.floor_us or 0)))
    assert (dearest.part, dearest.calls, dearest.floor_us, dearest.over_floor) == ("routed experts", 1, 1, 3)
    assert bill.speedup(dearest) == 4
    assert (attention.part, attention.over_floor) == ("attention", None)
    assert (gate.part, gate.us, gate.floor_us) == ("gate", 0, 2)  # what has no kernel of its own is not forgotten
    json.dumps(bill.to_json(), allow_nan=False)


def test_launches_of_one_kernel_are_told_apart_by_their_grids():
    launches = [("up_kernel", 0, 4, "64"), ("up_kernel", 4, 9, "64"), ("up_kernel", 9, 10, "8x2")]
    (line,) = [line for line in make_bill(trace(*launches), steps=1).lines if line.part == "routed experts"]
    assert line.kernels == {"up_kernel 64": Kernel(2, 9), "up_kernel 8x2": Kernel(1, 1)}


def test_operations_of_the_cpu_are_billed_without_those_they_call():
    launches = [Launch("linear", 0, 10), Launch("mm", 2, 8), Launch("add", 12, 13)]
    bill = make_bill(Trace(launches, is_device=False), steps=1)
    assert us_of(bill) == {"linear": 4, "mm": 6, "add": 1, OUTSIDE: 2}


def test_a_trace_without_launches_and_a_file_that_is_none_are_refused(tmp_path):
    path = tmp_path / "trace.json"
    for text, problem in (
        ("{}", "no Chrome trace"),
        ("[1]", "no Chrome trace"),
        ('{"traceEvents": []}', "while steps run"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=problem):
            read_trace(path)


def test_of_a_trace_with_kernels_nothing_else_is_read_but_copies(tmp_path):
    path = tmp_path / "trace.json"
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9, "tid": 1},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH", "ts": 5.5, "dur": 1, "tid": 7},
        {"ph": "X", "cat": "kernel", "name": "up_kernel", "ts": 1, "dur": 2, "tid": 7, "args": {"grid": [3, 1, 2]}},
        {"ph": "i", "cat": "kernel", "name": "marker", "ts": 1},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_trace(path) == trace(("up_kernel", 1, 3, "3x2"), ("Memcpy DtoH", 5.5, 6.5))
