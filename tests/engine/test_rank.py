"""A rank between its ring and its runner: what is launched while a step is under way, and when it is answered."""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
from collections.abc import Iterator

import msgspec
import pytest

from engine import plan as messages
from engine.config import EngineConfig
from engine.leader import LeaderAddress
from engine.rank import RankProcess
from engine.ring import LeaderEnd, Waiter

PATIENCE_S = 20


@dataclasses.dataclass
class SlowTicket:
    number: int
    has_ended: threading.Event

    @property
    def is_ready(self) -> bool:
        return self.has_ended.is_set()


class SlowRunner:
    """Steps end when the test says so, as those of a device end by themselves."""

    def __init__(self) -> None:
        self.launched: queue.Queue[int] = queue.Queue()
        self.ends = {number: threading.Event() for number in range(1, 9)}

    def launch(self, plan: messages.StepPlan) -> SlowTicket:
        self.launched.put(plan.number)
        return SlowTicket(plan.number, self.ends[plan.number])

    def collect(self, ticket: SlowTicket) -> tuple[list[tuple[int, int]], list[tuple[int, str]], tuple[()]]:
        assert ticket.has_ended.wait(PATIENCE_S)
        return [(1, 50 + ticket.number)], [], ()


class Bench:
    """A rank on a thread of this process; this is its leader."""

    def __init__(self, folder, monkeypatch) -> None:
        self.end, self.runner = LeaderEnd(1), SlowRunner()
        self._waiter, self._results = Waiter(self.end.bell), list[messages.StepResult]()
        address = LeaderAddress(url="", pid=os.getpid(), generation=1, rings=self.end.address)
        (folder / "leader.json").write_bytes(msgspec.json.encode(address))
        monkeypatch.setattr(RankProcess, "_beat", lambda process: None)
        monkeypatch.setattr(RankProcess, "_load", lambda process: setattr(process, "_runner", self.runner))
        self.thread = threading.Thread(target=RankProcess(EngineConfig(model="m", role="decode"), folder, 0).run)
        self.thread.start()

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.end.channels[0].send(messages.encode(messages.StepPlan(number=number)))

    def launched(self) -> int:
        return self.runner.launched.get(timeout=PATIENCE_S)

    def answer(self) -> messages.StepResult:
        while not self._results:
            self._waiter.wait(PATIENCE_S)
            for data in self.end.channels[0].receive():
                message = messages.decode_rank_message(data)
                assert isinstance(message, messages.StepResult)
                self._results.append(message)
        return self._results.pop(0)

    def close(self) -> None:
        for event in self.runner.ends.values():
            event.set()
        self.end.channels[0].send(messages.encode(messages.Shutdown()))
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def bench(tmp_path, monkeypatch) -> Iterator[Bench]:
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.close()


def test_next_step_is_launched_while_one_is_under_way_even_if_it_comes_late(bench) -> None:
    bench.send(1)
    assert bench.launched() == 1
    bench.send(2)
    assert bench.launched() == 2


def test_third_step_waits_until_the_first_is_answered(bench) -> None:
    bench.send(1, 2, 3)
    assert (bench.launched(), bench.launched()) == (1, 2)
    bench.runner.ends[1].set()
    assert (bench.answer().number, bench.launched()) == (1, 3)


def test_answers_come_in_order_whichever_step_is_seen_to_end_first(bench) -> None:
    bench.send(1, 2)
    bench.runner.ends[2].set()
    bench.runner.ends[1].set()
    answers = [bench.answer(), bench.answer()]
    assert [(answer.number, answer.tokens) for answer in answers] == [(1, [(1, 51)]), (2, [(1, 52)])]


def test_step_alone_is_answered_when_it_ends_without_another_word_from_the_leader(bench) -> None:
    bench.send(1)
    assert bench.launched() == 1
    bench.runner.ends[1].set()
    assert bench.answer().number == 1
