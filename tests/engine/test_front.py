"""The frame around a leader's command routes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request
from starlette.routing import Route

from engine.config import EngineConfig
from engine.front import Front, command
from engine.memory_parts import CHECKSUM_BYTES
from engine.memory_plan import MemoryPlan, plan_memory
from engine.model.published import published_config
from engine.plan import MeasuredMemory, RankReady
from router import protocol


def test_caller_that_leaves_while_sending_runs_no_command_and_raises_nothing() -> None:
    ran: list[protocol.Ack] = []

    async def handler(message: protocol.Ack, _: Request) -> protocol.Message:
        ran.append(message)
        return message

    body = iter(
        [{"type": "http.request", "body": b"\x80", "more_body": True}, {"type": "http.disconnect"}],
    )
    statuses: list[int] = []

    async def receive() -> Any:
        return next(body)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def call(route: Route) -> None:
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "query_string": b""}
        await route.handle(scope, receive, send)

    asyncio.run(call(command("/x", protocol.Ack, handler)))
    assert statuses == [499]
    assert ran == []


def make_front(plan: MemoryPlan | None = None) -> Front:
    async def stats() -> protocol.WorkerStats:
        return protocol.WorkerStats()

    limits = protocol.Limits(
        max_model_len=100, max_num_seqs=1, max_num_batched_tokens=8, block_tokens=128, num_blocks=1, vocab_size=9
    )
    config = EngineConfig(model="m", role="decode")
    return Front(
        config, generation=1, limits=limits, model_fingerprint="m", layout_fingerprint="l", stats=stats, plan=plan
    )


async def read(front: Front, router: str) -> asyncio.Task[None]:
    """Open the stream as `router` does, and return the reading that can be cancelled."""
    opened = asyncio.Event()
    scope = {"type": "http", "method": "GET", "path": "/stream", "headers": []}
    scope["query_string"] = f"from=0&router={router}".encode()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            front.set_state("ready")
        if message.get("body"):
            opened.set()

    reading = asyncio.create_task(front.app([])(scope, receive, send))
    await opened.wait()
    return reading


async def leave(reading: asyncio.Task[None]) -> None:
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.sleep(0)


def test_router_is_lost_once_when_its_last_stream_has_ended() -> None:
    async def run() -> None:
        front = make_front()
        first, second, other = await read(front, "a"), await read(front, "a"), await read(front, "b")
        await leave(first)
        assert front.take_lost_routers(0) == []
        await leave(second)
        assert front.take_lost_routers(60) == []
        assert front.take_lost_routers(0) == ["a"]
        assert front.take_lost_routers(0) == []
        await leave(other)

    asyncio.run(run())


def test_router_that_has_come_back_in_time_is_not_lost() -> None:
    async def run() -> None:
        front = make_front()
        await leave(await read(front, "a"))
        again = await read(front, "a")
        assert front.take_lost_routers(0) == []
        await leave(again)

    asyncio.run(run())


def test_heartbeat_tells_the_gauges_of_that_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any step: a request that was aborted must not go on weighing on its worker."""
    monkeypatch.setattr("engine.front.HEARTBEAT_S", 0.01)

    async def run() -> None:
        front = make_front()
        front.on_outputs([], protocol.WorkerStats(num_running=3))
        await asyncio.sleep(0)
        assert front.info().stats.num_running == 3
        front.set_state("ready")
        beating = asyncio.create_task(front.heartbeat())
        while front.info().stats.num_running:
            await asyncio.sleep(0.001)
        beating.cancel()

    asyncio.run(asyncio.wait_for(run(), 5))


def test_info_shows_the_plan_then_the_figures_of_the_rank_with_least_left() -> None:
    config = EngineConfig(
        model="DeepSeek-V4-Flash", role="decode", device="cuda", ranks=4, max_model_len=4096, gpu_memory_gib=96.0
    )
    plan = plan_memory(config, published_config("DeepSeek-V4-Flash"))
    numa = protocol.NumaBinding(status="simulated", node=0, cpus="0")

    def rank(number: int, free: int) -> RankReady:
        memory = MeasuredMemory(
            device_bytes=95 * 2**30, free_bytes=free, weight_bytes=2**30, workspace_bytes=2, graph_bytes=3,
            graph_nodes=dict.fromkeys(plan.summary().graph_sizes, 600),
        )  # fmt: skip
        return RankReady(
            rank=number, pid=1, device="cuda", numa=numa, transport="nixl", endpoint=b"", model_fingerprint="m",
            memory=memory,
        )  # fmt: skip

    async def run() -> None:
        front = make_front(plan)
        planned = front.info().memory
        assert planned is not None and (planned.device_bytes, planned.is_measured) == (96 * 2**30, False)
        front.on_ready([rank(0, 2**33), rank(1, 2**32), rank(2, 2**34)])
        await asyncio.sleep(0)
        found = front.info().memory
        assert found is not None and found.is_measured
        later = 3 * CHECKSUM_BYTES  # taken when caches come
        assert (found.device_bytes, found.left_bytes) == (95 * 2**30, 2**32 - later)

    asyncio.run(run())
