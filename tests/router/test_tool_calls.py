"""Tool calls in text: the same fields whatever the cut, no markup shown, and arguments that always parse."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tool_calls import MAX_HEAD_CHARS, ToolCallParser

CASES = Path(__file__).parent.parent / "cases" / "handed.jsonl"
API_05 = next(c for c in map(json.loads, CASES.read_text().splitlines()) if c["id"] == "API-05")
SCHEMAS = {
    tool["function"]["name"]: tool["function"]["parameters"] for tool in API_05["input"]["http"]["body"]["tools"]
}

OPEN, CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
END = "</｜DSML｜invoke>"


def begin(name: str) -> str:
    return f'<｜DSML｜invoke name="{name}">'


def parameter(name: str, value: str, string: str = "true") -> str:
    return f'<｜DSML｜parameter name="{name}" string="{string}">{value}</｜DSML｜parameter>'


def call(name: str, *parameters: str) -> str:
    return "\n".join([begin(name), *parameters, END])


def block(*calls: str) -> str:
    return "\n".join([OPEN, *calls, CLOSE])


class Fields(NamedTuple):
    content: str
    calls: list[tuple[str, str]]
    num_complete: int


def parse(pieces: Iterable[str], schemas=SCHEMAS) -> Fields:
    """The joined fields. Checks that deltas come in order, and that each call's id and name come once, first."""
    ids = (f"call_{n}" for n in itertools.count())
    parser = ToolCallParser(schemas=schemas, new_id=lambda: next(ids))
    content = ""
    calls: list[list[str]] = []
    for step in [*map(parser.feed, pieces), parser.finish()]:
        content += step[0]
        for delta in step[1]:
            if delta.id:
                assert (delta.index, delta.id, delta.arguments) == (len(calls), f"call_{len(calls)}", "")
                assert delta.name
                calls.append([delta.name, ""])
            else:
                assert (delta.index, delta.name) == (len(calls) - 1, "")
                assert delta.arguments
                calls[-1][1] += delta.arguments
    return Fields(content, [(name, arguments) for name, arguments in calls], parser.num_complete)


def parse_all_ways(text: str, schemas=SCHEMAS) -> Fields:
    fields = parse([text], schemas)
    assert parse(text, schemas) == fields
    return fields


def arguments_of(fields: Fields) -> list[tuple[str, dict]]:
    return [(name, json.loads(arguments)) for name, arguments in fields.calls]


@pytest.mark.parametrize("value", API_05["input"]["values_for_V"])
def test_api_05_a_call_is_the_same_at_every_cut(value):
    text = API_05["input"]["forced_text_template"].replace("{V}", value).removesuffix("<EOS>")
    fields = parse_all_ways(text)
    assert arguments_of(fields) == [("book_table", {"town": value, "seats": 3})]
    assert (fields.content, fields.num_complete) == ("Checking.", 1)
    for at in range(1, len(text)):
        assert parse([text[:at], text[at:]]) == fields


def test_calls_in_parallel_are_numbered():
    text = "\n\n" + block(call("a", parameter("k", "1")), call("b"), call("a", parameter("k", "2", "false")))
    fields = parse_all_ways(text)
    assert fields == Fields("", [("a", '{"k": "1"}'), ("b", "{}"), ("a", '{"k": 2}')], 3)


def test_a_text_value_goes_out_as_it_comes():
    parser = ToolCallParser(schemas=None)
    parser.feed(OPEN + begin("f") + parameter("k", "ab").removesuffix("</｜DSML｜parameter>"))
    assert [d.arguments for d in parser.feed("c < d")[1]] == ["c < d"]
    assert parser.feed("e<")[1][0].arguments == "e"


def test_a_call_is_announced_as_soon_as_its_name_is_known():
    parser = ToolCallParser(schemas=None)
    (delta,) = parser.feed(OPEN + begin("f"))[1]
    assert (delta.index, delta.name, delta.arguments) == (0, "f", "")


def test_ids_are_as_openai_writes_them_and_never_the_same():
    deltas = ToolCallParser(schemas=None).feed(call("f") * 100)[1]
    ids = {d.id for d in deltas if d.id}
    assert len(ids) == 100
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", i) for i in ids)


def test_the_schema_of_the_called_function_counts():
    schemas = {name: {"properties": {"k": {"type": kind}}} for name, kind in [("a", "string"), ("b", "integer")]}
    text = block(*(call(name, parameter("k", "7", "false"), parameter("j", "7")) for name in "abc"))
    assert parse_all_ways(text, schemas).calls == [
        ("a", '{"k": "7", "j": "7"}'),
        ("b", '{"k": 7, "j": "7"}'),
        ("c", '{"k": 7, "j": "7"}'),
    ]


@pytest.mark.parametrize("name", ["", 'a"b', "a>b", "<｜", "a b", 'x" string="false', "ключ", "\n", "😀" * 200])
def test_odd_parameter_names_are_kept(name):
    assert arguments_of(parse_all_ways(call("f", parameter(name, "v")))) == [("f", {name: "v"})]


@pytest.mark.parametrize(
    "value",
    [
        OPEN,
        CLOSE,
        END,
        begin("g"),
        "</think>",
        "<｜DSML｜parameter",
        "</｜DSML｜parameter",
        "<b>a</b>\n\n",
        "\n",
        "\\u0041\ud800",
    ],
)
def test_any_other_markup_in_a_value_is_part_of_it(value):
    assert arguments_of(parse_all_ways(block(call("f", parameter("k", value))))) == [("f", {"k": value})]


def test_the_flag_may_be_missing():
    text = call("f", parameter("k", "[1]").replace(' string="true"', ""))
    assert parse_all_ways(text).calls == [("f", '{"k": [1]}')]


@pytest.mark.parametrize("space", ["", "\n", " ", "\n\n\n", "\t\r\n "])
def test_any_white_space_between_the_elements(space):
    text = space.join(
        [OPEN, begin("f"), parameter("k", "v"), parameter("j", "1", "false"), END, begin("g"), END, CLOSE]
    )
    assert parse_all_ways(text + space) == Fields("", [("f", '{"k": "v", "j": 1}'), ("g", "{}")], 2)


@pytest.mark.parametrize(
    ("before", "content"),
    [("a\n\n", "a"), ("a\n", "a"), ("a", "a"), ("a\n\n\n", "a\n"), ("\n\n", ""), ("a \n\n", "a ")],
)
def test_the_blank_line_before_a_block_is_no_content(before, content):
    assert parse_all_ways(before + block(call("f"))).content == content


@pytest.mark.parametrize(
    ("behind", "content"),
    [
        ("", ""),
        ("\n\n", ""),
        ("\n\nDone.\n", "Done.\n"),
        ("</think>\n\nDone", "Done"),
        (" </thin", ""),
        (" </thing", "</thing"),
    ],
)
def test_what_follows_a_block_is_content(behind, content):
    fields = parse_all_ways(block(call("f")) + behind)
    assert (fields.content, fields.num_complete) == (content, 1)


def test_blocks_with_text_between_them():
    text = "One\n\n" + block(call("a")) + "\n\ntwo\n\n" + block(call("b")) + "\nthree"
    assert parse_all_ways(text) == Fields("Onetwothree", [("a", "{}"), ("b", "{}")], 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<",
        "a <",
        "\n",
        "\n\n",
        "\n\n\n<",
        "a\n\n<｜DSML",
        "<｜ DSML｜tool_calls>",
        "<｜DSML｜ is a token",
        "<｜DSML｜tool_call>",
        "</｜DSML｜tools>",
        "<think>x</think>",
        "<|DSML|tool_calls>",
        "1 << 2\n",
        "<\n\n<\n\n<｜DSML｜tool!",
    ],
)
def test_what_only_looks_like_markup_is_content(text):
    assert parse_all_ways(text) == Fields(text, [], 0)


PAIR = parameter("k", "v")
NAMELESS = "<｜DSML｜parameter>x</｜DSML｜parameter>"
ONE_CALL = Fields("", [("f", '{"k": "v"}')], 1)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a\n\n<｜DSML｜", Fields("a", [], 0)),
        ("a\n\n<｜DSML｜tool_ca", Fields("a", [], 0)),
        ("a\n\n" + OPEN, Fields("a", [], 0)),
        ("a\n\n" + OPEN + "\n<", Fields("a", [], 0)),
        ("a\n\n" + OPEN + '\n<｜DSML｜invoke name="f', Fields("a", [], 0)),
        (OPEN + begin("f"), Fields("", [("f", "{}")], 0)),
        (OPEN + begin("f") + "\n<｜DSML｜parameter", Fields("", [("f", "{}")], 0)),
        (OPEN + begin("f") + '\n<｜DSML｜parameter name="k" stri', Fields("", [("f", "{}")], 0)),
        (OPEN + begin("f") + PAIR.partition("</")[0], Fields("", [("f", '{"k": "v"}')], 0)),
        (OPEN + begin("f") + PAIR[:-3], Fields("", [("f", '{"k": "v"}')], 0)),
        (OPEN + begin("f") + parameter("k", "[1", "false").partition("</")[0], Fields("", [("f", "{}")], 0)),
        (OPEN + begin("f") + PAIR + "\n", Fields("", [("f", '{"k": "v"}')], 0)),
        (OPEN + begin("f") + PAIR + "</｜DSML｜inv", Fields("", [("f", '{"k": "v"}')], 0)),
        (OPEN + call("f", PAIR), ONE_CALL),
        (OPEN + call("f") + begin("g") + PAIR[:-9], Fields("", [("f", "{}"), ("g", '{"k": "v"}')], 1)),
    ],
)
def test_a_block_that_is_cut_has_a_defined_ending(text, fields):
    assert parse_all_ways(text) == fields


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        pytest.param(call("f", PAIR), ONE_CALL, id="no block"),
        pytest.param(
            OPEN + begin("f") + PAIR + begin("g") + END + CLOSE,
            Fields("", [("f", '{"k": "v"}'), ("g", "{}")], 2),
            id="next call",
        ),
        pytest.param(
            OPEN + begin("f") + PAIR + CLOSE + "a", Fields("a", [("f", '{"k": "v"}')], 1), id="block ends call"
        ),
        pytest.param(OPEN + " is a marker", Fields("is a marker", [], 0), id="no call in it"),
        pytest.param(
            "a" + CLOSE + "b" + END + "c</｜DSML｜parameter>d", Fields("abcd", [], 0), id="closing tags alone"
        ),
        pytest.param("a" + PAIR + "b" + END + "c", Fields("ac", [], 0), id="parameter without a call"),
        pytest.param(block(call("", PAIR)) + "a", Fields("a", [], 0), id="empty name"),
        pytest.param(block("<｜DSML｜invoke>" + PAIR + END) + "a", Fields("a", [], 0), id="no name"),
        pytest.param(block(begin("x" * MAX_HEAD_CHARS) + PAIR + END) + "a", Fields("a", [], 0), id="endless name"),
        pytest.param(block(call("f", '{"k": 1}')), Fields("", [("f", "{}")], 1), id="text between parameters"),
        pytest.param(block(call("f", NAMELESS, PAIR)), ONE_CALL, id="parameter without a name"),
        pytest.param(
            block(call("f", PAIR, parameter("k", "w"), parameter("k", "1", "false"))), ONE_CALL, id="same name again"
        ),
        pytest.param(block("oh", call("f"), "well"), Fields("ohwell", [("f", "{}")], 1), id="text in the block"),
    ],
)
def test_malformed_blocks_have_a_defined_meaning(text, fields):
    assert parse_all_ways(text) == fields


def test_at_every_length_the_arguments_parse_and_no_markup_is_shown():
    text = "Hm\n\n" + block(
        call("book_table", parameter("town", 'R"\\\n< 東'), parameter("seats", "31", "false")), call("g")
    )
    whole = parse([text])
    for end in range(text.index("｜DSML｜") + 6, len(text)):
        fields = parse_all_ways(text[:end])
        assert fields.content == "Hm"
        for (name, arguments), (full_name, full) in zip(arguments_of(fields), arguments_of(whole), strict=False):
            assert name == full_name
            assert full.get("town", "").startswith(arguments.get("town", ""))
            assert arguments.get("seats", 31) == 31


FRAGMENTS = st.sampled_from(
    [
        *'<\n a"\\{é🙂',
        OPEN,
        CLOSE,
        END,
        begin("book_table"),
        begin("g"),
        begin(""),
        parameter("town", "Riga"),
        parameter("seats", "3", "false"),
        '<｜DSML｜parameter name="town" string="true">',
        '<｜DSML｜parameter name="x" string="false">',
        "</｜DSML｜parameter>",
        "<｜DSML｜invoke",
        "</think>",
        "<",
        "</",
        "｜DSML｜",
        "tool_calls>",
        '">',
        ' name="',
        "\n\n",
        "[1]",
        "null",
    ]
)
MIXTURES = st.lists(FRAGMENTS | st.text(max_size=4), max_size=14)


@settings(max_examples=500, deadline=None)
@given(fragments=MIXTURES, places=st.lists(st.integers(0, 400), max_size=6))
def test_any_cut_of_any_text_gives_the_same_fields(fragments, places):
    text = "".join(fragments)
    at = sorted({p % (len(text) + 1) for p in places} | {0, len(text)})
    fields = parse_all_ways(text)
    assert parse(fragments) == fields
    assert parse(text[a:b] for a, b in itertools.pairwise(at)) == fields


@settings(max_examples=500, deadline=None)
@given(fragments=MIXTURES)
def test_arguments_are_always_objects_and_tags_never_shown(fragments):
    fields = parse(["".join(fragments)])
    assert all(isinstance(arguments, dict) for _, arguments in arguments_of(fields))
    assert not re.search(
        "<｜DSML｜(tool_calls>|invoke|parameter)|</｜DSML｜(tool_calls|invoke|parameter)>", fields.content
    )
    assert fields.num_complete <= len(fields.calls)


@settings(max_examples=300, deadline=None)
@given(fragments=MIXTURES)
def test_nothing_is_lost_of_text_without_the_token(fragments):
    text = "".join(fragments).replace("｜DSML｜", "")
    assert parse_all_ways(text) == Fields(text, [], 0)
