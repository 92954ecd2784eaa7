"""A checkpoint as it is published: NVFP4 experts beside FP8 and MXFP4 in several files, tokenizer, encoding. It chats.

The roles are processes of their own. Whatever a request asks for, prompt and sampling that the router makes of it give
one ModelRunner with the same folder the same tokens.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from tokenizers import Tokenizer

from deploy import tiny_encoding, tiny_model
from router.protocol import PrefillRequest

TESTS = Path(__file__).resolve().parents[1]
EOS = 1
# What -0731 has in the place of V4-Flash's one constant.
EFFORTS = {"low": "", "high": "Effort: more than a little.\n\n", "max": "Effort: all of it, and then some.\n\n"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Panama", "Suez"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["city", "days"],
        },
    },
}
ASK = [{"role": "system", "content": "You know the weather."}, {"role": "user", "content": "Is it dry in Suez?"}]


def _module(name, path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def write_official_folder(folder):
    """Write the oracle `mx` with the real vocabulary, and all that lies beside the weights in a published folder."""
    geo = _module("gpu_geo", TESTS / "gpu/geo.py")
    forms = _module("engine_storage_forms", TESTS / "engine/storage_forms.py")
    config = geo.read_config("mx") | {"vocab_size": 129280}
    stored = _module("make_golden", TESTS / "oracle/make_golden.py").build_weights(config)[0]
    forms.write(folder, "nvfp4-spread", stored, config)
    (folder / "generation_config.json").write_text(json.dumps(tiny_model.GENERATION_CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny_model._tokenizer_folder() / name, folder / name)
    (folder / "encoding").mkdir()
    efforts = f"REASONING_EFFORT_PROMPTS = {EFFORTS!r}\nDEFAULT_REASONING_EFFORT = 'low'\n"
    (folder / tiny_model.ENCODING).write_text(Path(tiny_encoding.__file__).read_text() + efforts)
    return folder


class Site:
    """The roles, started, and one runner. ask: a chat request and what it was answered."""

    def __init__(self, model, hand):
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        harness = _module("engine_harness", TESTS / "engine/harness.py")
        self._side = harness.Side(harness.make_runner(model, role="decode"))
        self._hand = hand

    def ask(self, messages, **fields):
        """Return the answer's message, token ids and reason to end, the same whether it is streamed or not."""
        fields = {"model": "official", "messages": messages, "max_tokens": 12, "temperature": 0, **fields}
        whole = self._post(fields).json()["choices"][0]
        message = {name: whole["message"].get(name) for name in ("content", "reasoning_content", "tool_calls")}
        streamed, ids, reason = _joined(self._post(fields | {"stream": True}).text)
        for call in (*(message["tool_calls"] or ()), *(streamed["tool_calls"] or ())):
            call.pop("id"), call.pop("index", None)
        assert (
            {name: value or None for name, value in message.items()},
            whole["token_ids"],
            whole["finish_reason"],
        ) == (
            streamed,
            ids,
            reason,
        )
        return streamed, ids, reason

    def last_request(self):
        """Return what the router made of the last one."""
        legs = httpx.get(f"{self._hand.url}/seams/prefill_legs").raise_for_status().json()
        return msgspec.convert(legs[-1]["request"], PrefillRequest, strict=False)

    def prompt(self):
        return self.tokenizer.decode(self.last_request().prompt_token_ids, skip_special_tokens=False)

    def alone(self):
        """Return the tokens that one runner answers the last request with."""
        asked = self.last_request()
        with torch.inference_mode():
            running = self._side.start(
                asked.prompt_token_ids,
                num_tokens=len(asked.prompt_token_ids) + asked.sampling.max_tokens,
                sampling=asked.sampling,
            )
            self._side.prefill(running, asked.prompt_token_ids, 128)
            while running.tokens[-1] != EOS and len(running.tokens) < asked.sampling.max_tokens:
                self._side.step((running, running.tokens[-1:], True))
            self._side.end(running)
        return running.tokens

    def _post(self, fields):
        reply = httpx.post(
            f"{self._hand.url}/v1/chat/completions", json=fields | {"return_token_ids": True}, timeout=60
        )
        assert reply.status_code == 200, reply.text
        return reply


def _joined(text):
    """Return message, token ids and reason to end of a stream."""
    message, ids, reason = {"content": "", "reasoning_content": "", "tool_calls": []}, [], None
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        ids += choice.get("token_ids") or []
        reason = choice["finish_reason"] or reason
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {name: value or None for name, value in message.items()}, ids, reason


@pytest.fixture(scope="module")
def site(tmp_path_factory, free_ports):
    model = write_official_folder(tmp_path_factory.mktemp("models") / "official")
    hand = _module("cluster_hand", TESTS / "cluster/hand.py").Hand(tmp_path_factory.mktemp("logs"), model, free_ports)
    try:
        hand.begin_all()
        yield Site(model, hand)
    finally:
        hand.close()


@pytest.mark.parametrize(("effort", "text"), [(None, ""), ("high", EFFORTS["high"]), ("max", EFFORTS["max"])])
def test_it_reasons_with_the_effort_that_the_folder_has_a_text_for(site, effort, text):
    fields = {"thinking": {"type": "enabled"}} if effort is None else {"reasoning_effort": effort}
    message, ids, reason = site.ask(ASK, **fields)
    assert site.prompt().startswith(f"<｜begin▁of▁sentence｜>{text}You know the weather.<｜User｜>")
    assert site.prompt().endswith("<｜Assistant｜><think>")
    assert ids == site.alone() and reason == "length"
    assert message == {"content": None, "reasoning_content": site.tokenizer.decode(ids), "tool_calls": None}


def test_it_answers_without_reasoning(site):
    message, ids, reason = site.ask(ASK)
    assert site.prompt().endswith("<｜Assistant｜></think>")
    assert ids == site.alone() and reason == "length"
    assert message == {"content": site.tokenizer.decode(ids), "reasoning_content": None, "tool_calls": None}


def test_it_calls_a_tool_and_answers_to_what_that_gave(site):
    message, ids, reason = site.ask(
        ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=80
    )
    assert "## Functions" in site.prompt() and json.dumps(WEATHER["function"]) in site.prompt()
    assert ids == site.alone() and reason == "tool_calls"
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "weather" and arguments["city"] in ("Oslo", "Panama", "Suez")
    assert arguments["days"] in (1, 2, 3)

    turns = [{"role": "assistant", **message, "tool_calls": [call | {"id": "one"}]}]
    turns += [{"role": "tool", "tool_call_id": "one", "content": "dry"}]
    message, ids, _ = site.ask([*ASK, *turns], tools=[WEATHER], tool_choice="none")
    assert site.prompt().endswith("<｜User｜><tool_result>dry</tool_result><｜Assistant｜></think>")
    assert ids == site.alone() and message["content"] == site.tokenizer.decode(ids)


def test_it_reasons_and_then_calls_or_answers(site):
    """A random model ends no reasoning of its own accord: its tokens are forced, by the runner's seam."""
    call = '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Suez</｜DSML｜parameter>\n'
    call += '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    for tail, content, reason in (
        ("Dry.", "Dry.", "stop"),
        (f"\n\n<｜DSML｜tool_calls>\n{call}</｜DSML｜tool_calls>", None, "tool_calls"),
    ):
        forced = [*site.tokenizer.encode(f"Hm.</think>{tail}", add_special_tokens=False).ids, EOS]
        fields = {"tools": [WEATHER], "tool_choice": "auto", "max_tokens": 99, "forced_token_ids": forced}
        message, _, ended = site.ask(ASK, reasoning_effort="high", **fields)
        assert (message["reasoning_content"], message["content"], ended) == ("Hm.", content, reason)
        if reason == "tool_calls":
            assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Suez", "days": 2}
