"""What of the API a server takes, beyond the plain request: asked once, before anything is measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bench.stream import Outcome, Stream

# in the order in which they are given up when a server refuses and doesn't say which it minds
EXTRAS = {
    "return_token_ids": "token ids in every chunk, the surest count",
    "continuous_usage_stats": "usage in every chunk",
    "ignore_eos": "answers of exactly the wanted length",
    "include_usage": "usage at the end",
}
_IN_STREAM_OPTIONS = ("continuous_usage_stats", "include_usage")


@dataclass(frozen=True, slots=True)
class Dialect:
    """extras: names of EXTRAS that are sent.   refused: those that the server did not take."""

    extras: tuple[str, ...] = tuple(EXTRAS)
    refused: tuple[str, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return what goes into every request's body."""
        fields: dict[str, Any] = {name: True for name in self.extras if name not in _IN_STREAM_OPTIONS}
        options = {name: True for name in self.extras if name in _IN_STREAM_OPTIONS}
        return fields | ({"stream_options": options} if options else {})

    def without(self, name: str) -> Dialect:
        return Dialect(tuple(extra for extra in self.extras if extra != name), (*self.refused, name))


class Unreachable(RuntimeError):
    """The server did not answer the first request as a server of this API does; the text says what it did."""


async def negotiate(ask: Callable[[Dialect], Awaitable[Stream]], *, extras: tuple[str, ...] = tuple(EXTRAS)) -> Dialect:
    """Send short requests until the server takes one; give up what it refuses. Raises Unreachable.

    Only a refusal (status 400 or 422) is about the request's fields: anything else is the server's trouble.
    """
    dialect = Dialect(extras)
    while True:
        stream = await ask(dialect)
        if stream.outcome is Outcome.OK:
            return dialect
        if not stream.error.startswith(("status 400", "status 422")) or not dialect.extras:
            raise Unreachable(stream.error or "the first request was cancelled")
        named = [name for name in dialect.extras if name in stream.error]
        if not named and "stream_options" in stream.error:
            named = [name for name in dialect.extras if name in _IN_STREAM_OPTIONS]
        for name in named or dialect.extras[:1]:
            dialect = dialect.without(name)
