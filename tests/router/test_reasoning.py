"""The reasoning split: every character once, in the right field, whatever the cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.reasoning import MAX_SPACE, OPEN_BLOCK, OPEN_INVOKE, ReasoningSplitter

FRAGMENTS = st.sampled_from(["a", "<", "</", "</th", "ink>", "</think>", "<think>", ">", "think", "b ", "\n"])
BLOCK = st.sampled_from([OPEN_BLOCK, OPEN_INVOKE, "<｜DSML｜", "tool_calls>", "\n\n", " " * (MAX_SPACE - 1)])
MIXTURES = st.lists(FRAGMENTS | BLOCK, max_size=12)


def split(pieces, *, is_thinking: bool = True, ends_at_tool_calls: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_thinking=is_thinking, ends_at_tool_calls=ends_at_tool_calls)
    parts = [splitter.feed(p) for p in pieces] + [splitter.finish()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


@settings(max_examples=400, deadline=None)
@given(fragments=MIXTURES, ends_at_tool_calls=st.booleans())
def test_any_cut_gives_the_same_fields(fragments, ends_at_tool_calls):
    text = "".join(fragments)
    fields = split([text], ends_at_tool_calls=ends_at_tool_calls)
    assert split(fragments, ends_at_tool_calls=ends_at_tool_calls) == fields
    assert split(text, ends_at_tool_calls=ends_at_tool_calls) == fields


@settings(max_examples=400, deadline=None)
@given(fragments=MIXTURES)
def test_only_the_markers_are_missing(fragments):
    text = "".join(fragments)
    reasoning, content = split(fragments)
    body = text.removeprefix("<think>")
    assert (reasoning, content) == (body.partition("</think>")[0], body.partition("</think>")[2])


@settings(max_examples=400, deadline=None)
@given(fragments=MIXTURES)
def test_a_block_loses_nothing(fragments):
    text = "".join(fragments).replace("th", "")  # no marker of reasoning
    assert "".join(split(text, ends_at_tool_calls=True)) == text


def test_without_thinking_everything_is_content():
    assert split(["Hi</think>", "x"], is_thinking=False) == ("", "Hi</think>x")


def test_an_answer_that_never_closes_is_reasoning_throughout():
    assert split(["Good", " day</thi"]) == ("Good day</thi", "")


@pytest.mark.parametrize("space", ["", "\n", " " * MAX_SPACE])
@pytest.mark.parametrize("line_ends", ["", "\n", "\n\n"])
def test_a_block_of_calls_ends_reasoning_if_calls_are_parsed(line_ends, space):
    block = line_ends + OPEN_BLOCK + space + OPEN_INVOKE + ' name="f">'
    assert split(["plan" + block], ends_at_tool_calls=True) == ("plan", block)
    assert split(["plan" + block]) == ("plan" + block, "")


def test_line_ends_beyond_the_blank_line_are_reasoning():
    block = f"\n\n{OPEN_BLOCK}\n{OPEN_INVOKE}"
    assert split("plan\n" + block, ends_at_tool_calls=True) == ("plan\n", block)


@pytest.mark.parametrize(
    "text", [f"{OPEN_BLOCK} begins it", f"{OPEN_BLOCK}\n\n<b>", OPEN_INVOKE, OPEN_BLOCK + " " * 9 + OPEN_INVOKE]
)
def test_thoughts_about_markup_stay_thoughts(text):
    assert split(text + ".</think>ok", ends_at_tool_calls=True) == (text + ".", "ok")


@pytest.mark.parametrize("end", range(len("<｜DSML｜"), len(OPEN_BLOCK + OPEN_INVOKE)))
def test_a_block_that_was_cut_is_no_reasoning(end):
    cut = "\n\n" + (OPEN_BLOCK + OPEN_INVOKE)[:end]
    assert split("plan" + cut, ends_at_tool_calls=True) == ("plan", cut)


def test_text_without_markers_passes_at_once():
    splitter = ReasoningSplitter(is_thinking=True, ends_at_tool_calls=True)
    assert [splitter.feed(p) for p in ("So", " a", " > b\n", "c <", " d")] == [
        (shown, "") for shown in ("So", " a", " > b", "\nc ", "< d")
    ]


def test_line_ends_wait_only_where_calls_are_parsed():
    assert ReasoningSplitter(is_thinking=True).feed("So\n\n") == ("So\n\n", "")


def test_a_first_tag_with_much_space_behind_it_is_a_thought():
    text = OPEN_BLOCK + " " * (MAX_SPACE + 1)
    assert split(text, ends_at_tool_calls=True) == (text, "")
