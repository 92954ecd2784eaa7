"""Benches and samples of a step's first and last launch, at DeepSeek-V4-Flash's sizes: 64 rotary channels, 4096."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench import Bench
from kernels.gpu_timer import Launch
from kernels.step import begin_step, end_step

ROPE, HIDDEN = 64, 4096


def benches() -> list[Bench]:
    """Return the benches: both launches for one row, 16 and 64."""
    return [make(n) for make in (_begin_bench, _end_bench) for n in (1, 16, 64)]


def samples() -> list[Bench]:
    """Return small steps over fewer rows than there are, every third of them padding."""
    return [_begin_bench(5, rope=12), _end_bench(5, hidden=70)]


def draw_rows(device: torch.device, seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Return (rows [count, 4] int32, last_token [count] int64): every third inactive, every other token known."""
    draw = torch.Generator().manual_seed(seed)
    number = torch.arange(count)
    position = torch.randint(0, 1 << 20, (count,), generator=draw)
    token = torch.randint(0, 129280, (2, count), generator=draw)
    is_active = (number % 3 != 2).long()
    rows = torch.stack([is_active, position, number.flip(0), torch.where(number % 2 == 0, -1, token[0])], 1)
    return rows.to(device, torch.int32), token[1].clone().to(device)


def _begin_bench(size: int, *, rope: int = ROPE) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        rows, last = draw_rows(device, i, size + 3)
        window, compressed = (base ** -(torch.arange(0, rope, 2, device=device) / rope) for base in (1e4, 1.6e5))
        return lambda: begin_step(rows, last, size=size, window=window, compressed=compressed)

    moved = size * (16 + 8 + 5 * 4 + 2 * 8 + 4 * 4 * rope) + 4 + 4 * rope
    return Bench(group="sampling", op="begin_step", shape=f"B={size}", make=make, bytes=moved)


def _end_bench(size: int, *, hidden: int = HIDDEN) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        rows, last = draw_rows(device, i, size + 3)
        x = torch.randn(size, hidden, generator=torch.Generator(device).manual_seed(i), device=device)
        tokens = last[:size].flip(0).contiguous()
        return lambda: end_step(rows, last, tokens, x)

    return Bench(group="sampling", op="end_step", shape=f"B={size}", make=make, bytes=size * (4 * hidden + 16 + 24 + 8))
