"""Each role started by hand, without Ray: two workers that spawn their ranks, and a router told where they are."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
ORACLE = ROOT / "tests" / "oracle" / "tiny"


@pytest.fixture
def by_hand(oracle_model: Path, tmp_path: Path, free_ports) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Start prefill, decode and router; yield the router's URL and the three processes."""
    prefill, decode, router = free_ports(3)
    model = ["--model", str(oracle_model)]
    exact = ["--dtype", "float32", "--kv-cache-dtype", "fp32", "--max-num-batched-tokens", "64"]
    urls = ["--prefill", f"http://127.0.0.1:{prefill}", "--decode", f"http://127.0.0.1:{decode}"]
    commands = [
        ["prefill_worker", *model, *exact, "--port", str(prefill)],
        ["decode_worker", *model, *exact, "--port", str(decode)],
        ["router", *model, *urls, "--port", str(router)],
    ]
    processes = []
    for command in commands:
        with (tmp_path / f"{command[0]}.log").open("wb") as log:
            processes.append(
                subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        yield f"http://127.0.0.1:{router}", processes
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def await_ready(url: str, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and all(process.poll() is None for process in processes):
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    pytest.fail("the roles did not become ready")


def test_roles_by_hand_give_the_golden_ids_and_end_on_sigterm(by_hand) -> None:
    url, processes = by_hand
    await_ready(url, processes)
    golden = load_file(ORACLE / "golden.safetensors")
    body = {"model": "oracle-tiny", "prompt": golden["prompt_300"].tolist(), "max_tokens": 10, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
    assert json.loads(reply.text)["choices"][0]["token_ids"] == golden["gen_300"].tolist()

    ranks = [child for process in processes for child in psutil.Process(process.pid).children(recursive=True)]
    assert len(ranks) == 2
    for process in reversed(processes):
        process.send_signal(signal.SIGTERM)
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    assert [
        rank for rank in ranks if rank.is_running() and rank.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    ] == []
