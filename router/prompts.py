"""Prompts of /v1/completions: text, token ids, or several of either."""

from __future__ import annotations

from typing import Any

from router.errors import InvalidRequest, shown
from router.openai import CompletionRequest, Limits

MAX_PROMPTS = 128
MAX_TOTAL_CHOICES = 512


def completion_prompts(request: CompletionRequest, *, limits: Limits) -> list[str | list[int]]:
    """Return the prompts, each as text or as token ids. A limit of 0 is not known, and not checked."""
    prompt: Any = request.prompt
    is_list = isinstance(prompt, list) and bool(prompt) and all(isinstance(p, str | list) for p in prompt)
    prompts = prompt if is_list else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt: {len(prompts)} prompts in one request, at most {MAX_PROMPTS} are allowed; send several requests",
            param="prompt",
        )
    if len(prompts) * (request.n or 1) > MAX_TOTAL_CHOICES:
        raise InvalidRequest(
            f"prompt: {len(prompts)} prompts with n {request.n} are {len(prompts) * (request.n or 1)} answers, at most "
            f"{MAX_TOTAL_CHOICES} are allowed in one request",
            param="prompt",
        )
    return [
        _checked(p, f"prompt[{number}]" if is_list else "prompt", limits=limits) for number, p in enumerate(prompts)
    ]


def check_token_ids(token_ids: list[Any], where: str, *, limits: Limits, param: str) -> None:
    """Raise InvalidRequest, naming the place, for what is no token id of the vocabulary."""
    vocab_size = limits.vocab_size
    for n, token in enumerate(token_ids):
        if type(token) is not int:
            raise InvalidRequest(f"{where}[{n}]: expected a token id, found {shown(token)}", param=param)
        if token < 0 or (vocab_size and token >= vocab_size):
            raise InvalidRequest(
                f"{where}[{n}]: token id {token} is outside the vocabulary of {vocab_size or 'unknown size'}",
                param=param,
            )


def _checked(prompt: str | list[Any], where: str, *, limits: Limits) -> str | list[int]:
    if not prompt:
        raise InvalidRequest(f"{where}: must not be empty", param="prompt")
    if isinstance(prompt, str):
        return prompt
    if limits.max_model_len and len(prompt) > limits.max_model_len:  # before millions of ids are looked at
        raise InvalidRequest(
            f"{where}: {len(prompt)} tokens exceed this model's maximum context of {limits.max_model_len}",
            param="prompt",
            code="context_length_exceeded",
        )
    check_token_ids(prompt, where, limits=limits, param="prompt")
    return list(prompt)
