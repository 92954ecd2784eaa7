"""The decode launch that writes the cache, against its torch reference, pools and outputs full of NaN to begin with."""

import dataclasses

import pytest
import torch

from kernels.cache_write_decode import Pooling, cache_write, cache_write_reference, commit_window, staging_rows
from kernels.norm_rope import rotation_at
from kernels.ragged import DecodeBatch
from kernels.row_store import store_rows

EPS = 1e-6
FREQUENCIES = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32) / 64)


def decode_batch(spans, *, block_tokens, padding=0, extra_sequences=0, blocks=16, seed=0):
    """spans: (first position, tokens) a sequence. Padding tokens and sequences without tokens follow."""
    draw = torch.Generator().manual_seed(seed)
    count = len(spans) + extra_sequences
    total = sum(n for _, n in spans)
    free = torch.randperm(blocks, generator=draw).tolist()
    width = max(-(-(start + n) // block_tokens) for start, n in spans) + 1
    table = torch.full((count, width), -1, dtype=torch.int32)
    for index, (start, n) in enumerate(spans):
        for column in range(-(-(start + n) // block_tokens)):
            # Only blocks that this step can reach are real: a read or write of another one would go astray.
            if column * block_tokens >= start - block_tokens:
                table[index, column] = free.pop()
    query_start = [0]
    for _, n in spans:
        query_start.append(query_start[-1] + n)
    query_start += [total] * extra_sequences
    slots = torch.randperm(len(spans) + 2, generator=draw)[: len(spans)].tolist() + [-1] * extra_sequences
    ints = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    return DecodeBatch(
        positions=ints([p for start, n in spans for p in range(start, start + n)] + [-1] * padding),
        sequence=ints([i for i, (_, n) in enumerate(spans) for _ in range(n)] + [-1] * padding),
        starts=ints([start for start, _ in spans] + [-1] * extra_sequences),
        query_start=ints(query_start),
        slots=ints(slots),
        block_table=table,
        num_tokens=total + padding,
        max_query_len=max(n for _, n in spans),
    )


@dataclasses.dataclass
class Layer:
    """One layer's inputs and two equal sets of pools: [0] for the kernel, [1] for the reference."""

    batch: DecodeBatch
    given: dict
    pools: tuple
    views: tuple


@pytest.fixture
def make_layer(make_rows, normal):
    def make(batch, *, ratio, fmt="packed", index_fmt="", dim=128, heads=3, block_tokens=128, hadamard=False):
        tokens, slots, seed = batch.num_tokens, batch.slots.shape[0] + 2, 100
        given = {
            "kv": normal(tokens, dim, seed=1) * torch.exp(2 * normal(tokens, 1, seed=2)),
            "kv_norm": 1 + 0.1 * normal(dim, seed=3),
            "rotation": rotation_at(batch.positions, FREQUENCIES),
            "eps": EPS,
            "q": 3 * normal(tokens, heads, dim, seed=4),
            "ratio": ratio,
        }
        given["kv"][batch.sequence < 0] = float("nan")
        given["q"][batch.sequence < 0] = float("nan")
        if ratio:
            given["entry_rotation"] = rotation_at(batch.positions - ratio + 1, FREQUENCIES)
        views = []
        for _ in range(2):
            window = make_rows(fmt, dim, units=slots, rows=128)
            parts = {}
            for name, width, form in (("main", dim, fmt), ("index", 128, index_fmt)):
                if not ratio or not form:
                    continue
                double = 2 * width if ratio == 4 else width
                state = make_rows("fp32", double, units=slots, rows=16 if ratio == 4 else 3)
                # Rows of positions that exist hold numbers, the others NaN.
                for i, slot in enumerate(batch.slots.tolist()):
                    start = int(batch.starts[i])
                    if slot < 0:
                        continue
                    if ratio == 4:
                        for p in range(max(0, start - 8), start):
                            row = 2 * (p % 8)
                            state.values[slot, row : row + 2] = normal(2, double, seed=seed + 1000 * i + p)
                    elif start % 128:
                        state.values[slot] = normal(3, double, seed=seed + 1000 * i)
                        state.values[slot, 1] = 1 + state.values[slot, 1].abs()
                pool = make_rows(form, width, units=16, rows=block_tokens // ratio)
                parts[name] = Pooling(
                    projected=normal(tokens, 2 * double, seed=7 + len(parts)),
                    bias=0.5 * normal(ratio, double, seed=9),
                    norm=1 + 0.1 * normal(width, seed=10 + len(parts)),
                    state=state,
                    pool=pool,
                    hadamard=hadamard and name == "index",
                )
                parts[name].projected[batch.sequence < 0] = float("nan")
            views.append({"window": window, **parts})
        return given, views

    return make


def rows_of(view):
    return [(n, v.pool if isinstance(v, Pooling) else v) for n, v in view.items()]


def raw(rows):
    return torch.cat(
        [t.contiguous().view(torch.uint8).flatten() for t in (rows.values, rows.rope, rows.scales) if t is not None]
    )


def assert_same_rows(got, wanted):
    """Norms differ by a few ulp, so a code may fall to the other side of a tie: one in a thousand, by one code."""
    a, b = raw(got).int(), raw(wanted).int()
    if got.format == "fp32":
        x, y = got.values, wanted.values
        assert torch.equal(x.isnan(), y.isnan())
        torch.testing.assert_close(x.nan_to_num(), y.nan_to_num(), rtol=2e-5, atol=2e-5)
        return
    written = (b != 0xFF) | (a != 0xFF)
    differ = (a != b) & written
    assert differ.sum() <= max(1, int(2e-3 * written.sum())), f"{int(differ.sum())} of {int(written.sum())} bytes"
    assert (b != 0xFF).any() == (a != 0xFF).any()


def run(batch, given, views, **more):
    mine, reference = views
    out = cache_write(batch, **given, **mine, **more)
    wanted = cache_write_reference(batch, **given, **reference, **more)
    for (_, got), (_, rows) in zip(rows_of(mine), rows_of(reference), strict=True):
        assert_same_rows(got, rows)
    for name in ("main", "index"):
        if name in mine:
            assert_same_rows(mine[name].state, reference[name].state)
    if out is not None:
        assert out.dtype == wanted.dtype
        torch.testing.assert_close(out.float(), wanted.float(), rtol=2**-7, atol=1e-5)
        assert not out.isnan().any()
    return out


SINGLE = [(p, 1) for p in (0, 3, 4, 7, 127)]


@pytest.mark.parametrize("fmt", ["packed", "bf16", "fp32"])
def test_a_window_layer_stores_its_row_in_the_ring(make_layer, fmt):
    batch = decode_batch([(0, 1), (127, 1), (128, 1), (300, 1)], block_tokens=128, padding=1)
    run(batch, *make_layer(batch, ratio=0, fmt=fmt))


@pytest.mark.parametrize(("index", "rotated"), [("fp8_index", False), ("fp4_index", True), ("bf16", False)])
def test_a_csa_layer_keeps_its_rings_and_stores_entries_and_index_keys(make_layer, index, rotated):
    batch = decode_batch([*SINGLE, (131, 1), (258, 1)], block_tokens=128, padding=2, extra_sequences=1)
    fmt = "bf16" if index == "bf16" else "packed"
    views = make_layer(batch, ratio=4, fmt=fmt, index_fmt=index, hadamard=rotated)
    run(batch, *views)


def test_a_csa_layer_at_the_models_head_size(make_layer):
    batch = decode_batch([(7, 1), (9, 1)], block_tokens=128)
    run(batch, *make_layer(batch, ratio=4, index_fmt="fp8_index", dim=512, heads=9))


def test_an_hca_layer_carries_its_sums_and_stores_a_full_entry(make_layer):
    batch = decode_batch([(0, 1), (1, 1), (126, 1), (127, 1), (128, 1), (255, 1)], block_tokens=128, padding=1)
    run(batch, *make_layer(batch, ratio=128))


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_several_tokens_a_sequence_equal_the_reference(make_layer, ratio):
    spans = [(0, 5), (2, 9), (124, 6), (5, 1), (253, 4)]
    batch = decode_batch(spans, block_tokens=128, padding=2, extra_sequences=1)
    given, views = make_layer(batch, ratio=ratio, index_fmt="fp8_index" if ratio == 4 else "")
    before = [raw(v["window"]).clone() for v in views]
    staged = [staging_rows(batch.num_tokens, views[0]["window"]) for _ in range(2)]
    for rows in staged:
        rows.values.view(torch.uint8).fill_(0xFF)
    mine, reference = views
    q = cache_write(batch, **given, **mine, staging=staged[0])
    wanted = cache_write_reference(batch, **given, **reference, staging=staged[1])
    torch.testing.assert_close(q.float(), wanted.float(), rtol=2**-7, atol=1e-5)
    real = batch.sequence >= 0
    assert_same_rows(
        dataclasses.replace(staged[0], values=staged[0].values[real], rope=None, scales=staged[0].scales[real]),
        dataclasses.replace(staged[1], values=staged[1].values[real], rope=None, scales=staged[1].scales[real]),
    )
    assert torch.equal(
        staged[0].values.view(torch.uint8)[~real], torch.full_like(staged[0].values.view(torch.uint8)[~real], 255)
    )
    assert torch.equal(raw(mine["window"]), before[0])
    for name in ("main", "index"):
        if name in mine:
            assert_same_rows(mine[name].state, reference[name].state)
            assert_same_rows(mine[name].pool, reference[name].pool)
    commit_window(batch, staged[1], mine["window"])
    whole = dataclasses.replace(batch)
    token = [i for i, s in enumerate(batch.sequence.tolist()) if s >= 0]
    for t in token:
        slot, row = int(batch.slots[batch.sequence[t]]), int(batch.positions[t]) % 128
        got = mine["window"].values.view(torch.uint8)[slot, row]
        assert torch.equal(got, staged[1].values.view(torch.uint8)[t, 0])
        assert torch.equal(mine["window"].scales[slot, row], staged[1].scales[t, 0])
        assert torch.equal(mine["window"].rope[slot, row].view(torch.int16), staged[1].rope[t, 0].view(torch.int16))
    changed = (raw(mine["window"]) != before[0]).sum()
    assert 0 < changed <= len(token) * 200
    assert whole.num_tokens == batch.num_tokens


@pytest.mark.parametrize(("ratio", "position"), [(4, 3), (128, 127)])
def test_an_entry_without_a_block_is_dropped_and_nothing_else(make_layer, ratio, position):
    batch = decode_batch([(position, 1)], block_tokens=128)
    batch.block_table.fill_(-1)
    given, (mine, _) = make_layer(batch, ratio=ratio)
    cache_write(batch, **given, **mine)
    assert (raw(mine["main"].pool) == 0xFF).all()


def test_queries_may_be_turned_in_place(make_layer):
    batch = decode_batch([(5, 1), (77, 1)], block_tokens=128, padding=1)
    given, (mine, reference) = make_layer(batch, ratio=0, heads=10)
    wanted = cache_write_reference(batch, **given, **reference)
    q = given.pop("q").to(torch.bfloat16)
    given["q"] = q
    wanted = cache_write_reference(batch, **given, **reference)
    assert cache_write(batch, **given, **mine, q_out=q) is q
    torch.testing.assert_close(q.float(), wanted.float(), rtol=2**-7, atol=1e-5)


FORMATS = [("packed", 512), ("packed", 128), ("fp8_index", 128), ("fp4_index", 128), ("bf16", 128), ("fp32", 64)]


@pytest.mark.parametrize(("fmt", "width"), FORMATS)
def test_stored_bytes_are_those_of_the_reference(make_rows, normal, fmt, width):
    n = 24
    x = normal(n, width) * torch.exp(6 * normal(n, 1, seed=1))
    x[1], x[2], x[3], x[4] = 0.0, -0.0, 1e30 * x[3], 3.4e38
    x[5] *= 1e-6
    x[6] = torch.arange(width) * 1.75  # where the scale changes
    x[7] = 1.75
    x[8] = torch.arange(width) % 29 / 4 - 3.5  # ties
    x[9] = x[8] * 2**-9
    x[10] = (torch.arange(width) - width // 2) * 2.0**-10  # below the smallest normal code
    x[10, ::32] = 448.0
    place = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:n].int()
    got, wanted = (make_rows(fmt, width, units=8, rows=5) for _ in range(2))
    wanted.write((place // 5).long(), (place % 5).long(), x)
    store_rows(got, place // 5, place % 5, x)
    assert torch.equal(raw(got), raw(wanted))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("fmt", "width", "group"), [("packed", 256, 64), ("fp8_index", 128, 128), ("fp4_index", 128, 32)]
)
def test_a_bad_value_spoils_its_own_group_only(make_rows, normal, bad, fmt, width, group):
    x = normal(1, width)
    x[0, 5] = bad
    rows = make_rows(fmt, width, units=1, rows=1)
    zero = torch.zeros(1, dtype=torch.int32)
    store_rows(rows, zero, zero, x)
    read = rows.read(zero.long(), zero.long())[0]
    assert read[:group].isnan().all()
    assert read[group:].isfinite().all()


def test_a_row_of_unit_minus_one_is_left_out(make_rows, normal):
    rows = make_rows("packed", 128, units=1, rows=1)
    store_rows(rows, torch.tensor([-1, 0], dtype=torch.int32), torch.zeros(2, dtype=torch.int32), normal(2, 128))
    want = make_rows("packed", 128, units=1, rows=1)
    want.write(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), normal(2, 128)[1:])
    assert torch.equal(raw(rows), raw(want))
