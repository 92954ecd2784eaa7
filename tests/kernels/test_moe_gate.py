"""The gate on the CPU: its reference is the product and then the routing; what does not fit is refused."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kernels.moe import expert_scores, route


def _cases():
    name = "moe_gate_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


make_case = _cases().make_case


@pytest.mark.parametrize("by_table", [False, True])
def test_choices_equal_those_of_a_prefill(by_table):
    case = make_case(7, by_table=by_table)
    chosen = case.routing["table"][case.routing["token_ids"]] if by_table else None
    ids, weights = route(
        expert_scores(case.x.float(), case.gate.float()), bias=case.routing.get("bias"), chosen=chosen, top_k=3,
        scaling=1.5,
    )  # fmt: skip
    got = case.run()
    assert torch.equal(got.ids.long(), ids) and torch.equal(got.weights, weights)


def test_wrong_choices_are_noticed():
    """The judge of the kernel: another expert than the reference's is refused, the reference's are not."""
    case = make_case(7, padding=1)
    assert case.fault() == ""
    right = case.run()
    right.ids[3, 1] = (set(range(20)) - set(right.ids[3].tolist())).pop()
    case.run = lambda: right
    assert case.fault().startswith("a choice is ")


def test_no_tokens_at_all():
    assert make_case(0).run().ids.shape == (0, 3)


def test_what_does_not_fit_is_refused():
    case = make_case(2)
    with pytest.raises(ValueError, match=r"gate \(20, 64\)"):
        _cases().Case(case.x, case.gate[:, :64], case.routing).run()
    with pytest.raises(ValueError, match="wanted contiguous bfloat16"):
        _cases().Case(case.x, case.gate.float(), case.routing).run()
    with pytest.raises(ValueError, match=r"x of torch\.float16"):
        _cases().Case(case.x.half(), case.gate, case.routing).run()
    with pytest.raises(ValueError, match="top_k 21 of 20 experts"):
        _cases().Case(case.x, case.gate, case.routing | {"top_k": 21}).run()
    case = make_case(2, experts=40)
    with pytest.raises(ValueError, match="top_k 32: at most 31"):
        _cases().Case(case.x, case.gate, case.routing | {"top_k": 32}).run()
