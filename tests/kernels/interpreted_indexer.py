"""The indexer's kernels against their torch references; every pool is NaN but for the keys that may be read."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kernels.indexer_chunk as chunks
import kernels.indexer_decode as module
from kernels.tiles import Tile

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0", "ignore:All-NaN slice")


def _cases():
    name = "indexer_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
make_case, logits_tile, top_k_tile = cases.make_case, cases.logits_tile, cases.top_k_tile
chunk_tile = cases.chunk_tile
SPANS = [(0, 1), (31, 1), (35, 1), (98, 1), (600, 1)]
SEVERAL = [(30, 5), (0, 2), (97, 4), (220, 3)]
CHUNK = [(90, 3), (0, 1), (28, 9), (150, 2)]  # some see few, one begins to see more than it can take
TOP_TILE = Tile({"TILE": 64}, num_warps=4)


@pytest.fixture(autouse=True)
def few_programs_and_poisoned_outputs(monkeypatch):
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        x.view(torch.uint8).fill_(0xFF)  # NaN in every float type, e4m3 included
        return x

    monkeypatch.setattr(module.torch, "empty", empty)
    monkeypatch.setattr(module, "sm_count", lambda device: 3)


def test_rows_that_selections_have_got_wrong():
    assert cases.rows_fault(list(cases.score_rows().values()), 512) == ""


def test_long_rows_are_shared_by_several_programs():
    names = ("crowded", "all equal", "shorter than k", "one", "mostly masked", "all NaN", "with NaN", "every exponent")
    rows = [cases.score_rows()[name][:1100] for name in names]
    assert cases.rows_fault(rows, 30, tile=top_k_tile(512, 512)) == ""


def test_the_best_one_of_a_long_row_is_found():
    assert cases.rows_fault([cases.score_rows()["crowded"][:900]], 1, tile=top_k_tile(512, 512)) == ""


def test_counters_are_zero_again():
    cases.rows_fault([torch.arange(300.0)] * 2, 5, tile=top_k_tile(128, 128))
    assert not bool(module.zeros("index_select", torch.device("cpu"), module.MOST_TOKENS).any())


@pytest.mark.parametrize("fmt", ["fp8_index", "fp4_index"])
@pytest.mark.parametrize("block", [8, 16, 32], ids=lambda block: f"{block} keys")
def test_scores_and_selection_of_one_token_a_sequence(fmt, block):
    """Blocks of the pool have 16 rows: smaller than a tile, as large, larger."""
    case = make_case(SPANS, fmt=fmt, rows=16, padding=1, columns=3)
    assert case.fault(tile=logits_tile(block), top_tile=top_k_tile()) == ""


@pytest.mark.parametrize("fmt", ["fp8_index", "fp4_index"])
def test_several_tokens_a_sequence_share_a_reading_of_their_keys(fmt):
    case = make_case(SEVERAL, fmt=fmt, rows=16, padding=2, heads=3)
    assert case.fault(tile=logits_tile(), top_tile=top_k_tile()) == ""


@pytest.mark.parametrize(("fmt", "dim"), [("fp8_index", 32), ("fp4_index", 32), ("fp8_index", 128), ("fp4_index", 128)])
def test_other_widths_and_the_table_has_tiles(fmt, dim):
    assert make_case([(80, 1), (600, 1)], fmt=fmt, dim=dim, heads=16, rows=64, dtype=torch.bfloat16).fault() == ""


def test_scales_far_apart_are_exact():
    case = make_case([(300, 1)], fmt="fp4_index", dim=128, rows=16, spread=3.0)
    assert case.fault(tile=logits_tile()) == ""


@pytest.mark.parametrize("fmt", ["fp8_index", "fp4_index"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_turned_and_rounded(fmt, dtype):
    case = make_case(SPANS, fmt=fmt, heads=11, padding=1, dtype=dtype, dim=128)
    assert case.query_fault() == ""


@pytest.mark.parametrize("fmt", ["fp8_index", "fp4_index"])
def test_queries_are_multiplied_with_the_hadamard_matrix(fmt):
    assert make_case(SPANS[:2], fmt=fmt, dim=128, heads=9, hadamard=True).query_fault() == ""


@pytest.mark.parametrize("fmt", ["fp8_index", "fp4_index"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_query_that_is_not_finite_is_reported(fmt, value):
    case = make_case([(300, 1), (200, 1)], fmt=fmt, dim=128)
    case.q[0, 2, 70] = value
    selected = module.index_select(case.query(), case.batch, case.keys, ratio=4, top_k=8)
    assert [cases.is_unsound(row) for row in selected] == [True, False]


@pytest.mark.parametrize("fmt", ["fp8_index", "fp4_index"])
def test_a_key_that_was_never_written_is_reported(fmt):
    case = make_case([(300, 1), (300, 1)], fmt=fmt)
    case.keys.values.view(torch.uint8)[int(case.batch.block_table[1, 3]), 2] = 0xFF
    case.keys.scales.view(torch.uint8)[int(case.batch.block_table[1, 3]), 2] = 0xFF
    assert case.fault(tile=logits_tile(), top_tile=top_k_tile()) == ""
    selected = module.index_select(case.query(), case.batch, case.keys, ratio=4, top_k=8)
    assert [cases.is_unsound(row) for row in selected] == [False, True]


@pytest.mark.parametrize("block", [-1, 10**6])
def test_an_entry_without_a_block_is_reported(block):
    case = make_case([(300, 1), (300, 1)])
    case.batch.block_table[0, 4] = block
    assert case.fault(tile=logits_tile(), top_tile=top_k_tile()) == ""


def test_a_table_that_ends_too_early_is_reported():
    case = make_case([(300, 1)])
    case.batch.positions[0] = 900
    selected = module.index_select(case.query(), case.batch, case.keys, ratio=4, top_k=8)
    assert [cases.is_unsound(row) for row in selected] == [True]


def test_scores_without_room_are_reported_and_others_are_not_disturbed():
    case = make_case([(100, 1), (300, 1), (20, 1)])
    how = {"ratio": 4, "top_k": 8}
    scores = module.index_scores(case.query(), case.batch, case.keys, **how, tile=logits_tile(), capacity=64)
    selected = module.select_scored(scores, case.batch, **how, tile=top_k_tile())
    wanted = module.index_select_reference(case.query(), case.batch, case.keys, **how)
    assert selected[[0, 2]].tolist() == wanted[[0, 2]].tolist()
    assert cases.is_unsound(selected[1])


def test_a_part_of_a_long_row_that_is_not_finite_makes_the_row_unsound():
    case = make_case([(2000, 1), (2000, 1)])
    case.keys.scales[int(case.batch.block_table[1, 50]), 2] = math.nan
    assert case.fault(tile=logits_tile(), top_tile=top_k_tile()) == ""


@pytest.mark.parametrize("programs", [1, 7])
def test_bits_do_not_depend_on_how_many_programs_share_the_work(programs, monkeypatch):
    case = make_case(SPANS)
    how = {"ratio": 4, "top_k": 8, "tile": logits_tile()}
    before = module.index_scores(case.query(), case.batch, case.keys, **how)
    monkeypatch.setattr(module, "sm_count", lambda device: programs)
    after = module.index_scores(case.query(), case.batch, case.keys, **how)
    assert torch.equal(before.values[:230].view(torch.int32), after.values[:230].view(torch.int32))


@pytest.mark.parametrize(
    ("fmt", "block", "queries"),
    [("fp8_index", 8, 4), ("fp8_index", 32, 2), ("fp8_index", 16, 1), ("fp4_index", 16, 2)],
)
def test_chunks_of_several_sequences(fmt, block, queries):
    """Programs' tokens belong to two sequences at each border; blocks of the pool are larger than a tile or smaller."""
    case = make_case(CHUNK, fmt=fmt, rows=16, padding=2, heads=3, columns=2, told=block == 16)
    assert case.chunk_fault(tile=chunk_tile(block, queries), top_tile=TOP_TILE) == ""


@pytest.mark.parametrize("room", [1, 2 * 48])
def test_a_chunk_is_taken_in_turns_where_its_scores_have_no_room(room):
    case = make_case([(150, 5)], told=True)
    assert case.chunk_fault(tile=chunk_tile(), top_tile=TOP_TILE, room=room) == ""


def test_a_chunk_of_the_models_heads_with_the_tables_tiles():
    case = make_case([(250, 3)], dim=128, heads=64, rows=64, dtype=torch.bfloat16, told=True)
    assert case.chunk_fault() == ""


def test_a_tokens_entries_do_not_depend_on_where_its_chunk_begins():
    case = make_case([(120, 9)], told=True)
    query, how = case.query(), {"ratio": 4, "top_k": 8, "tile": chunk_tile(16, 4), "top_tile": TOP_TILE}
    whole = chunks.select_chunk(query, case.batch, case.keys, **how)
    for part in (slice(0, 3), slice(3, 9)):
        tokens = part.stop - part.start
        first, zero = torch.tensor([0, tokens], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        batch = module.DecodeBatch(
            case.batch.positions[part].contiguous(), case.batch.sequence[part].contiguous(), zero, first, zero,
            case.batch.block_table, tokens, tokens,
        )  # fmt: skip
        own = module.IndexQuery(query.format, query.values[part].contiguous(), query.weight[part].contiguous())
        assert torch.equal(chunks.select_chunk(own, batch, case.keys, **how), whole[part])


def test_a_key_of_a_chunk_that_was_never_written_is_reported_by_those_who_see_it():
    case = make_case([(90, 5), (90, 2)])  # the last entry of the first sequence is number 22: from position 91 on
    case.keys.scales[int(case.batch.block_table[0, 22 // case.keys.rows]), 22 % case.keys.rows] = math.nan
    assert case.chunk_fault(tile=chunk_tile(), top_tile=TOP_TILE) == ""
    selected = chunks.select_chunk(case.query(), case.batch, case.keys, ratio=4, top_k=8)
    assert [cases.is_unsound(row) for row in selected] == [False, *[True] * 4, False, False]


@pytest.mark.parametrize("told", [False, True])
def test_a_chunk_whose_table_ends_too_early_is_reported(told):
    case = make_case([(100, 6)], told=told)
    case.batch.positions[4:] += 300
    selected = chunks.select_chunk(case.query(), case.batch, case.keys, ratio=4, top_k=8)
    assert [cases.is_unsound(row) for row in selected] == [False] * 4 + [True] * 2


def test_equal_scores_of_a_chunk_go_to_the_lower_entry():
    case = make_case([(150, 5)])
    case.weight.zero_()
    assert case.chunk_fault(tile=chunk_tile(), top_tile=TOP_TILE) == ""
    selected = chunks.select_chunk(case.query(), case.batch, case.keys, ratio=4, top_k=8)
    assert bool((selected == torch.arange(8)).all())


def test_a_chunk_that_sees_few_entries_is_not_scored(monkeypatch):
    case = make_case([(0, 30)], told=True)
    monkeypatch.setattr(chunks, "chunk_scores_kernel", None)
    assert case.chunk_fault() == ""
