"""The decode group's leader: its command routes over a DecodeWorker."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from starlette.requests import Request
from starlette.routing import Route

from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.front import command
from engine.leader import LeaderContext, run_leader
from engine.loop import EngineLoop
from kv_transfer import landing as kv_landing
from router import protocol


def run(config: EngineConfig, run_dir: Path, *, spawn_ranks: bool, stop: threading.Event | None = None) -> int:
    """Serve the decode role until told to stop; see engine.leader.run_leader."""
    return run_leader(config, run_dir, build=_build, spawn_ranks=spawn_ranks, stop=stop)


def _build(context: LeaderContext) -> list[Route]:
    loop: EngineLoop[DecodeWorker] = context.loop
    front = context.front
    loop.worker = DecodeWorker(
        context.config,
        context.plan,
        vocab_size=context.model.vocab_size,
        eos_token_ids=frozenset(context.model.eos_token_ids),
        generation=front.generation,
        leader_url=front.url,
        send=loop.send,
    )

    async def reserve(message: protocol.ReserveRequest, _: Request) -> protocol.Message:
        front.require_ready()
        landing = await asyncio.wrap_future(loop.call(lambda worker: worker.reserve(message)))
        return protocol.ReserveReply(landing=kv_landing.encode(landing))

    async def abort(message: protocol.AbortRequest, _: Request) -> protocol.Message:
        return await asyncio.wrap_future(loop.call(lambda worker: worker.abort(message)))

    async def drained(message: protocol.DrainedNotice, _: Request) -> protocol.Message:
        await asyncio.wrap_future(loop.call(lambda worker: worker.drained(message)))
        return protocol.Ack()

    async def writer_lost(message: protocol.WriterLost, _: Request) -> protocol.Message:
        await asyncio.wrap_future(loop.call(lambda worker: worker.writer_lost(message)))
        return protocol.Ack()

    return [
        command("/reserve", protocol.ReserveRequest, reserve),
        command("/abort", protocol.AbortRequest, abort),
        command("/drained", protocol.DrainedNotice, drained),
        command("/writer_lost", protocol.WriterLost, writer_lost),
    ]
