"""NixlTransport, UcxxTransport and HostTransport between processes: death, silence and return of the receiver."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_transfer.landing import Endpoint, decode_endpoint
from kv_transfer.plan import Piece, TransferPlan
from kv_transfer.transport import Transfer, TransferError, TransferStatus
from kv_transfer.transports import make_transport
from kv_transfer.warm import warm

from .conftest import PATIENCE_S, Lane, child_environment, lanes, require_lane, require_nixl
from .pool_memory import make_pool

EXIT_S = 60.0
"""For a process that was killed: what it has of a GPU takes time to be taken back."""

POOL_BYTES = 64 << 20
WHOLE_POOL = TransferPlan((Piece("kv", 0, 0, POOL_BYTES),))
ANY_DEATH = re.compile("RemoteDisconnect|ConnectionReset|Connection reset|hung up")


class Receiver:
    """A child process with a pool of zeros, polling."""

    def __init__(self, lane: Lane, name: str, generation: int = 1) -> None:
        script = str(Path(__file__).with_name("receiver.py"))
        words = [lane.transport, lane.memory, name, str(generation), str(POOL_BYTES)]
        self.process = subprocess.Popen(
            [sys.executable, script, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(UCX_TLS=lane.ucx_tls),
        )
        self.is_stopped = False

    def endpoint(self) -> Endpoint:
        assert self.process.stdout is not None
        return decode_endpoint(bytes.fromhex(self.process.stdout.readline()))

    def state(self) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("state\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(EXIT_S)

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture
def receiver(sender: Any) -> Iterator[Callable[..., Receiver]]:
    """Yield what starts a receiver at the other end of the sender's lane."""
    started: list[Receiver] = []

    def start(name: str, generation: int = 1) -> Receiver:
        started.append(Receiver(sender.between, name, generation))
        return started[-1]

    yield start
    for child in started:
        child.close()


ONE_SIDED = [Lane("nixl", "all"), Lane("nixl", "all", "VRAM")]
NEEDS_A_LIVE_RECEIVER = [
    Lane("nixl", "tcp,self"),
    Lane("ucxx", "all"),
    Lane("host", "all"),
    Lane("host", "all", "VRAM"),
]


@pytest.fixture(params=lanes(*ONE_SIDED, *NEEDS_A_LIVE_RECEIVER))
def sender(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a transport with a pool of random bytes; every process of the test uses the same UCX_TLS."""
    lane: Lane = request.param
    require_lane(lane)
    monkeypatch.setenv("UCX_TLS", lane.ucx_tls)
    pool, scratch = make_pool(lane.memory, POOL_BYTES // 4096, 4096), make_pool(lane.memory, 1, 4096)
    words = np.random.default_rng(5).integers(0, 1 << 64, (pool.num_units, pool.num_words), dtype=np.uint64)
    pool.write(range(pool.num_units), words)
    transport = make_transport(lane.transport, f"sender{time.monotonic_ns()}", memory=lane.memory)
    transport.register([pool.address("kv"), scratch.address("scratch")], generation=1, rank=0)
    transport.crc = pool.crc()  # type: ignore[attr-defined]
    transport.between = lane  # type: ignore[attr-defined]
    yield transport
    transport.close()


def await_end(transport: Any, transfer: Transfer, timeout_s: float = PATIENCE_S) -> TransferStatus:
    until = time.monotonic() + timeout_s
    while (status := transport.check(transfer)) is TransferStatus.PENDING and time.monotonic() < until:
        time.sleep(0.0002)
    return status


def await_word(transport: Any, child: Receiver) -> dict[str, Any]:
    """Return the receiver's state once a notification has come."""
    until = time.monotonic() + PATIENCE_S
    while not (state := child.state())["arrived"] and time.monotonic() < until:
        transport.poll()
    return state


def test_a_receiver_dies_and_another_takes_its_name(sender: Any, receiver: Callable[..., Receiver]) -> None:
    decode, successor = receiver("decode"), receiver("decode")
    old, new = decode.endpoint(), successor.endpoint()
    assert old.agent == new.agent

    sender.connect(old)
    assert warm(sender, old.agent).lane in sender.between.expected
    assert await_end(sender, sender.write(old.agent, WHOLE_POOL, b"all")) is TransferStatus.DONE
    assert await_word(sender, decode) == {"crc": sender.crc, "arrived": ["all"]}

    decode.kill()
    lost = sender.write(old.agent, WHOLE_POOL, b"to the dead")
    assert await_end(sender, lost) is TransferStatus.FAILED
    assert old.agent in lost.error and ANY_DEATH.search(lost.error)
    with pytest.raises(TransferError, match=f"{old.agent} is not connected"):
        sender.notify(old.agent, b"are you there?")
    with pytest.raises(TransferError, match="its process is gone"):
        sender.connect(old)

    sender.connect(new)
    assert await_end(sender, sender.write(new.agent, WHOLE_POOL, b"again")) is TransferStatus.DONE
    assert await_word(sender, successor) == {"crc": sender.crc, "arrived": ["again"]}


@pytest.mark.parametrize("sender", lanes(*NEEDS_A_LIVE_RECEIVER), indirect=True)
def test_silence_keeps_a_write_pending_and_death_fails_it(sender: Any, receiver: Callable[..., Receiver]) -> None:
    """Not over cma or cuda_ipc: there a stopped process takes its bytes all the same."""
    decode, other = receiver("decode"), receiver("other")
    endpoint, stranger = decode.endpoint(), other.endpoint()
    agent = endpoint.agent
    sender.connect(endpoint)
    assert warm(sender, agent).lane in sender.between.expected

    decode.stop()
    silent = sender.write(agent, WHOLE_POOL, b"late")
    assert await_end(sender, silent, timeout_s=0.3) is TransferStatus.PENDING
    sender.disconnect(agent)
    with pytest.raises(TransferError, match="not connected"):
        sender.notify(agent, b"x")
    assert await_end(sender, silent, timeout_s=0.1) is TransferStatus.PENDING  # what moves stays visible
    with pytest.raises(TransferError, match="while 1 writes over its previous connection are under way"):
        sender.connect(msgspec.structs.replace(endpoint, metadata=stranger.metadata))
    decode.resume()
    assert await_end(sender, silent) is TransferStatus.DONE
    with pytest.raises(TransferError, match="not connected"):
        sender.write(agent, WHOLE_POOL)

    sender.connect(endpoint)
    assert warm(sender, agent).lane in sender.between.expected
    decode.stop()
    doomed = sender.write(agent, WHOLE_POOL, b"never")
    assert await_end(sender, doomed, timeout_s=0.1) is TransferStatus.PENDING
    decode.kill()
    killed = time.monotonic()
    assert await_end(sender, doomed) is TransferStatus.FAILED
    assert time.monotonic() - killed < 3
    assert ANY_DEATH.search(doomed.error)
    assert sender.check(doomed) is TransferStatus.FAILED


def test_a_stopped_peer_fails_the_warm_up_within_its_time(sender: Any, receiver: Callable[..., Receiver]) -> None:
    child = receiver("decode")
    endpoint = child.endpoint()
    child.stop()
    sender.connect(endpoint)
    with pytest.raises(TransferError, match=r"did not take a first write within 0\.2 s"):
        warm(sender, endpoint.agent, timeout_s=0.2)
    child.kill()
    until = time.monotonic() + PATIENCE_S
    while sender._peers and time.monotonic() < until:
        for peer in list(sender._peers.values()):
            for transfer in list(peer.transfers):
                sender.check(transfer)
    assert not sender._peers


def test_a_broken_connection_between_living_peers_is_made_anew() -> None:
    require_nixl()
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("broken_connection.py"))],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    outcome = json.loads(run.stdout.splitlines()[-1])
    if outcome["lane"] != "cma":
        pytest.skip(f"needs the cma lane, this machine gives {outcome['lane']}")
    assert outcome["outcomes"] == ["done", "failed", "refused", "done"]
    assert outcome["landed"]
