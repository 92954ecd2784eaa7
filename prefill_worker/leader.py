"""The prefill group's leader: its command routes over a PrefillWorker."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from starlette.requests import Request
from starlette.routing import Route

from engine import errors
from engine.config import EngineConfig
from engine.front import command, until_disconnected
from engine.leader import LeaderContext, run_leader
from engine.loop import EngineLoop
from kv_transfer.landing import Landing
from prefill_worker.worker import PrefillWorker
from router import protocol

log = logging.getLogger(__name__)

_LINK_TIMEOUT_S = 30.0
_DRAINED_TRIES = 20

R = TypeVar("R", bound=protocol.Message)


def run(config: EngineConfig, run_dir: Path, *, spawn_ranks: bool, stop: threading.Event | None = None) -> int:
    """Serve the prefill role until told to stop; see engine.leader.run_leader."""
    return run_leader(config, run_dir, build=_build, spawn_ranks=spawn_ranks, stop=stop)


def _build(context: LeaderContext) -> list[Route]:
    loop: EngineLoop[PrefillWorker] = context.loop
    front = context.front
    http_loop = asyncio.get_running_loop()

    def say_drained(landing: Landing) -> None:
        asyncio.run_coroutine_threadsafe(_say_drained(landing), http_loop)

    loop.worker = PrefillWorker(
        context.config,
        context.plan,
        vocab_size=context.model.vocab_size,
        eos_token_ids=frozenset(context.model.eos_token_ids),
        send=loop.send,
        say_drained=say_drained,
    )

    async def prefill(message: protocol.PrefillRequest, request: Request) -> protocol.Message:
        front.require_ready()
        result, on_result = _callback(protocol.PrefillResult)
        await asyncio.wrap_future(loop.call(lambda worker: worker.accept(message, on_result)))
        gone = asyncio.ensure_future(until_disconnected(request))
        try:
            waiting: set[asyncio.Future[Any]] = {result, gone}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                for request_id in (message.request_id, *(branch.request_id for branch in message.branches)):
                    await abort(protocol.AbortRequest(request_id=request_id), request)
            return await result
        finally:
            gone.cancel()

    async def abort(message: protocol.AbortRequest, _: Request) -> protocol.Message:
        return await asyncio.wrap_future(loop.call(lambda worker: worker.abort(message)))

    async def link(message: protocol.LinkRequest, _: Request) -> protocol.Message:
        front.require_ready()
        if message.fingerprints != front.fingerprints:
            raise errors.FingerprintMismatch(
                f"decode worker {message.worker_id} has {message.fingerprints}, prefill worker "
                f"{context.config.worker_id} has {front.fingerprints}: give both the same model and cache options"
            )
        result, on_result = _callback(protocol.LinkReply)
        await asyncio.wrap_future(loop.call(lambda worker: worker.links.link(message, on_result)))
        try:
            return await asyncio.wait_for(result, _LINK_TIMEOUT_S)
        except TimeoutError as e:
            loop.call(lambda worker: worker.links.forget(on_result))
            raise errors.TransferFailed(f"no link to {message.worker_id} within {_LINK_TIMEOUT_S:.0f} s") from e

    async def unlink(message: protocol.WriterLost, _: Request) -> protocol.Message:
        await asyncio.wrap_future(loop.call(lambda worker: worker.links.unlink(message)))
        return protocol.Ack()

    return [
        command("/prefill", protocol.PrefillRequest, prefill),
        command("/abort", protocol.AbortRequest, abort),
        command("/link", protocol.LinkRequest, link),
        command("/unlink", protocol.WriterLost, unlink),
    ]


def _callback(
    kind: type[R],
) -> tuple[asyncio.Future[R], Callable[[R | errors.RequestError], None]]:
    """Return a future and the function that completes it from the engine loop's thread."""
    http_loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = http_loop.create_future()

    def complete(outcome: R | errors.RequestError) -> None:
        if future.done():
            return
        if isinstance(outcome, errors.RequestError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def on_result(outcome: Any) -> None:
        http_loop.call_soon_threadsafe(complete, outcome)

    return future, on_result


async def _say_drained(landing: Landing) -> None:
    """Tell decode's leader over HTTP; its blocks stay in quarantine until it hears it or knows us dead."""
    body = protocol.encode(protocol.DrainedNotice(key=landing.key, generation=landing.generation))
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        for attempt in range(_DRAINED_TRIES):
            try:
                response = await client.post(f"{landing.leader_url}/drained", content=body)
                if response.status_code == 200:
                    return
            except httpx.HTTPError as e:
                log.debug("drained notice to %s: %s", landing.leader_url, e)
            await asyncio.sleep(min(0.1 * 2**attempt, 5.0))
    log.warning("landing %d: decode at %s can't be told that it is drained", landing.key, landing.leader_url)
