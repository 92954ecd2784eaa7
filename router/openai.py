"""Requests of the public API: the fields of each route, by type.

One rule for fields: what we know and honour is checked strictly; what we know and can't do is refused with
`unsupported_parameter` unless it asks for nothing (`refusals.py`); unknown fields are ignored, as OpenAI-compatible
servers do. What the values mean is said by `sampling.py`, `chat_options.py` and `prompts.py`.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from router import refusals
from router.chat import ChatMessage
from router.errors import InvalidRequest

MAX_DEPTH = 128


class StreamOptions(msgspec.Struct):
    """include_usage: a last chunk with the usage.   continuous_usage_stats: the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Thinking(msgspec.Struct):
    """DeepSeek's own spelling of the thinking switch. type: "enabled" or "disabled"."""

    type: str


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields that both routes share. None means: not given."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    forced_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    user: str | None = None
    # Known and not done: see refusals.py.
    use_beam_search: bool | None = None
    prompt_logprobs: int | None = None
    suffix: str | None = None
    logits_processors: Any = None
    allowed_token_ids: Any = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Known and not done.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    chat_template: str | None = None
    documents: list[Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """prompt: text, token ids, or a list of those.   logprobs: how many alternatives are shown of each token."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A `prompt`, or `messages` and what belongs to them, as /v1/chat/completions would take them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    # Known and not done.
    chat_template: str | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """tokens: ids, whose text the answer holds, markers included."""

    tokens: list[int]
    model: str | None = None


class Limits(msgspec.Struct, frozen=True):
    """What the cluster can take now. max_model_len 0: no worker has said it yet, so it is not checked."""

    vocab_size: int = 0
    max_model_len: int = 0


Request = ChatRequest | CompletionRequest | TokenizeRequest | DetokenizeRequest
R = TypeVar("R", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

_decoders: dict[type[Request], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
}
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MISSING = re.compile(r"missing required field `(?P<field>\w+)`")


def parse(body: bytes, kind: type[R]) -> R:
    """Return the request in `body`, checked by type. Raises InvalidRequest naming the field."""
    try:
        request = _decoders[kind].decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        path = _PATH.search(text)
        param = path["path"] if path else ""
        if missing := _MISSING.search(text):
            param = f"{param}.{missing['field']}" if param else missing["field"]
        message = _PATH.sub("", text)
        raise InvalidRequest(f"{param}: {message}" if param else f"body: {message}", param=param or None) from None
    except msgspec.DecodeError as error:
        # The decoder has several words for half a character, "truncated" among them.
        hint = (
            r" (an escape \ud800 to \udfff without its other half is no character)" if _SURROGATE.search(body) else ""
        )
        raise InvalidRequest(f"body: not valid JSON: {error}{hint}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("body: JSON is nested too deeply", code="invalid_json") from None
    assert isinstance(request, kind)
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(request)
    refusals.check(request)
    return request


def _check_depth(request: Request) -> None:
    """Raise InvalidRequest if a value of free shape nests too deeply for what walks through it by recursion later."""
    values = [getattr(request, field) for field in request.__struct_fields__ if field not in ("messages", "prompt")]
    for message in getattr(request, "messages", None) or ():
        values.append(message.tools)
        values += [call.function.arguments for call in message.tool_calls or ()]
    level = [value for value in values if isinstance(value, dict | list)]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise InvalidRequest(f"body: JSON is nested more than {MAX_DEPTH} levels deep", code="invalid_json")


def guide_field(request: ChatRequest | CompletionRequest) -> str | None:
    """Return the field that says what the answer must match, None if there is none."""
    for field in ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(request, field) is not None:
            return field
    if request.response_format is not None and request.response_format.get("type") != "text":
        return "response_format"
    if isinstance(request, ChatRequest) and request.tool_choice not in (None, "none", "auto"):
        return "tool_choice"
    return None
