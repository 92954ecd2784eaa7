"""Sublayers through hyper-connections, for the interpreter and for a GPU, against their formula in float64."""

from __future__ import annotations

import dataclasses
import math

import torch

from kernels.expert_parts import ExpertParts, add_up, add_up_reference
from kernels.hyper_connection_decode import Mixed, Mixer, mix, spread, spread_and_mix
from kernels.hyper_connection_inputs import draw_parts
from kernels.tiles import Tile

EPS, NORM_EPS = 1e-6, 1e-6
# Of a product of float32 values in float32, of the size of its largest: mixes here are of order 1, their sums of 16384
# terms differ by some 1e-6 from float64's, which exponentials and 20 normalisations don't enlarge.
FLOAT32 = 1e-5


@dataclasses.dataclass
class Case:
    """mix(streams, first), then spread_and_mix(y, .., second)."""

    streams: torch.Tensor
    y: torch.Tensor | ExpertParts
    first: Mixer
    second: Mixer
    sequence: torch.Tensor | None

    def begin(self, **options) -> Mixed:
        return mix(self.streams, self.first, sequence=self.sequence, **options)

    def run(self, **options) -> Mixed:
        return spread_and_mix(self.y, self.begin(**options), self.second, sequence=self.sequence, **options)

    def fault(self, **options) -> str:
        """Return how either step differs from its formula, "" if not."""
        begun = self.begin(**options)
        after = spread_and_mix(self.y, begun, self.second, sequence=self.sequence, **options)
        return (
            mix_fault(begun, self.streams, self.first, self.sequence)
            or spread_fault(after.streams, self.y, begun, self.sequence)
            or mix_fault(after, after.streams, self.second, None)
        )


def mix_fault(got: Mixed, streams: torch.Tensor, mixer: Mixer, sequence: torch.Tensor | None) -> str:
    """Return how x or the carry differ from the formula for `streams`, "" if not."""
    n = streams.shape[1]
    s = streams.double()
    if sequence is not None:
        s = torch.where((sequence >= 0)[:, None, None], s, 0)
    flat = s.flatten(1)
    mixed = (flat @ mixer.fn.double().T) * torch.rsqrt(flat.square().mean(1, keepdim=True) + mixer.norm_eps)
    base, scale = mixer.base.double(), mixer.scale.double()
    pre = torch.sigmoid(mixed[:, :n] * scale[0] + base[:n]) + mixer.eps
    x = (pre[:, :, None] * s).sum(1)
    x = x * torch.rsqrt(x.square().mean(1, keepdim=True) + mixer.norm_eps) * mixer.norm.double()
    # x is rounded before the norm and, but for the head, after it: half a last place each. What the first rounding adds
    # to the mean of squares moves the norm's factor as well: by less, the more channels there are.
    places = sum(2.0**-8 for dtype in (streams.dtype, got.x.dtype) if dtype == torch.bfloat16)
    places *= 1 + 4 * streams.shape[2] ** -0.5
    fault = _difference("x", got.x, x, places)
    if mixer.fn.shape[0] == n:
        return fault or ("" if got.carry is None and got.x.dtype == torch.float32 else "carry or dtype of the head")
    if fault or got.x.dtype != streams.dtype:
        return fault or f"x is {got.x.dtype}"
    assert got.carry is not None
    post = 2 * torch.sigmoid(mixed[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    logits = (mixed[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
    if fault := _difference("post", got.carry[:, 0, :n], post, 0.0):
        return fault
    if not got.ready:
        return _difference("logits", got.carry[:, 1:, :n], logits, 0.0)
    # C is off by no more than the logits are, and these by a share of the largest of them.
    wanted = _normalised(logits, eps=mixer.eps, iters=mixer.iters)
    return _difference("C", got.carry[:, 1:, :n], wanted, 0.0, least=logits.abs().flatten(1).amax(1))


def _normalised(logits: torch.Tensor, *, eps: float, iters: int) -> torch.Tensor:
    comb = torch.softmax(logits, -1) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb


def spread_fault(got: torch.Tensor, y: torch.Tensor | ExpertParts, before: Mixed, sequence: torch.Tensor | None) -> str:
    """Return how the next streams differ from the formula, given what the kernels carried, "" if not."""
    assert before.carry is not None
    y = add_up_reference(y) if isinstance(y, ExpertParts) else y
    n = before.streams.shape[1]
    carry = before.carry.double()[:, :, :n]
    comb = carry[:, 1:]
    if not before.ready:
        comb = _normalised(comb, eps=before.eps, iters=before.iters)
    wanted = carry[:, 0, :, None] * y.double()[:, None] + comb.transpose(1, 2) @ before.streams.double()
    if sequence is not None:
        wanted = torch.where((sequence >= 0)[:, None, None], wanted, 0)
    places = 2.0**-8 if got.dtype == torch.bfloat16 else 0.0
    return _difference("streams", got, wanted, places)


def _difference(
    name: str, got: torch.Tensor, wanted: torch.Tensor, places: float, *, least: torch.Tensor | None = None
) -> str:
    """places: relative rounding of each value, beside float32's share of the largest of its token, of `least` [T] at
    least."""
    got = got.double()
    if got.shape != wanted.shape or not torch.equal(got.isnan(), wanted.isnan()):
        return f"{name}: {int(got.isnan().sum())} NaN of {tuple(got.shape)}, wanted {int(wanted.isnan().sum())}"
    got, wanted = got.nan_to_num(), wanted.nan_to_num()
    if not wanted.numel():
        return ""
    largest = wanted.abs().flatten(1).amax(1).clamp(min=1e-3)
    if least is not None:
        largest = torch.maximum(largest, least.nan_to_num())
    largest = largest.view(-1, *[1] * (wanted.dim() - 1))
    excess = (got - wanted).abs() - (places * wanted.abs() * 1.001 + FLOAT32 * largest)
    worst = float(excess.max())
    return f"{name} off by {worst:.2e} beyond rounding, largest {float(largest.max()):.3g}" if worst > 0 else ""


def make_mixer(
    seed: int, *, n: int, hidden: int, head: bool = False, iters: int = 20, sharp: float = 1.0, device: str = "cpu"
) -> Mixer:
    """Return random weights; sharp: how far the logits of C lie apart."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device)

    rows = n if head else (2 + n) * n
    scale = normal(1 if head else 3) * 0.2 + 1.0
    if not head:
        scale[2] *= sharp
    fn = normal(rows, n * hidden) / (n * hidden) ** 0.5
    return Mixer(fn, normal(rows) * 0.5, scale, 1 + normal(hidden) * 0.1, EPS, NORM_EPS, iters)


def make_case(
    tokens: int,
    *,
    n: int = 4,
    hidden: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    y_dtype: torch.dtype = torch.float32,
    padding: int = 0,
    head: bool = False,
    iters: int = 3,
    sharp: float = 1.0,
    expanded: bool = False,
    top_k: int = 0,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Return a step of `tokens` tokens and `padding` padding ones, whose rows are NaN.

    head: the second mixer is that of the head.   expanded: all streams are one in memory, as in the first layer.
    top_k: y is as many rows of experts a token, unless 0, and bfloat16 to be added.
    """
    draw = torch.Generator(device).manual_seed(seed)
    total = tokens + padding
    streams = torch.randn(total, 1 if expanded else n, hidden, generator=draw, device=device).to(dtype)
    y: torch.Tensor | ExpertParts
    if top_k:
        y = draw_parts(draw, tokens, hidden, top_k=top_k, padding=padding)
    else:
        y = torch.randn(total, hidden, generator=draw, device=device).to(y_dtype)
    sequence = None
    if padding:
        sequence = torch.arange(total, device=device).to(torch.int32)
        sequence[tokens:] = -1
        streams[tokens:] = math.nan
        (y.add if isinstance(y, ExpertParts) else y)[tokens:] = math.nan
    sizes = {"n": n, "hidden": hidden, "iters": iters, "sharp": sharp, "device": device}
    first, second = make_mixer(seed + 1, **sizes), make_mixer(seed + 2, head=head, **sizes)
    return Case(streams.expand(-1, n, -1) if expanded else streams, y, first, second, sequence)


def spread_alone_fault(case: Case, *, tiles: tuple[Tile, Tile] | None = None) -> str:
    """Return whether the spread without a mix gives other bits than with one, "" if not."""
    begun = case.begin(tiles=tiles)
    whole = spread_and_mix(case.y, begun, case.second, sequence=case.sequence, tiles=tiles)
    alone = spread(case.y, begun, sequence=case.sequence, tile=tiles[0] if tiles else None)
    return "" if torch.equal(alone, whole.streams) else "bits differ"


def summed_fault(case: Case, **options) -> str:
    """Return whether rows of experts, added up by a launch of their own, lead to other bits, "" if not."""
    begun = case.begin(**options)
    results = [
        spread_and_mix(y, begun, case.second, sequence=case.sequence, **options) for y in (case.y, add_up(case.y))
    ]
    for name in ("x", "streams", "carry"):
        one, other = (getattr(result, name) for result in results)
        if name == "carry" and one is not None:
            one, other = (carry[:, :, : begun.streams.shape[1]] for carry in (one, other))
        if one is not None and not torch.equal(one, other):
            return f"other bits in {name} once rows are added up by a launch of their own"
    return ""


def make_tiles(warps: int, finish_warps: int, *, spans: int = 1) -> tuple[Tile, Tile]:
    """Return tiles of both launches."""
    return Tile({"W": warps, "L": spans}, num_warps=warps), Tile({"W": finish_warps}, num_warps=finish_warps)


def make_chunk_tiles(
    *, tokens: int = 16, channels: int = 16, span: int = 32, stages: int = 1, warps: int = 4, finish_warps: int = 1
) -> tuple[Tile, Tile]:
    """Return tiles of a chunk's launches, which any number of tokens may then have."""
    first = Tile({"M": tokens, "C": channels, "SPAN": span, "STAGES": stages}, num_warps=warps)
    return first, Tile({"W": finish_warps}, num_warps=finish_warps)
