"""Several answers to one request: one prefill, a cache each, and what happens when some of them go wrong."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket

import pytest

from router.choices import Choices
from router.dispatch import RequestRecord
from router.protocol import SamplingParams

PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def fresh_log(request):
    """What earlier tests sent to prefill does not count."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").prefill_log.clear()


def body(**fields):
    given = {"model": "dsv4-tiny", "prompt": PROMPT, "max_tokens": 6, "n": 3, "ignore_eos": True}
    return given | {"return_token_ids": True} | fields


def expected(next_tokens, prompt=PROMPT, count=6):
    out: list[int] = []
    while len(out) < count:
        out.append(next_tokens(prompt + out))
    return out


def answers(reply) -> list[list[int]]:
    """The token ids of each choice, streamed or not."""
    assert reply.status_code == 200, reply.text
    if not reply.headers["content-type"].startswith("text/event-stream"):
        choices = reply.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["token_ids"] for choice in choices]
    events = [e.removeprefix("data: ") for e in reply.text.split("\n\n") if e]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert not [chunk for chunk in chunks if "error" in chunk], reply.text
    found: dict[int, list[int]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    return [found[index] for index in sorted(found)]


def branch_counts(cluster) -> list[int]:
    return [len(request.branches) for request in cluster.prefill_log]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_answers_to_one_prompt_are_one_prefill_with_a_seed_each(cluster, next_tokens, stream):
    reply = cluster.post("/v1/completions", body(stream=stream, seed=3))
    assert answers(reply) == [expected(next_tokens)] * 3
    (request,) = cluster.prefill_log
    seeds = [request.sampling.seed, *(branch.seed for branch in request.branches)]
    assert seeds[0] == 3 and len(set(seeds)) == 3


def test_single_token_answers_need_no_reservation(cluster, next_tokens):
    assert answers(cluster.post("/v1/completions", body(max_tokens=1))) == [expected(next_tokens, count=1)] * 3
    (request,) = cluster.prefill_log
    assert [branch.landing for branch in request.branches] == [None, None]


def test_what_decode_has_no_room_for_is_prefilled_later(make_cluster, next_tokens):
    with make_cluster(capacity=2) as cluster:
        assert answers(cluster.post("/v1/completions", body(n=5))) == [expected(next_tokens)] * 5
        counts = branch_counts(cluster)
        assert counts[0] == 1, "two fit at once, and share a prefill"
        assert sum(counts) + len(counts) == 5
        assert len(counts) < 5, "those that wait share prefills too"
        names = [message.request_id for path, message in cluster.decodes[0].calls if path == "/reserve"]
        assert len(names) > 5 and len(set(names)) == len(names), "an abort of a refused try must not hit a later one"
        cluster.assert_clean()


def test_two_crowds_that_each_fill_decode_do_not_wait_for_each_other(make_cluster, next_tokens):
    with make_cluster(capacity=3) as cluster, concurrent.futures.ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(cluster.post, "/v1/completions", body(prompt=[9 + n], n=3)) for n in range(4)]
        for n, reply in enumerate(replies):
            assert answers(reply.result(30)) == [expected(next_tokens, [9 + n])] * 3
        cluster.assert_clean()


def test_several_prompts_have_their_choices_in_order(cluster, next_tokens):
    reply = cluster.post("/v1/completions", body(prompt=[[5], [6, 7], [8]], n=2))
    assert answers(reply) == [expected(next_tokens, prompt) for prompt in ([5], [6, 7], [8]) for _ in range(2)]
    assert branch_counts(cluster) == [1, 1, 1]
    usage = reply.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 36)


def test_a_busy_prefill_worker_is_asked_again_for_all(cluster, next_tokens, refusal):
    cluster.prefills[0].refuse["/prefill"] = [refusal("no_capacity"), refusal("no_capacity")]
    assert answers(cluster.post("/v1/completions", body())) == [expected(next_tokens)] * 3
    assert branch_counts(cluster) == [2]


def test_after_a_failed_prefill_each_answer_goes_its_own_way(cluster, next_tokens, refusal):
    cluster.prefills[0].refuse["/prefill"] = [refusal("transfer_failed")]
    assert answers(cluster.post("/v1/completions", body())) == [expected(next_tokens)] * 3
    assert branch_counts(cluster) == [0, 0, 0]
    cluster.assert_clean()


def test_answers_resumed_in_the_middle_have_no_gap_and_no_repeat(make_cluster, next_tokens):
    with make_cluster() as cluster:
        cluster.call(lambda: setattr(cluster, "step_s", 0.005))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            reply = pool.submit(cluster.post, "/v1/completions", body(max_tokens=40, stream=True))
            cluster.wait(lambda: any(len(r.emitted) > 5 for r in cluster.router.dispatcher.records.values()))
            cluster.call(lambda: cluster.decodes[0].fail("no_capacity"))
            assert answers(reply.result(30)) == [expected(next_tokens, count=40)] * 3
        cluster.assert_clean()


def test_one_answer_that_can_not_be_completed_ends_the_request(cluster, refusal):
    cluster.prefills[0].refuse["/prefill"] = [refusal("invalid_request")]
    reply = cluster.post("/v1/completions", body())
    assert reply.status_code == 400
    cluster.assert_clean()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gate", ["reserve_gate", "prefill_gate", "step_gate"])
def test_a_client_that_leaves_in_any_phase_leaves_nothing(make_cluster, next_tokens, gate, stream):
    with make_cluster() as cluster:
        held = cluster.hold(gate)
        data = json.dumps(body(stream=stream, prompt=[[5], [6]])).encode()
        with socket.create_connection(("127.0.0.1", cluster.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
            cluster.wait(lambda: held.reached)
        cluster.wait(lambda: not cluster.router.dispatcher.records)
        cluster.assert_clean()
        cluster.let_go(held)
        assert answers(cluster.post("/v1/completions", body())) == [expected(next_tokens)] * 3
        cluster.assert_clean()


def test_stop_string_ends_its_own_choice_only(make_cluster, tokenizer):
    with make_cluster() as cluster:
        text = "one STOP two"
        ids = tokenizer.encode(text)
        cluster.script = [[token] for token in ids]
        reply = cluster.post("/v1/completions", body(prompt="say", n=2, max_tokens=40, stop="STOP"))
        assert [choice["text"] for choice in reply.json()["choices"]] == ["one ", "one "]
        assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["stop", "stop"]
        cluster.assert_clean()


def test_prompts_beyond_the_queue_are_refused_at_once(make_cluster):
    with make_cluster(max_queue=2) as cluster:
        reply = cluster.post("/v1/completions", body(prompt=[[5], [6], [7]], n=1))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
        cluster.assert_clean()


def test_answer_that_was_let_go_before_it_was_asked_for_is_never_written(make_cluster, next_tokens, refusal):
    """Its landing may be somebody else's by then: a busy prefill worker is asked again without it."""
    with make_cluster() as cluster:
        cluster.prefills[0].refuse["/prefill"] = [refusal("no_capacity")] * 3
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
            reply = pool.submit(cluster.post, "/v1/completions", body())
            cluster.wait(lambda: len(cluster.prefills[0].refuse["/prefill"]) < 3)

            def let_one_go() -> str:
                record = next(r for r in list(cluster.router.dispatcher.records.values())[1:] if r.attempt)
                record.attempt.release()
                return record.attempt.request_id

            gone = cluster.call(let_one_go)
            cluster.wait(lambda: cluster.prefill_log)
            request = cluster.prefill_log[0]
            assert gone not in [request.request_id, *(branch.request_id for branch in request.branches)]
            reply.result(20)
        cluster.assert_clean()


def test_choices_cancelled_before_they_begin_leave_nothing(make_cluster):
    """The client leaves in the very moment in which its prompt was taken to a pair."""
    with make_cluster() as cluster:
        dispatcher = cluster.router.dispatcher
        records = [RequestRecord(f"r{n}", [5, 6], SamplingParams(max_tokens=4)) for n in range(3)]

        async def leave() -> None:
            choices = Choices(dispatcher, records, num_choices=3)
            await choices._open(0)  # its tasks are made, and have not run yet
            assert len(dispatcher.records) == 3
            await choices._close()

        cluster.call(leave)
        cluster.assert_clean()
