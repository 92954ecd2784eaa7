"""The bytes of answers: framing of streams, several choices, tool calls, token ids, usage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.answer import AnswerWriter, FinishedChoice, Piece, Usage
from router.logprobs import LogprobFormat
from router.protocol import TokenLogprobs
from router.tool_calls import ToolCallDelta


def writer(*, is_chat=True, num_choices=1, **options: Any) -> AnswerWriter:
    usages = options.pop("usages", None) or [Usage(0 if n else 3) for n in range(num_choices)]
    return AnswerWriter(request_id="r", model="m", is_chat=is_chat, usages=usages, **options)


def events(data: bytes) -> list[Any]:
    """Return what a stream's bytes say, [DONE] as it is."""
    assert data == b"" or data.endswith(b"\n\n")
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n")[:-1]]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def deltas(data: bytes) -> list[Any]:
    return [event["choices"][0]["delta"] for event in events(data)]


def finished(*pieces: Piece, finish_reason="stop") -> FinishedChoice:
    choice = FinishedChoice(finish_reason=finish_reason)
    for piece in pieces:
        choice.add(piece)
    return choice


def test_a_chat_stream_opens_with_the_role_and_closes_with_the_reason():
    w = writer()
    assert deltas(w.chunk(Piece("a"))) == [{"role": "assistant", "content": ""}, {"content": "a"}]
    assert deltas(w.chunk(Piece(reasoning="r"))) == [{"reasoning_content": "r"}]
    (end,) = events(w.end_choice(0, "stop", stop_reason="x"))
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "x"}]
    assert w.end() == b"data: [DONE]\n\n"


def test_a_choice_that_says_nothing_still_has_its_role():
    assert deltas(writer().end_choice(0, "stop")) == [{"role": "assistant", "content": ""}, {}]


def test_pieces_without_anything_to_show_make_no_event():
    w = writer()
    w.chunk(Piece("a"))
    assert w.chunk(Piece(token_ids=[5])) == b""


def test_each_choice_opens_and_ends_by_itself():
    w = writer(num_choices=2)
    data = w.chunk(Piece("b"), 1) + w.chunk(Piece("a"), 0) + w.chunk(Piece("b"), 1)
    data += w.end_choice(1, "length") + w.end_choice(0, "stop")
    choices = [event["choices"][0] for event in events(data)]
    assert [c["index"] for c in choices] == [1, 1, 0, 0, 1, 1, 0]
    assert [c["delta"].get("role") for c in choices] == ["assistant", None, "assistant", None, None, None, None]
    assert [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]] == [(1, "length"), (0, "stop")]


def test_usage_of_all_choices_comes_in_a_last_chunk_of_its_own():
    usages = [Usage(3, 2, 1), Usage(0, 4, 2)]
    w = writer(usages=usages, include_usage=True)
    (chunk, usage, done) = events(w.chunk(Piece("a")).split(b"\n\n")[0] + b"\n\n" + w.end())
    assert chunk["usage"] is None
    assert (usage["choices"], done) == ([], "[DONE]")
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


@pytest.mark.parametrize("include_usage", [False, True])
def test_usage_can_ride_along_in_every_chunk(include_usage):
    usage = Usage(3)
    w = writer(usages=[usage], continuous_usage=True, include_usage=include_usage)
    shown = events(w.chunk(Piece("a")))
    usage.completion_tokens = 1
    shown += events(w.chunk(Piece("b"))) + events(w.end_choice(0, "stop"))
    assert [event["usage"]["completion_tokens"] for event in shown] == [0, 0, 1, 1]
    assert len(events(w.end())) == 1 + include_usage


CALLS = [
    Piece("Well.", tool_calls=[ToolCallDelta(index=0, id="c0", name="f")]),
    Piece(tool_calls=[ToolCallDelta(index=0, arguments='{"a":'), ToolCallDelta(index=0, arguments="1}")]),
    Piece(tool_calls=[ToolCallDelta(index=1, id="c1", name="g", arguments="{}")]),
]


def test_tool_calls_of_a_stream():
    w = writer()
    w.chunk(Piece("x"))
    assert deltas(b"".join(w.chunk(piece) for piece in CALLS)) == [
        {
            "content": "Well.",
            "tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}],
        },
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": '{"a":'}},
                {"index": 0, "function": {"arguments": "1}"}},
            ]
        },
        {"tool_calls": [{"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
    ]


def test_tool_calls_of_a_whole_answer():
    choice = json.loads(writer().whole([finished(*CALLS, finish_reason="tool_calls")]))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Well.",
        "refusal": None,
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_an_answer_of_calls_only_has_null_content():
    message = json.loads(writer().whole([finished(*CALLS[1:])]))["choices"][0]["message"]
    assert message["content"] is None
    assert json.loads(writer().whole([finished()]))["choices"][0]["message"]["content"] == ""


def test_without_parallel_calls_only_the_first_is_shown():
    w = writer(one_call=True)
    w.chunk(Piece("x"))
    assert w.chunk(CALLS[2]) == b""
    calls = json.loads(w.whole([finished(*CALLS)]))["choices"][0]["message"]["tool_calls"]
    assert [call["id"] for call in calls] == ["c0"]


def test_token_ids_ride_along_with_the_prompt_once_a_choice():
    w = writer(is_chat=False, num_choices=4, prompts=[[7], [8, 9]])
    data = w.chunk(Piece("a", token_ids=[5]), 0) + w.chunk(Piece("", token_ids=[6]), 3) + w.end_choice(3, "stop")
    shown = [event["choices"][0] for event in events(data)]
    assert [c.get("prompt_token_ids") for c in shown] == [[7], None, [8, 9], None, None]
    assert [c["token_ids"] for c in shown] == [[], [5], [], [6], []]


def test_echoed_prompts_stand_before_their_choices():
    w = writer(is_chat=False, num_choices=4, echoes=["P", "Q"])
    assert [e["choices"][0]["text"] for e in events(w.chunk(Piece("a"), 1) + w.chunk(Piece("b"), 2))] == [*"PaQb"]
    body = json.loads(writer(is_chat=False, num_choices=4, echoes=["P", "Q"]).whole([finished(Piece("a"))] * 4))
    assert [c["text"] for c in body["choices"]] == ["Pa", "Pa", "Qa", "Qa"]


def test_a_stream_and_a_whole_answer_say_the_same_log_probabilities(tokenizer):
    ids = tokenizer.encode("Hi there 🙂!")
    logprobs = [TokenLogprobs(logprob=-0.5, top_ids=[t, 9], top_logprobs=[-0.5, -1.0]) for t in ids]
    for is_chat in (True, False):
        streaming, whole = (
            writer(is_chat=is_chat, logprobs=[LogprobFormat(tokenizer, is_chat=is_chat, num_top=2)]) for _ in range(2)
        )
        pieces = [Piece("x", token_ids=[t], logprobs=[p]) for t, p in zip(ids, logprobs, strict=True)]
        shown = [e["choices"][0]["logprobs"] for p in pieces for e in events(streaming.chunk(p))]
        joined: dict[str, list[Any]] = {}
        for entry in shown:
            for key, value in (entry or {}).items():
                joined.setdefault(key, []).extend(value or [])
        once = json.loads(whole.whole([finished(*pieces)]))["choices"][0]["logprobs"]
        assert joined == {key: value or [] for key, value in once.items()}


def test_log_probabilities_of_held_text_are_not_lost(tokenizer):
    w = writer(logprobs=[LogprobFormat(tokenizer, is_chat=True, num_top=0)])
    w.chunk(Piece("x"))
    (event,) = events(w.chunk(Piece("", token_ids=[500], logprobs=[TokenLogprobs(logprob=-1.0)])))
    assert event["choices"][0]["delta"] == {"content": ""}
    assert event["choices"][0]["logprobs"]["content"][0]["logprob"] == -1.0
