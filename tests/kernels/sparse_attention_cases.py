"""Inputs of sparse_attention_decode for tests on any device: pools full of NaN but for the rows that may be read."""

import dataclasses
import math

import torch

from kernels.norm_rope import rotation_at
from kernels.ragged import DecodeBatch
from kernels.rows import Rows
from kernels.sparse_attention_decode import sparse_attention_decode, sparse_attention_decode_reference
from kernels.tiles import Tile
from kv_transfer.layout import row_bytes

# Keys are normal, so below 4.5, and q is bf16. Unpacked keys and q are exact in f16; weights are rounded to f16, 2^-12
# (bf16 rows: to bf16, 2^-9), results of splits and the output to bf16, 2^-9 each. A split with few keys is as large as
# they are, and what cancels between splits, or is turned into the other channel of its pair, doesn't shrink with the
# output. Over all channels of a token these errors are independent: NORM_BOUND is for the norm of their difference.
BOUNDS = {
    "packed": {"atol": 4.5 * 2**-12 + math.sqrt(2) * 4.5 * 2**-9, "rtol": 2**-8},
    "bf16": {"atol": 4.5 * 2**-9 + math.sqrt(2) * 4.5 * 2**-9, "rtol": 2**-8},
    "fp32": {"atol": 2e-5, "rtol": 0.0},  # products of three tf32 parts
}
NORM_BOUND = {"packed": 2**-8, "bf16": 1.5 * 2**-8, "fp32": 1e-5}
LSE_BOUND = 1e-4  # sums of 512 products in float32, in whatever order


def make_tile(*, warps=4, **constants):
    chosen = {"BLOCK_H": 16, "BLOCK_N": 16, "SWAP": 0, "SPREAD": 0, "FUSED": 1, "RESIDENT": 1, "MAX_SPLITS": 32}
    return Tile(chosen | {"COMBINE_H": 1} | constants, num_warps=warps)


@dataclasses.dataclass
class Case:
    """One call's inputs; `rest` are keyword arguments of the wrapper and of the reference alike."""

    q: torch.Tensor
    batch: DecodeBatch
    window: Rows
    rest: dict

    def expect(self):
        return sparse_attention_decode_reference(self.q, self.batch, self.window, **self.rest)

    def run(self, **options):
        """Return out, float32, and lse."""
        dtype = torch.float32 if self.window.format == "fp32" else torch.bfloat16
        lse = torch.full(self.q.shape[:2], math.nan, device=self.q.device)
        out = sparse_attention_decode(self.q, self.batch, self.window, **self.rest, lse=lse, out_dtype=dtype, **options)
        return out.float(), lse

    def thinned(self, every):
        """Return every so manieth token alone, as the reference takes them; `new` has the rows of all."""
        picked = {name: getattr(self.batch, name)[::every].contiguous() for name in ("positions", "sequence")}
        batch = dataclasses.replace(self.batch, num_tokens=picked["positions"].shape[0], **picked)
        rest = {
            name: x[::every] if name in ("rotation", "selected") and x is not None else x
            for name, x in self.rest.items()
        }
        return Case(self.q[::every].contiguous(), batch, self.window, rest)

    def fault(self, every=1, **options):
        """Return how the result differs from the reference's, "" if within the bounds; of every so manieth token."""
        out, lse = (x[::every] for x in self.run(**options))
        wanted, wanted_lse = self.thinned(every).expect()
        bound = BOUNDS[self.window.format]
        if not torch.allclose(out, wanted, **bound, equal_nan=True):
            apart = (out - wanted).abs().amax(-1)
            return f"out differs by {apart.max():.5f}, {int(out.isnan().sum())} are NaN; by token {apart.amax(-1)[:8]}"
        error, size = torch.nan_to_num(out - wanted).norm(dim=-1), torch.nan_to_num(wanted).norm(dim=-1)
        if bool((error > NORM_BOUND[self.window.format] * size).any()):
            return f"a row of out is off by {(error / size).nan_to_num().max():.2e} of its norm"
        if not torch.allclose(lse, wanted_lse, atol=LSE_BOUND, rtol=1e-5, equal_nan=True):
            return f"lse differs by {(lse - wanted_lse).abs().max():.5f}"
        return ""


def make_rows(fmt, dim, *, units, rows, device="cpu", byte=0xFF):
    values, scales = row_bytes(fmt, dim)
    pool = torch.full((units, -(-rows * (values + scales) // 16) * 16), byte, dtype=torch.uint8, device=device)
    return Rows.view(pool, fmt, width=dim, rows=rows, offset=0, value_bytes=values, scale_bytes=scales)


def make_case(
    spans, *, fmt="packed", dim=128, heads=4, kind="selected", top_k=6, sink=True, padding=0, staged=False, seed=0,
    window_rows=16, ratio=4, block_rows=8, extra_columns=1, byte=0xFF, device="cpu",
):  # fmt: skip
    """spans: (first position, tokens) a sequence. kind: "selected", "visible" (all entries) or "window".

    Whatever is not drawn is the byte `byte`. staged: this step's rows lie in `new`, and the ring lacks them.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens = sum(n for _, n in spans)
    counts = [(start + n) // ratio for start, n in spans]
    num_blocks = sum(-(-count // block_rows) for count in counts) + 2
    window = make_rows(fmt, dim, units=len(spans) + 2, rows=window_rows, device=device, byte=byte)
    pool = make_rows(fmt, dim, units=num_blocks, rows=block_rows, device=device, byte=byte)
    new = make_rows(fmt, dim, units=tokens + padding, rows=1, device=device, byte=byte)
    free = torch.randperm(num_blocks, generator=draw).tolist()
    slots = torch.randperm(len(spans) + 2, generator=draw)[: len(spans)].tolist()
    table = torch.full((len(spans), -(-max(counts) // block_rows) + extra_columns), -1, dtype=torch.int32)

    def put(rows, units, places):
        drawn = torch.randn(len(units), dim, generator=draw)
        rows.write(units.to(device), places.to(device), drawn.to(device))

    token = 0
    for index, (start, n) in enumerate(spans):
        near = torch.arange(max(0, start + (0 if staged else n) - window_rows), start + (0 if staged else n))
        put(window, torch.full_like(near, slots[index]), near % window_rows)
        unit = torch.arange(token, token + n)
        if staged:
            put(new, unit, torch.zeros_like(unit))
        entries = torch.arange(counts[index])
        for column in range(-(-counts[index] // block_rows)):
            table[index, column] = free.pop()
        if kind != "window":
            put(pool, table[index].long()[entries // block_rows], entries % block_rows)
        token += n
    positions = [p for start, n in spans for p in range(start, start + n)]
    selected = torch.full((tokens + padding, top_k), -1, dtype=torch.int32)
    for t, position in enumerate(positions):
        chosen = torch.randperm((position + 1) // ratio, generator=draw)[:top_k]
        places = torch.randperm(top_k, generator=draw)[: chosen.shape[0]]
        selected[t, places] = chosen.int()
    first = [0]
    for _, n in spans:
        first.append(first[-1] + n)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = DecodeBatch(
        positions=ints(positions + [-1] * padding),
        sequence=ints([i for i, (_, n) in enumerate(spans) for _ in range(n)] + [-1] * padding),
        starts=ints([start for start, _ in spans]),
        query_start=ints(first),
        slots=ints(slots),
        block_table=table.to(device),
        num_tokens=tokens + padding,
        max_query_len=max(n for _, n in spans),
    )
    q = torch.randn(tokens + padding, heads, dim, generator=draw).bfloat16().to(device)
    frequencies = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32, device=device) / 64)
    rest = {
        "sink": torch.randn(heads, generator=draw).to(device) if sink else None,
        "scale": dim**-0.5,
        "rotation": rotation_at(batch.positions.clamp(min=0), frequencies),
        "compressed": None if kind == "window" else pool,
        "ratio": 0 if kind == "window" else ratio,
        "selected": selected.to(device) if kind == "selected" else None,
        "new": new if staged else None,
    }
    return Case(q.float() if fmt == "fp32" else q, batch, window, rest)


def alone(case, token):
    """Return the case (one token a sequence) with that token alone, and a block table as wide as it needs."""
    batch = case.batch
    width = int((batch.block_table[token] >= 0).sum())
    single = dataclasses.replace(
        batch,
        positions=batch.positions[token : token + 1],
        sequence=torch.zeros_like(batch.sequence[:1]),
        starts=batch.starts[token : token + 1],
        query_start=batch.query_start[:2].clone(),
        slots=batch.slots[token : token + 1],
        block_table=batch.block_table[token : token + 1, :width].contiguous(),
        num_tokens=1,
    )
    rest = dict(case.rest, rotation=case.rest["rotation"][token : token + 1])
    if rest["selected"] is not None:
        rest["selected"] = rest["selected"][token : token + 1]
    return Case(case.q[token : token + 1].contiguous(), single, case.window, rest)


def later(case, first):
    """Return the tokens from `first` on of a case with one sequence, as a step behind one that had those before."""
    batch, new, window = case.batch, case.rest["new"], case.window
    start, slot = int(batch.starts[0]) + first, int(batch.slots[0])
    for position in range(max(int(batch.starts[0]), start - window.rows), start):
        for part in ("values", "rope", "scales"):
            into, source = getattr(window, part), getattr(new, part)
            if part == "values":
                into, source = into.view(torch.uint8), source.view(torch.uint8)
            into[slot, position % window.rows] = source[position - int(batch.starts[0]), 0]
    single = dataclasses.replace(
        batch,
        positions=batch.positions[first:].clone(),
        sequence=batch.sequence[first:].clone(),
        starts=batch.starts + first,
        query_start=batch.query_start.clamp(max=int(batch.query_start[1]) - first),
        num_tokens=batch.num_tokens - first,
        max_query_len=batch.max_query_len - first,
    )
    rest = dict(case.rest, rotation=case.rest["rotation"][first:].clone())
    rest["new"] = Rows(new.format, new.width, new.values[first:], new.rope[first:], new.scales[first:])
    if rest["selected"] is not None:
        rest["selected"] = rest["selected"][first:].clone()
    return Case(case.q[first:].contiguous(), single, window, rest)


def spoil(case, token, channel=3):
    """Put a NaN into the row of a token of this step."""
    case.rest["new"].values.view(torch.uint8)[token, 0, channel] = 0x7F
