"""CallArguments: the JSON text of one tool call's arguments, written while the values come.

A value that the model flags as a string is text and goes out as it comes. Any other is JSON, goes out as it stands
once it is whole, and becomes a string if it is no JSON. The schema decides where it contradicts the flag: text is
JSON if no string is allowed there and the JSON's type is; JSON is text if a string is allowed and the JSON's type is
not. Of parameters with the same name the first counts.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

# Readers of JSON give up at some depth; this is well below that of Python's.
MAX_JSON_DEPTH = 200
MAX_SCHEMA_DEPTH = 4

_SURROGATE = re.compile("[\ud800-\udfff]")
_quote = json.JSONEncoder(ensure_ascii=False).encode


class CallArguments:
    """Takes names and values in turn. What it returns joins to a JSON object, wherever the model stops.

    schema: the JSON schema of the function's parameters, if it is known.
    """

    __slots__ = ("_is_streamed", "_is_text", "_name", "_names", "_pieces", "_properties", "_separator", "_types")

    def __init__(self, schema: Any = None) -> None:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._names: set[str] = set()
        self._separator = "{"
        # Of the value that is open:
        self._name = ""
        self._types: frozenset[str] | None = None
        self._is_text = False
        self._is_streamed = False
        self._pieces: list[str] | None = None

    def begin(self, name: str, *, is_text: bool) -> str:
        """Begin a parameter. is_text: the model's flag."""
        if name in self._names:
            return ""
        self._names.add(name)
        self._name = name
        self._types = _allowed_types(self._properties.get(name))
        self._is_text = is_text
        self._is_streamed = is_text and (self._types is None or "string" in self._types)
        if self._is_streamed:
            return self._key() + '"'
        self._pieces = []
        return ""

    def feed(self, text: str) -> str:
        """Take the next piece of the value."""
        if self._is_streamed:
            return _escaped(_quote(text)[1:-1])
        if self._pieces is not None:
            self._pieces.append(text)
        return ""

    def end(self) -> str:
        """End the value, which is whole."""
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            return self._key() + self._json("".join(pieces))
        was_streamed, self._is_streamed = self._is_streamed, False
        return '"' if was_streamed else ""

    def close(self) -> str:
        """End the object. A text that is open ends where it is; other values, which may lack a part, are left out."""
        quote = '"' if self._is_streamed else ""
        return quote + ("{}" if self._separator == "{" else "}")

    def _key(self) -> str:
        separator, self._separator = self._separator, ", "
        return f"{separator}{_escaped(_quote(self._name))}: "

    def _json(self, raw: str) -> str:
        """Return a whole value as JSON: as the model wrote it, or as a string."""
        try:
            value = _read(raw)
        except (ValueError, RecursionError):
            return _escaped(_quote(raw))
        types = self._types
        # Where neither is allowed, it goes out as what the model says it is; whoever runs the tool will complain.
        if types is not None and types.isdisjoint(_types_of(value)) and (self._is_text or "string" in types):
            return _escaped(_quote(raw))
        return _escaped(raw.strip(" \t\r\n"))


def _escaped(text: str) -> str:
    """Return JSON text without lone surrogates, which UTF-8 can't carry."""
    return text if text.isascii() else _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_decode = json.JSONDecoder(parse_constant=_refuse).decode


def _read(raw: str) -> Any:
    """Return the value of JSON text. Raises ValueError, or RecursionError if it is very deep."""
    value = _decode(raw)
    if raw.count("[") + raw.count("{") > MAX_JSON_DEPTH:
        level = [value]
        for _ in range(MAX_JSON_DEPTH):
            containers = [v for v in level if isinstance(v, (dict, list))]
            level = [child for c in containers for child in (c.values() if isinstance(c, dict) else c)]
        if level:
            raise ValueError("too deep")
    return value


def _types_of(value: Any) -> set[str]:
    """Return the names that JSON Schema has for a value's type."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def _allowed_types(schema: Any, depth: int = 0) -> frozenset[str] | None:
    """Return the types that a schema allows, or None if it doesn't say, or says it in a way that is not read here."""
    if not isinstance(schema, dict) or depth > MAX_SCHEMA_DEPTH:
        return None
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(n for n in names if isinstance(n, str))
    if "const" in schema:
        return frozenset(_types_of(schema["const"]))
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*map(_types_of, schema["enum"]))
    for options in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(options, list):
            each = [_allowed_types(option, depth + 1) for option in options]
            return None if None in each else frozenset().union(*[types for types in each if types is not None])
    return None
