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


def await_live(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            assert httpx.get(f"http://127.0.0.1:{port}/live", trust_env=False).status_code == 200
            return
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


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
        await_live(port)
        process.send_signal(number)
        _, error = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, error.decode()
    assert b"Traceback" not in error


def test_control_socket_is_this_users_alone_and_replaces_what_a_killed_router_left(tmp_path):
    path = tmp_path / "router.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "router", *flags(tmp_path, port), "--control-socket", str(path)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    try:
        await_live(port)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            workers = client.get("http://router/workers").json()
        assert [worker["url"] for worker in workers] == ["http://127.0.0.1:9", "http://127.0.0.1:10"]
        assert path.stat().st_mode & 0o777 == 0o600
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_control_socket_with_too_long_a_path_is_refused(tmp_path, capsys):
    assert main([*flags(tmp_path, 0), "--control-socket", str(tmp_path / ("x" * 200))]) == 1
    assert "107 bytes" in capsys.readouterr().err


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
