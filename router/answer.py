"""Answers of the public API: whole bodies, and the chunks of a stream.

A stream's chunks differ in a few fields only, so their bytes are prepared once per choice and the text is put
between. Streams follow one framing. For each choice: first the role, then text, then one chunk with the finish_reason;
choices mix. With include_usage one more chunk has empty choices and the usage; then comes [DONE].
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.logprobs import LogprobFormat
from router.protocol import TokenLogprobs
from router.tool_calls import ToolCallDelta

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """Counts of one choice. Only the first choice of a prompt counts that prompt's tokens, so choices add up.

    cached_tokens: of the prompt, those that a prefix cache had; cache that came over the wire is none.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def total(cls, usages: Iterable[Usage]) -> Usage:
        """Return the counts of a request."""
        whole = cls(0)
        for usage in usages:
            whole.prompt_tokens += usage.prompt_tokens
            whole.completion_tokens += usage.completion_tokens
            whole.reasoning_tokens += usage.reasoning_tokens
            whole.cached_tokens += usage.cached_tokens
        return whole

    def fields(self) -> dict[str, Any]:
        """Return the `usage` object, the same for every route and for streams."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(slots=True)
class Piece:
    """Text and tokens that one step added to the answer, ready to be shown.

    logprobs: one for each of token_ids, or none at all.
    """

    content: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


@dataclass(slots=True)
class FinishedChoice:
    """All of one choice, for an answer that is not streamed: made of its pieces."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        if piece.content:
            self.content.append(piece.content)
        if piece.reasoning:
            self.reasoning.append(piece.reasoning)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.tool_calls += piece.tool_calls


@dataclass(slots=True)
class _OpenChoice:
    head: bytes
    logprobs: LogprobFormat | None
    text_head: bytes
    is_first: bool = True
    is_plain: bool = False


class AnswerWriter:
    """Renders one request's answer as bytes. is_chat: which of the two routes it belongs to.

    usages: the counts of each choice, which the pipelines keep; they say how many choices there are. With several
    prompts the choices of the first come first, each prompt having as many.
    prompts: their token ids if the client asked for token ids (return_token_ids), which then ride along everywhere.
    echoes: texts of the prompts, to stand before the answers.   one_call: further tool calls are not shown.
    logprobs: the format of each choice's log probabilities if they were asked for.
    """

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        is_chat: bool,
        usages: Sequence[Usage],
        prompts: Sequence[list[int]] = (),
        echoes: Sequence[str] = (),
        include_usage: bool = False,
        continuous_usage: bool = False,
        one_call: bool = False,
        logprobs: Sequence[LogprobFormat] = (),
    ) -> None:
        self._usages = usages
        self._is_chat = is_chat
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._prompts = prompts
        self._echoes = echoes
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._one_call = one_call
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = _encode({"id": self._id, "object": kind, "created": self._created, "model": model})[:-1]
        self._bare_head = b"data: " + head
        self._tail = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._text_tail = (b"}" if is_chat else b"") + b',"logprobs":null,"finish_reason":null' + self._tail
        text_field = b'"delta":{"content":' if is_chat else b'"text":'
        heads = [self._bare_head + b',"choices":[{"index":%d,' % index for index in range(len(usages))]
        self._choices = [
            _OpenChoice(head, logprobs[index] if logprobs else None, head + text_field)
            for index, head in enumerate(heads)
        ]

    def chunk(self, piece: Piece, index: int = 0) -> bytes:
        """Return the events that show `piece` of a choice; nothing if there is nothing to show."""
        choice = self._choices[index]
        if choice.is_plain and not piece.reasoning and not piece.tool_calls:  # nearly every token of every answer
            return choice.text_head + _encode(piece.content) + self._text_tail if piece.content else b""
        events = b""
        if choice.is_first:
            choice.is_first = False
            choice.is_plain = not (self._prompts or self._continuous_usage or choice.logprobs)
            events = self._opening(index)
        if piece.tool_calls and self._one_call:
            piece.tool_calls = [call for call in piece.tool_calls if call.index == 0]
        ids = b',"token_ids":' + _encode(piece.token_ids) if self._prompts else b""
        logprobs = b"null"
        if choice.logprobs is not None and piece.logprobs and choice.logprobs.shows(piece.token_ids):
            logprobs = _encode(choice.logprobs.format(piece.token_ids, piece.logprobs))
        if not (
            piece.content or piece.reasoning or piece.tool_calls or (ids and piece.token_ids) or logprobs != b"null"
        ):
            return events
        body = self._delta(piece) if self._is_chat else b'"text":' + _encode(piece.content)
        body += b',"logprobs":' + logprobs + b',"finish_reason":null' + ids
        return events + choice.head + body + self._choice_tail()

    def end_choice(self, index: int, finish_reason: str, *, stop_reason: str | int | None = None) -> bytes:
        """Return the events that end a choice: its finish chunk, after its opening if nothing was shown."""
        choice = self._choices[index]
        start = self.chunk(Piece(), index)
        body = b'"delta":{}' if self._is_chat else b'"text":""'
        body += b',"logprobs":null,"finish_reason":' + _encode(finish_reason)
        body += b',"stop_reason":' + _encode(stop_reason)
        if self._prompts:
            body += b',"token_ids":[]'
        return start + choice.head + body + self._choice_tail()

    def end(self) -> bytes:
        """Return the events that end a stream whose choices have all ended: the usage if asked for, and [DONE]."""
        if not self._include_usage:
            return DONE
        return self._bare_head + b',"choices":[],"usage":' + self._total() + b"}\n\n" + DONE

    def whole(self, choices: Sequence[FinishedChoice]) -> bytes:
        """Return the body of an answer that is not streamed; `choices` are all of them, by index."""
        body: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
            "usage": Usage.total(self._usages).fields(),
        }
        if self._is_chat and self._prompts:
            body["prompt_token_ids"] = self._prompts[0]
        return _encode(body)

    def _whole_choice(self, index: int, finished: FinishedChoice) -> dict[str, Any]:
        content = "".join(finished.content)
        choice: dict[str, Any] = {"index": index}
        if self._is_chat:
            calls = _whole_calls(finished.tool_calls)[: 1 if self._one_call else None]
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if calls and not content else content,
                "refusal": None,
            }
            if finished.reasoning:
                message["reasoning_content"] = "".join(finished.reasoning)
            if calls:
                message["tool_calls"] = calls
            choice["message"] = message
        else:
            choice["text"] = (self._of_prompt(index, self._echoes) or "") + content
        logprobs = self._choices[index].logprobs
        choice["logprobs"] = logprobs and logprobs.format(finished.token_ids, finished.logprobs)
        choice |= {"finish_reason": finished.finish_reason, "stop_reason": finished.stop_reason}
        if self._prompts:
            if not self._is_chat:
                choice["prompt_token_ids"] = self._of_prompt(index, self._prompts)
            choice["token_ids"] = finished.token_ids
        return choice

    # ------------------------------------------------------------ parts of a stream

    def _opening(self, index: int) -> bytes:
        """Return what comes before a choice's text: its role, or the echoed prompt; with the prompt's ids if asked."""
        echo = self._of_prompt(index, self._echoes)
        ids = self._of_prompt(index, self._prompts)
        if not self._is_chat and not echo and ids is None:
            return b""
        body = b'"delta":{"role":"assistant","content":""}' if self._is_chat else b'"text":' + _encode(echo or "")
        body += b',"logprobs":null,"finish_reason":null'
        if ids is not None:
            body += b',"prompt_token_ids":' + _encode(ids) + b',"token_ids":[]'
        return self._choices[index].head + body + self._choice_tail()

    def _delta(self, piece: Piece) -> bytes:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.content:
            delta["content"] = piece.content
        if piece.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.tool_calls]
        return b'"delta":' + _encode(delta or {"content": ""})

    def _choice_tail(self) -> bytes:
        return b'}],"usage":' + self._total() + b"}\n\n" if self._continuous_usage else self._tail

    def _total(self) -> bytes:
        return _encode(Usage.total(self._usages).fields())

    def _of_prompt(self, index: int, values: Sequence[Any]) -> Any:
        """Return the value of the prompt that choice `index` answers; None if there are none."""
        return values[index * len(values) // len(self._usages)] if values else None


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _whole_calls(deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Return the calls as a message shows them."""
    heads: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        heads.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [
        {"id": head.id, "type": "function", "function": {"name": head.name, "arguments": "".join(arguments[index])}}
        for index, head in sorted(heads.items())
    ]


def error_event(error_body: bytes) -> bytes:
    """Return the event that ends a failed stream: an error object, and no finish_reason."""
    return b"data: " + error_body + b"\n\n"


def models(name: str, *, created: int, max_model_len: int) -> dict[str, Any]:
    """Return the entry of /v1/models."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "isthmus",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len or None,
    }
