"""Sampling fields of a request: their ranges and defaults, and what the workers are told.

Choices where several are allowed: max_tokens 0 is refused; max_completion_tokens wins over max_tokens; logit_bias is
clamped to [-100, 100]; temperatures below 0.001, top_p 0 and min_p 1 mean greedy, also with several choices, which are
then equal; top_k at or beyond the vocabulary is off; a seed is taken modulo 2**63; /v1/completions gives 16 tokens by
default, chat whatever the context has left.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import msgspec

from router.errors import InvalidRequest, Unsupported
from router.openai import ChatRequest, CompletionRequest, GenerationRequest, Limits
from router.protocol import Guide, SamplingParams

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
DEFAULT_COMPLETION_TOKENS = 16
GREEDY_BELOW = 1e-3

# field: default, lowest, highest
RANGES: dict[str, tuple[float, float, float]] = {
    "temperature": (1, 0, 2),
    "top_p": (1, 0, 1),
    "min_p": (0, 0, 1),
    "presence_penalty": (0, -2, 2),
    "frequency_penalty": (0, -2, 2),
    "repetition_penalty": (1, 0, 10),
}


def sampling_params(
    request: GenerationRequest, *, num_prompt_tokens: int, limits: Limits, guide: Guide | None = None
) -> SamplingParams:
    """Return what the workers are told, every value in range. Raises InvalidRequest naming the field."""
    max_tokens, min_tokens = _lengths(request, num_prompt_tokens, limits.max_model_len)
    temperature, top_p, min_p = (_number(request, field) for field in ("temperature", "top_p", "min_p"))
    top_k = 0 if request.top_k is None else request.top_k
    if top_k < -1:
        raise InvalidRequest(f"top_k: {top_k} must be -1 or 0 (off), or at least 1", param="top_k")
    if limits.vocab_size and top_k >= limits.vocab_size:
        top_k = 0
    if temperature < GREEDY_BELOW or top_p == 0 or min_p == 1:
        temperature, top_p, min_p, top_k = 0.0, 1.0, 0.0, 0
    repetition = _number(request, "repetition_penalty")
    if repetition == 0:
        raise InvalidRequest("repetition_penalty: must be above 0", param="repetition_penalty")
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=_seed(request),
        temperature=temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        presence_penalty=_number(request, "presence_penalty"),
        frequency_penalty=_number(request, "frequency_penalty"),
        repetition_penalty=repetition,
        logit_bias=_logit_bias(request, limits.vocab_size),
        stop_token_ids=_stop_token_ids(request, limits.vocab_size),
        ignore_eos=bool(request.ignore_eos),
        num_logprobs=num_logprobs(request),
        guide=guide,
    )


def sampling_of_prompts(
    request: GenerationRequest, *, num_prompt_tokens: Sequence[int], limits: Limits
) -> list[SamplingParams]:
    """Return sampling_params for each of several prompts.

    What no prompt changes is read once: a logit_bias may name the whole vocabulary.
    """
    first = sampling_params(request, num_prompt_tokens=num_prompt_tokens[0], limits=limits)
    params = [first]
    for count in num_prompt_tokens[1:]:
        max_tokens, min_tokens = _lengths(request, count, limits.max_model_len)
        params.append(msgspec.structs.replace(first, max_tokens=max_tokens, min_tokens=min_tokens, seed=_seed(request)))
    return params


def num_choices(request: GenerationRequest) -> int:
    """Return how many answers each prompt gets."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n: {n} must be in [1, {MAX_CHOICES}]", param="n")
    if request.best_of not in (None, n):
        raise Unsupported("best_of", f"{request.best_of}: only the same as n ({n}) is supported; leave it out")
    return n


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of several choices: the first has the request's own, so it is what n 1 would give.

    The others have 63 bits of a hash of both numbers, so each choice can be had again from the request's seed.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(b"%d/%d" % (seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def num_logprobs(request: GenerationRequest) -> int:
    """Return how many alternatives beside each token's log probability are wanted; -1: no log probabilities."""
    if isinstance(request, CompletionRequest):
        if request.logprobs is None:
            return -1
        if not 0 <= request.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"logprobs: {request.logprobs} must be in [0, {MAX_TOP_LOGPROBS}]", param="logprobs")
        if request.echo:
            raise Unsupported(
                "echo", "with logprobs not supported: log probabilities of a prompt are not kept; leave one of them out"
            )
        return request.logprobs
    assert isinstance(request, ChatRequest)
    top = request.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"top_logprobs: {top} must be in [0, {MAX_TOP_LOGPROBS}]", param="top_logprobs")
    if top and not request.logprobs:
        raise InvalidRequest("top_logprobs: needs logprobs true", param="top_logprobs")
    return top if request.logprobs else -1


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


def _seed(request: GenerationRequest) -> int:
    return secrets.randbits(63) if request.seed is None else request.seed % 2**63


def _lengths(request: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> tuple[int, int]:
    """Return max_tokens and min_tokens."""
    max_tokens = _max_tokens(request, num_prompt_tokens, max_model_len)
    min_tokens = request.min_tokens or 0
    if not 0 <= min_tokens <= max_tokens:
        raise InvalidRequest(f"min_tokens: {min_tokens} must be in [0, {max_tokens}] (max_tokens)", param="min_tokens")
    return max_tokens, min_tokens


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


def _number(request: GenerationRequest, field: str) -> float:
    value = getattr(request, field)
    default, low, high = RANGES[field]
    if value is None:
        return float(default)
    if not low <= value <= high:
        raise InvalidRequest(f"{field}: {value} must be in [{low}, {high}]", param=field)
    return float(value)


def _logit_bias(request: GenerationRequest, vocab_size: int) -> dict[int, float]:
    bias = request.logit_bias or {}
    for token in bias:
        _check_token_id(token, "logit_bias", vocab_size)
    return {token: min(100.0, max(-100.0, value)) for token, value in bias.items()}


def _stop_token_ids(request: GenerationRequest, vocab_size: int) -> tuple[int, ...]:
    ids = request.stop_token_ids or []
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids: {len(ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed", param="stop_token_ids"
        )
    for token in ids:
        _check_token_id(token, "stop_token_ids", vocab_size)
    return tuple(ids)


def _check_token_id(token: int, field: str, vocab_size: int) -> None:
    if token < 0 or (vocab_size and token >= vocab_size):
        raise InvalidRequest(
            f"{field}: token id {token} is outside the vocabulary of {vocab_size or 'unknown size'}", param=field
        )
