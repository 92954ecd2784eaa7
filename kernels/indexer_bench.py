"""Benches and samples of the indexer, 64 heads of 128 channels, top 512, as every rank of DeepSeek-V4-Flash has it.

Shapes give keys a sequence; a key stands for four tokens of context. Every sequence has pages of its own in a shuffled
pool. "at most": the context that the block table has room for, which time must not depend on.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kernels.bench import Bench
from kernels.gpu_timer import Launch
from kernels.indexer_decode import (
    IndexQuery,
    index_query,
    index_scores,
    index_select,
    top_k_of_rows,
)
from kernels.norm_rope import rotation_at
from kernels.ragged import DecodeBatch
from kernels.row_store import scale_row_bytes, value_bytes
from kernels.rows import Rows

FORMATS = ("fp8_index", "fp4_index")
HEADS, DIM, ROPE, TOP_K, RATIO, BLOCK_ROWS = 64, 128, 64, 512, 4, 64


def benches() -> list[Bench]:
    """Return the benches: each kernel alone, then all three with little room and with much."""
    return [
        *(_query_bench(count) for count in (1, 16, 64)),
        _query_bench(64, fmt="fp4_index"),
        *(_logits_bench(64, keys) for keys in (2048, 8192, 32768)),
        *(_logits_bench(1, keys) for keys in (2048, 32768, 262144)),
        *(_logits_bench(64, keys, fmt="fp4_index") for keys in (2048, 8192, 32768)),
        _logits_bench(32, 8192, length=2),
        *(_top_k_bench(count, keys) for count, keys in ((64, 2048), (64, 8192), (64, 32768), (1, 2048), (1, 262144))),
        *(_whole_bench(64, 2048, most) for most in (1 << 14, 1 << 20)),
        *(_chunk_bench(4096, keys, fmt) for fmt in FORMATS for keys in (2048, 32768)),
    ]


def samples() -> list[Bench]:
    """Return small steps of every path: formats, several tokens a sequence, padding, rows shared by programs."""
    return [
        _whole_bench(2, 560, 0),
        _whole_bench(2, 560, 0, length=3),
        _whole_bench(2, 560, 0, fmt="fp4_index", length=2),
        _whole_bench(2, 400, 0),
        _top_k_bench(2, 10000),
        _top_k_bench(5, 700),
        *(_chunk_bench(5, 544, fmt) for fmt in FORMATS),
    ]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A step, its queries before they are made ready, and its keys."""

    q: Tensor
    weight: Tensor
    rotation: Tensor
    batch: DecodeBatch
    keys: Rows

    def query(self) -> IndexQuery:
        hadamard = self.keys.format == "fp4_index"
        scale = (HEADS * DIM) ** -0.5
        return index_query(
            self.q, self.weight, self.batch, self.rotation, fmt=self.keys.format, scale=scale, hadamard=hadamard
        )


def draw_inputs(
    device: torch.device, seed: int, count: int, keys: int, *, fmt: str = "fp8_index", length: int = 1, most: int = 0
) -> Inputs:
    """Return `count` sequences of `length` tokens, the last of which sees `keys` keys.

    most: positions that the block table has room for, if more. More than four tokens are a chunk, which tells its
    longest sequence, and of whose queries every 256th is the same.
    """
    draw = torch.Generator(device).manual_seed(seed)
    held = -(-keys // BLOCK_ROWS)
    unit = BLOCK_ROWS * (value_bytes(fmt, DIM) + scale_row_bytes(fmt, DIM))
    # Random codes: of e4m3 without the bit that would make NaN, scales within a factor of four.
    pool = torch.randint(0, 256, (count * held, unit), dtype=torch.uint8, generator=draw, device=device)
    rows = Rows.view(
        pool, fmt, width=DIM, rows=BLOCK_ROWS, offset=0, value_bytes=value_bytes(fmt, DIM),
        scale_bytes=scale_row_bytes(fmt, DIM),
    )  # fmt: skip
    assert rows.scales is not None
    if fmt == "fp8_index":
        pool &= 0xF7
        rows.scales.copy_(2.0 ** -(torch.arange(BLOCK_ROWS, device=device) % 3)[:, None].float())
    else:
        rows.scales.copy_(126 + (torch.arange(BLOCK_ROWS * (DIM // 32), device=device) % 3).view(BLOCK_ROWS, -1))
    columns = max(held, -(-most // (RATIO * BLOCK_ROWS)))
    table = torch.full((count, columns), -1, dtype=torch.int32, device=device)
    table[:, :held] = torch.randperm(count * held, generator=draw, device=device).view(count, held).to(torch.int32)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    start = RATIO * keys - length
    tokens = count * length
    batch = DecodeBatch(
        positions=ints([start + i for _ in range(count) for i in range(length)]),
        sequence=ints([number for number in range(count) for _ in range(length)]),
        starts=ints([start] * count),
        query_start=ints([number * length for number in range(count + 1)]),
        slots=ints(list(range(count))),
        block_table=table,
        num_tokens=tokens,
        max_query_len=length,
        longest=RATIO * keys if length > 4 else None,
    )
    drawn = min(tokens, 256)
    q = torch.randn(drawn, HEADS, DIM, generator=draw, device=device).to(torch.bfloat16)
    q = q.repeat(-(-tokens // drawn), 1, 1)[:tokens]
    weight = torch.randn(tokens, HEADS, generator=draw, device=device).to(torch.bfloat16)
    frequencies = 160000.0 ** -(torch.arange(0, ROPE, 2, device=device) / ROPE)
    return Inputs(q, weight, rotation_at(batch.positions, frequencies), batch, rows)


def key_bytes(fmt: str) -> int:
    """Return the bytes of a key."""
    return value_bytes(fmt, DIM) + scale_row_bytes(fmt, DIM)


def _query_bench(count: int, *, fmt: str = "fp8_index") -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        return draw_inputs(device, i, count, BLOCK_ROWS, fmt=fmt).query

    size = count * HEADS * (DIM * (3 if fmt == "fp8_index" else 4) + 6)
    return Bench(group="indexer", op="indexer_query", shape=f"B={count} {fmt}", make=make, bytes=size)


def _logits_bench(count: int, keys: int, *, fmt: str = "fp8_index", length: int = 1) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(device, i, count, keys, fmt=fmt, length=length)
        query = inputs.query()
        return lambda: index_scores(query, inputs.batch, inputs.keys, ratio=RATIO, top_k=TOP_K)

    return Bench(
        group="indexer",
        op="indexer_logits",
        shape=f"B={count} keys={keys} {fmt}" + (f" {length} tokens each" if length > 1 else ""),
        make=make,
        bytes=count * keys * (key_bytes(fmt) + 4 * length),
        flops=2 * count * length * keys * HEADS * DIM,
    )


def _top_k_bench(count: int, keys: int) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        draw = torch.Generator(device).manual_seed(i)
        scores = torch.randn(count, keys, generator=draw, device=device)
        lengths = torch.full((count,), keys, dtype=torch.int32, device=device)
        return lambda: top_k_of_rows(scores, lengths, TOP_K)

    size = count * 4 * (keys + TOP_K)
    return Bench(group="indexer", op="indexer_top_k", shape=f"B={count} of {keys}", make=make, bytes=size)


def _whole_bench(count: int, keys: int, most: int, *, fmt: str = "fp8_index", length: int = 1) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(device, i, count, keys, fmt=fmt, length=length, most=most)
        return lambda: index_select(inputs.query(), inputs.batch, inputs.keys, ratio=RATIO, top_k=TOP_K)

    return Bench(
        group="indexer",
        op="indexer",
        shape=f"B={count} keys={keys} {fmt}"
        + (f" {length} tokens each" if length > 1 else "")
        + (f" at most {most // 1024}k" if most else ""),
        make=make,
        bytes=count * keys * key_bytes(fmt) + count * length * (HEADS * DIM * 2 + 4 * TOP_K),
        flops=2 * count * length * keys * HEADS * DIM,
    )


def _chunk_bench(length: int, keys: int, fmt: str) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(device, i, 1, keys, fmt=fmt, length=length)
        query = inputs.query()
        return lambda: index_select(query, inputs.batch, inputs.keys, ratio=RATIO, top_k=TOP_K)

    seen = sum((RATIO * keys - i) // RATIO for i in range(length))
    return Bench(
        group="prefill",
        op="indexer_chunk",
        shape=f"{length} tokens keys={keys} {fmt}",
        make=make,
        bytes=keys * key_bytes(fmt) + length * (HEADS * (DIM * (1 if fmt == "fp8_index" else 2) + 4) + 4 * TOP_K),
        flops=2 * seen * HEADS * DIM,
    )
