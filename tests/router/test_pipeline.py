"""From tokens to shown fields: whatever the grouping of tokens and the cut of the text, the fields are the same."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.answer import Usage
from router.pipeline import TextPipeline
from router.protocol import SamplingParams, TokenLogprobs

PUBLISHED = Path(__file__).parents[3] / "shared" / "chat"
CASES = {
    case["id"]: case
    for case in map(json.loads, (Path(__file__).parent.parent / "cases" / "handed.jsonl").read_text().splitlines())
}
EOS = 1
OPEN, CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
CALL = '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="k" string="true">v w</｜DSML｜parameter>\n</｜DSML｜invoke>'
BLOCK = f"\n\n{OPEN}\n{CALL}\n{CLOSE}"
F_CALL = ("f", '{"k": "v w"}')


@dataclass
class Fields:
    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish_reason: str
    stop_reason: str | int | None
    reasoning_tokens: int = 0
    completion_tokens: int = 0


@pytest.fixture(scope="session")
def run(tokenizer):
    """Return a function from steps of token ids to the joined fields."""

    def run(steps, finish_reason="stop", *, max_tokens=10_000, min_tokens=0, stop_token_ids=(), **options) -> Fields:
        usage = Usage(prompt_tokens=1)
        sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
        pipeline = TextPipeline(tokenizer, sampling, usage=usage, **options)
        content = reasoning = ""
        calls: list[list[str]] = []
        for n, step in enumerate(steps, 1):
            piece = pipeline.feed(step, finish_reason if n == len(steps) else None)
            content += piece.content
            reasoning += piece.reasoning
            for delta in piece.tool_calls:
                if delta.id:
                    calls.append([delta.name, ""])
                calls[delta.index][1] += delta.arguments
            if pipeline.finish_reason is not None:
                break
        assert pipeline.finish_reason is not None
        return Fields(
            content,
            reasoning,
            [(name, arguments) for name, arguments in calls],
            pipeline.finish_reason,
            pipeline.stop_reason,
            usage.reasoning_tokens,
            usage.completion_tokens,
        )

    return run


@pytest.fixture(scope="session")
def say(run, tokenizer):
    """Return a function from text, or pieces of it, to the joined fields; the model ends it by itself, or is cut."""

    def say(text, finish_reason="stop", **options) -> Fields:
        pieces = [text] if isinstance(text, str) else text
        steps = [[token] for piece in pieces for token in tokenizer.encode(piece)]
        return run([*steps, [EOS]] if finish_reason == "stop" else steps, finish_reason, **options)

    return say


def shown(fields: Fields) -> tuple[str, str, list[tuple[str, str]], str]:
    """What doesn't depend on how many tokens the text was."""
    return fields.reasoning, fields.content, fields.calls, fields.finish_reason


@pytest.fixture(scope="module")
def published():
    """The last turns of the published vector: (what the model wrote, what it means)."""
    if not PUBLISHED.is_dir():
        pytest.skip("the published vectors are not beside this repository")
    text = (PUBLISHED / "vector_1.output.txt").read_text()
    turns = [t.partition("<｜end▁of▁sentence｜>")[0] for t in text.split("<｜Assistant｜><think>")[1:]]
    body = json.loads((PUBLISHED / "vector_1.input.json").read_text())
    messages = [m for m in body["messages"] if m["role"] == "assistant"]
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in body["tools"]}
    return list(zip(turns, messages, strict=True)), schemas


def test_published_answers_parse_back_at_every_cut(published, say):
    turns, schemas = published
    for text, message in turns:
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        reason = "tool_calls" if calls else "stop"
        expected = (message["reasoning_content"], message.get("content", ""), calls, reason)
        options = {"is_thinking": True, "parses_tools": True, "tool_schemas": schemas}
        assert shown(say(text, **options)) == expected
        assert shown(say(list(text), **options)) == expected
        for at in range(1, len(text)):
            assert shown(say([text[:at], text[at:]], **options)) == expected


@pytest.mark.parametrize("value", CASES["API-05"]["input"]["values_for_V"])
def test_api_05_a_call_in_the_tokenizers_own_tokens(say, value):
    text = CASES["API-05"]["input"]["forced_text_template"].replace("{V}", value).removesuffix("<EOS>")
    tools = CASES["API-05"]["input"]["http"]["body"]["tools"]
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
    for pieces in (text, list(text)):
        fields = say(pieces, parses_tools=True, tool_schemas=schemas, stops=["###", "</x>"])
        assert (fields.content, fields.finish_reason) == ("Checking.", "tool_calls")
        assert [(n, json.loads(a)) for n, a in fields.calls] == [("book_table", {"town": value, "seats": 3})]


def handed(case_id: str):
    return [pytest.param(CASES[case_id], v, id=v["name"]) for v in CASES[case_id]["input"]["variants"]]


@pytest.mark.parametrize("parses_tools", [False, True])
@pytest.mark.parametrize("is_single", [False, True])
@pytest.mark.parametrize(("case", "variant"), handed("API-01") + handed("API-07"))
def test_handed_texts_are_the_same_in_single_characters_and_with_tools(say, case, variant, is_single, parses_tools):
    body = case["input"]["http"]["body"] | variant.get("override", {})
    pieces = [p for p in variant["pieces"] if p != "<EOS>"]
    fields = say(
        "".join(pieces) if is_single else pieces,
        "stop" if variant["pieces"][-1] == "<EOS>" else "length",
        stops=body.get("stop") or (),
        is_thinking=bool(variant.get("thinking")),
        parses_tools=parses_tools,
    )
    if "one_field_holds" in variant:  # our rule: what never closes is reasoning
        assert (fields.reasoning, fields.content) == (variant["one_field_holds"], "")
    else:
        assert fields.reasoning == variant.get("reasoning_content", "")
        assert fields.content == (variant.get("content") or "")
    assert fields.finish_reason == variant.get("finish_reason", "stop")


@pytest.mark.parametrize(
    "variant", [pytest.param(v, id=v["name"]) for v in CASES["API-02"]["input"]["variants"] if "content" in v]
)
def test_api_02_split_characters_come_out_whole_with_tools(run, tokenizer, variant):
    ids = {data[0]: i for i, data in enumerate(tokenizer.token_bytes) if len(data) == 1}
    steps = [[EOS] if h == "<EOS>" else [ids[b] for b in bytes.fromhex(h)] for h in variant["bytes_hex"]]
    assert run(steps, parses_tools=True).content == variant["content"]


# ---------------------------------------------------------------- endings


@pytest.mark.parametrize(("options", "field"), [({}, "content"), ({"is_thinking": True}, "reasoning")])
def test_a_character_that_was_cut_is_marked_in_the_field_it_is_in(run, tokenizer, options, field):
    half = tokenizer.token_bytes.index(b"\xf0")
    fields = run([tokenizer.encode("a"), [half]], "length", parses_tools=True, stops=["zz"], **options)
    assert getattr(fields, field) == "a\ufffd"


def test_a_stop_string_that_the_end_completes_counts(run, tokenizer):
    half = tokenizer.token_bytes.index(b"\xf0")
    fields = run([tokenizer.encode("a"), [half]], "length", stops=["\ufffd"])
    assert (fields.content, fields.finish_reason, fields.stop_reason) == ("a", "stop", "\ufffd")


def test_a_complete_call_is_told_by_the_finish_reason(say):
    assert shown(say("Hm" + BLOCK, parses_tools=True)) == ("", "Hm", [F_CALL], "tool_calls")


def test_an_answer_cut_by_length_says_so_with_complete_calls_too(say):
    assert shown(say("Hm" + BLOCK, "length", parses_tools=True)) == ("", "Hm", [F_CALL], "length")


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_a_call_that_is_not_complete_is_no_reason(say, finish_reason):
    fields = say(BLOCK.partition(" w")[0], finish_reason, parses_tools=True)
    assert shown(fields) == ("", "", [("f", '{"k": "v"}')], finish_reason)


def test_without_tools_markup_is_content(say):
    assert shown(say("Hm" + BLOCK)) == ("", "Hm" + BLOCK, [], "stop")
    assert shown(say("Hm" + BLOCK, is_thinking=True)) == ("Hm" + BLOCK, "", [], "stop")


def test_a_block_ends_open_reasoning(say):
    assert shown(say("plan" + BLOCK, is_thinking=True, parses_tools=True)) == ("plan", "", [F_CALL], "tool_calls")


@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize("skip_special_tokens", [False, True])
@pytest.mark.parametrize("text", ["Hi", "Hm" + BLOCK, "Hm" + BLOCK[:-30], "a\n\n", "<"])
def test_the_end_of_turn_is_never_shown(say, text, is_thinking, skip_special_tokens):
    fields = say(text, is_thinking=is_thinking, skip_special_tokens=skip_special_tokens, parses_tools=True)
    assert "end▁of" not in f"{fields}"


# ---------------------------------------------------------------- stop strings: found in all that the model writes


def test_a_stop_string_in_reasoning_ends_the_answer(say):
    fields = say("plan STOP on</think>x", is_thinking=True, parses_tools=True, stops=["STOP"])
    assert (fields.reasoning, fields.content, fields.stop_reason) == ("plan ", "", "STOP")


def test_a_stop_string_in_a_value_closes_the_call(say):
    fields = say("Hm" + BLOCK, parses_tools=True, stops=["v w<"])
    assert (*shown(fields), fields.stop_reason) == ("", "Hm", [("f", '{"k": ""}')], "stop", "v w<")


def test_a_stop_string_in_a_tag_shows_no_markup(say):
    assert shown(say("Hm" + BLOCK, parses_tools=True, stops=["_calls"])) == ("", "Hm", [], "stop")


def test_a_stop_string_behind_a_complete_call_leaves_it_complete(say):
    fields = say(f"Hm\n\n{OPEN}\n{CALL}\n{CALL}", parses_tools=True, stops=["</｜DSML｜invoke>\n"], include_stop=True)
    assert (*shown(fields), fields.stop_reason) == ("", "Hm", [F_CALL], "tool_calls", "</｜DSML｜invoke>\n")


def test_text_held_for_a_stop_string_leaves_through_the_parsers(say):
    held = say("plan</think>Hm" + BLOCK, is_thinking=True, parses_tools=True, stops=["</think>Hm!", CLOSE + "!"])
    assert shown(held) == ("plan", "Hm", [F_CALL], "tool_calls")


def test_min_tokens_keeps_stop_strings_from_matching(say):
    fields = say("a STOP b c STOP d", stops=["STOP"], min_tokens=4, parses_tools=True)
    assert fields.content == "a STOP b c "


def test_a_stop_token_of_the_client_is_told(run, tokenizer):
    (token,) = tokenizer.encode("Hello")
    fields = run([[*tokenizer.encode("a"), token]], stop_token_ids=(token,))
    assert (fields.content, fields.stop_reason) == ("a", token)


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize("stops", [[], ["</think>zz", "\n\n<zz", "zz"]])
@pytest.mark.parametrize(
    ("reasoning", "rest"),
    [
        ("some plan</think>", "The answer."),
        ("some plan</think>", BLOCK),
        ("some plan", BLOCK),
        ("plan.\n", BLOCK),
        ("plan.", BLOCK),
    ],
)
def test_reasoning_tokens_are_those_that_begin_in_reasoning(run, tokenizer, reasoning, rest, stops):
    first, second = tokenizer.encode(reasoning), tokenizer.encode(rest)
    steps = [[t] for t in [*first, *second, EOS]]
    fields = run(steps, is_thinking=True, parses_tools=True, stops=stops)
    assert fields.reasoning == reasoning.removesuffix("</think>")
    assert fields.reasoning_tokens == len(first)
    assert fields.completion_tokens == len(steps)


def test_a_token_with_the_end_of_reasoning_and_the_blank_line_is_reasoning(say):
    fields = say("plan." + BLOCK, is_thinking=True, parses_tools=True)  # its tokens begin with "plan" and ".\n\n"
    assert (fields.reasoning, fields.reasoning_tokens) == ("plan.", 2)


@pytest.mark.parametrize("end", [2, 4, 9])
def test_a_block_that_was_cut_is_no_reasoning_in_the_usage_either(run, tokenizer, end):
    first, second = tokenizer.encode("some plan"), tokenizer.encode(BLOCK)[: end + 1]
    fields = run([[t] for t in first + second], "length", is_thinking=True, parses_tools=True)
    assert (fields.reasoning, fields.content, fields.reasoning_tokens) == ("some plan", "", len(first))


def test_all_tokens_of_an_answer_that_never_closes_are_reasoning(say):
    fields = say("Good day to you", is_thinking=True, parses_tools=True)
    assert fields.reasoning_tokens == fields.completion_tokens


# ---------------------------------------------------------------- log probabilities


def logprobs(n: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(logprob=-float(i)) for i in range(n)]


def feed_once(tokenizer, ids, finish_reason, given, **options):
    pipeline = TextPipeline(tokenizer, SamplingParams(max_tokens=99), usage=Usage(prompt_tokens=1), **options)
    return pipeline.feed(ids, finish_reason, given)


def test_each_token_has_its_log_probability_also_the_last(tokenizer):
    ids = [*tokenizer.encode("Hello there"), EOS]
    piece = feed_once(tokenizer, ids, "stop", logprobs(len(ids)))
    assert (piece.token_ids, piece.logprobs) == (ids, logprobs(len(ids)))


def test_tokens_beyond_a_stop_string_have_none(tokenizer):
    ids = [token for word in ("a", " STOP", " b") for token in tokenizer.encode(word)]
    piece = feed_once(tokenizer, ids, None, logprobs(len(ids)), stops=["STOP"])
    assert 0 < len(piece.token_ids) < len(ids)
    assert piece.logprobs == logprobs(len(piece.token_ids))


def test_no_log_probabilities_are_none(tokenizer):
    assert feed_once(tokenizer, tokenizer.encode("Hello"), None, ()).logprobs == []


# ---------------------------------------------------------------- any completion

FRAGMENTS = [
    OPEN, CLOSE, CALL, BLOCK, '<｜DSML｜invoke name="g">', "</｜DSML｜invoke>", "</｜DSML｜parameter>", "｜DSML｜",
    "</think>", "<think>", '<｜DSML｜parameter name="n" string="false">', '<｜DSML｜parameter name="t" string="true">',
    "[1, {}]", "<", "</", ">", "\n", "\n\n", " ", "a", " word", '"', "\\", "{", "é", "東京", "🙂", "\x00", "STOP", "ST",
    "OP",
]  # fmt: skip
STOPS = ["STOP", "\n\n\n", "</think>a", "🙂é", "OP<", OPEN + "a"]
TAG = re.compile("<｜DSML｜(tool_calls>|invoke|parameter)|</｜DSML｜(tool_calls|invoke|parameter)>")


def check_any_grouping(run, tokenizer, pieces: list[str], sizes: list[int], options) -> None:
    """Fields must not depend on how the text was cut into tokens, or how tokens were put into steps."""
    finish_reason = options.pop("finish_reason")
    end = [EOS] if finish_reason == "stop" else []
    text = "".join(pieces)
    ids = [token for piece in pieces for token in tokenizer.encode(piece)] + end
    single = run([[token] for token in ids], finish_reason, **options)
    steps, at, size = [], 0, itertools.cycle(sizes)
    while at < len(ids):
        steps.append(ids[at : at + next(size)])
        at += len(steps[-1])
    assert run(steps, finish_reason, **options) == single
    cut_otherwise = [token for character in text for token in tokenizer.encode(character)] + end
    assert shown(run([[token] for token in cut_otherwise], finish_reason, **options)) == shown(single)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in single.calls)
    assert single.reasoning_tokens <= single.completion_tokens <= len(ids)
    if options["parses_tools"]:
        assert not TAG.search(single.content)
    else:
        assert not single.calls
        if not options["stops"] and not options["is_thinking"]:
            assert single.content == text


OPTIONS = st.fixed_dictionaries(
    {
        "finish_reason": st.sampled_from(["stop", "length"]),
        "is_thinking": st.booleans(),
        "parses_tools": st.booleans(),
        "include_stop": st.booleans(),
        "stops": st.lists(st.sampled_from(STOPS), max_size=2),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), min_size=1, max_size=12).filter(any),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    options=OPTIONS,
)
def test_any_cut_of_any_completion_gives_the_same_fields(run, tokenizer, pieces, sizes, options):
    check_any_grouping(run, tokenizer, pieces, sizes, dict(options))


def fuzz(run, tokenizer, seconds: float) -> None:
    until = time.monotonic() + seconds
    for seed in itertools.count():
        rng = random.Random(seed)
        pieces = rng.choices(FRAGMENTS, k=rng.randint(1, 40))
        pieces += [chr(rng.choice([rng.randrange(32, 0x250), rng.randrange(0x10000, 0x10FFFF)]))]
        rng.shuffle(pieces)
        options = {
            "finish_reason": rng.choice(["stop", "length"]),
            "is_thinking": rng.random() < 0.5,
            "parses_tools": rng.random() < 0.8,
            "include_stop": rng.random() < 0.3,
            "stops": rng.choice([[], rng.sample(STOPS, 2)]),
        }
        try:
            check_any_grouping(run, tokenizer, pieces, [rng.randint(1, 9) for _ in range(3)], options)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        if time.monotonic() > until:
            return


def test_random_completions_for_two_seconds(run, tokenizer):
    fuzz(run, tokenizer, 2)


@pytest.mark.long
def test_random_completions_for_a_minute(run, tokenizer):
    fuzz(run, tokenizer, 60)
