"""Guides: what the text of an answer must match, out of the many ways in which a request may say it.

    response_format     json_object, json_schema (`strict` or not: it is always followed), text
    structured_outputs  one of json, json_object, regex, choice, grammar
    guided_json, guided_regex, guided_choice, guided_grammar      the older spellings
    tool_choice         "required" or one function: a block of calls whose parameters follow their schemas

Only one may be given, with two exceptions. response_format beside tools that may be called: either such an answer or a
block of calls. response_format beside calls that must be made: the block, since there is no other text to format. With
tool_choice "auto" alone nothing is guided, `strict` or not. An answer that begins with reasoning is guided behind it.

A regex matches the whole answer, in the syntax of Rust's `regex`; a grammar is Lark or GBNF, as llguidance reads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from router.errors import ApiError, InvalidRequest, Unsupported
from router.grammar_check import CheckerBusy, GrammarChecker
from router.json_schema import bare, grammar_schema
from router.openai import ChatRequest, CompletionRequest
from router.protocol import Guide
from router.reasoning import THINK_CLOSE
from router.tool_grammar import calls_grammar, escaped
from router.tools import Function, read_functions

MAX_GRAMMAR_BYTES = 128 << 10
MAX_CHOICES = 10_000
_BUSY_RETRY_S = 1.0


class _Source(NamedTuple):
    """A grammar, and where it comes from: a field, and maybe more. schema: what it was made of, if it is JSON."""

    param: str
    grammar: str
    schema: Any = None

    @property
    def field(self) -> str:
        return self.param.split(":")[0]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class Guides:
    """Makes the guides of requests. Each grammar is compiled once, in another process, before it goes to a worker."""

    def __init__(self, tokenizer_file: Path) -> None:
        added = msgspec.json.decode(tokenizer_file.read_bytes(), type=_TokenizerFile).added_tokens
        self._think_end = next((token.id for token in added if token.content == THINK_CLOSE), -1)
        self._checker = GrammarChecker()

    def guide(self, request: ChatRequest | CompletionRequest, *, is_thinking: bool) -> Guide | None:
        """Return what the answer must match, None for anything. Raises InvalidRequest naming the field, or ApiError.

        Takes milliseconds for a new grammar, half a second for a hostile one: call it in a thread.
        is_thinking: the answer begins with reasoning.
        """
        try:
            grammar = self._grammar(request)
        except RecursionError:
            raise InvalidRequest("body: a schema is nested too deeply", code="invalid_grammar") from None
        if grammar is None:
            return None
        if request.ignore_eos:
            raise InvalidRequest(
                "ignore_eos: an answer that must match a grammar can't go on behind its end; leave it out",
                param="ignore_eos",
            )
        return Guide(grammar=grammar, after_token_id=self._think_end if is_thinking else -1)

    def close(self) -> None:
        """End the process that compiles."""
        self._checker.close()

    def _grammar(self, request: ChatRequest | CompletionRequest) -> str | None:
        sources = _sources(request)
        if len(sources) > 1:
            raise InvalidRequest(
                f"{sources[1].param}: {sources[0].param} says already what the answer must match; send one of them",
                param=sources[1].param,
            )
        source = sources[0] if sources else None
        functions, is_forced = _callable(request)
        if is_forced and source is not None and source.param != "response_format":
            raise InvalidRequest(f"{source.param}: tool_choice asks for calls; send one of them", param=source.param)
        is_parallel = not isinstance(request, ChatRequest) or request.parallel_tool_calls is not False
        checked = self._checked(source) if source is not None else None
        if not is_forced and not (functions and source is not None and source.param == "response_format"):
            return checked
        start = "start: calls"
        if not is_forced and source is not None:
            start = f"start: answer | calls\nanswer: %json {json.dumps(source.schema, ensure_ascii=False)}"
        try:
            return self._checked(_Source("tools", f"{start}\n{calls_grammar(functions, is_parallel=is_parallel)}"))
        except InvalidRequest:
            for function in functions if len(functions) > 1 else ():  # to name the one at fault
                alone = calls_grammar([function], is_parallel=False)
                self._checked(_Source(f"tools: parameters of {function.name}", f"start: calls\n{alone}"))
            raise

    def _checked(self, source: _Source) -> str:
        size = len(source.grammar.encode(errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{source.param}: {size} bytes of grammar, at most {MAX_GRAMMAR_BYTES} are allowed; make it smaller",
                param=source.field,
                code="invalid_grammar",
            )
        try:
            checked = self._checker.check(source.grammar)
        except CheckerBusy as busy:
            raise ApiError(
                503,
                f"{source.param}: {busy}; send it again",
                code="guides_busy",
                param=source.field,
                retry_after_s=_BUSY_RETRY_S,
            ) from None
        if checked.problem:
            raise InvalidRequest(f"{source.param}: {checked.problem}", param=source.field, code="invalid_grammar")
        return checked.grammar


def _sources(request: ChatRequest | CompletionRequest) -> list[_Source]:
    found = [_response_format(request.response_format), _structured_outputs(request.structured_outputs)]
    for name in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{name}")
        if value is not None:
            found.append(_of_kind(name, value, f"guided_{name}"))
    return [source for source in found if source is not None]


def _response_format(value: dict[str, Any] | None) -> _Source | None:
    kind = (value or {"type": "text"}).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _json({"type": "object"}, "response_format")
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format.type: must be text, json_object or json_schema, found {_short(kind)}",
            param="response_format.type",
        )
    assert value is not None
    where = "response_format.json_schema"
    described = value.get("json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        raise InvalidRequest(f"{where}: must be an object with the schema in its field `schema`", param=where)
    if not isinstance(described["schema"], dict):
        raise InvalidRequest(
            f"{where}.schema: must be an object, found {_short(described['schema'])}", param=f"{where}.schema"
        )
    return _json(described["schema"], "response_format")


def _structured_outputs(value: Any) -> _Source | None:
    where = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: must be an object, found {_short(value)}", param=where)
    kinds = ("json", "json_object", "regex", "choice", "grammar")
    given = {name: part for name, part in value.items() if part is not None and part is not False}
    for name in given:
        if name not in kinds:
            raise Unsupported(f"{where}.{name}", f"not supported; send one of {', '.join(kinds)}")
    if len(given) != 1:
        raise InvalidRequest(f"{where}: must have one of {', '.join(kinds)}, found {len(given)}", param=where)
    ((name, part),) = given.items()
    return _of_kind(name, part, f"{where}.{name}")


def _of_kind(kind: str, value: Any, param: str) -> _Source:
    if kind == "json":
        return _json(_schema(value, param), param)
    if kind == "json_object":
        if value is not True:
            raise InvalidRequest(f"{param}: must be true, found {_short(value)}", param=param)
        return _json({"type": "object"}, param)
    if kind == "choice":
        return _choice(value, param)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}: must be a text that is not empty, found {_short(value)}", param=param)
    if kind == "regex":
        from llguidance import LLMatcher

        return _Source(param, LLMatcher.grammar_from_regex(value))
    # Text that begins so is the library's own format, which is no grammar that a client was asked for.
    return _Source(param, "\n" + value if value.startswith("{") else value)


def _json(schema: Any, param: str) -> _Source:
    schema = grammar_schema(bare(schema))
    return _Source(param, json.dumps({"grammars": [{"json_schema": schema}]}, ensure_ascii=False), schema)


def _schema(value: Any, param: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidRequest(f"{param}: no valid JSON: {error}", param=param) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param}: must be a JSON schema (an object), found {_short(value)}", param=param)
    return value


def _choice(value: Any, param: str) -> _Source:
    if not isinstance(value, list) or not value or not all(isinstance(choice, str) for choice in value):
        raise InvalidRequest(f"{param}: must be a list of texts, at least one, found {_short(value)}", param=param)
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{param}: {len(value)} texts, at most {MAX_CHOICES} are allowed", param=param)
    return _of_kind("regex", f"(?:{'|'.join(map(escaped, value))})", param)


def _callable(request: ChatRequest | CompletionRequest) -> tuple[list[Function], bool]:
    """Return the functions that the answer may call, and whether it must."""
    choice = getattr(request, "tool_choice", None)
    if not isinstance(request, ChatRequest) or choice == "none":
        return [], False
    functions = read_functions(request.tools)
    if choice is None or choice == "auto":
        return functions, False
    if not functions:
        raise InvalidRequest("tool_choice: there are no tools to choose from; send `tools`", param="tool_choice")
    if choice == "required":
        return functions, True
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        named = [function for function in functions if function.name == name]
        if named:
            return named, True
        raise InvalidRequest(f"tool_choice.function.name: no tool is called {_short(name)}", param="tool_choice")
    raise InvalidRequest(
        f'tool_choice: must be "none", "auto", "required" or {{"type": "function", "function": {{"name": ...}}}}, '
        f"found {_short(choice)}",
        param="tool_choice",
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
