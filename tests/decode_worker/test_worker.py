"""DecodeWorker: from a landing to tokens on the stream; every ending gives back all it held."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from decode_worker.worker import DecodeWorker
from engine import errors
from engine.config import EngineConfig
from engine.plan import Arrived, LeaderMessage, PumpHint, StepPlan, StepResult
from engine.seams import Fault
from kv_transfer.landing import Landing, Notification, encode
from kv_transfer.layout import KVLayout, make_group
from kv_transfer.locality import host_id
from kv_transfer.plan import manifest
from router.protocol import AbortRequest, ReserveRequest, SamplingParams, SequenceOutput

LAYOUT = KVLayout(block_tokens=128, groups=(make_group("csa_kv", "block", [("csa_kv", 2, 32, "fp32", 16)]),))
BLOCKS, SLOTS, GENERATION = 12, 4, 7


class Bench:
    def __init__(self) -> None:
        self.sent: list[LeaderMessage] = []
        self.now = 0.0
        plan = SimpleNamespace(layout=LAYOUT, num_blocks=BLOCKS, num_slots=SLOTS, max_model_len=1000)
        self.worker = DecodeWorker(
            EngineConfig(model="m", role="decode", block_size=128, max_num_seqs=2),
            plan,  # type: ignore[arg-type]
            vocab_size=100,
            eos_token_ids=frozenset({1}),
            generation=GENERATION,
            leader_url="http://decode",
            send=self.sent.append,
            clock=lambda: self.now,
        )
        self.worker.landings.agents = ("decode.0",)

    def reserve(self, name: str, tokens: int = 130, router: str = "", **sampling: object) -> Landing:
        params = SamplingParams(**{"max_tokens": 4, **sampling})  # type: ignore[arg-type]
        return self.worker.reserve(
            ReserveRequest(request_id=name, prompt_token_ids=[5] * tokens, sampling=params, router=router)
        )

    def arrive(
        self, landing: Landing, first_token: int = 42, *, checksum: int | None = None, sent_by: str = ""
    ) -> None:
        word = Notification(
            kind="last",
            key=landing.key,
            generation=landing.generation,
            writer_rank=0,
            writer_generation=1,
            first_token=first_token,
            num_tokens=landing.num_tokens,
            manifest=tuple(replace(g, checksum=checksum) for g in manifest(LAYOUT, landing.num_tokens)),
            sent_at=3.0,
            sent_by=sent_by,
        )
        self.worker.on_rank_message(Arrived(rank=0, agent="prefill.0", notification=encode(word), at=3.5))

    def commit(self, plan: StepPlan, token: int = 42) -> None:
        tokens = [(s.seq, token) for s in plan.steps if s.sample]
        self.worker.commit(plan, StepResult(rank=0, number=plan.number, tokens=tokens))

    def run(self, steps: int, token: int = 42) -> list[SequenceOutput]:
        for _ in range(steps):
            plan = self.worker.schedule()
            if plan is not None:
                self.commit(plan, token)
        return self.worker.take_outputs()

    def is_all_free(self) -> bool:
        stats = self.worker.stats()
        return (stats.free_blocks, stats.free_slots) == (BLOCKS, SLOTS) and self.worker.is_idle


def test_only_what_came_with_checksums_is_compared() -> None:
    bench = Bench()
    plain, checked = bench.reserve("plain"), bench.reserve("checked")
    bench.arrive(plain)
    bench.arrive(checked, checksum=77)
    plan = bench.worker.schedule()
    assert plan is not None
    assert [start.checksums for start in plan.starts] == [[], [{"csa_kv": 77}]]


def test_arrivals_of_this_host_alone_are_timed() -> None:
    bench = Bench()
    bench.arrive(bench.reserve("near"), sent_by=host_id())
    bench.arrive(bench.reserve("far"), sent_by="")
    stats = bench.worker.stats()
    assert (stats.handovers, stats.timed_arrivals, stats.arrival_seconds) == (2, 1, 0.5)


def test_sequence_goes_on_from_the_token_that_prefill_sampled() -> None:
    bench = Bench()
    bench.arrive(bench.reserve("a"), first_token=33)
    plan = bench.worker.schedule()
    assert plan is not None
    [start], [step] = plan.starts, plan.steps
    assert (start.token_ids[-1], start.num_outputs) == (33, 1)
    assert (step.start, step.token_ids, step.sample) == (130, [33], True)


def test_outputs_are_numbered_from_prefills_token_and_end_at_the_limit() -> None:
    bench = Bench()
    bench.arrive(bench.reserve("a"))
    outputs = bench.run(10)
    assert [(o.index, o.finish_reason) for o in outputs] == [(1, None), (2, None), (3, "length")]
    assert bench.is_all_free()


def test_nothing_runs_before_the_cache_is_there() -> None:
    bench = Bench()
    bench.reserve("a")
    assert bench.worker.schedule() is None


def test_batch_takes_waiting_sequences_as_places_become_free() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.arrive(bench.reserve(name))
    ends = [o.request_id for o in bench.run(20) if o.finish_reason]
    assert ends == ["a", "b", "c"]
    assert bench.is_all_free()


def test_abort_under_way_holds_blocks_until_the_step_is_over() -> None:
    bench = Bench()
    bench.arrive(bench.reserve("a"))
    plan = bench.worker.schedule()
    assert plan is not None
    assert bench.worker.abort(AbortRequest(request_id="a")).known
    assert bench.worker.stats().free_blocks < BLOCKS
    bench.commit(plan)
    assert bench.worker.take_outputs() == []
    assert bench.is_all_free()


def two_under_way(bench: Bench, *names: str, **sampling: object) -> tuple[StepPlan, StepPlan]:
    for name in names:
        bench.arrive(bench.reserve(name, **sampling))  # type: ignore[arg-type]
    plans = bench.worker.schedule(), bench.worker.schedule()
    assert plans[0] is not None and plans[1] is not None
    assert {step.seq for step in plans[0].steps} == {step.seq for step in plans[1].steps}
    return plans[0], plans[1]


def test_end_is_told_at_once_and_the_step_under_way_holds_its_blocks_and_says_nothing() -> None:
    bench = Bench()
    first, second = two_under_way(bench, "a")
    bench.commit(first, token=1)
    assert [(o.index, o.token_ids, o.finish_reason) for o in bench.worker.take_outputs()] == [(1, [1], "stop")]
    assert (bench.worker.stats().free_slots, bench.worker.is_idle) == (SLOTS - 1, False)
    assert bench.worker.stats().free_blocks < BLOCKS
    bench.commit(second, token=9)
    assert bench.worker.take_outputs() == []
    assert bench.is_all_free() and bench.worker.stats().wasted_steps == 1


@pytest.mark.parametrize("how", ["abort", "router_lost", "ranks_lost"])
def test_whoever_ends_a_request_its_blocks_are_held_while_two_steps_are_under_way(how: str) -> None:
    bench = Bench()
    first, second = two_under_way(bench, "a")
    match how:
        case "abort":
            bench.worker.abort(AbortRequest(request_id="a"))
        case "router_lost":
            bench.worker.router_lost("")
        case "ranks_lost":
            bench.worker.abort_all("shutting down")
    bench.worker.take_outputs()
    for plan in (first, second):
        assert bench.worker.stats().free_blocks < BLOCKS and not bench.worker.is_idle
        bench.commit(plan)
    assert bench.worker.take_outputs() == []
    assert bench.is_all_free()


def test_failure_is_told_once_although_the_step_ahead_fails_too() -> None:
    bench = Bench()
    for plan in two_under_way(bench, "a"):
        failed = [(plan.steps[0].seq, "NaN in logits")]
        bench.worker.commit(plan, StepResult(rank=0, number=plan.number, failed=failed))
    [output] = bench.worker.take_outputs()
    assert output.error is not None and "NaN in logits" in output.error.message
    assert bench.is_all_free()


def test_sequence_that_a_test_strikes_is_held_exactly_there_and_the_others_go_on() -> None:
    bench = Bench()
    bench.worker.seams.arm(Fault(point="decode_step", request="held", n=2))
    for name in ("held", "free"):
        bench.arrive(bench.reserve(name, max_tokens=30))
    outputs = []
    for _ in range(9):
        plans = [plan for plan in (bench.worker.schedule(), bench.worker.schedule()) if plan is not None]
        for plan in plans:
            bench.commit(plan)
        outputs += bench.worker.take_outputs()
    assert [o.index for o in outputs if o.request_id == "held"] == [1, 2]
    assert len([o for o in outputs if o.request_id == "free"]) > 9
    assert bench.worker.seams.release() == 1
    assert "held" in {o.request_id for o in bench.run(2)}


def test_memory_that_a_test_takes_away_fails_the_step_after_the_one_it_names() -> None:
    bench = Bench()
    bench.worker.seams.arm(Fault(point="decode_step", request="a", n=1, action="exhaust", at=77))
    for name in ("a", "b"):
        bench.arrive(bench.reserve(name, max_tokens=30))
    first = bench.worker.schedule()
    assert first is not None and bench.worker.schedule() is None
    bench.commit(first)
    second, third = bench.worker.schedule(), bench.worker.schedule()
    assert second is not None and third is not None
    assert [(plan.exhaust, len(plan.steps)) for plan in (first, second, third)] == [(0, 2), (77, 2), (0, 2)]


def test_transfer_deadline_is_told_to_the_router() -> None:
    bench = Bench()
    bench.reserve("a")
    bench.now = 601.0
    bench.worker.tick(bench.now)
    [output] = bench.worker.take_outputs()
    assert output.error is not None and output.error.code == "deadline" and "transfer" in output.error.message


def test_failed_step_of_one_sequence_is_its_own_error() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.arrive(bench.reserve(name))
    plan = bench.worker.schedule()
    assert plan is not None
    [first, second] = plan.steps
    result = StepResult(rank=0, number=plan.number, tokens=[(second.seq, 9)], failed=[(first.seq, "NaN in logits")])
    bench.worker.commit(plan, result)
    outputs = {o.request_id: o for o in bench.worker.take_outputs()}
    assert outputs["a"].error is not None and "NaN in logits" in outputs["a"].error.message
    assert outputs["b"].token_ids == [9]


def test_lost_ranks_end_every_request_with_an_error() -> None:
    bench = Bench()
    bench.arrive(bench.reserve("a"))
    bench.reserve("b")
    bench.worker.abort_all("rank 0 ended")
    assert {o.request_id for o in bench.worker.take_outputs() if o.error} == {"a", "b"}


def test_requests_of_a_router_that_is_gone_end_and_those_of_others_go_on() -> None:
    bench = Bench()
    bench.arrive(bench.reserve("running", router="gone"))
    bench.reserve("landing", router="gone")
    bench.arrive(bench.reserve("other", router="here"))
    bench.worker.router_lost("gone")
    assert {o.request_id for o in bench.worker.take_outputs() if o.error} == {"running", "landing"}
    assert bench.worker.stats().open_landings == 0
    assert {o.request_id for o in bench.run(5)} == {"other"}


def test_ranks_are_told_to_listen_while_a_landing_is_held() -> None:
    bench = Bench()
    landing = bench.reserve("a")
    bench.arrive(landing)
    assert [m.open_landings for m in bench.sent if isinstance(m, PumpHint)] == [1, 0]


def test_noise_on_the_transport_is_dropped_and_counted() -> None:
    bench = Bench()
    bench.worker.on_rank_message(Arrived(rank=0, agent="x", notification=b"\xffnoise"))
    assert bench.worker.stats().stale_messages == 1


@pytest.mark.parametrize("tokens", [[], [5] * 1000, [100], [-1]])
def test_prompt_out_of_range_is_refused(tokens: list[int]) -> None:
    bench = Bench()
    with pytest.raises(errors.InvalidRequest, match="prompt_token_ids"):
        bench.worker.reserve(
            ReserveRequest(request_id="a", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=2))
        )
    assert bench.is_all_free()
