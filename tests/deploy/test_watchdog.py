"""The watchdog: a mute process is killed at the deadline, a slow, dead or starting one is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

from deploy.watchdog import MUTE_AFTER_S, MUTE_AT_START_AFTER_S, STOPPED_AFTER_S, Watchdog


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def mute(url: str) -> int:
    raise httpx.ReadTimeout("no answer")


def refused(url: str) -> int:
    raise httpx.ConnectError("refused")


def test_mute_process_is_killed_at_the_deadline_and_not_before(victim: subprocess.Popen[bytes]) -> None:
    said: list[str] = []
    clock, dog = Clock(), Watchdog(lambda: [("decode-0 leader", victim.pid, "http://x/health")], say=said.append)
    dog.look(lambda url: 200, clock=clock)
    dog.look(mute, clock=clock)
    clock.now += MUTE_AFTER_S - 0.1
    dog.look(mute, clock=clock)
    assert victim.poll() is None and said == []
    clock.now += 0.2
    dog.look(mute, clock=clock)
    assert victim.wait(10) == -signal.SIGKILL
    assert "decode-0 leader" in said[0] and str(victim.pid) in said[0]


def test_process_that_listens_before_it_has_loaded_is_given_time(victim: subprocess.Popen[bytes]) -> None:
    clock, dog = Clock(), Watchdog(lambda: [("router", victim.pid, "http://x/live")], say=lambda text: None)
    dog.look(mute, clock=clock)
    clock.now += 3 * MUTE_AFTER_S
    dog.look(mute, clock=clock)
    assert victim.poll() is None
    clock.now += MUTE_AT_START_AFTER_S
    dog.look(mute, clock=clock)
    assert victim.wait(10) == -signal.SIGKILL


def test_process_that_has_answered_and_lives_on_with_its_port_closed_is_killed(victim: subprocess.Popen[bytes]) -> None:
    said: list[str] = []
    clock, dog = Clock(), Watchdog(lambda: [("router", victim.pid, "http://x/live")], say=said.append)
    dog.look(lambda url: 200, clock=clock)
    clock.now += MUTE_AFTER_S - 0.1
    dog.look(refused, clock=clock)
    assert victim.poll() is None
    clock.now += 0.2
    dog.look(refused, clock=clock)
    assert victim.wait(10) == -signal.SIGKILL
    assert "refused connections" in said[0]


@pytest.mark.parametrize("answer", [lambda url: 503, refused])
def test_process_that_answers_or_never_listened_is_never_killed(victim: subprocess.Popen[bytes], answer) -> None:
    clock, dog = Clock(), Watchdog(lambda: [("leader", victim.pid, "http://x/health")], say=lambda text: None)
    for _ in range(5):
        dog.look(answer, clock=clock)
        clock.now += MUTE_AT_START_AFTER_S + 1
        dog.look(answer, clock=clock)
    dog.look(mute, clock=clock)
    assert victim.poll() is None


def test_process_that_is_stopped_before_it_ever_answered_is_killed_at_the_deadline(
    victim: subprocess.Popen[bytes],
) -> None:
    clock, dog = Clock(), Watchdog(lambda: [("router", victim.pid, "http://x/live")], say=lambda text: None)

    def asked(url: str) -> int:
        pytest.fail("who is stopped is not waited for")

    dog.look(refused, clock=clock)
    victim.send_signal(signal.SIGSTOP)
    while psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED:
        pass
    clock.now += 0.5
    dog.look(asked, clock=clock)
    assert victim.poll() is None
    clock.now += STOPPED_AFTER_S
    dog.look(asked, clock=clock)
    assert victim.wait(10) == -signal.SIGKILL
