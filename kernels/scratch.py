"""Memory that launches share and leave as they found it: zeros, such as counters of programs that wait for each other.

Two launches may use the same only one after the other, so each stream has its own. Where a graph is captured, that of
the stream that captures is used; replays of graphs captured on one stream, then, must not overlap. A capture can't make
memory that outlives it, so what it needs has been made by an earlier call, for a few streams at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

STREAMS = 8  # for which memory is made at once
_Key = tuple[str, torch.device, tuple[int, ...], torch.dtype]
_free: dict[_Key, list[Tensor]] = {}
_taken: dict[_Key, dict[int, Tensor]] = {}


def zeros(op: str, device: torch.device, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return the current stream's zeros of an operation: the same at each call, to be left as zeros.

    op: what calls, for its users to read. Raises RuntimeError where a graph capture would have to make them.
    """
    key = op, device, shape, dtype
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    taken = _taken.setdefault(key, {})
    if stream not in taken:
        free = _free.setdefault(key, [])
        if not free:
            _make(free, key)
        taken[stream] = free.pop()
    return taken[stream]


def _make(free: list[Tensor], key: _Key) -> None:
    op, device, shape, dtype = key
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        used = len(_taken[key])
        wrong = f"{used} streams have used it, this one has not" if used else "nothing has called it before"
        raise RuntimeError(
            f"first call of {op} for such sizes inside a graph capture: {wrong}; call it once outside, on this stream"
        )
    free.extend(torch.zeros(shape, dtype=dtype, device=device) for _ in range(STREAMS if device.type == "cuda" else 1))
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams do not wait for this one's zeros
