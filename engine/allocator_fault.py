"""Running out of memory: how it is told from other errors, and a test seam that brings it about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TEXTS = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed.

    Torch's on the CPU, cuBLAS's and the driver's are bare RuntimeErrors, told by their text.
    """
    told = isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
    return told or isinstance(error, torch.OutOfMemoryError | MemoryError)


class AllocatorFault(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, torch's operation number `at` (from 1) fails as if there were no memory for it."""

    def __init__(self, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = at

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._left -= 1
        if self._left == 0:
            raise torch.OutOfMemoryError("a test asked for it")
        return func(*args, **(kwargs or {}))
