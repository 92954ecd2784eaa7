"""A built model's tensors move to its device, each once, wherever they hang."""

import torch

from engine.model.layers import Linears, Matrix
from engine.model.placement import move_to

META = torch.device("meta")  # a device that is not the CPU, on every machine


class Part:
    __module__ = "engine.model.somewhere"

    def __init__(self):
        self.shared = torch.ones(3)
        self.matrices = Linears(Matrix(torch.ones(4, 2)), Matrix(torch.ones(2, 2)))
        self.again, self.none, self.size = [self.shared, (self.shared,)], None, 7


def test_every_tensor_moves_and_one_that_is_shared_stays_one():
    part = Part()
    assert move_to(META, part) is part
    assert part.shared.device == META
    assert part.again[0] is part.again[1][0] is part.shared
    assert (part.none, part.size) == (None, 7)
    assert [each.weight.device for each in part.matrices.parts] == [META]
    assert isinstance(part.matrices.parts[0], Matrix)


def test_what_lies_there_is_not_copied():
    there = torch.ones(2, device=META)
    assert move_to(META, [there])[0] is there
