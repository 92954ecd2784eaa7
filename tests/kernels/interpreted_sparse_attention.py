"""The decode attention kernel against its torch reference: pools full of NaN but for the rows that may be read."""

import dataclasses
import math

import pytest
import torch

from kernels.norm_rope import rotation_at
from kernels.ragged import DecodeBatch
from kernels.rows import Rows
from kernels.sparse_attention_decode import sparse_attention_decode, sparse_attention_decode_reference
from kernels.tiles import Tile
from kv_transfer.layout import row_bytes

# Triton's interpreter turns loop bounds into integers in a way that numpy will refuse one day.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")

WINDOW, RATIO, PER_BLOCK = 16, 4, 8
FREQUENCIES = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)

# Unpacked keys are exact in f16, as is q here, rounded to bf16 first; weights are rounded to f16 (2^-12), a split's
# result and the output to bf16 (2^-9 each). Keys are normal: outputs are below 4, so 4 * (2^-12 + 2 * 2^-9) at most.
TOLERANCE = {"packed": 0.018, "bf16": 0.035, "fp32": 2e-5}  # bf16 rows: weights too are bf16, twice


def tile(**constants):
    chosen = {
        "BLOCK_H": 16,
        "BLOCK_N": 16,
        "SWAP": 0,
        "SPREAD": 0,
        "FUSED": 1,
        "RESIDENT": 1,
        "MAX_SPLITS": 32,
        "COMBINE_H": 1,
    }
    return Tile(chosen | constants, num_warps=4)


def pool_of(fmt, dim, units, rows):
    values, scales = row_bytes(fmt, dim)
    pool = torch.full((units, -(-rows * (values + scales) // 16) * 16), 0xFF, dtype=torch.uint8)
    return Rows.view(pool, fmt, width=dim, rows=rows, offset=0, value_bytes=values, scale_bytes=scales)


@dataclasses.dataclass
class Case:
    """One call's inputs. `kwargs` are those of the wrapper and of the reference alike."""

    q: torch.Tensor
    batch: DecodeBatch
    window: Rows
    kwargs: dict

    def expect(self):
        return sparse_attention_decode_reference(self.q, self.batch, self.window, **self.kwargs)

    def run(self, **options):
        out_dtype = torch.float32 if self.window.format == "fp32" else torch.bfloat16
        lse = torch.full(self.q.shape[:2], math.nan)
        out = sparse_attention_decode(
            self.q, self.batch, self.window, **self.kwargs, lse=lse, out_dtype=out_dtype, **options
        )
        return out.float(), lse

    def check(self, **options):
        out, lse = self.run(**options)
        wanted, wanted_lse = self.expect()
        bound = TOLERANCE[self.window.format]
        assert torch.allclose(out, wanted, atol=bound, rtol=0, equal_nan=True), (out - wanted).abs().max()
        assert torch.allclose(lse, wanted_lse, atol=bound, rtol=0, equal_nan=True)
        return out, lse


def case(
    spans,
    *,
    fmt="packed",
    dim=128,
    heads=4,
    kind="selected",
    top_k=6,
    sink=True,
    padding=0,
    is_new=False,
    seed=0,
    q_scale=1.0,
):
    """spans: (first position, tokens) a sequence. kind: "selected", "visible" (all entries) or "window"."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    ints = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    tokens = sum(n for _, n in spans)
    window, pool = pool_of(fmt, dim, len(spans) + 2, WINDOW), pool_of(fmt, dim, 24, PER_BLOCK)
    new = pool_of(fmt, dim, tokens + padding, 1)
    free = torch.randperm(24, generator=draw).tolist()
    slots = torch.randperm(len(spans) + 2, generator=draw)[: len(spans)].tolist()
    columns = max(-(-(start + n) // (RATIO * PER_BLOCK)) for start, n in spans) + 1
    table = torch.full((len(spans), columns), -1, dtype=torch.int32)
    token = 0
    for index, (start, n) in enumerate(spans):
        near = torch.arange(max(0, start - WINDOW + 1), start if is_new else start + n)
        window.write(torch.full_like(near, slots[index]), near % WINDOW, normal(near.shape[0], dim))
        if is_new:
            unit = torch.arange(token, token + n)
            new.write(unit, torch.zeros_like(unit), normal(n, dim))
        entries = torch.arange((start + n) // RATIO)
        for column in range(-(-entries.shape[0] // PER_BLOCK)):
            table[index, column] = free.pop()
        if kind != "window":
            pool.write(table[index].long()[entries // PER_BLOCK], entries % PER_BLOCK, normal(entries.shape[0], dim))
        token += n
    positions = [p for start, n in spans for p in range(start, start + n)]
    selected = torch.full((tokens + padding, top_k), -1, dtype=torch.int32)
    for t, position in enumerate(positions):
        chosen = torch.randperm((position + 1) // RATIO, generator=draw)[:top_k]
        places = torch.randperm(top_k, generator=draw)[: chosen.shape[0]]
        selected[t, places] = chosen.int()
    starts = [0]
    for _, n in spans:
        starts.append(starts[-1] + n)
    batch = DecodeBatch(
        positions=ints(positions + [-1] * padding),
        sequence=ints([i for i, (_, n) in enumerate(spans) for _ in range(n)] + [-1] * padding),
        starts=ints([start for start, _ in spans]),
        query_start=ints(starts),
        slots=ints(slots),
        block_table=table,
        num_tokens=tokens + padding,
        max_query_len=max(n for _, n in spans),
    )
    q = (normal(tokens + padding, heads, dim) * q_scale).bfloat16()
    kwargs = {
        "sink": normal(heads) if sink else None,
        "scale": dim**-0.5,
        "rotation": rotation_at(batch.positions.clamp(min=0), FREQUENCIES),
        "compressed": None if kind == "window" else pool,
        "ratio": 0 if kind == "window" else RATIO,
        "selected": selected if kind == "selected" else None,
        "new": new if is_new else None,
    }
    return Case(q.float() if fmt == "fp32" else q, batch, window, kwargs)


SPANS = [(0, 1), (3, 1), (40, 1), (101, 1)]


DESIGNS = [{"SWAP": 0}, {"SWAP": 1}, {"SPREAD": 1}]


@pytest.mark.parametrize("design", DESIGNS, ids=lambda d: "-".join(d))
@pytest.mark.parametrize("kind", ["selected", "visible", "window"])
@pytest.mark.parametrize("fmt", ["packed", "bf16", "fp32"])
def test_every_format_and_kind_of_layer_equals_the_reference(fmt, kind, design):
    case(SPANS, fmt=fmt, kind=kind, padding=1).check(tile=tile(**design))
