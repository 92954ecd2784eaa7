"""Routing of a decode step on the GPU: scores -> experts and weights of each token -> rows in the experts' order.

    a = sqrt(softplus(score)) if asked for, else the score;  experts, weights: as in moe.py
    row r of the order: choices sorted by expert, those of an expert by token; padding tokens have none

One launch: the first program routes, the others turn activations into f16 for the products. All outputs have sizes that
depend on the number of tokens alone, so a graph can be replayed. `active` lists the experts that have rows:

    active[0]: how many;   active[4 + 4 i ...]: expert, its first row, its number of rows, 0

A score that is NaN is chosen first, as a sort would, and makes its token's weights NaN. An expert id of the table that
does not exist makes its token's weights NaN too, and its id -1; the token then counts as routed to expert 0.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from kernels.moe import route
from kernels.row_load import to_f16
from kernels.tiles import Variant
from kernels.triton_env import HAS_PDL, uses_triton

OP = "moe_route"
MAX_TOKENS = 1024
_CONVERTED = 2048  # activations of a program
_LOWEST = tl.constexpr(-(2**31))


@dataclasses.dataclass(frozen=True)
class Routing:
    """Where each token goes: T tokens, k experts each, N = T k rows at most.

    ids [T, k] int32, -1 for padding; weights [T, k] float32; place [T, k] int32: the row of each choice, -1 for none.
    token [N] int32, weight [N] float32: of each row.   active [4 + 4 min(E, N)] int32.   x [T, H] f16.
    """

    ids: Tensor
    weights: Tensor
    place: Tensor
    token: Tensor
    weight: Tensor
    active: Tensor
    x: Tensor


def route_tokens_reference(
    x: Tensor,
    scores: Tensor,
    *,
    top_k: int,
    scaling: float,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    sequence: Tensor | None = None,
    is_raw: bool = False,
) -> Routing:
    """See route_tokens."""
    tokens, experts = scores.shape
    a = F.softplus(scores.float()).sqrt() if is_raw else scores.float()
    chosen = None
    if table is not None and token_ids is not None:
        chosen = table[token_ids].long()
        exists = (chosen >= 0) & (chosen < experts)
        chosen = torch.where(exists, chosen, 0)
        a = torch.where(exists.all(1, keepdim=True), a, torch.nan)
    ids, weights = route(a, bias=bias, chosen=chosen, top_k=top_k, scaling=scaling)
    real = torch.ones(tokens, dtype=torch.bool, device=x.device) if sequence is None else sequence >= 0
    key = torch.where(real[:, None], ids, experts).flatten()
    order = key.argsort(stable=True)
    count = int(real.sum()) * top_k
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=x.device)
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    first = counts.cumsum(0) - counts
    used = counts.nonzero().flatten()
    active = torch.zeros(4 + 4 * min(experts, tokens * top_k), dtype=torch.int32, device=x.device)
    active[0] = used.numel()
    entries = torch.stack([used, first[used], counts[used], torch.zeros_like(used)], 1)
    active[4 : 4 + 4 * used.numel()] = entries.flatten().to(torch.int32)
    return Routing(
        ids.masked_fill(~real[:, None], -1).to(torch.int32),
        weights.masked_fill(~real[:, None], 0.0),
        place.view(tokens, top_k).masked_fill(~real[:, None], -1).to(torch.int32),
        (order[:count] // top_k).to(torch.int32),
        weights.flatten()[order[:count]],
        active,
        x.to(torch.float16),
    )


def route_tokens(
    x: Tensor,
    scores: Tensor,
    *,
    top_k: int,
    scaling: float,
    bias: Tensor | None = None,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    sequence: Tensor | None = None,
    is_raw: bool = False,
) -> Routing:
    """Return the routing of x [T, H], any float dtype, by scores [T, E] float32.

    is_raw: the scores are the gate's products; sqrt(softplus) is still to be taken.   bias [E] float32: chooses only.
    table [V, k] int64 with token_ids [T] int64: experts by token id.   sequence [T] int32: -1 marks padding.
    Rows of `token` and `weight` beyond the last are not written. Equal scores go to the lower expert.
    """
    tokens, experts = scores.shape
    _check(x, scores, top_k, bias, table, token_ids, sequence)
    if not uses_triton(x):
        return route_tokens_reference(
            x, scores, top_k=top_k, scaling=scaling, bias=bias, table=table, token_ids=token_ids, sequence=sequence,
            is_raw=is_raw,
        )  # fmt: skip
    rows, hidden = tokens * top_k, x.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    f32 = torch.float32
    out = Routing(
        empty(tokens, top_k), empty(tokens, top_k, dtype=f32), empty(tokens, top_k), empty(rows),
        empty(rows, dtype=f32), empty(4 + 4 * min(experts, rows)), empty(tokens, hidden, dtype=torch.float16),
    )  # fmt: skip
    if not tokens:
        out.active.zero_()
        return out
    pdl = HAS_PDL(x.device)
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    constants, warps = _cut(tokens, experts, top_k)
    route_kernel[(1 + triton.cdiv(tokens * hidden, _CONVERTED),)](
        scores, bias, table, token_ids, sequence, out.ids, out.weights, out.place, out.token, out.weight, out.active,
        x, out.x, tokens, tokens * hidden, scaling,
        E=experts, TOP_K=top_k, RAW=is_raw, CONVERTED=_CONVERTED, PDL=pdl, **constants,
        num_warps=warps, num_stages=1, **launch,
    )  # fmt: skip
    return out


def _cut(tokens: int, experts: int, top_k: int) -> tuple[dict[str, int], int]:
    """Return the block sizes and warps for so many tokens: few values, so that few kernels are compiled."""
    block_t, warps = (1, 4) if tokens == 1 else (4, 4) if tokens <= 16 else (16, 8)
    rows = next((n for n in (8, 128, 512) if tokens * top_k <= n), 512)
    width, padded = int(next_power_of_2(top_k)), int(next_power_of_2(experts))
    return {"BLOCK_T": block_t, "BLOCK_R": rows, "BLOCK_J": min(rows, 32), "WIDTH": width, "PADDED": padded}, warps


def _check(
    x: Tensor, scores: Tensor, top_k: int, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None,
    sequence: Tensor | None,
) -> None:  # fmt: skip
    tokens, experts = scores.shape
    if tokens > MAX_TOKENS or x.shape[0] != tokens or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)}, strides {x.stride()}, for scores of {tokens} tokens (<= {MAX_TOKENS})")
    if scores.dtype != torch.float32 or not scores.is_contiguous() or not 0 < top_k <= experts:
        raise ValueError(f"scores {tuple(scores.shape)} {scores.dtype}: wanted contiguous float32, {top_k} of them")
    if bias is not None and (bias.shape != (experts,) or bias.dtype != torch.float32):
        raise ValueError(f"bias {tuple(bias.shape)} {bias.dtype}: wanted float32 ({experts},)")
    if (table is None) != (token_ids is None) or (table is not None and bias is not None):
        raise ValueError("experts by token id need both the table and the ids, and no bias")
    if table is not None and (table.shape[1] != top_k or table.dtype != torch.int64 or not table.is_contiguous()):
        raise ValueError(f"table {tuple(table.shape)} {table.dtype}: wanted contiguous int64 (ids, {top_k})")
    if token_ids is not None and (token_ids.shape != (tokens,) or token_ids.dtype != torch.int64):
        raise ValueError(f"token ids {tuple(token_ids.shape)} {token_ids.dtype}: wanted int64 ({tokens},)")
    if sequence is not None and (sequence.shape != (tokens,) or sequence.dtype != torch.int32):
        raise ValueError(f"sequence {tuple(sequence.shape)} {sequence.dtype}: wanted int32 ({tokens},)")


@triton.jit
def _activate(u, RAW: tl.constexpr):
    """Return sqrt(softplus(u)). log(1 + z) with z's lost digits put back: small scores must not all become 0."""
    if RAW:
        z = tl.exp(-tl.abs(u))
        one = 1.0 + z
        log = tl.where(one == 1.0, z, tl.log(one) * (z / tl.where(one == 1.0, 1.0, one - 1.0)))
        u = tl.sqrt_rn(tl.where(u > 0.0, u, 0.0) + log)
    return u


@triton.jit
def _choose(choice, is_expert, TOP_K: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, T: tl.constexpr):
    """Return the ids [T, WIDTH] of the TOP_K largest of choice [T, PADDED], the lower one where equal; NaN first."""
    e = tl.arange(0, PADDED)[None, :]
    k = tl.arange(0, WIDTH)[None, :]
    bits = (choice + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # orders like the numbers
    key = tl.where(choice != choice, 0x7FFFFFFF, key)
    key = tl.where(is_expert, key, _LOWEST)
    chosen = tl.zeros((T, WIDTH), tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.max(key, 1)[:, None]
        expert = tl.min(tl.where(key == best, e, PADDED), 1)[:, None]
        chosen = tl.where(k == i, expert, chosen)
        key = tl.where(e == expert, _LOWEST, key)
    return chosen


@triton.jit(do_not_specialize=["tokens", "size"])
def route_kernel(
    scores_ptr, bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, ids_ptr, weights_ptr, place_ptr, token_ptr,
    weight_ptr, active_ptr, x_ptr, half_ptr, tokens, size, scaling,
    E: tl.constexpr, TOP_K: tl.constexpr, RAW: tl.constexpr, CONVERTED: tl.constexpr, PDL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_J: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program 0 routes; program i converts CONVERTED activations."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) > 0:
        at = (tl.program_id(0) - 1) * CONVERTED + tl.arange(0, CONVERTED)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(half_ptr + at, to_f16(x), mask=at < size)
    else:
        e, k = tl.arange(0, PADDED), tl.arange(0, WIDTH)
        for start in range(0, tokens, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            is_token = t < tokens
            real = is_token
            if sequence_ptr is not None:
                real = is_token & (tl.load(sequence_ptr + t, mask=is_token, other=-1) >= 0)
            is_choice = real[:, None] & (k < TOP_K)[None, :]
            wrong = tl.zeros((BLOCK_T,), tl.int32)
            if table_ptr is None:
                inside = real[:, None] & (e < E)[None, :]
                choice = _activate(tl.load(scores_ptr + t[:, None] * E + e[None, :], mask=inside, other=0.0), RAW)
                if bias_ptr is not None:
                    choice += tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
                chosen = _choose(choice, (e < E)[None, :], TOP_K, WIDTH, PADDED, BLOCK_T)
            else:
                word = tl.load(token_ids_ptr + t, mask=real, other=0)
                found = tl.load(table_ptr + word[:, None] * TOP_K + k[None, :], mask=is_choice, other=0)
                exists = (found >= 0) & (found < E)
                wrong = tl.max(tl.where(exists, 0, 1), 1)
                chosen = tl.where(exists, found, 0).to(tl.int32)
            a = _activate(tl.load(scores_ptr + t[:, None] * E + chosen, mask=is_choice, other=0.0), RAW)
            a = tl.where(is_choice, a, 0.0)
            weight = a / tl.sum(a, 1)[:, None] * scaling
            weight = tl.where((wrong > 0)[:, None], float("nan"), weight)
            at = t[:, None] * TOP_K + k[None, :]
            kept = is_token[:, None] & (k < TOP_K)[None, :]
            tl.store(ids_ptr + at, tl.where(is_choice, chosen, -1), mask=kept)
            tl.store(weights_ptr + at, tl.where(is_choice, weight, 0.0), mask=kept)
        tl.debug_barrier()  # the ids are read back by other threads
        rows = tokens * TOP_K
        count = tl.zeros((PADDED,), tl.int32)
        first = tl.zeros((PADDED,), tl.int32)
        for start in range(0, rows, BLOCK_J):
            j = start + tl.arange(0, BLOCK_J)
            other = tl.load(ids_ptr + j, mask=j < rows, other=-1)
            count += tl.sum((other[None, :] == e[:, None]).to(tl.int32), 1)
            first += tl.sum(((other[None, :] >= 0) & (other[None, :] < e[:, None])).to(tl.int32), 1)
        is_active = (count > 0).to(tl.int32)
        entry = active_ptr + 4 * (tl.cumsum(is_active, 0) - is_active + 1)
        tl.store(active_ptr, tl.sum(is_active, 0))
        tl.store(entry, e, mask=count > 0)
        tl.store(entry + 1, first, mask=count > 0)
        tl.store(entry + 2, count, mask=count > 0)
        for begin in range(0, rows, BLOCK_R):
            i = begin + tl.arange(0, BLOCK_R)
            expert = tl.load(ids_ptr + i, mask=i < rows, other=-1)
            place = tl.zeros((BLOCK_R,), tl.int32)
            for start in range(0, rows, BLOCK_J):
                j = start + tl.arange(0, BLOCK_J)
                other = tl.load(ids_ptr + j, mask=j < rows, other=-1)[None, :]
                is_before = (other < expert[:, None]) | ((other == expert[:, None]) & (j[None, :] < i[:, None]))
                place += tl.sum((is_before & (other >= 0)).to(tl.int32), 1)
            has_row = expert >= 0
            tl.store(place_ptr + i, tl.where(has_row, place, -1), mask=i < rows)
            tl.store(token_ptr + place, i // TOP_K, mask=has_row)
            tl.store(weight_ptr + place, tl.load(weights_ptr + i, mask=has_row, other=0.0), mask=has_row)


# What the offline gate compiles: (tokens, by table) with DeepSeek-V4-Flash's 256 experts of which 6 are taken.
_SHIPPED = [(tokens, by_table) for tokens in (1, 16, 64, 256) for by_table in (False, True)]


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate."""
    found: dict[str, Variant] = {}
    for tokens, by_table in _SHIPPED:
        for padded in (False, True):
            for raw in (False, True):
                variant = _variant(tokens, by_table=by_table, padded=padded, raw=raw)
                found.setdefault(repr((variant.constants, variant.num_warps)), variant)
    return list(found.values())


def _variant(tokens: int, *, by_table: bool, padded: bool, raw: bool) -> Variant:
    constants, warps = _cut(tokens, 256, 6)
    signature = dict.fromkeys(route_kernel.arg_names, "*i32") | {"tokens": "i32", "size": "i32", "scaling": "fp32"}
    signature |= dict.fromkeys(("scores_ptr", "bias_ptr", "weights_ptr", "weight_ptr"), "*fp32")
    signature |= {"table_ptr": "*i64", "token_ids_ptr": "*i64", "x_ptr": "*bf16", "half_ptr": "*fp16"}
    absent = ["bias_ptr"] if by_table else ["table_ptr", "token_ids_ptr"]
    absent += [] if padded else ["sequence_ptr"]
    fixed: dict[str, Any] = dict.fromkeys(absent) | constants
    fixed |= {"E": 256, "TOP_K": 6, "RAW": raw, "CONVERTED": _CONVERTED, "PDL": True}
    signature = {name: kind for name, kind in signature.items() if name not in fixed}
    return Variant(
        OP, route_kernel, signature, fixed, warps, 1, tensor_ops=(), unaligned=("tokens", "size")
    )  # fmt: skip
