"""Loopback: a prefill and a decode worker in memory that compute nothing, so that what is measured is the router.

They speak the real protocol over real sockets, answer at once, and every token is the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httptools
import msgspec

from router import protocol
from router.protocol import FinishReason, SequenceOutput, WorkerRole

HEARTBEAT_S = 0.5
WARM_UPS = -1  # a batch that has no client
FINGERPRINTS = protocol.Fingerprints(model="loopback", layout="loopback")
NUMA = protocol.NumaBinding(status="unverified", node=0, cpus="")


@dataclass(slots=True)
class Running:
    """An answer at decode. num_outputs counts prefill's token."""

    max_tokens: int
    num_outputs: int


class Loopback:
    """Both workers. With step_s every answer gets a token that often; without, steps follow the clients: each batch
    of answers gets its next token once all have the one before, so no two tokens of an answer are ever under way.

    token_id: the only token there is.   batch: the one that answers join now.
    is_held: no step is made while it is true, so that answers begin together.
    on_call: hears of each request to the workers: (path, message, when its last byte had come, monotonic).
    """

    def __init__(self, *, token_id: int, vocab_size: int, max_model_len: int, step_s: float = 0.0) -> None:
        self.is_held = False
        self.batch = 0
        self.batches: dict[int, dict[str, Running]] = {}
        self.on_call: Callable[[str, Any, float], None] = lambda path, message, now: None
        self._token_id, self._step_s = token_id, step_s
        self._limits = protocol.Limits(
            max_model_len=max_model_len,
            max_num_seqs=4096,
            max_num_batched_tokens=1 << 30,
            block_tokens=64,
            num_blocks=1 << 24,
            vocab_size=vocab_size,
        )
        self.workers = [_Worker(self, "prefill"), _Worker(self, "decode")]
        self._under_way: dict[int, int] = {}
        self._stepper: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        for worker in self.workers:
            await worker.start()

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()

    @property
    def num_running(self) -> int:
        return sum(map(len, self.batches.values()))

    def note_received(self, batch: int, num_tokens: int) -> None:
        """Say that clients have these tokens of `batch`."""
        if not self._step_s:
            self._under_way[batch] = self._under_way.get(batch, 0) - num_tokens
            self.wake()

    def wake(self) -> None:
        """Make the steps that are due."""
        if self.is_held:
            return
        if not self._step_s:
            for batch, answers in self.batches.items():
                if answers and (batch == WARM_UPS or self._under_way[batch] <= 0):
                    self._under_way[batch] += self._step([answers])
        elif self._stepper is None and self.num_running:
            self._stepper = asyncio.get_running_loop().call_later(self._step_s, self._step_all)

    def _step_all(self) -> None:
        self._stepper = None
        self._step(self.batches.values())
        self.wake()

    def _step(self, batches: Iterable[dict[str, Running]]) -> int:
        outputs = []
        for answers in batches:
            for request_id, answer in list(answers.items()):
                finish: FinishReason | None = "length" if answer.num_outputs + 1 >= answer.max_tokens else None
                outputs.append(
                    SequenceOutput(
                        request_id=request_id,
                        index=answer.num_outputs,
                        token_ids=[self._token_id],
                        finish_reason=finish,
                    )
                )
                answer.num_outputs += 1
                if finish is not None:
                    del answers[request_id]
        self.workers[1].publish(outputs)
        return len(outputs)

    # ------------------------------------------------------------ what the router asks

    def answer(self, worker: _Worker, path: str, body: bytes) -> protocol.Message:
        now = time.monotonic()
        if path == "/reserve":
            reserve = protocol.decode(body, protocol.ReserveRequest)
            self.on_call(path, reserve, now)
            return protocol.ReserveReply(landing=reserve.request_id.encode())
        if path == "/prefill":
            prefill = protocol.decode(body, protocol.PrefillRequest)
            self.on_call(path, prefill, now)
            branches = [self._first(b.request_id, b.landing, prefill) for b in prefill.branches]
            result = self._first(prefill.request_id, prefill.landing, prefill)
            self.wake()
            return msgspec.structs.replace(result, branches=branches)
        if path == "/abort":
            abort = protocol.decode(body, protocol.AbortRequest)
            known = any(answers.pop(abort.request_id, None) for answers in self.batches.values())
            return protocol.AbortReply(known=known, drained=True)
        if path == "/link":
            return protocol.LinkReply(transport="loopback", lane="none")
        return protocol.Ack()

    def _first(
        self, request_id: str, landing: bytes | None, request: protocol.PrefillRequest
    ) -> protocol.PrefillResult:
        num_wanted = request.sampling.max_tokens - request.num_prior_outputs
        is_over = landing is None or num_wanted <= 1
        batch = WARM_UPS if request_id.startswith("warm-") else self.batch
        self._under_way[batch] = self._under_way.get(batch, 0) + 1
        if not is_over:
            self.batches.setdefault(batch, {})[request_id] = Running(num_wanted, 1)
        return protocol.PrefillResult(
            request_id=request_id,
            token_id=self._token_id,
            finish_reason="length" if is_over else None,
            handed_over=not is_over,
        )

    def info(self, worker: _Worker) -> protocol.WorkerInfo:
        return protocol.WorkerInfo(
            id=f"loopback-{worker.role}",
            role=worker.role,
            url=worker.url,
            state="ready",
            generation=worker.generation,
            leader_pid=0,
            ranks=[protocol.RankInfo(rank=0, pid=0, device="none", numa=NUMA)],
            fingerprints=FINGERPRINTS,
            limits=self._limits,
            transport="loopback",
            endpoints=[b"loopback"],
        )


class _Worker:
    """One role's server and event stream; it keeps no frame for readers that come late."""

    def __init__(self, loopback: Loopback, role: WorkerRole) -> None:
        self.loopback, self.role = loopback, role
        self.generation = time.time_ns()
        self.url = ""
        self.streams: set[_Connection] = set()
        self.connections: set[_Connection] = set()
        self._num_frames = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._heart = asyncio.create_task(self._beat())

    async def close(self) -> None:
        self._heart.cancel()
        self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        with contextlib.suppress(asyncio.CancelledError):
            await self._heart

    def publish(self, outputs: list[SequenceOutput]) -> None:
        self._num_frames += 1
        stats = protocol.WorkerStats(free_blocks=1 << 20, free_slots=4096)
        frame = protocol.encode_frame(
            protocol.StreamFrame(
                number=self._num_frames, generation=self.generation, state="ready", outputs=outputs, stats=stats
            )
        )
        for stream in self.streams:
            stream.send_chunk(frame)

    async def _beat(self) -> None:
        while True:
            self.publish([])
            await asyncio.sleep(HEARTBEAT_S)


class _Connection(asyncio.Protocol):
    """Server side of one connection, keep-alive."""

    transport: asyncio.Transport

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._worker.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.streams.discard(self)
        self._worker.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def send_chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    # Called by the parser.

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, body = httptools.parse_url(self._url).path.decode(), b"".join(self._body)
        self._url, self._body = b"", []
        if path == "/stream":
            self.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            self._worker.streams.add(self)
            return
        if path == "/info":
            answer = msgspec.json.encode(self._worker.loopback.info(self._worker))
        else:
            answer = protocol.encode(self._worker.loopback.answer(self._worker, path, body))
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
