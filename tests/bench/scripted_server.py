"""An OpenAI-compatible server that computes nothing: its steps take as long as a script says.

Prompts take `prefill_s` each, one after another, beside the steps of a batch that decodes; a step of N streams takes
a + b N. Steps keep to a schedule, so lateness of one does not add to the next. Run as a program it serves in real time
in a process of its own; in a test's event loop its clock is that loop's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Script:
    """Seconds, and what the server does wrongly.

    prefill_blocks: nobody decodes while a prompt is computed, as in servers that do both on one GPU.
    kill_at: so many streams in a batch kill it, after kill_after_steps.   group: chunks that are sent together.
    """

    a_s: float = 0.040
    b_s: float = 0.031
    prefill_s: float = 0.5
    prefill_blocks: bool = False
    kill_at: int | None = None
    kill_after_steps: int = 5
    buffers: bool = False
    group: int = 1
    error_at_token: int | None = None
    max_batch: int = 1_000
    sends_usage: bool = True
    sends_done: bool = True
    sends_ids: bool = True
    reasons_for: int = 0
    ends_early_at: int | None = None
    refuses: tuple[str, ...] = ()
    stalls_at: int | None = None


@dataclass
class _Stream:
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    left: int = 0


class ScriptedServer:
    """Serves a Script on a port of its own choice between `start` and `close`.

    on_batch: hears of each batch that is larger than all before it.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self._waiting: asyncio.Queue[_Stream] = asyncio.Queue()
        self._joining: list[_Stream] = []
        self._batch: list[_Stream] = []
        self._has_work = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._transports: set[asyncio.Transport] = set()
        self._prefill_due = 0.0
        self._largest_batch = 0
        self.on_batch: Callable[[int], None] = lambda size: None

    async def start(self, port: int = 0) -> str:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", port)
        await self._site.start()
        self._tasks = [asyncio.ensure_future(self._decode())]
        if not self.script.prefill_blocks:
            self._tasks.append(asyncio.ensure_future(self._prefill()))
        assert self._site._server is not None
        return f"http://127.0.0.1:{self._site._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.cleanup()

    async def _prefill(self) -> None:
        while True:
            await self._prefill_one()

    async def _prefill_one(self) -> None:
        loop = asyncio.get_running_loop()
        stream = await self._waiting.get()
        self._prefill_due = max(self._prefill_due, loop.time()) + self.script.prefill_s
        await asyncio.sleep(self._prefill_due - loop.time())
        self._put(stream)
        if stream.left:
            self._joining.append(stream)
            self._has_work.set()

    async def _decode(self) -> None:
        loop, script, steps_at_kill, due = asyncio.get_running_loop(), self.script, 0, 0.0
        while True:
            if not self._batch and not self._joining and (not script.prefill_blocks or self._waiting.empty()):
                self._has_work.clear()
                await self._has_work.wait()
                due = loop.time()
            if script.prefill_blocks and not self._waiting.empty():
                while not self._waiting.empty():
                    await self._prefill_one()
                due = loop.time()
                continue
            room = script.max_batch - len(self._batch)
            self._batch += self._joining[:room]
            del self._joining[:room]
            if len(self._batch) > self._largest_batch:
                self._largest_batch = len(self._batch)
                self.on_batch(self._largest_batch)
            due += script.a_s + script.b_s * len(self._batch)
            await asyncio.sleep(due - loop.time())
            if script.kill_at is not None and len(self._batch) >= script.kill_at:
                steps_at_kill += 1
                if steps_at_kill > script.kill_after_steps:
                    return await self._die()
            for stream in self._batch:
                self._put(stream)
            self._batch = [stream for stream in self._batch if stream.left]

    async def _die(self) -> None:
        """Cut all connections and refuse new ones, as a killed process does."""
        await self._site.stop()
        for transport in list(self._transports):
            transport.abort()

    def _put(self, stream: _Stream) -> None:
        stream.left -= 1
        stream.tokens.put_nowait(stream.left)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        script = self.script
        body = await request.json()
        self.bodies.append(body)
        options = body.get("stream_options") or {}
        for name in script.refuses:
            if name in body or name in options:
                return web.json_response({"error": {"message": f"unknown field {name}"}}, status=400)
        assert isinstance(request.transport, asyncio.Transport)
        self._transports.add(request.transport)
        stream = _Stream(left=body["max_tokens"])
        self._waiting.put_nowait(stream)
        self._has_work.set()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        answer = _Answer(script, body, is_chat=request.path.startswith("/v1/chat"))
        held: list[bytes] = []
        try:
            while True:
                left = await stream.tokens.get()
                assert left is not None
                events = answer.token(is_last=left == 0)
                if script.stalls_at == answer.num_tokens:
                    await asyncio.sleep(1e6)
                if answer.is_cut:
                    stream.left = 0
                    request.transport.abort()
                    return response
                held.append(events)
                if left == 0 or answer.is_over:
                    break
                if not script.buffers and len(held) >= script.group:
                    await response.write(b"".join(held))
                    held.clear()
            stream.left = 0
            await response.write(b"".join(held))
            await response.write_eof()
        finally:
            self._transports.discard(request.transport)
            stream.left = 0
        return response


class _Answer:
    """Events of one answer. is_cut: the connection is to be cut here; is_over: an error has ended it."""

    def __init__(self, script: Script, body: dict[str, Any], *, is_chat: bool) -> None:
        self._script = script
        self._body = body
        self._is_chat = is_chat
        self._options = body.get("stream_options") or {}
        self.num_tokens = 0
        self.is_cut = self.is_over = False

    def token(self, *, is_last: bool) -> bytes:
        script = self._script
        self.num_tokens += 1
        if script.ends_early_at == self.num_tokens:
            self.is_cut = True
            return b""
        if script.error_at_token == self.num_tokens:
            self.is_over = True
            return self._event({"error": {"message": "the engine has failed", "code": 500}})
        events = self._event({"choices": [self._choice(" x")], **self._usage("continuous_usage_stats")})
        if is_last:
            end = {
                "index": 0,
                "finish_reason": "length",
                ("delta" if self._is_chat else "text"): {} if self._is_chat else "",
            }
            events += self._event({"choices": [end]})
            if usage := self._usage("include_usage"):
                events += self._event({"choices": [], **usage})
            events += b"data: [DONE]\n\n" if script.sends_done else b""
        return events

    def _choice(self, text: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        if self._is_chat:
            name = "reasoning_content" if self.num_tokens <= self._script.reasons_for else "content"
            choice["delta"] = {name: text}
        else:
            choice["text"] = text
        if self._script.sends_ids and self._body.get("return_token_ids"):
            choice["token_ids"] = [7]
        return choice

    def _usage(self, option: str) -> dict[str, Any]:
        if not self._script.sends_usage or not self._options.get(option):
            return {}
        prompt = self._body.get("prompt")
        return {"usage": {"prompt_tokens": len(prompt) if prompt else 1, "completion_tokens": self.num_tokens}}

    @staticmethod
    def _event(value: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps({"id": "x", "object": "chunk", **value}).encode() + b"\n\n"


async def _serve(script: Script) -> None:
    server = ScriptedServer(script)
    server.on_batch = lambda size: print(f"batch of {size}", flush=True)
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it closes its end


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--a-ms", type=float, default=4.0)
    parser.add_argument("--b-ms", type=float, default=3.1)
    parser.add_argument("--prefill-ms", type=float, default=50.0)
    args = parser.parse_args()
    script = Script(args.a_ms / 1000, args.b_ms / 1000, args.prefill_ms / 1000, prefill_blocks=True)
    asyncio.run(_serve(script))
