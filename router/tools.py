"""Function tools as a request defines them, checked: what stands in the prompt, and what calls are parsed against."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from router.errors import InvalidRequest, Unsupported

MAX_NAME_CHARS = 256
# What would end or break an attribute of the markup that calls are written in.
_BREAKS_MARKUP = re.compile(r'["<>｜\x00-\x1f\x7f-\x9f\u2028\u2029]')


class Function(NamedTuple):
    """parameters: their JSON schema, {} if none is given.   definition: the function object, as one line of JSON."""

    name: str
    parameters: dict[str, Any]
    definition: str


def read_functions(
    tools: Iterable[Any] | None, *, param: str = "tools", names: set[str] | None = None
) -> list[Function]:
    """Return the functions of `tools`, in their order. Raises InvalidRequest naming the field at fault.

    param: where the list stands in the request.   names: those in use already; the new ones are added.
    """
    names = set() if names is None else names
    functions = []
    for n, tool in enumerate(tools or ()):
        function = _read_function(tool, f"{param}[{n}]")
        if function.name in names:
            where = f"{param}[{n}].function.name"
            raise InvalidRequest(f"{where}: {function.name!r} is defined twice; rename or remove one", param=where)
        names.add(function.name)
        functions.append(function)
    return functions


def to_json(value: Any, where: str) -> str:
    """Return `value` as the model's encoding writes JSON: one line, `", "` and `": "`, non-ASCII as it is."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest(f"{where}: JSON is nested too deeply", param=where, code="invalid_json") from None


def _read_function(tool: Any, where: str) -> Function:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where}: must be an object, found {_kind(tool)}", param=where)
    kind = tool.get("type", "function")
    if kind != "function":
        raise Unsupported(f"{where}.type", f"{str(kind)[:60]!r} is not supported, only tools of type function are")
    where = f"{where}.function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}: must be an object with a name, found {_kind(function)}", param=where)
    name = _check_name(function.get("name"), f"{where}.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        found = _kind(parameters)
        raise InvalidRequest(
            f"{where}.parameters: must be a JSON schema (an object), found {found}", param=f"{where}.parameters"
        )
    return Function(name, parameters or {}, to_json(function, where))


def _check_name(name: Any, where: str) -> str:
    """Return `name` if the call markup can carry it. Raises InvalidRequest naming `where`."""
    if not isinstance(name, str) or not name.strip():
        found = "white space" if isinstance(name, str) and name else _kind(name) if name != "" else "an empty text"
        raise InvalidRequest(f"{where}: must be a name, found {found}", param=where)
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{where}: {len(name)} characters, at most {MAX_NAME_CHARS} are allowed", param=where)
    if name != name.strip() or _BREAKS_MARKUP.search(name):
        raise InvalidRequest(
            f"{where}: {name!r} must not contain quotes, angle brackets, full-width bars, line ends or control "
            "characters, nor begin or end with white space",
            param=where,
        )
    return name


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
