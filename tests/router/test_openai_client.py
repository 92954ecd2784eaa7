"""The openai Python client against a real port: chat, streaming, tools, log probabilities, several choices, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

HI: list[Any] = [{"role": "user", "content": "hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["town"],
        },
    },
}
CALLS = [
    "Let me look.", "\n\n<｜DSML｜tool", "_calls>\n", '<｜DSML｜invoke name="get_weather">\n',
    '<｜DSML｜parameter name="town" string="true">Ri', "ga</｜DSML｜parameter>\n",
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n', "</｜DSML｜invoke>\n",
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="town" string="true">Oslo</｜DSML｜parameter>\n',
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "<EOS>",
]  # fmt: skip
ARGUMENTS = [{"town": "Riga", "days": 3}, {"town": "Oslo"}]


class Town(pydantic.BaseModel):
    name: str
    people: int


TOWN = ['{"name":', '"Riga","peo', 'ple":605802}', "<EOS>"]


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


def test_tool_calls(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(CALLS)
    choice = client.chat.completions.create(model="dsv4-tiny", messages=HI, tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert [c.function.name for c in choice.message.tool_calls] == ["get_weather"] * 2
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == ARGUMENTS
    assert len({c.id for c in choice.message.tool_calls}) == 2


def test_tool_calls_of_a_stream_add_up_to_the_same(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(CALLS)
    chunks = client.chat.completions.create(model="dsv4-tiny", messages=HI, tools=[WEATHER], stream=True)
    names: list[str] = []
    arguments: dict[int, str] = {}
    content = ""
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            if call.function.name:
                assert call.id
                assert call.type == "function"
                names.append(call.function.name)
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert chunk.choices[0].finish_reason == "tool_calls"
    assert (content, names) == ("Let me look.", ["get_weather"] * 2)
    assert [json.loads(text) for text in arguments.values()] == ARGUMENTS


def test_the_clients_own_stream_helper_reads_the_calls(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(CALLS)
    with client.chat.completions.stream(model="dsv4-tiny", messages=HI, tools=[WEATHER]) as stream:
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == ARGUMENTS


def test_one_call_only_on_demand(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(CALLS)
    answer = client.chat.completions.create(model="dsv4-tiny", messages=HI, tools=[WEATHER], parallel_tool_calls=False)
    assert [json.loads(c.function.arguments) for c in answer.choices[0].message.tool_calls] == ARGUMENTS[:1]


def test_calls_and_their_results_go_back_into_the_next_turn(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(CALLS)
    message = client.chat.completions.create(model="dsv4-tiny", messages=HI, tools=[WEATHER]).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    cluster.script = pieces_to_ids(["Sunny.", "<EOS>"])
    answer = client.chat.completions.create(model="dsv4-tiny", messages=[*HI, message, *results], tools=[WEATHER])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Sunny.", "stop")


def test_a_tool_choice_of_none_leaves_the_text_as_it_is(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(["No call.", "<EOS>"])
    cluster.prefill_log.clear()
    for tools in ({"tools": [WEATHER], "tool_choice": "none"}, {}):
        answer = client.chat.completions.create(model="dsv4-tiny", messages=HI, **tools)
        assert answer.choices[0].message.content == "No call."
    assert cluster.prefill_log[0].prompt_token_ids == cluster.prefill_log[1].prompt_token_ids


def test_several_choices_have_their_own_answers_from_one_prefill(cluster, client, pieces_to_ids):
    cluster.choice_scripts = [pieces_to_ids([*word, "<EOS>"]) for word in ("ab", "cde", "f")]
    cluster.prefill_log.clear()
    answer = client.chat.completions.create(model="dsv4-tiny", messages=HI, n=3, seed=5)
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, "ab"), (1, "cde"), (2, "f")]
    assert answer.usage.completion_tokens == 3 + 4 + 2
    (request,) = cluster.prefill_log
    assert request.sampling.seed == 5
    assert len({5, *(branch.seed for branch in request.branches)}) == 3


def test_several_choices_of_a_stream(cluster, client, pieces_to_ids):
    words = ["ab", "cde", "f"]
    cluster.choice_scripts = [pieces_to_ids([*word, "<EOS>"]) for word in words]
    texts, ends, roles = [""] * 3, [0] * 3, [0] * 3
    for chunk in client.chat.completions.create(model="dsv4-tiny", messages=HI, n=3, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        ends[choice.index] += choice.finish_reason == "stop"
    assert (texts, roles, ends) == (words, [1] * 3, [1] * 3)


def test_several_prompts_with_several_choices_each(cluster, client, pieces_to_ids, tokenizer):
    cluster.choice_scripts = [pieces_to_ids([letter, "<EOS>"]) for letter in "abcd"]
    prompts = ["one", "two and more"]
    answer = client.completions.create(model="dsv4-tiny", prompt=prompts, n=2, extra_body={"echo": True})
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert [c.text for c in answer.choices] == ["onea", "oneb", "two and morec", "two and mored"]
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(p)) for p in prompts)


def test_prompts_of_one_request_have_the_seeds_of_requests_of_their_own(cluster, client):
    cluster.prefill_log.clear()
    client.completions.create(model="dsv4-tiny", prompt=[[5, 6], [7, 8]], n=2, seed=9, max_tokens=2)
    seeds = {tuple(r.prompt_token_ids): [r.sampling.seed, *(b.seed for b in r.branches)] for r in cluster.prefill_log}
    assert seeds[5, 6] == seeds[7, 8]
    assert seeds[5, 6][0] == 9


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(cluster, client, pieces_to_ids, stream):
    cluster.script = pieces_to_ids(["Hel", "lo", " there", "<EOS>"])
    answer = client.chat.completions.create(
        model="dsv4-tiny", messages=HI, logprobs=True, top_logprobs=3, stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert b"".join(bytes(entry.bytes) for entry in entries) == b"Hello there"
    assert all(entry.logprob == -0.25 and len(entry.top_logprobs) == 3 for entry in entries)
    assert [entry.top_logprobs[0].token for entry in entries] == [entry.token for entry in entries]


def test_log_probabilities_of_a_completion(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(["Hel", "lo", " there", "<EOS>"])
    logprobs = client.completions.create(model="dsv4-tiny", prompt="x", logprobs=2).choices[0].logprobs
    assert "".join(logprobs.tokens) == "Hello there"
    assert logprobs.text_offset[0] == 0
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


def test_workers_are_asked_for_log_probabilities_only_on_demand(cluster, client):
    cluster.prefill_log.clear()
    for logprobs in (None, 0, 4):
        client.completions.create(model="dsv4-tiny", prompt="x", logprobs=logprobs, max_tokens=1)
    assert [r.sampling.num_logprobs for r in cluster.prefill_log] == [-1, 0, 4]


def test_reasoning_effort_turns_thinking_on(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(["hm", "</think>", "Yes", "<EOS>"])
    answer = client.chat.completions.create(model="dsv4-tiny", messages=HI, reasoning_effort="high")
    assert answer.choices[0].message.reasoning_content == "hm"
    assert answer.choices[0].message.content == "Yes"


def test_the_async_client_streams_many_at_once(cluster, pieces_to_ids):
    cluster.script = pieces_to_ids([*"abcdefgh", "<EOS>"])

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="dsv4-tiny", messages=HI, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(one(client) for _ in range(20)))

    assert asyncio.run(many()) == ["abcdefgh"] * 20


def test_what_the_server_lacks_is_not_tried_again(cluster):
    with (
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=3) as client,
        pytest.raises(openai.APIStatusError) as error,
    ):
        client.embeddings.create(model="dsv4-tiny", input="x")
    assert (error.value.status_code, error.value.code) == (501, "unsupported_route")


def test_images_are_refused_by_the_part_they_stand_in(client):
    image: Any = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="dsv4-tiny", messages=[{"role": "user", "content": image}])
    assert (error.value.param, error.value.code) == ("messages[0].content[1].type", "unsupported_content")


def test_structured_output_is_parsed_into_a_model(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(TOWN)
    cluster.prefill_log.clear()
    answer = client.chat.completions.parse(model="dsv4-tiny", messages=HI, response_format=Town)
    assert answer.choices[0].message.parsed == Town(name="Riga", people=605802)
    guide = cluster.prefill_log[-1].sampling.guide
    assert guide is not None
    assert "people" in guide.grammar


def test_structured_output_behind_reasoning_waits_for_its_end(cluster, client, pieces_to_ids, tokenizer):
    cluster.script = pieces_to_ids(["hm", "</think>", *TOWN])
    cluster.prefill_log.clear()
    answer = client.chat.completions.parse(
        model="dsv4-tiny", messages=HI, response_format=Town, reasoning_effort="high", n=2
    )
    assert [choice.message.parsed.name for choice in answer.choices] == ["Riga"] * 2
    assert cluster.prefill_log[-1].sampling.guide.after_token_id == tokenizer.token_id("</think>")


def test_a_required_call_is_guided_and_a_free_one_is_not(cluster, client, pieces_to_ids):
    cluster.script = pieces_to_ids(CALLS)
    cluster.prefill_log.clear()
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named, "auto"):
        client.chat.completions.create(model="dsv4-tiny", messages=HI, tools=[WEATHER], tool_choice=choice)
    guides = [request.sampling.guide for request in cluster.prefill_log]
    assert [guide is not None for guide in guides] == [True, True, False]
    assert "get_weather" in guides[0].grammar


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "structured_outputs.json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ],
)
def test_guides_that_make_no_sense_are_refused_by_name(client, extra, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="dsv4-tiny", prompt="x", extra_body=extra)
    assert error.value.param == param


def test_more_guides_than_can_wait_are_told_to_come_back(cluster, client, monkeypatch):
    monkeypatch.setattr("router.intake.MAX_WAITING_GUIDES", 0)
    with pytest.raises(openai.InternalServerError) as error:
        client.completions.create(model="dsv4-tiny", prompt="x", extra_body={"guided_regex": "a"})
    assert (error.value.status_code, error.value.code) == (503, "guides_busy")
    assert int(error.value.response.headers["retry-after"]) >= 1
