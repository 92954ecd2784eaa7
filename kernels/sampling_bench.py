"""Benches and samples of sampling_decode over DeepSeek-V4-Flash's 129,280 logits, in float32.

Rows by what they ask for:

    greedy, temperature   nothing else; all tokens may be drawn
    full                  temperature 0.8, top-k 50, top-p 0.95, min-p 0.02, all three penalties
    top-p                 temperature 1, top-p 0.95, as the model card has it, and nothing that bounds the tokens before
    logprobs              as full, log probabilities of the token and of the 20 best
    guided                as full, with a bias and a mask
    mixed                 a quarter each of greedy, temperature, full and top-p

Logits are normal with a deviation of 2.5 and eight tokens that stand out by more, as a model's do; "flat" leaves those
out, so that top-p keeps a fifth of the vocabulary. Bytes: logits once, and what has a value per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.bench import Bench
from kernels.gpu_timer import Launch
from kernels.sampling_decode import IN_PROMPT, pack_settings, sample_decode

VOCAB = 129280
_FULL: dict[str, float] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "penalties": 1}
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p": {"top_p": 0.95},
    "full": _FULL,
    "logprobs": _FULL | {"num_logprobs": 20},
    "guided": _FULL | {"guided": 1},
}


def benches() -> list[Bench]:
    """Return the benches: each kind of row alone and 64 at once, and a mixture."""
    kinds = [kind for kind in KINDS if kind != "top-p"]
    return [
        *(_bench(count, [kind]) for count in (1, 64) for kind in kinds),
        *(_bench(count, ["top-p"]) for count in (1, 64)),
        _bench(64, ["top-p"], flat=True),
        _bench(64, ["greedy", "temperature", "full", "top-p"]),
    ]


def samples() -> list[Bench]:
    """Return a small batch of all kinds of rows, and one with padding and bfloat16."""
    kinds = list(KINDS)
    return [
        _bench(len(kinds), kinds, vocab=5000),
        _bench(len(kinds), kinds, vocab=4099, padding=1, flat=True, dtype=torch.bfloat16),
    ]


def draw_logits(device: torch.device, seed: int, count: int, *, vocab: int = VOCAB, flat: bool = False) -> Tensor:
    """Return [count, vocab] float32 logits."""
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, vocab, generator=draw, device=device) * 2.5
    if not flat:
        at = torch.randint(0, vocab, (count, 8), generator=draw, device=device)
        x.scatter_(1, at, 14 + 2.0 * torch.randn(count, 8, generator=draw, device=device))
    return x


def draw_inputs(
    device: torch.device,
    seed: int,
    count: int,
    kinds: list[str],
    *,
    vocab: int = VOCAB,
    padding: int = 0,
    flat: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Return arguments of sample_decode: `count` rows of `kinds` in turn, then padding."""
    draw = torch.Generator(device).manual_seed(seed)
    total = count + padding
    rows = [KINDS[kinds[i % len(kinds)]] for i in range(total)]

    def column(name: str, default: float) -> Tensor:
        return torch.tensor([row.get(name, default) for row in rows], device=device)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw, device=device)

    numbers = torch.arange(total, device=device)
    has_history, is_guided = column("penalties", 0) > 0, column("guided", 0) > 0
    num_top = int(column("num_logprobs", 0).max())
    inputs: dict[str, Any] = {
        "logits": draw_logits(device, seed, total, vocab=vocab, flat=flat).to(dtype),
        "settings": pack_settings(
            temperature=column("temperature", 1.0), top_k=column("top_k", 0).long(), top_p=column("top_p", 1.0),
            min_p=column("min_p", 0.0), seed=integers(-(2**62), 2**62, total),
            # Histories count on while a launch is repeated: so small a frequency that logits stay what they are.
            presence=torch.full((total,), 0.3, device=device), frequency=torch.full((total,), 1e-7, device=device),
            repetition=torch.full((total,), 1.1, device=device), history_row=torch.where(has_history, numbers, -1),
            bias_row=torch.where(is_guided, numbers, -1), mask_row=torch.where(is_guided, numbers, -1),
            num_logprobs=column("num_logprobs", -1),
        ),
        "position": integers(0, 100000, total),
        "num_top": num_top,
    }  # fmt: skip
    if bool(has_history.any()):
        counts = integers(0, 4, total, vocab) * (integers(0, 50, total, vocab) == 0)
        inputs["history"] = (counts + IN_PROMPT * (integers(0, 20, total, vocab) == 0)).to(torch.int16)
    if bool(is_guided.any()):
        inputs["bias"] = integers(-2, 3, total, vocab).float() * (integers(0, 100, total, vocab) == 0)
        inputs["mask"] = integers(-(2**31), 2**31, total, -(-vocab // 32)).to(torch.int32)
    if padding:
        inputs["sequence"] = numbers.to(torch.int32)
        inputs["sequence"][count:] = -1
    return inputs


def _bench(
    count: int,
    kinds: list[str],
    *,
    vocab: int = VOCAB,
    padding: int = 0,
    flat: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(device, i, count, kinds, vocab=vocab, padding=padding, flat=flat, dtype=dtype)
        logits, settings = inputs.pop("logits"), inputs.pop("settings")
        return lambda: sample_decode(logits, settings, **inputs)

    share = [KINDS[kind] for kind in kinds]
    per_token = float(dtype.itemsize)
    per_token += sum(2 * ("penalties" in kind) + 4.125 * ("guided" in kind) for kind in share) / len(share)
    name = kinds[0] if len(kinds) == 1 else "mixed"
    return Bench(
        group="sampling",
        op="sampling",
        shape=f"B={count} {name}"
        + (" flat" if flat else "")
        + (f" of {vocab}" if vocab != VOCAB else "")
        + (f" +{padding}" if padding else ""),
        make=make,
        bytes=int(count * vocab * per_token),
    )
