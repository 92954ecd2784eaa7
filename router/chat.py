# The markers are written with full-width bars.
"""Chat messages to prompt text, in DeepSeek-V4's format.

    <BOS> system text <｜User｜> user text <｜Assistant｜> opener answer <EOS> <｜User｜> ...

The opener is `<think>` where reasoning follows and `</think>` where it does not; it belongs to the user turn before.
Developer messages are user turns. Results of tools are `<tool_result>` parts of a user turn, in the order of the
calls; neighbouring user and tool messages are one turn, their parts joined by a blank line, as are the text parts of
one message. Reasoning of assistant turns before the last user turn is left out (drop_thinking). The answer is opened
after a user turn only: a conversation that ends otherwise is continued as it stands, as the model's own encoder does.
Format: model card of DeepSeek-V4, `encoding`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from router.errors import InvalidRequest, Unsupported
from router.reasoning import THINK_CLOSE, THINK_OPEN

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
DSML = "｜DSML｜"
PART_SEPARATOR = "\n\n"

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")


class ContentPart(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """One message as clients send it. Unknown fields (name, refusal, ...) are ignored."""

    role: str
    content: str | list[ContentPart] | UnsetType | None = UNSET
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[Any] | None = None


class _Turn:
    """A message ready to be rendered. parts: (tool_call_id or None, text)."""

    def __init__(self, role: str, parts: list[tuple[str | None, str]]) -> None:
        self.role = role
        self.parts = parts
        self.reasoning = ""
        self.calls = ""

    @property
    def is_user(self) -> bool:
        return self.role in ("user", "developer")

    def text(self) -> str:
        return PART_SEPARATOR.join(
            text if call_id is None else f"<tool_result>{text}</tool_result>" for call_id, text in self.parts
        )


def encode_chat(messages: Sequence[ChatMessage], *, thinking: bool = False, drop_thinking: bool = True) -> str:
    """Return the prompt of a conversation.

    thinking: the answer opens with `<think>`.   drop_thinking: leave out reasoning before the last user turn.
    Raises InvalidRequest naming the message at fault.
    """
    if not messages:
        raise InvalidRequest("messages: at least one message is needed", param="messages")
    turns = _merge_turns(messages)
    last_user = max((i for i, turn in enumerate(turns) if turn.is_user), default=-1)
    prompt = [BOS]
    for i, turn in enumerate(turns):
        follower = turns[i + 1].role if i + 1 < len(turns) else None
        opens_answer = follower in (None, "assistant", "latest_reminder")
        keeps_reasoning = thinking and (not drop_thinking or i >= last_user)
        if turn.role == "assistant":
            if keeps_reasoning:
                prompt += [turn.reasoning, THINK_CLOSE]
            prompt += [turn.text(), turn.calls, EOS]
        elif turn.role == "system":
            prompt.append(turn.text())
        elif turn.role == "latest_reminder":
            prompt += [LATEST_REMINDER, turn.text()]
        else:
            prompt += [USER, turn.text()]
            if opens_answer:
                prompt += [ASSISTANT, THINK_OPEN if keeps_reasoning else THINK_CLOSE]
    return "".join(prompt)


def _merge_turns(messages: Sequence[ChatMessage]) -> list[_Turn]:
    turns: list[_Turn] = []
    call_order: dict[str, int] = {}
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if message.role not in ROLES:
            raise InvalidRequest(f"{where}.role: {message.role!r} is none of {', '.join(ROLES)}", param=f"{where}.role")
        if message.tools:
            raise Unsupported(f"{where}.tools", "tool definitions are not supported yet; leave them out")
        text = _content_text(message, where)
        if message.role in ("user", "tool"):
            part = (None if message.role == "user" else message.tool_call_id or "", text)
            if turns and turns[-1].role == "user":
                turns[-1].parts.append(part)
            else:
                turns.append(_Turn("user", [part]))
            _sort_results(turns[-1].parts, call_order)
            continue
        turn = _Turn(message.role, [(None, text)])
        if message.role == "assistant":
            turn.reasoning = message.reasoning_content or message.reasoning or ""
            if message.tool_calls:
                turn.calls = _render_calls(message.tool_calls, where)
                call_order = {call.id: n for n, call in enumerate(message.tool_calls) if call.id}
        turns.append(turn)
    return turns


def _content_text(message: ChatMessage, where: str) -> str:
    content = message.content
    if content is None or content is UNSET:
        if message.role == "assistant":
            return ""
        raise InvalidRequest(
            f"{where}.content: a {message.role} message needs a string or a list of text parts",
            param=f"{where}.content",
        )
    if isinstance(content, str):
        return content
    texts = []
    for n, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise InvalidRequest(
                f"{where}.content[{n}]: only parts of type text with a `text` are supported, found {part.type!r}",
                param=f"{where}.content[{n}].type",
                code="unsupported_content",
            )
        texts.append(part.text)
    return PART_SEPARATOR.join(texts)


def _sort_results(parts: list[tuple[str | None, str]], call_order: dict[str, int]) -> None:
    """Put the tool results among `parts` into the order of the calls they answer; text parts keep their places."""
    places = [n for n, (call_id, _) in enumerate(parts) if call_id is not None]
    results = sorted((parts[n] for n in places), key=lambda part: call_order.get(part[0] or "", 0))
    for n, result in zip(places, results, strict=True):
        parts[n] = result


def _render_calls(calls: Sequence[ToolCall], where: str) -> str:
    blocks = []
    for n, call in enumerate(calls):
        lines = [
            f'<{DSML}parameter name="{key}" string="{"true" if isinstance(value, str) else "false"}">'
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{DSML}parameter>"
            for key, value in _arguments(call, f"{where}.tool_calls[{n}].function.arguments").items()
        ]
        body = "\n".join(lines)
        blocks.append(f'<{DSML}invoke name="{call.function.name}">\n{body}\n</{DSML}invoke>')
    inner = "\n".join(blocks)
    return f"\n\n<{DSML}tool_calls>\n{inner}\n</{DSML}tool_calls>"


def _arguments(call: ToolCall, where: str) -> dict[str, Any]:
    """Return a call's arguments; null, "" and "null" are a call without any."""
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: must be a JSON object, found something else: {error}", param=where) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: must be a JSON object, found {type(value).__name__}", param=where)
    return value
