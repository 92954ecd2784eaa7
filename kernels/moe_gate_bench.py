"""Benches and samples of route_by_gate: DeepSeek-V4-Flash's gate, [256, 4096] in bfloat16, 6 experts to a token."""

from __future__ import annotations

from typing import Any

import torch

from kernels.bench import Bench
from kernels.gpu_timer import Launch
from kernels.moe_gate import route_by_gate
from kernels.moe_routing import MANY

EXPERTS, TOP_K, HIDDEN, SCALING = 256, 6, 4096, 1.5


def benches() -> list[Bench]:
    """Return the benches: decode batches, experts by score and by table."""
    return [*(_bench(n) for n in (1, 16, 64, 256)), *(_bench(n, by_table=True) for n in (1, 64))]


def samples() -> list[Bench]:
    """Return small steps of one group of tokens and of several."""
    small: dict[str, Any] = {"experts": 20, "hidden": 128}
    return [_bench(3, **small), _bench(20, padding=2, **small), _bench(70, by_table=True, **small)]


def draw_inputs(
    device: torch.device,
    seed: int,
    tokens: int,
    *,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    padding: int = 0,
    by_table: bool = False,
) -> dict[str, Any]:
    """Return arguments of route_by_gate for `tokens` tokens and then padding."""
    draw = torch.Generator(device).manual_seed(seed)
    total = tokens + padding
    inputs: dict[str, Any] = {"top_k": TOP_K, "scaling": SCALING}
    inputs["x"] = torch.randn(total, hidden, generator=draw, device=device).to(torch.bfloat16)
    gate = torch.randn(experts, hidden, generator=draw, device=device) * (2 / hidden**0.5)
    inputs["gate"] = gate.to(torch.bfloat16)
    if by_table:
        inputs["table"] = torch.rand(1000, experts, generator=draw, device=device).topk(TOP_K).indices.contiguous()
        inputs["token_ids"] = torch.randint(0, 1000, (total,), generator=draw, device=device)
    else:
        inputs["bias"] = 0.1 * torch.randn(experts, generator=draw, device=device)
    if padding:
        inputs["sequence"] = torch.arange(total, device=device).to(torch.int32)
        inputs["sequence"][tokens:] = -1
    return inputs


def _bench(
    tokens: int, *, experts: int = EXPERTS, hidden: int = HIDDEN, padding: int = 0, by_table: bool = False
) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(device, i, tokens, experts=experts, hidden=hidden, padding=padding, by_table=by_table)
        return lambda: route_by_gate(**inputs)

    copies = 2 if tokens + padding > MANY else 1
    return Bench(
        group="moe",
        op="moe_gate",
        shape=f"B={tokens}"
        + (f" of {experts} x {hidden}" if experts != EXPERTS else "")
        + (f" +{padding}" if padding else "")
        + (" by table" if by_table else ""),
        make=make,
        bytes=2 * hidden * (experts + tokens * (1 + copies)) + tokens * TOP_K * 20,
        flops=2 * tokens * experts * hidden,
    )
