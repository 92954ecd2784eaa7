# The markers are written with full-width bars.
"""EncodingTexts: the fixed prompt texts that a model was trained on, from the `encoding` folder beside its weights.

They differ between releases, so we carry none. `encoding_dsv4.py` holds them as module-level constants; it is read by
`ast` and never executed: literals, their concatenation, names of constants above, and dicts of those. What a constant
would need more for (a call, an f-string) matters only to a request that needs that constant.

    TOOLS_TEMPLATE, response_format_template     blocks after the system text
    REASONING_EFFORT_MAX                         V4-Flash: the one effort with a text of its own
    REASONING_EFFORT_PROMPTS, DEFAULT_REASONING_EFFORT      V4-Flash-0731: a text for each effort
    DS_TASK_SP_TOKENS                            tokens of the quick tasks
    tool_output_template, tool_call_template, tool_calls_template       markup, which we know without the file too
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from string import Formatter

from router.errors import InvalidRequest

FOLDER = "encoding"
MAIN_FILE = "encoding_dsv4.py"
MAX_FILE_BYTES = 4 << 20
MAX_TEXT_CHARS = 1 << 20
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")  # from least to most

Constant = str | dict[str, str]

MARKUP: dict[str, Constant] = {
    "tool_output_template": "<tool_result>{content}</tool_result>",
    "tool_call_template": '<{dsml_token}invoke name="{name}">\n{arguments}\n</{dsml_token}invoke>',
    "tool_calls_template": "<{dsml_token}{tc_block_name}>\n{tool_calls}\n</{dsml_token}{tc_block_name}>",
}
_EFFORT_PREFIX = "REASONING_EFFORT_"
_EFFORT_TABLE = "REASONING_EFFORT_PROMPTS"
_TASK_TABLE = "DS_TASK_SP_TOKENS"
# Places without which the request's own words would be lost.
_REQUIRED_PLACES: dict[str, set[str]] = {
    "TOOLS_TEMPLATE": {"tool_schemas"},
    "response_format_template": {"schema"},
    "tool_output_template": {"content"},
    "tool_call_template": {"name", "arguments"},
    "tool_calls_template": {"tool_calls"},
}


@dataclass(frozen=True)
class EncodingTexts:
    """The constants of one release.

    source: the files they came from, "" for none.   unreadable: constants we can't evaluate, and why.
    Methods raise InvalidRequest naming `param`, the request's field that needs a text this release lacks.
    """

    source: str = ""
    constants: Mapping[str, Constant] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: str | Path) -> EncodingTexts | None:
        """Read `folder`/encoding/*.py; None if there is none. Raises ValueError if one can't be read.

        Of a name that several files define, encoding_dsv4.py's wins, then the first by file name.
        """
        paths = sorted((Path(folder) / FOLDER).glob("*.py"), key=lambda path: (path.name != MAIN_FILE, path.name))
        paths = [path for path in paths if path.is_file()]
        constants: dict[str, Constant] = {}
        unreadable: dict[str, str] = {}
        for path in paths:
            found, failed = _module_constants(path)
            unreadable |= {n: f"{path.name}: {r}" for n, r in failed.items() if n not in constants | unreadable}
            constants |= {name: value for name, value in found.items() if name not in constants | unreadable}
        if not paths:
            return None
        return cls(", ".join(f"{FOLDER}/{path.name}" for path in paths), constants, unreadable)

    @property
    def efforts(self) -> dict[str, str]:
        """The text of each reasoning effort that this release knows; it may be empty."""
        table = self.constants.get(_EFFORT_TABLE)
        if isinstance(table, dict):
            return {effort: text for effort, text in table.items() if effort in EFFORTS}
        texts = {effort: self.constants.get(_EFFORT_PREFIX + effort.upper()) for effort in EFFORTS}
        return {effort: text for effort, text in texts.items() if isinstance(text, str)}

    @property
    def release(self) -> str:
        """V4-Flash-0731 by its effort `high`, which has a text there and none before; "" without a file."""
        if not self.source:
            return ""
        return "V4-Flash-0731" if "high" in self.efforts else "V4-Flash"

    def effort_text(self, effort: str | None, param: str = "reasoning_effort") -> str:
        """Return what stands before a prompt that is to be thought about with `effort`; None is the release's default.

        An effort without an entry means the next lower one that has one, or no text; only `max` must have its own.
        """
        known = self.efforts
        if effort is None:
            default = self.constants.get("DEFAULT_REASONING_EFFORT")
            return known.get(default, "") if isinstance(default, str) else ""
        if effort == "none":
            return ""
        if effort not in EFFORTS:
            raise InvalidRequest(f"{param}: {effort[:60]!r} is none of none, {', '.join(EFFORTS)}", param=param)
        own = _EFFORT_PREFIX + effort.upper()
        if effort not in known and (effort == "max" or self.unreadable.keys() & {own, _EFFORT_TABLE}):
            raise self._lacks(_EFFORT_TABLE if _EFFORT_TABLE in self.unreadable else own, param)
        below = EFFORTS[: EFFORTS.index(effort) + 1]
        return next((known[level] for level in reversed(below) if level in known), "")

    def task_token(self, task: str, *, param: str) -> str:
        """Return the token that asks for a quick task."""
        tokens = self.constants.get(_TASK_TABLE)
        if not isinstance(tokens, dict):
            raise self._lacks(_TASK_TABLE, param)
        if task not in tokens:
            raise InvalidRequest(f"{param}: {task[:60]!r} is none of {', '.join(tokens)}", param=param)
        return tokens[task]

    def render(self, name: str, /, *, param: str, **places: str) -> str:
        """Return template `name` with its {places} filled."""
        template = self.constants.get(name)
        if template is None and name not in self.unreadable:
            template = MARKUP.get(name)
        if not isinstance(template, str):
            raise self._lacks(name, param)
        try:
            pieces = _pieces(template)
            text = "".join(literal + (places[place] if place else "") for literal, place in pieces)
        except (ValueError, KeyError) as error:
            raise self._lacks(name, param, f"the place {error} can't be filled") from None
        if lost := _REQUIRED_PLACES[name] - {place for _, place in pieces}:
            raise self._lacks(name, param, f"no place for {', '.join(sorted(lost))}")
        return text

    def _lacks(self, name: str, param: str, reason: str = "") -> InvalidRequest:
        if not self.source:
            text = f"needs {FOLDER}/{MAIN_FILE} in the model folder, which is not there; add it, or leave {param} out"
        else:
            reason = reason or self.unreadable.get(name, "no such constant")
            text = f"needs the text {name} of {self.source} in the model folder ({reason})"
        return InvalidRequest(f"{param}: {text}", param=param, code="encoding_text_missing")


@lru_cache(maxsize=64)
def _pieces(template: str) -> tuple[tuple[str, str], ...]:
    """Cut a template into (literal, place after it or "")."""
    pieces = []
    for literal, place, spec, conversion in Formatter().parse(template):
        if spec or conversion or place == "":
            raise ValueError(f"{{{place}}}")
        pieces.append((literal, place or ""))
    return tuple(pieces)


class _Unreadable(Exception):
    """Why an expression is no text to us."""


def _module_constants(path: Path) -> tuple[dict[str, Constant], dict[str, str]]:
    """Return the module's texts, and why other constants aren't; the last assignment of a name counts."""
    try:
        with path.open("rb") as file:
            source = file.read(MAX_FILE_BYTES + 1)
        if len(source) > MAX_FILE_BYTES:
            raise ValueError(f"{path}: more than {MAX_FILE_BYTES} bytes; this is no encoding module")
        if b"\0" in source:
            raise ValueError(f"{path}: not Python: it has null bytes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model's file, not ours to complain about
            module = ast.parse(source, filename=str(path))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except SyntaxError as error:
        raise ValueError(f"{path}: not Python: {error.msg} (line {error.lineno})") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"{path}: nested too deeply to be read") from None
    constants: dict[str, Constant] = {}
    unreadable: dict[str, str] = {}
    for name, value, line in _assignments(module):
        try:
            constants[name] = _text_or_table(value, constants)
            unreadable.pop(name, None)
        except (_Unreadable, RecursionError) as error:
            constants.pop(name, None)
            unreadable[name] = f"line {line} {error if isinstance(error, _Unreadable) else 'is nested too deeply'}"
    return constants, unreadable


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    for node in module.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            name = ast.Name(node.target.id, ast.Load())
            targets, value = [node.target], ast.BinOp(left=name, op=node.op, right=node.value)
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, value, node.lineno


def _text_or_table(node: ast.expr, known: Mapping[str, Constant]) -> Constant:
    if isinstance(node, ast.Name) and isinstance(table := known.get(node.id), dict):
        return table
    if not isinstance(node, ast.Dict):
        return _text(node, known)
    table = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if key is None:
            raise _Unreadable("merges another dict")
        table[_text(key, known)] = _text(value, known)
    return table


def _text(node: ast.expr, known: Mapping[str, Constant]) -> str:
    terms = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):  # a + b + c nests to the left
        terms.append(node.right)
        node = node.left
    if terms:
        texts = [_text(term, known) for term in [node, *reversed(terms)]]
        if sum(map(len, texts)) > MAX_TEXT_CHARS:
            raise _Unreadable(f"is longer than {MAX_TEXT_CHARS} characters")
        return "".join(texts)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name) and isinstance(text := known.get(node.id), str):
        return text
    kind = {ast.Call: "a call", ast.JoinedStr: "an f-string", ast.Name: "a name that is no text above it"}
    raise _Unreadable(f"has {kind.get(type(node), type(node).__name__)}, which is not executed")
