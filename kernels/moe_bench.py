"""Benches and samples of the experts: routing by given scores, both products, the sum.

Sizes are those of DeepSeek-V4-Flash's experts on one of 4 ranks: 256 of [4096, 512], three matrices each, 6 to a token.
The gate's product and the shared expert are not part of it. Kinds of routing:

    uniform   every expert is as likely as any other
    same      all tokens take the same experts
    zipf      the expert of rank r is taken with odds 1 / r
    matched   uniform over as many experts as the zipf of the same seed takes
    skewed    uniform, but for one expert that every other token takes
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from typing import Any

import torch
from torch import Tensor

from kernels.bench import COPIES, Bench
from kernels.expert_weights import GROUP, LANES, ExpertWeights, Format
from kernels.gpu_timer import Launch
from kernels.moe_decode import experts_decode
from kernels.moe_routing import Routing, route_tokens

PREFILLS = (512, 1024, 4096, 8192)  # tokens
EXPERTS, TOP_K, HIDDEN, INNER, LIMIT, SCALING = 256, 6, 4096, 512, 10.0, 1.5


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One call: route_tokens(x, scores, **routing), then experts_decode(…, w13, w2)."""

    x: Tensor
    scores: Tensor
    w13: ExpertWeights
    w2: ExpertWeights
    routing: dict[str, Any]

    def route(self) -> Routing:
        return route_tokens(self.x, self.scores, top_k=TOP_K, scaling=SCALING, **self.routing)

    def launch(self, **options: Any) -> Tensor:
        return experts_decode(self.route(), self.w13, self.w2, limit=LIMIT, **options)


def benches() -> list[Bench]:
    """Return the benches: decode batches, several tokens a sequence, skewed routing, both formats."""
    return [
        *(_bench(n, "uniform", "nvfp4") for n in (1, 16, 64, 256)),
        *(_bench(64, kind, "nvfp4") for kind in ("same", "zipf", "matched")),
        *(_bench(n, "uniform", "mxfp4") for n in (1, 16, 64)),
        *(_bench(n, "uniform", "nvfp4", group="prefill", is_padded=True) for n in PREFILLS),
        _bench(4096, "skewed", "nvfp4", group="prefill", is_padded=True),
        _bench(4096, "uniform", "mxfp4", group="prefill", is_padded=True),
    ]


def samples() -> list[Bench]:
    """Return one small step for each shipped path."""
    small: dict[str, Any] = {"experts": 6, "hidden": 64, "inner": 64}
    return [
        _bench(1, "uniform", "nvfp4", **small),
        _bench(5, "uniform", "mxfp4", **small),
        _bench(12, "same", "nvfp4", padding=3, **small),  # more than 8 rows an expert
        _bench(24, "same", "nvfp4", **small | {"hidden": 128}),  # more than 16, shares of sums
        _bench(5, "uniform", "nvfp4", by_table=True, **small),
        # rows are sorted; blocks of 128 rows, and of what is left
        _bench(300, "skewed", "nvfp4", group="prefill", padding=3, **small),
        _bench(300, "uniform", "mxfp4", group="prefill", by_table=True, padding=1, **small | {"experts": 40}),
    ]


def _bench(
    tokens: int,
    kind: str,
    fmt: Format,
    *,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INNER,
    padding: int = 0,
    by_table: bool = False,
    is_padded: bool = False,
    group: str = "moe",
) -> Bench:
    """is_padded: tokens are said to be real, as a step's always are; raw scores, then, as those of a gate."""

    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(
            device, i, tokens, kind, fmt, experts=experts, hidden=hidden, inner=inner, padding=padding,
            by_table=by_table, is_padded=is_padded,
        )  # fmt: skip
        return inputs.launch

    distinct = statistics.mean(distinct_experts(kind, tokens, experts, seed) for seed in range(COPIES))
    weights = 3 * hidden * inner
    return Bench(
        group=group,
        op="moe",
        shape=f"B={tokens} {kind} {fmt}"
        + (f" of {experts} x {hidden} x {inner}" if experts != EXPERTS else "")
        + (f" +{padding}" if padding else "")
        + (" by table" if by_table else ""),
        make=make,
        bytes=int(distinct * weights * (4 + 8 / GROUP[fmt]) / 8) + tokens * hidden * 6,
        flops=tokens * TOP_K * weights * 2,
    )


@functools.cache
def distinct_experts(kind: str, tokens: int, experts: int, seed: int) -> int:
    """Return how many experts the tokens of draw_scores take."""
    return int(draw_scores(kind, tokens, experts, seed).topk(TOP_K).indices.flatten().bincount().count_nonzero())


def draw_scores(kind: str, tokens: int, experts: int, seed: int) -> Tensor:
    """Return [tokens, experts] positive float32 scores on the CPU."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.rand(tokens, experts, generator=draw) + 1e-3
    order = torch.randperm(experts, generator=draw)
    if kind == "same":
        noise[:, order[:TOP_K]] += 1.0
    elif kind == "zipf":  # the largest of log odds + Gumbel noise are drawn by odds
        odds = -torch.log(torch.arange(1, experts + 1).float())[order]
        noise = torch.sigmoid(odds - torch.log(-torch.log(noise.clamp(1e-6, 1 - 1e-6))))
    elif kind == "skewed":
        noise[::2, order[0]] += 1.0
    elif kind == "matched":
        noise[:, order[: distinct_experts("zipf", tokens, experts, seed)]] += 1.0
    return noise


def draw_inputs(
    device: torch.device,
    seed: int,
    tokens: int,
    kind: str,
    fmt: Format,
    *,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INNER,
    padding: int = 0,
    by_table: bool = False,
    is_padded: bool = False,
) -> Inputs:
    """Return a step of `tokens` tokens and `padding` padding tokens."""
    draw = torch.Generator(device).manual_seed(seed)
    scores = draw_scores(kind, tokens + padding, experts, seed).to(device)
    routing: dict[str, Any] = {}
    if by_table:
        routing["table"] = scores.topk(TOP_K).indices
        routing["token_ids"] = torch.randperm(tokens + padding, generator=draw, device=device)
    else:
        routing["bias"] = torch.zeros(experts, device=device)
    if is_padded:
        routing["is_raw"] = True
    if padding or is_padded:
        routing["sequence"] = torch.arange(tokens + padding, device=device).to(torch.int32)
        routing["sequence"][tokens:] = -1
    if tokens >> 8 and hidden >> 10 and device.type == "cpu":  # as weights: nobody reads it
        x = torch.zeros(tokens + padding, hidden, dtype=torch.bfloat16)
    else:
        x = torch.randn(tokens + padding, hidden, generator=draw, device=device).to(torch.bfloat16)
    return Inputs(
        x,
        scores,
        draw_weights(device, draw, experts, 2 * inner, hidden, fmt, parts=2),
        draw_weights(device, draw, experts, hidden, inner, fmt, parts=1),
        routing,
    )


def draw_weights(
    device: torch.device, draw: torch.Generator, experts: int, rows: int, channels: int, fmt: Format, *, parts: int
) -> ExpertWeights:
    """Return packed weights with random codes, scales of five powers of two and a factor that keeps sums near 1."""
    # The CPU only looks at how kernels are launched: large weights are one expert's there, under every number.
    drawn = experts if device.type == "cuda" or rows * channels < 1 << 20 else 1
    steps = channels // 64
    together = next(n for n in (4, 2, 1) if steps % n == 0)
    shape = (drawn, rows // 16, steps, 32, 4)
    codes = torch.randint(-(2**31), 2**31, shape, generator=draw, device=device, dtype=torch.int32)
    shape = (drawn, rows // 16, steps // together, LANES[fmt], 2 * together)
    if fmt == "nvfp4":
        byte = torch.randint(0x28, 0x49, shape, generator=draw, device=device, dtype=torch.uint8)  # 0.25 to 4.5
        factor = 1 / (4 * channels**0.5)
    else:
        byte = torch.randint(114, 119, shape, generator=draw, device=device, dtype=torch.uint8)
        byte[:, 0, 0, 0, :] = 118
        factor = 2.0 ** (118 - 127)
    factors = torch.full((drawn, parts), factor, device=device)
    scales = byte.view(torch.int16)
    if drawn < experts:
        codes, scales, factors = (x.expand(experts, *x.shape[1:]) for x in (codes, scales, factors))
    return ExpertWeights(fmt, codes, scales, factors)
