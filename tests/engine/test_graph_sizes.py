"""The ladder of captured batch sizes."""

from __future__ import annotations

import pytest

from engine.graph_sizes import graph_size, graph_sizes


def test_ladder_is_dense_where_a_row_costs_most_and_ends_at_the_largest_batch() -> None:
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert graph_sizes(100) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)
    assert graph_sizes(400)[-5:] == (240, 256, 320, 384, 400)


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 9, 63, 64, 65, 256, 257, 1000])
def test_every_admitted_batch_has_a_graph(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = graph_size(sizes, rows)
        assert size in sizes and rows <= size < max(rows + 64, 2 * rows + 1)


def test_more_sequences_than_the_largest_graph_are_refused() -> None:
    with pytest.raises(ValueError, match="65 sequences: the largest graph has 64 rows"):
        graph_size(graph_sizes(64), 65)
    with pytest.raises(ValueError, match="max_num_seqs 0"):
        graph_sizes(0)
