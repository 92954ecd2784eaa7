"""Benches and samples of launches beside each other (launch_order.py), and of the same launches in the chain.

Of a rank of 4: the gate, aside of the shared expert's first product where there are many tokens; the shared expert's
last product and, aside of it, the experts' first one.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from kernels.bench import COPIES, Bench
from kernels.expert_weights import GROUP
from kernels.gemm_bench import Layer, layers, make_launch
from kernels.gemm_cut import FEW
from kernels.gpu_timer import Launch
from kernels.launch_order import Pair
from kernels.moe_bench import EXPERTS, HIDDEN, INNER, LIMIT, TOP_K, distinct_experts, draw_weights
from kernels.moe_decode import expert_parts
from kernels.moe_gate import route_by_gate
from kernels.moe_gate_bench import draw_inputs


def benches() -> list[Bench]:
    """Return the benches: one sequence, and a batch."""
    *_, gates, down, _head = layers(4)
    return [
        _bench(tokens, fmt, gates, down, is_aside=is_aside)
        for tokens, fmt in ((1, "mxfp4"), (64, "nvfp4"))
        for is_aside in (True, False)
    ]


def samples() -> list[Bench]:
    """Return a small one of few tokens, and of many."""
    gates, down = Layer("gate+up", 32, 64, is_gated=True), Layer("down", 64, 64)
    small: dict[str, Any] = {"experts": 8, "hidden": 64, "inner": 64}
    return [_bench(tokens, "nvfp4", gates, down, is_aside=True, **small) for tokens in (2, 17)]


def _bench(
    tokens: int, fmt: Any, gates: Layer, down: Layer, *, is_aside: bool, experts: int = EXPERTS, hidden: int = HIDDEN,
    inner: int = INNER,
) -> Bench:  # fmt: skip
    def make(device: torch.device, i: int) -> Launch:
        draw = torch.Generator(device).manual_seed(i)
        given = draw_inputs(device, i, tokens, experts=experts, hidden=hidden)
        w13 = draw_weights(device, draw, experts, 2 * inner, hidden, fmt, parts=2)
        w2 = draw_weights(device, draw, experts, hidden, inner, fmt, parts=1)
        opened, added = make_launch(gates, tokens, device, i), make_launch(down, tokens, device, i + 1000)

        def launch() -> Any:
            pair = Pair(takes_turns=not is_aside)
            if tokens > FEW:
                opened(order=pair.lead)
            routing = route_by_gate(**given, order=pair.aside)
            last = Pair(takes_turns=not is_aside)
            add = added(order=last.lead)
            return expert_parts(routing, w13, w2, limit=LIMIT, add=add, order=last.aside)

        return launch

    shared = [down, gates] if tokens > FEW else [down]
    distinct = statistics.mean(distinct_experts("uniform", tokens, experts, seed) for seed in range(COPIES))
    weights, sizes = 3 * hidden * inner, sum(layer.bytes for layer in shared)
    return Bench(
        group="moe",
        op="moe_beside",
        shape=f"B={tokens} {fmt} {experts} x {hidden}, shared {'aside' if is_aside else 'in the chain'}",
        make=make,
        bytes=sizes + 2 * hidden * experts + int(distinct * weights * (4 + 8 / GROUP[fmt]) / 8),
        flops=2 * tokens * (TOP_K * weights + sizes),
    )
