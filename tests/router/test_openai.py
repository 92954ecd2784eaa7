"""Request schemas: types, ranges, what is refused, and what it means for the sampler."""

from __future__ import annotations

import json

import pytest

from router.chat_options import chat_options
from router.errors import ApiError
from router.openai import ChatRequest, CompletionRequest, Limits, guide_field, parse
from router.prompts import completion_prompts
from router.sampling import (
    choice_seed,
    num_choices,
    num_logprobs,
    sampling_of_prompts,
    sampling_params,
    stop_strings,
)

LIMITS = Limits(vocab_size=1000, max_model_len=100)


def chat(**fields) -> ChatRequest:
    return parse(json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields).encode(), ChatRequest)


def sampling(*, num_prompt_tokens=10, **fields):
    return sampling_params(chat(**fields), num_prompt_tokens=num_prompt_tokens, limits=LIMITS)


def options(*, default_thinking=False, **fields):
    return chat_options(chat(**fields), default_thinking=default_thinking)


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


def nested(depth: int) -> object:
    value: object = 0
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": nested(65)},
        {"tool_choice": nested(400)},
        {"logits_processors": nested(400)},
        {"tools": [nested(65)]},
        {"messages": [{"role": "system", "content": "x", "tools": [nested(65)]}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": nested(65)}}]},
            ]
        },
    ],
)
def test_values_that_nest_too_deeply_are_refused(fields):
    assert refused(lambda: chat(**fields)).code == "invalid_json"


def test_values_that_nest_as_schemas_do_are_taken():
    chat(guided_json=nested(60))


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b"\xff\xfe", b'{"a":NaN}', b"[" * 100_000, b'{"messages":'])
def test_bodies_that_are_no_json_object_are_refused(body):
    refused(lambda: parse(body, ChatRequest))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 1),
        ("suffix", "x"),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("logits_processors", []),
        ("audio", {"voice": "a"}),
        ("prediction", {}),
        ("web_search_options", {}),
        ("chat_template", "{{x}}"),
        ("use_beam_search", True),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("truncate_prompt_tokens", 5),
        ("modalities", ["audio"]),
    ],
)
def test_what_is_not_done_is_refused_by_name(field, value):
    error = refused(lambda: chat(**{field: value}))
    assert (error.param, error.code) == (field, "unsupported_parameter")


def test_fields_that_ask_for_nothing_are_taken():
    chat(functions=[], function_call="auto", suffix="", modalities=["text"], bad_words=[], use_beam_search=False)


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": -1}, {"n": 129}, {"n": 100_000}])
def test_numbers_of_choices_out_of_range_are_refused(fields):
    assert refused(lambda: num_choices(chat(**fields))).param == "n"


@pytest.mark.parametrize(("fields", "count"), [({}, 1), ({"n": 128}, 128), ({"n": 2, "best_of": 2}, 2)])
def test_numbers_of_choices(fields, count):
    assert num_choices(chat(**fields)) == count


def test_the_best_of_more_than_are_shown_is_refused():
    assert refused(lambda: num_choices(chat(best_of=2))).code == "unsupported_parameter"


def test_the_first_choice_has_the_seed_of_the_request_and_others_have_their_own():
    seeds = [choice_seed(7, choice) for choice in range(128)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [choice_seed(7, choice) for choice in range(128)]
    assert seeds[1] != choice_seed(8, 1)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [({}, -1), ({"logprobs": False}, -1), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 20}, 20)],
)
def test_log_probabilities_of_a_chat(fields, wanted):
    assert num_logprobs(chat(**fields)) == wanted
    assert sampling(**fields).num_logprobs == wanted


@pytest.mark.parametrize("fields", [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"top_logprobs": -1}])
def test_log_probabilities_that_make_no_sense_are_refused(fields):
    assert refused(lambda: num_logprobs(chat(**fields))).param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": -1}, "logprobs"), ({"logprobs": 21}, "logprobs"), ({"logprobs": 1, "echo": True}, "echo")],
)
def test_log_probabilities_of_a_completion_that_make_no_sense_are_refused(fields, param):
    request = parse(json.dumps({"prompt": "x"} | fields).encode(), CompletionRequest)
    assert refused(lambda: num_logprobs(request)).param == param


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_tools_that_make_no_sense_are_refused_by_name(fields, param):
    assert refused(lambda: options(**fields)).param == param


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_tools_that_may_be_called(choice):
    asked = options(tools=[TOOL], tool_choice=choice)
    assert (asked.tools, asked.functions) == ([TOOL], {"f": {"type": "object"}})


def test_a_tool_choice_of_none_leaves_the_tools_out():
    asked = options(tools=[TOOL], tool_choice="none")
    assert (asked.tools, asked.functions) == (None, {})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"tools": [TOOL], "tool_choice": "auto"}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "none"}, None),
    ],
)
def test_which_field_asks_for_a_guide(fields, field):
    assert guide_field(chat(**fields)) == field


@pytest.mark.parametrize(
    "fields", [{"stream_options": {"include_usage": True}}, {"stream": False, "stream_options": {}}]
)
def test_stream_options_without_a_stream_are_refused(fields):
    assert refused(lambda: chat(**fields)).param == "stream_options"


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


@pytest.mark.parametrize("escape", ["\\ud800", "\\uDFFF", "\\ud83d x"])
def test_half_a_character_is_called_that(escape):
    error = refused(lambda: parse(f'{{"prompt":"{escape}"}}'.encode(), CompletionRequest))
    assert error.code == "invalid_json"
    assert "without its other half" in error.message


def test_several_prompts_share_a_bias_and_have_lengths_of_their_own():
    request = parse(b'{"prompt":"x","logit_bias":{"5":1.0},"seed":3}', CompletionRequest)
    first, second = sampling_of_prompts(request, num_prompt_tokens=[1, 95], limits=LIMITS)
    assert first == sampling_params(request, num_prompt_tokens=1, limits=LIMITS)
    assert second == sampling_params(request, num_prompt_tokens=95, limits=LIMITS)
    assert second.logit_bias is first.logit_bias


def test_prompts_without_a_seed_are_sampled_apart():
    request = parse(b'{"prompt":"x"}', CompletionRequest)
    first, second = sampling_of_prompts(request, num_prompt_tokens=[1, 1], limits=LIMITS)
    assert first.seed != second.seed


def test_each_prompt_must_leave_room_for_min_tokens():
    request = parse(b'{"prompt":"x","min_tokens":6}', CompletionRequest)
    error = refused(lambda: sampling_of_prompts(request, num_prompt_tokens=[1, 95], limits=LIMITS))
    assert error.param == "min_tokens"


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
        (["a", [2]], ["a", [2]]),
        ([999], [[999]]),
    ],
)
def test_prompts_of_every_shape(prompt, meant):
    request = parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    assert completion_prompts(request, limits=LIMITS) == meant


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], ["a", ""], [1, "a"], [1000], [-1], [1.5], [True], [None], [[1, "a"]], ["a"] * 129, [0] * 101],
)
def test_prompts_that_make_no_sense_are_refused(prompt):
    request = parse(json.dumps({"prompt": prompt}).encode(), CompletionRequest)
    assert refused(lambda: completion_prompts(request, limits=LIMITS)).param == "prompt"


def test_prompts_and_choices_together_are_bounded():
    request = parse(json.dumps({"prompt": ["a"] * 5, "n": 128}).encode(), CompletionRequest)
    assert "640" in refused(lambda: completion_prompts(request, limits=LIMITS)).message


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
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "max"}, False),
        ({"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, False),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}, "thinking": {"type": "enabled"}}, False),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}, "thinking": {"type": "disabled"}}, True),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
    ],
)
def test_thinking_in_all_its_spellings(fields, thinks):
    assert options(**fields).thinking is thinks


def test_thinking_by_default_can_be_switched_off():
    assert options(default_thinking=True).thinking
    assert not options(default_thinking=True, reasoning_effort="none").thinking


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, None),
        ({"reasoning_effort": "max"}, "max"),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "max", "chat_template_kwargs": {"reasoning_effort": "low"}}, "low"),
    ],
)
def test_efforts(fields, effort):
    assert options(**fields).effort == effort


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"drop_thinking": 1}}, "chat_template_kwargs.drop_thinking"),
        ({"chat_template_kwargs": {"reasoning_effort": 5}}, "chat_template_kwargs.reasoning_effort"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
    ],
)
def test_thinking_switches_that_make_no_sense_are_named(fields, param):
    assert refused(lambda: options(**fields)).param == param
