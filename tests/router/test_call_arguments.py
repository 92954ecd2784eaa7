"""Arguments of a tool call: always a JSON object, with the types that model and schema agree on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.call_arguments import MAX_JSON_DEPTH, CallArguments


def schema_of(**properties):
    return {"type": "object", "properties": properties}


def write(schema, *parameters: tuple[str, bool, str]) -> str:
    """The arguments of a call whose (name, flag, value) come whole."""
    arguments = CallArguments(schema)
    parts = [
        arguments.begin(name, is_text=is_text) + arguments.feed(value) + arguments.end()
        for name, is_text, value in parameters
    ]
    return "".join(parts) + arguments.close()


def value_of(raw: str, *, is_text: bool, schema=None):
    return json.loads(write(schema_of(k=schema) if schema is not None else None, ("k", is_text, raw)))["k"]


STRING, INTEGER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}


@pytest.mark.parametrize(
    "raw", ["", " padded ", "123", "true", "null", '{"a": 1}', 'say "hi" \\ ok', "a\nb\t\0\x7f", "東京 🙂"]
)
@pytest.mark.parametrize(
    "schema", [None, STRING, True, {"type": ["null", "string"]}, {"$ref": "#/x"}, {"enum": ["a", 1]}]
)
def test_a_text_stays_a_text_where_one_is_allowed(raw, schema):
    assert value_of(raw, is_text=True, schema=schema) == raw


@pytest.mark.parametrize("raw", ["3", "-1.5e3", "true", "null", "[1, 2]", ' {"a": {"b": []}} ', '"text"', '"\\ud83d"'])
def test_json_goes_out_as_it_stands(raw):
    assert value_of(raw, is_text=False) == json.loads(raw)
    assert write(None, ("k", False, raw)) == f'{{"k": {raw.strip()}}}'


@pytest.mark.parametrize(
    "raw",
    ["", "Riga", "{'a': 1}", "[1, 2", "NaN", "[Infinity]", "True", '"a\nb"', "1 2", "1" * 5000, "[" * 100_000],
    ids=lambda raw: raw[:12],
)
@pytest.mark.parametrize("schema", [None, STRING, INTEGER])
def test_what_is_no_json_becomes_a_string(raw, schema):
    assert value_of(raw, is_text=False, schema=schema) == raw


def test_json_too_deep_for_readers_becomes_a_string():
    deepest = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert value_of(deepest, is_text=False) == json.loads(deepest)
    assert value_of(f"[{deepest}]", is_text=False) == f"[{deepest}]"


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("3", INTEGER, 3),
        ("3.0", INTEGER, 3.0),
        ("3.5", INTEGER, "3.5"),
        ("three", INTEGER, "three"),
        ("3", {"type": "number"}, 3),
        ("true", {"type": "boolean"}, True),
        ("true", INTEGER, "true"),
        ("[1]", {"type": "array"}, [1]),
        ('{"a": 1}', OBJECT, {"a": 1}),
        ("null", {"type": ["integer", "null"]}, None),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"const": 2}, 2),
        ("2", {"anyOf": [INTEGER, {"type": "null"}]}, 2),
        ("2", {"anyOf": [INTEGER, STRING]}, "2"),
        ("2", {"oneOf": [INTEGER, {"$ref": "#/x"}]}, "2"),
    ],
)
def test_a_text_is_json_where_the_schema_has_no_strings(raw, schema, value):
    assert value_of(raw, is_text=True, schema=schema) == value


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("123", STRING, "123"),
        (" 123", STRING, " 123"),
        ('"quoted"', STRING, "quoted"),
        ("null", {"type": ["string", "null"]}, None),
        ("123", {"type": ["string", "null"]}, "123"),
        ("[1]", OBJECT, [1]),
    ],
)
def test_json_is_a_text_where_the_schema_has_strings_and_not_its_type(raw, schema, value):
    assert value_of(raw, is_text=False, schema=schema) == value


def test_no_parameters_are_an_empty_object():
    assert write(None) == "{}"


def test_arguments_are_written_as_python_writes_them():
    text = write(None, ("location", True, "Beijing"), ("days", False, "3"), ('o"d\nd', True, "é"))
    assert text == json.dumps({"location": "Beijing", "days": 3, 'o"d\nd': "é"}, ensure_ascii=False)


@pytest.mark.parametrize("is_text", [True, False])
def test_the_first_of_a_name_counts(is_text):
    assert write(None, ("k", True, "a"), ("k", is_text, "2"), ("l", True, "c")) == '{"k": "a", "l": "c"}'


def test_a_text_goes_out_as_it_comes():
    arguments = CallArguments(schema_of(k=STRING))
    assert arguments.begin("k", is_text=True) == '{"k": "'
    assert arguments.feed('a"') == 'a\\"'
    assert arguments.feed("b") == "b"


def test_a_text_that_is_cut_ends_where_it_is():
    arguments = CallArguments(None)
    text = arguments.begin("k", is_text=True) + arguments.feed("ab") + arguments.close()
    assert text == '{"k": "ab"}'


@pytest.mark.parametrize("before", [[], [("j", True, "x")]])
def test_json_that_is_cut_is_left_out(before):
    arguments = CallArguments(None)
    text = "".join(arguments.begin(n, is_text=t) + arguments.feed(v) + arguments.end() for n, t, v in before)
    text += arguments.begin("k", is_text=False) + arguments.feed("12") + arguments.close()
    assert json.loads(text) == {n: v for n, _, v in before}


def test_lone_surrogates_are_escaped():
    text = write(None, ("\ud800", True, "\udfff"), ("j", False, '"\ud800"'), ("i", False, "\udc00"))
    text.encode()
    assert json.loads(text) == {"\ud800": "\udfff", "j": "\ud800", "i": "\udc00"}


@pytest.mark.parametrize("schema", [None, True, [], {"properties": 3}, {"properties": {"k": {"type": 7, "enum": 3}}}])
def test_a_schema_that_says_nothing_is_no_obstacle(schema):
    assert write(schema, ("k", True, "a"), ("j", False, "1")) == '{"k": "a", "j": 1}'


def test_a_very_deep_schema_says_nothing():
    schema = STRING
    for _ in range(500):
        schema = {"anyOf": [schema]}
    assert value_of("1", is_text=False, schema=schema) == 1


SCHEMAS = st.sampled_from([None, STRING, INTEGER, OBJECT, {"type": ["string", "null"]}, {"enum": [1, None]}])


@settings(max_examples=300, deadline=None)
@given(name=st.text(), is_text=st.booleans(), raw=st.text() | st.from_regex(r"[\[\]{}\",:1ntE \\.-]*"), schema=SCHEMAS)
def test_arguments_are_always_an_object_with_the_value(name, is_text, raw, schema):
    arguments = json.loads(write({"properties": {name: schema}}, (name, is_text, raw)))
    assert list(arguments) == [name]
    assert arguments[name] == raw or arguments[name] == json.loads(raw)
