"""Selection of entries: ties, short rows, NaN; scores over paged keys against a loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.indexer import index_entries, select_top_k
from kernels.ragged import RaggedBatch


def permuted(values, seed=0):
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]


def score_rows():
    i = torch.arange(8192)
    draw = torch.Generator().manual_seed(1)
    masked = torch.full((4096,), -math.inf)
    masked[::409][:10] = torch.arange(10.0)
    with_nan = torch.randn(4096, generator=draw)
    with_nan[[7, 100, 4095]] = math.nan
    return {
        "crowded": permuted(1 + i * 2.0**-20),
        "seven levels": permuted(1 + (i % 7) * 2.0**-20),
        "all equal": torch.full((8192,), 0.5),
        "shorter than k": torch.randn(300, generator=draw),
        "as long as k": torch.randn(512, generator=draw),
        "k plus one": torch.randn(513, generator=draw),
        "one": torch.randn(1, generator=draw),
        "none": torch.zeros(0),
        "mostly masked": masked,
        "with NaN": with_nan,
        "zeros and denormals": torch.tensor([0.0, -0.0, 1e-42, -1e-42]).repeat(256),
    }


@pytest.mark.parametrize("name", score_rows())
def test_selected_scores_are_the_best_ones(name):
    scores, k = score_rows()[name], 512
    chosen = select_top_k(scores[None], k)[0].tolist()
    found = [c for c in chosen if c >= 0]
    valid = scores[~(scores.isnan() | (scores == -math.inf))]
    assert len(chosen) == k
    assert len(set(found)) == len(found) == min(k, len(valid))
    assert chosen[len(found) :] == [-1] * (k - len(found))
    assert sorted(scores[found].tolist()) == sorted(valid.topk(len(found)).values.tolist())


def test_equal_scores_go_to_the_lower_entry():
    assert select_top_k(torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0]]), 3)[0].tolist() == [1, 3, 0]


def test_a_row_does_not_depend_on_its_neighbours():
    rows = [r for r in score_rows().values() if len(r)]
    longest = max(map(len, rows))
    table = torch.stack([torch.nn.functional.pad(r, (0, longest - len(r)), value=-math.inf) for r in rows])
    together = select_top_k(table, 512)
    for alone, row in zip(rows, together, strict=True):
        assert torch.equal(select_top_k(alone[None], 512)[0], row)


@given(data=st.data())
def test_paged_scores_pick_what_a_loop_picks(data):
    spans = data.draw(st.lists(st.tuples(st.integers(0, 120), st.integers(1, 40)), min_size=1, max_size=3))
    check(spans, "fp32")


@pytest.mark.parametrize("fmt", ["bf16", "fp8_index", "fp4_index"])
def test_stored_keys_are_scored_as_stored(fmt):
    check([(100, 30), (3, 2), (77, 1)], fmt)


def check(spans, fmt, *, heads=3, dim=32, per_block=4, top_k=5):
    from kernels.rows import Rows
    from kv_transfer.layout import row_bytes

    generator = torch.Generator().manual_seed(sum(map(sum, spans)))
    values, scales = row_bytes(fmt, dim)
    pool = torch.full((64, -(-per_block * (values + scales) // 16) * 16), 0xFF, dtype=torch.uint8)
    keys = Rows.view(pool, fmt, width=dim, rows=per_block, offset=0, value_bytes=values, scale_bytes=scales)
    order = iter(torch.randperm(64, generator=generator).tolist())
    tables = [[next(order) for _ in range(-(-(s + n) // (4 * per_block)))] for s, n in spans]
    batch = RaggedBatch.build(spans, slots=[0] * len(spans), block_tables=tables)
    stored = []
    for i, (start, length) in enumerate(spans):
        key = torch.randn((start + length) // 4, dim, generator=generator)
        stored.append(keys.round_trip(key))
        for b in range(len(key)):
            keys.write(torch.tensor([tables[i][b // per_block]]), torch.tensor([b % per_block]), key[b : b + 1])
    query = torch.randn(batch.num_tokens, heads, dim, generator=generator)
    weight = torch.randn(batch.num_tokens, heads, generator=generator)
    selected, is_finite = index_entries(query, weight, batch, keys, ratio=4, top_k=top_k)
    assert bool(is_finite.all())
    for t in range(batch.num_tokens):
        visible = (int(batch.positions[t]) + 1) // 4
        found = [c for c in selected[t].tolist() if c >= 0]
        assert len(set(found)) == len(found) == min(top_k, visible)
        assert all(c < visible for c in found)
        key = stored[int(batch.sequence[t])][:visible].double()
        scores = (torch.relu(query[t].double() @ key.T) * weight[t].double()[:, None]).sum(0)
        best = scores.topk(len(found)).values if found else scores[:0]
        assert torch.allclose(scores[found].sort().values, best.sort().values, atol=1e-4)


def test_a_key_that_was_never_written_is_reported(make_rows, normal):
    keys = make_rows("fp32", 32, units=4, rows=8)
    keys.write(torch.full((8,), 1), torch.arange(8), normal(8, 32))
    keys.write(torch.full((2,), 3), torch.arange(2), normal(2, 32, seed=1))
    batch = RaggedBatch.build([(30, 14)], slots=[0], block_tables=[[1, 3]])
    _, is_finite = index_entries(normal(14, 2, 32), normal(14, 2), batch, keys, ratio=4, top_k=3)
    # Entry 10 completes at position 43 and holds NaN; the tokens before do not see it.
    assert is_finite.tolist() == [True] * 13 + [False]


def test_nothing_is_scored_while_everything_fits(make_rows, normal):
    keys = make_rows("fp32", 32, units=1, rows=8)
    batch = RaggedBatch.build([(0, 15)], slots=[0], block_tables=[[0]])
    selected, is_finite = index_entries(normal(15, 2, 32), normal(15, 2), batch, keys, ratio=4, top_k=8)
    assert bool(is_finite.all())
    assert selected[-1].tolist() == [0, 1, 2]
    assert selected[3].tolist() == [0, -1, -1]
