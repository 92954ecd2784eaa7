"""The handed cases PD-02, 03, 04, 08, 09 and 11 with real processes: two prefill and two decode workers over NIXL.

Their variants that need workers under other conditions (the only one, of another size, behind a link that can be cut)
are in test_handed_by_hand.py. What they ask of n, logprobs and tools comes with those features.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from router import protocol
from router.tokenizer import Tokenizer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def _module(name: str) -> Any:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


faults = _module("faults")

MODEL = "dsv4-tiny"
CHAT = "/v1/chat/completions"
PROMPT = tuple(range(1000, 1000 + 389))  # three blocks and five tokens: four chunks
SHORT = tuple(range(2000, 2040))
MOMENTS = {
    "router_queued": 0,
    "prefill_queued": 0,
    "prefill_mid": 1,
    "prefill_done_untold": 0,
    "kv_mid": 2,
    "kv_notified_before_first_token": 0,
    "decode_step": 5,
    "after_last_token": 0,
}
LEAVINGS = ("close", "reset", "half_close")


def long(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


def body(prompt: tuple[int, ...], max_tokens: int, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0} if "seed" not in more else {"temperature": 0.8}
    fixed = {"ignore_eos": True, "return_token_ids": True}
    return {"model": MODEL, "prompt": list(prompt), "max_tokens": max_tokens, **sampling, **fixed, **more}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, start: Any) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("handed")
    with start(folder, str(faults.write_config(folder, MODEL, prefill=2, decode=2))) as cluster:
        cluster.await_true(lambda: all_pairs_ready(cluster), timeout_s=60)
        yield faults.Site(cluster)


def all_pairs_ready(cluster: Any) -> bool:
    try:
        return all(pair["state"] == "ready" for pair in cluster.topology()["pairs"])
    except httpx.HTTPError:
        return False


def client_of(site: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=site.url, timeout=faults.ANSWER_WITHIN_S)


@pytest.fixture(scope="module")
def known(site: Any) -> dict[tuple[Any, ...], list[int]]:
    """Tokens of (prompt, max_tokens, seed) from an undisturbed cluster, the shorter greedy ones without transfer."""

    async def measure() -> dict[tuple[Any, ...], list[int]]:
        async with client_of(site) as client:
            found: dict[tuple[Any, ...], list[int]] = {}
            for prompt, count in ((PROMPT, 16), (SHORT, 10)):
                found[prompt, count, None] = await prefill_only(client, prompt, count)
            found[PROMPT, 16, 7] = (await faults.ask(client, body(PROMPT, 16, seed=7))).token_ids
            found[SHORT, 150, None] = (await faults.ask(client, body(SHORT, 150))).token_ids
        assert found[SHORT, 150, None][:10] == found[SHORT, 10, None]
        return found

    return asyncio.run(measure())


async def prefill_only(client: httpx.AsyncClient, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return `count` greedy tokens, each the only token of a request: prefill computes it, and no cache moves."""
    ids: list[int] = []
    for _ in range(count):
        ids += (await faults.ask(client, body((*prompt, *ids), 1))).token_ids
    return ids


@pytest.fixture(autouse=True)
def undisturbed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test begins, and ends, with all pairs ready and nothing held anywhere."""
    yield
    if "site" in request.fixturenames:
        site = request.getfixturevalue("site")
        release_all(site)
        site.cluster.await_true(lambda: all_pairs_ready(site.cluster), timeout_s=40)
        site.await_idle()


def release_all(site: Any) -> None:
    for url in (site.url, *(worker["url"] for worker in site.workers().values())):
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{url}/seams/release", timeout=2)


async def holder(site: Any, point: str, name: str) -> dict[str, Any]:
    """Wait until some worker holds the request, and return it; the others hold nothing any more, nor will they."""
    await site.await_held(point, name)
    held = {}
    for worker in site.workers().values():
        if any(what.startswith(point) and name in what for what in httpx.get(f"{worker['url']}/seams").json()):
            held = worker
        else:
            httpx.post(f"{worker['url']}/seams/release").raise_for_status()
    return dict(held)


# ---------------------------------------------------------------- PD-02


@pytest.mark.parametrize("repeat", [1, long(25)])
def test_pd02_client_that_leaves_at_any_moment_leaves_nothing_behind(site: Any, known: Any, repeat: int) -> None:
    async def run() -> None:
        pids = [worker["leader_pid"] for worker in site.workers().values()]
        async with client_of(site) as client:
            before = await faults.ask(client, body(PROMPT, 16))
            for number in range(repeat):
                neighbour = asyncio.create_task(faults.ask(client, body(SHORT, 150, stream=True), name="neighbour"))
                for index, moment in enumerate(MOMENTS):
                    await leave_at(site, moment, number + index)
                assert faults.judge(await neighbour, known[SHORT, 150, None], struck_at=0.0) == "complete"
                site.await_idle(timeout_s=5)
            canary = await faults.ask(client, body(PROMPT, 16))
            assert faults.judge(canary, known[PROMPT, 16, None], struck_at=0.0) == "complete"
            # as fast as before; a busy machine is no fault
            assert canary.ended_at - canary.asked_at < 3 * (before.ended_at - before.asked_at) + 1
        assert [worker["leader_pid"] for worker in site.workers().values()] == pids

    asyncio.run(run())


@pytest.mark.long
def test_pd02_sixteen_clients_leave_at_mixed_moments_at_once(site: Any, known: Any) -> None:
    async def run() -> None:
        async with client_of(site) as client:
            neighbour = asyncio.create_task(faults.ask(client, body(SHORT, 150, stream=True), name="neighbour"))
            moments = [moment for moment in MOMENTS if moment != "router_queued"]
            await asyncio.gather(*(leave_at(site, moments[n % len(moments)], n, held=False) for n in range(16)))
            assert faults.judge(await neighbour, known[SHORT, 150, None], struck_at=0.0) == "complete"
        site.await_idle(timeout_s=5)

    asyncio.run(run())


async def leave_at(site: Any, moment: str, index: int, *, held: bool = True) -> None:
    """Send a request over a socket of its own and leave it at the moment; nothing of it may be left in 5 s."""
    name = f"leaver-{index}-{time.monotonic_ns()}"
    stream, leaving = index % 2 == 0, LEAVINGS[index % 3]
    if moment != "after_last_token":
        site.hold(moment, name, n=MOMENTS[moment])
    reader, writer = await asyncio.open_connection("127.0.0.1", site.cluster.port)
    content = json.dumps(body(PROMPT, 16, stream=stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {name}\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    if moment == "after_last_token":
        await reader.readuntil(b"[DONE]" if stream else b'"finish_reason":"length"')
    else:
        await site.await_held(moment, name)
    if leaving == "half_close":
        writer.write_eof()
    elif leaving == "reset":
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()
    left = time.monotonic()
    if held:
        async with client_of(site) as client:
            while (await client.get("/topology")).json()["router"]["num_requests"] > 1:
                assert time.monotonic() - left < 5, f"{name} is still there, left at {moment} by {leaving}"
                await asyncio.sleep(0.02)
        release_all(site)
    writer.close()


# ---------------------------------------------------------------- PD-03


@pytest.mark.parametrize(
    ("number", "point"),
    [(signal.SIGKILL, "kv_mid"), long(signal.SIGSTOP, "kv_mid"), long(signal.SIGKILL, "prefill_queued")],
    ids=["kill", "freeze", "killed_before_any_block"],
)
def test_pd03_death_of_a_prefill_worker_concerns_its_own_requests_only(
    site: Any, known: Any, number: int, point: str
) -> None:
    async def run() -> None:
        name = f"A-{time.monotonic_ns()}"
        async with client_of(site) as client:
            site.hold(point, name, n=MOMENTS[point])
            held = asyncio.create_task(faults.ask(client, body(PROMPT, 16, stream=True), name=name))
            struck = await holder(site, point, name)
            begun = [asyncio.Event() for _ in range(3)]
            beside = [
                asyncio.create_task(
                    faults.ask(client, body(SHORT, 150, stream=True), on_tokens=lambda ids, e=event: ids and e.set())
                )
                for event in begun
            ]
            await asyncio.gather(*(event.wait() for event in begun))
            decodes = {w["id"]: w["generation"] for w in site.workers().values() if w["role"] == "decode"}
            with faults.struck([struck["leader_pid"]], number) as struck_at:
                later = [asyncio.create_task(faults.ask(client, body(SHORT, 10))) for _ in range(5)]
                answer = await held
                assert faults.judge(answer, known[PROMPT, 16, None], struck_at=struck_at) in ("complete", "error")
                assert answer.ended_at - struck_at < 10
                for task in beside:
                    assert faults.judge(await task, known[SHORT, 150, None], struck_at=struck_at) == "complete"
                for task in later:
                    assert faults.judge(await task, known[SHORT, 10, None], struck_at=struck_at) == "complete"
                assert site.cluster.is_ready()
                await gone(site, struck)
            assert {w["id"]: w["generation"] for w in site.workers().values() if w["role"] == "decode"} == decodes

    asyncio.run(run())


@pytest.mark.parametrize(
    ("point", "n", "stream"),
    [("kv_mid", 2, True), long("kv_mid", 1, False), long("kv_done_unnotified", 0, True)],
    ids=["mid_streaming", "first_whole", "last_streaming"],
)
def test_pd03_transfer_call_that_raises_is_made_good_by_another_pair(
    site: Any, known: Any, point: str, n: int, stream: bool
) -> None:
    async def run() -> None:
        name = f"raises-{time.monotonic_ns()}"
        failures = transfer_failures(site)
        site.hold(point, f"{name}-1", n=n, action="fail")
        async with client_of(site) as client:
            beside = asyncio.create_task(faults.ask(client, body(SHORT, 150, stream=True)))
            answer = await faults.ask(client, body(PROMPT, 16, stream=stream), name=name)
            assert faults.judge(answer, known[PROMPT, 16, None], struck_at=0.0) == "complete"
            assert faults.judge(await beside, known[SHORT, 150, None], struck_at=0.0) == "complete"
        await asyncio.to_thread(site.await_idle)
        assert transfer_failures(site) == failures + 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, long(False)], ids=["streaming", "whole"])
def test_pd03_transfer_call_that_always_raises_is_a_clear_error(site: Any, known: Any, stream: bool) -> None:
    async def run() -> None:
        name = f"always-{time.monotonic_ns()}"
        for attempt in range(1, 10):
            site.hold("kv_mid", f"{name}-{attempt}", n=1, action="fail")
        async with client_of(site) as client:
            answer = await faults.ask(client, body(PROMPT, 16, stream=stream), name=name)
        assert faults.judge(answer, known[PROMPT, 16, None], struck_at=answer.asked_at) == "error"
        assert answer.error["code"] == "transfer_failed" and answer.token_ids == []

    asyncio.run(run())


def transfer_failures(site: Any) -> int:
    prefills = [worker["url"] for worker in site.workers().values() if worker["role"] == "prefill"]
    return sum(httpx.get(f"{url}/info").json()["stats"]["transfer_failures"] for url in prefills)


async def gone(site: Any, worker: dict[str, Any], *, within_s: float = 40) -> None:
    """Return when the worker lives again, under another generation."""
    deadline = time.monotonic() + within_s
    while site.workers()[worker["id"]]["generation"] == worker["generation"]:
        assert time.monotonic() < deadline, f"{worker['id']} did not come back"
        await asyncio.sleep(0.1)


# ---------------------------------------------------------------- PD-04


@pytest.mark.parametrize(
    "roles",
    [long(("decode",)), long(("prefill",)), long(("decode", "prefill")), long(("decode", "decode"))],
    ids=["decode", "prefill_instead", "both_sides", "twice"],
)
def test_pd04_worker_that_comes_back_at_its_address_is_a_new_one(site: Any, known: Any, roles: tuple[str, ...]) -> None:
    async def run() -> None:
        for role in roles:
            worker = site.workers()[f"{role}-1"]
            os.kill(worker["leader_pid"], signal.SIGKILL)
            await gone(site, worker)
            assert site.workers()[f"{role}-1"]["url"] == worker["url"]
        await serves_over_all_pairs(site, known)

    asyncio.run(run())


@pytest.mark.long
def test_pd04_write_prepared_for_the_old_life_is_never_made_to_the_new_one(site: Any, known: Any) -> None:
    async def run() -> None:
        name = f"old-{time.monotonic_ns()}"
        async with client_of(site) as client:
            site.hold("kv_mid", name, n=2)
            held = asyncio.create_task(faults.ask(client, body(PROMPT, 16, stream=True), name=name))
            await holder(site, "kv_mid", name)
            await asyncio.to_thread(site.cluster.await_true, lambda: landing_at(site), timeout_s=5)
            (victim,) = landing_at(site)
            os.kill(victim["leader_pid"], signal.SIGKILL)
            answer = await held
            assert faults.judge(answer, known[PROMPT, 16, None], struck_at=time.monotonic()) == "complete"
            await gone(site, victim)
            site.cluster.await_true(lambda: all_pairs_ready(site.cluster), timeout_s=40)
            release_all(site)
        await serves_over_all_pairs(site, known)

    asyncio.run(run())


def landing_at(site: Any) -> list[dict[str, Any]]:
    """Return the decode workers that say that a landing is open; they say so once a second."""
    return [w for w in site.workers().values() if w["role"] == "decode" and w["stats"]["open_landings"]]


async def serves_over_all_pairs(site: Any, known: Any) -> None:
    """Forty requests, sixteen at a time; every worker must have had a part in it."""
    await asyncio.to_thread(site.cluster.await_true, lambda: all_pairs_ready(site.cluster), timeout_s=40)
    before = {worker["id"]: worker["stats"]["output_tokens"] for worker in site.workers().values()}
    limit = asyncio.Semaphore(16)
    async with client_of(site) as client:

        async def one() -> None:
            async with limit:
                answer = await faults.ask(client, body(SHORT, 10))
            assert faults.judge(answer, known[SHORT, 10, None], struck_at=0.0) == "complete"

        await asyncio.gather(*(one() for _ in range(40)))
    site.await_idle()
    after = {worker["id"]: worker["stats"]["output_tokens"] for worker in site.workers().values()}
    assert [worker for worker in before if after[worker] <= before[worker]] == []


# ---------------------------------------------------------------- PD-08


def test_pd08_router_is_ready_only_when_both_roles_have_served(
    tmp_path: Path, free_ports: Any, oracle_model: Path
) -> None:
    prefill, decode, port = free_ports(3)
    url, model = f"http://127.0.0.1:{port}", ["--model", str(oracle_model)]
    urls = ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
    roles = {
        "router": ["router", *model, *urls, "--port", str(port)],
        "prefill": ["prefill_worker", *model, "--dtype", "float32", "--kv-cache-dtype", "fp32", "--port", str(prefill)],
        "decode": ["decode_worker", *model, "--dtype", "float32", "--kv-cache-dtype", "fp32", "--port", str(decode)],
    }
    request = {"model": "oracle-tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    processes: list[subprocess.Popen[bytes]] = []

    def begin(role: str) -> None:
        with (tmp_path / f"{role}.log").open("wb") as log:
            command = [sys.executable, "-m", *roles[role]]
            processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))

    def refuses() -> None:
        begun = time.monotonic()
        reply = httpx.post(f"{url}/v1/completions", json=request, timeout=10)
        assert (reply.status_code, time.monotonic() - begun < 2) == (503, True), reply.text
        assert int(reply.headers["retry-after"]) >= 1
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/live").status_code == 200

    def answers(address: str, path: str) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(address + path).status_code == 200
        return False

    def await_true(is_true: Any) -> None:
        deadline = time.monotonic() + 60
        while not is_true():
            assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
            time.sleep(0.05)

    try:
        begin("router")
        await_true(lambda: answers(url, "/live"))
        refuses()
        begin("prefill")
        await_true(lambda: answers(f"http://127.0.0.1:{prefill}", "/info"))
        await_true(lambda: httpx.get(f"http://127.0.0.1:{prefill}/info").json()["state"] == "ready")
        refuses()
        begin("decode")
        await_true(lambda: answers(f"http://127.0.0.1:{decode}", "/info"))
        if httpx.get(f"{url}/ready").status_code == 503:
            refuses()
        await_true(lambda: answers(url, "/ready"))
        assert httpx.post(f"{url}/v1/completions", json=request, timeout=10).status_code == 200
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "part"),
    [(signal.SIGSTOP, "rank"), (signal.SIGKILL, "rank"), (signal.SIGKILL, "leader")],
    ids=["frozen_loop", "engine_dead_http_alive", "actor_restarted"],
)
def test_pd08_worker_that_can_not_serve_is_not_chosen_within_five_seconds(
    site: Any, known: Any, number: int, part: str
) -> None:
    async def run() -> None:
        worker = site.workers()["decode-0"]
        pid = worker["leader_pid"] if part == "leader" else worker["ranks"][0]["pid"]
        with faults.struck([pid], number) as struck_at:
            async with client_of(site) as client:
                while is_chosen(site, worker):
                    assert time.monotonic() - struck_at < 5
                    await asyncio.sleep(0.1)
                answers = await asyncio.gather(*(faults.ask(client, body(SHORT, 10)) for _ in range(4)))
            for answer in answers:
                assert faults.judge(answer, known[SHORT, 10, None], struck_at=struck_at) == "complete"
            await gone(site, worker)
        await serves_over_all_pairs(site, known)

    asyncio.run(run())


def is_chosen(site: Any, worker: dict[str, Any]) -> bool:
    """Whether this life of the worker is part of a ready pair."""
    pairs = [pair["state"] for pair in site.cluster.topology()["pairs"] if pair["decode"] == worker["id"]]
    return "ready" in pairs and site.workers()[worker["id"]]["generation"] == worker["generation"]


@pytest.mark.long
def test_pd08_busy_workers_are_not_taken_for_dead(site: Any, known: Any) -> None:
    async def run() -> None:
        before = {worker["id"]: worker["generation"] for worker in site.workers().values()}
        async with client_of(site) as client:
            load = faults.Load(client, [(Known(SHORT, 150), known[SHORT, 150, None])], num_clients=16)
            until = time.monotonic() + 20
            while time.monotonic() < until:
                assert (await client.get("/ready")).status_code == 200
                await asyncio.sleep(0.2)
            await load.finish()
        assert load.judge(struck_at=0.0, may_close=False)["complete"] == len(load.answers)
        assert {worker["id"]: worker["generation"] for worker in site.workers().values()} == before

    asyncio.run(run())


class Known:
    """A request for faults.Load."""

    def __init__(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        self._arguments = prompt, max_tokens

    def body(self, **more: Any) -> dict[str, Any]:
        return body(*self._arguments, **more)


# ---------------------------------------------------------------- PD-09

CHAT_BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "one two three four five six seven eight nine ten " * 38}],
    "max_tokens": 10,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stream_with_usage": {"stream": True, "stream_options": {"include_usage": True}},
    "max_completion_tokens": {"max_completion_tokens": 10, "max_tokens": None},
    "both_limits": {"max_completion_tokens": 10},
    "min_tokens": {"min_tokens": 5},
    "seed_and_temperature": {"temperature": 0.8, "seed": 11},
}


@pytest.fixture(scope="module")
def tapped(site: Any) -> Any:
    """A function of a request's name and body to its answer, the prompt, its prefill legs, and what decode computed."""

    async def ask(name: str, request: dict[str, Any], path: str) -> tuple[Any, list[int], list[Any], dict[str, int]]:
        before = decode_counters(site)
        async with client_of(site) as client:
            reply = await client.post(path, json=request, headers={"x-request-id": name})
        assert reply.status_code == 200, reply.text
        legs = [
            leg for leg in httpx.get(f"{site.url}/seams/prefill_legs").json() if name in leg["request"]["request_id"]
        ]
        site.await_idle()
        after = decode_counters(site)
        results = [msgspec.convert(leg["result"], protocol.PrefillResult) for leg in legs]
        return reply, legs[0]["request"]["prompt_token_ids"], results, {k: after[k] - before[k] for k in before}

    return lambda name, request, path=CHAT: asyncio.run(ask(name, request, path))


def decode_counters(site: Any) -> dict[str, int]:
    decodes = [worker for worker in site.workers().values() if worker["role"] == "decode"]
    seen = [httpx.get(f"{worker['url']}/info").json()["stats"] for worker in decodes]
    return {name: sum(stats[name] for stats in seen) for name in ("prompt_tokens", "output_tokens")}


def ids_of(reply: httpx.Response) -> list[int]:
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return list(reply.json()["choices"][0]["token_ids"])
    answer = faults.Answer()
    for line in reply.text.splitlines():
        if line.startswith("data: "):
            answer.take_event(line.removeprefix("data: "))
    assert answer.is_done and answer.finish_reason == "length"
    return list(answer.token_ids)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pd09_options_of_the_client_leave_the_split_as_it_is(site: Any, tapped: Any, variant: str) -> None:
    request = {name: value for name, value in (CHAT_BODY | VARIANTS[variant]).items() if value is not None}
    reply, prompt, legs, computed = tapped(f"leg-{variant}", request)
    ids = ids_of(reply)
    assert len(prompt) > 3 * 128 and len(ids) == 10
    assert len(legs) == 1
    assert (legs[0].token_id, legs[0].handed_over) == (ids[0], True)
    assert computed == {"prompt_tokens": 0, "output_tokens": 9}

    async def without_transfer() -> list[int]:
        async with client_of(site) as client:
            if "seed" not in request:
                return await prefill_only(client, tuple(prompt), 10)
            seeded = body(tuple(prompt), 10, seed=11)
            return list((await faults.ask(client, seeded)).token_ids)

    assert ids == asyncio.run(without_transfer())


@pytest.fixture(scope="module")
def letters(site: Any) -> dict[str, int]:
    """Token ids of a few letters, and of the end of sequence."""
    folder = Path(httpx.get(f"{next(iter(site.workers().values()))['url']}/info").json()["model"])
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    eos = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return {letter: tokenizer.encode(letter)[-1] for letter in "abc"} | {"eos": eos}


def test_pd09_stop_string_in_the_first_token_ends_the_answer(tapped: Any, letters: dict[str, int]) -> None:
    forced = [letters["a"], letters["b"]]
    reply, _, legs, computed = tapped("leg-stop", CHAT_BODY | {"stop": ["a"], "forced_token_ids": forced})
    (choice,) = reply.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert len(legs) == 1 and computed["prompt_tokens"] == 0


def test_pd09_ignored_end_of_sequence_in_the_first_token_goes_on(tapped: Any, letters: dict[str, int]) -> None:
    forced = [letters[name] for name in ("eos", "b", "c")]
    reply, _, legs, computed = tapped("leg-eos", CHAT_BODY | {"max_tokens": 3, "forced_token_ids": forced})
    (choice,) = reply.json()["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (forced, "length")
    assert legs[0].handed_over and computed == {"prompt_tokens": 0, "output_tokens": 2}


def test_pd09_first_token_that_ends_the_answer_moves_nothing_to_decode(tapped: Any, letters: dict[str, int]) -> None:
    request = CHAT_BODY | {"ignore_eos": False, "forced_token_ids": [letters["eos"]]}
    reply, _, legs, computed = tapped("leg-end", request)
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    assert legs[0].finish_reason == "stop" and computed == {"prompt_tokens": 0, "output_tokens": 0}


def test_pd09_completions_are_split_in_the_same_way(tapped: Any, known: Any) -> None:
    reply, prompt, legs, computed = tapped("leg-text", body(PROMPT, 16), "/v1/completions")
    assert (prompt, ids_of(reply)) == (list(PROMPT), known[PROMPT, 16, None])
    assert len(legs) == 1 and computed == {"prompt_tokens": 0, "output_tokens": 15}


# ---------------------------------------------------------------- PD-11


@pytest.mark.parametrize(
    ("point", "stream", "seed"),
    [
        long("decode_step", True, 7),  # with one pair only, it is in the fault matrix of every run
        long("decode_step", False, None),
        long("kv_notified_before_first_token", True, None),
        long("kv_notified_before_first_token", False, 7),
    ],
    ids=["killed_mid_stream", "non_stream_killed", "killed_before_first_token", "non_stream_before_first_token"],
)
def test_pd11_stream_goes_on_elsewhere_when_decode_dies(
    site: Any, known: Any, point: str, stream: bool, seed: int | None
) -> None:
    async def run() -> None:
        name = f"dies-{time.monotonic_ns()}"
        async with client_of(site) as client:
            site.hold(point, name, n=7 if point == "decode_step" else 0)
            more = {} if seed is None else {"seed": seed}
            asked = asyncio.create_task(faults.ask(client, body(PROMPT, 16, stream=stream, **more), name=name))
            worker = await holder(site, point, name)
            os.kill(worker["ranks"][0]["pid"], signal.SIGKILL)
            answer = await asked
            assert faults.judge(answer, known[PROMPT, 16, seed], struck_at=0.0) == "complete"
            await gone(site, worker)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
def test_pd11_failed_step_is_an_error_of_its_request_alone(site: Any, known: Any, stream: bool) -> None:
    async def run() -> None:
        name = f"fails-{time.monotonic_ns()}"
        async with client_of(site) as client:
            neighbour = asyncio.create_task(faults.ask(client, body(SHORT, 150, stream=True)))
            site.hold("decode_step", name, n=7, action="fail")
            answer = await faults.ask(client, body(PROMPT, 16, stream=stream), name=name)
            assert faults.judge(answer, known[PROMPT, 16, None], struck_at=time.monotonic()) == "error"
            assert "decode failed" in answer.error["message"]
            assert answer.status == (200 if stream else 502)
            assert faults.judge(await neighbour, known[SHORT, 150, None], struck_at=0.0) == "complete"

    asyncio.run(run())
