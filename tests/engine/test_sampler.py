"""From SamplingParams to tokens: order of the steps, and state that follows the outputs."""

import math

import pytest
import torch

from engine.sampler import Sampler, SamplingState
from router.protocol import SamplingParams

VOCAB = 20


def state(tokens=(), num_outputs=0, eos=(1,), **params):
    options = {"max_tokens": 50, "temperature": 0.0, **params}
    return SamplingState(SamplingParams(**options), list(tokens), num_outputs, eos=eos)


def choose(logits, *states, positions=None):
    return [c.token_id for c in Sampler(VOCAB).sample(logits, states, positions or [0] * len(states))]


@pytest.fixture
def falling():
    """Logits that prefer low ids: 0, then 1, then 2, ..."""
    return -torch.arange(VOCAB, dtype=torch.float32)[None]


def test_each_row_follows_its_own_params(falling):
    logits = falling.repeat(3, 1)
    assert choose(logits, state(), state(logit_bias={9: 100.0}), state(logit_bias={0: -100.0})) == [0, 9, 1]
    assert torch.equal(logits, falling.repeat(3, 1)), "the caller's logits stay as they are"


def test_min_tokens_keeps_end_and_stop_ids_away_until_enough_were_chosen(falling):
    s = state(min_tokens=2, stop_token_ids=(2,), eos=(0, 1))
    tokens = []
    for _ in range(4):
        (token,) = choose(falling, s)
        s.add(token)
        tokens.append(token)
    assert tokens == [3, 3, 0, 0]


def test_min_tokens_with_ignore_eos_masks_stop_ids_only(falling):
    assert choose(falling, state(min_tokens=5, ignore_eos=True, eos=(0,), stop_token_ids=(1,))) == [0]


def test_min_tokens_beats_a_bias_towards_the_end(falling):
    assert choose(falling, state(min_tokens=1, eos=(4,), logit_bias={4: 100.0})) == [0]


def test_penalties_count_prompt_and_outputs_apart(falling):
    """Prompt 0, output 1: presence and frequency touch 1 only, repetition both."""
    assert choose(falling, state([0, 1], 1, presence_penalty=2.0, frequency_penalty=1.0)) == [0]
    positive = falling + 10
    assert choose(positive, state([0, 1], 1, repetition_penalty=2.0)) == [2]
    assert choose(positive, state([1], 0, repetition_penalty=2.0)) == [0]


def test_frequency_grows_with_every_chosen_token(falling):
    s = state(frequency_penalty=0.6)
    tokens = []
    for _ in range(6):
        (token,) = choose(falling, s)
        s.add(token)
        tokens.append(token)
    # 0 falls by 0.6 each time: after two it lies below 1, and so on.
    assert tokens == [0, 0, 1, 0, 1, 0]


def test_outputs_known_at_the_start_count_like_chosen_ones(falling):
    fresh = state([5], 0, frequency_penalty=0.6, presence_penalty=0.2)
    for token in (0, 0, 1):
        fresh.add(token)
    resumed = state([5, 0, 0, 1], 3, frequency_penalty=0.6, presence_penalty=0.2)
    assert fresh.num_outputs == resumed.num_outputs == 3
    for _ in range(5):
        a, b = choose(falling, fresh), choose(falling, resumed)
        assert a == b
        fresh.add(a[0])
        resumed.add(b[0])


def test_noise_depends_on_seed_and_position_alone():
    logits = torch.zeros(1, VOCAB)
    draws = [choose(logits, state(temperature=1.0, seed=s), positions=[p]) for s in range(8) for p in range(8)]
    again = [choose(logits, state(temperature=1.0, seed=s), positions=[p]) for s in range(8) for p in range(8)]
    assert draws == again
    assert len({tuple(d) for d in draws}) > 10


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**70])
def test_any_integer_is_a_seed(seed):
    (token,) = choose(torch.zeros(1, VOCAB), state(temperature=1.0, seed=seed))
    assert 0 <= token < VOCAB


def test_bias_and_stop_ids_outside_the_vocabulary_do_nothing(falling):
    assert choose(falling, state(logit_bias={VOCAB: 50.0, -1: 50.0}, min_tokens=1, stop_token_ids=(10**9,))) == [0]


def test_everything_biased_away_still_gives_a_token():
    bias = {i: -math.inf for i in range(VOCAB)}
    for temperature in (0.0, 1.0):
        assert choose(torch.zeros(1, VOCAB), state(temperature=temperature, logit_bias=bias)) == [0]


def logprobs_of(logits, *states):
    return [choice.logprobs for choice in Sampler(VOCAB).sample(logits, states, [0] * len(states))]


def test_log_probabilities_are_of_the_models_own_logits(falling):
    """The bias lifts token 9, min_tokens hides token 0, and neither shows in what is reported."""
    (found,) = logprobs_of(falling, state(logit_bias={9: 100.0}, min_tokens=1, eos=(0,), num_logprobs=3))
    wanted = torch.log_softmax(falling[0], -1)
    assert found.logprob == pytest.approx(float(wanted[9]), abs=1e-6)
    assert found.top_ids == [0, 1, 2]
    assert found.top_logprobs == pytest.approx(wanted[:3].tolist(), abs=1e-6)


def test_each_row_reports_as_many_log_probabilities_as_it_asks_for(falling):
    none, chosen_only, two = logprobs_of(
        falling.repeat(3, 1), state(), state(num_logprobs=0), state(num_logprobs=2, logit_bias={5: 100.0})
    )
    assert none is None
    assert chosen_only.top_ids == [] and chosen_only.logprob == pytest.approx(float(falling[0].log_softmax(-1)[0]))
    assert two.top_ids == [0, 1] and two.logprob == pytest.approx(float(falling[0].log_softmax(-1)[5]))
