"""The reasoning split: every character once, in the right field, whatever the cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.reasoning import ReasoningSplitter

FRAGMENTS = st.sampled_from(["a", "<", "</", "</th", "ink>", "</think>", "<think>", ">", "think", "b "])


def split(pieces: list[str], *, is_thinking: bool = True) -> tuple[str, str]:
    splitter = ReasoningSplitter(is_thinking=is_thinking)
    parts = [splitter.feed(p) for p in pieces] + [splitter.finish()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


@settings(max_examples=400, deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=10))
def test_any_cut_gives_the_same_fields(fragments):
    text = "".join(fragments)
    assert split(fragments) == split([text]) == split(list(text))


@settings(max_examples=400, deadline=None)
@given(fragments=st.lists(FRAGMENTS, max_size=10))
def test_only_the_markers_are_missing(fragments):
    text = "".join(fragments)
    reasoning, content = split(fragments)
    body = text.removeprefix("<think>")
    assert (reasoning, content) == (body.partition("</think>")[0], body.partition("</think>")[2])


def test_without_thinking_everything_is_content():
    assert split(["Hi</think>", "x"], is_thinking=False) == ("", "Hi</think>x")


def test_an_answer_that_never_closes_is_reasoning_throughout():
    assert split(["Good", " day</thi"]) == ("Good day</thi", "")
