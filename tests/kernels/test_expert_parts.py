"""Rows of experts, added up on the CPU, and what is refused."""

import dataclasses

import pytest
import torch

from kernels.expert_parts import ExpertParts, add_up
from kernels.hyper_connection_inputs import draw_parts


def drawn(tokens=3, top_k=3, padding=0):
    return draw_parts(torch.Generator().manual_seed(0), tokens, 64, top_k=top_k, padding=padding)


def test_a_token_s_sum_is_that_of_its_choices_rows_in_their_order_and_then_of_what_is_added():
    y = drawn()
    got = add_up(y)
    for token in range(3):
        wanted = torch.zeros(64)
        for expert, rank in zip(y.ids[token].tolist(), y.rank[token].tolist(), strict=True):
            wanted = wanted + y.parts[int(y.first[expert]) + rank]
        assert torch.equal(got[token], wanted + y.add[token].float())


def test_padding_has_no_rows():
    y = drawn(2, padding=2)
    assert torch.equal(add_up(y)[2:], y.add[2:].float())
    assert bool((add_up(dataclasses.replace(y, add=None))[2:] == 0).all())


def test_a_sum_is_rounded_once():
    y = drawn()
    assert torch.equal(add_up(y, out_dtype=torch.bfloat16), add_up(y).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parts": torch.zeros(8, 64)}, r"parts \(8, 64\) torch.float32: wanted 9 rows"),
        ({"parts": torch.zeros(9, 64, dtype=torch.bfloat16)}, "torch.bfloat16: wanted 9 rows of float32"),
        ({"rank": torch.zeros(3, 2, dtype=torch.int32)}, r"rank \(3, 2\) of ids \(3, 3\)"),
        ({"add": torch.zeros(3, 63)}, r"add \(3, 63\): wanted \(3, 64\)"),
        ({"add": torch.zeros(64, 3).T}, "add .* wanted contiguous"),
        ({"parts": torch.zeros(1, 1).expand(9, 1 << 28)}, "less than 2.31 values"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        ExpertParts(**{field.name: getattr(drawn(), field.name) for field in dataclasses.fields(ExpertParts)} | change)
