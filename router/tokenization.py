"""Tokenization: /tokenize and /detokenize, so that clients can count tokens and see prompts.

Texts of any length are taken, up to the limit on bodies: what is too long for a request can still be counted.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from router import openai
from router.body import read_body
from router.config import RouterConfig
from router.errors import InvalidRequest
from router.intake import Intake
from router.openai import DetokenizeRequest, TokenizeRequest
from router.prompts import check_token_ids
from router.tokenizer import LONG_TEXT_CHARS, Detokenizer, Tokenizer

_OF_MESSAGES = (
    "tools",
    "tool_choice",
    "response_format",
    "chat_template_kwargs",
    "thinking",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
)


class Tokenization:
    """Both routes, with the intake's own steps: what /tokenize counts is what a request would be charged."""

    def __init__(self, config: RouterConfig, intake: Intake) -> None:
        self._config = config
        self._intake = intake

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """Return the tokens of a prompt, or of the prompt that messages make. Raises ApiError."""
        body = await read_body(request, self._config)
        fields = openai.parse(body, TokenizeRequest)
        self._intake.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
        if fields.messages is None and (field := next((f for f in _OF_MESSAGES if getattr(fields, f)), None)):
            raise InvalidRequest(f"{field}: a prompt is taken as it is; send messages, or leave it out", param=field)
        param = "prompt" if fields.messages is None else "messages"
        tokenizer = self._intake.needs_tokenizer("/tokenize", param=param)
        text = fields.prompt
        if text is None:
            _, text = await self._intake.chat_prompt(fields, num_bytes=len(body))
        token_ids = await self._intake.encode(text, param)

        def texts() -> list[str] | None:
            return [_text(tokenizer, token) for token in token_ids] if fields.return_token_strs else None

        return {
            "count": len(token_ids),
            "max_model_len": self._intake.limits().max_model_len or None,
            "tokens": token_ids,
            "token_strs": texts() if len(text) < LONG_TEXT_CHARS else await asyncio.to_thread(texts),
        }

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """Return the text of token ids. Raises ApiError."""
        fields = openai.parse(await read_body(request, self._config), DetokenizeRequest)
        self._intake.check_model(fields.model)
        tokenizer = self._intake.needs_tokenizer("/detokenize", param="tokens")
        limits = openai.Limits(vocab_size=tokenizer.vocab_size)

        def read() -> str:
            check_token_ids(fields.tokens, "tokens", limits=limits, param="tokens")
            detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
            return detokenizer.feed(fields.tokens) + detokenizer.finish()

        is_short = len(fields.tokens) < LONG_TEXT_CHARS
        return {"prompt": read() if is_short else await asyncio.to_thread(read)}


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes[token].decode("utf-8", "replace")
