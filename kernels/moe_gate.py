"""Gate and routing in one launch: hidden states -> scores -> moe_routing.Routing.

    u = x Wg^T, float32;   a = sqrt(softplus(u));   the rest as in moe_routing.py

Bytes: the gate once (2 MB in bfloat16), x, its f16 copies. Programs share experts, tokens and channels out among
them, so that every multiprocessor has some of the weights. Sums are float32 in an order that depends on whether a step
has more than 64 tokens, not on what the others are: experts whose scores are within some 1e-6 of each other may be
chosen otherwise then.

More than SORTED tokens take a product, then route_tokens: it is their scores that take time, not launches.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import cdiv, next_power_of_2

from kernels.gemm_cut import FEW, Matrix, fit_few
from kernels.gemm_decode import linear_decode
from kernels.launch_order import ASIDE, CHAIN, IN_CHAIN, Order, Pair
from kernels.moe_gate_triton import gate_beside_kernel, gate_kernel
from kernels.moe_routing import MANY, MAX_TOKENS, SORTED, Routing, _check, route_tokens, route_tokens_reference
from kernels.scratch import zeros
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import HAS_PDL, arch_of, sm_count, uses_triton

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
    order: Order = IN_CHAIN,
) -> Routing:
    """Return the routing of x [T, H] bfloat16 or float32 by a gate [E, H] bfloat16, as the checkpoint has it.

    The other arguments as in moe_routing.route_tokens, top_k at most MAX_TOP_K.   tile: instead of the table's.
    order: among launches (launch_order.py). All inputs but x must have been written before the kernel in front of this
    one began. Calls of one stream share scratch memory (scratch.py): none may be aside of another. Raises ValueError.
    """
    return _route(
        x, gate, None, tile, top_k=top_k, scaling=scaling, bias=bias, table=table, token_ids=token_ids,
        sequence=sequence, order=order,
    )[0]  # fmt: skip


def route_beside(
    x: Tensor, gate: Tensor, weight: Tensor, scale: Tensor | None, *, limit: float, **routing: Any
) -> tuple[Routing, Tensor]:
    """Return route_by_gate(x, gate, **routing) and linear_decode(x, weight, scale, limit=limit) in x's dtype.

    One launch for up to FEW tokens in bfloat16 and e4m3 weights, as long as every program has a multiprocessor: the
    gate alone leaves most of them idle. Two for others, beside each other (launch_order.py). Raises ValueError as they
    do.
    """
    fits = uses_triton(x) and 0 < x.shape[0] <= FEW and x.dtype == torch.bfloat16 and x.is_contiguous()
    fits = fits and scale is not None and weight.shape[1] == x.shape[1] and x.shape[1] % 16 == 0
    fits = fits and weight.shape[0] % 16 == 0 and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    cut = _beside(arch_of(x.device), x.shape[0], *weight.shape) if fits else None
    if cut is not None and cdiv(weight.shape[0], 16) + 2 * (cdiv(gate.shape[0], 16) + 1) > sm_count(x.device):
        cut = None
    if cut is None or scale is None:
        pair = Pair()
        hidden = linear_decode(x, weight, scale, limit=limit, out_dtype=x.dtype, order=pair.lead)
        return route_by_gate(x, gate, **routing, order=pair.aside), hidden
    out, opened = _route(x, gate, (weight, scale, cut | {"LIMIT": limit}), None, **routing)
    assert opened is not None
    return out, opened


def _beside(arch: str, tokens: int, rows: int, channels: int) -> dict[str, Any] | None:
    """Return how a gated layer of e4m3 weights is cut for as many warps as the gate has, None if it is too small."""
    warps = tile_for(OP, arch, tokens=tokens).constants["KS"]
    constants = {"R": 1, "KS": warps, "RS": 1, "DEPTH": 4, "MAX_SPLIT": 1, "RESIDENT": 1, "REGISTERS": 0}
    cut = fit_few(Tile(constants, warps), tokens, Matrix(rows, channels, 1, is_gated=True), sms=1)
    if cut["KS"] * cut["RS"] != warps:
        return None
    renamed = {"LAYER_NB": cut.pop("NB"), "LAYER_KS": cut.pop("KS")}
    return renamed | {name: cut[name] for name in ("R", "RS", "DEPTH", "ONCE", "EVEN", "LEAN")}


def _route(
    x: Tensor,
    gate: Tensor,
    beside: tuple[Tensor, Tensor, dict[str, Any]] | None,
    tile: Tile | None,
    *,
    top_k: int,
    scaling: float,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    sequence: Tensor | None = None,
    order: Order = IN_CHAIN,
) -> tuple[Routing, Tensor | None]:
    """See route_by_gate. beside: weight and scale of a layer in the same launch, and its constants of the kernel."""
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
        ), None
    if tokens > SORTED:  # no order to take: these launches let none begin early, and begin when all have ended
        return route_tokens(
            x, linear_decode(x, gate, out_dtype=torch.float32), top_k=top_k, scaling=scaling, bias=bias, table=table,
            token_ids=token_ids, sequence=sequence, is_raw=True,
        ), None  # fmt: skip
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
    pdl, launch = _pdl(device)
    programs = cdiv(tokens, 8 * constants["NB"]) * cdiv(experts, 16) * constants["SPLIT"]
    own = _scratch(device, constants["PADDED"])
    given = (
        x, gate, bias, table, token_ids, sequence, out.ids, out.weights, out.rank, out.token, out.weight, out.first,
        out.active, *own, out.x, x_many, tokens, MANY if tokens > MANY else MAX_TOKENS * top_k, scaling,
    )  # fmt: skip
    launch |= {"PDL": pdl, "num_warps": constants["KS"], "num_stages": 1}
    programs += cdiv(tokens, 8)
    if beside is None:
        taken = order.take(reads=(x, bias, table, token_ids, sequence), writes=(*out.tensors, *own, x_many))
        gate_kernel[(programs,)](*given, **constants, ORDER=taken, **launch)
        return out, None
    weight, scale, cut = beside
    rows, channels = weight.shape
    opened = torch.empty((tokens, rows // 2), dtype=x.dtype, device=device)
    gate_beside_kernel[(programs + cdiv(rows, 16 * cut["R"] * cut["RS"]),)](
        *given, opened, weight.view(torch.int32), scale, opened.stride(0), rows, channels // 16, **constants, **cut,
        **launch,
    )  # fmt: skip
    return out, opened


def _pdl(device: torch.device) -> tuple[bool, dict[str, Any]]:
    pdl = HAS_PDL(device)
    return pdl, {"launch_pdl": True} if pdl else {}


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
    """Return the compilations that are shipped for `arch`: DeepSeek-V4-Flash's gate, experts by score and by table.

    Of a decode step with the shared expert's gates and values, above FEW tokens aside of them; of a prefill alone.
    """
    launched = ((8, True, CHAIN), (16, True, CHAIN), (64, False, ASIDE), (256, False, CHAIN))
    return [
        _variant(arch, tokens, by_table=by_table, is_beside=is_beside, order=order)
        for tokens, is_beside, order in launched
        for by_table in (False, True)
    ]


def rare_variants(arch: str) -> list[Variant]:
    """Return those of few tokens alone: of what is left of a prompt, or beside weights that do not fit."""
    return [
        _variant(arch, tokens, by_table=by_table, is_beside=False) for tokens in (8, 64) for by_table in (False, True)
    ]


def _variant(arch: str, tokens: int, *, by_table: bool, is_beside: bool, order: int = CHAIN) -> Variant:
    tile, kernel = tile_for(OP, arch, tokens=tokens), gate_beside_kernel if is_beside else gate_kernel
    signature = dict.fromkeys(kernel.arg_names, "*i32") | dict.fromkeys(("tokens", "many"), "i32")
    signature |= {"scaling": "fp32"} | dict.fromkeys(("bias_ptr", "weights_ptr", "weight_ptr"), "*fp32")
    signature |= {"table_ptr": "*i64", "token_ids_ptr": "*i64", "few_ptr": "*fp16", "many_ptr": "*fp16"}
    signature |= {"x_ptr": "*bf16", "w_ptr": "*bf16", "count_ptr": "*i64"}
    absent = ["bias_ptr"] if by_table else ["table_ptr", "token_ids_ptr"]
    signature |= dict.fromkeys(("out_stride", "rows", "pieces"), "i32") | {"scale_ptr": "*fp32", "out_ptr": "*bf16"}
    fixed: dict[str, Any] = _constants(tile, tokens, experts=256, hidden=4096, top_k=6) | {"PDL": True}
    if is_beside:
        cut = _beside(arch, tokens, 1024, 4096)
        assert cut is not None
        fixed |= cut | {"LIMIT": 10.0}
    else:
        fixed["ORDER"] = order
    fixed |= dict.fromkeys(absent if fixed["GROUPED"] else [*absent, "many_ptr"])
    signature = {name: signature[name] for name in kernel.arg_names if name not in fixed}
    return Variant(OP, kernel, signature, fixed, tile.constants["KS"], 1, unaligned=("tokens", "many"))
