"""The life of a request: queue, reservation, prefill, decode, retries, cancellation, faults of workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
import threading

import httpx
import pytest

PROMPT = [5, 6, 7]


def body(**fields):
    given = {"model": "dsv4-tiny", "prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    return given | fields


def expected(next_tokens, prompt=PROMPT, count=6):
    out: list[int] = []
    while len(out) < count:
        out.append(next_tokens(prompt + out))
    return out


def token_ids(answer) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def events(text: str) -> list[str]:
    return [e.removeprefix("data: ") for e in text.split("\n\n") if e]


@contextlib.contextmanager
def in_background(cluster, fields):
    """A request that runs while the test goes on; yields its future."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        yield pool.submit(cluster.post, "/v1/completions", fields)


@contextlib.contextmanager
def raw_client(cluster, fields, path="/v1/completions"):
    """A client on a bare socket, which can leave when it likes."""
    data = json.dumps(fields).encode()
    with socket.create_connection(("127.0.0.1", cluster.port)) as client:
        client.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        yield client


# ---------------------------------------------------------------- the good life


def test_tokens_of_prefill_and_decode_are_joined_in_order(cluster, next_tokens):
    answer = cluster.post("/v1/completions", body())
    assert token_ids(answer) == expected(next_tokens)
    assert answer.json()["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_stream_carries_the_same_tokens_and_the_prompt_once(cluster, next_tokens):
    chunks = [json.loads(e) for e in events(cluster.post("/v1/completions", body(stream=True)).text)[:-1]]
    assert [t for c in chunks for t in c["choices"][0]["token_ids"]] == expected(next_tokens)
    assert [c["choices"][0].get("prompt_token_ids") for c in chunks] == [PROMPT] + [None] * (len(chunks) - 1)


def test_one_token_needs_no_reservation(cluster, next_tokens):
    reserves = len([c for c in cluster.decodes[0].calls if c[0] == "/reserve"])
    assert token_ids(cluster.post("/v1/completions", body(max_tokens=1))) == expected(next_tokens, count=1)
    assert len([c for c in cluster.decodes[0].calls if c[0] == "/reserve"]) == reserves


def test_many_requests_at_once_get_their_own_answers(cluster, next_tokens):
    prompts = [[n + 1, 2 * n + 1, 7] for n in range(40)]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        bodies = [body(prompt=p, stream=n % 2 == 0) for n, p in enumerate(prompts)]
        answers = list(pool.map(lambda fields: cluster.post("/v1/completions", fields), bodies))
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if n % 2:
            ids = token_ids(answer)
        else:
            ids = [t for e in events(answer.text)[:-1] for t in json.loads(e)["choices"][0]["token_ids"]]
        assert ids == expected(next_tokens, prompt)


def test_sampling_reaches_both_workers_unchanged(cluster):
    fields = body(temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=7, logit_bias={"9": 3}, min_tokens=2)
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "stop_token_ids": [9]}
    cluster.post("/v1/completions", fields)
    sent = cluster.prefill_log[-1].sampling
    reserved = [m for path, m in cluster.decodes[0].calls if path == "/reserve"][-1].sampling
    assert sent == reserved
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "repetition_penalty"):
        assert getattr(sent, name) == fields[name]
    assert (sent.logit_bias, sent.stop_token_ids, sent.ignore_eos) == ({9: 3.0}, (9,), True)


def test_a_seed_is_drawn_if_none_is_given(cluster):
    for _ in range(2):
        cluster.post("/v1/completions", body(temperature=1))
    seeds = [r.sampling.seed for r in cluster.prefill_log[-2:]]
    assert seeds[0] != seeds[1]


# ---------------------------------------------------------------- the queue


def test_requests_wait_in_order_for_room_and_the_queue_is_bounded(make_cluster, next_tokens):
    with make_cluster(capacity=1, max_queue=2) as cluster:
        steps = cluster.hold("step_gate")
        dispatcher = cluster.router.dispatcher
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            futures = [pool.submit(cluster.post, "/v1/completions", body())]
            cluster.wait(lambda: steps.reached)
            for n in (1, 2):
                futures.append(pool.submit(cluster.post, "/v1/completions", body(prompt=[n, n])))
                cluster.wait(lambda n=n: dispatcher.num_queued == n)
            refused = cluster.post("/v1/completions", body())
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
            cluster.let_go(steps)
            assert token_ids(futures[0].result(20)) == expected(next_tokens)
            for n in (1, 2):
                assert token_ids(futures[n].result(20)) == expected(next_tokens, [n, n])
        assert [r.prompt_token_ids for r in cluster.prefill_log] == [PROMPT, [1, 1], [2, 2]]
        cluster.assert_clean()


def test_short_prompt_does_not_wait_behind_long_ones_that_prefill_holds_back(make_cluster, next_tokens):
    """Two long ones are at the only prefill worker and a third waits for it: the short one is asked for at once."""
    with make_cluster(limits={"max_num_batched_tokens": 100}) as cluster:
        prefills = cluster.hold("prefill_gate")
        dispatcher = cluster.router.dispatcher
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            long = [[n] * 300 for n in (1, 2, 3)]
            futures = []
            for n, prompt in enumerate(long):
                futures.append(pool.submit(cluster.post, "/v1/completions", body(prompt=prompt)))
                cluster.wait(lambda n=n: prefills.reached + dispatcher.num_queued == n + 1)
            assert (prefills.reached, dispatcher.num_queued) == (2, 1)
            short = pool.submit(cluster.post, "/v1/completions", body())
            cluster.wait(lambda: prefills.reached == 3)
            assert dispatcher.num_queued == 1
            cluster.let_go(prefills)
            assert token_ids(short.result(20)) == expected(next_tokens)
            assert [token_ids(f.result(20)) for f in futures] == [expected(next_tokens, prompt) for prompt in long]
        cluster.assert_clean()


def test_a_wait_that_is_too_long_names_the_phase(make_cluster):
    with make_cluster(capacity=1, queue_timeout_s=0.2) as cluster:
        steps = cluster.hold("step_gate")
        with in_background(cluster, body()) as first:
            cluster.wait(lambda: steps.reached)
            answer = cluster.post("/v1/completions", body())
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout_queue")
            cluster.let_go(steps)
            assert first.result(20).status_code == 200
        cluster.assert_clean()


def test_a_busy_prefill_worker_is_asked_again(cluster, next_tokens, refusal):
    cluster.prefills[0].refuse["/prefill"] = [refusal("no_capacity"), refusal("no_capacity")]
    assert token_ids(cluster.post("/v1/completions", body())) == expected(next_tokens)


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gate", ["reserve_gate", "prefill_gate", "step_gate"])
def test_a_client_that_leaves_in_any_phase_leaves_nothing(make_cluster, next_tokens, gate, stream):
    with make_cluster() as cluster:
        held = cluster.hold(gate)
        with raw_client(cluster, body(stream=stream)):
            cluster.wait(lambda: held.reached)
        cluster.wait(lambda: not cluster.router.dispatcher.records)
        # Also with the gate still closed: nobody waits for the request to go on.
        cluster.assert_clean()
        cluster.let_go(held)
        assert token_ids(cluster.post("/v1/completions", body())) == expected(next_tokens)
        cluster.assert_clean()
        assert 'isthmus_requests_total{outcome="aborted"} 1.0' in cluster.http.get("/metrics").text


def test_a_client_that_leaves_the_queue_is_forgotten(make_cluster):
    with make_cluster(capacity=1) as cluster:
        steps = cluster.hold("step_gate")
        with in_background(cluster, body()) as first:
            cluster.wait(lambda: steps.reached)
            with raw_client(cluster, body(prompt=[9])):
                cluster.wait(lambda: cluster.router.dispatcher.num_queued == 1)
            cluster.wait(lambda: cluster.router.dispatcher.num_queued == 0)
            cluster.let_go(steps)
            assert first.result(20).status_code == 200
        assert [r.prompt_token_ids for r in cluster.prefill_log] == [PROMPT]
        cluster.assert_clean()


def test_a_crowd_that_leaves_at_once_leaves_nothing(make_cluster):
    with make_cluster() as cluster:
        cluster.call(lambda: setattr(cluster, "step_s", 0.002))
        with contextlib.ExitStack() as clients:
            for n in range(20):
                clients.enter_context(raw_client(cluster, body(prompt=[n + 1], max_tokens=2000, stream=True)))
            cluster.wait(lambda: len(cluster.decodes[0].running) == 20)
        cluster.assert_clean()


def test_a_client_that_does_not_read_is_cut_off(make_cluster):
    with make_cluster(send_timeout_s=0.3, limits={"max_model_len": 1_000_000}) as cluster:
        cluster.script = [[500] * 200] * 4000  # more than socket buffers hold
        with raw_client(cluster, body(max_tokens=800_000, stream=True)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            cluster.wait(lambda: cluster.decodes[0].running)
            cluster.wait(lambda: not cluster.router.dispatcher.records, timeout_s=20)
        cluster.assert_clean()


def test_abort_is_told_again_until_a_worker_confirms_it(cluster, refusal):
    steps = cluster.hold("step_gate")
    cluster.decodes[0].refuse["/abort"] = [refusal("internal")]
    with raw_client(cluster, body()):
        cluster.wait(lambda: steps.reached)
    cluster.assert_clean()
    cluster.let_go(steps)
    assert not cluster.decodes[0].refuse["/abort"]


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("code", ["transfer_failed", "worker_lost", "draining"])
def test_a_failed_prefill_is_tried_once_more(cluster, next_tokens, refusal, code):
    cluster.prefills[0].refuse["/prefill"] = [refusal(code)]
    assert token_ids(cluster.post("/v1/completions", body())) == expected(next_tokens)


def test_a_prefill_that_fails_twice_is_a_502_before_the_first_byte(cluster, refusal):
    cluster.prefills[0].refuse["/prefill"] = [refusal("transfer_failed"), refusal("transfer_failed")]
    answer = cluster.post("/v1/completions", body(stream=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "transfer_failed")
    assert answer.json()["error"]["type"] == "server_error"


def test_what_a_worker_finds_invalid_is_not_tried_again(cluster, refusal):
    cluster.decodes[0].refuse["/reserve"] = [refusal("invalid_request")]
    assert cluster.post("/v1/completions", body()).status_code == 400


def test_a_failed_transfer_goes_on_after_the_first_token_without_repeating_it(make_cluster, next_tokens):
    with make_cluster() as cluster:
        cluster.call(lambda: setattr(cluster, "transfers_work", False))
        with in_background(cluster, body()) as answer:
            cluster.wait(lambda: any(r.emitted for r in cluster.router.dispatcher.records.values()))
            cluster.call(lambda: setattr(cluster, "transfers_work", True))
            cluster.call(lambda: cluster.decodes[0].fail("transfer_failed"))
            assert token_ids(answer.result(20)) == expected(next_tokens)
        first, second = cluster.prefill_log
        assert (first.num_prior_outputs, second.num_prior_outputs) == (0, 1)
        assert second.prompt_token_ids == PROMPT + expected(next_tokens, count=1)
        assert first.request_id != second.request_id
        cluster.assert_clean()


def test_an_answer_resumed_in_the_middle_has_no_gap_and_no_repeat(make_cluster, next_tokens):
    with make_cluster() as cluster:
        cluster.call(lambda: setattr(cluster, "step_s", 0.005))
        with in_background(cluster, body(max_tokens=40)) as answer:
            cluster.wait(lambda: any(len(r.emitted) > 5 for r in cluster.router.dispatcher.records.values()))
            cluster.call(lambda: cluster.decodes[0].fail("no_capacity"))
            assert token_ids(answer.result(20)) == expected(next_tokens, count=40)
        cluster.assert_clean()


def test_a_stream_that_fails_ends_with_an_error_and_no_finish_reason(make_cluster):
    with make_cluster() as cluster:
        cluster.call(lambda: setattr(cluster, "step_s", 0.005))
        with in_background(cluster, body(max_tokens=400, stream=True)) as answer:
            cluster.wait(lambda: any(len(r.emitted) > 5 for r in cluster.router.dispatcher.records.values()))
            cluster.call(lambda: cluster.decodes[0].fail("internal"))
            parts = [json.loads(e) for e in events(answer.result(20).text)]
        assert parts[-1]["error"]["code"] == "internal"
        assert all(p["choices"][0]["finish_reason"] is None for p in parts[:-1])
        cluster.assert_clean()


@pytest.mark.parametrize(
    ("phase", "gate"),
    [("prefill", "prefill_gate"), ("decode", "step_gate"), ("transfer", None), ("reserve", "reserve_gate")],
)
def test_a_phase_that_takes_too_long_is_named(make_cluster, phase, gate):
    with make_cluster(**{f"{phase}_timeout_s": 0.3}) as cluster:
        if gate == "step_gate":
            cluster.call(lambda: setattr(cluster, "step_s", 0.1))
        elif gate is not None:
            cluster.hold(gate)
        else:
            cluster.call(lambda: setattr(cluster, "transfers_work", False))
        with in_background(cluster, body()) as answer:
            if gate == "step_gate":
                cluster.wait(lambda: any(len(r.emitted) > 1 for r in cluster.router.dispatcher.records.values()))
                cluster.hold(gate)
            result = answer.result(20)
        assert (result.status_code, result.json()["error"]["code"]) == (504, f"timeout_{phase}")
        cluster.wait(lambda: not cluster.router.dispatcher.records)


def test_a_dead_decode_worker_is_replaced_by_another(make_cluster, next_tokens):
    with make_cluster(num_decodes=2) as cluster:
        cluster.wait(lambda: len(cluster.router.registry.ready_pairs()) == 2)
        cluster.call(lambda: setattr(cluster, "step_s", 0.005))
        with in_background(cluster, body(max_tokens=60)) as answer:
            cluster.wait(lambda: any(len(r.emitted) > 5 for r in cluster.router.dispatcher.records.values()))
            victim = next(d for d in cluster.decodes if d.running)
            cluster.call(victim.kill)
            assert token_ids(answer.result(20)) == expected(next_tokens, count=60)
        cluster.call(victim.running.clear)
        cluster.wait(lambda: "/unlink" in [path for path, _ in cluster.prefills[0].calls])
        assert token_ids(cluster.post("/v1/completions", body())) == expected(next_tokens)
        cluster.assert_clean()


def test_a_mute_decode_worker_is_left_while_it_owes_a_reservation(make_cluster, next_tokens):
    with make_cluster(num_decodes=2, worker_silence_s=0.6) as cluster:
        cluster.wait(lambda: len(cluster.router.registry.ready_pairs()) == 2)
        gate = cluster.hold("reserve_gate")
        before = [len(decode.calls) for decode in cluster.decodes]
        with in_background(cluster, body()) as answer:
            cluster.wait(lambda: gate.reached)
            victim = next(d for d, n in zip(cluster.decodes, before, strict=True) if len(d.calls) > n)
            other = next(d for d in cluster.decodes if d is not victim)
            seen = len(other.calls)
            cluster.call(lambda: setattr(victim, "is_mute", True))
            cluster.wait(lambda: len(other.calls) > seen, timeout_s=5)  # long before reserve_timeout_s
            cluster.let_go(gate)
            assert token_ids(answer.result(20)) == expected(next_tokens)
        cluster.call(lambda: setattr(victim, "is_mute", False))
        cluster.call(lambda: victim.publish([]))
        cluster.assert_clean()


def test_a_dead_prefill_worker_frees_its_landings_and_is_replaced(make_cluster, next_tokens):
    with make_cluster(num_prefills=2) as cluster:
        cluster.wait(lambda: len(cluster.router.registry.ready_pairs()) == 2)
        held = cluster.hold("prefill_gate")
        with in_background(cluster, body()) as answer:
            cluster.wait(lambda: held.reached)
            victim = next(p for p in cluster.prefills if p.running)
            cluster.call(victim.kill)
            cluster.let_go(held)
            assert token_ids(answer.result(20)) == expected(next_tokens)
        cluster.call(victim.running.clear)
        cluster.wait(lambda: "/writer_lost" in [path for path, _ in cluster.decodes[0].calls])
        lost = next(m for path, m in cluster.decodes[0].calls if path == "/writer_lost")
        assert lost.generation == victim.generation
        cluster.assert_clean()


def test_death_of_a_prefill_worker_is_no_proof_that_its_writes_have_ended(make_cluster):
    """What its kernel had taken over may still arrive: only decode's grace after /writer_lost makes the blocks free."""
    with make_cluster(num_prefills=2) as cluster:
        cluster.wait(lambda: len(cluster.router.registry.ready_pairs()) == 2)
        calls, held = cluster.decodes[0].calls, cluster.hold("prefill_gate")
        with in_background(cluster, body()) as answer:
            cluster.wait(lambda: held.reached)
            victim = next(p for p in cluster.prefills if p.running)
            cluster.call(victim.kill)
            cluster.wait(lambda: [m for path, m in calls if path == "/abort" and not m.request_id.startswith("warm-")])
            cluster.wait(lambda: "/writer_lost" in [path for path, _ in calls])
            cluster.let_go(held)
            answer.result(20)
        aborts = [m for path, m in calls if path == "/abort" and not m.request_id.startswith("warm-")]
        assert [abort.drained for abort in aborts] == [False]
        cluster.call(victim.running.clear)
        cluster.assert_clean()


def test_with_no_prefill_left_requests_are_refused_soon(make_cluster):
    with make_cluster() as cluster:
        cluster.call(cluster.prefills[0].kill)
        cluster.wait(lambda: not cluster.router.registry.is_ready)
        answer = cluster.post("/v1/completions", body(), timeout=3)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


def test_shutdown_ends_streams_with_an_error(make_cluster):
    with make_cluster() as cluster:
        cluster.call(lambda: setattr(cluster, "step_s", 0.01))
        with in_background(cluster, body(max_tokens=4000, stream=True)) as answer:
            cluster.wait(lambda: any(len(r.emitted) > 2 for r in cluster.router.dispatcher.records.values()))
            cluster.call(cluster.router.dispatcher.close)
            assert "error" in json.loads(events(answer.result(20).text)[-1])
            refused = cluster.post("/v1/completions", body())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert cluster.http.get("/ready").status_code == 503
        cluster.assert_clean()


def test_draining_lets_running_answers_finish(make_cluster, next_tokens):
    with make_cluster() as cluster:
        steps = cluster.hold("step_gate")
        with in_background(cluster, body()) as answer:
            cluster.wait(lambda: steps.reached)
            draining = threading.Thread(target=lambda: cluster.call(cluster.router.drain))
            draining.start()
            cluster.wait(lambda: cluster.router.dispatcher.is_draining)
            assert cluster.post("/v1/completions", body()).status_code == 503
            cluster.let_go(steps)
            assert token_ids(answer.result(20)) == expected(next_tokens)
            draining.join(10)


def test_twenty_megabytes_of_garbage_are_refused(cluster):
    with httpx.Client(base_url=cluster.url, trust_env=False, timeout=20) as client:
        assert client.post("/v1/completions", content=b"\xff" * 20_000_000).status_code == 413
        chunked = (b"x" * 1_000_000 for _ in range(20))
        assert client.post("/v1/completions", content=chunked).status_code == 413
