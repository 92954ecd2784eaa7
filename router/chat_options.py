"""ChatOptions: what the fields of a chat request besides its messages ask for.

Switches of thinking, the last of these that is given: the server's default; `reasoning_effort` ("none" is off, any
other is on); `thinking`; `chat_template_kwargs` with `reasoning_effort`, `enable_thinking`, `thinking`. An effort
matters only where there is thinking.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from router.chat import declared_functions
from router.encoding import EFFORTS
from router.errors import InvalidRequest, Unsupported, shown
from router.openai import ChatRequest, TokenizeRequest


class ChatOptions(NamedTuple):
    """tools: what the prompt tells of them.   functions: the parameters' JSON schema of each that may be called."""

    thinking: bool
    effort: str | None
    drop_thinking: bool
    add_generation_prompt: bool
    tools: list[dict[str, Any]] | None
    functions: dict[str, dict[str, Any]]


def chat_options(request: ChatRequest | TokenizeRequest, *, default_thinking: bool) -> ChatOptions:
    """Return the options of a request. Raises InvalidRequest naming the field at fault."""
    kwargs = request.chat_template_kwargs or {}
    thinking, effort = _thinking(request, kwargs, default_thinking)
    drop_thinking = _switch(kwargs, "drop_thinking")
    functions = declared_functions(request.messages or [], request.tools)
    _check_tool_choice(request, functions)
    # A choice of none leaves the functions out: a model that does not know of them calls none.
    is_off = request.tool_choice == "none"
    return ChatOptions(
        thinking=thinking,
        effort=effort,
        drop_thinking=True if drop_thinking is None else drop_thinking,
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=None if is_off else request.tools,
        functions={} if is_off else functions,
    )


def _thinking(request: ChatRequest | TokenizeRequest, kwargs: dict[str, Any], default: bool) -> tuple[bool, str | None]:
    thinking, effort = default, None
    switch = request.thinking and request.thinking.type
    if switch not in (None, "enabled", "disabled"):
        raise InvalidRequest(f"thinking.type: {shown(switch)} must be enabled or disabled", param="thinking.type")
    for where, value, following in (
        ("reasoning_effort", request.reasoning_effort, switch),
        ("chat_template_kwargs.reasoning_effort", kwargs.get("reasoning_effort"), None),
    ):
        if value is not None:
            if value not in ("none", *EFFORTS):
                known = ", ".join(("none", *EFFORTS))
                raise InvalidRequest(f"{where}: {shown(value)} is none of {known}", param=where)
            thinking, effort = value != "none", value
        if following is not None:
            thinking = following == "enabled"
    for field in ("enable_thinking", "thinking"):
        value = _switch(kwargs, field)
        thinking = thinking if value is None else value
    return thinking, None if effort == "none" else effort


def _switch(kwargs: dict[str, Any], field: str) -> bool | None:
    value = kwargs.get(field)
    if value is not None and not isinstance(value, bool):
        where = f"chat_template_kwargs.{field}"
        raise InvalidRequest(f"{where}: must be true or false, found {shown(value)}", param=where)
    return value


def _check_tool_choice(request: ChatRequest | TokenizeRequest, functions: dict[str, dict[str, Any]]) -> None:
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            raise Unsupported("tool_choice", "allowed_tools is not supported; send only those tools")
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise InvalidRequest(
                f"tool_choice: {shown(choice)} is neither none, auto, required nor "
                '{"type": "function", "function": {"name": ...}}',
                param="tool_choice",
            )
        if name not in functions:
            known = ", ".join(functions) or "none are given"
            raise InvalidRequest(f"tool_choice: no function {shown(name)} in tools ({known})", param="tool_choice")
    elif choice != "required":
        raise InvalidRequest(
            f"tool_choice: {shown(choice)} is none of none, auto, required and a function", param="tool_choice"
        )
    elif not functions:
        raise InvalidRequest("tool_choice: required needs tools to choose from", param="tool_choice")
