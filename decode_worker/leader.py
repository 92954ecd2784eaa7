"""The decode group's leader: its command routes over a DecodeWorker."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import httpx
import msgspec
from starlette.requests import Request
from starlette.routing import Route

from decode_worker.landings import ASK_WRITER_S, Held
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.front import command
from engine.leader import LeaderContext, run_leader
from engine.loop import EngineLoop
from kv_transfer import landing as kv_landing
from router import protocol

log = logging.getLogger(__name__)


def run(config: EngineConfig, run_dir: Path, *, spawn_ranks: bool, stop: threading.Event | None = None) -> int:
    """Serve the decode role until told to stop; see engine.leader.run_leader."""
    return run_leader(config, run_dir, build=_build, spawn_ranks=spawn_ranks, stop=stop)


def _build(context: LeaderContext) -> list[Route]:
    loop: EngineLoop[DecodeWorker] = context.loop
    front = context.front
    http_loop = asyncio.get_running_loop()

    def ask_writer(held: Held) -> None:
        asyncio.run_coroutine_threadsafe(ask(held), http_loop)

    async def ask(held: Held) -> None:
        if await _is_drained(held):
            notice = protocol.DrainedNotice(key=held.landing.key, generation=held.landing.generation)
            await asyncio.wrap_future(loop.call(lambda worker: worker.drained(notice)))

    loop.worker = DecodeWorker(
        context.config,
        context.plan,
        vocab_size=context.model.vocab_size,
        eos_token_ids=frozenset(context.model.eos_token_ids),
        generation=front.generation,
        leader_url=front.url,
        send=loop.send,
        ask_writer=ask_writer,
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


async def _is_drained(held: Held) -> bool:
    """Ask the writer's leader to end the request; return whether it says that it will never write for it again."""
    request = protocol.AbortRequest(request_id=held.landing.request_id, landing=kv_landing.encode(held.landing))
    url = held.request.writer_url
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=ASK_WRITER_S) as client:
            response = await client.post(f"{url}/abort", content=protocol.encode(request))
        return response.status_code == 200 and protocol.decode(response.content, protocol.AbortReply).drained
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as e:
        log.debug("landing %d: %s can't be asked: %s", held.landing.key, url, e)
        return False
