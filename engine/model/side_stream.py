"""SideStream: work of a decode step that does not wait for what is launched beside it.

    with side.fork():      what is launched here begins once all before it has ended ...
        y = ...
    z = ...                ... and runs beside this
    side.join()            what is launched from here on waits for both

Captured, this is a branch of the graph. Without a GPU the order is that of the program. Tensors made inside are free
again when the last name of them goes; since every fork waits for the stream that forks, nothing that it makes can
overwrite what was still to be read before. Between fork and join, names of what the branch reads must live.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """One second stream of a device; forks of it do not nest."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """Launch the body's work beside what follows."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what follows wait for the body's work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
