"""Routing on the GPU: scores -> experts and weights of each token -> rows in the experts' order.

    a = sqrt(softplus(score)) if asked for, else the score;  experts, weights: as in moe.py
    row first[expert] + rank of the order: choices sorted by expert; padding tokens have none

One launch up to SORTED tokens: a program for each token, the last of which to finish lists the experts, and others that
turn activations into f16 for the products. All outputs have sizes that depend on the number of tokens alone, so a graph
can be replayed. `active` lists the experts that have rows, those with more than MANY of them first:

    active[0]: how many;   active[1]: how many with more than MANY rows (0 for so few tokens, MANY or less)
    active[4 + 4 i ...]: expert, its first row, its number of rows, 0

More tokens take two launches, since lists of every expert with room for all choices would fill 100 MB: experts are
chosen and counted, then each lists its rows where they lie, sorted by token. `active` lists blocks of up to BLOCK_ROWS
rows of an expert then, the last one of an expert with what is left:

    active[0]: how many;   active[4 + 4 i ...]: expert, the block's first row, its number of rows, 0

A score that is NaN is chosen first, as a sort would, and makes its token's weights NaN. An expert of the table that
does not exist makes its token's weights NaN, too; the token then counts as routed to expert 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import next_power_of_2

from kernels.expert_weights import to_pieces, to_products
from kernels.moe import route
from kernels.moe_route_triton import route_kernel
from kernels.moe_sort_triton import expert_choice_kernel, sort_kernel
from kernels.scratch import zeros
from kernels.tiles import Variant
from kernels.triton_env import HAS_PDL, uses_triton

OP, SORT_OP = "moe_route", "moe_sort"
MAX_TOKENS = 1024  # that lists with room for all choices may hold
SORTED = 256  # tokens beyond which rows are sorted, and their experts read by moe_blocks.py
MOST_TOKENS = 8192
BLOCK_ROWS = 128
MANY = 16  # rows of an expert beyond which the products are done another way
_CONVERTED = 1024  # activations of a program
_SORTED_AT_ONCE = 4096  # choices


@dataclasses.dataclass(frozen=True)
class Routing:
    """Where each token goes: T tokens, k experts each of E, N = T k rows at most.

    ids [T, k] int32, -1 for padding; weights [T, k] float32; rank [T, k] int32: of a choice among its expert's, -1 for
    none. token [E, N] int32, weight [E, N] float32: of each expert's rows by rank; the rest is not written.
    first [E] int32: an expert's first row of all.   active [4 + 4 min(E, N)] int32.
    x, x_many [T, H] f16, in the order of expert_weights.to_pieces, and of to_products; None for MANY tokens or less.
    Of more than SORTED tokens: token, weight [N], of all rows; active [4 + 4 (min(E, N) + N / BLOCK_ROWS)]; x and
    x_many are the same, in the order of to_products.
    is_partial: active lists, and token and weight have, experts from `first_expert` on only (moe_held.py).
    """

    ids: Tensor
    weights: Tensor
    rank: Tensor
    token: Tensor
    weight: Tensor
    first: Tensor
    active: Tensor
    x: Tensor
    x_many: Tensor | None
    first_expert: int = 0
    is_partial: bool = False

    @property
    def rows(self) -> int:
        """N."""
        return int(self.token.shape[-1])

    def new_parts(self, channels: int) -> Tensor:
        """Return memory for the last product's rows [N, channels] float32, 0 where rows of others will be missing."""
        make = torch.zeros if self.is_partial else torch.empty
        return make((self.rows, channels), dtype=torch.float32, device=self.x.device)

    @property
    def is_sorted(self) -> bool:
        """Whether token and weight are of all rows, not of each expert's."""
        return self.token.ndim == 1

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of it."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("first_expert", "is_partial")]
        return tuple(getattr(self, name) for name in names)


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
    real = torch.ones(tokens, dtype=torch.bool, device=x.device) if sequence is None else sequence >= 0
    chosen = None
    if table is not None and token_ids is not None:
        chosen = table[token_ids.masked_fill(~real, 0)].long()
        exists = (chosen >= 0) & (chosen < experts)
        chosen = torch.where(exists, chosen, 0)
        a = torch.where(exists.all(1, keepdim=True), a, torch.nan)
    ids, weights = route(a, bias=bias, chosen=chosen, top_k=top_k, scaling=scaling)
    key = torch.where(real[:, None], ids, experts).flatten()
    order = key.argsort(stable=True)
    counts = torch.bincount(key, minlength=experts + 1)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=x.device) - first[key[order]]
    counts, first = counts[:experts], first[:experts]
    ids, weights = ids.masked_fill(~real[:, None], -1).to(torch.int32), weights.masked_fill(~real[:, None], 0.0)
    ranks = rank.view(tokens, top_k).masked_fill(~real[:, None], -1).to(torch.int32)
    taken = real.repeat_interleave(top_k)
    own, half = (torch.arange(order.numel(), device=x.device) // top_k)[taken].to(torch.int32), x.to(torch.float16)
    if tokens > SORTED:
        row, size, room = first[key[taken]] + rank[taken], order.numel(), min(experts, order.numel())
        blocks = -(-counts // BLOCK_ROWS)
        used = torch.arange(experts, device=x.device).repeat_interleave(blocks)
        begin = torch.arange(used.numel(), device=x.device) - (blocks.cumsum(0) - blocks)[used]
        begin *= BLOCK_ROWS
        entries = torch.stack([used, first[used] + begin, (counts[used] - begin).clamp(max=BLOCK_ROWS), used * 0], 1)
        active = _listed(entries, 4 + 4 * (room + size // BLOCK_ROWS), 0)
    else:
        row, size = (key * order.numel() + rank)[taken], experts * order.numel()
        used = counts.nonzero().flatten()
        many = counts[used] > (MANY if tokens > MANY else tokens * top_k)
        used = torch.cat([used[many], used[~many]])
        entries = torch.stack([used, first[used], counts[used], torch.zeros_like(used)], 1)
        active = _listed(entries, 4 + 4 * min(experts, tokens * top_k), int(many.sum()))
    token = torch.zeros(size, dtype=torch.int32, device=x.device)
    token[row] = own
    weight = torch.zeros(size, device=x.device)
    weight[row] = weights.flatten()[taken]
    first = first.to(torch.int32)
    if tokens > SORTED:
        half = to_products(half)
        return Routing(ids, weights, ranks, token, weight, first, active, half, half)
    return Routing(
        ids, weights, ranks, token.view(experts, -1), weight.view(experts, -1), first, active, to_pieces(half),
        to_products(half) if tokens > MANY else None,
    )  # fmt: skip


def _listed(entries: Tensor, size: int, many: int) -> Tensor:
    """Return `active` [size] of entries [n, 4]."""
    active = torch.zeros(size, dtype=torch.int32, device=entries.device)
    active[0], active[1] = entries.shape[0], many
    active[4 : 4 + entries.numel()] = entries.flatten().to(torch.int32)
    return active


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
    table [V, k] int64 with token_ids [T] int64: experts by token id; the ids of tokens, unlike those of padding, must
    be below V: nobody looks.   sequence [T] int32: -1 marks padding.
    Equal scores go to the lower expert. Calls of one stream share counters (scratch.py).
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

    f16, f32 = torch.float16, torch.float32
    if tokens > SORTED:
        half = empty(tokens, hidden, dtype=f16)
        out = Routing(
            empty(tokens, top_k), empty(tokens, top_k, dtype=f32), empty(tokens, top_k), empty(rows),
            empty(rows, dtype=f32), empty(experts), empty(4 + 4 * (min(experts, rows) + rows // BLOCK_ROWS)), half,
            half,
        )  # fmt: skip
        _sort(out, x, scores, bias, table, token_ids, sequence, scaling=scaling, is_raw=is_raw)
        return out
    out = Routing(
        empty(tokens, top_k), empty(tokens, top_k, dtype=f32), empty(tokens, top_k), empty(experts, rows),
        empty(experts, rows, dtype=f32), empty(experts), empty(4 + 4 * min(experts, rows)),
        empty(tokens, hidden, dtype=f16), empty(tokens, hidden, dtype=f16) if tokens > MANY else None,
    )  # fmt: skip
    if not tokens:
        out.active.zero_()
        return out
    pdl = HAS_PDL(x.device)
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    constants = _constants(tokens, experts, top_k)
    counters = zeros("route_tokens", x.device, constants["PADDED"] + 1)
    route_kernel[(tokens + -(-tokens * hidden // _CONVERTED),)](
        scores, bias, table, token_ids, sequence, out.ids, out.weights, out.rank, out.token, out.weight, out.first,
        out.active, counters, x, out.x, out.x_many, tokens, tokens * hidden, scaling,
        RAW=is_raw, PDL=pdl, **constants, num_warps=1, num_stages=1, **launch,
    )  # fmt: skip
    return out


def _sort(
    out: Routing, x: Tensor, scores: Tensor, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None,
    sequence: Tensor | None, *, scaling: float, is_raw: bool,
) -> None:  # fmt: skip
    """Fill a routing whose rows are sorted."""
    (tokens, top_k), experts, size = out.ids.shape, out.first.shape[0], x.numel()
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    choosing, sorting = _sort_constants(experts, top_k)
    expert_choice_kernel[(tokens + -(-size // _CONVERTED),)](
        scores, bias, table, token_ids, sequence, out.ids, out.weights, counts, x, out.x, tokens, size, scaling,
        RAW=is_raw, **choosing, num_warps=1, num_stages=1,
    )  # fmt: skip
    sort_kernel[(experts + 1,)](
        out.ids, out.weights, counts, out.rank, out.token, out.weight, out.first, out.active, out.ids.numel(),
        **sorting, num_warps=8, num_stages=1,
    )  # fmt: skip


def _sort_constants(experts: int, top_k: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the constants of both kernels."""
    both = {"E": experts, "TOP_K": top_k, "PADDED": int(next_power_of_2(experts))}
    return (
        both | {"CONVERTED": _CONVERTED, "WIDTH": int(next_power_of_2(top_k))},
        both | {"ROWS": BLOCK_ROWS, "AT_ONCE": _SORTED_AT_ONCE},
    )


def _constants(tokens: int, experts: int, top_k: int) -> dict[str, int]:
    """Return constants of the kernel: few values, so that few kernels are compiled."""
    return {
        "E": experts,
        "TOP_K": top_k,
        "MANY": MANY if tokens > MANY else MAX_TOKENS * top_k,
        "CONVERTED": _CONVERTED,
        "WIDTH": int(next_power_of_2(top_k)),
        "PADDED": int(next_power_of_2(experts)),
    }


def _check(
    x: Tensor, scores: Tensor, top_k: int, bias: Tensor | None, table: Tensor | None, token_ids: Tensor | None,
    sequence: Tensor | None,
) -> None:  # fmt: skip
    if scores.ndim != 2 or x.ndim != 2:
        raise ValueError(f"x {tuple(x.shape)}, scores {tuple(scores.shape)}: wanted [T, H] and [T, E]")
    tokens, experts = scores.shape
    if tokens > MOST_TOKENS or x.shape[0] != tokens or not x.is_contiguous() or x.shape[1] % 64:
        raise ValueError(
            f"x {tuple(x.shape)}, strides {x.stride()}, for scores of {tokens} tokens: wanted contiguous rows of a "
            f"multiple of 64 channels, {MOST_TOKENS} tokens at most"
        )
    if scores.dtype != torch.float32 or not scores.is_contiguous():
        raise ValueError(
            f"scores {tuple(scores.shape)} {scores.dtype}, strides {scores.stride()}: not contiguous float32"
        )
    if not 0 < top_k <= experts:
        raise ValueError(f"top_k {top_k} of {experts} experts")
    if (table is None) != (token_ids is None) or (table is not None and bias is not None):
        raise ValueError("experts by token id need both the table and the ids, and no bias")
    if table is not None and (table.ndim != 2 or table.shape[1] != top_k):
        raise ValueError(f"table {tuple(table.shape)} of {top_k} experts a token")
    wanted = [
        ("bias", bias, (experts,), torch.float32),
        ("table", table, None, torch.int64),
        ("token_ids", token_ids, (tokens,), torch.int64),
        ("sequence", sequence, (tokens,), torch.int32),
    ]
    for name, given, shape, dtype in wanted:
        if given is None:
            continue
        if (shape is not None and tuple(given.shape) != shape) or given.dtype != dtype or not given.is_contiguous():
            raise ValueError(
                f"{name} {tuple(given.shape)} {given.dtype}, strides {given.stride()}: wanted contiguous {dtype}"
                + (f" {shape}" if shape else "")
            )


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`: DeepSeek-V4-Flash's 256 experts of which 6 are taken."""
    return [
        _variant(tokens, by_table=by_table, padded=padded)
        for tokens in (1, MANY + 1)
        for by_table in (False, True)
        for padded in (False, True)
    ] + _sort_variants(rare=False)


def rare_variants(arch: str) -> list[Variant]:
    """Return those of many tokens that no prefill launches: by given activations, without a sequence."""
    return _sort_variants(rare=True)


def _sort_variants(*, rare: bool) -> list[Variant]:
    choosing, sorting = _sort_constants(256, 6)
    signature = dict.fromkeys(expert_choice_kernel.arg_names, "*i32") | {
        "tokens": "i32",
        "size": "i32",
        "scaling": "fp32",
    }
    signature |= dict.fromkeys(("scores_ptr", "bias_ptr", "weights_ptr"), "*fp32") | {"x_ptr": "*bf16"}
    signature |= dict.fromkeys(("table_ptr", "token_ids_ptr"), "*i64") | {"half_ptr": "*fp16"}
    found = []
    for by_table in (False, True):
        for is_raw in (True, False):
            for padded in (True, False):
                if rare is (is_raw and padded):
                    continue
                absent = ["bias_ptr"] if by_table else ["table_ptr", "token_ids_ptr"]
                fixed = dict.fromkeys([*absent, *([] if padded else ["sequence_ptr"])]) | choosing | {"RAW": is_raw}
                own = {name: kind for name, kind in signature.items() if name not in fixed}
                found.append(
                    Variant(
                        SORT_OP, expert_choice_kernel, own, fixed, 1, 1, tensor_ops=(), unaligned=("tokens", "size")
                    )
                )
    if not rare:
        signature = dict.fromkeys(sort_kernel.arg_names, "*i32") | {"choices": "i32"}
        signature |= dict.fromkeys(("weights_ptr", "weight_ptr"), "*fp32")
        own = {name: kind for name, kind in signature.items() if name not in sorting}
        found.append(Variant(SORT_OP, sort_kernel, own, sorting, 8, 1, tensor_ops=(), unaligned=("choices",)))
    return found


def _variant(tokens: int, *, by_table: bool, padded: bool) -> Variant:
    signature = dict.fromkeys(route_kernel.arg_names, "*i32") | {"tokens": "i32", "size": "i32", "scaling": "fp32"}
    signature |= dict.fromkeys(("scores_ptr", "bias_ptr", "weights_ptr", "weight_ptr"), "*fp32")
    signature |= {
        "table_ptr": "*i64",
        "token_ids_ptr": "*i64",
        "x_ptr": "*bf16",
        "few_ptr": "*fp16",
        "many_ptr": "*fp16",
    }
    absent = ["bias_ptr"] if by_table else ["table_ptr", "token_ids_ptr"]
    absent += [] if tokens > MANY else ["many_ptr"]
    absent += [] if padded else ["sequence_ptr"]
    fixed: dict[str, Any] = dict.fromkeys(absent) | _constants(tokens, 256, 6) | {"RAW": False, "PDL": True}
    signature = {name: kind for name, kind in signature.items() if name not in fixed}
    return Variant(OP, route_kernel, signature, fixed, 1, 1, tensor_ops=(), unaligned=("tokens", "size"))
