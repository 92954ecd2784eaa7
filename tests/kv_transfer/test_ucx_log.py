"""Reading the lane out of UCX's tables, and leaving the user's own settings alone."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_transfer.ucx_log import UcxLog, WriteTable, parse_tables

from .conftest import require_nixl

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "[1795967687.861417] [host:4516 :0]   "


def table(title: str, operation: str, *ranges: tuple[str, str, str]) -> list[str]:
    rows = [f"| {title} |", f"| {operation} |", "+---+---+---+", "| Range | Description | Config |"]
    rows += [f"| {span:>10} | {description:<12} | {config:<34} |" for span, description, config in ranges]
    return [PREFIX + row for row in rows]


WRITE = "remote memory write by ucp_put* from host memory to host"


@pytest.mark.parametrize(
    ("config", "lane"),
    [
        ("cma/memory", "cma"),
        ("52% on tcp/lo and 48% on tcp/eth0", "tcp"),
        ("rc_mlx5/mlx5_0:1/path0", "rc_mlx5"),
        ("60% on rc_mlx5/mlx5_0:1 and 40% on cuda_ipc/cuda", "rc_mlx5+cuda_ipc"),
        ("something else", "unknown"),
    ],
)
def test_the_lane_is_the_transport_of_the_unbounded_range(config: str, lane: str) -> None:
    lines = table(
        "decode.r0.g1 intra-node cfg#1", WRITE, ("0..8184", "short", "tcp/lo"), ("8185..inf", "zero-copy", config)
    )
    assert list(parse_tables(lines)) == [WriteTable("decode.r0.g1", "intra-node", lane)]


def test_tables_of_other_operations_say_nothing() -> None:
    lines = table(
        "a self cfg#0", "active message by ucp_am_send* from host memory", ("16516..inf", "copy-in", "tcp/lo")
    )
    lines += table("b inter-node cfg#12", WRITE.replace("put*", "put*(multi)"), ("0..inf", "zero-copy", "rc_mlx5/x:1"))
    assert list(parse_tables(lines)) == [WriteTable("b", "inter-node", "rc_mlx5")]


def test_writes_from_a_gpu_have_tables_of_their_own() -> None:
    from_gpu = "remote memory write by ucp_put*(multi) from cuda/GPU0 memory to cuda"
    lines = table("a intra-node cfg#1", from_gpu, ("0..inf", "zero-copy", "cuda_ipc/cuda"))
    lines += table("a intra-node cfg#1", WRITE, ("0..inf", "zero-copy", "tcp/lo"))
    assert [(found.lane, found.is_device) for found in parse_tables(lines)] == [("cuda_ipc", True), ("tcp", False)]


@pytest.mark.parametrize("name", ["UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO"])
def test_log_settings_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "chosen")
    before = dict(os.environ)
    log = UcxLog()
    with log.environment():
        assert dict(os.environ) == before
    assert log.tables("anybody") == []


def test_what_stands_in_the_stream_buffer_is_read_and_the_file_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("kv_transfer.ucx_log._is_ucx_loaded", lambda: False)
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    log = UcxLog()
    with log.environment():
        path = os.environ["UCX_LOG_FILE"]
        stream = ctypes.c_void_p(libc.fopen(path.encode(), b"w"))
    assert "UCX_LOG_FILE" not in os.environ
    expected = []
    for lane in ("cma", "tcp"):
        lines = table("me self cfg#0", WRITE, ("0..inf", "zero-copy", "x/y"))
        lines += table("me intra-node cfg#1", WRITE, ("0..inf", "zero-copy", f"{lane}/z"))
        libc.fputs("".join(line + "\n" for line in lines).encode(), stream)
        expected.append(WriteTable("me", "intra-node", lane))
        assert log.tables("me") == expected
        assert os.stat(path).st_blocks == 0
    libc.fclose(stream)
    os.close(log._fd)


def run_pair(**environment: str) -> subprocess.CompletedProcess[str]:
    """Run a process in which one NIXL agent warms two others; it prints their lanes as JSON on its last line."""
    require_nixl()
    base = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
    return subprocess.run(
        [sys.executable, str(Path(__file__).with_name("lanes.py"))],
        env=base | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


def test_lanes_are_told_and_nothing_reaches_the_terminal_or_children() -> None:
    run = run_pair(UCX_TLS="tcp,self")
    assert run.stderr == ""
    (line,) = run.stdout.splitlines()
    outcome = json.loads(line)
    assert outcome["lanes"] == ["tcp", "tcp"]
    assert outcome["environment"] == {"UCX_TLS": "tcp,self"}
    assert outcome["log_bytes"] < 1 << 16


def test_the_lane_is_unknown_when_the_user_has_taken_the_log(tmp_path: Path) -> None:
    run = run_pair(UCX_LOG_FILE=str(tmp_path / "mine.log"), UCX_PROTO_INFO="y")
    assert json.loads(run.stdout.splitlines()[-1])["lanes"] == ["unknown", "unknown"]
    assert "remote memory write" in (tmp_path / "mine.log").read_text()
