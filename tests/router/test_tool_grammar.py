"""Grammars of tool calls: what few bytes of a schema can make of themselves has a bound."""

from __future__ import annotations

import pytest

from router.errors import InvalidRequest
from router.tool_grammar import MAX_FORMS, calls_grammar
from router.tools import read_functions


def grammar(parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    return calls_grammar(read_functions(tools), is_parallel=False)


def doubling(depth, leaf):
    """Return parameters whose only value has 2 ** depth alternatives."""
    steps = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(depth)}
    return {"properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": {**steps, f"a{depth}": leaf}}


@pytest.mark.parametrize("leaf", [{"type": "integer"}, {"anyOf": []}])
def test_alternatives_that_double_behind_references_are_refused(leaf):
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FORMS} alternatives"):
        grammar(doubling(18, leaf))


def test_a_few_alternatives_behind_references_are_followed():
    assert "%json" in grammar(doubling(4, {"type": "integer"}))


def test_definitions_that_many_parameters_repeat_are_refused():
    definitions = {"big": {"enum": ["x" * 100] * 100}}
    many = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/big"}, "minItems": i} for i in range(100)}
    with pytest.raises(InvalidRequest, match="bytes of grammar"):
        grammar({"properties": many, "$defs": definitions})
