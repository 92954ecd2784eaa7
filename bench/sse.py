"""Server-sent events out of bytes that are cut anywhere."""

from __future__ import annotations


class EventParser:
    """Yields the data of each event. Comments (keep-alives) and other fields are read past, as the standard says."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events

    def close(self) -> list[bytes]:
        """Return what a server sent as its last event without the empty line behind it."""
        return self.feed(b"\n\n")
