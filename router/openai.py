"""Requests of the public API: what /v1/chat/completions and /v1/completions accept, and their meaning.

One rule for fields: what we know and honour is checked strictly; what we know and can't do yet is refused with
`unsupported_parameter` unless it asks for nothing (n 1, tools [], logprobs false, ...); unknown fields are ignored,
as OpenAI-compatible servers do. Choices where several are allowed: max_tokens 0 is refused; max_completion_tokens
wins over max_tokens; logit_bias is clamped to [-100, 100]; temperatures below 0.001, top_p 0 and min_p 1 mean greedy;
top_k at or beyond the vocabulary is off; a seed is taken modulo 2**63; /v1/completions gives 16 tokens by default,
chat whatever the context has left.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, TypeVar

import msgspec

from router.chat import ChatMessage
from router.errors import InvalidRequest, Unsupported
from router.protocol import SamplingParams

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
DEFAULT_COMPLETION_TOKENS = 16
GREEDY_BELOW = 1e-3


class StreamOptions(msgspec.Struct):
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
    user: str | None = None
    # Known, not done yet: see _refuse_unsupported.
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    logits_processors: Any = None
    allowed_token_ids: Any = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: Thinking | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """prompt: text, token ids, or a list of one of those."""

    prompt: str | list[Any]
    logprobs: int | None = None


class Limits(msgspec.Struct, frozen=True):
    """What the cluster can take now. max_model_len 0: no worker has said it yet, so it is not checked."""

    vocab_size: int = 0
    max_model_len: int = 0


R = TypeVar("R", bound=GenerationRequest)

_decoders: dict[type[GenerationRequest], msgspec.json.Decoder[Any]] = {
    ChatRequest: msgspec.json.Decoder(ChatRequest),
    CompletionRequest: msgspec.json.Decoder(CompletionRequest),
}
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
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
        raise InvalidRequest(f"body: not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("body: JSON is nested too deeply", code="invalid_json") from None
    assert isinstance(request, kind)
    _refuse_unsupported(request)
    return request


def _refuse_unsupported(request: GenerationRequest) -> None:
    if request.n is not None and request.n < 1:
        raise InvalidRequest(f"n: {request.n} must be at least 1", param="n")
    neutral: dict[str, tuple[Any, ...]] = {
        "n": (None, 1),
        "best_of": (None, 1),
        "logprobs": (None, False) if isinstance(request, ChatRequest) else (None,),
        "top_logprobs": (None, 0),
        "use_beam_search": (None, False),
        "echo": (None, False),
        "suffix": (None, ""),
        "response_format": (None, {"type": "text"}),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "bad_words": (None, []),
        "add_generation_prompt": (None, True),
        "continue_final_message": (None, False),
        **dict.fromkeys(
            (
                "prompt_logprobs",
                "structured_outputs",
                "guided_json",
                "guided_regex",
                "guided_choice",
                "guided_grammar",
                "logits_processors",
                "allowed_token_ids",
                "truncate_prompt_tokens",
                "audio",
                "prediction",
                "web_search_options",
            ),
            (None,),
        ),
    }
    for field, allowed in neutral.items():
        value = getattr(request, field, None)
        # By type too: False is no neutral value of a count, nor 0 of a switch.
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise Unsupported(field, f"{_short(value)} is not supported yet; leave it out")
    if request.stream_options is not None:
        if not request.stream:
            raise InvalidRequest("stream_options: only allowed with stream true", param="stream_options")
        if request.stream_options.continuous_usage_stats:
            raise Unsupported("stream_options.continuous_usage_stats", "not supported yet; leave it out")


def wants_thinking(request: ChatRequest, *, default: bool) -> bool:
    """Return whether the answer shall begin with reasoning; chat_template_kwargs wins over the other spellings."""
    kwargs = request.chat_template_kwargs or {}
    thinking = default
    effort = kwargs.get("reasoning_effort", request.reasoning_effort)
    if effort is not None:
        # Of V4-Flash's levels only "max" has a text of its own; the others differ by name alone.
        if effort not in ("none", "minimal", "low", "medium", "high"):
            raise Unsupported(
                "reasoning_effort", f"{_short(effort)} is not supported yet; use none, low, medium or high"
            )
        thinking = False if effort == "none" else thinking
    if request.thinking is not None:
        if request.thinking.type not in ("enabled", "disabled"):
            raise InvalidRequest("thinking.type: must be enabled or disabled", param="thinking.type")
        thinking = request.thinking.type == "enabled"
    for field in ("enable_thinking", "thinking"):
        value = _switch(kwargs, field)
        thinking = thinking if value is None else value
    return thinking


def drops_thinking(request: ChatRequest) -> bool:
    """Return whether reasoning of earlier turns is left out of the prompt."""
    value = _switch(request.chat_template_kwargs or {}, "drop_thinking")
    return True if value is None else value


def _switch(kwargs: dict[str, Any], field: str) -> bool | None:
    value = kwargs.get(field)
    if value is not None and not isinstance(value, bool):
        where = f"chat_template_kwargs.{field}"
        raise InvalidRequest(f"{where}: must be true or false, found {_short(value)}", param=where)
    return value


def completion_prompt(request: CompletionRequest, *, limits: Limits) -> str | list[int]:
    """Return the one prompt, as text or as token ids. A limit of 0 is not known, and not checked."""
    vocab_size = limits.vocab_size
    prompt: Any = request.prompt
    if isinstance(prompt, list) and prompt and all(isinstance(p, str | list) for p in prompt):
        if len(prompt) > 1:
            raise Unsupported("prompt", f"{len(prompt)} prompts in one request are not supported yet; send one each")
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    if isinstance(prompt, str):
        return prompt
    if limits.max_model_len and len(prompt) > limits.max_model_len:  # before millions of ids are looked at
        raise InvalidRequest(
            f"prompt: {len(prompt)} tokens exceed this model's maximum context of {limits.max_model_len}",
            param="prompt",
            code="context_length_exceeded",
        )
    for n, token in enumerate(prompt):
        if type(token) is not int:
            raise InvalidRequest(f"prompt[{n}]: expected a token id, found {_short(token)}", param="prompt")
        if token < 0 or (vocab_size and token >= vocab_size):
            raise InvalidRequest(
                f"prompt[{n}]: token id {token} is outside the vocabulary of {vocab_size or 'unknown size'}",
                param="prompt",
            )
    return list(prompt)


def stop_strings(request: GenerationRequest) -> list[str]:
    """Return the stop strings. An empty one is refused: it would end every answer at once."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: {len(stops)} strings, at most {MAX_STOPS} are allowed", param="stop")
    for stop in stops:
        if not stop:
            raise InvalidRequest("stop: an empty string is not allowed", param="stop")
        if len(stop) > MAX_STOP_CHARS:
            raise InvalidRequest(f"stop: a string of {len(stop)} characters, at most {MAX_STOP_CHARS}", param="stop")
    return stops


def sampling_params(request: GenerationRequest, *, num_prompt_tokens: int, limits: Limits) -> SamplingParams:
    """Return what the workers are told, every value in range. Raises InvalidRequest naming the field."""
    max_tokens = _max_tokens(request, num_prompt_tokens, limits.max_model_len)
    min_tokens = request.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise InvalidRequest(f"min_tokens: {min_tokens} must be in [0, {max_tokens}] (max_tokens)", param="min_tokens")
    temperature = _number(request, "temperature", 1.0, low=0, high=2)
    top_p = _number(request, "top_p", 1.0, low=0, high=1)
    min_p = _number(request, "min_p", 0.0, low=0, high=1)
    top_k = 0 if request.top_k is None else request.top_k
    if top_k < -1:
        raise InvalidRequest(f"top_k: {top_k} must be -1 or 0 (off), or at least 1", param="top_k")
    if limits.vocab_size and top_k >= limits.vocab_size:
        top_k = 0
    if temperature < GREEDY_BELOW or top_p == 0 or min_p == 1:
        temperature, top_p, min_p, top_k = 0.0, 1.0, 0.0, 0
    repetition = _number(request, "repetition_penalty", 1.0, low=0, high=10)
    if repetition == 0:
        raise InvalidRequest("repetition_penalty: must be above 0", param="repetition_penalty")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=secrets.randbits(63) if request.seed is None else request.seed % 2**63,
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        presence_penalty=_number(request, "presence_penalty", 0.0, low=-2, high=2),
        frequency_penalty=_number(request, "frequency_penalty", 0.0, low=-2, high=2),
        repetition_penalty=repetition,
        logit_bias=_logit_bias(request, limits.vocab_size),
        stop_token_ids=_stop_token_ids(request, limits.vocab_size),
        ignore_eos=bool(request.ignore_eos),
    )


def _max_tokens(request: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    field, wanted = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        field, wanted = "max_completion_tokens", request.max_completion_tokens
    if wanted is not None and wanted < 1:
        raise InvalidRequest(f"{field}: {wanted} must be at least 1", param=field)
    left = max_model_len - num_prompt_tokens
    if max_model_len and (left < 1 or (wanted or 1) > left):
        where = "prompt" if isinstance(request, CompletionRequest) else "messages"
        asked = f" and {field} {wanted}" if wanted is not None else " and at least one token of output"
        raise InvalidRequest(
            f"{where}: {num_prompt_tokens} prompt tokens{asked} exceed this model's maximum context of "
            f"{max_model_len} tokens; shorten the prompt or lower {field}",
            param=where if left < 1 or wanted is None else field,
            code="context_length_exceeded",
        )
    if wanted is None:
        default = DEFAULT_COMPLETION_TOKENS if isinstance(request, CompletionRequest) else left
        return max(1, min(default, left) if max_model_len else DEFAULT_COMPLETION_TOKENS)
    return wanted


def _number(request: GenerationRequest, field: str, default: float, *, low: float, high: float) -> float:
    value = getattr(request, field)
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(f"{field}: {value} must be in [{low}, {high}]", param=field)
    return float(value)


def _logit_bias(request: GenerationRequest, vocab_size: int) -> dict[int, float]:
    bias = request.logit_bias or {}
    for token in bias:
        if token < 0 or (vocab_size and token >= vocab_size):
            raise InvalidRequest(
                f"logit_bias: token id {token} is outside the vocabulary of {vocab_size or 'unknown size'}",
                param="logit_bias",
            )
    return {token: min(100.0, max(-100.0, value)) for token, value in bias.items()}


def _stop_token_ids(request: GenerationRequest, vocab_size: int) -> tuple[int, ...]:
    ids = request.stop_token_ids or []
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids: {len(ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed", param="stop_token_ids"
        )
    for token in ids:
        if token < 0 or (vocab_size and token >= vocab_size):
            raise InvalidRequest(
                f"stop_token_ids: token id {token} is outside the vocabulary of {vocab_size or 'unknown size'}",
                param="stop_token_ids",
            )
    return tuple(ids)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
