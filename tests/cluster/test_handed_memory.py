"""Handed cases on memory and books: PD-06 (no prefix hits), SM-01, SM-04 on a pair in one thread, SM-05 on a cluster.

What SM-01 asks of captured graphs has no counterpart on the CPU. Nobody is ever preempted as SM-04 has it: a request is
admitted with the promise of all blocks that it can come to need, so one that runs never lacks one.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import NoCapacity
from engine.memory_plan import PlanError, plan_memory
from engine.model.config import load_config
from engine.seams import Fault
from router.protocol import AbortRequest

HERE = Path(__file__).parent
TINY = HERE.parent / "oracle" / "tiny"
TOLERANCE = 1e-4
BLOCK = 128


def _module(file, name):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


pair_module = _module("pair.py", "cluster_pair")
faults = _module("faults.py", "faults")
hand = _module("hand.py", "hand")

STREAMING = pytest.mark.parametrize(
    "stream", [True, pytest.param(False, marks=pytest.mark.long)], ids=["streaming", "whole"]
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_pair(folder=TINY, **options):
    pair = pair_module.Pair(folder, **{"block_size": BLOCK, "chunk": BLOCK, **options})
    pair.prefill.poison()
    pair.decode.poison()
    return pair


@pytest.fixture(scope="module")
def colocated():
    return pair_module.Colocated(make_pair().prefill.config)


def prompt_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(2, 384) for _ in range(length)]


# ---------------------------------------------------------------- PD-06


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    """The tiny model with room for 32 blocks and an answer."""
    folder = tmp_path_factory.mktemp("long")
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    (folder / "model.safetensors").symlink_to(TINY / "model.safetensors")
    return folder


def around_block_borders(pair, lengths):
    """At a multiple of B the first decoded token opens a block that no block of prefill corresponds to."""
    colocated, layout = pair_module.Colocated(pair.prefill.config), pair.decode.plan.layout
    for length in lengths:
        before = pair.prefill.worker.stats().transfer_bytes
        tokens, logits = pair.generate(prompt_of(length, length), 12)
        wanted_tokens, wanted = colocated.generate(prompt_of(length, length), 12)
        assert tokens == wanted_tokens, length
        assert pair_module.distance(logits, wanted) < TOLERANCE, length
        moved = pair.prefill.worker.stats().transfer_bytes - before
        assert moved == layout.num_blocks_for(length) * layout.block_bytes + layout.slot_bytes, length
        assert pair.is_all_free()


def test_pd_06_lengths_around_block_borders():
    borders = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)
    around_block_borders(make_pair(chunk=BLOCK), borders)


@pytest.mark.long
def test_pd_06_thirty_two_blocks(long_model):
    pair = make_pair(long_model, decode_blocks=40, prefill_blocks=36, chunk=512)
    around_block_borders(pair, (32 * BLOCK - 1, 32 * BLOCK, 32 * BLOCK + 1))


# ---------------------------------------------------------------- SM-01

SAMPLINGS = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_k": 5, "seed": 4},
    {"temperature": 0.7, "top_p": 0.8, "seed": 5, "frequency_penalty": 0.5},
    {"logit_bias": {7: 4.0}, "min_tokens": 3},
]


def send_all(pair, asks):
    """Send every (name, prompt, max_tokens, sampling) as room comes, as a router would, and run them to their ends.

    Yields after every step; the list it yields is of the requests sent so far.
    """
    waiting, reserved, sent = list(asks), [], []
    while waiting or reserved or not all(request.is_over for request in sent):
        try:
            while waiting:
                name, prompt, max_tokens, sampling = waiting[0]
                reserved.append(pair.reserve(name, prompt, max_tokens, **sampling))
                del waiting[0]
        except NoCapacity:
            pass
        try:
            while reserved:
                pair.start(reserved[0])
                sent.append(reserved.pop(0))
        except NoCapacity:
            pass
        pair.step()
        yield sent
    pair.run_until(lambda: pair.prefill.worker.is_idle)


def assert_right(pair, request, colocated, sampling):
    tokens, logits = colocated.generate(request.prompt, request.params.max_tokens, **sampling)
    assert request.errors == []
    assert request.tokens == tokens, request.name
    assert pair_module.distance(pair.logits_of(request), logits) < TOLERANCE, request.name


def mixed(count, *, first=0, tokens=12):
    return [
        (f"m{n}", prompt_of(n, 20 + 17 * n % 190), tokens + n % 3, SAMPLINGS[n % len(SAMPLINGS)])
        for n in range(first, first + count)
    ]


def test_sm_01_one_more_than_the_largest_batch(colocated):
    """Nine at a batch of eight, and again with four more when four have ended: each gets what it gets alone."""
    pair = make_pair(max_num_seqs=8, decode_blocks=40)
    asks, most_running, has_waited = mixed(13, tokens=14), 0, False
    for _ in send_all(pair, asks):
        stats = pair.decode.worker.stats()
        most_running, has_waited = max(most_running, stats.num_running), has_waited or stats.num_waiting > 0
    assert (most_running, has_waited) == (8, True), "the ninth was to be admitted, and to wait for its place"
    for name, _, _, sampling in asks:
        assert_right(pair, pair.requests[name], colocated, sampling)
    assert pair.is_all_free()


def test_sm_01_with_no_landing_ahead_one_more_waits_at_the_router_until_one_has_ended(colocated):
    """A refusal for want of room is no failure: a router asks again. Blocks would do for both; slots are what ends."""
    pair = make_pair(max_num_seqs=3, landings_ahead=0, waiting_ahead=3, decode_blocks=40)
    asks, most_running = mixed(4, tokens=6), 0
    three = [pair.send(name, prompt, tokens, **sampling) for name, prompt, tokens, sampling in asks[:3]]
    with pytest.raises(NoCapacity, match="all 3 sequence slots are held"):
        pair.reserve("early", *asks[3][1:3], **asks[3][3])
    for _ in send_all(pair, asks[3:]):
        most_running = max(most_running, pair.decode.worker.stats().num_running)
    assert most_running == 3
    assert all(request.is_over for request in three)
    for name, _, _, sampling in asks:
        assert_right(pair, pair.requests[name], colocated, sampling)
    assert pair.is_all_free()


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_sm_01_batches_of_every_size(size, colocated):
    pair, asks = make_pair(max_num_seqs=8, decode_blocks=40), mixed(size, first=20, tokens=5)
    for _ in send_all(pair, asks):
        pass
    for name, _, _, sampling in asks:
        assert_right(pair, pair.requests[name], colocated, sampling)


def test_sm_01_batch_beyond_memory_is_refused_at_start_with_the_numbers():
    config = EngineConfig(
        model=str(TINY), role="decode", dtype="float32", kv_cache_dtype="fp32", max_num_seqs=4096, max_model_len=1024
    )
    with pytest.raises(PlanError, match=r"(?s)4,104 slots.*kv_cache_memory_gib 1\.0.*max_num_seqs"):
        plan_memory(config, load_config(config.model))


def test_sm_01_step_without_memory_delays_its_newest_request_alone(colocated):
    """At decode: memory fails in four steps, each time at another operation."""
    pair, asks = make_pair(max_num_seqs=8, decode_blocks=40), mixed(5, tokens=12)
    for n in range(4):
        fault = Fault(point="decode_step", request=asks[0][0], n=4 + n, action="exhaust", at=1 + 901 * n)
        pair.decode.worker.seams.arm(fault)
    for _ in send_all(pair, asks):
        pass
    assert pair.decode.worker.stats().steps_without_memory == 4
    for name, _, _, sampling in asks:
        assert_right(pair, pair.requests[name], colocated, sampling)
    assert pair.is_all_free()


def test_sm_01_chunk_without_memory_delays_the_newest_prompt(colocated):
    """At prefill: a step has the rest of one prompt and the beginning of the next."""
    pair = make_pair()
    pair.prefill.worker.seams.arm(Fault(point="prefill_mid", request="first", action="exhaust", at=2000))
    asks = [("first", prompt_of(1, 200), 3, {}), ("second", prompt_of(2, 170), 3, {})]
    for _ in send_all(pair, asks):
        pass
    assert pair.prefill.worker.stats().steps_without_memory == 1
    assert pair.prefill.worker.stats().prompt_tokens == 370
    for name, *_ in asks:
        assert_right(pair, pair.requests[name], colocated, {})


def test_sm_01_request_that_does_not_fit_even_alone_fails_and_the_next_is_served(colocated):
    pair = make_pair()
    pair.decode.worker.seams.arm(Fault(point="decode_step", request="alone", n=2, action="exhaust", at=900))
    alone = pair.send("alone", prompt_of(1, 40), 9)
    pair.run_until(lambda: alone.is_over and pair.prefill.worker.is_idle)
    assert alone.tokens == colocated.generate(alone.prompt, 9)[0][:3]
    assert "out of memory for a step of 1 tokens" in alone.errors[0]
    assert pair.is_all_free()
    again = pair.send("again", prompt_of(1, 40), 9)
    pair.run_until(lambda: again.is_over and pair.prefill.worker.is_idle)
    assert_right(pair, again, colocated, {})


# ---------------------------------------------------------------- SM-04


def assert_promises_kept(pair):
    blocks = pair.decode.worker._blocks
    assert blocks.num_blocks - blocks.num_free + blocks.num_promised <= blocks.num_blocks
    assert blocks.available >= 0


def test_sm_04_growth_is_promised_before_a_request_is_taken(colocated):
    """Two that grow from one block to two in a pool of seven, then three of two blocks: only one has room at once."""
    pair = make_pair(decode_blocks=7, max_model_len=5 * BLOCK)
    grow = [(f"grow{n}", prompt_of(n, 110 + n), 40, {}) for n in range(2)]
    more = [(f"more{n}", prompt_of(10 + n, BLOCK + 20), 4, {}) for n in range(3)]
    is_refused = False
    for _ in send_all(pair, grow + more):
        assert_promises_kept(pair)
        is_refused = is_refused or pair.decode.worker.stats().free_blocks < 2
    assert is_refused, "the pool was never full: the test shows nothing"
    for name, _, _, sampling in grow + more:
        assert_right(pair, pair.requests[name], colocated, sampling)
    assert pair.is_all_free()


def test_sm_04_one_block_short_is_refused_whole_and_the_exact_fit_runs_to_its_end(colocated):
    pair = make_pair(decode_blocks=6, max_model_len=6 * BLOCK)
    first = pair.send("first", prompt_of(1, 3 * BLOCK - 1), 2)  # its last token is never fed, so it opens no block
    before = pair.decode.worker.stats()
    with pytest.raises(NoCapacity, match="1 promised"):
        pair.reserve("short", prompt_of(2, 3 * BLOCK), 2)
    assert pair.decode.worker.stats() == before
    exact = pair.send("exact", prompt_of(3, 2 * BLOCK - 5), 5 + 1 + 1)
    pair.run_until(lambda: first.is_over and exact.is_over and pair.prefill.worker.is_idle)
    for request in (first, exact):
        assert_right(pair, request, colocated, {})
    assert pair.is_all_free()


def test_sm_04_requests_that_leave_while_they_wait_leave_nothing(colocated):
    pair = make_pair(decode_blocks=12, max_num_seqs=1, max_model_len=6 * BLOCK)
    for n in range(20):
        running = pair.send(f"running{n}", prompt_of(n % 4, 60), 12)
        waiting = pair.send(f"waiting{n}", prompt_of(1, 60), 400)
        pair.run_until(lambda: pair.decode.worker.stats().num_waiting == 1)
        pair.decode.worker.abort(AbortRequest(request_id=waiting.name, drained=n % 2 == 0))
        pair.run_until(lambda r=running: r.is_over and pair.prefill.worker.is_idle)
        assert waiting.decoded == []
        assert pair.is_all_free()
        assert_right(pair, running, colocated, {})


@pytest.mark.parametrize("error", [NoCapacity("as the test says"), MemoryError()], ids=["no_slot", "no_memory"])
def test_sm_04_allocation_that_fails_is_a_refusal_and_holds_nothing(colocated, monkeypatch, error):
    pair = make_pair()
    slots = pair.decode.worker._slots

    def fail():
        raise error

    monkeypatch.setattr(slots, "take", fail)
    with pytest.raises(NoCapacity):
        pair.reserve("a", prompt_of(1, 300), 200)
    monkeypatch.undo()
    assert pair.is_all_free()
    again = pair.send("a", prompt_of(1, 300), 4)
    pair.run_until(lambda: again.is_over and pair.prefill.worker.is_idle)
    assert_right(pair, again, colocated, {})


# ---------------------------------------------------------------- with real processes; SM-05


@pytest.fixture(scope="module")
def site(start, oracle_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sm05")
    with start(folder, str(faults.write_config(folder, oracle_model))) as cluster:
        site = faults.Site(cluster)
        time.sleep(1.5)  # the router hears of the end of its own warm-up with the next heartbeat
        site.baseline = loads(metrics(site))
        yield site


def await_baseline(site):
    """Every load gauge is back within five seconds, without any new step."""
    deadline = time.monotonic() + 5
    while (now := loads(metrics(site))) != site.baseline:
        assert time.monotonic() < deadline, {k: (v, site.baseline[k]) for k, v in now.items() if site.baseline[k] != v}
        time.sleep(0.25)


def metrics(site):
    """Return value by series, router's own noise (created times, the process) apart."""
    text = httpx.get(f"{site.url}/metrics").text
    return {
        name: float(value)
        for line in text.splitlines()
        if not line.startswith("#")
        for name, value in [line.rsplit(" ", 1)]
    }


def loads(found):
    kinds = "num_running|num_waiting|held_blocks|quarantined_blocks|open_landings|queued_tokens|free_blocks|free_slots"
    pattern = re.compile(rf"isthmus_(worker_({kinds})\{{|num_requests_)")
    return {name: value for name, value in found.items() if pattern.match(name)}


def grown(before, after, name):
    return after.get(name, 0.0) - before.get(name, 0.0)


def body(seed, max_tokens, **more):
    limits = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "oracle-tiny", "prompt": prompt_of(seed, 40), **limits, **more}


async def leave_after(client, fields, *, num_tokens):
    """Read a stream until it has shown so many tokens, then close the connection."""
    async with client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as reply:
        seen = 0
        async for line in reply.aiter_lines():
            seen += line.startswith("data: ")
            if seen >= num_tokens:
                return


@STREAMING
def test_sm_01_memory_that_fails_in_a_rank_delays_its_newest_request(site, stream):
    """Three requests decode at once; each gets what it gets alone, and no process has ended."""
    decode, pids = site.workers()["decode-0"], [site.pids(role) for role in ("prefill", "decode")]
    before = httpx.get(f"{decode['url']}/info").json()["stats"]["steps_without_memory"]

    async def run():
        async with httpx.AsyncClient(base_url=site.url, timeout=60) as client:
            wanted = [(await faults.ask(client, body(n, 30))).token_ids for n in range(3)]
            fault = {"point": "decode_step", "request": f"oldest-{stream}", "n": 12, "action": "exhaust", "at": 1500}
            httpx.post(f"{decode['url']}/seams", json=fault).raise_for_status()
            names = [f"oldest-{stream}", "middle", "newest"]
            asked = [faults.ask(client, body(n, 30, stream=stream), name=name) for n, name in enumerate(names)]
            for answer, expected in zip(await asyncio.gather(*asked), wanted, strict=True):
                assert faults.judge(answer, expected, struck_at=0.0) == "complete"

    asyncio.run(run())
    site.await_idle()
    assert httpx.get(f"{decode['url']}/info").json()["stats"]["steps_without_memory"] == before + 1
    assert [site.pids(role) for role in ("prefill", "decode")] == pids


@STREAMING
def test_sm_01_request_for_which_a_rank_has_no_memory_fails_alone(site, stream):
    decode = site.workers()["decode-0"]
    fault = {"point": "decode_step", "request": f"alone-{stream}", "n": 5, "action": "exhaust", "at": 700}
    httpx.post(f"{decode['url']}/seams", json=fault).raise_for_status()

    async def run():
        async with httpx.AsyncClient(base_url=site.url, timeout=60) as client:
            wanted = (await faults.ask(client, body(1, 20))).token_ids
            answer = await faults.ask(client, body(1, 20, stream=stream), name=f"alone-{stream}")
            assert faults.judge(answer, wanted, struck_at=answer.asked_at) == "error"
            assert "out of memory" in answer.error["message"] and answer.status == (200 if stream else 502)
            assert (await faults.ask(client, body(1, 20))).token_ids == wanted

    asyncio.run(run())
    site.await_idle()
    assert site.workers()["decode-0"]["leader_pid"] == decode["leader_pid"]


@STREAMING
def test_sm_04_reservation_that_fails_for_want_of_memory_only_delays_its_request(site, stream):
    decode = site.workers()["decode-0"]
    name = f"unreserved-{stream}"
    for attempt in (1, 2):
        fault = {"point": "reserve", "request": f"{name}-{attempt}", "action": "fail"}
        httpx.post(f"{decode['url']}/seams", json=fault).raise_for_status()

    async def run():
        async with httpx.AsyncClient(base_url=site.url, timeout=60) as client:
            answer = await faults.ask(client, faults.golden_ask(300, 10).body(stream=stream), name=name)
            assert faults.judge(answer, faults.GOLDEN["gen_300"].tolist(), struck_at=0.0) == "complete"

    asyncio.run(run())
    assert len([what for what in httpx.get(f"{decode['url']}/seams").json() if name in what]) == 2
    site.await_idle()


@pytest.mark.long
def test_sm_04_memory_is_flat_after_twenty_rounds_of_aborts_while_blocks_are_short(
    tmp_path, oracle_model, free_ports, record_property
):
    """Twelve requests that need five of twenty blocks each: four run, the others wait, all leave at once."""
    roles = hand.Hand(tmp_path, oracle_model, free_ports)
    wanted = faults.golden_ask(129, 500)

    async def one_round(site, number):
        async with httpx.AsyncClient(base_url=roles.url, timeout=60) as client:
            asked = [
                asyncio.create_task(faults.ask(client, wanted.body(stream=n % 2 == 0), name=f"round-{number}-{n}"))
                for n in range(12)
            ]
            while site.gauges()["decode-0"]["free_blocks"] > 4 or site.gauges()["router"]["num_queued"] < 4:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.01 * (number % 7))
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.to_thread(site.await_idle)

    def resident():
        processes = [psutil.Process(process.pid) for process in roles.processes.values()]
        family = [p for process in processes for p in (process, *process.children())]
        return {p.pid: p.memory_info().rss for p in family}

    try:
        for name in roles.ports:
            roles.begin(name, *(["--num-blocks=20"] if name == "decode-0" else []))
        roles.await_true(roles.all_pairs_ready, timeout_s=90)
        site = faults.Site(roles)
        for number in range(2):
            asyncio.run(one_round(site, number))
        before = resident()
        for number in range(20):
            asyncio.run(one_round(site, number))
        growth = {pid: (size - before[pid]) / 1e6 for pid, size in resident().items()}
        record_property("growth_mb", growth)
        print(f"resident memory grew by {growth} MB")
        assert max(growth.values()) < 20 and len(growth) == 5
        answer = httpx.post(f"{roles.url}/v1/completions", json=faults.golden_ask(300, 10).body(), timeout=30).json()
        assert answer["choices"][0]["token_ids"] == faults.GOLDEN["gen_300"].tolist()
    finally:
        roles.close()


def test_sm_05_gauges_are_at_baseline_after_all_have_left_at_once(site):
    before = metrics(site)

    async def crowd():
        async with httpx.AsyncClient(base_url=site.url, timeout=60) as client:
            fields = [body(n, 200) for n in range(20)]
            started = [asyncio.create_task(leave_after(client, f, num_tokens=10**6)) for f in fields]
            while metrics(site)["isthmus_generation_tokens_total"] - before["isthmus_generation_tokens_total"] < 60:
                await asyncio.sleep(0.02)
            for task in started:
                task.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    asyncio.run(crowd())
    await_baseline(site)
    after = metrics(site)
    aborted = grown(before, after, 'isthmus_requests_total{outcome="aborted"}')
    finished = grown(before, after, 'isthmus_requests_total{outcome="length"}')
    assert aborted > 0 and aborted + finished == 20
    assert grown(before, after, "isthmus_client_disconnects_total") == aborted
    golden = faults.golden_ask(300, 10)
    reply = httpx.post(f"{site.url}/v1/completions", json=golden.body(), timeout=30).json()
    assert reply["choices"][0]["token_ids"] == faults.GOLDEN["gen_300"].tolist()


def test_sm_05_every_request_is_in_the_books_once(site):
    """40 that stop, 20 cut by length, 20 that leave, 10 refused, 10 failed by a fault at decode."""
    before, answers = metrics(site), {}

    async def run():
        limit = asyncio.Semaphore(6)
        async with httpx.AsyncClient(base_url=site.url, timeout=60) as client:

            async def one(kind, n):
                async with limit:
                    name, stream = f"{kind}-{n}.", {"stream": n % 2 == 0}
                    fields = {
                        "stop": body(n, 12, ignore_eos=False, forced_token_ids=[5] * (n % 7) + [1]),
                        "length": body(n, 3 + n % 4),
                        "left": body(n, 2000),
                        "bad": body(n, -1),
                        "failed": body(n, 20),
                    }[kind]
                    if kind == "left":
                        return await leave_after(client, fields, num_tokens=1 + n % 9)
                    if kind == "failed":
                        await asyncio.to_thread(site.hold, "decode_step", name, n=1 + n % 5, action="fail")
                    answers[kind, n] = await faults.ask(client, {**fields, **stream}, name=name)

            counts = {"stop": 40, "length": 20, "left": 20, "bad": 10, "failed": 10}
            work = [one(kind, n) for kind, count in counts.items() for n in range(count)]
            random.Random(5).shuffle(work)
            await asyncio.gather(*work)

    asyncio.run(run())
    await_baseline(site)
    after = metrics(site)
    outcomes = {
        kind: grown(before, after, f'isthmus_requests_total{{outcome="{kind}"}}')
        for kind in ("stop", "length", "aborted", "error", "rejected")
    }
    assert outcomes == {"stop": 40, "length": 20, "aborted": 20, "error": 10, "rejected": 10}
    assert grown(before, after, "isthmus_requests_received_total") == 100
    for (kind, _), answer in answers.items():
        assert (answer.finish_reason, answer.error is None) == {
            "stop": ("stop", True),
            "length": ("length", True),
            "bad": (None, False),
            "failed": (None, False),
        }[kind]
    assert grown(before, after, "isthmus_prompt_tokens_total") == 90 * 40
    # A failed answer that was not streamed had its tokens, which no client saw.
    shown = sum(len(answer.token_ids) for (kind, _), answer in answers.items() if kind != "failed")
    unseen = sum(1 + 1 + n % 5 for n in range(10)) + 20 * 2000
    assert shown <= grown(before, after, "isthmus_generation_tokens_total") <= shown + unseen


def test_sm_05_series_do_not_grow_with_ids_or_names(site):
    def ask(client, n, model):
        headers = {"x-request-id": f"id-{n}", "x-client": str(n)}
        return client.post("/v1/completions", json={**body(1, 1), "model": model}, headers=headers).status_code

    with httpx.Client(base_url=site.url, timeout=30) as client:
        assert (ask(client, 0, "oracle-tiny"), ask(client, 0, "nobody")) == (200, 404)
        before = set(metrics(site))
        statuses = [ask(client, n, f"name-{n % 50}" if n % 10 else "oracle-tiny") for n in range(1, 401)]
    assert statuses.count(200) == 40 and statuses.count(404) == 360
    assert set(metrics(site)) == before
