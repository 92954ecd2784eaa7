"""Intake: a request to a Job that nothing can be wrong with any more.

Checks every field, renders the chat, makes tokens. Nothing invalid reaches a worker.
"""

from __future__ import annotations

import asyncio
import functools
import json
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request

from router import openai
from router.answer import AnswerWriter, Usage
from router.body import read_body
from router.chat import encode_chat
from router.chat_options import ChatOptions, chat_options
from router.config import RouterConfig
from router.dispatch import RequestRecord
from router.encoding import EncodingTexts
from router.errors import ApiError, InvalidRequest
from router.exchange import Job
from router.guided import Guides
from router.logprobs import LogprobFormat
from router.openai import ChatRequest, CompletionRequest, Limits, TokenizeRequest
from router.pipeline import TextPipeline
from router.prompts import completion_prompts
from router.protocol import Guide
from router.reasoning import THINK_OPEN
from router.registry import Registry
from router.sampling import choice_seed, num_choices, num_logprobs, sampling_of_prompts, stop_strings
from router.tokenizer import LONG_TEXT_CHARS, TOKENIZER_FILE, Detokenizer, Tokenizer

# The tokenizer takes some 120 bytes a character while it works, so of texts like these one is encoded at a time.
HUGE_TEXT_CHARS = 1 << 20
THREAD_BODY_BYTES = 64 << 10
GUIDE_THREADS = 4
MAX_WAITING_GUIDES = 64


class Intake:
    """Makes jobs. tokenizer None: the model folder has none, so text can't be taken.

    Raises ValueError if the folder's `encoding` can't be read.
    """

    def __init__(self, config: RouterConfig, registry: Registry, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._registry = registry
        self._tokenizer = tokenizer
        self._texts = EncodingTexts.from_folder(config.model)
        tokenizer_file = Path(config.model) / TOKENIZER_FILE
        self._guides = Guides(tokenizer_file) if tokenizer is not None and tokenizer_file.is_file() else None
        self._guide_threads = ThreadPoolExecutor(GUIDE_THREADS, thread_name_prefix="guides")
        self._num_guides = 0
        self._huge_texts = asyncio.Lock()
        self._config_vocab_size = _config_vocab_size(Path(config.model))

    def close(self) -> None:
        """End the threads and the process that compile guides."""
        self._guide_threads.shutdown(wait=False, cancel_futures=True)
        if self._guides is not None:
            self._guides.close()

    def limits(self) -> Limits:
        """Return what prompts and parameters are checked against."""
        limits = self._registry.limits()
        if limits is not None:
            return Limits(limits.vocab_size, limits.max_model_len)
        return Limits(self._config_vocab_size or (self._tokenizer.vocab_size if self._tokenizer else 0), 0)

    async def chat(self, request: Request) -> Job:
        """Return the job of a /v1/chat/completions request. Raises ApiError."""
        body = await read_body(request, self._config)
        fields = openai.parse(body, ChatRequest)
        self.check_model(fields.model)
        self.needs_tokenizer("chat", param="messages")
        num_choices(fields)
        options, text = await self.chat_prompt(fields, num_bytes=len(body))
        ids = await self.encode(text, "messages", limit=self.limits().max_model_len)
        return await self._job(
            request, fields, [ids], is_thinking=text.endswith(THINK_OPEN), functions=options.functions
        )

    async def completion(self, request: Request) -> Job:
        """Return the job of a /v1/completions request. Raises ApiError."""
        fields = openai.parse(await read_body(request, self._config), CompletionRequest)
        self.check_model(fields.model)
        num_choices(fields)
        limits = self.limits()
        prompts: list[list[int]] = []
        echoes: list[str] = []
        for prompt in completion_prompts(fields, limits=limits):
            if fields.echo:
                echoes.append(self._echo(prompt, skips_special=fields.skip_special_tokens is not False))
            if isinstance(prompt, str):
                self.needs_tokenizer("a text prompt", param="prompt")
                prompt = await self.encode(prompt, "prompt", limit=limits.max_model_len)
                await asyncio.sleep(0)  # there may be many: others come in between
            prompts.append(prompt)
        return await self._job(request, fields, prompts, echoes=echoes)

    async def chat_prompt(self, fields: ChatRequest | TokenizeRequest, *, num_bytes: int) -> tuple[ChatOptions, str]:
        """Return the options of a chat and its prompt text; a thread works on those of a long body (`num_bytes`)."""

        def write() -> tuple[ChatOptions, str]:
            options = chat_options(fields, default_thinking=self._config.default_thinking)
            try:
                return options, encode_chat(
                    fields.messages or [],
                    texts=self._texts,
                    tools=options.tools,
                    response_format=fields.response_format,
                    effort=options.effort,
                    thinking=options.thinking,
                    drop_thinking=options.drop_thinking,
                    add_generation_prompt=options.add_generation_prompt,
                    continue_final_message=bool(fields.continue_final_message),
                )
            except RecursionError:
                raise InvalidRequest("messages: JSON is nested too deeply", param="messages") from None

        return write() if num_bytes < THREAD_BODY_BYTES else await asyncio.to_thread(write)

    async def encode(self, text: str, param: str, *, limit: int = 0) -> list[int]:
        """Return the tokens of `text`; long texts in a thread, and none that can't fit into `limit` tokens (0: any)."""
        assert self._tokenizer is not None
        if limit and len(text) > limit * self._tokenizer.longest_token:
            raise InvalidRequest(
                f"{param}: a text of {len(text)} characters exceeds this model's maximum context of {limit} tokens",
                param=param,
                code="context_length_exceeded",
            )
        if len(text) < LONG_TEXT_CHARS:
            return self._tokenizer.encode(text)
        async with self._huge_texts if len(text) > HUGE_TEXT_CHARS else nullcontext():
            return await asyncio.to_thread(self._tokenizer.encode, text)

    def check_model(self, model: str | None) -> None:
        """Raise ApiError if a request names another model than ours."""
        name = self._config.model_name
        if model is not None and model != name:
            raise ApiError(
                404,
                f"model {model[:200]!r} does not exist; this server has {name!r}",
                code="model_not_found",
                param="model",
            )

    def needs_tokenizer(self, what: str, *, param: str) -> Tokenizer:
        """Return the tokenizer. Raises ApiError, saying what needs it, if there is none."""
        if self._tokenizer is None:
            raise self._missing_tokenizer(what, param=param)
        return self._tokenizer

    # ------------------------------------------------------------ parts

    async def _job(
        self,
        request: Request,
        fields: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        *,
        is_thinking: bool = False,
        functions: Mapping[str, dict[str, Any]] | None = None,
        echoes: Sequence[str] = (),
    ) -> Job:
        stops = stop_strings(fields)
        if stops:
            self.needs_tokenizer("a stop string", param="stop")
        num_tops = num_logprobs(fields)
        limits, count = self.limits(), num_choices(fields)
        samplings = sampling_of_prompts(fields, num_prompt_tokens=[len(ids) for ids in prompts], limits=limits)
        changes: dict[str, Any] = {}
        if fields.forced_token_ids:
            if not self._config.test_seams:
                raise InvalidRequest("forced_token_ids is for tests of the server", param="forced_token_ids")
            changes["forced_token_ids"] = tuple(fields.forced_token_ids)
        if field := openai.guide_field(fields):
            if self._guides is None:
                raise self._missing_tokenizer("a guided answer", param=field)
            changes["guide"] = await self._guide(self._guides, fields, is_thinking=is_thinking)
        internal_id = uuid.uuid4().hex
        # With seams open a test names the request that it holds.
        suffix = f"-{request.state.request_id}" if self._config.test_seams else ""
        records: list[RequestRecord] = []
        pipelines: list[TextPipeline] = []
        usages: list[Usage] = []
        skips_special = fields.skip_special_tokens is not False
        for ids, sampling in zip(prompts, samplings, strict=True):
            for choice in range(count):
                seed = choice_seed(sampling.seed, choice)
                own = msgspec.structs.replace(sampling, seed=seed, **changes) if choice or changes else sampling
                number = f".{len(records)}" if records else ""
                records.append(RequestRecord(internal_id + number + suffix, ids, own))
                usages.append(Usage(0 if choice else len(ids)))
                pipelines.append(
                    TextPipeline(
                        self._tokenizer,
                        own,
                        usage=usages[-1],
                        stops=stops,
                        is_thinking=is_thinking,
                        include_stop=bool(fields.include_stop_str_in_output),
                        skip_special_tokens=skips_special,
                        parses_tools=bool(functions),
                        tool_schemas=functions or None,
                    )
                )
        is_chat = isinstance(fields, ChatRequest)
        stream_options = fields.stream_options or openai.StreamOptions()
        shows_ids = bool(fields.return_token_ids) or self._tokenizer is None
        writer = AnswerWriter(
            request_id=internal_id + suffix,
            model=self._config.model_name,
            is_chat=is_chat,
            usages=usages,
            prompts=prompts if shows_ids else (),
            echoes=echoes,
            include_usage=bool(stream_options.include_usage),
            continuous_usage=bool(stream_options.continuous_usage_stats),
            one_call=isinstance(fields, ChatRequest) and fields.parallel_tool_calls is False,
            logprobs=[
                LogprobFormat(
                    self._tokenizer,
                    is_chat=is_chat,
                    num_top=num_tops,
                    hides_special=skips_special,
                )
                for _ in usages
            ]
            if num_tops >= 0
            else (),
        )
        return Job(
            records=records,
            pipelines=pipelines,
            usages=usages,
            num_choices=count,
            writer=writer,
            stream=bool(fields.stream),
            shown_id=request.state.request_id,
        )

    async def _guide(
        self, guides: Guides, fields: ChatRequest | CompletionRequest, *, is_thinking: bool
    ) -> Guide | None:
        """Return what the answer must match. Compiling it takes a while, so it is done in threads of its own."""
        if self._num_guides >= MAX_WAITING_GUIDES:
            raise ApiError(
                503, f"{self._num_guides} grammars wait to be compiled; try later", code="guides_busy", retry_after_s=1
            )
        self._num_guides += 1
        try:
            make = functools.partial(guides.guide, fields, is_thinking=is_thinking)
            return await asyncio.get_running_loop().run_in_executor(self._guide_threads, make)
        finally:
            self._num_guides -= 1

    def _missing_tokenizer(self, what: str, *, param: str) -> ApiError:
        return ApiError(
            501,
            f"{what} needs {TOKENIZER_FILE}, which the model folder {self._config.model_name} lacks; "
            "add it, or send token ids to /v1/completions",
            code="tokenizer_missing",
            param=param,
        )

    def _echo(self, prompt: str | list[int], *, skips_special: bool) -> str:
        tokenizer = self.needs_tokenizer("echo", param="echo")
        if isinstance(prompt, str):
            return prompt
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips_special)
        return detokenizer.feed(prompt) + detokenizer.finish()


def _config_vocab_size(folder: Path) -> int:
    """Return vocab_size of the folder's config.json, 0 if it says none."""
    path = folder / "config.json"
    try:
        value = json.loads(path.read_text()).get("vocab_size", 0) if path.is_file() else 0
    except (OSError, ValueError, AttributeError):
        return 0
    return value if isinstance(value, int) and value > 0 else 0
