"""PrefillWorker: one answer per request, blocks back only when neither a step nor a write can touch them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from engine import errors
from engine.config import EngineConfig
from engine.plan import GUIDE_FAILED, CancelPush, LeaderMessage, PushDone, PushPlan, StepPlan, StepResult
from engine.seams import Fault
from kv_transfer.landing import Landing, encode
from kv_transfer.layout import KVLayout, make_group
from prefill_worker.worker import PrefillWorker
from router.protocol import AbortRequest, PrefillBranch, PrefillRequest, PrefillResult, SamplingParams

LAYOUT = KVLayout(block_tokens=128, groups=(make_group("csa_kv", "block", [("csa_kv", 2, 32, "fp32", 16)]),))
BLOCKS, SLOTS = 12, 4


class Bench:
    """A worker, the messages it sent, the answers it gave, and a clock that stands still."""

    def __init__(self, *, ranks: int = 1, chunk: int = 200) -> None:
        self.sent: list[LeaderMessage] = []
        self.answers: dict[str, PrefillResult | errors.RequestError] = {}
        self.told_over_http: list[int] = []
        self.now = 0.0
        config = EngineConfig(
            model="m", role="prefill", block_size=128, max_num_batched_tokens=chunk, max_num_seqs=2, ranks=ranks
        )
        plan = SimpleNamespace(layout=LAYOUT, num_blocks=BLOCKS, num_slots=SLOTS, max_model_len=1000)
        self.worker = PrefillWorker(
            config,
            plan,  # type: ignore[arg-type]
            vocab_size=100,
            eos_token_ids=frozenset({1}),
            send=self.sent.append,
            say_drained=lambda landing: self.told_over_http.append(landing.key),
            clock=lambda: self.now,
        )
        self._keys = itertools.count(1)
        self._branches: dict[int, list[int]] = {}

    def landing(self, name: str, tokens: int) -> Landing:
        return Landing(
            request_id=name,
            key=next(self._keys),
            generation=7,
            num_tokens=tokens,
            block_ids=tuple(range(-(-tokens // 128))),
            slot=0,
            layout=LAYOUT.fingerprint(),
            agents=("decode.0",),
            leader_url="http://decode",
        )

    def accept(
        self,
        name: str,
        tokens: int = 300,
        *,
        landing: bool = True,
        branches: Sequence[tuple[str, Landing | None]] = (),
        **sampling: object,
    ) -> Landing | None:
        where = self.landing(name, tokens) if landing else None
        request = PrefillRequest(
            request_id=name,
            prompt_token_ids=[5] * tokens,
            sampling=SamplingParams(**{"max_tokens": 8, **sampling}),  # type: ignore[arg-type]
            landing=encode(where) if where else None,
            branches=[
                PrefillBranch(request_id=branch, seed=100 + n, landing=encode(there) if there else None)
                for n, (branch, there) in enumerate(branches)
            ],
        )

        def on_result(result: PrefillResult | errors.RequestError) -> None:
            assert name not in self.answers, "answered twice"
            self.answers[name] = result

        self.worker.accept(request, on_result)
        return where

    def step(self, token: int = 42, **branch_tokens: int) -> StepPlan | None:
        plan = self.worker.schedule()
        if plan is not None:
            self.commit(plan, token, *branch_tokens.values())
        return plan

    def commit(self, plan: StepPlan, token: int = 42, *branch_tokens: int) -> None:
        for start in plan.starts:
            self._branches[start.seq] = [branch.seq for branch in start.branches]
        tokens = [(s.seq, token) for s in plan.steps if s.sample]
        for seq, _ in list(tokens):
            tokens += zip(self._branches[seq], branch_tokens, strict=True)
        self.worker.commit(plan, StepResult(rank=0, number=plan.number, tokens=tokens))

    def done(self, landing: Landing | None, status: str, *, rank: int = 0, is_last: bool = False) -> None:
        assert landing is not None
        self.worker.on_rank_message(
            PushDone(rank=rank, key=landing.key, generation=7, status=status, is_last=is_last, error="lane broke")  # type: ignore[arg-type]
        )

    def pushes(self) -> list[tuple[int, int, bool]]:
        return [(m.first, m.last, m.is_last) for m in self.sent if isinstance(m, PushPlan)]

    def cancels(self) -> int:
        return sum(isinstance(m, CancelPush) for m in self.sent)

    def is_all_free(self) -> bool:
        stats = self.worker.stats()
        return (stats.free_blocks, stats.free_slots) == (BLOCKS, SLOTS) and self.worker.is_idle


def test_full_blocks_go_as_they_are_computed_and_the_rest_with_the_first_token() -> None:
    bench = Bench()
    landing = bench.accept("a", 300)
    bench.step()
    assert bench.pushes() == [(0, 1, False)]
    bench.step()
    assert bench.pushes() == [(0, 1, False), (1, 3, True)]
    answer = bench.answers["a"]
    assert isinstance(answer, PrefillResult) and (answer.token_id, answer.finish_reason) == (42, None)
    assert not bench.is_all_free()
    bench.done(landing, "done")
    bench.done(landing, "done", is_last=True)
    assert bench.is_all_free()


def test_blocks_stay_held_until_every_rank_has_written() -> None:
    bench = Bench(ranks=2)
    landing = bench.accept("a", 10)
    bench.step()
    bench.done(landing, "done", rank=1, is_last=True)
    assert not bench.is_all_free()
    bench.done(landing, "done", rank=0, is_last=True)
    assert bench.is_all_free()


def test_first_token_that_ends_the_request_hands_nothing_over() -> None:
    bench = Bench()
    bench.accept("a", 10)
    bench.step(token=1)
    answer = bench.answers["a"]
    assert isinstance(answer, PrefillResult)
    assert (answer.finish_reason, answer.handed_over) == ("stop", False)
    assert bench.pushes() == [] and bench.is_all_free()


def test_first_token_that_ends_a_request_already_being_pushed_waits_for_drained() -> None:
    bench = Bench()
    landing = bench.accept("a", 300)
    bench.step()
    bench.step(token=1)
    answer = bench.answers["a"]
    assert isinstance(answer, PrefillResult) and answer.handed_over
    assert bench.cancels() == 1 and not bench.is_all_free()
    bench.done(landing, "drained")
    assert bench.is_all_free()


def test_single_token_needs_no_landing() -> None:
    bench = Bench()
    bench.accept("a", 10, landing=False, max_tokens=1)
    bench.step()
    answer = bench.answers["a"]
    assert isinstance(answer, PrefillResult)
    assert (answer.finish_reason, answer.handed_over) == ("length", False)
    assert bench.is_all_free()


def test_third_waiting_prompt_is_refused_and_nothing_is_held_for_it() -> None:
    bench = Bench()
    bench.accept("a", 200)
    bench.accept("b", 10)
    free = bench.worker.stats().free_blocks
    with pytest.raises(errors.NoCapacity, match="2 prompts of 210 tokens are waiting"):
        bench.accept("c", 100)
    assert bench.worker.stats().free_blocks == free


def test_any_number_may_wait_that_fits_into_one_chunk() -> None:
    bench = Bench()
    for name in "abcd":
        bench.accept(name, 20)
    assert bench.worker.stats().num_waiting == 4


def test_abort_before_any_write_is_drained_at_once() -> None:
    bench = Bench()
    bench.accept("a", 300)
    reply = bench.worker.abort(AbortRequest(request_id="a"))
    assert (reply.known, reply.drained) == (True, True)
    assert isinstance(bench.answers["a"], errors.Aborted) and bench.is_all_free()


def test_abort_while_writing_is_drained_when_the_rank_says_so() -> None:
    bench = Bench()
    landing = bench.accept("a", 300)
    bench.step()
    reply = bench.worker.abort(AbortRequest(request_id="a"))
    assert (reply.known, reply.drained) == (True, False)
    assert bench.cancels() == 1
    assert bench.worker.stats().held_blocks == 3, "they are what is being written"
    bench.done(landing, "drained")
    assert bench.is_all_free()


@pytest.mark.parametrize("drained_first", [True, False])
def test_abort_while_computing_and_writing_waits_for_both(drained_first: bool) -> None:
    bench = Bench()
    landing = bench.accept("a", 600)
    bench.step()
    plan = bench.worker.schedule()
    assert plan is not None
    bench.worker.abort(AbortRequest(request_id="a"))
    if drained_first:
        bench.done(landing, "drained")
        assert not bench.is_all_free()
        bench.commit(plan)
    else:
        bench.commit(plan)
        assert not bench.is_all_free()
        bench.done(landing, "drained")
    assert bench.is_all_free()


def test_abort_after_the_answer_cancels_the_last_write() -> None:
    bench = Bench()
    landing = bench.accept("a", 10)
    bench.step()
    reply = bench.worker.abort(AbortRequest(request_id="a"))
    assert (reply.known, reply.drained) == (False, False)
    assert bench.cancels() == 1
    bench.done(landing, "drained")
    assert bench.is_all_free()


def test_prefill_that_arrives_after_its_abort_is_refused() -> None:
    bench = Bench()
    reply = bench.worker.abort(AbortRequest(request_id="a"))
    assert (reply.known, reply.drained) == (False, True)
    with pytest.raises(errors.Aborted):
        bench.accept("a", 10)
    assert bench.is_all_free()


def test_failed_write_ends_the_request_and_blocks_wait_for_drained() -> None:
    bench = Bench()
    landing = bench.accept("a", 600)
    bench.step()
    bench.done(landing, "failed")
    answer = bench.answers["a"]
    assert isinstance(answer, errors.TransferFailed) and "lane broke" in str(answer)
    assert not bench.is_all_free()
    bench.done(landing, "undelivered")
    assert bench.told_over_http == [landing.key if landing else 0]
    assert bench.is_all_free()


def test_deadline_names_the_phase() -> None:
    bench = Bench()
    bench.accept("a", 600)
    bench.now = 601.0
    bench.worker.tick(bench.now)
    assert isinstance(bench.answers["a"], errors.DeadlineExceeded)
    assert "prefill of 600 tokens" in str(bench.answers["a"]) and bench.is_all_free()


def test_failed_computation_is_answered_with_its_reason() -> None:
    bench = Bench()
    bench.accept("a", 10)
    plan = bench.worker.schedule()
    assert plan is not None
    bench.worker.commit(plan, StepResult(rank=0, number=plan.number, failed=[(plan.steps[0].seq, "NaN in logits")]))
    assert "NaN in logits" in str(bench.answers["a"])
    assert bench.is_all_free()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_tokens": 299}, "landing is for 299 tokens"),
        ({"block_ids": (0, 1)}, "in 2 blocks"),
    ],
)
def test_landing_that_does_not_fit_the_prompt_is_refused(changes: dict[str, object], text: str) -> None:
    bench = Bench()
    landing = Landing(
        **{  # type: ignore[arg-type]
            **dict(
                request_id="a",
                key=1,
                generation=7,
                num_tokens=300,
                block_ids=(0, 1, 2),
                slot=0,
                layout=LAYOUT.fingerprint(),
                agents=("decode.0",),
                leader_url="",
            ),
            **changes,
        }
    )
    request = PrefillRequest(
        request_id="a", prompt_token_ids=[5] * 300, sampling=SamplingParams(max_tokens=2), landing=encode(landing)
    )
    with pytest.raises(errors.InvalidRequest, match=text):
        bench.worker.accept(request, lambda _: None)
    assert bench.is_all_free()


def test_random_traffic_answers_every_request_once_and_returns_everything() -> None:
    rng, bench = random.Random(11), Bench(chunk=150)
    writing: dict[int, Landing] = {}
    names = [f"r{i}" for i in range(400)]
    asked: list[str] = []
    for name in names:
        for _ in range(rng.randrange(1, 4)):
            plan = bench.worker.schedule()
            if asked and rng.random() < 0.15:
                bench.worker.abort(AbortRequest(request_id=rng.choice(asked[-4:])))
            if plan is not None:
                bench.commit(plan, token=1 if rng.random() < 0.2 else 42)
            for message in bench.sent:
                if isinstance(message, PushPlan):
                    writing[message.landing.key] = message.landing
                    if message.is_last and rng.random() < 0.7:
                        bench.done(message.landing, "done", is_last=True)
                        writing.pop(message.landing.key)
                elif isinstance(message, CancelPush) and message.landing.key in writing:
                    bench.done(writing.pop(message.landing.key), "drained")
            bench.sent.clear()
            if writing and rng.random() < 0.5:
                landing = writing.pop(rng.choice(list(writing)))
                bench.done(landing, "failed")
                bench.done(landing, "drained")
        try:
            bench.accept(name, rng.randrange(1, 700))
            asked.append(name)
        except errors.NoCapacity:
            pass
    for _ in range(50):
        bench.step()
    for message in bench.sent:
        if isinstance(message, PushPlan):
            writing[message.landing.key] = message.landing
    for landing in writing.values():
        bench.done(landing, "failed")
        bench.done(landing, "drained")
    assert set(bench.answers) == set(asked)
    assert bench.is_all_free()


def test_pushes_behind_one_that_a_test_holds_wait_too_and_go_in_order() -> None:
    bench = Bench()
    bench.worker.seams.arm(Fault(point="kv_mid", request="a", n=2))
    bench.accept("a", tokens=700)
    while "a" not in bench.answers:
        bench.step()
    assert bench.pushes() == [(0, 1, False)]
    bench.worker.seams.release()
    pushes = bench.pushes()
    assert [first for first, _, _ in pushes[1:]] == [last for _, last, _ in pushes[:-1]]
    assert pushes[-1] == (4, 6, True)


def test_pushes_held_by_a_test_are_never_sent_once_the_request_is_aborted() -> None:
    bench = Bench()
    bench.worker.seams.arm(Fault(point="kv_mid", request="a", n=2))
    bench.accept("a", tokens=700)
    while "a" not in bench.answers:
        bench.step()
    bench.worker.abort(AbortRequest(request_id="a"))
    bench.worker.seams.release()
    assert bench.pushes() == [(0, 1, False)]


# ---------------------------------------------------------------- several answers to one prompt


def branched(tokens: int = 300, **options: object) -> tuple[Bench, list[Landing]]:
    """A bench with one prompt and three answers, "a", "b" and "c"."""
    bench = Bench()
    there = [bench.landing(name, tokens) for name in "bc"]
    first = bench.accept("a", tokens, branches=list(zip("bc", there, strict=True)), **options)
    assert first is not None
    return bench, [first, *there]


def pushed_to(bench: Bench, landing: Landing) -> list[tuple[int, int, bool, int]]:
    plans = [m for m in bench.sent if isinstance(m, PushPlan) and m.landing.key == landing.key]
    return [(m.first, m.last, m.is_last, m.first_token) for m in plans]


def test_one_prompt_gives_each_of_its_answers_a_token_and_a_whole_cache() -> None:
    bench, landings = branched()
    start = bench.step()
    assert start is not None
    assert [branch.sampling.seed for branch in start.starts[0].branches] == [100, 101]
    bench.step(42, b=43, c=44)
    assert bench.worker.stats().prompt_tokens == 300
    result = bench.answers["a"]
    assert isinstance(result, PrefillResult)
    told = [(one.request_id, one.token_id, one.finish_reason) for one in (result, *result.branches)]
    assert told == [("a", 42, None), ("b", 43, None), ("c", 44, None)]
    for landing, token in zip(landings, (42, 43, 44), strict=True):
        assert pushed_to(bench, landing) == [(0, 1, False, -1), (1, 3, True, token)]
    for landing in landings:
        assert not bench.is_all_free()
        bench.done(landing, "done", is_last=True)
    assert bench.is_all_free()


def test_answer_that_ends_with_its_first_token_hands_nothing_over_and_its_siblings_go_on() -> None:
    bench, landings = branched(10)
    bench.step(42, b=1, c=44)
    result = bench.answers["a"]
    assert isinstance(result, PrefillResult)
    assert [(one.finish_reason, one.handed_over) for one in (result, *result.branches)] == [
        (None, True),
        ("stop", False),
        (None, True),
    ]
    assert pushed_to(bench, landings[1]) == []
    for landing in (landings[0], landings[2]):
        bench.done(landing, "done", is_last=True)
    assert bench.is_all_free()


@pytest.mark.parametrize("name", ["a", "b"])
def test_aborted_answer_is_not_written_and_its_siblings_are(name: str) -> None:
    bench, landings = branched(300)
    reply = bench.worker.abort(AbortRequest(request_id=name))
    assert (reply.known, reply.drained) == (True, True)
    bench.step()
    bench.step(42, b=43, c=44)
    result = bench.answers["a"]
    assert isinstance(result, PrefillResult)
    reasons = {one.request_id: one.finish_reason for one in (result, *result.branches)}
    assert reasons == {**dict.fromkeys("abc"), name: "abort"}
    aborted = landings["abc".index(name)]
    assert pushed_to(bench, aborted) == []
    for landing in landings:
        if landing is not aborted:
            bench.done(landing, "done", is_last=True)
    assert bench.is_all_free()


def test_answer_aborted_while_it_is_written_gets_no_more_and_its_drained_word() -> None:
    bench, landings = branched(300)
    bench.step()
    reply = bench.worker.abort(AbortRequest(request_id="b"))
    assert (reply.known, reply.drained, bench.cancels()) == (True, False, 1)
    bench.step(42, b=43, c=44)
    assert pushed_to(bench, landings[1]) == [(0, 1, False, -1)]
    for landing in (landings[0], landings[2]):
        bench.done(landing, "done", is_last=True)
    assert not bench.is_all_free()
    bench.done(landings[1], "drained")
    assert bench.is_all_free()


def test_prompt_is_dropped_when_all_of_its_answers_are_aborted() -> None:
    bench, _ = branched(300)
    for name in "bac":
        assert not isinstance(bench.answers.get("a"), errors.Aborted)
        bench.worker.abort(AbortRequest(request_id=name))
    assert isinstance(bench.answers["a"], errors.Aborted)
    assert bench.is_all_free()


def test_branch_that_was_aborted_before_the_prompt_arrived_is_left_out() -> None:
    bench = Bench()
    bench.worker.abort(AbortRequest(request_id="b"))
    there = bench.landing("b", 10)
    first = bench.accept("a", 10, branches=[("b", there)])
    bench.step(42, b=43)
    assert pushed_to(bench, there) == []
    bench.done(first, "done", is_last=True)
    assert bench.is_all_free()


def test_failure_of_one_branch_fails_the_prompt_with_its_reason() -> None:
    bench, _ = branched(10)
    plan = bench.worker.schedule()
    assert plan is not None
    seqs = [plan.starts[0].seq, *(branch.seq for branch in plan.starts[0].branches)]
    result = StepResult(rank=0, number=plan.number, tokens=[(seqs[0], 42), (seqs[2], 44)], failed=[(seqs[1], "no way")])
    bench.worker.commit(plan, result)
    answer = bench.answers["a"]
    assert isinstance(answer, errors.RequestError) and "no way" in str(answer)
    assert bench.is_all_free()


def test_two_answers_with_one_id_are_refused() -> None:
    bench = Bench()
    with pytest.raises(errors.InvalidRequest, match="'a' is here already"):
        bench.accept("a", 10, branches=[("a", bench.landing("a", 10))])
    assert bench.is_all_free()


def test_guide_that_fails_is_the_fault_of_its_request() -> None:
    bench = Bench()
    bench.accept("a", 10)
    plan = bench.worker.schedule()
    assert plan is not None
    reason = f"rank 0: {GUIDE_FAILED}the grammar does not allow token 5"
    bench.worker.commit(plan, StepResult(rank=0, number=plan.number, failed=[(plan.steps[0].seq, reason)]))
    answer = bench.answers["a"]
    assert isinstance(answer, errors.InvalidRequest) and "does not allow token 5" in str(answer)


def test_failed_write_of_an_aborted_answer_does_not_end_its_siblings() -> None:
    bench, landings = branched(300)
    bench.step()
    bench.worker.abort(AbortRequest(request_id="b"))
    bench.done(landings[1], "failed")
    bench.done(landings[1], "drained")
    bench.step(42, b=43, c=44)
    assert isinstance(bench.answers["a"], PrefillResult)
