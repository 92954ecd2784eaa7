"""Index arithmetic of packed batches against brute-force loops."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.ragged import RaggedBatch

spans = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 150)), min_size=1, max_size=4)


def batch_of(spans, block_tokens=128):
    """Slots and blocks that are not in order, so that an index taken for another shows."""
    slots = [3 * (len(spans) - i) for i in range(len(spans))]
    tables = [[100 * i + 7 * j + 1 for j in range(-(-(s + n) // block_tokens))] for i, (s, n) in enumerate(spans)]
    return RaggedBatch.build(spans, slots=slots, block_tables=tables), slots, tables


@given(spans=spans, size=st.sampled_from([1, 4, 16, 128]))
def test_window_index_names_the_row_of_each_position(spans, size):
    batch, _, _ = batch_of(spans)
    index = batch.window_index(size)
    zero = len(spans) * size + batch.num_tokens
    row = 0
    for i, (start, length) in enumerate(spans):
        first_new = len(spans) * size + row
        for t in range(start, start + length):
            wanted = []
            for p in range(t - size + 1, t + 1):
                wanted.append(zero if p < 0 else first_new + p - start if p >= start else i * size + p % size)
            assert index[row].tolist() == wanted
            row += 1


@given(spans=spans, size=st.sampled_from([1, 4, 16, 128]))
def test_old_window_rows_are_those_that_the_index_names(spans, size):
    batch, _, _ = batch_of(spans)
    sequence, row = batch.old_window_rows(size)
    index = batch.window_index(size)
    named = set(index[index < len(spans) * size].tolist())
    held = set((sequence * size + row).tolist())
    assert named <= held
    assert len(held) == sequence.shape[0], "none twice"
    for s, r in zip(sequence.tolist(), row.tolist(), strict=True):
        start = spans[s][0]
        assert any(p % size == r for p in range(max(0, start - size + 1), start))


@given(spans=spans, ratio=st.sampled_from([4, 128]))
def test_entries_are_those_whose_last_token_is_in_this_step(spans, ratio):
    batch, _, _ = batch_of(spans)
    wanted = [(i, t // ratio) for i, (s, n) in enumerate(spans) for t in range(s, s + n) if t % ratio == ratio - 1]
    entries = batch.entries(ratio)
    assert list(zip(entries.sequence.tolist(), entries.block.tolist(), strict=True)) == wanted
    assert entries.position.tolist() == [b * ratio for _, b in wanted]


@given(spans=spans)
def test_entry_sources_find_each_position_in_ring_or_step(spans):
    batch, slots, _ = batch_of(spans)
    source, entries = batch.entry_sources(4, 8), batch.entries(4)
    num_old, tokens = source.unit.shape[0], batch.num_tokens
    for e, (i, block) in enumerate(zip(entries.sequence.tolist(), entries.block.tolist(), strict=True)):
        for j in range(8):
            position, at = 4 * block - 4 + j, int(source.index[e, j])
            assert bool(source.valid[e, j]) == (position >= 0)
            if position < 0:
                assert at == num_old + tokens
            elif position < spans[i][0]:
                assert (int(source.unit[at]), int(source.position[at])) == (slots[i], position)
            else:
                token = at - num_old
                assert (int(batch.sequence[token]), int(batch.positions[token])) == (i, position)


@given(spans=spans, size=st.sampled_from([8, 128]))
def test_ring_rows_are_the_last_tokens_of_each_sequence_once(spans, size):
    batch, slots, _ = batch_of(spans)
    ring = batch.ring_rows(size)
    wanted = [(slots[i], p) for i, (s, n) in enumerate(spans) for p in range(max(s, s + n - size), s + n)]
    assert list(zip(ring.unit.tolist(), ring.position.tolist(), strict=True)) == wanted
    assert torch.equal(batch.positions[ring.token], ring.position)


@given(spans=spans, ratio=st.sampled_from([4, 128]))
def test_parts_cover_every_token_and_tell_begun_from_finished(spans, ratio):
    batch, _, _ = batch_of(spans)
    parts = batch.parts(ratio)
    wanted, order = [], []
    for i, (start, length) in enumerate(spans):
        for t in range(start, start + length):
            if (i, t // ratio) not in order:
                order.append((i, t // ratio))
            wanted.append(order.index((i, t // ratio)))
    assert parts.part.tolist() == wanted
    assert parts.sequence.tolist() == [i for i, _ in order]
    resumed = [k for k, (i, b) in enumerate(order) if b * ratio < spans[i][0]]
    complete = [k for k, (i, b) in enumerate(order) if (b + 1) * ratio <= sum(spans[i])]
    assert parts.resumed.tolist() == resumed
    assert parts.complete.tolist() == complete
    assert sorted(parts.open.tolist() + complete) == list(range(len(order)))
    assert parts.sequence[parts.complete].tolist() == batch.entries(ratio).sequence.tolist()


@given(spans=spans)
def test_places_follow_the_block_table(spans):
    batch, _, tables = batch_of(spans)
    for ratio, rows in ((4, 32), (128, 1)):
        entries = batch.entries(ratio)
        units, places = batch.places(entries.sequence, entries.block, rows)
        for i, block, unit, place in zip(
            entries.sequence.tolist(), entries.block.tolist(), units.tolist(), places.tolist(), strict=True
        ):
            assert unit == tables[i][block * ratio // 128]
            assert place == block * ratio % 128 // ratio


@given(spans=spans)
def test_counts_of_visible_entries(spans):
    batch, _, _ = batch_of(spans)
    wanted = [(t + 1) // 4 for s, n in spans for t in range(s, s + n)]
    assert batch.num_visible(4).tolist() == wanted
    assert batch.max_visible(4) == max(wanted)
    assert batch.starts.tolist() == [s for s, _ in spans]


def test_entries_beyond_the_block_table_are_refused():
    batch, _, _ = batch_of([(0, 100)])
    with pytest.raises(IndexError, match="block table"):
        batch.places(torch.tensor([0]), torch.tensor([32]), 32)


@pytest.mark.parametrize("spans", [[(0, 0)], [(-1, 3)]])
def test_empty_spans_and_negative_positions_are_refused(spans):
    with pytest.raises(ValueError, match="spans"):
        RaggedBatch.build(spans, slots=[0], block_tables=[[0]])


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 slots"):
        RaggedBatch.build([(0, 1)], slots=[0, 1], block_tables=[[0]])


def test_parts_of_a_padded_chunk_reach_as_far_as_its_tokens():
    chunk = batch_of([(1000, 24)])[0].decode
    padded = dataclasses.replace(
        chunk,
        positions=torch.nn.functional.pad(chunk.positions, (0, 8)),
        sequence=torch.nn.functional.pad(chunk.sequence, (0, 8), value=-1),
        num_tokens=32,
        longest=1024,
    )
    for first in range(0, 32, 8):
        part = padded.part(slice(first, first + 8))
        assert int(part.positions.max()) < part.longest
        assert part.query_start.tolist() == [0, 8 if first < 24 else 0]
