"""Sampling for a decode step on the CPU: its reference agrees with the sampler of the engine, settings are packed."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.sampler import Sampler, SamplingState
from kernels.sampling_decode import IN_PROMPT, pack_settings, sample_decode, seeds_of
from router.protocol import SamplingParams


def _cases():
    name = "sampling_cases"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    loaded = sys.modules.setdefault(name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


cases = _cases()
VOCAB = 70


class Guide:
    """A grammar that allows the tokens of a mask."""

    def __init__(self, words):
        self.words = words

    def mask(self):
        return self.words


def test_a_step_equals_that_of_the_engines_sampler(normal):
    """Every setting, differently in each row: bias, penalties and masks through pools."""
    prompt, outputs = [3, 5, 5, 9], [5, 60, 60]
    words = np.full(3, 0x55555555, np.int32)
    shared = {"max_tokens": 9, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
    params = [
        SamplingParams(seed=row, num_logprobs=row - 1, logit_bias={7: 4.0, 60: -100.0}, **shared, **kind)
        for row, kind in enumerate(cases.KINDS.values())
    ]
    states = [SamplingState(p, prompt + outputs, len(outputs), eos=[1]) for p in params]
    for state in states[::2]:
        state.grammar = Guide(words)
    logits = normal(len(params), VOCAB) * 2
    choices = Sampler(VOCAB).sample(logits, states, range(100, 100 + len(params)))

    history = torch.zeros(len(params), VOCAB, dtype=torch.int16)
    for token in prompt:
        history[:, token] |= IN_PROMPT
    for token, count in Counter(outputs).items():
        history[:, token] += count
    before = history.clone()
    bias = torch.zeros(1, VOCAB)
    bias[0, [7, 60]] = torch.tensor([4.0, -100.0])
    rows = torch.arange(len(params))
    got = sample_decode(
        logits,
        pack_settings(
            temperature=torch.tensor([p.temperature for p in params]), top_k=torch.tensor([p.top_k for p in params]),
            top_p=torch.tensor([p.top_p for p in params]), min_p=torch.tensor([p.min_p for p in params]), seed=rows,
            presence=torch.full((len(params),), 0.5), frequency=torch.full((len(params),), 0.3),
            repetition=torch.full((len(params),), 1.3), history_row=rows, bias_row=rows * 0,
            mask_row=torch.where(rows % 2 == 0, 0, -1), num_logprobs=rows - 1,
        ),
        position=100 + rows, bias=bias, history=history, mask=torch.from_numpy(words)[None], num_top=7,
    )  # fmt: skip
    assert got.tokens.tolist() == [choice.token_id for choice in choices]
    for row, choice in enumerate(choices[1:], 1):
        assert choice.logprobs is not None
        assert float(got.logprob[row]) == choice.logprobs.logprob
        assert got.top_ids[row, : row - 1].tolist() == choice.logprobs.top_ids
        assert got.top_ids[row, row - 1 :].tolist() == [-1] * (8 - row)
    counted = (history - before).nonzero().tolist()
    assert counted == [[row, choice.token_id] for row, choice in enumerate(choices)]


def test_seeds_keep_all_their_bits():
    seeds = torch.tensor([-1, 2**63 - 1, -(2**63), 5 + 2**40])
    ones = torch.ones(4)
    words = pack_settings(temperature=ones, top_k=ones, top_p=ones, min_p=ones, seed=seeds)
    assert torch.equal(seeds_of(words), seeds)


def test_a_top_k_beyond_32_bits_keeps_all():
    ones = torch.ones(1)
    words = pack_settings(temperature=ones, top_k=torch.tensor([2**40]), top_p=ones, min_p=ones, seed=ones)
    assert int(words[0, 1]) == 2**31 - 1


def test_a_count_stays_at_its_largest():
    case = cases.make_case([{"temperature": 0.0}], penalties=True)
    case.logits[0, 0] = 1e6
    for most in (0x7FFF, -1):  # of outputs alone, and in the prompt, too
        case.given["history"][:, 0] = most
        history = case.given["history"].clone()
        sample_decode(case.logits, case.settings, **case.given)
        assert torch.equal(case.given["history"], history)


def test_wrong_tokens_are_noticed():
    """The judge of the kernels: another token than the reference's is refused, the reference's never."""
    for kind in ("normal", "ties", "flat"):
        case = cases.make_case(list(cases.KINDS.values()), kind=kind, penalties=True, mask=True, padding=1)
        tokens = case.expect().tokens
        assert case.token_fault(tokens) == ""
        for row in range(len(tokens)):
            wrong = tokens.clone()
            wrong[row] = (tokens[row] + 1) % 300
            assert case.token_fault(wrong).startswith(f"row {row}: ")


def test_no_rows_at_all():
    case = cases.make_case([])
    assert case.run().tokens.shape == (0,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logits": torch.zeros(2, 8).double()}, r"logits \(2, 8\) torch.float64"),
        ({"logits": torch.zeros(8, 2).T}, "wanted contiguous rows"),
        ({"settings": torch.zeros(2, 15, dtype=torch.int32)}, r"settings \(2, 15\)"),
        ({"position": torch.zeros(2, dtype=torch.int32)}, r"position \(2,\) torch.int32"),
        ({"sequence": torch.zeros(3, dtype=torch.int32)}, r"sequence \(3,\)"),
        ({"bias": torch.zeros(1, 9)}, r"bias \(1, 9\)"),
        ({"history": torch.zeros(1, 8)}, r"history \(1, 8\) torch.float32"),
        ({"mask": torch.zeros(1, 8, dtype=torch.int32)}, r"mask \(1, 8\)"),
        ({"num_top": 21}, "21 columns"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused(change, said):
    given = {
        "logits": torch.zeros(2, 8),
        "settings": torch.zeros(2, 16, dtype=torch.int32),
        "position": torch.zeros(2, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=said):
        sample_decode(given.pop("logits"), given.pop("settings"), **given)


def test_settings_of_other_rows_are_refused():
    ones = torch.ones(2)
    with pytest.raises(ValueError, match=r"seed \(3,\) for 2 rows"):
        pack_settings(temperature=ones, top_k=ones, top_p=ones, min_p=ones, seed=torch.ones(3))
