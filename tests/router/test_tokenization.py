"""/tokenize and /detokenize: what they count is what a request is charged."""

from __future__ import annotations

import threading

import pytest

from router import intake

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_a_prompt_is_counted(cluster, tokenizer, path):
    answer = cluster.post(path, {"prompt": "Hello world"}).json()
    ids = tokenizer.encode("Hello world")
    assert answer == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}


def test_token_texts_are_shown_on_demand(cluster):
    answer = cluster.post("/tokenize", {"prompt": "Hello world", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["Hello", " world"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"chat_template_kwargs": {"thinking": True}},
        {"chat_template_kwargs": {"thinking": True, "reasoning_effort": "max"}},
        {"thinking": {"type": "enabled"}},
        {"add_generation_prompt": False},
    ],
)
def test_messages_are_counted_as_a_chat_request_would_send_them(cluster, fields):
    cluster.prefill_log.clear()
    counted = cluster.post("/tokenize", {"messages": MESSAGES} | fields).json()
    answer = cluster.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1} | fields).json()
    assert counted["tokens"] == cluster.prefill_log[-1].prompt_token_ids
    assert counted["count"] == answer["usage"]["prompt_tokens"]


def test_a_text_beyond_the_context_can_still_be_counted(cluster):
    assert cluster.post("/tokenize", {"prompt": "a b " * 5000}).json()["count"] > 4096


@pytest.mark.parametrize("text", ["Hello 🙂 é\n", "<｜User｜>hi</think>", ""])
def test_tokens_come_back_as_text(cluster, text):
    tokens = cluster.post("/tokenize", {"prompt": text}).json()["tokens"]
    for path in ("/detokenize", "/v1/detokenize"):
        assert cluster.post(path, {"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools[0].function"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "x", "reasoning_effort": "max"}, "reasoning_effort"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [129280]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(cluster, path, body, param):
    answer = cluster.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_model_is_not_counted_for(cluster):
    assert cluster.post("/tokenize", {"model": "other", "prompt": "x"}).status_code == 404
    assert cluster.post("/detokenize", {"model": "other", "tokens": []}).status_code == 404


def test_without_a_tokenizer_both_say_what_is_missing(make_cluster):
    with make_cluster(has_tokenizer=False) as cluster:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            answer = cluster.post(path, body)
            assert answer.status_code == 501
            assert "tokenizer.json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(("num_calls", "has_thread"), [(1, False), (2000, True)])
def test_a_long_conversation_is_written_in_a_thread(cluster, monkeypatch, path, num_calls, has_thread):
    threads = []

    def encode(*args, **options):
        threads.append(threading.current_thread().name)
        return "x"

    monkeypatch.setattr(intake, "encode_chat", encode)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call] * num_calls}]
    assert cluster.post(path, {"messages": messages}).status_code == 200
    assert [name.startswith("asyncio_") for name in threads] == [has_thread]
