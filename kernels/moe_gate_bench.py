"""Benches and samples of route_by_gate: DeepSeek-V4-Flash's gate, [256, 4096] in bfloat16, 6 experts to a token."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from triton import cdiv

from kernels.bench import Bench
from kernels.gpu_timer import Launch
from kernels.moe_gate import route_beside, route_by_gate
from kernels.moe_routing import MANY, SORTED

EXPERTS, TOP_K, HIDDEN, SCALING = 256, 6, 4096, 1.5
ROWS = 1024  # of the shared expert's gates and values on one of 4 ranks


def benches() -> list[Bench]:
    """Return the benches: decode batches, experts by score and by table."""
    return [
        *(_bench(n) for n in (1, 16, 64, 256)),
        *(_bench(n, by_table=True) for n in (1, 64)),
        *(_beside(n) for n in (1, 8, 16)),
        *(_bench(4096, by_table=by_table, group="prefill") for by_table in (False, True)),
    ]


def _beside(tokens: int, *, experts: int = EXPERTS, hidden: int = HIDDEN, rows: int = ROWS) -> Bench:
    """Return the bench of a step that opens the shared expert in the gate's launch."""
    plain = _bench(tokens, experts=experts, hidden=hidden)

    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(device, i, tokens, experts=experts, hidden=hidden)
        draw = torch.Generator(device).manual_seed(i)
        weight = torch.randn(rows, hidden, generator=draw, device=device).to(torch.float8_e4m3fn)
        scale = torch.rand(cdiv(rows, 128), cdiv(hidden, 128), generator=draw, device=device) / hidden**0.5
        return lambda: route_beside(**inputs, weight=weight, scale=scale, limit=10.0)

    return dataclasses.replace(
        plain,
        shape=f"{plain.shape} and {rows} rows of gates and values",
        make=make,
        bytes=plain.bytes + rows * hidden + tokens * rows,
        flops=plain.flops + 2 * tokens * rows * hidden,
    )


def samples() -> list[Bench]:
    """Return small steps of one group of tokens and of several."""
    small: dict[str, Any] = {"experts": 20, "hidden": 128}
    plain = [_bench(3, **small), _bench(20, padding=2, **small), _bench(70, by_table=True, **small)]
    return [*plain, *(_beside(tokens, experts=20, hidden=1024, rows=64) for tokens in (3, 12))]


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
    tokens: int, *, experts: int = EXPERTS, hidden: int = HIDDEN, padding: int = 0, by_table: bool = False,
    group: str = "moe",
) -> Bench:  # fmt: skip
    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(device, i, tokens, experts=experts, hidden=hidden, padding=padding, by_table=by_table)
        return lambda: route_by_gate(**inputs)

    copies = 2 if MANY < tokens + padding <= SORTED else 1
    return Bench(
        group=group,
        op="moe_gate",
        shape=f"B={tokens}"
        + (f" of {experts} x {hidden}" if experts != EXPERTS else "")
        + (f" +{padding}" if padding else "")
        + (" by table" if by_table else ""),
        make=make,
        bytes=2 * hidden * (experts + tokens * (1 + copies)) + tokens * TOP_K * 20,
        flops=2 * tokens * experts * hidden,
    )
