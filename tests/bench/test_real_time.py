"""The benchmark as a command, in real time, against servers in processes of their own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SERVER = Path(__file__).parent / "scripted_server.py"


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server whose step takes 4 + 3.1 N ms and its prompts 50 ms each."""
    command = [sys.executable, str(SERVER), "--a-ms", "4", "--b-ms", "3.1", "--prefill-ms", "50"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", "bench", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The benchmark running, killed at the end if it is still there; a suite in the background has SIGINT ignored."""
    client = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with client:
        try:
            yield client
        finally:
            client.kill()


def test_tenth_of_the_scale_in_real_time(server: tuple[subprocess.Popen[str], str], tmp_path: Path) -> None:
    """Law within 3 %, steady throughput within 2 % while the average is off by more than 10 %, at small cost."""
    words = ["--concurrency", "1,4,8", "--requests", "8", "--input-len", "8", "--output-len", "40", "--warmup", "0"]
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    result = bench("serve", "--url", server[1], *words, *files)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads((tmp_path / "a.json").read_text())
    law = report["step_law"]
    assert law["a_ms"] == pytest.approx(4.0, rel=0.03) and law["b_ms"] == pytest.approx(3.1, rel=0.03)
    for run in report["runs"]:
        truth = run["concurrency"] / (4 + 3.1 * run["concurrency"]) * 1000
        assert run["steady"]["output_tokens_per_s"] == pytest.approx(truth, rel=0.02)
        assert run["average"]["output_tokens_per_s"] < 0.9 * truth
        assert run["client"]["tokens_per_core_s"] > 2_000
    assert "step law: " in result.stdout and (tmp_path / "a.html").read_text().startswith("<!doctype html>")


def test_killed_process_is_a_failed_line_and_exit_code_1(
    server: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "deploy.cli", "bench", "serve", "--url", server[1], "--concurrency", "4,2"]
    command += ["--input-len", "8", "--output-len", "100000", "--warmup", "0", "--json", str(tmp_path / "a.json")]
    with started(command) as client:
        assert client.stderr is not None and client.stdout is not None
        # a request of the probe and four streams are at the server once it has been asked often enough
        assert server[0].stdout is not None
        for line in server[0].stdout:
            if line.startswith("batch of 4"):
                break
        server[0].send_signal(signal.SIGKILL)
        table = client.stdout.read()
        assert client.wait(60) == 1
    assert "C=4 FAILED" in table and "C=2 FAILED" in table
    killed, after = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert killed["failed"] >= 4 and "the server closed the connection" in killed["failure"]
    assert after["completed"] == 0 and "does not answer" in after["failure"]


def test_stopped_by_ctrl_c_it_still_writes_its_report(
    server: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "deploy.cli", "bench", "serve", "--url", server[1], "--concurrency", "4"]
    command += ["--input-len", "8", "--output-len", "100000", "--warmup", "0", "--json", str(tmp_path / "a.json")]
    with started(command) as client:
        assert client.stdout is not None and server[0].stdout is not None
        for line in server[0].stdout:
            if line.startswith("batch of 4"):
                break
        client.send_signal(signal.SIGINT)
        table = client.stdout.read()
        assert client.wait(60) == 130
    assert "4 cancelled" in table and "stopped by hand" in table
    (run,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert run["cancelled"] == 4 and run["tokens"]["output"] > 0


def test_no_server_is_a_failed_line_and_exit_code_1() -> None:
    result = bench("serve", "--url", "http://127.0.0.1:9", "--concurrency", "1", "--quiet")
    assert result.returncode == 1
    assert "C=1 FAILED" in result.stdout and "can't connect" in result.stdout


def test_help_teaches_the_words_of_the_table() -> None:
    result = bench("serve", "--help")
    assert result.returncode == 0
    for word in ("steady", "sustained", "average", "TTFT", "step law", "examples", "exit code is 1"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--concurrency", "0"], "whole number of at least 1"),
        (["--input-len", "9-3"], "upper bound is below"),
        (["--rate", "1", "--concurrency", "1"], "give one of them"),
        (["--api", "chat", "--prompts", "ids"], "chat takes text only"),
        (["--slo", "speed=1"], "ttft, tpot, itl, latency"),
        (["--trace", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what_is_wanted(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.serve import main

    try:
        code: Any = main(words)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert complaint in capsys.readouterr().err
