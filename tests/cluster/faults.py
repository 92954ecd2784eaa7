"""What fault tests share: one client that keeps every fact of an answer, load beside it, seams, and the judgement."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.numpy import load_file

ORACLE = Path(__file__).resolve().parents[1] / "oracle" / "tiny"
GOLDEN = load_file(ORACLE / "golden.safetensors")
ERROR_WITHIN_S = 5.0
BASELINE_WITHIN_S = 15.0
READY_WITHIN_S = 20.0
ANSWER_WITHIN_S = 60.0
IDLE_GAUGES = ("num_running", "num_waiting", "queued_tokens", "held_blocks", "quarantined_blocks", "open_landings")

YAML = """\
device: cpu
dtype: float32
kv_cache_dtype: fp32
block_size: 128
max_num_batched_tokens: 128
max_num_seqs: 8
kv_cache_memory_gib: 0.06
pool_poison: true
test_seams: true
prefill: {prefill}
decode: {decode}
router: {{test_seams: true}}
supervisor: {{max_restarts: 1000, restart_window_s: 5}}
"""


def write_config(
    folder: Path, model: Path, *, prefill: int = 1, decode: int = 1, logits_log: str = "", **more: Any
) -> Path:
    """Write a cluster's YAML: chunks and blocks of 128 tokens, seams open, restarts without number. more: settings."""
    path = folder / "cluster.yaml"
    groups = {role: json.dumps([{}] * count) for role, count in (("prefill", prefill), ("decode", decode))}
    settings = {"model": str(model), "logits_log": logits_log, "transport": "nixl", **more}
    lines = [f"{name}: {json.dumps(value)}\n" for name, value in settings.items()]
    path.write_text("".join(lines) + YAML.format(**groups))
    return path


@dataclass(frozen=True)
class Ask:
    """A request whose answer is known: always max_tokens long, the same for the same sampling."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": 0} if self.seed is None else {"temperature": 0.8, "top_p": 0.95, "seed": self.seed}

    def body(self, **more: Any) -> dict[str, Any]:
        sampling = self.sampling
        limits = {"max_tokens": self.max_tokens, "ignore_eos": True, "return_token_ids": True}
        return {"model": "oracle-tiny", "prompt": list(self.prompt), **sampling, **limits, **more}


def golden_ask(length: int, max_tokens: int, seed: int | None = None) -> Ask:
    return Ask(tuple(GOLDEN[f"prompt_{length}"].tolist()), max_tokens, seed)


@dataclass
class Answer:
    """What came back. is_closed: the connection ended before the answer did. error: the error object."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    status: int = 0
    is_done: bool = False
    is_closed: bool = False
    asked_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    num_events_after_error: int = 0

    def take(self, choice: dict[str, Any]) -> None:
        self.token_ids += choice.get("token_ids") or []
        self.text += choice.get("text") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def take_event(self, data: str) -> None:
        if self.error is not None:
            self.num_events_after_error += data != "[DONE]"
        elif data == "[DONE]":
            self.is_done = True
        else:
            event = json.loads(data)
            self.error = event.get("error")
            for choice in event.get("choices", []):
                self.take(choice)


async def ask(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    *,
    name: str = "",
    on_tokens: Callable[[list[int]], None] = lambda ids: None,
) -> Answer:
    """Send a completion and return whatever comes of it; never raises for a broken connection."""
    answer = Answer()
    headers = {"x-request-id": name} if name else {}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            answer.status = reply.status_code
            if reply.status_code == 200 and body.get("stream"):
                async for line in reply.aiter_lines():
                    if line.startswith("data: "):
                        answer.take_event(line.removeprefix("data: "))
                        on_tokens(answer.token_ids)
                answer.is_closed = not answer.is_done and answer.error is None
            else:
                document = json.loads(await reply.aread())
                answer.error = document.get("error")
                for choice in document.get("choices", []):
                    answer.take(choice)
                answer.is_done = reply.status_code == 200
    except httpx.TimeoutException:
        raise
    except httpx.TransportError:
        answer.is_closed = True
    answer.ended_at = time.monotonic()
    return answer


def judge(answer: Answer, expected: list[int], *, struck_at: float, may_close: bool = False) -> str:
    """Return "complete", "error" or "closed"; fail if it is none of them, or comes too late."""
    assert answer.token_ids == expected[: len(answer.token_ids)], "a wrong or a repeated token"
    assert answer.num_events_after_error == 0
    if answer.is_done:
        assert answer.token_ids == expected, f"{len(answer.token_ids)} of {len(expected)} tokens, shown as complete"
        assert answer.finish_reason == "length"
        return "complete"
    assert answer.finish_reason is None, f"{answer.finish_reason} for an answer that was cut"
    late = answer.ended_at - max(struck_at, answer.asked_at)
    if answer.error is not None:
        assert answer.status == 200 or 500 <= answer.status < 600, answer
        assert answer.error["message"] and answer.error["code"], answer.error
        assert late <= ERROR_WITHIN_S, f"{answer.error} after {late:.1f} s"
        return "error"
    assert may_close, "the connection was closed without a word"
    assert late <= ERROR_WITHIN_S, f"closed after {late:.1f} s"
    return "closed"


class Load:
    """Clients that ask one known request after the other until stopped."""

    def __init__(self, client: httpx.AsyncClient, known: list[tuple[Ask, list[int]]], *, num_clients: int = 3) -> None:
        self._client, self._known = client, known
        self._numbers = itertools.count()
        self._is_over = False
        self.num_clients = num_clients
        self.answers: list[tuple[Answer, list[int]]] = []
        self._tasks = [asyncio.create_task(self._run()) for _ in range(num_clients)]

    async def _run(self) -> None:
        while not self._is_over:
            number = next(self._numbers)
            wanted, expected = self._known[number % len(self._known)]
            answer = await ask(self._client, wanted.body(stream=number % 3 != 0), name=f"load-{number}")
            self.answers.append((answer, expected))
            if not answer.is_done:
                await asyncio.sleep(0.2)

    async def finish(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    def judge(self, *, struck_at: float, may_close: bool) -> dict[str, int]:
        counts = {"complete": 0, "error": 0, "closed": 0}
        for answer, expected in self.answers:
            counts[judge(answer, expected, struck_at=struck_at, may_close=may_close)] += 1
        return counts


class Site:
    """A cluster as a fault test sees it: its workers' URLs and pids, their seams, and how idle they are."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.url = cluster.url
        cluster.await_true(self._is_quiet, timeout_s=BASELINE_WITHIN_S)
        self._idle = self.gauges()

    def workers(self) -> dict[str, dict[str, Any]]:
        return dict(self.cluster.workers())

    def router_pid(self) -> int:
        """Raises ValueError while there is none."""
        (pid,) = (process.pid for process in self.cluster.family() if _is_router(process))
        return int(pid)

    def identity(self, role: str) -> Any:
        """Return what changes when this part has been started again; None while that is unknown."""
        if role == "router":
            return self.router_pid()
        return self.workers()[f"{role}-0"]["generation"]

    def pids(self, role: str) -> dict[str, int]:
        if role == "router":
            return {"leader": self.router_pid()}
        worker = self.workers()[f"{role}-0"]
        return {"leader": worker["leader_pid"], "rank": worker["ranks"][0]["pid"]}

    def gauges(self) -> dict[str, dict[str, int]]:
        """Return what must be as before once nothing runs, asked of each worker itself."""
        seen = {}
        topology = self.cluster.topology()
        for worker in topology["workers"]:
            stats = httpx.get(f"{worker['url']}/info", timeout=5).json()["stats"]
            seen[worker["id"]] = {name: stats[name] for name in (*IDLE_GAUGES, "free_blocks", "free_slots")}
        router = topology["router"]
        seen["router"] = {name: router[name] for name in ("num_requests", "num_queued")}
        return seen

    def _is_quiet(self) -> bool:
        seen = self.gauges()
        return not any(seen[part].get(name, 0) for part in seen for name in (*IDLE_GAUGES, "num_requests"))

    def await_idle(self, *, timeout_s: float = BASELINE_WITHIN_S) -> None:
        deadline = time.monotonic() + timeout_s
        while (found := self._try_gauges()) != self._idle:
            if time.monotonic() > deadline:
                pytest.fail(f"not idle after {timeout_s} s: {found}, before {self._idle}")
            time.sleep(0.1)

    def _try_gauges(self) -> dict[str, dict[str, int]] | None:
        try:
            return self.gauges()
        except (httpx.HTTPError, KeyError):
            return None

    # ------------------------------------------------------------ seams

    def hold(self, point: str, name: str, *, n: int = 0, action: str = "hold", target: str = "rank") -> None:
        """Arm a worker's seam for the request `name`, or close the router's queue."""
        if point == "router_queued":
            httpx.post(f"{self.url}/seams/hold").raise_for_status()
            return
        fault = {"point": point, "request": name, "n": n, "action": action, "target": target}
        for worker in self.workers().values():
            httpx.post(f"{worker['url']}/seams", json=fault).raise_for_status()

    async def await_held(self, point: str, name: str, *, num_queued: int = 1) -> None:
        """Return when the request is at the point (in the queue: when so many are)."""
        urls = [worker["url"] for worker in self.workers().values()]
        deadline = time.monotonic() + 20
        async with httpx.AsyncClient() as http:
            while time.monotonic() < deadline:
                if point == "router_queued":
                    router = (await http.get(f"{self.url}/topology")).json()["router"]
                    if router["num_queued"] >= num_queued:
                        return
                else:
                    for url in urls:
                        reached = (await http.get(f"{url}/seams")).json()
                        if any(what.startswith(point) and name in what for what in reached):
                            return
                await asyncio.sleep(0.02)
        pytest.fail(f"{name} did not get to {point}")

    async def release(self, urls: list[str]) -> None:
        """Let go of everything; those that can't hear it are being started again."""
        async with httpx.AsyncClient(timeout=1) as http:
            for url in urls:
                with contextlib.suppress(httpx.HTTPError):
                    await http.post(f"{url}/seams/release")


def _is_router(process: Any) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return "router" in words and words[words.index("router") - 1] == "-m"


@contextlib.contextmanager
def struck(pids: list[int], number: int) -> Iterator[float]:
    """Send a signal to our own processes; yields when. A stopped one that nobody killed is killed in the end."""
    for pid in pids:
        os.kill(pid, number)
    try:
        yield time.monotonic()
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if number == signal.SIGSTOP and _is_stopped(pid):
                    os.kill(pid, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False
