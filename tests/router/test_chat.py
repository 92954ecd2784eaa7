"""Chat encoding: the published vectors' plain parts, and the message shapes of real clients (API-08)."""
# ruff: noqa: RUF001

from __future__ import annotations

import msgspec
import pytest

from router.chat import ChatMessage, encode_chat
from router.errors import ApiError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


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
