"""The decode attention kernel against its torch reference; every pool is NaN but for the rows that may be read."""

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kernels.sparse_attention_decode as module
from kernels.tiles import Tile

# Triton's interpreter turns loop bounds into integers in a way that numpy will refuse one day.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0"),
    pytest.mark.filterwarnings("ignore:All-NaN slice"),  # a maximum over scores that are all NaN
]


def _cases():
    name = "sparse_attention_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
make_case, make_tile = cases.make_case, cases.make_tile

SPANS = [(0, 1), (3, 1), (40, 1), (101, 1)]
DESIGNS = [{"SWAP": 0}, {"SWAP": 1}, {"SPREAD": 1}]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Every tensor that the wrapper allocates is NaN to begin with."""
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        return x.fill_(math.nan) if x.dtype.is_floating_point else x

    monkeypatch.setattr(module.torch, "empty", empty)


@pytest.mark.parametrize("kind", ["selected", "visible", "window"])
@pytest.mark.parametrize("fmt", ["packed", "bf16", "fp32"])
def test_every_format_and_kind_of_layer_equals_the_reference(fmt, kind):
    assert make_case(SPANS, fmt=fmt, kind=kind, padding=1).fault(tile=make_tile()) == ""


@pytest.mark.parametrize("design", DESIGNS[1:], ids=lambda d: "-".join(d))
@pytest.mark.parametrize("fmt", ["packed", "fp32"])
def test_every_design_equals_the_reference(fmt, design):
    assert make_case(SPANS, fmt=fmt, padding=1).fault(tile=make_tile(**design)) == ""


@pytest.mark.parametrize(("heads", "block_h"), [(1, 16), (16, 16), (20, 16), (33, 32), (128, 32)])
def test_any_number_of_heads(heads, block_h):
    assert make_case(SPANS[2:], heads=heads).fault(tile=make_tile(BLOCK_H=block_h)) == ""


@pytest.mark.parametrize("fmt", ["packed", "bf16"])
def test_the_models_head_size(fmt):
    assert make_case(SPANS[2:], dim=512, fmt=fmt, top_k=20).fault(tile=make_tile(BLOCK_N=32, warps=8)) == ""


@pytest.mark.parametrize("fmt", ["packed", "bf16", "fp32"])
def test_the_table_has_a_tile_for_every_shape(fmt):
    for heads in (4, 40):
        assert make_case(SPANS[1:3], fmt=fmt, heads=heads).fault() == ""


@pytest.mark.parametrize("kind", ["selected", "visible", "window"])
def test_several_tokens_of_a_sequence_see_each_other_and_what_the_ring_loses_to_them(kind):
    """More tokens than the window has rows, and a sequence that begins in this step."""
    spans = [(40, 3), (0, 2), (30, 17)]
    assert make_case(spans, kind=kind, staged=True, padding=2).fault(tile=make_tile()) == ""


@pytest.mark.parametrize("top_k", [0, 1, 16, 17])
def test_lists_of_any_length(top_k):
    assert make_case([(90, 1), (5, 1)], top_k=top_k).fault(tile=make_tile()) == ""


@pytest.mark.parametrize("fused", [0, 1])
@pytest.mark.parametrize(("splits", "kind"), [(1, "visible"), (2, "selected"), (3, "visible"), (10, "visible")])
def test_any_number_of_splits(splits, kind, fused):
    """Some of 10 are empty for the shorter sequences."""
    case = make_case([(400, 1), (14, 1), (2, 1)], top_k=60, kind=kind, padding=1)
    assert case.fault(tile=make_tile(FUSED=fused, MAX_SPLITS=splits)) == ""


def test_more_splits_than_are_looked_at_at_once():
    case = make_case([(2200, 1)], top_k=540)
    assert case.fault(tile=make_tile(MAX_SPLITS=64)) == ""


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("fmt", ["packed", "fp32"])
def test_a_padding_token_gets_zeros_and_its_lse_is_the_sink(fmt, splits, sink):
    case = make_case([(40, 1)], fmt=fmt, sink=sink, padding=2)
    case.q[1:] = math.nan
    out, lse = case.run(tile=make_tile(MAX_SPLITS=splits))
    assert bool((out[1:] == 0).all())
    wanted = case.rest["sink"] if sink else torch.full((4,), -math.inf)
    assert torch.allclose(lse[1:], wanted.expand(2, -1), atol=1e-6)


INDEX_ROWS = [[0, -1, -1, 3], [-1, -1, 0, -1], [-1, -1, -1, -1], [7, -1, 0, 5], [3, 2, 1, 0], [-1, 0, -1, -1]]


@pytest.mark.parametrize("fmt", ["packed", "bf16", "fp32"])
def test_index_minus_one_neither_hides_nor_invents_entry_0(fmt):
    """The pool's first and last block are not of this sequence and hold NaN; its table ends in -1."""
    case = make_case([(32 + i, 1) for i in range(6)], fmt=fmt, top_k=4)
    case.rest["selected"].copy_(torch.tensor(INDEX_ROWS))
    assert case.fault(tile=make_tile()) == ""
    assert bool(case.run(tile=make_tile())[0].isfinite().all())


WRONG = {
    "not visible yet": lambda case: case.rest["selected"][1, 0].fill_(10),
    "far beyond the table": lambda case: case.rest["selected"][1, 0].fill_(2**31 - 1),
    "without a block": lambda case: case.batch.block_table[1].fill_(-1),
    "in a block that the pool lacks": lambda case: case.batch.block_table[1].fill_(1000),
    "no slot": lambda case: case.batch.slots[1:2].fill_(-1),
    "a slot that the ring lacks": lambda case: case.batch.slots[1:2].fill_(1000),
}


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_can_not_be_read_makes_its_token_nan_and_no_other(wrong, splits):
    case = make_case([(40, 1)] * 3)
    before, _ = case.run(tile=make_tile(MAX_SPLITS=splits))
    WRONG[wrong](case)
    out, lse = case.run(tile=make_tile(MAX_SPLITS=splits))
    assert bool(out[1].isnan().all())
    assert bool(lse[1].isnan().all())
    assert torch.equal(out[::2], before[::2])


def _spoil_scale(rows, unit, row):
    rows.scales[unit, row, 0] = 255


def _spoil_code(rows, unit, row):
    rows.values.view(torch.uint8)[unit, row, 3] = 0x7F


def _spoil_rope(rows, unit, row):
    rows.rope[unit, row, 63] = math.nan


def _overflow_scale(rows, unit, row):
    rows.scales[unit, row, 0] = 140


def _overflow_rope(rows, unit, row):
    rows.rope[unit, row, 5] = -1e30


@pytest.mark.parametrize("spoil", [_spoil_scale, _spoil_code, _spoil_rope, _overflow_scale, _overflow_rope])
@pytest.mark.parametrize("where", ["window", "pool"])
def test_a_named_row_that_is_nan_or_too_large_makes_its_token_nan_and_no_other(where, spoil):
    case = make_case([(40, 1)] * 3)
    before, _ = case.run(tile=make_tile())
    if where == "window":
        spoil(case.window, int(case.batch.slots[1]), 39 % 16)
    else:
        entry = int(case.rest["selected"][1].max())
        spoil(case.rest["compressed"], int(case.batch.block_table[1, entry // 8]), entry % 8)
    out, _ = case.run(tile=make_tile())
    assert bool(out[1].isnan().all())
    assert torch.equal(out[::2], before[::2])


@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: "-".join(d))
def test_bytes_that_no_token_names_change_nothing(design):
    """The padding byte behind the scales too: writers put 0 there, but nothing depends on it."""
    results = []
    for byte in (0xFF, 0x00, 0x7E):
        case = make_case(SPANS[1:3], padding=1, byte=byte)
        for rows in (case.window, case.rest["compressed"]):
            rows.scales[..., 1:] = byte
        results.append(case.run(tile=make_tile(**design))[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("level", [-60000.0, 60000.0])
def test_very_low_scores_are_not_taken_for_masked_ones(level):
    case = make_case([(40, 1), (90, 1)], kind="window", sink=False, heads=2)
    case.q[..., 0] = 300.0
    for b, position in enumerate((40, 90)):
        near = torch.arange(position - 15, position + 1) % 16
        unit = torch.full_like(near, int(case.batch.slots[b]))
        rows = case.window.read(unit, near)
        rows[:, 0] = level / 300.0
        case.window.write(unit, near, rows)
    case.rest["scale"] = 1.0
    out, lse = case.run(tile=make_tile())
    wanted, wanted_lse = case.expect()
    assert bool(out.isfinite().all())
    # Scores of 60,000 in float32 are exact to 0.004: so are their differences, and with them the weights.
    assert torch.allclose(lse, wanted_lse, atol=0.1)
    assert torch.allclose(out[..., 1:], wanted[..., 1:], atol=0.05)


def test_repeated_calls_give_the_same_bits_and_leave_no_count_behind():
    case = make_case([(200, 1), (90, 1)], top_k=40)
    first, _ = case.run(tile=make_tile())
    assert torch.equal(case.run(tile=make_tile())[0], first)
    assert not bool(module._counters(torch.device("cpu"), 1).any())


def test_the_combining_kernel_gives_the_bits_of_the_last_program():
    case = make_case([(200, 1), (90, 1)], top_k=40, padding=1)
    fused, separate = (case.run(tile=make_tile(FUSED=fused)) for fused in (1, 0))
    assert torch.equal(fused[0], separate[0])
    assert torch.equal(fused[1], separate[1])


@pytest.mark.parametrize("kind", ["selected", "visible"])
def test_batch_invariant_bits_are_those_of_the_token_alone(kind):
    case = make_case([(90, 1), (600, 1), (7, 1)], kind=kind, top_k=130)
    together, _ = case.run(batch_invariant=True)
    assert case.fault(batch_invariant=True) == ""
    for token in range(3):
        alone, _ = cases.alone(case, token).run(batch_invariant=True)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("columns", [14, 15, 40])
def test_a_block_table_that_ends_too_early_makes_its_token_nan_and_no_other(columns, batch_invariant):
    """14 columns of 8 entries and the window are 128 keys: as many as a split takes where their number is fixed."""
    case = make_case([(100, 1), (1400, 1)], kind="visible")
    table = case.batch.block_table[:, :columns].contiguous()
    case.batch = dataclasses.replace(case.batch, block_table=table)
    out, lse = case.run(batch_invariant=batch_invariant)
    assert bool(out[1].isnan().all()) and bool(lse[1].isnan().all())
    assert bool(out[0].isfinite().all())


# The kernel of steps of many tokens.
MANY = Tile({"BLOCK_H": 16, "BLOCK_N": 16}, num_warps=4)


@pytest.mark.parametrize("heads", [4, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["selected", "visible", "window"])
def test_steps_of_many_tokens_equal_the_reference(kind, heads):
    """Sequences that begin, and that outgrow the window."""
    case = make_case([(40, 2), (0, 1), (30, 2)], kind=kind, heads=heads, staged=True, padding=2)
    assert case.fault(tile=MANY) == ""


@pytest.mark.parametrize("kind", ["selected", "visible"])
def test_many_tokens_at_the_models_head_size(kind):
    assert make_case([(7, 3)], dim=512, kind=kind, top_k=20, staged=True).fault(tile=MANY) == ""


@pytest.mark.parametrize("kind", ["selected", "visible"])
@pytest.mark.parametrize("wrong", ["in a block that the pool lacks", "a slot that the ring lacks"])
def test_of_many_tokens_what_can_not_be_read_makes_its_sequence_nan_and_no_other(wrong, kind):
    case = make_case([(40, 1)] * 3, kind=kind, staged=True)
    before, _ = case.run(tile=MANY)
    WRONG[wrong](case)
    out, lse = case.run(tile=MANY)
    assert bool(out[1].isnan().all() and lse[1].isnan().all())
    assert torch.equal(out[::2], before[::2])


@pytest.mark.parametrize("spoil", [_spoil_scale, _spoil_code, _spoil_rope, _overflow_scale, _overflow_rope])
def test_of_many_tokens_a_row_that_is_nan_spoils_those_that_see_it(spoil):
    """Row 5 of 24, a window of 16."""
    case = make_case([(40, 24)], kind="window", heads=2, staged=True)
    before, _ = case.run(tile=MANY)
    spoil(case.rest["new"], 5, 0)
    out, _ = case.run(tile=MANY)
    assert bool(out[5:21].isnan().all())
    assert torch.equal(out[:5], before[:5]) and torch.equal(out[21:], before[21:])
