"""Attention over window and selected entries against a dense float64 loop; padding, empty rows, merges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cache_write import write_window
from kernels.ragged import RaggedBatch
from kernels.rows import Rows
from kernels.sparse_attention import attend_reference, merge_attention, sparse_attention
from kv_transfer.layout import row_bytes

HEADS, DIM, WINDOW, RATIO, PER_BLOCK = 4, 128, 16, 4, 8
SINK = torch.tensor([0.3, -1.0, 0.0, 2.0])
SCALE = DIM**-0.5


def pool_of(fmt, units, rows, fill=0xFF):
    values, scales = row_bytes(fmt, DIM)
    pool = torch.full((units, -(-rows * (values + scales) // 16) * 16), fill, dtype=torch.uint8)
    return Rows.view(pool, fmt, width=DIM, rows=rows, offset=0, value_bytes=values, scale_bytes=scales)


def by_hand(q, keys, sink):
    """q [H, D], keys list of [D]: out [H, D], lse [H] in float64."""
    scores = [(q.double() @ k.double()) * SCALE for k in keys]
    if sink is not None:
        scores.append(sink.double())
    if not scores:
        return torch.zeros(HEADS, DIM).double(), torch.full((HEADS,), -math.inf).double()
    stacked = torch.stack(scores)
    weights = torch.softmax(stacked, 0)
    out = sum((weights[i][:, None] * k.double() for i, k in enumerate(keys)), torch.zeros(HEADS, DIM).double())
    return out, torch.logsumexp(stacked, 0)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "packed"])
@settings(max_examples=15)
@given(data=st.data())
def test_mixed_batches_equal_a_dense_loop(fmt, data):
    """Chunks and single tokens in one batch; unwritten rows of every pool hold NaN."""
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=3))
    sink = data.draw(st.sampled_from([None, SINK]))
    choose = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(len(lengths))
    window, pool = pool_of(fmt, 4, WINDOW), pool_of(fmt, 32, PER_BLOCK)
    blocks = iter(torch.randperm(32, generator=generator).tolist())
    tables = [[next(blocks) for _ in range(-(-(s + n) // (RATIO * PER_BLOCK)))] for s, n in lengths]
    slots = [3 - i for i in range(len(lengths))]
    rows = [torch.randn(s + n, DIM, generator=generator) for s, n in lengths]
    entries = [torch.randn((s + n) // RATIO, DIM, generator=generator) for s, n in lengths]
    for i, (start, _) in enumerate(lengths):
        if start:
            before = RaggedBatch.build([(0, start)], slots=[slots[i]], block_tables=[tables[i]])
            write_window(rows[i][:start], before, window)
        for b, entry in enumerate(entries[i]):
            pool.write(torch.tensor([tables[i][b // PER_BLOCK]]), torch.tensor([b % PER_BLOCK]), entry[None])
    batch = RaggedBatch.build(lengths, slots=slots, block_tables=tables)
    q = torch.randn(batch.num_tokens, HEADS, DIM, generator=generator)
    visible = batch.num_visible(RATIO)
    chosen = [torch.randperm(int(v), generator=generator)[:5].tolist() if choose else list(range(v)) for v in visible]
    padded = torch.tensor([[*c, *[-1] * (5 - len(c))] for c in chosen]) if choose else None
    new = torch.cat([rows[i][s : s + n] for i, (s, n) in enumerate(lengths)])
    out, lse = sparse_attention(
        q, window.round_trip(new), batch, window, sink=sink, scale=SCALE, compressed=pool, ratio=RATIO, selected=padded
    )
    for t in range(batch.num_tokens):
        i, position = int(batch.sequence[t]), int(batch.positions[t])
        near = rows[i][max(0, position - WINDOW + 1) : position + 1]
        keys = [*window.round_trip(near), *(pool.round_trip(entries[i][c]) for c in chosen[t])]
        wanted_out, wanted_lse = by_hand(q[t], keys, sink)
        assert torch.allclose(out[t].double(), wanted_out, atol=1e-5)
        assert torch.allclose(lse[t].double(), wanted_lse, atol=1e-5)


INDEX_ROWS = [[0, -1, -1, 3], [-1, -1, 0, -1], [-1, -1, -1, -1], [7, -1, 0, 5], [3, 2, 1, 0], [-1, 0, -1, -1]]


@pytest.mark.parametrize("fmt", ["fp32", "bf16"])
def test_index_minus_one_neither_hides_nor_invents_entry_0(fmt, normal):
    """Page 0 of the pool is another request's, the last page is NaN, and the padding of the table points nowhere."""
    pool, window = pool_of(fmt, 4, PER_BLOCK), pool_of(fmt, 2, WINDOW)
    entries = normal(8, DIM)
    pool.write(torch.full((8,), 2), torch.arange(8), entries)
    pool.write(torch.zeros(8, dtype=torch.int64), torch.arange(8), torch.full((8, DIM), 1e4))
    start = 8 * RATIO
    batch = RaggedBatch.build(
        [(start + i, 1) for i in range(6)], slots=[0] * 6, block_tables=[[2, 1] if i else [2, 1, 1] for i in range(6)]
    )
    assert (batch.block_table == -1).any()
    window.write(torch.zeros(WINDOW, dtype=torch.int64), torch.arange(WINDOW), torch.zeros(WINDOW, DIM))
    q, new = normal(6, HEADS, DIM, seed=1), torch.zeros(6, DIM)
    out, lse = sparse_attention(
        q, new, batch, window, sink=None, scale=SCALE, compressed=pool, ratio=RATIO, selected=torch.tensor(INDEX_ROWS)
    )
    for t, row in enumerate(INDEX_ROWS):
        keys = [*torch.zeros(WINDOW, DIM), *(pool.round_trip(entries[c]) for c in row if c >= 0)]
        wanted_out, wanted_lse = by_hand(q[t], keys, None)
        assert torch.allclose(out[t].double(), wanted_out, atol=1e-5)
        assert torch.allclose(lse[t].double(), wanted_lse, atol=1e-5)


@pytest.mark.parametrize("entry", [8, 9, 1000])
def test_an_entry_that_is_not_visible_yet_is_refused(entry, normal):
    pool, window = pool_of("fp32", 4, PER_BLOCK, fill=0), pool_of("fp32", 2, WINDOW, fill=0)
    batch = RaggedBatch.build([(8 * RATIO, 1)], slots=[0], block_tables=[[2, 1]])
    with pytest.raises(IndexError, match=f"entry {entry}"):
        sparse_attention(
            normal(1, HEADS, DIM),
            torch.zeros(1, DIM),
            batch,
            window,
            sink=None,
            scale=SCALE,
            compressed=pool,
            ratio=RATIO,
            selected=torch.tensor([[0, entry]]),
        )


def test_entry_without_a_block_is_refused(normal):
    pool, window = pool_of("fp32", 4, PER_BLOCK, fill=0), pool_of("fp32", 2, WINDOW, fill=0)
    batch = RaggedBatch.build([(16 * RATIO, 1)], slots=[0], block_tables=[[2]])
    with pytest.raises(IndexError, match="block table"):
        sparse_attention(
            normal(1, HEADS, DIM), torch.zeros(1, DIM), batch, window, sink=None, scale=SCALE, compressed=pool, ratio=4
        )


MASKS = {
    "leading": list(range(14)),
    "middle": [5, 6, 7, 8, 9],
    "last": list(range(2, 16)),
    "all": list(range(16)),
    "none": [],
}


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("sink", [None, SINK])
@pytest.mark.parametrize("shift", [0.0, -60000.0, 60000.0])
def test_rows_without_keys_are_exactly_zero(masked, sink, shift, normal):
    """lse of such a row: the sink, or -inf without one. Very low scores are not taken for masked ones."""
    q, kv = normal(16, HEADS, 64), normal(32, 64, seed=1)
    if shift:
        q[..., 0], kv[:, 0] = 300.0, shift / 300.0
    keys = kv.expand(16, 32, 64)
    allowed = torch.ones(16, 32, dtype=torch.bool)
    allowed[MASKS[masked]] = False
    out, lse = attend_reference(q, [keys], [allowed], sink)
    scores = torch.einsum("thd,nd->thn", q.double(), kv.double())
    extra = torch.full((16, HEADS), -math.inf) if sink is None else sink.expand(16, -1)
    weights = torch.softmax(torch.cat([scores, extra[..., None].double()], -1), -1)
    wanted = torch.einsum("thn,nd->thd", weights[..., :-1], kv.double())
    for t in range(16):
        if t in MASKS[masked]:
            assert bool((out[t] == 0).all())
            assert torch.equal(lse[t], extra[t].float())
        else:
            # Scores of 60,000 in float32 are exact to 0.004, which is what their softmax can differ by.
            assert torch.allclose(
                out[t].double(), wanted[t], atol=1e-5 if not shift else 0.1, rtol=1e-2 if shift else 0
            )
    assert bool(out.isfinite().all())


def test_a_key_set_may_be_empty(normal):
    q = normal(3, HEADS, 64)
    out, lse = attend_reference(q, [normal(3, 0, 64)], [torch.zeros(3, 0, dtype=torch.bool)], SINK)
    assert bool((out == 0).all())
    assert torch.equal(lse, SINK.expand(3, -1))


def test_partial_results_merge_and_empty_ones_are_neutral(normal):
    q, kv = normal(5, HEADS, 64), normal(32, 64, seed=1).expand(5, 32, 64)
    everything = torch.ones(5, 32, dtype=torch.bool)
    nothing = ~everything
    whole = attend_reference(q, [kv], [everything], SINK)
    a = attend_reference(q, [kv[:, :20]], [everything[:, :20]], SINK)
    b = attend_reference(q, [kv[:, 20:]], [everything[:, 20:]], None)
    empty = attend_reference(q, [kv], [nothing], None)
    merged = merge_attention(*a, *b)
    assert torch.allclose(merged[0], whole[0], atol=1e-5)
    assert torch.allclose(merged[1], whole[1], atol=1e-5)
    for left, right in ((a, empty), (empty, a)):
        out, lse = merge_attention(*left, *right)
        assert torch.equal(out, a[0])
        assert torch.equal(lse, a[1])
    out, lse = merge_attention(*empty, *empty)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_tiles_do_not_change_the_result(monkeypatch, normal):
    import kernels.sparse_attention as module

    window = pool_of("fp32", 1, WINDOW)
    batch = RaggedBatch.build([(0, 50)], slots=[0], block_tables=[[]])
    q, new = normal(50, HEADS, DIM), normal(50, DIM, seed=1)
    whole = sparse_attention(q, new, batch, window, sink=SINK, scale=SCALE)[0]
    monkeypatch.setattr(module, "_TILE_BYTES", 1)
    assert torch.allclose(sparse_attention(q, new, batch, window, sink=SINK, scale=SCALE)[0], whole, atol=1e-6)
