"""Steps through experts in both formats, for the interpreter and for a GPU: built from checkpoint tensors, packed."""

from __future__ import annotations

import dataclasses
import math

import torch

from kernels import moe_blocks
from kernels.expert_weights import ExpertWeights, dequantize_experts, pack_experts, to_pieces, to_products
from kernels.moe_decode import experts_decode, experts_decode_reference, last_product
from kernels.moe_routing import Routing, route_tokens, route_tokens_reference
from kernels.tiles import Tile


@dataclasses.dataclass
class Case:
    """route_tokens(x, scores, **routing), then experts_decode(.., w13, w2, limit)."""

    x: torch.Tensor
    scores: torch.Tensor
    routing: dict
    w13: ExpertWeights
    w2: ExpertWeights
    limit: float = 10.0

    def route(self) -> Routing:
        return route_tokens(self.x, self.scores, **self.routing)

    def expect_routing(self) -> Routing:
        return route_tokens_reference(self.x, self.scores, **self.routing)

    def run(self, **options) -> torch.Tensor:
        return experts_decode(self.route(), self.w13, self.w2, limit=self.limit, **options)

    def expect(self, routing: Routing | None = None) -> torch.Tensor:
        return experts_decode_reference(routing or self.expect_routing(), self.w13, self.w2, limit=self.limit)

    def fault(self, **options) -> str:
        """Return how the kernels differ from the references, "" if not."""
        return routing_fault(self.route(), self.expect_routing()) or self.sum_fault(**options)

    def sum_fault(self, *, routing: Routing | None = None, **options) -> str:
        """Return how the sums differ from the reference by `routing`, None for the reference's own; "" if not.

        Weights are exact in both. f16 rounds h by 2^-11 of itself in both, but where float32 sums in another order fall
        on either side of a rounding, an h differs by one f16 step: at most 2^-10 of h, in few places.
        """
        got, wanted = self.run(**options).float(), self.expect(routing)
        if not torch.equal(got.isnan(), wanted.isnan()):
            return f"NaN in {int(got.isnan().sum())} places, wanted {int(wanted.isnan().sum())}"
        got, wanted = got.nan_to_num(), wanted.nan_to_num()
        scale = wanted.abs().max().clamp(min=1e-6)
        error = float((got - wanted).abs().max() / scale)
        bound = 2e-3 if options.get("out_dtype", torch.float32) == torch.float32 else 1e-2
        return "" if error < bound else f"off by {error:.2e} of the largest, {float(scale):.3g}"


def routing_fault(got: Routing, wanted: Routing) -> str:
    """Return how a routing differs from its reference, "" if not. The order of an expert's rows is free."""
    if got.is_sorted != wanted.is_sorted:
        return f"rows sorted: {got.is_sorted}, wanted {wanted.is_sorted}"
    used = 4 + 4 * int(wanted.active[0])
    entries = [at for at in range(used) if at < 2 - got.is_sorted or (at >= 4 and at % 4 != 3)]
    if not torch.equal(got.ids, wanted.ids):
        return f"ids {got.ids.tolist()}, wanted {wanted.ids.tolist()}"[:400]
    if not torch.equal(got.active[entries], wanted.active[entries]):
        return f"active {got.active[entries].tolist()}, wanted {wanted.active[entries].tolist()}"[:400]
    if not torch.equal(got.first, wanted.first):
        return f"first rows {got.first.tolist()}, wanted {wanted.first.tolist()}"[:400]
    real = wanted.ids >= 0
    if not torch.equal(got.rank >= 0, real):
        return "padding has rows, or tokens none"
    expert, rank, row = wanted.ids[real].long(), got.rank[real].long(), (wanted.first[wanted.ids] + got.rank)[real]
    if not torch.equal(row.sort().values, torch.arange(row.numel(), device=row.device)):
        return f"rows {row.tolist()} are not {row.numel()} rows"[:400]
    token = real.nonzero()[:, 0].to(torch.int32)
    at = row.long() if got.is_sorted else (expert, rank)
    if not torch.equal(got.token[at], token):
        return f"tokens {got.token[at].tolist()} of rows, wanted {token.tolist()}"[:400]
    weights = got.weights[real]
    if not torch.equal(got.weight[at].nan_to_num(-1), weights.nan_to_num(-1)):
        return "weight of rows is not that of their choices"
    # By table a token may have experts of small scores only: there the logits' rounding, sums of 4,096 terms in another
    # order, is the weights' (on a GPU between 1e-5 and 4e-5 of them, in some of 1,000 tokens).
    if not torch.allclose(got.weights, wanted.weights, rtol=4e-5, atol=1e-7, equal_nan=True):
        return f"weights off by {(got.weights - wanted.weights).abs().max():.2e}"
    if got.is_sorted and not torch.equal(got.rank, wanted.rank):
        return f"ranks {got.rank.tolist()}, wanted {wanted.rank.tolist()}"[:400]
    if (got.x_many is None) != (wanted.x_many is None):
        return "x for many rows where there are none, or not where there are"
    for x, expected in ((got.x, wanted.x), (got.x_many, wanted.x_many)):
        if x is None:
            continue
        if not torch.equal(x.isnan(), expected.isinf() | expected.isnan()):
            return "x is not NaN where it should be"
        if not torch.equal(x.nan_to_num(), torch.where(expected.isinf(), math.nan, expected).nan_to_num()):
            return "x is not x in f16"
    return ""


def checkpoint(seed: int, experts: int, rows: int, channels: int, fmt: str, *, parts: int, device: str = "cpu"):
    """Return codes, scales and factors as a checkpoint has them, every code and scale drawn."""
    draw = torch.Generator(device).manual_seed(seed)
    codes = torch.randint(0, 256, (experts, rows, channels // 2), generator=draw, dtype=torch.uint8, device=device)
    if fmt == "nvfp4":
        shape = (experts, rows, channels // 16)
        scales = torch.randint(1, 0x40, shape, generator=draw, dtype=torch.uint8, device=device)
        factors = (0.5 + torch.rand(experts, parts, generator=draw, device=device)) / channels**0.5
        return codes, scales.view(torch.float8_e4m3fn), factors
    shape = (experts, rows, channels // 32)
    return codes, torch.randint(110, 125, shape, generator=draw, dtype=torch.uint8, device=device), None


def make_case(
    tokens: int,
    *,
    experts: int = 6,
    top_k: int = 2,
    hidden: int = 64,
    inner: int = 64,
    formats: tuple[str, str] = ("nvfp4", "nvfp4"),
    by_table: bool = False,
    bias: bool = True,
    padding: int = 0,
    is_raw: bool = False,
    same: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Return a step of `tokens` tokens and then `padding` ones; same: all take the same experts."""
    draw = torch.Generator(device).manual_seed(seed)
    total = tokens + padding
    scores = torch.rand(total, experts, generator=draw, device=device) + 0.01
    if is_raw:
        scores = torch.randn(total, experts, generator=draw, device=device) * 4
    if same:
        scores[:, 1 : 1 + top_k] += 20.0
    routing: dict = {"top_k": top_k, "scaling": 1.5, "is_raw": is_raw}
    if by_table:
        noise = torch.rand(50, experts, generator=draw, device=device)
        routing["table"] = noise.topk(top_k).indices.contiguous()
        routing["token_ids"] = torch.randint(0, 50, (total,), generator=draw, device=device)
    elif bias and not same:
        routing["bias"] = torch.randn(experts, generator=draw, device=device)
    if padding:
        sequence = torch.arange(total, device=device).to(torch.int32)
        sequence[tokens:] = -1
        routing["sequence"] = sequence
    return Case(
        torch.randn(total, hidden, generator=draw, device=device).to(torch.bfloat16),
        scores,
        routing,
        packed(seed + 1, experts, 2 * inner, hidden, formats[0], parts=2, device=device),
        packed(seed + 2, experts, hidden, inner, formats[1], parts=1, device=device),
    )


def packed(seed: int, experts: int, rows: int, channels: int, fmt: str, *, parts: int, device: str = "cpu"):
    """Return checkpoint(..) packed; mxfp4: with the largest scales of experts, and of w1 and w3, apart."""
    codes, scales, factors = checkpoint(seed, experts, rows, channels, fmt, parts=parts, device=device)
    if fmt == "mxfp4":
        scales -= (torch.arange(experts, device=device) % 3)[:, None, None].to(torch.uint8)
        scales[:, : rows // parts] -= parts - 1
    return pack_experts(codes, scales, factors, format=fmt, parts=parts, name="w")


def exactness_fault(device: str = "cpu") -> str:
    """Return a weight that does not come out of the last product as it went in, "" if none: every code, every scale.

    One channel at a time is 1, so that a sum is a weight.
    """
    every = torch.arange(16, dtype=torch.uint8, device=device)
    codes = (every[:, None] | every[None, :] << 4).flatten()[:, None].reshape(8, 32).repeat(16, 1)[None].contiguous()
    row = torch.arange(128, device=device)[:, None]
    scales = {
        "nvfp4": row.clamp(max=126).expand(128, 4),  # subnormals, and 448
        "mxfp4": (120 - row % 24).expand(128, 2),  # the widest span that is accepted
    }
    rows = torch.arange(64, dtype=torch.int32, device=device)
    active = torch.tensor([1, 1, 0, 0, 0, 0, 64, 0], dtype=torch.int32, device=device)
    ones = torch.eye(64, dtype=torch.float16, device=device)
    column, lists = rows[:, None], rows[None]
    routing = Routing(
        column, column.float(), column, lists, lists.float(), rows[:1], active, to_pieces(ones), to_products(ones)
    )
    products = to_products(ones)
    blocks = Routing(column, column.float(), column, rows, rows.float(), rows[:1], active, products, products)
    designs = [make_tile(r=4, rs=2, nb=4), make_tile(r=4, rs=2), make_tile(r=2, rs=4, pair_s=1)]
    for fmt, scale in scales.items():
        factors = torch.ones(1, 1, device=device) if fmt == "nvfp4" else None
        packed = pack_experts(codes, scale.to(torch.uint8)[None], factors, format=fmt, parts=1, name="w")
        for tile in designs:
            is_many = tile.constants["NB"] > 0
            active[1] = int(is_many)
            got = last_product(routing, routing.x_many if is_many else routing.x, packed, unlift=1.0, tile=tile).T
            wrong = (got != dequantize_experts(packed)[0]).nonzero()
            if wrong.numel():
                at = tuple(wrong[0].tolist())
                return f"{fmt}: {got[at]} for {dequantize_experts(packed)[0][at]} in row and channel {at}"
        got = moe_blocks.last_product(blocks, products, packed, unlift=1.0, tile=None).T
        if not torch.equal(got, dequantize_experts(packed)[0]):
            return f"{fmt}: other weights in blocks of many rows"
    return ""


def make_tile(
    r=1, ks=1, rs=1, s=1, pair_s=0, nb=0, many_r=1, many_s=1, ahead=1, split=1, registers=0, stages=1, resident=0
) -> Tile:  # fmt: skip
    """Return a tile; moe_decode.fit says what the constants mean."""
    constants = {"R": r, "KS": ks, "RS": rs, "S": s, "PAIR_S": pair_s, "NB": nb, "MANY_R": many_r, "MANY_S": many_s}
    constants |= {"AHEAD": ahead, "SPLIT": split, "REGISTERS": registers, "RESIDENT": resident}
    return Tile(constants, num_warps=ks * rs, num_stages=stages)
