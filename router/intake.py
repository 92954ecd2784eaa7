"""Intake: the bytes of a request body to a Job that nothing can be wrong with any more.

Reads no more than allowed, checks every field, renders the chat, makes tokens. Nothing invalid reaches a worker.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from pathlib import Path

import msgspec
from starlette.requests import ClientDisconnect, Request

from router import openai
from router.answer import AnswerWriter, Usage
from router.chat import encode_chat
from router.config import RouterConfig
from router.dispatch import RequestRecord
from router.errors import ApiError, InvalidRequest
from router.exchange import Job
from router.openai import ChatRequest, CompletionRequest, GenerationRequest, Limits
from router.pipeline import TextPipeline
from router.reasoning import THINK_OPEN
from router.registry import Registry
from router.tokenizer import TOKENIZER_FILE, Tokenizer

# Beyond the limit a body is read on, unstored, so that the client gets to read the refusal; up to this much.
MAX_DISCARDED_BYTES = 64 << 20
THREAD_TEXT_CHARS = 10_000
_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:-]")


class Intake:
    """Makes jobs. tokenizer None: the model folder has none, so text can't be taken."""

    def __init__(self, config: RouterConfig, registry: Registry, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._registry = registry
        self._tokenizer = tokenizer
        self._config_vocab_size = _config_vocab_size(Path(config.model))

    def limits(self) -> Limits:
        """Return what prompts and parameters are checked against."""
        limits = self._registry.limits()
        if limits is not None:
            return Limits(limits.vocab_size, limits.max_model_len)
        return Limits(self._config_vocab_size or (self._tokenizer.vocab_size if self._tokenizer else 0), 0)

    async def chat(self, request: Request) -> Job:
        """Return the job of a /v1/chat/completions request. Raises ApiError."""
        fields = openai.parse(await read_body(request, self._config), ChatRequest)
        self._check_model(fields)
        if self._tokenizer is None:
            raise ApiError(501, self._missing_tokenizer("chat"), code="tokenizer_missing", param="messages")
        thinking = openai.wants_thinking(fields, default=self._config.default_thinking)
        text = encode_chat(fields.messages, thinking=thinking, drop_thinking=openai.drops_thinking(fields))
        ids = await self._encode(text, "messages")
        return self._job(request, fields, ids, is_chat=True, is_thinking=text.endswith(THINK_OPEN))

    async def completion(self, request: Request) -> Job:
        """Return the job of a /v1/completions request. Raises ApiError."""
        fields = openai.parse(await read_body(request, self._config), CompletionRequest)
        self._check_model(fields)
        prompt = openai.completion_prompt(fields, limits=self.limits())
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ApiError(501, self._missing_tokenizer("a text prompt"), code="tokenizer_missing", param="prompt")
            prompt = await self._encode(prompt, "prompt")
        return self._job(request, fields, prompt, is_chat=False)

    def _job(
        self, request: Request, fields: GenerationRequest, ids: list[int], *, is_chat: bool, is_thinking: bool = False
    ) -> Job:
        stops = openai.stop_strings(fields)
        if stops and self._tokenizer is None:
            raise ApiError(501, self._missing_tokenizer("a stop string"), code="tokenizer_missing", param="stop")
        sampling = openai.sampling_params(fields, num_prompt_tokens=len(ids), limits=self.limits())
        if fields.forced_token_ids:
            if not self._config.test_seams:
                raise InvalidRequest("forced_token_ids is for tests of the server", param="forced_token_ids")
            sampling = msgspec.structs.replace(sampling, forced_token_ids=tuple(fields.forced_token_ids))
        internal_id = uuid.uuid4().hex
        if self._config.test_seams:
            internal_id += f"-{request.state.request_id}"  # a test names the request that it holds
        usage = Usage(prompt_tokens=len(ids))
        shows_ids = bool(fields.return_token_ids) or self._tokenizer is None
        return Job(
            records=[RequestRecord(internal_id, ids, sampling)],
            pipelines=[
                TextPipeline(
                    self._tokenizer,
                    sampling,
                    usage=usage,
                    stops=stops,
                    is_thinking=is_thinking,
                    include_stop=bool(fields.include_stop_str_in_output),
                    skip_special_tokens=fields.skip_special_tokens is not False,
                )
            ],
            usages=[usage],
            num_choices=1,
            writer=AnswerWriter(
                request_id=internal_id,
                model=self._config.model_name,
                is_chat=is_chat,
                usages=[usage],
                prompts=[ids] if shows_ids else (),
                include_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
            ),
            stream=bool(fields.stream),
            shown_id=request.state.request_id,
        )

    def _check_model(self, fields: GenerationRequest) -> None:
        name = self._config.model_name
        if fields.model is not None and fields.model != name:
            raise ApiError(
                404,
                f"model {fields.model[:200]!r} does not exist; this server has {name!r}",
                code="model_not_found",
                param="model",
            )

    async def _encode(self, text: str, param: str) -> list[int]:
        """Return the tokens of `text`; long texts in a thread, and none that can't fit."""
        assert self._tokenizer is not None
        limit = self.limits().max_model_len
        if limit and len(text) > limit * self._tokenizer.longest_token:
            raise InvalidRequest(
                f"{param}: a text of {len(text)} characters exceeds this model's maximum context of {limit} tokens",
                param=param,
                code="context_length_exceeded",
            )
        if len(text) < THREAD_TEXT_CHARS:
            return self._tokenizer.encode(text)
        return await asyncio.to_thread(self._tokenizer.encode, text)

    def _missing_tokenizer(self, what: str) -> str:
        return (
            f"{what} needs {TOKENIZER_FILE}, which the model folder {self._config.model_name} lacks; "
            "add it, or send token ids to /v1/completions"
        )


async def read_body(request: Request, config: RouterConfig) -> bytes:
    """Return the body. Raises ApiError 413 beyond the limit, 408 if it comes too slowly, 415 if it is compressed."""
    limit = config.max_body_bytes
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "content-encoding: compressed bodies are not supported", param="content-encoding")
    too_large = ApiError(
        413, f"body: larger than {limit} bytes (max_body_mib {config.max_body_mib:g})", code="body_too_large"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit and "expect" in request.headers:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                elif size > limit + MAX_DISCARDED_BYTES:
                    break
    except TimeoutError:
        raise ApiError(408, f"body: not complete after {config.body_timeout_s:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise ApiError(499, "client left while sending its request", code="client_left") from None
    if size > limit:
        raise too_large
    return b"".join(chunks)


def request_id(request: Request) -> str:
    """Return the client's x-request-id, cleaned, or a new one."""
    given = _REQUEST_ID.sub("", request.headers.get("x-request-id", ""))[:128]
    return given or f"req-{time.time_ns():x}-{uuid.uuid4().hex[:8]}"


def _config_vocab_size(folder: Path) -> int:
    """Return vocab_size of the folder's config.json, 0 if it says none."""
    try:
        value = json.loads((folder / "config.json").read_text()).get("vocab_size", 0)
    except (OSError, ValueError, AttributeError):
        return 0
    return value if isinstance(value, int) and value > 0 else 0
