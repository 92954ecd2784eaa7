"""Where kernels let the next launch begin, and where they wait for the one before, by their order among launches.

The interpreter's waits do nothing; here they, and stores, are written down, by program.
"""

import importlib.util
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

import kernels.gemm_decode as gemm_decode
import kernels.moe_decode as moe_decode
import kernels.moe_gate as moe_gate
from kernels import launch_order
from kernels.launch_order import ASIDE, IN_CHAIN, LEAD, Pair

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")


def _cases(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


gemm_cases, gate_cases, moe_cases = _cases("gemm_cases"), _cases("moe_gate_cases"), _cases("moe_cases")


def few(order):
    return gemm_cases.make_case(2, 32, 512).run(tile=gemm_cases.few_tile(split=2), order=order)


def many(order):
    return gemm_cases.make_case(2, 32, 256).run(tile=gemm_cases.many_tile(split=2), order=order)


def held(order):
    return gemm_cases.make_case(2, 32, 256, quantize=True).run(tile=gemm_cases.held_tile(steps=2), order=order)


def gate(order):
    case = gate_cases.make_case(2, experts=17, hidden=64)
    return moe_gate.route_by_gate(case.x, case.gate, **case.routing, tile=gate_cases.make_tile(), order=order).weights


def up(order):
    case = moe_cases.make_case(2)
    tile = moe_cases.make_tile()
    return moe_decode.first_products(case.expect_routing(), case.w13, limit=case.limit, tile=tile, order=order)


@pytest.fixture
def programs(monkeypatch):
    """Return what each program of the last launch did, in order: [program, ["wait", "begin", "store" ..]]."""
    done = defaultdict(list)

    def note(what):
        def noted(*args, **kwargs):
            done[tuple(interpreter.interpreter_builder.grid_idx)].append(what)
            return plain_store(*args, **kwargs) if what == "store" else None

        return noted

    plain_store = interpreter.InterpreterBuilder.create_masked_store
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", note("store"))
    monkeypatch.setattr(tl.extra.cuda, "gdc_wait", note("wait"))
    monkeypatch.setattr(tl.extra.cuda, "gdc_launch_dependents", note("begin"))
    for module in (gemm_decode, moe_gate, moe_decode):
        monkeypatch.setattr(module, "_pdl", lambda device: (True, {}))
    return done


def clear_before_last(monkeypatch, programs):
    """Forget what launches did that come before the operation's last one."""
    plain = gemm_decode.quantize_rows

    def quantize_rows(*args, **kwargs):
        made = plain(*args, **kwargs)
        programs.clear()
        return made

    monkeypatch.setattr(gemm_decode, "quantize_rows", quantize_rows)


def led():
    """Return an order aside of a launch that has led."""
    pair = Pair()
    pair.lead.take(reads=(), writes=())
    return pair.aside


KERNELS = [few, many, gate, up]


@pytest.mark.parametrize("kernel", [few, many, held], ids=lambda f: f.__name__)
def test_a_lead_lets_the_next_begin_once_every_program_has_waited(kernel, programs, monkeypatch):
    clear_before_last(monkeypatch, programs)
    kernel(Pair().lead)
    assert programs
    for did in programs.values():
        assert did[:2] == ["wait", "begin"] and did.count("begin") == 1


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda f: f.__name__)
def test_a_launch_aside_stores_without_waiting_and_one_program_ends_after_the_lead(kernel, programs):
    kernel(led())
    assert len(programs) > 1
    for program, did in programs.items():
        assert did[0] == "begin" and did.count("begin") == 1
        assert did.count("wait") == (program == (0, 0, 0))
    assert "store" in programs[0, 0, 0]
    assert programs[0, 0, 0][-1] == "wait"


@pytest.mark.parametrize("kernel", [*KERNELS, held], ids=lambda f: f.__name__)
def test_in_the_chain_every_program_waits_before_it_stores(kernel, programs, monkeypatch):
    clear_before_last(monkeypatch, programs)
    kernel(IN_CHAIN)
    for did in programs.values():
        assert sorted(did[:2]) == ["begin", "wait"] and did.count("wait") == 1


@pytest.mark.parametrize("kernel", [few, many], ids=lambda f: f.__name__)
def test_the_order_changes_no_bits(kernel):
    wanted = kernel(IN_CHAIN)
    for order in (Pair().lead, led()):
        assert torch.equal(kernel(order).nan_to_num(), wanted.nan_to_num())


def test_of_two_launches_none_is_aside(programs, monkeypatch):
    clear_before_last(monkeypatch, programs)
    held(led())
    assert all("wait" in did[:2] for did in programs.values())


@pytest.mark.parametrize(("kernel", "least"), [(few, 2), (held, 3)], ids=["few", "held"])
def test_a_lead_keeps_the_memory_of_its_launch_while_its_pair_lives(kernel, least, monkeypatch):
    """Its output, sums of programs that share channels, or quantised activations."""
    made, plain = [], torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        made.append(x.data_ptr())
        return x

    monkeypatch.setattr(gemm_decode.torch, "empty", empty)
    pair = Pair()
    kernel(pair.lead)
    assert len(set(made)) == least
    assert set(made) <= {x.untyped_storage().data_ptr() for x in [*pair.read, *pair.written]}


@pytest.fixture
def taken(monkeypatch):
    """Return the orders of launches of pairs, as they come."""
    found = []
    for kind in (launch_order._Lead, launch_order._Aside):

        def take(self, plain=kind.take, **given):
            found.append(plain(self, **given))
            return found[-1]

        monkeypatch.setattr(kind, "take", take)
    return found


def test_of_many_tokens_the_gate_is_aside_of_the_layer_beside_it(taken):
    case = gate_cases.make_case(17, experts=8, hidden=64)
    layer = gemm_cases.make_case(17, 32, 64, limit=5.0)
    routing, opened = moe_gate.route_beside(case.x, case.gate, layer.weight, layer.scale, limit=5.0, **case.routing)
    assert taken == [LEAD, ASIDE]
    assert torch.equal(routing.ids, moe_gate.route_by_gate(case.x, case.gate, **case.routing).ids)
    layer.x = case.x
    assert torch.equal(opened, layer.run())


def test_the_experts_first_product_is_aside_of_what_is_added_to_them(taken):
    case, made, pair = moe_cases.make_case(1, top_k=1), gemm_cases.make_case(1, 64, 64), Pair()
    tile, routing = moe_cases.make_tile(), case.expect_routing()
    given = {"limit": case.limit, "tiles": (tile, tile)}
    add = made.run(order=pair.lead)
    parts = moe_decode.expert_parts(routing, case.w13, case.w2, add=add, order=pair.aside, **given)
    assert taken == [LEAD, ASIDE]
    assert torch.equal(parts.add, made.run())
    assert torch.equal(parts.parts, moe_decode.expert_parts(routing, case.w13, case.w2, **given).parts)
