"""Gate and routing of a decode step in one launch: hidden states -> scores -> moe_routing.Routing.

    u = x Wg^T, float32;   a = sqrt(softplus(u));   the rest as in moe_routing.py

Bytes: the gate once (2 MB in bfloat16), x, its f16 copies. Programs share experts, tokens and channels out among
them, so that every multiprocessor has some of the weights. Sums are float32 in an order that depends on whether a step
has more than 64 tokens, not on what the others are: experts whose scores are within some 1e-6 of each other may be
chosen otherwise then.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import cdiv, next_power_of_2

from kernels.moe_gate_triton import gate_kernel
from kernels.moe_routing import MANY, MAX_TOKENS, Routing, _check, route_tokens_reference
from kernels.scratch import zeros
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import HAS_PDL, arch_of, uses_triton

OP = "moe_gate"
MAX_TOP_K = 31  # a router's count of an expert must fit into a byte
MAX_SPLIT = 8  # programs that share channels


def route_by_gate_reference(
    x: Tensor,
    gate: Tensor,
    *,
    top_k: int,
    scaling: float,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    sequence: Tensor | None = None,
) -> Routing:
    """See route_by_gate."""
    return route_tokens_reference(
        x, F.linear(x.float(), gate.float()), top_k=top_k, scaling=scaling, bias=bias, table=table,
        token_ids=token_ids, sequence=sequence, is_raw=True,
    )  # fmt: skip


def route_by_gate(
    x: Tensor,
    gate: Tensor,
    *,
    top_k: int,
    scaling: float,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    sequence: Tensor | None = None,
    tile: Tile | None = None,
) -> Routing:
    """Return the routing of x [T, H] bfloat16 or float32 by a gate [E, H] bfloat16, as the checkpoint has it.

    The other arguments as in moe_routing.route_tokens, top_k at most MAX_TOP_K.   tile: instead of the table's. All
    inputs but x must have been written before the kernel in front of this one began. Calls of one stream
    share scratch memory (scratch.py).
    Raises ValueError.
    """
    tokens, hidden = x.shape
    experts = gate.shape[0]
    if gate.shape != (experts, hidden) or gate.dtype != torch.bfloat16 or not gate.is_contiguous():
        raise ValueError(f"gate {tuple(gate.shape)} {gate.dtype} for x {tuple(x.shape)}: wanted contiguous bfloat16")
    if top_k > MAX_TOP_K:
        raise ValueError(f"top_k {top_k}: at most {MAX_TOP_K}")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x of {x.dtype}: wanted bfloat16 or float32")
    scores = torch.empty((tokens, experts), device="meta")
    _check(x, scores, top_k, bias, table, token_ids, sequence)
    if not uses_triton(x) or not tokens:
        return route_by_gate_reference(
            x, gate, top_k=top_k, scaling=scaling, bias=bias, table=table, token_ids=token_ids, sequence=sequence
        )
    device, rows = x.device, tokens * top_k

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    f16, f32 = torch.float16, torch.float32
    out = Routing(
        empty(tokens, top_k), empty(tokens, top_k, dtype=f32), empty(tokens, top_k), empty(experts, rows),
        empty(experts, rows, dtype=f32), empty(experts), empty(4 + 4 * min(experts, rows)),
        empty(tokens, hidden, dtype=f16), empty(tokens, hidden, dtype=f16) if tokens > MANY else None,
    )  # fmt: skip
    if table is None and bias is None:
        bias = _zeros(device, experts, f32)
    if sequence is None:
        sequence = _zeros(device, MAX_TOKENS, torch.int32)
    tile = tile or tile_for(OP, arch_of(device), tokens=tokens)
    constants = _constants(tile, tokens, experts=experts, hidden=hidden, top_k=top_k)
    # One kernel for all steps of several routers: it writes both copies of x.
    x_many = empty(tokens, hidden, dtype=f16) if constants["GROUPED"] and out.x_many is None else out.x_many
    pdl = HAS_PDL(device)
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    programs = cdiv(tokens, 8 * constants["NB"]) * cdiv(experts, 16) * constants["SPLIT"]
    gate_kernel[(programs + cdiv(tokens, 8),)](
        x, gate, bias, table, token_ids, sequence, out.ids, out.weights, out.rank, out.token, out.weight, out.first,
        out.active, *_scratch(device, constants["PADDED"]), out.x, x_many, tokens,
        MANY if tokens > MANY else MAX_TOKENS * top_k, scaling,
        **constants, PDL=pdl, num_warps=constants["KS"], num_stages=1, **launch,
    )  # fmt: skip
    return out


def _constants(tile: Tile, tokens: int, *, experts: int, hidden: int, top_k: int) -> dict[str, int]:
    """Return the constants of the kernel.

    KS: warps that share channels, SPLIT: programs; NB: eights of tokens of a program.
    """
    c = dict(tile.constants)
    if c["SPLIT"] > MAX_SPLIT:
        raise ValueError(f"tile {c}: wanted SPLIT of at most {MAX_SPLIT}")
    return c | {
        "E": experts,
        "K": hidden,
        "TOP_K": top_k,
        "GROUPED": int(tokens > 8),
        "PADDED": max(256, int(next_power_of_2(experts))),
    }


@functools.cache
def _zeros(device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def _scratch(device: torch.device, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return parts of scores, zero between calls, and counts of routers with their steps: see the kernel."""
    return (
        zeros("route_by_gate", device, MAX_SPLIT, MAX_TOKENS, padded),
        zeros("route_by_gate", device, MAX_TOKENS // 8, padded // 4, dtype=torch.int64),
        zeros("route_by_gate", device, 1),
    )


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`: DeepSeek-V4-Flash's gate, experts by score and by table."""
    return [
        _variant(tile_for(OP, arch, tokens=tokens), tokens, by_table=by_table)
        for tokens in (8, 64, 256)
        for by_table in (False, True)
    ]


def _variant(tile: Tile, tokens: int, *, by_table: bool) -> Variant:
    signature = dict.fromkeys(gate_kernel.arg_names, "*i32") | dict.fromkeys(("tokens", "many"), "i32")
    signature |= {"scaling": "fp32"} | dict.fromkeys(("bias_ptr", "weights_ptr", "weight_ptr"), "*fp32")
    signature |= {"table_ptr": "*i64", "token_ids_ptr": "*i64", "few_ptr": "*fp16", "many_ptr": "*fp16"}
    signature |= {"x_ptr": "*bf16", "w_ptr": "*bf16", "count_ptr": "*i64"}
    absent = ["bias_ptr"] if by_table else ["table_ptr", "token_ids_ptr"]
    fixed: dict[str, Any] = _constants(tile, tokens, experts=256, hidden=4096, top_k=6) | {"PDL": True}
    fixed |= dict.fromkeys(absent if fixed["GROUPED"] else [*absent, "many_ptr"])
    signature = {name: kind for name, kind in signature.items() if name not in fixed}
    return Variant(OP, gate_kernel, signature, fixed, tile.constants["KS"], 1, unaligned=("tokens", "many"))
