"""Profiles of a running worker: one at a time, answered to whoever asked, given up when too few steps run."""

import asyncio
import concurrent.futures

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from engine.plan import Profile, Profiled, SequenceStart, SequenceStep, StepPlan
from engine.profiles import ProfileError, Profiles, profile_route
from engine.step_profiler import RankProfile
from router.protocol import SamplingParams


class Loop:
    """An engine loop whose calls run at once. `answer`: what its rank says to a profile."""

    def __init__(self, answer=None):
        self.sent = []
        self.profiles = Profiles(self._send)
        self._answer = answer

    def _send(self, message):
        self.sent.append(message)
        if self._answer is not None and message.steps:
            asyncio.get_running_loop().call_soon(self.profiles.on_profiled, self._answer(message))

    def call(self, function):
        future = concurrent.futures.Future()
        try:
            future.set_result(function(self))
        except Exception as error:
            future.set_exception(error)
        return future


def post(loop, body):
    async def send():
        transport = httpx.ASGITransport(app=Starlette(routes=[profile_route(loop)]))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            return await client.post("/profile", json=body)

    return asyncio.run(send())


def test_a_second_profile_is_refused_while_one_is_under_way():
    profiles = Loop().profiles
    profiles.start(5)
    with pytest.raises(ProfileError, match="under way"):
        profiles.start(5)


def test_an_answer_to_a_profile_that_was_given_up_is_nobodys():
    loop = Loop()
    first = loop.profiles.start(5)
    loop.profiles.give_up("too long", of=first)
    second = loop.profiles.start(6)
    loop.profiles.on_profiled(Profiled(rank=0, number=1, report=b"old"))
    loop.profiles.give_up("of the first, too late", of=first)
    loop.profiles.on_profiled(Profiled(rank=0, number=2, report=b"new"))
    assert second.result() == b"new"
    assert [(message.number, message.steps) for message in loop.sent] == [(1, 5), (1, 0), (2, 6)]


def test_the_report_of_the_rank_is_the_answer():
    response = post(Loop(lambda asked: Profiled(rank=0, number=asked.number, report=b'{"bill": 1}')), {"steps": 3})
    assert (response.status_code, response.json()) == (200, {"bill": 1})


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"steps": 0}, 400, "steps"),
        ({"step": 1}, 400, "step"),
        ({"steps": 3, "timeout_s": 0.01}, 504, "fewer than 3 steps in 0.01 s"),
    ],
)
def test_what_is_wrong_and_what_never_comes_is_said(body, status, text):
    response = post(Loop(), body)
    assert response.status_code == status
    assert text in response.text


def test_what_the_rank_could_not_do_is_said():
    response = post(Loop(lambda asked: Profiled(rank=0, number=asked.number, error="no kernels")), {})
    assert (response.status_code, response.text) == (504, "/profile: no kernels")


def test_a_rank_bills_the_steps_from_the_next_one_on_until_there_have_been_enough(oracle, harness, tmp_path):
    runner = harness.make_runner(oracle.folder("tiny"), role="decode")
    sampling = SamplingParams(max_tokens=99)
    starts = [SequenceStart(seq=n, slot=n, block_ids=[n], sampling=sampling) for n in (1, 2)]
    profile = RankProfile(runner, Profile(number=7, steps=2), tmp_path / "trace.json")

    def step(number, **more):
        steps = [
            SequenceStep(seq=n, start=10 * n + number, token_ids=[5], new_block_ids=[], sample=True) for n in (1, 2)
        ]
        plan = StepPlan(number=number, **{"steps": steps} | more)
        profile.on_plan(plan)
        runner.run(plan)
        return profile.on_result(number)

    runner.run(StepPlan(number=1, starts=starts))
    assert profile.on_result(1) is None  # launched before the profile was asked for
    assert step(2, steps=[]) is None
    assert step(3) is None
    assert step(4) is None
    done = step(5)
    assert (done.number, done.error) == (7, "")
    report = msgspec.json.decode(done.report)
    assert (report["batch"], report["context"], report["bill"]["steps"]) == (2, 20, 3)
    assert "aten::mm" in [line["part"] for line in report["bill"]["lines"]]
    assert report["trace"] == str(tmp_path / "trace.json")


def test_a_rank_without_steps_says_so(tmp_path):
    assert "no step has run" in RankProfile(None, Profile(number=1, steps=2), tmp_path / "trace.json").finish().error
