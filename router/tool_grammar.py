"""The grammar of an answer that calls tools: a block of calls, each with the parameters that its schema asks for.

Parameters come in the order of `properties`, the optional ones may be left out, others than those are not written. A
text is written raw, everything else as JSON. Of a text's schema enum, const, pattern and the two lengths are enforced.
A pattern that the raw text can't be held to makes it JSON. No text contains the DSML token, which is what ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from router.errors import InvalidRequest, Unsupported
from router.json_schema import bare, grammar_schema, resolved
from router.reasoning import DSML, OPEN_BLOCK, OPEN_INVOKE
from router.tool_calls import CLOSE_BLOCK, CLOSE_INVOKE, CLOSE_PARAMETER, OPEN_PARAMETER
from router.tools import Function

_BREAKS_MARKUP = re.compile(r'["<>｜\x00-\x1f\x7f]')
_KEPT_APART = {"properties", "required", "type", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
_TEXT_KEYS = {"type", "enum", "const", "pattern", "minLength", "maxLength", "format"}
# References make exponentially many ways to write a value, and repeat their definitions, out of few bytes.
MAX_FORMS = 256
MAX_RULE_CHARS = 128 << 10
_JSON_TYPES = ["object", "array", "number", "boolean", "null"]


def calls_grammar(functions: Sequence[Function], *, is_parallel: bool) -> str:
    """Return Lark rules whose `calls` is a block of one call, or of one or more if parallel, of `functions`.

    Raises InvalidRequest naming the schema that can't be followed.
    """
    return "\n".join(_Writer().block(functions, is_parallel=is_parallel))


class _Writer:
    """Collects rules. Each is made once; names count up."""

    def __init__(self) -> None:
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        self._num_chars = 0

    def block(self, functions: Sequence[Function], *, is_parallel: bool) -> list[str]:
        calls = [self._call(function, f"call{n}") for n, function in enumerate(functions)]
        repeat = "+" if is_parallel else ""
        begin = _line("\n\n" + OPEN_BLOCK)
        head = [f"calls: {begin} call{repeat} {_literal(CLOSE_BLOCK)}", f"call: {' | '.join(calls)}"]
        return [*head, *self._rules]

    def _call(self, function: Function, name: str) -> str:
        where = f"parameters of {function.name}"
        root = bare(function.parameters)
        if unknown := sorted(set(root) - _KEPT_APART):
            raise Unsupported("tools", f"{where}: {unknown[0]!r} beside `properties` can't be enforced")
        required = root.get("required") or []
        properties = root.get("properties") or {}
        if not isinstance(properties, dict):
            raise InvalidRequest(f"tools: {where}: properties must be an object", param="tools")
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise InvalidRequest(f"tools: {where}: required must be a list of names", param="tools")
        parts = []
        for key in dict.fromkeys([*properties, *required]):
            if not key or _BREAKS_MARKUP.search(key):
                raise InvalidRequest(f"tools: {where}: the markup of calls can't carry the name {key!r}", param="tools")
            rule = self._parameter(key, properties.get(key, {}), root)
            parts.append(rule if key in required else f"{rule}?")
        start = _line(f'{OPEN_INVOKE} name="{function.name}">')
        self._rules.append(f"{name}: {' '.join([start, *parts, _line(CLOSE_INVOKE)])}")
        return name

    def _parameter(self, key: str, schema: Any, root: dict[str, Any]) -> str:
        definitions = {k: root[k] for k in ("$defs", "definitions") if k in root}
        forms = []
        for is_text, value in _forms(schema, root, iter(range(MAX_FORMS))):
            start = _literal(f'{OPEN_PARAMETER} name="{key}" string="{"true" if is_text else "false"}">')
            if is_text:
                forms.append(f'{start} {self._lazy(value)} "\\n"')
            else:
                needs_more = isinstance(value, dict) and '"$ref"' in json.dumps(value)
                whole = grammar_schema({**value, **definitions} if needs_more else value)
                value_rule = self._rule("json", f"%json {json.dumps(whole, ensure_ascii=False)}")
                forms.append(f"{start} {value_rule} {_line(CLOSE_PARAMETER)}")
        return self._rule("parameter", " | ".join(forms))

    def _lazy(self, terminal: str) -> str:
        """Return a rule for text up to the first closing tag, that included."""
        terminal = self._rule("TEXT", f"({terminal} & {_NO_MARKUP}) {_literal(CLOSE_PARAMETER)}")
        return self._rule("text[lazy]", terminal)

    def _rule(self, kind: str, body: str) -> str:
        name, bracket, options = kind.partition("[")
        if f"{kind}: {body}" not in self._names:
            numbered = f"{name}{'_' if name.isupper() else ''}{len(self._names)}"
            self._names[f"{kind}: {body}"] = numbered
            self._rules.append(f"{numbered}{bracket}{options}: {body}")
            self._num_chars += len(body)
            if self._num_chars > MAX_RULE_CHARS:
                raise InvalidRequest(
                    f"tools: their schemas make more than {MAX_RULE_CHARS} bytes of grammar; make them smaller, or let "
                    "fewer parameters refer to definitions",
                    param="tools",
                    code="invalid_grammar",
                )
        return self._names[f"{kind}: {body}"]


def _forms(schema: Any, root: dict[str, Any], steps: Iterator[int]) -> Iterable[tuple[bool, Any]]:
    """Return the ways to write a parameter: (True, regex of the raw text) and (False, schema of the JSON).

    steps: as many as may be looked at.
    """
    if next(steps, None) is None:
        raise InvalidRequest(
            f"tools: a parameter has more than {MAX_FORMS} alternatives, counted behind references; leave some out",
            param="tools",
            code="invalid_grammar",
        )
    schema = resolved(schema, root)
    if schema is True or schema == {}:
        return [(True, _ANY_TEXT), (False, {"type": _JSON_TYPES})]
    if not isinstance(schema, dict):
        return [(False, schema)]
    for key in ("anyOf", "oneOf"):
        if set(schema) == {key} and isinstance(schema[key], list):
            return [form for branch in schema[key] for form in _forms(branch, root, steps)]
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return [form for kind in kinds for form in _forms({**schema, "type": kind}, root, steps)]
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and kinds in (None, "string") and set(schema) <= _TEXT_KEYS:
        texts = [value for value in values if isinstance(value, str)]
        others = [value for value in values if not isinstance(value, str)] if kinds is None else []
        forms: list[tuple[bool, Any]] = [(True, f"/({'|'.join(map(escaped, texts))})/")] if texts else []
        return forms + ([(False, {"enum": others})] if others or not texts else [])
    pattern = _search(schema["pattern"]) if "pattern" in schema else ""
    if kinds == "string" and set(schema) <= _TEXT_KEYS and pattern is not None:
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        text = f"/(?s:.{{{low},{high}}})/" if low or high != "" else _ANY_TEXT
        return [(True, f"{text} & {pattern}" if pattern else text)]
    return [(False, schema)]


def _search(pattern: Any) -> str | None:
    """Return a regex of whole texts in which `pattern` is found, None if it can't be put as one."""
    if not isinstance(pattern, str):
        return None
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    # A bar may part an anchor from the rest, and an anchor further inside can't be followed.
    if re.search(r"[\^$|]|\\[bB]|\(\?[^:]", re.sub(r"\\[^bB]|\[\^?|\([?]:", "", inner)):
        return None
    from llguidance import regex_to_lark

    anything = "(?s:.*)"
    whole = regex_to_lark(inner, use_ascii="dw").replace("\n", "\\n")
    return f"/{'' if begins else anything}(?:{whole}){'' if ends else anything}/"


def escaped(text: str) -> str:
    """Return a regex of exactly `text`."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _line(text: str) -> str:
    return _literal(text + "\n")


def _literal(text: str) -> str:
    """Return `text` as a string of Lark; names and markup have no control characters but line ends."""
    return json.dumps(text, ensure_ascii=False)


_ANY_TEXT = "/(?s:.*)/"
_NO_MARKUP = f"~/(?s:.*){DSML}(?s:.*)/"
