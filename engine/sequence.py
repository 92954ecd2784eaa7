"""Sequence: all that a worker's leader knows of one request, and the rules that end it."""

from __future__ import annotations

import dataclasses

from router.protocol import FinishReason, SamplingParams


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """The only mutable state of a request in a worker.

    seq: number on the ring, never used twice.
    token_ids: the tokens the request came with, then those sampled here.   num_given: how many it came with.
    num_outputs: how many of token_ids count as output (those of an earlier life of the request included).
    num_computed: tokens whose cache rows exist.   promised: blocks promised beyond block_ids.
    router: who wants the answer, see ReserveRequest.
    branches: more answers to the same prompt, for which only the first token is drawn; they share blocks and slot.
    checksums: of a cache that came from elsewhere, see SequenceStart.
    """

    request_id: str
    seq: int
    token_ids: list[int]
    num_given: int
    num_outputs: int
    sampling: SamplingParams
    block_ids: list[int]
    slot: int
    promised: int = 0
    num_computed: int = 0
    router: str = ""
    branches: list[Sequence] = dataclasses.field(default_factory=list)
    checksums: list[dict[str, int]] = dataclasses.field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Tokens whose cache rows do not exist yet."""
        return len(self.token_ids) - self.num_computed

    def append(self, token_id: int, *, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Add an output token; return why the sequence is over, None if it goes on."""
        self.token_ids.append(token_id)
        self.num_outputs += 1
        sampling = self.sampling
        # A guided answer ends early only where its grammar leaves nothing else.
        if (self.num_outputs >= sampling.min_tokens or sampling.guide is not None) and (
            token_id in sampling.stop_token_ids or (token_id in eos_token_ids and not sampling.ignore_eos)
        ):
            return "stop"
        if self.num_outputs >= sampling.max_tokens or len(self.token_ids) >= max_model_len:
            return "length"
        return None


def max_cached_tokens(num_given: int, num_prior_outputs: int, sampling: SamplingParams, max_model_len: int) -> int:
    """Return the most tokens whose cache rows a request can ever need; its last token is never fed back."""
    return max(num_given, min(num_given - num_prior_outputs + sampling.max_tokens, max_model_len) - 1)
