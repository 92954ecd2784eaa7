"""StepWork: what a step has to do besides reading weights: tokens, and the keys that they meet in a layer of each kind.

Arithmetic only, for engine/step_floor.py: a decode step by its batch and mean context, a chunk of a prompt exactly.
"""

from __future__ import annotations

import dataclasses

from engine.model.config import CSA_RATIO, HCA_RATIO, DeepSeekV4Config


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """products: of a query (of all heads) and a key, in one layer.   rows: of the cache, that are read for them."""

    products: float
    rows: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """window: of every layer.   csa, hca: entries that are attended, besides, in those layers.   index: entries scored.

    logits: tokens that have some.   streamed: tokens whose streams are too many for any cache: they go through memory.
    """

    tokens: float
    logits: float
    streamed: float
    window: Keys
    csa: Keys
    hca: Keys
    index: Keys


def decode_work(model: DeepSeekV4Config, batch: float, context: float) -> StepWork:
    """Return the work of `batch` sequences, one token each, that have `context` tokens on average."""

    def keys(each: float) -> Keys:
        return Keys(batch * each, batch * each)

    entries = context // CSA_RATIO
    return StepWork(
        tokens=batch,
        logits=batch,
        streamed=0,
        window=keys(min(context, model.sliding_window)),
        csa=keys(min(entries, model.index_topk)),
        hca=keys(context // HCA_RATIO),
        index=keys(entries),
    )


def chunk_work(model: DeepSeekV4Config, start: int, tokens: int, *, logits: int = 0) -> StepWork:
    """Return the work of `tokens` tokens of one sequence from position `start` on.

    A row of the cache counts once, however many tokens attend it. Tokens that see no more than top_k entries score
    none.
    """
    seen = range(start + 1, start + tokens + 1)
    most, window, end = model.index_topk, model.sliding_window, start + tokens
    scored = sum(n // CSA_RATIO for n in seen if n // CSA_RATIO > most)
    entries = end // CSA_RATIO
    return StepWork(
        tokens=tokens,
        logits=logits,
        streamed=tokens,
        window=Keys(sum(min(n, window) for n in seen), min(start, window - 1) + tokens),
        csa=Keys(sum(min(n // CSA_RATIO, most) for n in seen), entries),
        hca=Keys(sum(n // HCA_RATIO for n in seen), end // HCA_RATIO),
        index=Keys(scored, entries if scored else 0),
    )
