"""The process: starts, says when its port is taken, leaves cleanly on a signal; imports nothing heavy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from router.__main__ import _listen, main

REPOSITORY = Path(__file__).parents[2]


def flags(tmp_path, port: int) -> list[str]:
    workers = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:10"]
    return ["--model", str(tmp_path), "--port", str(port), *workers]


def test_a_taken_port_is_said(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(flags(tmp_path, port)) == 1
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error
    assert "--port" in error


def test_connections_send_small_writes_at_once():
    """asyncio switches Nagle's algorithm off only for sockets that name their protocol."""
    with _listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_status_zero_and_no_traceback(tmp_path, number):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "router", *flags(tmp_path, port)],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                assert httpx.get(f"http://127.0.0.1:{port}/live", trust_env=False).status_code == 200
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        process.send_signal(number)
        _, error = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, error.decode()
    assert b"Traceback" not in error


def test_threads_that_work_for_nobody_any_more_do_not_hold_up_the_end(tmp_path):
    """A thread that will run for a minute, as one does that encodes a huge text."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code = (
        "import os, signal, sys, threading, time\n"
        "from router.__main__ import main\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        f"main({flags(tmp_path, port)!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_the_router_imports_no_torch_and_nothing_of_ours():
    code = (
        "import sys, router.__main__\n"
        "heavy = {'torch', 'ray', 'transformers', 'engine', 'kernels', 'kv_transfer', 'deploy'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
