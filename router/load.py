"""A router under load: the process, its loopback workers, and clients that count what they are sent."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httptools
import psutil

from router.loopback import Loopback
from router.tokenizer import Tokenizer

MARK = "~"
MAX_MODEL_LEN = 1 << 20
ENGLISH = (
    "the a of to and in is that for it with as was on be by at from this have or one had not but what all were when "
    "we there can an your which their said if do will each about how up out them then she many some so these would "
    "other into has more her two like him see time could no make than first been its who now people my made over did "
    "down only way find use may water long little very after words called just where most know get through back much "
    "before go good new write our used me man too any day same right look think also around another came come work"
)
WORDS = ENGLISH.split()


class LoadClient(asyncio.Protocol):
    """One keep-alive connection of a client, one request at a time; it counts what it is sent instead of parsing it.

    mark: the text of the loopback's token.   on_tokens: hears of each arrival of tokens.
    """

    transport: asyncio.Transport

    def __init__(self, mark: bytes) -> None:
        self.on_tokens: Callable[[int], None] = lambda count: None
        self._mark = mark
        self.status = 0
        self.num_tokens = self.num_events = 0
        self.sent = self.first_token = 0.0
        self.head = b""
        self.body: list[bytes] = []
        self.keeps_body = False
        self._done: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)

    @classmethod
    async def connect(cls, port: int, mark: bytes) -> LoadClient:
        _, client = await asyncio.get_running_loop().create_connection(lambda: cls(mark), "127.0.0.1", port)
        return client

    async def post(self, path: str, body: bytes, headers: Iterable[str] = ()) -> int:
        """Send one request and wait for the end of its answer; returns the status. Raises ConnectionError."""
        self.num_tokens = self.num_events = 0
        self.first_token = 0.0
        self.head, self.body = b"", []
        self._done = asyncio.get_running_loop().create_future()
        lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *headers]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode()
        self.sent = time.monotonic()
        self.transport.write(head + body)
        await self._done
        return self.status

    def close(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the router closed the connection: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # Called by the parser.

    def on_body(self, body: bytes) -> None:
        self.head = self.head or body
        if self.keeps_body:
            self.body.append(body)
        self.num_events += body.count(b"\n\n")
        count = body.count(self._mark)
        if count:
            self.first_token = self.first_token or time.monotonic()
            self.num_tokens += count
            self.on_tokens(count)

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Setup:
    """A running router in front of the loopback workers. `process` is the router's."""

    def __init__(self, process: psutil.Process, port: int, loopback: Loopback) -> None:
        self.process, self.port, self.loopback = process, port, loopback
        self._idle: collections.deque[LoadClient] = collections.deque()

    async def client(self) -> LoadClient:
        """Return an idle connection, the one that waited longest, or a new one."""
        while self._idle:
            client = self._idle.popleft()
            if not client.transport.is_closing():
                return client
        return await LoadClient.connect(self.port, MARK.encode())

    def give_back(self, client: LoadClient) -> None:
        self._idle.append(client)

    async def own_times(self) -> list[tuple[float, float]]:
        """Return what a router.probe has measured since it was last asked: seconds up to the call, and after it."""
        url = f"http://127.0.0.1:{self.port}/probe"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        answer = await asyncio.to_thread(lambda: opener.open(url, timeout=10).read())
        return [(before, after) for before, after in json.loads(answer)]

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def rss_mib(self) -> float:
        return self.process.memory_info().rss / (1 << 20)


@contextlib.asynccontextmanager
async def running_router(
    model: Path,
    *,
    step_s: float = 0.0,
    max_model_len: int = MAX_MODEL_LEN,
    core: int | None = None,
    flags: Sequence[str] = (),
    module: str = "router",
) -> AsyncIterator[Setup]:
    """Start a router for `model` and its workers, wait until it is ready, and end it.

    core: where it is pinned.   module: what is run, `router.probe` to have it measure itself.
    """
    tokenizer = Tokenizer.from_folder(model)
    if tokenizer is None:
        raise ValueError(f"{model}: has no tokenizer.json; name a model folder that has one")
    (token_id,) = tokenizer.encode(MARK)
    loopback = Loopback(
        token_id=token_id,
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        step_s=step_s,
    )
    await loopback.start()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", module, "--model", str(model), "--port", str(port)]
    for worker in loopback.workers:
        command += [f"--{worker.role}", worker.url]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen([*command, *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            if core is not None:
                os.sched_setaffinity(child.pid, {core})
            await _wait_ready(child, port, log)
            yield Setup(psutil.Process(child.pid), port, loopback)
        finally:
            child.terminate()
            try:
                await asyncio.to_thread(child.wait, 20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            await loopback.close()


async def _wait_ready(child: subprocess.Popen[bytes], port: int, log: Any) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def is_ready() -> bool:
        with contextlib.suppress(OSError), opener.open(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
        return False

    deadline = time.monotonic() + 60
    while not await asyncio.to_thread(is_ready):
        if child.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise RuntimeError("the router did not get ready:\n" + log.read().decode(errors="replace")[-4000:])
        await asyncio.sleep(0.05)


def chat_body(num_chars: int, max_tokens: int, rng: random.Random, **fields: Any) -> bytes:
    """Return a streamed chat request of about `num_chars` characters of English words in random order."""
    words = rng.choices(WORDS, k=max(1, num_chars // 5))
    messages = [{"role": "user", "content": " ".join(words)[:num_chars]}]
    return json.dumps({"messages": messages, "max_tokens": max_tokens, "stream": True, **fields}).encode()
