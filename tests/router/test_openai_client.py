"""The openai Python client against a real port: chat, streaming, errors."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest


@pytest.fixture
def client(cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_chat(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(["Hello", " world", "<EOS>"])
    answer = client.chat.completions.create(model="dsv4-tiny", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3
    assert answer.id.startswith("chatcmpl-")


def test_chat_stream_with_usage_and_reasoning(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(["hm", "</think>", "Yes", "<EOS>"])
    stream = client.chat.completions.create(
        model="dsv4-tiny",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )
    chunks = list(stream)
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == "Yes"
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "hm"
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 2


def test_completion_by_text_and_by_token_ids(cluster, client, tokenizer):
    texts = [
        client.completions.create(model="dsv4-tiny", prompt=prompt, max_tokens=5, temperature=0).choices[0].text
        for prompt in ("a prompt", tokenizer.encode("a prompt"), ["a prompt"], [tokenizer.encode("a prompt")])
    ]
    assert texts[0]
    assert len(set(texts)) == 1


def test_models(client):
    assert [m.id for m in client.models.list()] == ["dsv4-tiny"]
    assert client.models.retrieve("dsv4-tiny").id == "dsv4-tiny"


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
        ({"tools": [{"type": "function", "function": {}}]}, openai.BadRequestError, "tools[0].function.name"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format.type"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs"),
    ],
)
def test_errors_name_the_field(client, fields, kind, param):
    request = {"model": "dsv4-tiny", "messages": [{"role": "user", "content": "hi"}]} | fields
    with pytest.raises(kind) as error:
        client.chat.completions.create(**request)
    assert error.value.param == param


def test_a_stream_that_breaks_raises(cluster, client):
    cluster.call(lambda: setattr(cluster, "step_s", 0.005))
    stream = client.completions.create(
        model="dsv4-tiny", prompt=[5, 6], max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    with pytest.raises(openai.APIError, match="as the test says"):
        for n, _ in enumerate(stream):
            if n == 3:
                cluster.call(lambda: cluster.decodes[0].fail("internal"))
    cluster.call(lambda: setattr(cluster, "step_s", 0.0))


def test_a_client_that_closes_its_stream_is_let_go(cluster, client):
    cluster.call(lambda: setattr(cluster, "step_s", 0.005))
    stream = client.completions.create(
        model="dsv4-tiny", prompt=[5, 6], max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    cluster.assert_clean()
    cluster.call(lambda: setattr(cluster, "step_s", 0.0))
