"""DeviceSampler: sampling of decode steps on the device, for rows of a batch that change while steps are under way.

A sequence has one row of the pools from its entry to its end: bias, history and mask have a value per token of the
vocabulary. Its settings, 16 words that point there, are rewritten only when a mask comes or goes. sampler.py does the
same on the host, and its SamplingState remains the truth: what lies here is built from it and follows it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sampler import SamplingState, allows_others, as_int64
from kernels.sampling_decode import IN_PROMPT, MAX_TOP, Sampled, pack_settings, sample_decode

_MOST = 2**15 - 1  # outputs that a history counts


@dataclasses.dataclass(slots=True)
class Chooser:
    """How one sequence chooses.

    pool_row: its row of the pools.   num_outputs: tokens chosen, steps under way included.   mask: what its mask row
    holds: nothing, all but the ends, or a guide's tokens.   words: its settings [16] int32.
    """

    state: SamplingState
    pool_row: int
    num_outputs: int
    mask: str
    words: NDArray[np.int32]


class DeviceSampler:
    """Pools for `num_rows` sequences. vocab_size: tokens that logits score."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self._bias = torch.zeros((num_rows, vocab_size), device=device)
        self._history = torch.zeros((num_rows, vocab_size), dtype=torch.int16, device=device)
        self._mask = torch.zeros((num_rows, -(-vocab_size // 32)), dtype=torch.int32, device=device)
        self._free = list(reversed(range(num_rows)))

    @property
    def num_bytes(self) -> int:
        """Bytes of the pools."""
        return sum(pool.numel() * pool.element_size() for pool in (self._bias, self._history, self._mask))

    def enter(self, state: SamplingState) -> Chooser:
        """Take a sequence in. Copies are enqueued behind the steps under way."""
        row = self._free.pop()
        params = state.params
        if state.has_penalties:
            history = np.zeros(self.vocab_size, np.int16)
            for token, count in state.output_counts.items():
                if token < self.vocab_size:
                    history[token] = min(count, _MOST)
            history[[t for t in state.prompt_ids if t < self.vocab_size]] += np.int16(IN_PROMPT)
            self._write(self._history[row], history)
        if params.logit_bias:
            bias = np.zeros(self.vocab_size, np.float32)
            for token, value in params.logit_bias.items():
                if 0 <= token < self.vocab_size:
                    bias[token] = value
            self._write(self._bias[row], bias)
        chooser = Chooser(state, row, state.num_outputs, "", np.zeros(0, np.int32))
        chooser.words = self._words(chooser)
        return chooser

    def leave(self, chooser: Chooser) -> None:
        """Give a sequence's row of the pools to the next one."""
        self._free.append(chooser.pool_row)

    def prepare(self, chooser: Chooser) -> None:
        """Make a sequence ready for its next token, counting it. Raises GrammarError where its guide allows none.

        The guide must have seen all tokens chosen so far. `words` may have changed.
        """
        state = chooser.state
        ends = [t for t in state.stop_ids if 0 <= t < self.vocab_size]
        hides = bool(ends) and chooser.num_outputs < state.params.min_tokens
        guide = None if state.grammar is None else state.grammar.mask()
        mask, bits = "", None
        if guide is not None:
            mask, bits = "guide", guide.copy()
            if hides and allows_others(guide, ends):
                _clear(bits, ends)
        elif hides:
            mask = "ends"
            if chooser.mask != mask:
                bits = np.full(self._mask.shape[1], -1, np.int32)
                _clear(bits, ends)
        if bits is not None:
            self._write(self._mask[chooser.pool_row], bits[: self._mask.shape[1]])
        if mask != chooser.mask:
            chooser.mask = mask
            chooser.words = self._words(chooser)
        chooser.num_outputs += 1

    def sample(self, logits: Tensor, settings: Tensor, *, position: Tensor, sequence: Tensor) -> Sampled:
        """Return the tokens of logits [B, V] and what is asked for beside them; may be captured. See sample_decode."""
        return sample_decode(
            logits,
            settings,
            position=position,
            sequence=sequence,
            bias=self._bias,
            history=self._history,
            mask=self._mask,
            num_top=MAX_TOP,
        )

    def _words(self, chooser: Chooser) -> NDArray[np.int32]:
        state, params = chooser.state, chooser.state.params

        def one(value: float) -> Tensor:
            return torch.tensor([value], dtype=torch.int64 if isinstance(value, int) else torch.float32)

        def row(is_used: bool) -> Tensor:
            return one(chooser.pool_row if is_used else -1)

        return pack_settings(
            temperature=one(float(params.temperature)),
            top_k=one(int(params.top_k)),
            top_p=one(float(params.top_p)),
            min_p=one(float(params.min_p)),
            seed=one(as_int64(params.seed)),
            presence=one(float(params.presence_penalty)),
            frequency=one(float(params.frequency_penalty)),
            repetition=one(float(params.repetition_penalty)),
            history_row=row(state.has_penalties),
            bias_row=row(bool(params.logit_bias)),
            mask_row=row(bool(chooser.mask)),
            num_logprobs=one(int(params.num_logprobs)),
        )[0].numpy()

    def _write(self, target: Tensor, values: NDArray[np.generic]) -> None:
        target.copy_(pinned(values, self.device), non_blocking=True)


def pinned(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return a copy of `values` from which a copy to `device` does not wait; its memory is held until that has run."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor.clone()


def _clear(bits: NDArray[np.int32], tokens: list[int]) -> None:
    words = bits.view(np.uint32)
    for token in tokens:
        words[token // 32] &= ~np.uint32(1 << token % 32)
