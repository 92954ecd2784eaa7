"""Benches and samples of cache_write: one layer's writes of a step over packed rows, on random data.

A decode step writes little and waits much: its time is a chain of loads (which slot, which state, which block), so what
counts is how many programs share it, not bytes. Chunks of prompts are bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.bench import Bench
from kernels.cache_write_decode import Pooling, cache_write, commit_window, staging_rows
from kernels.gpu_timer import Launch
from kernels.norm_rope import rotation_at
from kernels.ragged import DecodeBatch
from kernels.row_store import scale_row_bytes, store_rows, value_bytes
from kernels.rows import Rows
from kernels.tiles import Tile

DIM, INDEX_DIM, INDEX_HEADS, ROPE, WINDOW, BLOCK_TOKENS = 512, 128, 64, 64, 128, 256
# Where in its entry each sequence's token stands: as it comes, or the most expensive step there is.
PHASES: dict[str, Callable[[int, int], int]] = {
    "mixed": lambda b, ratio: (37 * b + 5) % max(ratio, 1),
    "all complete": lambda b, ratio: ratio - 1,
}


def benches() -> list[Bench]:
    """Return the benches: each kind of layer as a TP4 rank has it, then the most expensive step, then all 64 heads."""
    counts = (1, 16, 64)
    kinds = (("CSA", 4), ("HCA", 128), ("window", 0))
    return [
        *(
            _bench(n, ratio, heads=16, chain=f"{kind} B={n}" if ratio else None)
            for kind, ratio in kinds
            for n in counts
        ),
        *(_bench(n, ratio, phase="all complete", heads=16) for ratio in (4, 128) for n in counts),
        _bench(64, 4, heads=16, index="fp4_index"),
        _bench(64, 4, heads=64),
        *(_bench(1, ratio, heads=16, length=4096, group="prefill") for ratio in (4, 128, 0)),
    ]


def samples() -> list[Bench]:
    """Return one small step for each shipped path; the other ops of this family beside it."""
    paths = [
        _bench(3, ratio, phase="all complete", heads=9, index=index, length=length, padding=1)
        for ratio, index in ((0, ""), (4, "fp8_index"), (4, "fp4_index"), (128, ""))
        for length in (1, 5)
    ]
    paths += [_bench(1, 4, heads=9, length=13, padding=1), _bench(1, 128, heads=0, length=260)]
    return [*paths, *(_store_sample(fmt, width) for fmt, width in _STORED)]


_STORED = (("packed", 512), ("fp8_index", 128), ("fp4_index", 128), ("bf16", 512), ("fp32", 512))


def _bench(
    count: int, ratio: int, *, heads: int, phase: str = "mixed", chain: str | None = None, index: str = "fp8_index",
    length: int = 1, padding: int = 0, group: str = "attention",
) -> Bench:  # fmt: skip
    kind = {0: "window", 4: "CSA", 128: "HCA"}[ratio]
    keys = index if ratio == 4 else ""
    positions = [8192 + PHASES[phase](b, ratio) for b in range(count)]

    def make(device: torch.device, i: int) -> Launch:
        return step(device, i, positions, ratio=ratio, heads=heads, keys=keys, length=length, padding=padding)

    shape = [f"B={count}", kind, f"heads={heads}", *((keys,) if keys else ())]
    if length > 1:
        shape.append(f"{length} tokens each")
    elif ratio:
        shape.append(phase)
    return Bench(
        group=group,
        op="cache_write",
        shape=" ".join(shape),
        make=make,
        bytes=sum(_bytes(p + j, ratio, heads, keys, is_first=j == 0) for p in positions for j in range(length)),
        chain=chain,
    )


def _bytes(position: int, ratio: int, heads: int, keys: str, *, is_first: bool) -> int:
    """Return what one token moves: inputs once, state once a step; weights are shared by all and left out."""
    total = 2 * DIM + value_bytes("packed", DIM) + scale_row_bytes("packed", DIM) + heads * 2 * 2 * DIM
    if keys:  # the indexer's queries and weights, as they come and made ready
        total += INDEX_HEADS * (INDEX_DIM * (2 + (1 if keys == "fp8_index" else 2)) + 4 + 4)
    for width, fmt in ((DIM, "packed"), (INDEX_DIM, keys)):
        if not ratio or not fmt:
            continue
        row = 4 * (2 * width if ratio == 4 else width)  # bytes of K, and of G
        completes = (position + 1) % ratio == 0
        total += 2 * row
        if is_first and ratio == 4:
            total += 2 * row + completes * 7 * row  # 7 older rows, half of K and of G each
        elif is_first:
            total += 3 * row * (1 if completes else 2)
        total += completes * (value_bytes(fmt, width) + scale_row_bytes(fmt, width))
    return total


def step(
    device: torch.device, seed: int, positions: list[int], *, ratio: int, heads: int, keys: str, length: int,
    padding: int, tile: Tile | None = None,
) -> Launch:  # fmt: skip
    """Return one step of sequences at `positions`, `length` tokens each, on inputs drawn with `seed`."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device).to(dtype)

    def rows(fmt: str, width: int, units: int, count: int) -> Rows:
        values, scales = value_bytes(fmt, width), scale_row_bytes(fmt, width)
        unit = -(-count * (values + scales) // 16) * 16
        pool = torch.full((units, unit), 0x40, dtype=torch.uint8, device=device)
        return Rows.view(pool, fmt, width=width, rows=count, offset=0, value_bytes=values, scale_bytes=scales)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    count = len(positions)
    tokens = count * length + padding
    columns = (max(positions) + length) // BLOCK_TOKENS + 2
    # Each sequence has the blocks it writes to, and no others, wherever its table points.
    each = 1 if length == 1 else -(-length // BLOCK_TOKENS) + 1
    blocks = torch.randperm(count * each, generator=draw, device=device).to(torch.int32).view(count, each)
    table = blocks[:, torch.arange(columns, device=device) % each]
    batch = DecodeBatch(
        positions=ints([p + j for p in positions for j in range(length)] + [-1] * padding),
        sequence=ints([b for b in range(count) for _ in range(length)] + [-1] * padding),
        starts=ints(positions),
        query_start=ints([b * length for b in range(count + 1)]),
        slots=torch.randperm(count, generator=draw, device=device).to(torch.int32),
        block_table=table.contiguous(),
        num_tokens=tokens,
        max_query_len=length,
    )
    frequencies = 10000.0 ** -(torch.arange(0, ROPE, 2, device=device) / ROPE)

    def pooling(fmt: str, width: int) -> Pooling:
        double = 2 * width if ratio == 4 else width
        state = rows("fp32", double, count, 16 if ratio == 4 else 3)
        state.values.copy_(normal(*state.values.shape).abs())  # a sum of weights is positive
        return Pooling(
            projected=normal(tokens, 2 * double),
            bias=normal(ratio, double),
            norm=normal(width),
            state=state,
            pool=rows(fmt, width, count * each, BLOCK_TOKENS // ratio),
            hadamard=fmt == "fp4_index",
        )

    window = rows("packed", DIM, count, WINDOW)
    staging = staging_rows(tokens, window) if length > 1 else None
    kv, kv_norm = normal(tokens, DIM, dtype=torch.bfloat16), normal(DIM)
    q = normal(tokens, heads, DIM, dtype=torch.bfloat16) if heads else None
    q_out = None if q is None else torch.empty_like(q)
    rotation, turned = rotation_at(batch.positions, frequencies), rotation_at(batch.positions - ratio + 1, frequencies)
    main = pooling("packed", DIM) if ratio else None
    index, index_q, index_weight = None, None, None
    if keys:
        index, index_q = pooling(keys, INDEX_DIM), normal(tokens, INDEX_HEADS, INDEX_DIM, dtype=torch.bfloat16)
        index_weight = normal(tokens, INDEX_HEADS)

    def launch() -> object:
        cache_write(
            batch, kv=kv, kv_norm=kv_norm, rotation=rotation, window=window, eps=1e-6, q=q, q_out=q_out, ratio=ratio,
            entry_rotation=turned if ratio else None, main=main, index=index, index_q=index_q,
            index_weight=index_weight, index_scale=(INDEX_HEADS * INDEX_DIM) ** -0.5, staging=staging, tile=tile,
        )  # fmt: skip
        if staging is not None:
            commit_window(batch, staging, window)
        return q_out

    return launch


def _store_sample(fmt: str, width: int) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        draw = torch.Generator(device).manual_seed(i)
        values, scales = value_bytes(fmt, width), scale_row_bytes(fmt, width)
        pool = torch.zeros((2, -(-5 * (values + scales) // 16) * 16), dtype=torch.uint8, device=device)
        rows = Rows.view(pool, fmt, width=width, rows=5, offset=0, value_bytes=values, scale_bytes=scales)
        x = torch.randn(3, width, generator=draw, device=device)
        units, places = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([1, -1, 0], [4, 0, 0]))
        return lambda: store_rows(rows, units, places, x)

    size = 3 * (4 * width + value_bytes(fmt, width) + scale_row_bytes(fmt, width))
    return Bench(group="attention", op="store_rows", shape=f"{fmt} {width}", make=make, bytes=size)
