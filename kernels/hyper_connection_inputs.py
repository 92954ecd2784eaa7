"""Random inputs of the hyper-connection's two launches, for benches and for a checker to watch."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.expert_parts import ExpertParts, add_up
from kernels.hyper_connection_chunk import takes
from kernels.hyper_connection_decode import Mixed, Mixer, spread_and_mix
from kernels.tiles import Tile

STREAMS, HIDDEN, EPS, ITERS = 4, 4096, 1e-6, 20
EXPERTS, TOP_K = 256, 6


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One sublayer: spread_and_mix(y, before, mixer, sequence=sequence); sums: of y, made by a launch before it."""

    y: Tensor | ExpertParts
    before: Mixed
    mixer: Mixer
    sequence: Tensor | None
    sums: bool = False

    def launch(self, tiles: tuple[Tile, Tile] | None = None) -> Mixed:
        y = add_up(self.y) if self.sums and isinstance(self.y, ExpertParts) else self.y
        return spread_and_mix(y, self.before, self.mixer, sequence=self.sequence, tiles=tiles)


def draw_mixer(draw: torch.Generator, n: int, hidden: int, *, head: bool = False) -> Mixer:
    """Return random weights on the generator's device."""
    rows = n if head else (2 + n) * n

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=draw.device)

    fn = normal(rows, n * hidden) / (n * hidden) ** 0.5
    return Mixer(fn, normal(rows) / 2, normal(1 if head else 3) / 5 + 1, normal(hidden) / 10 + 1, EPS, EPS, ITERS)


def draw_parts(draw: torch.Generator, tokens: int, hidden: int, *, top_k: int, padding: int = 0) -> ExpertParts:
    """Return random rows of experts, on the generator's device, and bfloat16 to add; rows that are nobody's are NaN."""
    device, rows = draw.device, tokens * top_k
    ids = torch.rand(tokens, EXPERTS, generator=draw, device=device).topk(top_k).indices
    row = torch.zeros(rows, dtype=torch.int64, device=device)
    row[ids.flatten().argsort(stable=True)] = torch.arange(rows, device=device)
    counts = ids.flatten().bincount(minlength=EXPERTS)
    first = counts.cumsum(0) - counts
    expert, rank = (
        torch.nn.functional.pad(x, (0, 0, 0, padding), value=-1).to(torch.int32)
        for x in (ids, row.view(tokens, top_k) - first[ids])
    )
    parts = torch.randn((tokens + padding) * top_k, hidden, generator=draw, device=device) / top_k**0.5
    parts[rows:] = torch.nan
    add = torch.randn(tokens + padding, hidden, generator=draw, device=device).to(torch.bfloat16)
    return ExpertParts(parts, expert, rank, first.to(torch.int32), add)


def draw_inputs(
    device: torch.device,
    seed: int,
    tokens: int,
    *,
    n: int = STREAMS,
    hidden: int = HIDDEN,
    padding: int = 0,
    head: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    top_k: int = 0,
    sums: bool = False,
) -> Inputs:
    """Return a sublayer's end, `padding` padding tokens behind `tokens` tokens.

    head: it is the last one's.   top_k: y is as many rows of experts a token, unless 0.   sums: see Inputs.
    """
    draw = torch.Generator(device).manual_seed(seed)
    total = tokens + padding
    sequence = torch.arange(total, device=device).to(torch.int32)
    sequence[tokens:] = -1
    streams = torch.randn(total, n, hidden, generator=draw, device=device).to(dtype)
    carry = torch.rand(total, 1 + n, 4, generator=draw, device=device) + 0.5
    before = Mixed(streams[:, 0].contiguous(), streams, carry, EPS, ITERS, ready=takes(streams))
    # Attention's outputs are bfloat16, those of experts, which the head follows, float32.
    y: Tensor | ExpertParts
    if top_k:
        y = draw_parts(draw, tokens, hidden, top_k=top_k, padding=padding)
    else:
        y = torch.randn(total, hidden, generator=draw, device=device).to(torch.float32 if head else torch.bfloat16)
    return Inputs(y, before, draw_mixer(draw, n, hidden, head=head), sequence, sums)
