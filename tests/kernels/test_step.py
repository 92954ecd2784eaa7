"""Rows of a captured step: what they say to the kernels, and how they move on."""

import math

import pytest
import torch

from kernels.step import begin_step, end_step

FREQUENCIES = {"window": torch.tensor([1.0, 0.25]), "compressed": torch.tensor([0.5, 0.125])}


def rows_of(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_a_sampled_token_is_what_the_next_step_runs_one_position_further():
    rows, last = rows_of((1, 7, 3, 11)), torch.zeros(1, dtype=torch.int64)
    first = begin_step(rows, last, size=1, **FREQUENCIES)
    end_step(rows, last, torch.tensor([42]), torch.zeros(1, 4))
    second = begin_step(rows, last, size=1, **FREQUENCIES)
    assert [first.token_ids.tolist(), second.token_ids.tolist()] == [[11], [42]]
    assert [first.positions.tolist(), second.positions.tolist()] == [[7], [8]]
    assert first.next_position.tolist() == second.positions.tolist()


def test_an_inactive_row_is_padding_and_stays_as_it_is():
    rows, last = rows_of((0, 900, 5, 77), (1, 4, 6, -1)), torch.tensor([1, 2])
    step = begin_step(rows, last, size=2, **FREQUENCIES)
    assert [step.sequence.tolist(), step.slots.tolist(), step.token_ids.tolist()] == [[-1, 1], [-1, 6], [0, 2]]
    out = end_step(rows, last, torch.tensor([8, 9]), torch.full((2, 4), math.nan))
    assert rows.tolist() == [[0, 900, 5, 77], [1, 5, 6, -1]]
    assert (last.tolist(), out.tolist()) == ([1, 9], [[0, 1], [9, 0]])


def test_rotations_are_of_the_token_and_of_the_entries_it_would_complete():
    step = begin_step(rows_of((1, 130, 0, 0)), torch.zeros(1, dtype=torch.int64), size=1, **FREQUENCIES)
    angles = {"window": (130, 32.5), "compressed": (65, 16.25), "csa": (63.5, 15.875), "hca": (1.5, 0.375)}
    for name, (fast, slow) in angles.items():
        wanted = torch.polar(torch.ones(1, 2), torch.tensor([[fast, slow]]))
        torch.testing.assert_close(getattr(step, name), wanted, rtol=0, atol=1e-6)


def test_a_step_of_the_first_rows_leaves_the_others():
    rows, last = rows_of((1, 1, 0, 5), (1, 2, 1, 6)), torch.tensor([3, 4])
    batch = begin_step(rows, last, size=1, **FREQUENCIES).batch(torch.zeros(2, 3, dtype=torch.int32))
    end_step(rows, last, torch.tensor([9]), torch.zeros(1, 4))
    assert (batch.num_tokens, batch.block_table.shape) == (1, (1, 3))
    assert (rows[1].tolist(), last.tolist()) == ([1, 2, 1, 6], [9, 4])


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"rows": torch.zeros(2, 4)}, "rows .* wanted contiguous int32"),
        ({"last_token": torch.zeros(1, dtype=torch.int64)}, "last tokens"),
        ({"size": 3}, "a step of 3 of 2 rows"),
        ({"compressed": torch.ones(3)}, "frequencies"),
        ({"window": torch.ones(2, dtype=torch.float64)}, "window frequencies"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(fault, says):
    given = {"rows": rows_of((1, 1, 0, 5), (1, 2, 1, 6)), "last_token": torch.tensor([3, 4]), "size": 2, **FREQUENCIES}
    with pytest.raises(ValueError, match=says):
        begin_step(**(given | fault))


@pytest.mark.parametrize(("tokens", "x"), [(torch.zeros(1), torch.zeros(1, 4)), (torch.tensor([1]), torch.zeros(2, 4))])
def test_results_that_do_not_fit_are_refused(tokens, x):
    with pytest.raises(ValueError, match="wanted contiguous"):
        end_step(rows_of((1, 1, 0, 5), (1, 2, 1, 6)), torch.tensor([3, 4]), tokens, x)
