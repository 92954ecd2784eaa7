"""The sampling kernels against what is right for their rows; scratch and outputs are NaN to begin with."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import kernels.sampling_decode as module

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0", "ignore:All-NaN slice")


def _cases():
    name = "sampling_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
make_case, KINDS = cases.make_case, cases.KINDS
TILE = cases.make_tile(q=8, e=8, gather=8, tile=64, pivoted=32, small=32, step=16)  # blocks of 128
ROWS = list(KINDS.values())


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        return x.fill_(math.nan) if x.dtype.is_floating_point else x.fill_(-(2**30))

    monkeypatch.setattr(module.torch, "empty", empty)


@pytest.mark.parametrize("kind", ["normal", "ties", "equal"])
def test_every_kind_of_row_in_one_batch_on_every_kind_of_logits(kind):
    assert make_case(ROWS, vocab=120, kind=kind, num_top=5).fault(tile=TILE) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties_bias_and_masks_of_some_rows(dtype):
    case = make_case(ROWS[::2] * 2, penalties=True, bias=True, mask=True, padding=2, num_top=3, dtype=dtype)
    assert case.fault(tile=TILE) == ""


def test_long_lists_are_narrowed_down_to_what_is_in_doubt():
    """Blocks of 32, groups of 8, 16 tokens compared with each other: all else is pivots."""
    rows = [KINDS["top-p"], {"top_k": 60, "top_p": 0.9}, KINDS["min-p and top-p"], {"top_k": 60, "num_logprobs": 12}]
    assert make_case(rows, vocab=136, kind="ties", num_top=12).fault(tile=cases.make_tile()) == ""


@pytest.mark.parametrize(("top_p", "kind"), [(0.02, "normal"), (0.02, "equal"), (0.3, "normal"), (0.97, "normal")])
def test_top_p_alone_however_few_tokens_it_keeps(top_p, kind):
    """Blocks of 32: few kept tokens, and candidates that are not, two of them in a block."""
    case = make_case([{"top_p": top_p}] * 8, vocab=136, kind=kind)
    assert case.fault(tile=cases.make_tile(resident=0)) == ""


def test_a_list_without_dropped_candidates_still_knows_what_min_p_keeps():
    """Top-p is a part of what min-p keeps, not of what is left to be listed after candidates failed."""
    rows = [{"min_p": 0.02, "top_p": 0.4}] * 8
    assert make_case(rows, vocab=136, seed=4).fault(tile=cases.make_tile()) == ""


def test_a_token_behind_two_of_its_block_that_are_not_kept():
    """Of four tokens that matter, two of the first block have the best scores and are not kept; its third is best."""
    case = make_case([{"top_p": 0.7}], vocab=64)
    noise = cases.gumbel_noise(cases.seeds_of(case.settings), case.given["position"], 64)[0]
    order, other = noise[:32].argsort(descending=True), 32 + int(noise[32:].argmin())
    third = int(order[10])
    case.logits[:] = -30.0
    case.logits[0, other], case.logits[0, third] = 0.0, -0.1
    score = float(noise[third]) - 0.1
    case.logits[0, order[:2]] = score + torch.tensor([1.0, 0.5]) - noise[order[:2]]
    assert score > float(noise[other]) + 0.1
    assert float(case.logits[0, order[:2]].max()) < -0.7  # so that they lie beyond top-p
    assert case.expect().tokens.tolist() == [third]
    assert case.run(tile=cases.make_tile()).tokens.tolist() == [third]


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9])
def test_equals_of_a_candidate_come_before_it_if_their_ids_are_lower(top_p):
    """All tokens are equal, so that the kept ones are the first: shares of 32 tokens, 16 at a time."""
    case = make_case([{"top_p": top_p}] * 4, vocab=200, kind="equal", seed=5)
    got = case.run(tile=cases.make_tile()).tokens
    assert case.token_fault(got) == ""
    assert int(got.max()) < top_p * 200


def test_a_tile_whose_runs_have_more_tokens_than_a_word_of_a_mask_is_refused():
    with pytest.raises(ValueError, match="64 tokens in a row"):
        make_case([{}], vocab=200).run(tile=cases.make_tile(e=64))


def test_a_row_has_the_same_bits_however_many_programs_share_it():
    rows = [KINDS["top-p"], KINDS["low top-p"], KINDS["min-p and top-p"], KINDS["top-k"] | {"num_logprobs": 3}]
    case = make_case(rows, vocab=150, num_top=3, penalties=True)
    alone, shared = (case.run(tile=cases.make_tile(scans=programs, resident=programs)) for programs in (0, 2))
    for name in ("tokens", "logprob", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(alone, name), getattr(shared, name)), name


def test_the_table_has_a_tile():
    assert make_case([KINDS["all"] | {"num_logprobs": 20}, {}], vocab=5000, num_top=20).fault() == ""


def test_a_vocabulary_of_one_token_and_of_fewer_than_are_wanted():
    assert make_case(ROWS[::3], vocab=1, num_top=4).fault(tile=TILE) == ""
    rows = [{"num_logprobs": 9, "top_k": 4}]
    assert make_case(rows, vocab=6, num_top=9).fault(tile=TILE) == ""


def test_log_probabilities_for_rows_that_ask_and_only_those():
    rows = [{"num_logprobs": n, "temperature": 0.0} for n in (-1, 0, 1, 20)] + [KINDS["all"] | {"num_logprobs": 4}]
    case = make_case(rows, num_top=20, penalties=True)
    assert case.fault(tile=TILE) == ""
    got = case.run(tile=TILE)
    assert (got.top_ids >= 0).sum(1).tolist() == [0, 0, 1, 20, 4]
    assert (got.logprob == 0).tolist() == [True, False, False, False, False]


def test_the_best_of_equal_logits_come_in_order_of_their_ids():
    case = make_case([{"num_logprobs": 20}], vocab=150, kind="equal", num_top=20)
    assert case.run(tile=TILE).top_ids.tolist() == [list(range(20))]


def test_a_row_that_is_masked_throughout_gives_token_0():
    case = make_case(ROWS[::2], mask=True)
    case.settings[:, 11] = 1
    case.given["mask"][1] = 0
    assert case.run(tile=TILE).tokens.tolist() == [0] * len(ROWS[::2])


def test_a_mask_overrules_a_bias_and_penalties():
    case = make_case(ROWS, mask=True, bias=True, penalties=True)
    case.settings[:, 9:12] = torch.arange(len(ROWS), dtype=torch.int32)[:, None]
    case.given["bias"][:] = -torch.inf
    case.given["mask"][:] = 0
    case.given["mask"][:, 5] = 1 << 7
    assert case.run(tile=TILE).tokens.tolist() == [5 * 32 + 7] * len(ROWS)


def test_a_row_that_is_nan_throughout_gives_a_token_that_exists():
    case = make_case([row | {"num_logprobs": 2} for row in ROWS], vocab=150, num_top=2)
    case.logits.fill_(torch.nan)
    assert case.run(tile=TILE).tokens.tolist() == [0] * len(ROWS)


def test_padding_gives_token_0_and_no_log_probabilities():
    got = make_case([{}], padding=2, num_top=3, penalties=True, mask=True).run(tile=TILE)
    assert got.tokens[1:].tolist() == [0, 0]
    assert got.logprob[1:].tolist() == [0.0, 0.0]
    assert bool((got.top_ids[1:] == -1).all() & (got.top_logprobs[1:] == 0).all())


def test_a_row_has_the_same_bits_alone_as_in_a_batch():
    case = make_case([row | {"num_logprobs": 2} for row in ROWS[5:]], vocab=150, num_top=2)
    together = case.run(tile=TILE)
    row = len(ROWS[5:]) - 1
    alone = cases.Case(
        case.logits[row:], case.settings[row:], {"position": case.given["position"][row:], "num_top": 2}
    ).run(tile=TILE)
    for name in ("tokens", "logprob", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(alone, name), getattr(together, name)[row:]), name
