"""DecodeRows: the host's idea of rows that move forward on the device by themselves."""

import random

import numpy as np
import pytest

from engine.decode_rows import DecodeRows
from engine.graph_sizes import graph_size, graph_sizes

SIZES = graph_sizes(16)


def make_rows():
    return DecodeRows(SIZES[-1], lambda rows: graph_size(SIZES, rows))


def test_new_sequences_take_the_lowest_free_rows():
    rows = make_rows()
    assert [rows.take(seq) for seq in (5, 6, 7)] == [0, 1, 2]
    rows.release(6)
    rows.release(5)
    assert rows.take(8) == 0


def test_a_sequence_too_many_is_refused():
    rows = make_rows()
    for seq in range(SIZES[-1]):
        rows.take(seq)
    with pytest.raises(RuntimeError, match="all 16 rows"):
        rows.take(99)


def test_who_only_goes_on_needs_no_word_to_the_device():
    rows = make_rows()
    rows.take(1)
    assert rows.set([(1, 10, 3, 42)])
    rows.advance()
    assert not rows.set([(1, 11, 3, -1)])


def test_who_sits_out_a_step_keeps_its_row_and_is_padding():
    rows = make_rows()
    rows.take(1), rows.take(2)
    rows.set([(1, 10, 3, 42), (2, 20, 4, 43)])
    rows.advance()
    assert rows.set([(2, 21, 4, -1)])
    assert rows.values[rows[1]].tolist() == [0, 11, 3, -1]
    rows.advance()
    assert rows.set([(1, 11, 3, -1), (2, 22, 4, -1)])


def test_the_highest_move_down_where_the_graph_gets_smaller():
    rows = make_rows()
    for seq in range(9):
        rows.take(seq)
    for seq in range(1, 8):
        rows.release(seq)
    assert rows.compact([0, 8]) == [(8, 1)]
    assert rows.size([0, 8]) == 2
    assert rows.compact([0, 8]) == []


def test_nobody_moves_where_it_saves_nothing():
    rows = make_rows()
    for seq in range(8):
        rows.take(seq)
    rows.release(0)
    assert rows.compact(list(range(1, 8))) == []


def test_the_device_holds_what_the_plan_says_whoever_comes_and_goes():
    """A device is played that copies `values` when it is told to, moves rows when they move, and goes on by itself."""
    draw, rows = random.Random(3), make_rows()
    device, last = np.zeros_like(rows.values), {}
    running = {}
    next_seq = 0
    for _ in range(400):
        for seq in [s for s in running if draw.random() < 0.1]:
            rows.release(seq)
            del running[seq]
        while len(running) < SIZES[-1] and draw.random() < 0.3:
            next_seq += 1
            rows.take(next_seq)
            running[next_seq] = draw.randrange(1000)
        active = [s for s in running if draw.random() < 0.8]
        if not active:
            continue
        for source, target in rows.compact(active):
            device[target], last[target] = device[source], last.get(source)
        steps = [(s, running[s], s % 7, -1 if draw.random() < 0.9 else draw.randrange(50)) for s in active]
        if rows.set(steps):
            device[:] = rows.values
        size = rows.size(active)
        assert size == graph_size(SIZES, 1 + max(rows[s] for s in active))
        found = {tuple(row[1:]) for row in device[:size].tolist() if row[0]}
        assert found == {(position, slot, token) for _, position, slot, token in steps}
        assert len({rows[s] for s in running}) == len(running)
        is_active = device[:, 0] != 0
        device[is_active, 1] += 1
        device[is_active, 3] = -1
        rows.advance()
        assert np.array_equal(device[is_active], rows.values[is_active])
        for s in active:
            running[s] += 1
