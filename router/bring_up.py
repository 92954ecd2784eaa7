"""Bringing up a pair: prefill connects to decode's endpoints, then a real request goes through both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from router.client import WorkerError
from router.protocol import LinkRequest
from router.workers import Pair

log = logging.getLogger("isthmus.router")

LINK_TIMEOUT_S = 60.0
MIN_DELAY_S, MAX_DELAY_S = 0.1, 5.0


async def bring_up(pair: Pair, warm_up: Callable[[Pair], Awaitable[None]]) -> None:
    """Link and warm a pair, again after each failure; return when it is ready or can't be linked any more.

    warm_up: sends one request through the pair, or raises WorkerError.
    """
    delay = MIN_DELAY_S
    while pair.state in ("linking", "warming"):
        generations = pair.generations
        try:
            if pair.linked != generations:
                reply = await pair.prefill.client.link(_link_request(pair), timeout_s=LINK_TIMEOUT_S)
                pair.learn(reply)
                pair.linked = generations
            await warm_up(pair)
        except WorkerError as error:
            if pair.reason != error.message and error.code != "not_ready":
                log.warning("pair %s -> %s: %s", pair.prefill.url, pair.decode.url, error.message)
            pair.reason = error.message
            if error.code not in ("no_capacity", "not_ready"):
                pair.linked = (0, 0)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY_S)
            continue
        except Exception:
            log.exception("pair %s -> %s can't be brought up", pair.prefill.url, pair.decode.url)
            await asyncio.sleep(MAX_DELAY_S)
            continue
        if pair.generations == generations and pair.linked == generations:
            pair.warmed, pair.reason = generations, ""
            log.info("pair %s -> %s is warm: %s over %s", pair.prefill.url, pair.decode.url, pair.transport, pair.lane)
            return


def _link_request(pair: Pair) -> LinkRequest:
    info = pair.decode.info
    assert info is not None and info.fingerprints is not None
    return LinkRequest(
        worker_id=info.id,
        generation=info.generation,
        url=pair.decode.url,
        fingerprints=info.fingerprints,
        endpoints=info.endpoints,
    )
