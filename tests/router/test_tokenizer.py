"""Detokenizer and stop strings: any cut of the same bytes or text gives the same result."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tokenizer import Detokenizer, StopHolder, Tokenizer


def joined(detokenizer: Detokenizer, pieces: list[list[int]]) -> str:
    return "".join([detokenizer.feed(p) for p in pieces]) + detokenizer.finish()


def cut(items, places):
    """Cut a sequence at the places (any integers)."""
    at = sorted({p % (len(items) + 1) for p in places} | {0, len(items)})
    return [items[a:b] for a, b in itertools.pairwise(at)]


def test_a_folder_without_tokenizer_has_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_vocabulary_has_every_byte_and_marker(tokenizer):
    assert tokenizer.vocab_size == 129280
    assert {b for b in tokenizer.token_bytes if len(b) == 1} == {bytes([b]) for b in range(256)}
    assert tokenizer.token_id("</think>") == 128822
    assert tokenizer.token_bytes[128822] == b"</think>"
    assert tokenizer.encode("<｜User｜>hi") == [128803, *tokenizer.encode("hi")]


def test_a_long_text_is_encoded_without_the_interpreters_lock(tokenizer):
    tokenizer.encode("a b c " * 10_000)  # what is built once
    working = threading.Thread(target=tokenizer.encode, args=("a b c " * 100_000,))
    begun = before = time.monotonic()
    longest = 0.0
    working.start()
    while working.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        longest, before = max(longest, now - before), now
    assert longest < (before - begun) / 2


@pytest.mark.parametrize("text", ["Hello 🙂 é\n<｜User｜>hi</think> ", "中文 and\t\x00 more  "])
def test_a_long_text_has_the_tokens_of_its_parts(tokenizer, text):
    marker = "<｜Assistant｜>"
    once = tokenizer.encode(text + marker)
    assert tokenizer.encode((text + marker) * 1000) == once * 1000


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40), places=st.lists(st.integers(0, 200), max_size=6))
def test_pieces_of_any_cut_join_to_the_text(tokenizer, text, places):
    ids = tokenizer.encode(text)
    assert joined(Detokenizer(tokenizer, skip_special_tokens=False), cut(ids, places)) == text


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 129279), max_size=12), places=st.lists(st.integers(0, 50), max_size=4))
def test_any_ids_decode_as_all_their_bytes_at_once(tokenizer, ids, places):
    data = b"".join(tokenizer.token_bytes[i] for i in ids if i not in tokenizer.special_ids)
    assert joined(Detokenizer(tokenizer), cut(ids, places)) == data.decode("utf-8", "replace")


def test_an_unfinished_character_waits_and_is_marked_at_the_end(tokenizer):
    by_byte = {b: i for i, b in enumerate(tokenizer.token_bytes) if len(b) == 1}
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed([by_byte[b"a"], by_byte[b"\xf0"], by_byte[b"\x9f"]]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_and_ids_beyond_the_vocabulary_have_no_text(tokenizer):
    assert Detokenizer(tokenizer).feed([0, 1, 500_000, -1, 128000]) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).feed([1]) == "<｜end▁of▁sentence｜>"


def first_stop(text: str, stops: list[str]) -> str:
    """Brute force: read character by character, cut the longest stop string that completes first."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc", max_size=14),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 20), max_size=14),
)
def test_stop_strings_cut_the_same_text_however_it_is_cut(text, stops, places):
    holder = StopHolder(stops)
    shown = "".join([holder.feed(p) for p in cut(text, places)])
    shown += holder.finish()
    assert shown == first_stop(text, stops)
    assert (holder.matched is not None) == (shown != text)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=5))
def test_no_more_is_held_than_may_become_a_stop_string(text, stop):
    holder = StopHolder([stop])
    shown = ""
    for n, character in enumerate(text, 1):
        shown += holder.feed(character)
        if holder.matched is not None:
            return
        assert stop.startswith(text[len(shown) : n])


def test_stop_string_can_be_kept_in_the_text():
    holder = StopHolder(["end"], include_stop=True)
    assert holder.feed("the en") + holder.feed("d of it") == "the end"


def test_after_a_match_nothing_more_comes():
    holder = StopHolder(["x"])
    assert holder.feed("axb") == "a"
    assert holder.feed("more") + holder.finish() == ""
