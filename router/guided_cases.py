"""Grammars that router/guided_bench.py measures: ordinary ones with answers, one for each keyword, and hostile ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def fitting_answers() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield (name, kind, source, answers that fit)."""
    person = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "is_new": {"type": "boolean"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    yield "small object", "schema", json.dumps(person), ['{"name": "Ann Lee", "age": 30, "is_new": false}']
    yield "any object", "schema", '{"type": "object"}', [json.dumps({"a": [1, {"b": "text " * 20}], "c": None})]
    order = {
        "type": "object",
        "properties": {
            "customer": {"$ref": "#/$defs/party"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1},
            "note": {"anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}]},
        },
        "required": ["customer", "lines", "note"],
        "additionalProperties": False,
        "$defs": {
            "party": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "address": {"type": "array", "items": {"type": "string"}}},
                "required": ["name", "address"],
                "additionalProperties": False,
            },
            "line": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                    "count": {"type": "integer", "minimum": 1, "maximum": 999},
                    "price": {"type": "number"},
                    "parts": {"type": "array", "items": {"$ref": "#/$defs/line"}},
                },
                "required": ["sku", "count", "price"],
                "additionalProperties": False,
            },
        },
    }
    line = {"sku": "ABC-1234", "count": 3, "price": 9.5}
    whole = {
        "customer": {"name": "Zoë & Søn", "address": ["1 High Street", "北京"]},
        "lines": [{**line, "parts": [{**line, "parts": [line]}]}, line],
        "note": "leave it at the door",
    }
    yield "nested, recursive", "schema", json.dumps(order), [json.dumps(whole, ensure_ascii=False)]
    nasty = {
        "type": "object",
        "properties": {
            "city": {"enum": [f"city number {n} of {n * 7919 % 1000}" for n in range(1000)]},
            "when": {"type": "string", "format": "date-time"},
            "code": {"type": "string", "pattern": "^([a-z]+-){2,8}(\\d{2,4}|[A-F]{6}(_x)*)$"},
            "kind": {"oneOf": [{"const": f"k{n}"} for n in range(40)]},
            **{f"field_{n}": {"type": ["string", "integer", "null"]} for n in range(60)},
        },
        "required": ["city", "when", "code"],
        "additionalProperties": {"type": "array", "items": {"type": "number", "minimum": -2.5, "maximum": 1e6}},
    }
    document = {
        "city": "city number 514 of 366",
        "when": "2026-11-29T12:30:00Z",
        "code": "ab-cde-f-ABCDEF_x_x",
        "kind": "k17",
        "field_3": "x y z",
        "field_40": 12,
        "other": [1, -2.25],
    }
    yield "enums, patterns, 64 properties", "schema", json.dumps(nasty), [json.dumps(document)]
    yield "regex", "regex", r"(\d{1,3}\.){3}\d{1,3}:\d{2,5} \w+", ["192.168.10.254:8080 gateway"]
    yield "free text of 20 to 2,000 characters", "regex", r"[\s\S]{20,2000}", ["All of this is text. " * 15]


# name: (schema, a document that it allows, one that it does not)
KEYWORDS: dict[str, tuple[Any, Any, Any]] = {
    "type": ({"type": "integer"}, 1, "x"),
    "enum": ({"enum": ["a", 2]}, 2, 3),
    "const": ({"const": {"a": 1}}, {"a": 1}, {"a": 2}),
    "required": ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, {"a": 1}, {}),
    "additionalProperties": ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}, {"a": "x"}),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False},
        {"n1": 1},
        {"n1": "x"},
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, {"aa": 1}, {"b": 1}),
    "minProperties": ({"type": "object", "minProperties": 2}, {"a": 1, "b": 1}, {"a": 1}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        {"a": 1, "b": 1},
        {"a": 1},
    ),
    "items": ({"type": "array", "items": {"type": "integer"}}, [1], ["x"]),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}]}, [1, "x"], ["x"]),
    "minItems": ({"type": "array", "minItems": 2}, [1, 2], [1]),
    "maxItems": ({"type": "array", "maxItems": 1}, [1], [1, 2]),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [1, 2], [1, 1]),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, ["x", 1], ["x"]),
    "minLength": ({"type": "string", "minLength": 2}, "ab", "a"),
    "maxLength": ({"type": "string", "maxLength": 2}, "ab", "abc"),
    "pattern": ({"type": "string", "pattern": "^a+$"}, "aa", "ab"),
    "pattern, not anchored": ({"type": "string", "pattern": "b"}, "abc", "ac"),
    "pattern and maxLength": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "aa", "aaa"),
    "format date": ({"type": "string", "format": "date"}, "2026-11-29", "soon"),
    "format uuid": ({"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000", "x"),
    "minimum": ({"type": "integer", "minimum": 3}, 3, 2),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 1.5}, 1.25, 1.5),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, 15, 16),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, "x"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"const": "a"}]}, "a", "b"),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, 4, 6),
    "not": ({"type": "integer", "not": {"const": 3}}, 4, 3),
    "if, then": ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}, 4, 6),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, 1, "x"),
    "$ref beside others": ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, 3, 2),
    "type beside anyOf": ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}, 6, 3),
}


def hostile() -> dict[str, tuple[str, str]]:
    """Return (kind, source) by name."""
    patterns = {f"^p{n}[a-z]*$": {"type": "integer"} for n in range(1500)}
    pairs = {
        f"d{n}": {"anyOf": [{"type": "array", "items": [{"$ref": f"#/$defs/d{n + 1}"}] * 2}, {"type": "null"}]}
        for n in range(40)
    }
    triple: dict[str, Any] = {"type": "array"}
    for _ in range(3):
        triple = {"type": "array", "minItems": 1000, "items": triple}
    return {
        "regex a{1,100000}": ("regex", "a{1,100000}"),
        "regex ((((x{50}){50}){50}){50}){50}": ("regex", "((((x{50}){50}){50}){50}){50}"),
        "regex (a|aa|aaa)*b": ("regex", "(a|aa|aaa)*b"),
        "regex [\\s\\S]*[ae].{100}": ("regex", r"[\s\S]*[ae].{100}"),
        "regex of 5,000 nested groups": ("regex", "(" * 5000 + "a" + ")" * 5000),
        "enum of 10,000": ("schema", json.dumps({"enum": [f"value {n} {n * 7919 % 10007}" for n in range(10_000)]})),
        "1,500 patternProperties": ("schema", json.dumps({"type": "object", "patternProperties": patterns})),
        "allOf of 500 patterns": (
            "schema",
            json.dumps({"allOf": [{"type": "string", "pattern": f"a{n}.*b"} for n in range(500)]}),
        ),
        "multipleOf 10000019": ("schema", json.dumps({"type": "integer", "multipleOf": 10000019})),
        "2,000 optional properties": (
            "schema",
            json.dumps({"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(2000)}}),
        ),
        "string of up to 1,000,000": ("schema", json.dumps({"type": "string", "maxLength": 1_000_000})),
        "arrays of 1,000 in arrays of 1,000, three deep": ("schema", json.dumps(triple)),
        "references that double 40 times": (
            "schema",
            json.dumps({"$ref": "#/$defs/d0", "$defs": {**pairs, "d40": {"type": "integer"}}}),
        ),
        "reference to itself": ("schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})),
    }
