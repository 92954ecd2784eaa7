"""Answers of the public API: whole bodies, and the chunks of a stream.

A stream's chunks differ in a few fields only, so their bytes are prepared once per request and the text is put
between. Streams follow one framing: first the role, then text, then one chunk with the finish_reason, with
include_usage one more with empty choices, then [DONE].
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.protocol import TokenLogprobs
from router.tool_calls import ToolCallDelta

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """Counts of one request, the same for every route and for streams."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
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


class AnswerWriter:
    """Renders one request's answer as bytes. is_chat: which of the two routes it belongs to.

    prompt_token_ids: given if the client asked for token ids (return_token_ids), which then ride along everywhere.
    """

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        is_chat: bool,
        usage: Usage,
        prompt_token_ids: list[int] | None = None,
        include_usage: bool = False,
    ) -> None:
        self.usage = usage
        self._is_chat = is_chat
        self._id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._prompt_token_ids = prompt_token_ids
        self._include_usage = include_usage
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head = _encode({"id": self._id, "object": kind, "created": self._created, "model": model})[:-1]
        self._head = b"data: " + head + b',"choices":[{"index":0,'
        self._bare_head = b"data: " + head
        self._tail = b"}]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
        self._is_first = True

    def chunk(self, piece: Piece) -> bytes:
        """Return the events that show `piece`; nothing if there is nothing to show."""
        first, self._is_first = self._is_first, False
        events = b""
        if first and self._is_chat:
            extra = self._prompt_ids_field()
            tail = self._tail[:2] + extra + self._tail[2:]
            events = (
                self._head + b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null' + tail
            )
        ids = b"" if self._prompt_token_ids is None else b',"token_ids":' + _encode(piece.token_ids)
        if not (piece.content or piece.reasoning or (ids and piece.token_ids)):
            return events
        if self._is_chat:
            delta = []
            if piece.reasoning:
                delta.append(b'"reasoning_content":' + _encode(piece.reasoning))
            if piece.content:
                delta.append(b'"content":' + _encode(piece.content))
            body = b'"delta":{' + b",".join(delta) + b'},"logprobs":null,"finish_reason":null' + ids
        else:
            prompt = self._prompt_ids_field() if first else b""
            body = b'"text":' + _encode(piece.content) + b',"logprobs":null,"finish_reason":null' + prompt + ids
        return events + self._head + body + self._tail

    def end(self, finish_reason: str, *, stop_reason: str | int | None = None) -> bytes:
        """Return the events that end a stream: the finish chunk, the usage if asked for, and [DONE]."""
        start = self.chunk(Piece())
        body = b'"delta":{}' if self._is_chat else b'"text":""'
        body += b',"logprobs":null,"finish_reason":' + _encode(finish_reason)
        body += b',"stop_reason":' + _encode(stop_reason)
        if self._prompt_token_ids is not None:
            body += b',"token_ids":[]'
        events = start + self._head + body + self._tail
        if self._include_usage:
            events += self._bare_head + b',"choices":[],"usage":' + _encode(self.usage.fields()) + b"}\n\n"
        return events + DONE

    def whole(self, piece: Piece, finish_reason: str, *, stop_reason: str | int | None = None) -> bytes:
        """Return the body of an answer that is not streamed; `piece` holds all of it."""
        choice: dict[str, Any] = {"index": 0}
        body: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice],
            "usage": self.usage.fields(),
        }
        if self._is_chat:
            choice["message"] = {"role": "assistant", "content": piece.content, "refusal": None}
            if piece.reasoning:
                choice["message"]["reasoning_content"] = piece.reasoning
        else:
            choice["text"] = piece.content
        choice |= {"logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}
        if self._prompt_token_ids is not None:
            (body if self._is_chat else choice)["prompt_token_ids"] = self._prompt_token_ids
            choice["token_ids"] = piece.token_ids
        return _encode(body)

    def _prompt_ids_field(self) -> bytes:
        ids = self._prompt_token_ids
        return b"" if ids is None else b',"prompt_token_ids":' + _encode(ids)


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
