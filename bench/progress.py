"""What a benchmark shows while it runs: one line that changes on a terminal, one line in ten seconds elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from rich.console import Console
from rich.markup import escape
from rich.status import Status

_ON_TERMINAL_S, _ELSEWHERE_S = 0.5, 10.0


class Progress:
    """Lines go to stderr, so that the table alone is on stdout. quiet: no lines at all."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet
        self._tokens = self._first = self._ended = self._failed = 0

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(escape(text))

    def problem(self, text: str) -> None:
        self._console.print(f"[bold red]{escape(text)}[/]")

    def tokens(self, count: int) -> None:
        self._tokens += count

    def ended(self, *, failed: bool) -> None:
        self._ended += 1
        self._failed += failed

    @contextlib.asynccontextmanager
    async def run(self, label: str, num_requests: int, *, clock: Callable[[], float]) -> AsyncIterator[None]:
        """Show a run while the body lasts."""
        self._tokens = self._ended = self._failed = 0
        if self._quiet:
            yield
            return
        shows = asyncio.ensure_future(self._show(label, num_requests, clock))
        try:
            yield
        finally:
            shows.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await shows

    async def _show(self, label: str, num_requests: int, clock: Callable[[], float]) -> None:
        begin = last = clock()
        before = 0
        live = self._console.is_terminal
        status: contextlib.AbstractContextManager[Status | None] = (
            self._console.status(label) if live else contextlib.nullcontext()
        )
        with status as line:
            while True:
                await asyncio.sleep(_ON_TERMINAL_S if live else _ELSEWHERE_S)
                now = clock()
                rate = (self._tokens - before) / (now - last)
                last, before = now, self._tokens
                text = (
                    f"{label}  {now - begin:5.0f} s  {self._ended}/{num_requests} ended  "
                    f"{self._tokens:,} tokens  {rate:,.0f} tokens/s"
                )
                if self._failed:
                    text += f"  {self._failed} failed"
                if line is not None:
                    line.update(escape(text))
                else:
                    self._console.print(escape(text))
