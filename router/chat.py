# The markers are written with full-width bars.
"""Chat messages to prompt text, in DeepSeek-V4's format.

    <BOS> effort text, system text <｜User｜> user text <｜Assistant｜> opener answer <EOS> <｜User｜> ...

The opener is `<think>` where reasoning follows and `</think>` where it does not; it belongs to the user turn before.
Developer messages are user turns. Results of tools are `<tool_result>` parts of a user turn, in the order of the
calls; neighbouring user and tool messages are one turn, their parts joined by a blank line, as are the text parts of
one message. Reasoning of assistant turns before the last user turn is left out (drop_thinking), unless tools are
defined. Tools and response format are blocks after the system text, or the developer's where a conversation opens with
that; they get a system turn of their own where it opens with neither. The answer is opened after a user turn only: a
conversation that ends otherwise is continued as it stands. Quick tasks put their token in the place of the opener, or,
`action`, after it; such answers have no reasoning.

This is what the model's own encoder writes, but for one rule: while dropping reasoning it drops developer messages
before the last user turn too, and with them what today's clients mean as their system prompt. We keep them.
Format: model card of DeepSeek-V4, `encoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from router.encoding import EncodingTexts
from router.errors import InvalidRequest
from router.past_calls import ToolCall, render_calls
from router.reasoning import DSML, THINK_CLOSE, THINK_OPEN
from router.tools import Function, read_functions, to_json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
PART_SEPARATOR = "\n\n"
TASK_AFTER_OPENER = "action"

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")


class ContentPart(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message as clients send it. Unknown fields (name, refusal, ...) are ignored.

    tools: more functions, defined by a system or developer message.   task: a quick task, answered instead of the
    message.   prefix: DeepSeek's way to have its last, assistant, message continued.
    """

    role: str
    content: str | list[ContentPart] | UnsetType | None = UNSET
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[Any] | None = None
    task: str | None = None
    prefix: bool | None = None


@dataclass(slots=True)
class _Turn:
    """The messages of one turn. parts: (tool_call_id or None, text).   where, tools_field: its names in the request.

    functions, schema: what it tells the model.   call_order: place of each tool_call_id among the calls answered here.
    """

    role: str
    where: str
    parts: list[tuple[str | None, str]]
    call_order: dict[str, int]
    functions: list[Function] = field(default_factory=list)
    tools_field: str = ""
    schema: str = ""
    reasoning: str = ""
    calls: str = ""
    task: str | None = None

    @property
    def is_user(self) -> bool:
        return self.role in ("user", "developer")

    def text(self, texts: EncodingTexts) -> str:
        """Return parts and blocks; tool results take the places of tool results, in the order of their calls."""
        results = [part for part in self.parts if part[0] is not None]
        results.sort(key=lambda part: self.call_order.get(part[0] or "", 0))
        ordered = iter(results)
        shown = [
            text
            if call_id is None
            else texts.render("tool_output_template", param=self.where, content=next(ordered)[1])
            for call_id, text in self.parts
        ]
        if self.functions:
            shown.append(
                texts.render(
                    "TOOLS_TEMPLATE",
                    param=self.tools_field,
                    tool_schemas="\n".join(function.definition for function in self.functions),
                    dsml_token=DSML,
                    thinking_start_token=THINK_OPEN,
                    thinking_end_token=THINK_CLOSE,
                )
            )
        if self.schema:
            shown.append(texts.render("response_format_template", param="response_format", schema=self.schema))
        return PART_SEPARATOR.join(shown)


def encode_chat(
    messages: Sequence[ChatMessage],
    *,
    texts: EncodingTexts | None = None,
    tools: Sequence[Any] | None = None,
    response_format: dict[str, Any] | None = None,
    effort: str | None = None,
    thinking: bool = False,
    drop_thinking: bool = True,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return the prompt of a conversation.

    texts: the model's fixed texts; None refuses what needs one.
    tools, response_format: as in the request, if the model is to be told of them.
    effort: how much to think, if `thinking`: the answer then opens with `<think>`.
    drop_thinking: leave out reasoning before the last user turn.
    add_generation_prompt: open the answer to a user turn at the end.
    continue_final_message: leave an assistant turn at the end open.
    Raises InvalidRequest naming the field at fault.
    """
    if not messages:
        raise InvalidRequest("messages: at least one message is needed", param="messages")
    texts = texts or EncodingTexts()
    leaves_open = _leaves_open(messages, continue_final_message)
    names: set[str] = set()
    functions = read_functions(tools, names=names)
    schema = _response_schema(response_format)
    turns = _merge_turns(messages, texts, names)
    if functions or schema:
        lead = _lead_turn(turns)
        lead.schema = schema
        if functions:
            lead.functions += functions
            lead.tools_field = "tools"
    drop_thinking = drop_thinking and not any(turn.functions for turn in turns)
    last_user = max((i for i, turn in enumerate(turns) if turn.is_user), default=-1)
    prompt = [BOS, texts.effort_text(effort) if thinking else ""]
    for i, turn in enumerate(turns):
        follower = turns[i + 1].role if i + 1 < len(turns) else None
        opens_answer = follower in ("assistant", "latest_reminder") or (follower is None and add_generation_prompt)
        keeps_reasoning = thinking and (not drop_thinking or i >= last_user)
        if turn.role == "assistant":
            if keeps_reasoning and (i == 0 or turns[i - 1].task is None):
                prompt += [turn.reasoning, THINK_CLOSE]
            prompt += [turn.text(texts), turn.calls, "" if leaves_open and follower is None else EOS]
        elif turn.role == "latest_reminder":
            prompt += [LATEST_REMINDER, turn.text(texts)]
        else:
            prompt += [USER if turn.is_user else "", turn.text(texts)]
        if turn.task is not None:
            if follower is not None and not opens_answer:
                where = f"{turn.where}.task"
                raise InvalidRequest(f"{where}: only a message that an answer follows may have one", param=where)
            if opens_answer:
                prompt += _task_opener(turn, texts, thinking=thinking)
        elif turn.is_user and opens_answer:
            prompt += [ASSISTANT, THINK_OPEN if keeps_reasoning else THINK_CLOSE]
    return "".join(prompt)


def declared_functions(messages: Sequence[ChatMessage], tools: Sequence[Any] | None) -> dict[str, dict[str, Any]]:
    """Return the parameter schema of every function that an answer may call, by name. Raises as encode_chat does."""
    names: set[str] = set()
    functions = read_functions(tools, names=names)
    for i, message in enumerate(messages):
        if message.tools:
            functions += read_functions(message.tools, param=f"messages[{i}].tools", names=names)
    return {function.name: function.parameters for function in functions}


def _merge_turns(messages: Sequence[ChatMessage], texts: EncodingTexts, names: set[str]) -> list[_Turn]:
    turns: list[_Turn] = []
    call_order: dict[str, int] = {}
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.role
        if role not in ROLES:
            raise InvalidRequest(f"{where}.role: {role[:60]!r} is none of {', '.join(ROLES)}", param=f"{where}.role")
        text = _content_text(message, where)
        last = turns[-1] if turns else None
        if role in ("user", "tool"):
            part = (None if role == "user" else message.tool_call_id or "", text)
            if last is not None and last.role == "user" and (role == "tool" or last.task is None):
                turn = last
                turn.parts.append(part)
            else:
                turns.append(turn := _Turn("user", where, [part], call_order))
        else:
            turns.append(turn := _Turn(role, where, [(None, text)], call_order))
        if message.task is not None:
            turn.task, turn.where = message.task, where
        if message.tools:
            if role not in ("system", "developer"):
                named = f"{where}.tools"
                raise InvalidRequest(
                    f"{named}: a {role} message can't define tools, only system and developer", param=named
                )
            turn.tools_field = f"{where}.tools"
            turn.functions = read_functions(message.tools, param=turn.tools_field, names=names)
        if role == "assistant":
            turn.reasoning = message.reasoning_content or message.reasoning or ""
            if message.tool_calls:
                turn.calls = render_calls(message.tool_calls, where, texts)
                call_order = {call.id: n for n, call in enumerate(message.tool_calls) if call.id}
    return turns


def _lead_turn(turns: list[_Turn]) -> _Turn:
    """Return the turn that the request's own blocks belong to: system or developer at the start, else one put there."""
    opening = []
    for turn in turns:
        if turn.role not in ("system", "developer", "latest_reminder"):
            break
        opening.append(turn)
    for role in ("system", "developer"):
        for turn in opening:
            if turn.role == role:
                return turn
    turns.insert(0, _Turn("system", "messages", [(None, "")], {}))
    return turns[0]


def _task_opener(turn: _Turn, texts: EncodingTexts, *, thinking: bool) -> list[str]:
    token = texts.task_token(turn.task or "", param=f"{turn.where}.task")
    if turn.task != TASK_AFTER_OPENER:
        return [token]
    return [ASSISTANT, THINK_OPEN if thinking else THINK_CLOSE, token]


def _response_schema(response_format: dict[str, Any] | None) -> str:
    """Return the JSON schema that the answer must keep to, "" for any text."""
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return ""
    if kind == "json_object":
        return to_json({"type": "object"}, "response_format")
    where = "response_format.json_schema.schema"
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format.type: {str(kind)[:60]!r} is none of text, json_object, json_schema",
            param="response_format.type",
        )
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where}: must be a JSON schema (an object), found {type(schema).__name__}", param=where)
    return to_json(schema, where)


def _leaves_open(messages: Sequence[ChatMessage], continue_final_message: bool) -> bool:
    for i, message in enumerate(messages):
        if message.prefix and (i + 1 < len(messages) or message.role != "assistant"):
            where = f"messages[{i}].prefix"
            raise InvalidRequest(f"{where}: only an assistant message at the end can be continued", param=where)
    if continue_final_message and messages[-1].role != "assistant":
        where = "continue_final_message"
        raise InvalidRequest(f"{where}: the last message is no assistant message", param=where)
    return continue_final_message or bool(messages[-1].prefix)


def _content_text(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None or content is UNSET:
        if message.role == "assistant":
            return ""
        raise InvalidRequest(
            f"{where}.content: a {message.role} message needs a string or a list of text parts",
            param=f"{where}.content",
        )
    texts = []
    for n, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text"):
            raise InvalidRequest(
                f"{where}.content[{n}]: only parts of type text are supported, found {part.type[:60]!r}",
                param=f"{where}.content[{n}].type",
                code="unsupported_content",
            )
        if part.text is None:
            where = f"{where}.content[{n}].text"
            raise InvalidRequest(f"{where}: a part of type {part.type} needs a text", param=where)
        texts.append(part.text)
    return PART_SEPARATOR.join(texts)
