"""Tables and numbers of things as people read them."""

import pytest

from kernels.table import counted


@pytest.mark.parametrize(
    ("count", "noun", "written"),
    [
        (0, ("rank",), "0 ranks"),
        (1, ("weight file",), "1 weight file"),
        (69187, ("tensor",), "69,187 tensors"),
        (1, ("matrix", "matrices"), "1 matrix"),
        (2, ("matrix", "matrices"), "2 matrices"),
    ],
)
def test_a_single_thing_is_no_plural(count, noun, written):
    assert counted(count, *noun) == written
