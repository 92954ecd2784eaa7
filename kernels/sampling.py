"""From logits to tokens: penalties, then greedy or noisy choice, row by row, so that no row depends on its neighbours.

    penalties: presence and frequency count outputs; repetition divides (positive) or multiplies (negative) the
        logits of every token that the prompt or the output contains
    greedy: temperature below 1e-3, top_k 1, top_p 0 or min_p 1: the best logit, lowest id on ties
    else: logits / temperature; keep p >= min_p * max p, the top_k best, and the fewest best whose probability reaches
        top_p (ties to the lower id; the best always stays); then argmax of logits + Gumbel noise

    log probabilities: log-softmax of the logits as they are given; the caller decides which those are

Noise is a hash of (seed, position, token id) alone, in 32-bit integer arithmetic: the same on every device, in every
batch, and after a resume. NaN logits are the caller's business: check before sampling.

Layout: logits [B, V] float32; every other tensor [B].
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

GREEDY_TEMPERATURE = 1e-3
_MASK = 0xFFFFFFFF


def apply_penalties_reference(
    logits: Tensor, seen: Tensor, counts: Tensor, *, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """See apply_penalties."""
    factor = torch.where(logits > 0, 1 / repetition[:, None], repetition[:, None])
    logits = torch.where(seen, logits * factor, logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def apply_penalties(
    logits: Tensor, seen: Tensor, counts: Tensor, *, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Return penalised logits. seen [B, V] bool: in prompt or output.   counts [B, V]: times in the output."""
    if seen.shape != logits.shape or counts.shape != logits.shape:
        raise ValueError(f"seen {tuple(seen.shape)}, counts {tuple(counts.shape)} for logits {tuple(logits.shape)}")
    return apply_penalties_reference(
        logits, seen, counts, presence=presence, frequency=frequency, repetition=repetition
    )


def sample_reference(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """See sample."""
    tokens = logits.argmax(-1)
    is_greedy = (temperature < GREEDY_TEMPERATURE) | (top_k == 1) | (top_p <= 0) | (min_p >= 1)
    noisy = (~is_greedy).nonzero()[:, 0]
    if noisy.numel():
        scaled = logits[noisy] / temperature[noisy, None]
        scaled = _truncate(scaled, top_k[noisy], top_p[noisy], min_p[noisy])
        noise = gumbel_noise(seed[noisy], position[noisy], logits.shape[1])
        tokens[noisy] = (scaled + noise).argmax(-1)
    return tokens


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """Return [B] int64 token ids.

    temperature, top_p, min_p: float32.   top_k: int64, 0 or less for off.   seed: int64.
    position: int64, the absolute position of the token being chosen. A row that is -inf throughout gives token 0.
    """
    rows = (logits.shape[0],)
    for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
        if value.shape != rows:
            raise ValueError(f"{name} of shape {tuple(value.shape)} for {rows[0]} rows")
    if seed.shape != rows or position.shape != rows:
        raise ValueError(f"seed {tuple(seed.shape)}, position {tuple(position.shape)} for {rows[0]} rows")
    return sample_reference(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=position
    )


def token_logprobs_reference(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See token_logprobs."""
    total = logits.logsumexp(-1, keepdim=True)
    # topk promises no order among equals: as one integer, value above and reversed id below, no two are equal.
    bits = (logits + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: they must tie
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    top_ids = (ordered * 2**32 + (_MASK - ids)).topk(num_top, dim=-1).indices
    top = logits.gather(1, top_ids) - total
    return (logits.gather(1, chosen[:, None]) - total)[:, 0], top_ids, top


def token_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probabilities of the chosen tokens [B], and ids and log probabilities of the best [B, num_top].

    chosen: int64.   The best come first, the lower id first among equals; num_top beyond the vocabulary is cut.
    """
    if chosen.shape != logits.shape[:1] or logits.dtype != torch.float32:
        raise ValueError(f"chosen {tuple(chosen.shape)} for logits {tuple(logits.shape)} of {logits.dtype}")
    return token_logprobs_reference(logits, chosen, min(num_top, logits.shape[1]))


def gumbel_noise(seed: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Return [B, vocab_size] float32 of standard Gumbel noise, a function of (seed, position, token id) alone."""
    low = _mix_int(_mix_int(seed & _MASK) ^ (position & _MASK))
    high = _mix_int(_mix_int((seed >> 32) & _MASK) ^ low ^ ((position >> 32) & _MASK))
    bits = _mix_int32(_token_hashes(vocab_size, seed.device) ^ _as_int32(low)[:, None], _as_int32(high)[:, None])
    # 23 bits at the centres of their cells, exact in float32: never 0 or 1, so both logarithms are finite. With 24
    # the highest cell would round to 1.
    uniform = ((bits >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _truncate(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf what min_p, top_k and top_p leave out. Only rows that ask for it are touched."""
    wants = (min_p > 0).nonzero()[:, 0]
    if wants.numel():
        rows = scaled[wants]
        floor = rows.amax(-1, keepdim=True) + min_p[wants, None].log()
        scaled[wants] = rows.masked_fill(rows < floor, -math.inf)
    wants = ((top_p < 1) | ((top_k > 0) & (top_k < scaled.shape[1]))).nonzero()[:, 0]
    if wants.numel():
        values, order = scaled[wants].sort(dim=-1, descending=True, stable=True)
        limit = top_k[wants, None]
        rank = torch.arange(scaled.shape[1], device=scaled.device)
        values = values.masked_fill((limit > 0) & (rank >= limit), -math.inf)
        probability = torch.softmax(values, -1)
        before = probability.cumsum(-1) - probability
        drop = (before >= top_p[wants, None]) & (top_p[wants, None] < 1)
        drop[:, 0] = False
        scaled[wants] = torch.empty_like(values).scatter_(1, order, values.masked_fill(drop, -math.inf))
    return scaled


def _mix_int(x: Tensor) -> Tensor:
    """Mix 32-bit numbers kept in int64 (a bijection of two multiplications and three shifts)."""
    x = x ^ (x >> 16)
    x = (x * 0x45D9F3B) & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x45D9F3B) & _MASK
    return x ^ (x >> 16)


def _mix_int32(x: Tensor, key: Tensor) -> Tensor:
    """The same in int32, where products wrap and the masks undo the arithmetic shift; `key` enters in the middle."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x45D9F3B
    x = (x ^ ((x >> 16) & 0xFFFF)) + key
    x = (x ^ ((x >> 15) & 0x1FFFF)) * 0x2C1B3C6D
    return x ^ ((x >> 16) & 0xFFFF)


def _as_int32(x: Tensor) -> Tensor:
    return torch.where(x > 0x7FFFFFFF, x - 0x100000000, x).to(torch.int32)


@functools.lru_cache(maxsize=4)
def _token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    return _as_int32(_mix_int(torch.arange(1, vocab_size + 1, device=device)))
