"""The prefill leader's routes: what becomes of a request whose caller goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from engine.config import EngineConfig
from kv_transfer.layout import KVLayout, make_group
from prefill_worker.leader import _build
from prefill_worker.worker import PrefillWorker
from router.protocol import PrefillBranch, PrefillRequest, SamplingParams, encode

LAYOUT = KVLayout(block_tokens=128, groups=(make_group("csa_kv", "block", [("csa_kv", 2, 32, "fp32", 16)]),))


class Loop:
    """An engine loop that runs everything at once, and no step."""

    worker: PrefillWorker

    def send(self, message: object) -> None:
        pass

    def call(self, function: Callable[[PrefillWorker], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(self.worker))
        return done


@pytest.mark.parametrize("num_branches", [0, 2])
def test_a_caller_that_goes_away_ends_all_its_answers(num_branches):
    loop = Loop()
    context = SimpleNamespace(
        loop=loop,
        front=SimpleNamespace(require_ready=lambda: None),
        config=EngineConfig(model="m", role="prefill", block_size=128, max_num_seqs=2),
        plan=SimpleNamespace(layout=LAYOUT, num_blocks=12, num_slots=4, max_model_len=1000),
        model=SimpleNamespace(vocab_size=100, eos_token_ids=[1]),
    )
    request = PrefillRequest(
        request_id="a",
        prompt_token_ids=[5] * 300,
        sampling=SamplingParams(max_tokens=1),
        branches=[PrefillBranch(request_id=f"a.{n}", seed=n) for n in range(num_branches)],
    )
    messages = iter(({"type": "http.request", "body": encode(request)}, {"type": "http.disconnect"}))

    async def receive() -> Any:
        return next(messages)

    async def go_away() -> None:
        routes = {route.path: route for route in _build(context)}  # type: ignore[arg-type]
        scope = {"type": "http", "method": "POST", "path": "/prefill", "headers": []}
        async with asyncio.timeout(5):
            await routes["/prefill"].endpoint(Request(scope, receive))

    asyncio.run(go_away())
    assert loop.worker.is_idle
    assert loop.worker.stats().held_blocks == 0
