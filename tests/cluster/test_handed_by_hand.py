"""Variants of PD-03, 04, 08 and 11 that ask for a role's absence, another size, a late load or a link that is cut.

The roles are started by hand: no supervisor brings anything back before the test does.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.long  # each module of its own roles takes 10 s to start
HERE = Path(__file__).parent


def _module(name: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


faults = _module("faults")
hand = _module("hand")

LONG = 701  # tokens of a prompt: six chunks, five pushes before the last
GOLDEN = {length: faults.GOLDEN[f"gen_{length}"].tolist() for length in (5, 129, 300, LONG)}
STREAMING = pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])


def ask(length: int, *, stream: bool, name: str = "") -> Any:
    """Return a function of a client to the answer to a golden prompt."""
    return lambda client: faults.ask(client, faults.golden_ask(length, 10).body(stream=stream), name=name)


def client_of(roles: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=roles.url, timeout=faults.ANSWER_WITHIN_S)


def judge(answer: Any, length: int, *, struck_at: float = 0.0, within_s: float = 0.0) -> str:
    """Like faults.judge; an error may take `within_s`, as the case says."""
    kind = faults.judge(answer, GOLDEN[length], struck_at=max(struck_at, answer.ended_at - 1))
    assert kind == "complete" or answer.ended_at - struck_at < within_s, answer
    return str(kind)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, oracle_model: Path, free_ports: Any) -> Iterator[Any]:
    """One worker of each role, reached by the router over a link."""
    roles = hand.Hand(tmp_path_factory.mktemp("pair"), oracle_model, free_ports, links=("prefill-0", "decode-0"))
    try:
        roles.begin_all()
        roles.site = faults.Site(roles)
        yield roles
    finally:
        roles.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, oracle_model: Path, free_ports: Any) -> Iterator[Any]:
    """Two workers of each role; the router reaches some over links."""
    links = ("prefill-1", "decode-0", "decode-1")
    folder = tmp_path_factory.mktemp("four")
    roles = hand.Hand(folder, oracle_model, free_ports, prefill=2, decode=2, links=links)
    try:
        roles.begin_all()
        roles.site = faults.Site(roles)
        yield roles
    finally:
        roles.close()


@pytest.fixture(autouse=True)
def undisturbed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test ends with every role alive, every pair ready, and nothing held anywhere."""
    yield
    for fixture in {"pair", "four"} & set(request.fixturenames):
        roles = request.getfixturevalue(fixture)
        for name in roles.ports:
            if roles.processes[name].poll() is not None:
                roles.begin(name)
        for link in roles.links.values():
            link.mend()
        release_all(roles)
        roles.await_true(roles.all_pairs_ready, timeout_s=60)
        roles.site.await_idle()


def release_all(roles: Any) -> None:
    for name in roles.ports:
        if name != "router" and roles.answers(name):
            httpx.post(f"{roles.address(name)}/seams/release").raise_for_status()


# ---------------------------------------------------------------- PD-03: only_one_prefill


@STREAMING
def test_pd03_without_a_prefill_worker_new_requests_are_refused_and_running_ones_finish(
    pair: Any, stream: bool
) -> None:
    async def run() -> None:
        name, decode = f"A-{time.monotonic_ns()}", pair.workers()["decode-0"]
        async with client_of(pair) as client:
            wanted = (await faults.ask(client, running.body())).token_ids
            pair.site.hold("kv_mid", name, n=3)
            held = asyncio.create_task(ask(LONG, stream=stream, name=name)(client))
            await pair.site.await_held("kv_mid", name)
            begun = [asyncio.Event() for _ in range(3)]
            beside = [
                asyncio.create_task(
                    faults.ask(client, running.body(stream=True), on_tokens=lambda ids, e=event: ids[1:] and e.set())
                )
                for event in begun
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            pair.kill("prefill-0")
            struck_at = time.monotonic()
            later = [
                client.post("/v1/completions", json=faults.golden_ask(5, 10).body(stream=stream)) for _ in range(5)
            ]
            for reply in await asyncio.gather(*later):
                assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1, reply.text
            assert time.monotonic() - struck_at < 2
            for task in beside:
                assert faults.judge(await task, wanted, struck_at=struck_at) == "complete"
            assert judge(await held, LONG, struck_at=struck_at, within_s=10) == "error"
            assert (await client.get("/ready")).status_code == 503
            info = httpx.get(f"{decode['url']}/info").json()
            assert (info["state"], info["generation"]) == ("ready", decode["generation"])
            await asyncio.to_thread(pair.await_true, lambda: is_empty(decode), timeout_s=10)

    running = faults.golden_ask(64, 150)
    asyncio.run(run())


def is_empty(worker: dict[str, Any]) -> bool:
    stats = httpx.get(f"{worker['url']}/info").json()["stats"]
    return not any(stats[name] for name in faults.IDLE_GAUGES)


# ---------------------------------------------------------------- PD-04: another size, twice within 2 s


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice_within_2s"])
def test_pd04_worker_that_comes_back_with_another_pool_serves_at_once(four: Any, role: str, times: int) -> None:
    async def run() -> None:
        name, old = f"{role}-1", four.workers()[f"{role}-1"]
        await serves_over_all_pairs(four, 20)
        held = f"held-{time.monotonic_ns()}"
        four.site.hold("kv_mid", held, n=2)
        async with client_of(four) as client:
            asked = asyncio.create_task(ask(LONG, stream=True, name=held)(client))
            await four.site.await_held("kv_mid", held)
            struck_at = time.monotonic()
            four.kill(name)
            for n in range(times):
                if n:
                    await asyncio.to_thread(four.await_true, lambda: four.answers(name), timeout_s=2)
                    four.kill(name)
                    assert time.monotonic() - struck_at < 2, "the machine is too slow for this test"
                four.begin(name, f"--num-blocks={old['limits']['num_blocks'] // 2 + n}")
            release_all(four)
            judge(await asked, LONG, struck_at=struck_at, within_s=10)
        await serves_over_all_pairs(four, 40)
        new = four.workers()[name]
        assert new["generation"] != old["generation"]
        assert new["limits"]["num_blocks"] == old["limits"]["num_blocks"] // 2 + times - 1
        four.kill(name)  # and back to the size that the others know

    asyncio.run(run())


async def serves_over_all_pairs(roles: Any, count: int) -> None:
    """Requests, eight at a time, as soon as all pairs are ready; every worker must have had a part in them."""
    await asyncio.to_thread(roles.await_true, roles.all_pairs_ready, timeout_s=60)
    before = outputs_of(roles)
    limit = asyncio.Semaphore(8)
    async with client_of(roles) as client:

        async def one(number: int) -> None:
            length = (129, 300, 5)[number % 3]
            async with limit:
                assert judge(await ask(length, stream=number % 2 == 0)(client), length) == "complete"

        await asyncio.gather(*(one(number) for number in range(count)))
    after = outputs_of(roles)
    assert [name for name in before if after[name] <= before[name]] == []


def outputs_of(roles: Any) -> dict[str, int]:
    names = [name for name in roles.ports if name != "router"]
    return {name: httpx.get(f"{roles.address(name)}/info").json()["stats"]["output_tokens"] for name in names}


# ---------------------------------------------------------------- PD-08: registered_before_loaded


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_pd08_worker_that_still_loads_gets_nothing_while_another_serves(four: Any, role: str) -> None:
    async def run() -> None:
        name = f"{role}-1"
        rank, link = await loads_for_ever(four, name), four.links[name]
        try:
            async with client_of(four) as client:
                answers = await asyncio.gather(*(ask(129, stream=n % 2 == 0)(client) for n in range(20)))
            assert [judge(answer, 129) for answer in answers] == ["complete"] * 20
            assert four.workers()[name]["state"] != "ready"
            assert [head for head in link.requests if head.startswith("POST")] == []
        finally:
            rank.resume()
        await serves_over_all_pairs(four, 40)

    asyncio.run(run())


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_pd08_while_the_only_worker_loads_requests_are_refused_in_time(pair: Any, role: str) -> None:
    async def run() -> None:
        name = f"{role}-0"
        rank, link = await loads_for_ever(pair, name), pair.links[name]
        try:
            async with client_of(pair) as client:
                begun = time.monotonic()
                bodies = [faults.golden_ask(129, 10).body(stream=n % 2 == 0) for n in range(20)]
                replies = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
                assert time.monotonic() - begun < 2
                assert (await client.get("/ready")).status_code == 503
                assert (await client.get("/live")).status_code == 200
            assert {reply.status_code for reply in replies} == {503}
            assert all(int(reply.headers["retry-after"]) >= 1 for reply in replies)
            assert [head for head in link.requests if head.startswith("POST")] == []
        finally:
            rank.resume()
        await asyncio.to_thread(pair.await_true, pair.is_ready, timeout_s=60)
        async with client_of(pair) as client:
            assert judge(await ask(129, stream=True)(client), 129) == "complete"

    asyncio.run(run())


async def loads_for_ever(roles: Any, name: str) -> Any:
    """Start a worker again whose rank stands still before it is loaded; return it when the router knows the worker."""
    old = roles.workers()[name]["generation"]
    roles.kill(name)
    roles.begin(name)
    rank = await asyncio.to_thread(roles.rank_of, name)
    rank.suspend()
    await asyncio.to_thread(roles.await_true, lambda: is_known(roles, name, old), timeout_s=20)
    roles.links[name].requests.clear()
    return rank


def is_known(roles: Any, name: str, old: int) -> bool:
    worker = roles.workers().get(name)
    return worker is not None and worker["generation"] not in (0, old)


# ---------------------------------------------------------------- PD-11: router_to_worker_link_cut


@STREAMING
def test_pd11_link_that_is_cut_and_whole_again_costs_the_client_nothing(pair: Any, stream: bool) -> None:
    async def run() -> None:
        retries = retries_of(pair)
        async with client_of(pair) as client:
            asked, worker = await held_in_decode(pair, client, stream)
            pair.links["decode-0"].cut()
            release_all(pair)
            assert judge(await asked, LONG) == "complete"
        assert pair.workers()["decode-0"]["generation"] == worker["generation"]
        assert retries_of(pair) == retries

    asyncio.run(run())


def retries_of(roles: Any) -> list[str]:
    lines = httpx.get(f"{roles.url}/metrics").text.splitlines()
    return [line for line in lines if line.startswith("isthmus_retries_total")]


@STREAMING
@pytest.mark.parametrize("how", ["refuse", "mute"])
def test_pd11_link_that_stays_cut_is_a_clear_error_and_leaves_nothing_at_decode(
    pair: Any, how: str, stream: bool
) -> None:
    async def run() -> None:
        async with client_of(pair) as client:
            asked, worker = await held_in_decode(pair, client, stream)
            getattr(pair.links["decode-0"], how)()
            struck_at = time.monotonic()
            assert judge(await asked, LONG, struck_at=struck_at, within_s=10) == "error"
            if how == "refuse":  # decode learns by itself that its router is gone, while the request is still held
                await asyncio.to_thread(pair.await_true, lambda: is_empty(worker), timeout_s=10)
            pair.links["decode-0"].mend()
            await asyncio.to_thread(pair.await_true, pair.is_ready, timeout_s=20)
            assert judge(await ask(300, stream=stream)(client), 300) == "complete"
            await asyncio.to_thread(pair.await_true, lambda: is_empty(worker), timeout_s=10)
        assert pair.workers()["decode-0"]["generation"] == worker["generation"]

    asyncio.run(run())


@STREAMING
@pytest.mark.parametrize("how", ["refuse", "mute"])
def test_pd11_stream_goes_on_elsewhere_when_the_link_stays_cut(four: Any, how: str, stream: bool) -> None:
    async def run() -> None:
        async with client_of(four) as client:
            asked, worker = await held_in_decode(four, client, stream)
            struck_at = time.monotonic()
            getattr(four.links[worker["id"]], how)()
            assert judge(await asked, LONG) == "complete"
            assert time.monotonic() - struck_at < 10

    asyncio.run(run())


def test_pd11_prefill_worker_that_was_cut_off_ends_and_serves_when_it_is_started_again(pair: Any) -> None:
    """A port that refuses counts as a death: decode has given the landing's blocks to others."""

    async def run() -> None:
        name = f"cut-off-{time.monotonic_ns()}"
        async with client_of(pair) as client:
            pair.site.hold("kv_mid", name, n=2)
            asked = asyncio.create_task(ask(LONG, stream=True, name=name)(client))
            await pair.site.await_held("kv_mid", name)
            pair.links["prefill-0"].refuse()
            struck_at = time.monotonic()
            assert judge(await asked, LONG, struck_at=struck_at, within_s=10) == "error"
            pair.links["prefill-0"].mend()
            assert await asyncio.to_thread(pair.processes["prefill-0"].wait, 20) == 0
            pair.begin("prefill-0")
            await asyncio.to_thread(pair.await_true, pair.is_ready, timeout_s=60)
            assert judge(await ask(LONG, stream=True)(client), LONG) == "complete"

    asyncio.run(run())


async def held_in_decode(roles: Any, client: httpx.AsyncClient, stream: bool) -> tuple[Any, dict[str, Any]]:
    """Send a request and hold it after its seventh decoded token; return its task and the decode worker."""
    name = f"link-{time.monotonic_ns()}"
    roles.site.hold("decode_step", name, n=7)
    asked = asyncio.create_task(ask(LONG, stream=stream, name=name)(client))
    await roles.site.await_held("decode_step", name)
    for worker in roles.workers().values():
        if any(name in what for what in httpx.get(f"{worker['url']}/seams").json()):
            return asked, worker
    raise AssertionError(f"{name} is held nowhere")
