"""Benches and samples of sparse_attention_decode: one layer's attention of a decode step over packed rows.

Sequences of CONTEXT tokens (HCA: 131,072), selections drawn without repetition, blocks scattered over the pool. Units
are as large as the model's, one layer of which is read: addresses spread over memory as they do in a step.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from kernels.bench import Bench
from kernels.gpu_timer import Launch
from kernels.norm_rope import rotation_at
from kernels.ragged import DecodeBatch
from kernels.row_store import scale_row_bytes, value_bytes
from kernels.rows import Rows
from kernels.sparse_attention_decode import sparse_attention_decode
from kernels.sparse_attention_many import OP as MANY_OP
from kernels.tiles import tile_for
from kernels.triton_env import arch_of

DIM, WINDOW, TOP_K, BLOCK_TOKENS = 512, 128, 512, 256
CONTEXT = {"CSA": 8192, "HCA": 131_072, "window": 8192}
RATIO = {"CSA": 4, "HCA": 128, "window": 0}
LAYERS = {"CSA": 21, "HCA": 20, "window": 0}
RING_LAYERS = 43


@dataclasses.dataclass(frozen=True)
class Inputs:
    """One call: sparse_attention_decode(q, batch, window, **rest), and the reference alike."""

    q: Tensor
    batch: DecodeBatch
    window: Rows
    rest: dict[str, Any]

    def launch(self, **options: Any) -> Tensor:
        return sparse_attention_decode(self.q, self.batch, self.window, **self.rest, **options)


def benches() -> list[Bench]:
    """Return the benches: each kind of layer as a TP4 rank has it, then all 64 heads, then several tokens each."""
    return [
        *(_bench(n, kind, heads=16, chain=f"{kind} B={n}") for kind in ("CSA", "HCA") for n in (1, 16, 64)),
        *(_bench(n, "window", heads=16) for n in (1, 64)),
        *(_bench(n, "CSA", heads=64) for n in (1, 16, 64)),
        _bench(16, "CSA", heads=16, length=4),
        *_prompts(),
    ]


def _prompts() -> list[Bench]:
    """Return the last chunk of 4,096 tokens of a prompt: each kind of layer, at 8k, and all entries at 128k."""
    return [
        _bench(1, kind, heads=16, length=4096, context=context, group="prefill")
        for kind, context in (("CSA", 8192), ("HCA", 8192), ("HCA", 131_072), ("window", 8192))
    ]


def samples() -> list[Bench]:
    """Return one small step for each shipped path."""
    return [
        *(
            _bench(3, kind, heads=9, length=length, padding=1, context=700)
            for kind in ("CSA", "HCA", "window")
            for length in (1, 3)
        ),
        _bench(3, "CSA", heads=40, context=700),
        _bench(200, "window", heads=16, context=100),  # more than multiprocessors: no splits
        *(
            _bench(2, kind, heads=16, length=9, padding=1, context=700, as_many=True)
            for kind in ("CSA", "HCA", "window")
        ),
    ]


def _bench(
    count: int,
    kind: str,
    *,
    heads: int,
    chain: str | None = None,
    length: int = 1,
    padding: int = 0,
    context: int = 0,
    group: str = "attention",
    as_many: bool = False,
) -> Bench:
    """as_many: with the tile of a step of many tokens, however few they are."""
    context = context or CONTEXT[kind]
    # Of many tokens the mean is what counts; of few it is the same.
    tokens, visible = count * length, {"CSA": TOP_K, "HCA": (context - length // 2) // 128, "window": 0}[kind]
    shape = f"B={count} {kind} heads={heads} keys={WINDOW}+{visible}"

    def make(device: torch.device, i: int) -> Launch:
        some = length if device.type == "cuda" else min(length, 300)  # still a step of many tokens
        inputs = draw_inputs(device, i, count, kind, heads=heads, length=some, padding=padding, context=context)
        tile = tile_for(MANY_OP, arch_of(device), own=int(kind == "CSA")) if as_many else None
        return functools.partial(inputs.launch, tile=tile)

    rows = tokens * (WINDOW + visible)
    if length > WINDOW:  # which its tokens share
        rows = count * (WINDOW + length + (context // RATIO[kind] if RATIO[kind] else 0))
    row = value_bytes("packed", DIM) + scale_row_bytes("packed", DIM)
    return Bench(
        group=group,
        op="sparse_attention",
        shape=shape + (f" {length} tokens each" if length > 1 else "") + (" as many" if as_many else ""),
        make=make,
        bytes=rows * row + tokens * 2 * heads * DIM * 2,
        flops=tokens * heads * (WINDOW + visible) * DIM * 4,
        chain=chain,
    )


def draw_inputs(
    device: torch.device,
    seed: int,
    count: int,
    kind: str,
    *,
    heads: int,
    context: int,
    length: int = 1,
    padding: int = 0,
) -> Inputs:
    """Return a step of `count` sequences of about `context` tokens, `length` new ones each, then `padding` tokens."""
    draw = torch.Generator(device).manual_seed(seed)
    # The CPU only looks at how kernels are launched; units of one layer will do.
    layers = LAYERS[kind] if device.type == "cuda" else 1
    ring_layers = RING_LAYERS if device.type == "cuda" else 1
    ratio, tokens = RATIO[kind], count * length + padding
    starts = [context - length - 8 * (b % 5) for b in range(count)]
    positions = torch.tensor([p for s in starts for p in range(s, s + length)] + [-1] * padding, device=device)
    sequence = torch.tensor([b for b in range(count) for _ in range(length)] + [-1] * padding, device=device)

    def ints(x: Tensor | list[int]) -> Tensor:
        return torch.as_tensor(x, device=device).to(torch.int32)

    columns = -(-context // BLOCK_TOKENS)
    blocks = torch.randperm(count * columns, generator=draw, device=device).view(count, columns)
    batch = DecodeBatch(
        positions=ints(positions),
        sequence=ints(sequence),
        starts=ints(starts),
        query_start=ints([length * b for b in range(count + 1)]),
        slots=ints(torch.randperm(count, generator=draw, device=device)),
        block_table=ints(blocks),
        num_tokens=tokens,
        max_query_len=length,
    )
    selected = None
    if kind == "CSA":
        visible = ((positions + 1) // ratio).clamp(min=0)
        noise = torch.rand(tokens, context // ratio, generator=draw, device=device)
        noise.masked_fill_(torch.arange(context // ratio, device=device) >= visible[:, None], -1.0)
        best = noise.topk(min(TOP_K, context // ratio))
        selected = torch.full((tokens, TOP_K), -1, dtype=torch.int32, device=device)
        chosen = best.indices.masked_fill(best.values < 0, -1).to(torch.int32)
        selected[:, : best.indices.shape[1]] = chosen if length == 1 else chosen.sort(1).values
    q = torch.randn(tokens, heads, DIM, generator=draw, device=device).to(torch.bfloat16)
    frequencies = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32, device=device) / 64)
    return Inputs(
        q,
        batch,
        _rows(device, draw, count, WINDOW, ring_layers),
        {
            "sink": torch.randn(heads, generator=draw, device=device),
            "scale": DIM**-0.5,
            "rotation": rotation_at(positions.clamp(min=0), frequencies),
            "compressed": _rows(device, draw, count * columns, BLOCK_TOKENS // ratio, layers) if ratio else None,
            "ratio": ratio,
            "selected": selected,
            "new": _rows(device, draw, tokens, 1, 1) if length > 1 else None,
        },
    )


def _rows(device: torch.device, draw: torch.Generator, units: int, rows: int, layers: int) -> Rows:
    """Return packed rows of random numbers, |code| below 2; scales 1/4 to 2. The rest of each unit is left as it is."""
    values, scales = value_bytes("packed", DIM), scale_row_bytes("packed", DIM)
    unit = -(-rows * (values + scales) // 16) * 16
    pool = torch.empty((units, layers * unit), dtype=torch.uint8, device=device)
    view = Rows.view(pool, "packed", width=DIM, rows=rows, offset=0, value_bytes=values, scale_bytes=scales)
    assert view.rope is not None and view.scales is not None
    codes = torch.randint(0, 256, view.values.shape, generator=draw, device=device, dtype=torch.uint8)
    view.values.view(torch.uint8).copy_(codes & 0xBF)
    view.rope.copy_(torch.randn(view.rope.shape, generator=draw, device=device))
    view.scales.copy_(torch.randint(125, 129, view.scales.shape, generator=draw, device=device, dtype=torch.uint8))
    return view
