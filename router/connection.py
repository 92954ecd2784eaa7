"""Connection: the server side of one client connection: uvicorn's, with bounds on what comes before a body.

The parser takes a head of any length, and waits for it for ever. Here a head has a size and a time, and what is no
HTTP is refused with the error object that everything else is refused with.
"""

from __future__ import annotations

import asyncio
import http

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.errors import error_body

MAX_HEAD_BYTES = 64 << 10  # beyond the piece that it began in
HEAD_TIMEOUT_S = 60.0


class Connection(HttpToolsProtocol):
    _head_timer: asyncio.TimerHandle | None = None
    _is_in_head = _has_begun = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_begun = False
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += 0 if self._has_begun else len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "what was sent is no valid HTTP/1.1")

    # Called by the parser.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._has_begun, self._head_bytes = True, True, 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self._is_in_head:
            self._refuse(408, f"the head of the request was not complete after {HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answer what can't be read, and close. Requests before it that are complete get their answers first."""
        self._end_head()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False
            self.pipeline.clear()
            self.flow.pause_reading()
            return
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = error_body(status, message)
            head = (
                f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
