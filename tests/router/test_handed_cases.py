"""The handed API cases of the router, driven from the file: API-01 to 04 and 07 to 09."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent.parent / "cases" / "handed.jsonl").read_text().splitlines())
}
EOS = [1]


@dataclass
class Answer:
    """An answer of either kind, in the same shape."""

    content: str = ""
    reasoning: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    num_usage_chunks: int = 0
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)


def read(response) -> Answer:
    (answer,) = read_all(response)
    return answer


def read_all(response) -> list[Answer]:
    """Return every choice, in the order of their indices; each is told the request's usage."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"].startswith("application/json"):
        body = response.json()
        answers = []
        for index, choice in enumerate(body["choices"]):
            assert choice["index"] == index
            message = choice.get("message", {"content": choice.get("text")})
            answer = Answer(message["content"], message.get("reasoning_content") or "", [choice["finish_reason"]])
            answer.usage, answer.num_usage_chunks = body["usage"], 1
            answer.logprobs = (choice["logprobs"] or {}).get("content", [])
            answers.append(answer)
        return answers
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [line.removeprefix("data: ") for line in response.content.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    by_index: dict[int, Answer] = {}
    usages = []
    for chunk in chunks:
        if not chunk["choices"]:
            usages.append(chunk["usage"])
            assert chunk is chunks[-1]
            continue
        assert chunk.get("usage") is None
        (choice,) = chunk["choices"]
        answer = by_index.setdefault(choice["index"], Answer())
        answer.chunks.append(chunk)
        delta = choice.get("delta", {"content": choice.get("text")})
        answer.content += delta.get("content") or ""
        answer.reasoning += delta.get("reasoning_content") or ""
        answer.logprobs += (choice["logprobs"] or {}).get("content", [])
        if choice["finish_reason"] is not None:
            answer.finish_reasons.append(choice["finish_reason"])
        elif not choice["logprobs"]:
            assert delta.get("role") or delta.get("content") or delta.get("reasoning_content"), "an empty chunk"
    for answer in by_index.values():
        answer.num_usage_chunks, answer.usage = len(usages), usages[0] if usages else None
    return [by_index[index] for index in range(len(by_index))]


def body_of(case: dict[str, Any], variant: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    body = copy.deepcopy(variant.get("body") or case["input"]["http"]["body"]) | variant.get("override", {})
    for name in variant.get("remove", []):
        body.pop(name, None)
    if variant.get("thinking"):
        body["chat_template_kwargs"] = {"thinking": True}
    return body | {"stream": stream}


def variants(case_id: str) -> list[Any]:
    return [pytest.param(v, id=v["name"]) for v in CASES[case_id]["input"]["variants"]]


def as_completion(body: dict[str, Any]) -> dict[str, Any]:
    rest = {k: v for k, v in body.items() if k not in ("messages", "chat_template_kwargs")}
    return rest | {"prompt": "go"}


def ask(cluster, script, body, *, path="/v1/chat/completions"):
    cluster.script = script
    answer = read(cluster.post(path, body))
    cluster.assert_clean()
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("variant", variants("API-01"))
def test_api_01_stop_strings_are_cut_exactly(cluster, pieces_to_ids, variant, stream):
    body = body_of(CASES["API-01"], variant, stream=stream)
    script = pieces_to_ids(variant["pieces"])
    steps_before = cluster.decodes[0].num_steps
    answers = [ask(cluster, script, body)]
    assert cluster.decodes[0].num_steps - steps_before <= len(script)
    if "thinking" not in variant:
        answers.append(ask(cluster, script, as_completion(body), path="/v1/completions"))
    if body["max_tokens"] == 32:  # the same text one character a piece (a length cut counts tokens, so not there)
        singles = [c for p in variant["pieces"] for c in ([p] if p in ("<EOS>", "</think>") else p)]
        answers.append(ask(cluster, pieces_to_ids(singles), body | {"max_tokens": 64}))
    for answer in answers:
        assert answer.content == variant["content"]
        assert answer.reasoning == variant.get("reasoning_content", "")
        assert answer.finish_reasons == [variant["finish_reason"]]


def byte_pieces(tokenizer, hexes: list[str]) -> list[list[int]]:
    ids = {data[0]: i for i, data in enumerate(tokenizer.token_bytes) if len(data) == 1}
    return [EOS if h == "<EOS>" else [ids[b] for b in bytes.fromhex(h)] for h in hexes]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("variant", variants("API-02"))
def test_api_02_characters_split_over_tokens_come_out_whole(cluster, tokenizer, variant, stream):
    body = body_of(CASES["API-02"], variant, stream=stream)
    answer = ask(cluster, byte_pieces(tokenizer, variant["bytes_hex"]), body)
    assert answer.content in variant.get("content_any_of", [variant.get("content")])
    assert answer.finish_reasons == [variant.get("finish_reason", "stop")]
    if "content" in variant and variant["name"] != "truly_invalid_byte":
        assert "\ufffd" not in answer.content
    if "logprob_bytes_joined_hex" in variant:
        assert bytes(b for e in answer.logprobs for b in e["bytes"]).hex() == variant["logprob_bytes_joined_hex"]
        assert all(len(e["top_logprobs"]) == 1 for e in answer.logprobs)


@pytest.mark.parametrize("variant", variants("API-03"))
def test_api_03_usage_comes_once_and_adds_up(cluster, pieces_to_ids, variant):
    case = CASES["API-03"]
    body = {"stream": True} | body_of(case, variant, stream=True) | variant.get("override", {})
    cluster.script = pieces_to_ids(case["input"]["pieces_per_choice"])
    answers = read_all(cluster.post("/v1/chat/completions", body))
    cluster.assert_clean()
    assert [a.content for a in answers] == ["abcd"] * body["n"]
    assert [a.finish_reasons for a in answers] == [["length"]] * body["n"]
    wants_usage = (body.get("stream_options") or {}).get("include_usage", not body["stream"])
    assert answers[0].num_usage_chunks == int(wants_usage)
    if wants_usage:
        prompt = len(cluster.prefill_log[-1].prompt_token_ids)
        assert answers[0].usage == {
            "prompt_tokens": prompt,
            "completion_tokens": 4 * body["n"],
            "total_tokens": prompt + 4 * body["n"],
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("variant", [v for v in variants("API-04") if "allowed" not in v.values[0]])
def test_api_04_limits_hold_for_the_first_token(cluster, pieces_to_ids, variant, stream):
    body = body_of(CASES["API-04"], variant, stream=stream)
    if stream:
        body["stream_options"] = {"include_usage": True}
    steps = cluster.hold("step_gate")  # no decode step is needed, so the answer must come without any
    answer = ask(cluster, pieces_to_ids(variant["pieces"]), body)
    cluster.let_go(steps)
    assert answer.content == variant["content"]
    assert answer.finish_reasons == [variant["finish_reason"]]
    assert answer.usage["completion_tokens"] == variant.get("completion_tokens", 1)


@pytest.mark.parametrize("variant", [v for v in variants("API-04") if "allowed" in v.values[0]])
def test_api_04_zero_tokens_are_refused_by_name(cluster, variant):
    body = body_of(CASES["API-04"], variant, stream=False)
    answer = cluster.post(variant.get("path", "/v1/chat/completions"), body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("max_tokens", "echo", "logprobs")


@pytest.mark.parametrize("n", [2, 3])
def test_api_04_limits_hold_for_the_first_tokens_of_several_choices(cluster, pieces_to_ids, n):
    variant = CASES["API-04"]["input"]["variants"][0]
    cluster.script = pieces_to_ids(variant["pieces"])
    cluster.prefill_log.clear()
    steps = cluster.hold("step_gate")
    body = body_of(CASES["API-04"], variant, stream=False) | {"n": n}
    answers = read_all(cluster.post("/v1/chat/completions", body))
    cluster.let_go(steps)
    assert [(a.content, a.finish_reasons) for a in answers] == [(variant["content"], ["length"])] * n
    assert answers[0].usage["completion_tokens"] == n
    assert [len(request.branches) for request in cluster.prefill_log] == [n - 1], "one prefill for all"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("variant", variants("API-07"))
def test_api_07_every_character_lands_in_the_right_field(cluster, pieces_to_ids, variant, stream):
    answer = ask(cluster, pieces_to_ids(variant["pieces"]), body_of(CASES["API-07"], variant, stream=stream))
    if "one_field_holds" in variant:  # our rule: what never closes is reasoning
        assert (answer.reasoning, answer.content) == (variant["one_field_holds"], "")
    else:
        assert answer.reasoning == variant.get("reasoning_content", "")
        assert answer.content == (variant.get("content") or "")
    if "finish_reason" in variant:
        assert answer.finish_reasons == [variant["finish_reason"]]


def test_api_07_thinking_can_be_the_servers_default(make_cluster, pieces_to_ids):
    variant = CASES["API-07"]["input"]["variants"][0]
    body = CASES["API-07"]["input"]["http"]["body"]
    with make_cluster(default_thinking=True) as cluster:
        answer = ask(cluster, pieces_to_ids(variant["pieces"]), body)
        assert (answer.reasoning, answer.content) == ("Thinking", "Answer")
        off = body | {"chat_template_kwargs": {"thinking": False}}
        assert ask(cluster, pieces_to_ids(["Hi", "<EOS>"]), off).content == "Hi"


def test_api_08_messages_of_every_shape_clients_send(cluster):
    case = CASES["API-08"]["input"]
    prompts: dict[str, list[int]] = {}
    for variant in case["variants"]:
        cluster.prefill_log.clear()
        answer = cluster.post(case["path"], case["common"] | {"messages": variant["messages"]})
        check_error(answer, variant)
        assert answer.status_code == variant["status"], variant["name"]
        if answer.status_code == 200:
            prompts[variant["name"]] = cluster.prefill_log[-1].prompt_token_ids
        else:
            assert answer.json()["error"]["param"].startswith("messages"), variant["name"]
    same = {v["name"]: v["same_prompt_as"] for v in case["variants"] if "same_prompt_as" in v}
    assert same
    assert {name: prompts[name] for name in same} == {name: prompts[other] for name, other in same.items()}


def check_error(answer, case: dict[str, Any]) -> None:
    assert answer.status_code in case.get("status_any_of", [case.get("status")]), answer.text[:300]
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["message"]
        assert case.get("code") in (None, answer.json()["error"]["code"])


RAW_BODIES = [c for c in CASES["API-09"]["input"]["raw_bodies"] if "raw" in c]
OVERRIDES = [c for c in CASES["API-09"]["input"]["overrides"] if "set" in c and "generator" not in str(c["set"])]


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in RAW_BODIES])
def test_api_09_bad_bodies_are_refused(cluster, case):
    check_error(cluster.post("/v1/chat/completions", case["raw"].encode(), timeout=2), case)


@pytest.mark.parametrize("case", [pytest.param(c, id=c["name"]) for c in OVERRIDES])
def test_api_09_odd_values_are_refused_by_name_or_defined(cluster, case):
    base = CASES["API-09"]["input"]["base"]
    canary = read(cluster.post("/v1/chat/completions", base))
    cluster.prefill_log.clear()
    answer = cluster.post("/v1/chat/completions", base | case["set"], timeout=2)
    check_error(answer, case)
    name = next(iter(case["set"]))
    if answer.status_code == 200:
        sampling = cluster.prefill_log[0].sampling
        if case.get("same_tokens_as") or name == "top_p":
            assert sampling.temperature == 0
        assert all(-100 <= v <= 100 for v in sampling.logit_bias.values())
        assert 0 <= sampling.top_k < 129280
        assert "content" in answer.json()["choices"][0]["message"]
    else:
        assert answer.json()["error"]["param"] in case["set"]
        assert not cluster.prefill_log, "a refused request reached a worker"
    assert read(cluster.post("/v1/chat/completions", base)).content == canary.content


def test_api_09_banning_all_tokens_but_one_is_taken(cluster):
    bias = {str(i): -100 for i in range(129280) if i != 500}
    body = CASES["API-09"]["input"]["base"] | {"logit_bias": bias, "temperature": 1}
    answer = cluster.post("/v1/chat/completions", body, timeout=10)
    assert answer.status_code == 200
    assert len(cluster.prefill_log[-1].sampling.logit_bias) == 129279
    assert 500 not in cluster.prefill_log[-1].sampling.logit_bias


def test_api_09_a_body_beyond_the_limit_is_413(make_cluster):
    with make_cluster(max_body_mib=1) as cluster:
        head, tail = b'{"model":"dsv4-tiny","messages":[{"role":"user","content":"', b'"}]}'
        body = head + b"a" * ((1 << 20) + 1 - len(head) - len(tail)) + tail
        check_error(cluster.post("/v1/chat/completions", body), {"status": 413, "code": "body_too_large"})
        cluster.assert_clean()
