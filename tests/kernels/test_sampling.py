"""Choice of tokens: greedy edges, truncation, noise that depends on seed and position alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.sampling import apply_penalties, gumbel_noise, sample, token_logprobs

VOCAB = 50


def draw(logits, **options):
    """sample() with one setting for all rows; defaults are those of the protocol."""
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0, **options}
    tensors = {}
    for name, value in chosen.items():
        dtype = torch.int64 if name in ("top_k", "seed", "position") else torch.float32
        values = value if isinstance(value, list) else [value] * len(logits)
        tensors[name] = torch.tensor(values, dtype=dtype)
    return sample(logits, **tensors).tolist()


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 1e-4}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_k": 1}],
    ids=["temperature 0", "temperature 1e-4", "top_p 0", "min_p 1", "top_k 1"],
)
def test_greedy_settings_take_the_best_and_the_lowest_of_equals(options, normal):
    logits = normal(20, VOCAB)
    logits[3, [7, 30]] = 9.0
    assert draw(logits, seed=list(range(20)), **options) == logits.argmax(-1).tolist()
    assert draw(logits, **options)[3] == 7


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3}])
def test_a_row_with_everything_masked_gives_token_0(options):
    assert draw(torch.full((2, VOCAB), -math.inf), **options) == [0, 0]


def test_the_only_token_left_is_taken_at_any_temperature():
    logits = torch.full((1, VOCAB), -100.0)
    logits[0, 17] = 0.0
    assert draw(logits.repeat(40, 1), seed=list(range(40))) == [17] * 40


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**40), others=st.integers(0, 5))
def test_a_row_is_drawn_alike_alone_and_in_any_batch(seed, position, others):
    logits = torch.randn(1 + others, VOCAB, generator=torch.Generator().manual_seed(1))
    row = others
    options = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01}
    seeds, positions = [seed + 0] * (1 + others), [position] * (1 + others)
    together = draw(logits, seed=seeds, position=positions, **options)
    assert draw(logits[row:], seed=[seed], position=[position], **options) == together[row:]


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    count = 20000
    tokens = torch.tensor(draw(logits.repeat(count, 1), temperature=1.5, seed=3, position=list(range(count))))
    wanted = torch.softmax(logits / 1.5, -1)
    found = torch.bincount(tokens, minlength=4) / count
    # Five standard deviations of a share over 20,000 draws.
    assert torch.allclose(found, wanted, atol=5 * 0.5 / count**0.5)


def test_noise_is_standard_gumbel_and_differs_in_every_argument():
    noise = gumbel_noise(torch.tensor([1]), torch.tensor([2]), 200000)
    assert bool(noise.isfinite().all())
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.05
    for other in ((2, 2), (1, 3), (1 + 2**32, 2), (1, 2 + 2**32), (-1, 2)):
        again = gumbel_noise(torch.tensor([other[0]]), torch.tensor([other[1]]), 200000)
        assert bool(again.isfinite().all())
        correlation = torch.corrcoef(torch.stack([noise[0], again[0]]))[0, 1]
        assert abs(float(correlation)) < 0.015
    shifted = torch.corrcoef(torch.stack([noise[0, :-1], noise[0, 1:]]))[0, 1]
    assert abs(float(shifted)) < 0.015


def test_noise_is_the_same_for_a_token_whatever_the_vocabulary():
    small, large = (gumbel_noise(torch.tensor([5]), torch.tensor([6]), size) for size in (10, 1000))
    assert torch.equal(small[0], large[0, :10])


def test_noise_never_changes_between_versions():
    """A resumed request must go on with its stream, on any worker: these numbers are part of the protocol."""
    noise = gumbel_noise(torch.tensor([42]), torch.tensor([7]), 4)[0]
    assert torch.allclose(noise, torch.tensor(NOISE_42_7), atol=1e-5)


NOISE_42_7 = [0.110169, -0.228323, 0.254574, 4.193733]


def support(logits, **options):
    """Tokens that occur in 3,000 draws."""
    count = 3000
    return set(draw(logits.repeat(count, 1), position=list(range(count)), seed=1, **options))


def test_top_k_keeps_k_and_ties_go_to_lower_ids():
    assert support(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5]), top_k=2) == {1, 2}
    assert support(torch.tensor([0.0, 1.0, 2.0]), top_k=1000) == {0, 1, 2}
    assert support(torch.tensor([0.0, 1.0, 2.0]), top_k=-1) == {0, 1, 2}


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert support(logits, top_p=0.49) == {0}
    assert support(logits, top_p=0.6) == {0, 1}
    assert support(logits, top_p=0.94) == {0, 1, 2}
    assert support(logits, top_p=0.999) == {0, 1, 2, 3}


def test_min_p_is_relative_to_the_best():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert support(logits, min_p=0.55) == {0, 1}
    assert support(logits, min_p=0.2) == {0, 1, 2}


def test_settings_of_one_row_do_not_touch_another(normal):
    logits = normal(4, VOCAB)
    mixed = draw(logits, temperature=[0.0, 1.0, 1.0, 2.0], top_k=[0, 3, 0, 0], top_p=[1.0, 1.0, 0.3, 1.0])
    for row, options in enumerate(
        [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.3}, {"temperature": 2.0}],
    ):
        assert draw(logits[row : row + 1], **options) == [mixed[row]]


def test_penalties_follow_their_definitions():
    logits = torch.tensor([[2.0, -2.0, 2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, True, False]])
    counts = torch.tensor([[0.0, 3.0, 0.0, 1.0, 0.0]])
    out = apply_penalties(
        logits,
        seen,
        counts,
        presence=torch.tensor([0.5]),
        frequency=torch.tensor([0.1]),
        repetition=torch.tensor([2.0]),
    )
    assert torch.allclose(out, torch.tensor([[1.0, -4.0 - 0.3 - 0.5, 2.0, 1.0 - 0.1 - 0.5, -2.0]]))


def test_logits_given_to_sample_stay_as_they_are(normal):
    logits = normal(3, VOCAB)
    before = logits.clone()
    draw(logits, top_p=0.5, min_p=0.1, top_k=5)
    assert torch.equal(logits, before)


def test_rows_and_settings_must_be_as_many(normal):
    with pytest.raises(ValueError, match="top_p of shape"):
        draw(normal(2, VOCAB), top_p=[1.0])


def test_log_probabilities_match_float64(normal):
    logits = normal(6, VOCAB) * 8
    chosen = torch.arange(6)
    of_chosen, ids, of_top = token_logprobs(logits, chosen, 5)
    wanted = torch.log_softmax(logits.double(), -1)
    # float32 keeps 24 bits of logits below 64: 4e-6 a term, and the sum adds as much again.
    assert torch.allclose(of_chosen.double(), wanted[chosen, chosen], atol=1e-5)
    assert torch.allclose(of_top.double(), wanted.sort(descending=True).values[:, :5], atol=1e-5)
    assert torch.equal(ids, logits.sort(descending=True, stable=True).indices[:, :5])


@given(values=st.lists(st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-40, 2.0, 3e38]), min_size=1, max_size=40))
def test_equal_log_probabilities_come_in_order_of_their_ids(values):
    wanted = sorted(range(len(values)), key=lambda i: (-values[i], i))[:20]
    _, ids, _ = token_logprobs(torch.tensor([values]), torch.tensor([0]), 20)
    assert ids[0].tolist() == wanted


def test_more_log_probabilities_than_tokens_are_all_of_them():
    _, ids, of_top = token_logprobs(torch.tensor([[0.0, 1.0]]), torch.tensor([1]), 20)
    assert ids.tolist() == [[1, 0]] and of_top.exp().sum() == pytest.approx(1.0)
