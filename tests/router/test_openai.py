"""Request schemas: types, ranges, what is refused, and what it means for the sampler."""

from __future__ import annotations

import json

import pytest

from router.errors import ApiError
from router.openai import (
    ChatRequest,
    CompletionRequest,
    Limits,
    completion_prompt,
    parse,
    sampling_params,
    stop_strings,
    wants_thinking,
)

LIMITS = Limits(vocab_size=1000, max_model_len=100)


def chat(**fields) -> ChatRequest:
    return parse(json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields).encode(), ChatRequest)


def sampling(*, num_prompt_tokens=10, **fields):
    return sampling_params(chat(**fields), num_prompt_tokens=num_prompt_tokens, limits=LIMITS)


def refused(function) -> ApiError:
    with pytest.raises(ApiError) as error:
        function()
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"seed": True}, "seed"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[...].role"),
        ({"stop": [1]}, "stop[...]"),
        ({"stream_options": 1}, "stream_options"),
    ],
)
def test_wrong_types_name_the_field(fields, param):
    error = refused(lambda: chat(**fields))
    assert error.param.replace("[0]", "[...]") == param.replace("[0]", "[...]")


def test_a_missing_field_is_named():
    assert refused(lambda: parse(b"{}", ChatRequest)).param == "messages"


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b"\xff\xfe", b'{"a":NaN}', b"[" * 100_000, b'{"messages":'])
def test_bodies_that_are_no_json_object_are_refused(body):
    refused(lambda: parse(body, ChatRequest))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("best_of", 2),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("prompt_logprobs", 1),
        ("echo", True),
        ("suffix", "x"),
        ("tools", [{}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("structured_outputs", {"json": {}}),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("truncate_prompt_tokens", 5),
        ("modalities", ["audio"]),
        ("continue_final_message", True),
    ],
)
def test_what_is_not_done_yet_is_refused_by_name(field, value):
    error = refused(lambda: chat(**{field: value}))
    assert (error.param, error.code) == (field, "unsupported_parameter")


def test_fields_that_ask_for_nothing_are_taken():
    chat(n=1, best_of=1, logprobs=False, tools=[], tool_choice="auto", response_format={"type": "text"}, echo=False)


def test_unknown_fields_are_ignored():
    chat(metadata={"a": 1}, service_tier="auto", some_future_field=[1, {"x": None}])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.01),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", {"1000": 1}),
        ("logit_bias", {"-1": 1}),
        ("max_tokens", 0),
        ("max_tokens", 91),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("stop_token_ids", [1000]),
        ("stop_token_ids", list(range(300))),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    assert refused(lambda: sampling(**{field: value})).param == field


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 1e-4}, {"top_p": 0}, {"min_p": 1}, {"temperature": 2, "min_p": 1.0}]
)
def test_greedy_in_all_its_spellings(fields):
    params = sampling(**fields)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 1.0, 0, 0.0)


@pytest.mark.parametrize(("given", "meant"), [(-1, 0), (0, 0), (5, 5), (999, 999), (1000, 0), (10**9, 0)])
def test_top_k_at_the_vocabulary_or_below_one_is_off(given, meant):
    assert sampling(top_k=given).top_k == meant


def test_defaults_are_the_models():
    params = sampling()
    assert (params.temperature, params.top_p, params.max_tokens) == (1.0, 1.0, 90)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**70, 5])
def test_any_seed_fits_the_wire(seed):
    assert sampling(seed=seed).seed == seed % 2**63


def test_max_completion_tokens_wins():
    assert sampling(max_tokens=5, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize(("tokens", "wanted"), [(100, None), (101, 1), (90, 11)])
def test_what_exceeds_the_context_says_the_numbers(tokens, wanted):
    error = refused(lambda: sampling(num_prompt_tokens=tokens, max_tokens=wanted))
    assert error.code == "context_length_exceeded"
    assert str(tokens) in error.message
    assert "100" in error.message


def test_min_tokens_may_not_exceed_max_tokens():
    assert refused(lambda: sampling(min_tokens=6, max_tokens=5)).param == "min_tokens"


def test_completions_give_sixteen_tokens_by_default():
    request = parse(b'{"prompt":"x"}', CompletionRequest)
    assert sampling_params(request, num_prompt_tokens=1, limits=LIMITS).max_tokens == 16
    assert sampling_params(request, num_prompt_tokens=95, limits=LIMITS).max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "meant"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([999], [999])]
)
def test_prompts_of_every_shape(prompt, meant):
    request = parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    assert completion_prompt(request, limits=LIMITS) == meant


@pytest.mark.parametrize(
    "prompt", ["", [], [""], [[]], ["a", "b"], [[1], [2]], [1, "a"], [1000], [-1], [1.5], [True], [None], [[1, "a"]]]
)
def test_prompts_that_make_no_sense_are_refused(prompt):
    request = parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    assert refused(lambda: completion_prompt(request, limits=LIMITS)).param == "prompt"


@pytest.mark.parametrize("stop", ["", ["a", ""], ["x"] * 17, "x" * 2000])
def test_stop_strings_that_make_no_sense_are_refused(stop):
    assert refused(lambda: stop_strings(chat(stop=stop))).param == "stop"


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"thinking": False}, "thinking": {"type": "enabled"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"reasoning_effort": "high"}, False),
    ],
)
def test_thinking_in_all_its_spellings(fields, thinks):
    assert wants_thinking(chat(**fields), default=False) is thinks


def test_thinking_by_default_can_be_switched_off():
    assert wants_thinking(chat(), default=True)
    assert not wants_thinking(chat(reasoning_effort="none"), default=True)


def test_a_thinking_switch_of_the_wrong_type_is_named():
    request = chat(chat_template_kwargs={"thinking": "yes"})
    assert refused(lambda: wants_thinking(request, default=False)).param == "chat_template_kwargs.thinking"
