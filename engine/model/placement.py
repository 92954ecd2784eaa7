"""move_to: the tensors of a part of the model onto its device, once it is built.

Building joins matrices and narrows others. Done on the device it would leave holes where the parts have been, more than
a gigabyte of a rank that no later tensor fits into; on the host those holes are nobody's loss, and what is moved lies
side by side. What is on the device already stays where it is: drawn experts, and all that was read (weights.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor


def move_to(device: torch.device, part: Any) -> Any:
    """Return `part` with every tensor in it on `device`: an object of the model in place, a record or list anew.

    A tensor that several parts hold is moved once.
    """
    return _move(part, device, {})


def _move(part: Any, device: torch.device, moved: dict[int, tuple[Any, Any]]) -> Any:
    if id(part) in moved:  # what was looked at is kept, so that its id is nobody else's
        return moved[id(part)][1]
    found = part
    if isinstance(part, Tensor):
        found = part.to(device)
    elif isinstance(part, list):
        found = [_move(each, device, moved) for each in part]
    elif isinstance(part, tuple):
        each = [_move(each, device, moved) for each in part]
        found = type(part)(*each) if hasattr(part, "_fields") else tuple(each)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        found = dataclasses.replace(part, **{name: _move(value, device, moved) for name, value in values.items()})
    elif type(part).__module__.startswith("engine.model") and hasattr(part, "__dict__"):
        moved[id(part)] = part, part
        for name, value in vars(part).items():
            setattr(part, name, _move(value, device, moved))
    moved[id(part)] = part, found
    return found
