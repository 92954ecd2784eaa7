"""Sampler: one token per row, each by its own SamplingParams.

Order: logit_bias, min_tokens (end-of-sequence and stop ids masked), penalties, the grammar's mask, then greedy or noisy
choice (kernels/sampling.py). The mask comes last, so that nothing lifts a token that it forbids. min_tokens yields to
it where only an end is left. Counts for penalties are kept per sequence, sparse, and only where a penalty is on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.grammar import GrammarError, GrammarState
from kernels.sampling import apply_penalties, sample, token_logprobs
from router.protocol import SamplingParams, TokenLogprobs

# Finite at any temperature, below any logit: a bias of -inf must not rule out what a mask allows.
_LOWEST = -1e30


class Choice(NamedTuple):
    """The next token of one sequence. logprobs: if it asks for them.   error: why there is no token, else ""."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""


class SamplingState:
    """What choosing the next token of one sequence depends on besides its logits.

    num_outputs: output tokens so far, prior ones of a resumed request included.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: Sequence[int],
        num_outputs: int,
        *,
        eos: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        """token_ids: the prompt, then the `num_outputs` known outputs.   grammar: of params.guide, past those."""
        self.params = params
        self.grammar = grammar
        self.num_outputs = num_outputs
        self.has_penalties = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        self._bias: tuple[Tensor, Tensor] | None = None
        self.stop_ids = sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos)})
        self.prompt_ids: set[int] = set()
        self.output_counts: Counter[int] = Counter()
        if self.has_penalties:
            split = len(token_ids) - num_outputs
            self.prompt_ids = set(token_ids[:split])
            self.output_counts = Counter(token_ids[split:])

    def bias(self, sampler: Sampler) -> tuple[Tensor, Tensor]:
        """Return ids inside the vocabulary and their values; built once, since a request may bias all of it."""
        if self._bias is None:
            inside = {i: value for i, value in self.params.logit_bias.items() if 0 <= i < sampler.vocab_size}
            ids = torch.tensor(list(inside), dtype=torch.int64, device=sampler.device)
            self._bias = ids, torch.tensor(list(inside.values()), dtype=torch.float32, device=sampler.device)
        return self._bias

    @property
    def hides_ends(self) -> bool:
        """min_tokens is not reached."""
        return self.num_outputs < self.params.min_tokens

    def add(self, token_id: int) -> None:
        """Count a token that was chosen."""
        self.num_outputs += 1
        if self.grammar is not None:
            self.grammar.accept(token_id)
        if self.has_penalties:
            self.output_counts[token_id] += 1


class Sampler:
    """Turns logits into tokens for a batch. Holds nothing between calls."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)

    def sample(self, logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]) -> list[Choice]:
        """Return a choice per row of logits [B, V] float32 (finite; left as they are).

        positions: absolute position of each token being chosen, which keys its noise.
        """
        guides, errors = self._guides(states)
        adjusted = self._biased(logits, states, guides)
        adjusted = self._penalised(adjusted, states)
        adjusted = self._guided(adjusted, guides)
        params = [s.params for s in states]
        tokens = sample(
            adjusted,
            temperature=self._floats([p.temperature for p in params]),
            top_k=self._ints([p.top_k for p in params]),
            top_p=self._floats([p.top_p for p in params]),
            min_p=self._floats([p.min_p for p in params]),
            seed=self._ints([as_int64(p.seed) for p in params]),
            position=self._ints(list(positions)),
        )
        logprobs = self._logprobs(logits, tokens, params)
        return [Choice(token, logprobs.get(row), errors.get(row, "")) for row, token in enumerate(tokens.tolist())]

    def _logprobs(self, logits: Tensor, tokens: Tensor, params: Sequence[SamplingParams]) -> dict[int, TokenLogprobs]:
        """Return log probabilities by row, of the rows that ask. logits: those of the model, unchanged."""
        rows = [row for row, p in enumerate(params) if p.num_logprobs >= 0]
        if not rows:
            return {}
        num_top = max(params[row].num_logprobs for row in rows)
        if len(rows) < len(params):
            logits, tokens = logits[rows], tokens[rows]
        of_chosen, top_ids, of_top = (t.tolist() for t in token_logprobs(logits, tokens, num_top))
        return {
            row: TokenLogprobs(
                logprob=of_chosen[i],
                top_ids=top_ids[i][: params[row].num_logprobs],
                top_logprobs=of_top[i][: params[row].num_logprobs],
            )
            for i, row in enumerate(rows)
        }

    def _guides(self, states: Sequence[SamplingState]) -> tuple[dict[int, NDArray[np.int32]], dict[int, str]]:
        """Return masks of the rows that have one, and why others have none, by row."""
        guides: dict[int, NDArray[np.int32]] = {}
        errors: dict[int, str] = {}
        for row, state in enumerate(states):
            if state.grammar is not None:
                try:
                    mask = state.grammar.mask()
                except GrammarError as error:
                    errors[row] = str(error)
                else:
                    if mask is not None:
                        guides[row] = mask
        return guides, errors

    def _biased(self, logits: Tensor, states: Sequence[SamplingState], guides: dict[int, NDArray[np.int32]]) -> Tensor:
        if all(not s.params.logit_bias and not s.hides_ends for s in states):
            return logits
        logits = logits.clone()
        for row, state in enumerate(states):
            if state.params.logit_bias:
                logits[row].index_add_(0, *state.bias(self))
            ends = [t for t in state.stop_ids if 0 <= t < self.vocab_size] if state.hides_ends else []
            if ends and (row not in guides or allows_others(guides[row], ends)):
                logits[row, self._ints(ends)] = -math.inf
        return logits

    def _guided(self, logits: Tensor, guides: dict[int, NDArray[np.int32]]) -> Tensor:
        """Return logits with everything at -inf that a mask forbids, and what it allows above that."""
        if not guides:
            return logits
        rows = list(guides)
        words = torch.from_numpy(np.stack(list(guides.values()))).to(self.device)
        bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self.device)
        allowed = (bits & 1).bool().flatten(1)[:, : self.vocab_size]
        if len(rows) == len(logits):
            return torch.where(allowed, logits.clamp_min(_LOWEST), -math.inf)
        logits = logits.clone()
        logits[rows] = torch.where(allowed, logits[rows].clamp_min(_LOWEST), -math.inf)
        return logits

    def _penalised(self, logits: Tensor, states: Sequence[SamplingState]) -> Tensor:
        rows = [row for row, state in enumerate(states) if state.has_penalties]
        if not rows:
            return logits
        seen = torch.zeros((len(rows), self.vocab_size), dtype=torch.bool, device=self.device)
        counts = torch.zeros((len(rows), self.vocab_size), device=self.device)
        for i, row in enumerate(rows):
            outputs = states[row].output_counts
            seen[i, self._ints([*states[row].prompt_ids, *outputs])] = True
            counts[i, self._ints(list(outputs))] = self._floats(list(outputs.values()))
        params = [states[row].params for row in rows]
        logits = logits.clone()
        logits[rows] = apply_penalties(
            logits[rows],
            seen,
            counts,
            presence=self._floats([p.presence_penalty for p in params]),
            frequency=self._floats([p.frequency_penalty for p in params]),
            repetition=self._floats([p.repetition_penalty for p in params]),
        )
        return logits

    def _floats(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def allows_others(mask: NDArray[np.int32], ids: Sequence[int]) -> bool:
    """The mask allows a token besides `ids`."""
    mask = mask.copy()
    bits = mask.view(np.uint32)
    for i in ids:
        bits[i // 32] &= ~np.uint32(1 << i % 32)
    return bool(mask.any())


def as_int64(seed: int) -> int:
    """Fold any Python integer into a signed 64-bit one."""
    seed &= 0xFFFFFFFFFFFFFFFF
    return seed - (1 << 64) if seed >> 63 else seed
