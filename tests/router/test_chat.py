"""Chat encoding: the published vectors, the message shapes of real clients (API-08), and what holds for any chat."""
# ruff: noqa: RUF001

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.chat import ChatMessage, declared_functions, encode_chat
from router.encoding import EncodingTexts
from router.errors import ApiError, InvalidRequest
from router.reasoning import ReasoningSplitter
from router.tool_calls import ToolCallParser

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
PUBLISHED = Path(__file__).parents[3] / "shared" / "chat"
TEXTS = EncodingTexts(
    "encoding/encoding_dsv4.py",
    {
        "TOOLS_TEMPLATE": "[tools {dsml_token} {thinking_start_token}{thinking_end_token}\n{tool_schemas}]",
        "response_format_template": "[format {schema}]",
        "REASONING_EFFORT_PROMPTS": {"low": "", "high": "[high]", "max": "[max]"},
        "DS_TASK_SP_TOKENS": {"action": "<｜action｜>", "title": "<｜title｜>"},
    },
)
HI = {"role": "user", "content": "hi"}


def encode(messages, **options):
    return encode_chat(msgspec.convert(messages, list[ChatMessage]), **options)


def test_plain_turns():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "why"},
        {"role": "user", "content": "c"},
    ]
    assert encode(messages) == (f"{BOS}S<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜></think>")


def test_reasoning_before_the_last_user_turn_is_dropped():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "why"},
        {"role": "user", "content": "c"},
    ]
    dropped = f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}<｜User｜>c<｜Assistant｜><think>"
    kept = f"{BOS}<｜User｜>a<｜Assistant｜><think>why</think>b{EOS}<｜User｜>c<｜Assistant｜><think>"
    assert encode(messages, thinking=True) == dropped
    assert encode(messages, thinking=True, drop_thinking=False) == kept


def test_published_conversation_with_a_tool_call():
    """Vector 1 without its tools block."""
    call = {
        "id": "call_001",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"location": "Beijing", "unit": "celsius"}'},
    }
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What's the weather in Beijing?"},
        {"role": "assistant", "reasoning_content": "I should use the get_weather tool.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_001", "content": '{"temperature": 22}'},
        {"role": "assistant", "reasoning_content": "Got it.", "content": "Sunny with 22°C."},
    ]
    assert encode(messages, thinking=True, drop_thinking=False) == (
        f"{BOS}You are a helpful assistant.<｜User｜>What's the weather in Beijing?<｜Assistant｜><think>"
        "I should use the get_weather tool.</think>\n\n<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="location" string="true">Beijing</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="unit" string="true">celsius</｜DSML｜parameter>\n'
        f"</｜DSML｜invoke>\n</｜DSML｜tool_calls>{EOS}"
        '<｜User｜><tool_result>{"temperature": 22}</tool_result><｜Assistant｜><think>'
        f"Got it.</think>Sunny with 22°C.{EOS}"
    )


def test_published_conversation_with_reminder_and_developer():
    """Vector 3 without its tools block."""
    messages = [
        {"role": "system", "content": "该助手为DeepSeek，由深度求索公司创造。"},
        {"role": "latest_reminder", "content": "2026-02-21,星期六,广州,App,中文"},
        {"role": "developer", "content": "小柴胡冲剂和布洛芬能一起吃吗？"},
        {"role": "assistant", "content": "请及时就医。", "reasoning_content": "现在开始组织回答。", "tool_calls": []},
    ]
    assert encode(messages, thinking=True) == (
        f"{BOS}该助手为DeepSeek，由深度求索公司创造。<｜latest_reminder｜>2026-02-21,星期六,广州,App,中文"
        "<｜User｜>小柴胡冲剂和布洛芬能一起吃吗？<｜Assistant｜><think>现在开始组织回答。</think>请及时就医。" + EOS
    )


def test_tool_results_follow_the_order_of_the_calls():
    calls = [{"id": i, "function": {"name": i, "arguments": '{"n": 1, "b": [true, null]}'}} for i in ("x", "y")]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "y", "content": "Y"},
        {"role": "user", "content": "and"},
        {
            "role": "tool",
            "tool_call_id": "x",
            "content": [{"type": "text", "text": t} for t in ("X1", "X2")],
        },
    ]
    prompt = encode(messages)
    assert '<｜DSML｜parameter name="b" string="false">[true, null]</｜DSML｜parameter>' in prompt
    assert prompt.endswith(
        "<｜User｜><tool_result>X1\n\nX2</tool_result>\n\nand\n\n<tool_result>Y</tool_result><｜Assistant｜></think>"
    )


def test_handed_message_shapes(handed):
    """API-08: status, and equal prompts for spellings of the same conversation."""
    prompts: dict[str, str] = {}
    variants = handed["API-08"]["input"]["variants"]
    assert len(variants) == 15
    for variant in variants:
        if variant["status"] == 200:
            prompts[variant["name"]] = encode(variant["messages"])
        else:
            with pytest.raises(ApiError) as refusal:
                encode(variant["messages"])
            assert refusal.value.status == 400, variant["name"]
            assert refusal.value.param.startswith("messages")
    for variant in variants:
        if "same_prompt_as" in variant:
            assert prompts[variant["name"]] == prompts[variant["same_prompt_as"]], variant["name"]
    opened = "<｜Assistant｜></think>"
    assert prompts["plain_string"] == f"{BOS}<｜User｜>hello{opened}"
    assert prompts["parts_list_user_system"] == f"{BOS}S1\n\nS2<｜User｜>a\n\nb{opened}"
    assert prompts["system_only"] == f"{BOS}S"
    assert prompts["developer_role"] == f"{BOS}<｜User｜>Reply in capitals.<｜User｜>hi{opened}"
    assert prompts["tool_calls_null"] == f"{BOS}<｜User｜>a{opened}b{EOS}<｜User｜>c{opened}"
    assert prompts["arguments_null_string"] == (
        f'{BOS}<｜User｜>a{opened}\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n\n</｜DSML｜invoke>\n'
        f"</｜DSML｜tool_calls>{EOS}<｜User｜><tool_result>12:00</tool_result>{opened}"
    )


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", "3"])
def test_arguments_that_are_no_object_are_named(arguments):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ApiError) as refusal:
        encode([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}])
    assert refusal.value.param == "messages[1].tool_calls[0].function.arguments"


def tool(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def refused(messages, **options):
    with pytest.raises(InvalidRequest) as refusal:
        encode(messages, **options)
    assert refusal.value.message.startswith(f"{refusal.value.param}: ")
    return refusal.value


def test_a_text_part_without_text_is_not_called_unsupported():
    error = refused([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}])
    assert (error.param, error.code) == ("messages[0].content[1].text", None)


@pytest.fixture(scope="module")
def published():
    """{name: (messages, tools, prompt)} of the published vectors, and the texts they were made with."""
    if not PUBLISHED.is_dir():
        pytest.skip(f"no published vectors in {PUBLISHED}")
    texts = EncodingTexts("texts.json", json.loads((PUBLISHED / "texts.json").read_text()))
    vectors = {}
    for path in sorted(PUBLISHED.glob("vector_*.input.json")):
        given_input = json.loads(path.read_text())
        if isinstance(given_input, list):
            given_input = {"messages": given_input}
        prompt = path.with_name(path.name.replace("input.json", "output.txt")).read_text()
        vectors[path.name.split(".")[0]] = (given_input["messages"], given_input.get("tools"), prompt)
    return vectors, texts


def test_published_vectors_are_met_to_the_byte(published):
    vectors, texts = published
    assert len(vectors) >= 2
    for name, (messages, tools, prompt) in vectors.items():
        assert encode(messages, texts=texts, tools=tools, thinking=True) == prompt, name


def test_published_answers_parse_back_to_their_messages(published):
    vectors, _ = published
    for name, (messages, _, prompt) in vectors.items():
        answers = [turn.split(EOS)[0] for turn in prompt.split(ASSISTANT)[1:]]
        assistant = [message for message in messages if message["role"] == "assistant"]
        assert len(answers) == len(assistant), name
        for answer, message in zip(answers, assistant, strict=True):
            splitter = ReasoningSplitter(is_thinking=True)
            reasoning, text = (a + b for a, b in zip(splitter.feed(answer), splitter.finish(), strict=True))
            parser = ToolCallParser()
            content, deltas = (a + b for a, b in zip(parser.feed(text), parser.finish(), strict=True))
            assert reasoning == message["reasoning_content"]
            assert content == (message.get("content") or "")
            calls = message.get("tool_calls") or []
            assert [d.name for d in deltas if d.name] == [call["function"]["name"] for call in calls]
            for n, call in enumerate(calls):
                arguments = "".join(d.arguments for d in deltas if d.index == n)
                assert json.loads(arguments) == json.loads(call["function"]["arguments"])


def test_tools_follow_the_system_text_as_one_line_each():
    tools = [tool("f", parameters={"b": 1, "a": ["é", 1.0, None]}, strict=True), tool("g"), {"function": {"name": "h"}}]
    definitions = (
        '{"name": "f", "parameters": {"b": 1, "a": ["é", 1.0, null]}, "strict": true}\n{"name": "g"}\n{"name": "h"}'
    )
    block = f"[tools ｜DSML｜ <think></think>\n{definitions}]"
    opened = f"{USER}hi{ASSISTANT}</think>"
    system = {"role": "system", "content": "S"}
    assert encode([system, HI], texts=TEXTS, tools=tools) == f"{BOS}S\n\n{block}{opened}"
    assert encode([system | {"tools": tools}, HI], texts=TEXTS) == f"{BOS}S\n\n{block}{opened}"
    assert encode([system | {"tools": tools[:1]}, HI], texts=TEXTS, tools=tools[1:]) == f"{BOS}S\n\n{block}{opened}"


@pytest.mark.parametrize(
    ("before", "shown"),
    [
        ([], f"\n\n[B]{USER}hi"),
        (["system", "system"], f"S0\n\n[B]S1{USER}hi"),
        (["developer"], f"{USER}S0\n\n[B]{USER}hi"),
        (["developer", "system"], f"{USER}S0S1\n\n[B]{USER}hi"),
        (["latest_reminder", "system"], f"{REMINDER}S0S1\n\n[B]{USER}hi"),
        (["latest_reminder"], f"\n\n[B]{REMINDER}S0{USER}hi"),
        (["user", "system"], f"\n\n[B]{USER}S0S1{USER}hi"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_blocks_have_their_place_at_the_opening(before, shown):
    texts = EncodingTexts("x", {"response_format_template": "[{schema}]"})
    messages = [{"role": role, "content": f"S{n}"} for n, role in enumerate(before)]
    prompt = encode([*messages, HI], texts=texts, response_format={"type": "json_object"})
    assert prompt == BOS + shown.replace("[B]", '[{"type": "object"}]') + f"{ASSISTANT}</think>"


def test_response_format_follows_the_tools():
    schema = {"type": "object", "properties": {"ü": {}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    prompt = encode([HI], texts=TEXTS, tools=[tool("f")], response_format=wanted)
    assert '{"name": "f"}]\n\n[format {"type": "object", "properties": {"ü": {}}}]<｜User｜>' in prompt
    assert encode([HI], response_format={"type": "text"}) == encode([HI])


@pytest.mark.parametrize("place", ["request", "system", "developer"])
def test_tools_keep_all_reasoning(place):
    tools = [tool("f")]
    messages = [HI, {"role": "assistant", "content": "a", "reasoning_content": "why"}, HI]
    if place != "request":
        messages.insert(0, {"role": place, "content": "S", "tools": tools})
    prompt = encode(messages, texts=TEXTS, tools=tools if place == "request" else None, thinking=True)
    assert f"{ASSISTANT}<think>why</think>a{EOS}" in prompt


def test_declared_functions_are_those_of_request_and_messages():
    messages = msgspec.convert([{"role": "system", "content": "", "tools": [tool("g")]}, HI], list[ChatMessage])
    functions = declared_functions(messages, [tool("f", parameters={"type": "object"})])
    assert functions == {"f": {"type": "object"}, "g": {}}
    assert declared_functions(messages[1:], None) == {}


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ("x", "tools[1]"),
        (None, "tools[1]"),
        ({}, "tools[1].function"),
        ({"type": "function", "function": "f"}, "tools[1].function"),
        ({"type": "custom", "custom": {"name": "f"}}, "tools[1].type"),
        ({"type": ["function"], "function": {"name": "f"}}, "tools[1].type"),
        ({"function": {}}, "tools[1].function.name"),
        ({"function": {"name": 3}}, "tools[1].function.name"),
        *(
            (tool(name), "tools[1].function.name")
            for name in ("", " ", "first", 'a"', "a\nb", "a<b", "a>", " a", "a｜b")
        ),
        (tool("n" * 257), "tools[1].function.name"),
        (tool("f", parameters=[]), "tools[1].function.parameters"),
        (tool("f", parameters="{}"), "tools[1].function.parameters"),
    ],
)
def test_malformed_tools_are_named(bad, param):
    tools = [tool("first"), bad]
    assert refused([HI], texts=TEXTS, tools=tools).param == param
    defining = [HI, {"role": "system", "content": "", "tools": tools}]
    assert refused(defining, texts=TEXTS).param == f"messages[1].{param}"


@pytest.mark.parametrize("name", ["get_weather", "mcp.server/do-it", "天気", "two words", "n" * 256])
def test_ordinary_names_are_taken(name):
    assert json.dumps(name, ensure_ascii=False) in encode([HI], texts=TEXTS, tools=[tool(name)])


def test_function_defined_by_request_and_message_is_refused():
    messages = [{"role": "system", "content": "", "tools": [tool("f")]}, HI]
    assert refused(messages, texts=TEXTS, tools=[tool("f")]).param == "messages[0].tools[0].function.name"


@pytest.mark.parametrize("role", ["user", "assistant", "latest_reminder", "tool"])
def test_tools_of_other_roles_are_refused(role):
    message = {"role": role, "content": "x", "tools": [tool("f")]}
    assert refused([HI, message], texts=TEXTS).param == "messages[1].tools"
    assert encode([HI, message | {"tools": []}]) == encode([HI, message | {"tools": None}])


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([HI], {"tools": [tool("f")]}, "tools"),
        ([{"role": "system", "content": "", "tools": [tool("f")]}], {}, "messages[0].tools"),
        ([HI], {"response_format": {"type": "json_object"}}, "response_format"),
        ([HI], {"effort": "max", "thinking": True}, "reasoning_effort"),
        ([HI | {"task": "title"}], {}, "messages[0].task"),
    ],
    ids=["tools", "message tools", "response_format", "effort", "task"],
)
def test_what_needs_the_models_texts_names_the_missing_file(messages, options, param):
    refusal = refused(messages, **options)
    assert refusal.param == param
    assert "encoding/encoding_dsv4.py in the model folder" in refusal.message
    assert refusal.code == "encoding_text_missing"


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": []}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": "x"}}, "response_format.json_schema.schema"),
    ],
)
def test_malformed_response_format_is_named(response_format, param):
    assert refused([HI], texts=TEXTS, response_format=response_format).param == param


def test_effort_text_comes_first_and_only_while_thinking():
    messages = [{"role": "system", "content": "S"}, HI]
    assert encode(messages, texts=TEXTS, effort="max", thinking=True).startswith(f"{BOS}[max]S{USER}")
    assert encode(messages, texts=TEXTS, effort="high", thinking=True).startswith(f"{BOS}[high]S{USER}")
    assert encode(messages, texts=TEXTS, effort="max") == encode(messages)
    assert encode(messages, effort="high", thinking=True) == encode(messages, thinking=True)


def test_generation_prompt_can_be_left_out():
    assert encode([HI], add_generation_prompt=False) == f"{BOS}{USER}hi"
    assert encode([HI | {"task": "action"}], texts=TEXTS, add_generation_prompt=False) == f"{BOS}{USER}hi"


def test_final_assistant_message_is_ended_or_continued():
    answer = {"role": "assistant", "content": "The", "reasoning_content": "why"}
    ended = f"{BOS}{USER}hi{ASSISTANT}<think>why</think>The{EOS}"
    assert encode([HI, answer], thinking=True) == ended
    assert encode([HI, answer], thinking=True, continue_final_message=True) == ended.removesuffix(EOS)
    assert encode([HI, answer | {"prefix": True}], thinking=True) == ended.removesuffix(EOS)
    assert refused([HI], continue_final_message=True).param == "continue_final_message"
    assert refused([HI | {"prefix": True}]).param == "messages[0].prefix"
    assert refused([HI, answer | {"prefix": True}, HI]).param == "messages[1].prefix"


def test_task_tokens_stand_where_the_answer_begins():
    action, title = HI | {"task": "action"}, HI | {"task": "title"}
    assert encode([action], texts=TEXTS) == f"{BOS}{USER}hi{ASSISTANT}</think><｜action｜>"
    assert encode([action], texts=TEXTS, thinking=True) == f"{BOS}{USER}hi{ASSISTANT}<think><｜action｜>"
    assert encode([title], texts=TEXTS, thinking=True) == f"{BOS}{USER}hi<｜title｜>"
    answer = {"role": "assistant", "content": "A"}
    assert encode([HI, answer | {"task": "title"}], texts=TEXTS) == f"{BOS}{USER}hi{ASSISTANT}</think>A{EOS}<｜title｜>"
    answered = encode([title, answer, HI], texts=TEXTS, thinking=True, drop_thinking=False)
    assert answered == f"{BOS}{USER}hi<｜title｜>A{EOS}{USER}hi{ASSISTANT}<think>"


def test_task_that_no_answer_follows_is_refused():
    assert refused([HI | {"task": "title"}, HI], texts=TEXTS).param == "messages[0].task"
    assert refused([HI, HI | {"task": "dance"}], texts=TEXTS).param == "messages[1].task"


def test_names_that_the_model_made_up_go_back_as_they_are():
    call = {"id": "c", "function": {"name": 'a"b <c>', "arguments": {'k"': 'v"'}}}
    prompt = encode([HI, {"role": "assistant", "tool_calls": [call]}])
    assert (
        '<｜DSML｜invoke name="a"b <c>">\n<｜DSML｜parameter name="k"" string="true">v"</｜DSML｜parameter>' in prompt
    )


def test_half_a_surrogate_pair_in_arguments_is_refused():
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": "\\ud83d x"}'}}
    refusal = refused([HI, {"role": "assistant", "tool_calls": [call]}])
    assert refusal.param == "messages[1].tool_calls[0].function.arguments"


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_deep_json_is_refused():
    depth = 100_000
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a":' * depth}}
    assert refused([HI, {"role": "assistant", "tool_calls": [call]}]).param.endswith(".function.arguments")
    deep = nested(depth)
    assert refused([HI], texts=TEXTS, tools=[tool("f", parameters=deep)]).param == "tools[0].function"
    wanted = {"type": "json_schema", "json_schema": {"schema": deep}}
    assert refused([HI], texts=TEXTS, response_format=wanted).param == "response_format.json_schema.schema"
    while deep:  # its own destructor would nest as deeply
        deep = deep.pop("a")


def test_very_long_conversations_take_linear_time():
    """The sort for each part, which this had once, would take an hour."""
    calls = [ChatMessage(role="assistant", content="")]
    results = [ChatMessage(role="tool", content="r", tool_call_id=str(n)) for n in range(100_000)]
    assert encode_chat(calls + results).count("<tool_result>") == 100_000
    turns = [ChatMessage(role="user", content="u"), ChatMessage(role="assistant", content="a")] * 50_000
    assert encode_chat(turns, thinking=True).count(EOS) == 50_000
    defining = [ChatMessage(role="system", content="", tools=[tool(f"f{n}")]) for n in range(10_000)]
    assert encode_chat(defining, texts=TEXTS).count("[tools") == 10_000


# Conversations whose texts can be told apart and have no markers in them.
words = st.text(alphabet="ab é\n", max_size=6)


@st.composite
def conversations(draw):
    """Messages that end with an answer, tools or None; every text is between [n] and [/n], n counting up."""
    count = iter(range(10_000))

    def text():
        n = next(count)
        return f"[{n}]{draw(words)}[/{n}]"

    messages = [{"role": role, "content": text()} for role in ("system", "latest_reminder") if draw(st.booleans())]
    messages += [{"role": "developer", "content": text()} for _ in range(draw(st.integers(0, 2)))]
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": text()})
        ids = [f"c{n}" for n in range(draw(st.integers(0, 3)))]
        if ids:
            calls = [{"id": i, "function": {"name": "f", "arguments": {"k": text()}}} for i in ids]
            messages.append({"role": "assistant", "reasoning_content": text(), "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": i, "content": text()} for i in draw(st.permutations(ids))]
        content = [{"type": "text", "text": text()} for _ in range(draw(st.integers(0, 2)))]
        messages.append({"role": "assistant", "reasoning_content": text(), "content": content})
    tools = [tool("f", description=text())] if draw(st.booleans()) else None
    return messages, tools


MARKERS = {
    BOS: "B",
    EOS: "E",
    USER: "U",
    ASSISTANT: "A",
    REMINDER: "L",
    "<think>": "t",
    "</think>": "c",
    "<｜DSML｜tool_calls>": "d",
    "</｜DSML｜tool_calls>": "e",
}
TEXTS_WITHOUT_MARKERS = EncodingTexts("x", {"TOOLS_TEMPLATE": "{tool_schemas}"})


@given(conversations(), st.booleans(), st.booleans())
def test_turns_nest_behind_one_bos(conversation, thinking, drop_thinking):
    messages, tools = conversation
    options = {"texts": TEXTS_WITHOUT_MARKERS, "tools": tools, "thinking": thinking, "drop_thinking": drop_thinking}
    prompt = encode([*messages, HI], **options)
    shape = "".join(MARKERS[marker] for marker in re.findall("|".join(MARKERS), prompt))
    assert re.fullmatch(r"BL?(U+At?c(de)?E)*UA[tc]", shape)
    assert shape.endswith("t") == thinking


@given(conversations(), st.booleans(), st.booleans())
def test_no_text_is_lost_but_dropped_reasoning(conversation, thinking, drop_thinking):
    messages, tools = conversation
    options = {"texts": TEXTS_WITHOUT_MARKERS, "tools": tools, "thinking": thinking, "drop_thinking": drop_thinking}
    prompt = encode(messages, **options)
    last_user = max(n for n, message in enumerate(messages) if message["role"] in ("user", "tool"))
    for n, message in enumerate(messages):
        keeps = thinking and (not drop_thinking or tools is not None or n > last_user)
        reasoning = message.pop("reasoning_content", None)
        if reasoning is not None:
            assert prompt.count(reasoning) == keeps
        for text in re.findall(r"\[(\d+)\](.*?)\[/\1\]", json.dumps(message, ensure_ascii=False), re.DOTALL):
            assert prompt.count(json.loads(f'"[{text[0]}]{text[1]}[/{text[0]}]"')) == 1


@given(conversations(), st.booleans(), st.booleans())
def test_later_turn_changes_nothing_before_it_but_dropped_reasoning(conversation, thinking, drop_thinking):
    messages, tools = conversation
    options = {"texts": TEXTS_WITHOUT_MARKERS, "tools": tools, "thinking": thinking, "drop_thinking": drop_thinking}
    before, after = encode(messages, **options), encode([*messages, HI], **options)
    if thinking and drop_thinking and not tools:
        before = re.sub(r"<think>[^<]*</think>", "</think>", before)
    assert after.startswith(before)
