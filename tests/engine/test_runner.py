"""ModelRunner: the order inside a plan, what a failing sequence does, and the test seam."""

import pytest
import torch

from engine.batch import PlanError
from engine.plan import PREVIOUS, SequenceBranch, SequenceStart, SequenceStep, StepPlan
from router.protocol import SamplingParams

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


@pytest.fixture
def runner(make_pair):
    runner = make_pair("tiny").prefill.runner
    runner.cache.poison()
    runner.on_logits = None
    yield runner
    for seq in list(runner.sequences._running):
        runner.sequences.end(seq)


def start(seq, slot=0, blocks=(0,), sampling=GREEDY, **options):
    return SequenceStart(seq=seq, slot=slot, block_ids=list(blocks), sampling=sampling, **options)


def step(seq, begin, tokens, *, sample=True):
    return SequenceStep(seq=seq, start=begin, token_ids=list(tokens), new_block_ids=[], sample=sample)


def test_golden_first_token_comes_out_of_one_plan(runner, oracle):
    golden = oracle.golden("tiny")
    prompt = golden["prompt_64"].tolist()
    tokens, failed, _ = runner.run(StepPlan(number=1, starts=[start(1)], steps=[step(1, 0, prompt)]))
    assert tokens == [(1, int(golden["gen_64"][0]))]
    assert failed == []


def test_ends_make_room_for_starts_of_the_same_plan(runner):
    runner.run(StepPlan(number=1, starts=[start(1)], steps=[step(1, 0, [5, 6])]))
    again = StepPlan(number=2, ends=[1], starts=[start(1)], steps=[step(1, 0, [5, 6])])
    assert runner.run(again)[0]


def test_a_plan_without_steps_changes_who_runs_only(runner):
    assert runner.run(StepPlan(number=1, starts=[start(3)])) == ([], [], ())
    assert len(runner.sequences) == 1
    assert runner.run(StepPlan(number=2, ends=[3])) == ([], [], ())


def test_only_sequences_that_sample_get_tokens(runner):
    plan = StepPlan(
        number=1,
        starts=[start(1), start(2, slot=1, blocks=(1,))],
        steps=[step(1, 0, [5, 6, 7], sample=False), step(2, 0, [8])],
    )
    tokens, *_ = runner.run(plan)
    assert [seq for seq, _ in tokens] == [2]


def test_branches_sample_what_sequences_of_their_own_would(runner):
    seeds, prompt = (11, 12, 13), [5, 6, 7, 8]
    samplings = [SamplingParams(max_tokens=9, temperature=1.5, seed=seed, num_logprobs=2) for seed in seeds]
    alone = []
    for n, sampling in enumerate(samplings):
        starts = [start(90 + n, sampling=sampling, token_ids=prompt)]
        alone.append(runner.run(StepPlan(number=n, starts=starts, steps=[step(90 + n, 0, prompt)])))
        runner.sequences.end(90 + n)
    branches = [SequenceBranch(seq=2 + n, sampling=sampling) for n, sampling in enumerate(samplings[1:])]
    starts = [start(1, sampling=samplings[0], token_ids=prompt, branches=branches), start(7, slot=1, blocks=(1,))]
    together = runner.run(StepPlan(number=9, starts=starts, steps=[step(1, 0, prompt), step(7, 0, [9])]))
    assert [token for seq, token in together.tokens if seq != 7] == [outcome.tokens[0][1] for outcome in alone]
    assert len({token for _, token in together.tokens}) > 1, "the seeds must make a difference"
    assert [seq for seq, _ in together.tokens] == [1, 2, 3, 7]
    assert [seq for seq, _ in together.logprobs] == [1, 2, 3]
    for (_, ours), outcome in zip(together.logprobs, alone, strict=True):
        assert ours.logprob == pytest.approx(outcome.logprobs[0][1].logprob, abs=1e-4)


def test_on_logits_sees_the_last_position_and_the_row_that_was_sampled(runner):
    seen = []
    runner.on_logits = lambda seq, position, logits: seen.append((seq, position, logits.clone()))
    tokens, *_ = runner.run(StepPlan(number=1, starts=[start(4)], steps=[step(4, 0, [5, 6, 7])]))
    ((seq, position, logits),) = seen
    assert (seq, position) == (4, 2)
    assert logits.dtype == torch.float32
    assert tokens == [(4, int(logits.argmax()))]


def test_a_token_outside_the_vocabulary_fails_its_sequence_alone(runner):
    plan = StepPlan(
        number=1,
        starts=[start(1), start(2, slot=1, blocks=(1,))],
        steps=[step(1, 0, [5, 384]), step(2, 0, [8])],
    )
    tokens, failed, _ = runner.run(plan)
    assert [seq for seq, _ in tokens] == [2]
    assert failed == [(1, "token id 384 is outside the vocabulary of 384")]


def test_nan_in_a_chunk_that_does_not_sample_is_reported_at_once(runner):
    """A decode-shaped sequence whose cache never arrived: everything it reads is poison."""
    plan = StepPlan(number=1, starts=[start(1, blocks=(0, 1))], steps=[step(1, 200, [5, 6], sample=False)])
    tokens, failed, _ = runner.run(plan)
    assert tokens == []
    assert [seq for seq, _ in failed] == [1]
    assert "not finite" in failed[0][1]


def test_infinite_logits_fail_the_sequence_and_name_the_position(runner, monkeypatch):
    logits = runner._model.logits

    def broken(streams):
        out = logits(streams)
        out[0, 17] = float("inf")
        return out

    monkeypatch.setattr(runner._model, "logits", broken)
    plan = StepPlan(
        number=1,
        starts=[start(1), start(2, slot=1, blocks=(1,))],
        steps=[step(1, 0, [5, 6]), step(2, 0, [8])],
    )
    tokens, failed, _ = runner.run(plan)
    assert [seq for seq, _ in tokens] == [2]
    assert failed == [(1, "the logits at position 1 are not finite")]


def test_sampled_tokens_enter_the_penalty_counts(runner):
    """With a huge presence penalty no token comes twice, whether prefill drew it or decode did."""
    params = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=1000.0)
    known = [5, 6, 7, 11]
    tokens, *_ = runner.run(
        StepPlan(
            number=1,
            starts=[start(1, sampling=params, token_ids=known, num_outputs=1)],
            steps=[step(1, 0, known)],
        )
    )
    seen = {11, tokens[0][1]}
    for i in range(20):
        tokens, *_ = runner.run(StepPlan(number=2 + i, steps=[step(1, 4 + i, [tokens[0][1]])]))
        assert tokens[0][1] not in seen
        seen.add(tokens[0][1])


def test_a_step_ahead_computes_what_the_step_with_its_token_computes(runner):
    """Both in a batch with a prompt; penalties count the token before anybody has named it."""
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, presence_penalty=1.5)
    seen = []
    runner.on_logits = lambda seq, position, logits: seen.append((seq % 10, position, logits.clone()))
    for number, is_ahead in ((10, False), (20, True)):
        first = StepPlan(number=number, starts=[start(number, sampling=params)], steps=[step(number, 0, [5, 6, 7])])
        tickets = [runner.launch(first)]
        (token,) = (token for _, token in tickets[0].outcome.tokens)
        for n in range(3):
            steps = [step(number, 3 + n, [PREVIOUS if is_ahead else token])]
            starts = [start(number + 1, slot=1, blocks=(1,))] if n == 0 else []
            if starts:
                steps.append(step(number + 1, 0, [9, 8]))
            tickets.append(runner.launch(StepPlan(number=number + 1 + n, starts=starts, steps=steps)))
            token = tickets[-1].outcome.tokens[0][1]
        tokens = [runner.collect(ticket).tokens[0][1] for ticket in tickets]
        seen.append(("tokens", 0, torch.tensor(tokens)))
        runner.run(StepPlan(number=number + 5, ends=[number, number + 1]))
    half = len(seen) // 2
    assert [row[:2] for row in seen[:half]] == [row[:2] for row in seen[half:]]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(seen[:half], seen[half:], strict=True))


def test_a_step_ahead_of_one_that_failed_fails_for_its_reason(runner):
    bad = StepPlan(number=1, starts=[start(1)], steps=[step(1, 0, [5, 384])])
    (failure,) = runner.run(bad).failed
    assert runner.run(StepPlan(number=2, steps=[step(1, 2, [PREVIOUS])])) == ([], [failure], ())


def test_plans_out_of_step_stop_the_rank(runner):
    with pytest.raises(PlanError, match="not running"):
        runner.run(StepPlan(number=1, steps=[step(9, 0, [5])]))


def test_running_before_loading_says_what_to_do(oracle):
    from engine.config import EngineConfig
    from engine.runner import ModelRunner

    config = EngineConfig(model=str(oracle.folder("tiny")), role="decode", dtype="float32", kv_cache_dtype="fp32")
    fresh = ModelRunner(config, num_blocks=1, num_slots=1)
    with pytest.raises(RuntimeError, match=r"call load\(\)"):
        fresh.run(StepPlan(number=1, starts=[start(1)], steps=[step(1, 0, [5])]))


def test_both_sides_of_a_pair_have_the_same_fingerprints(make_pair, oracle):
    pair = make_pair("tiny")
    prefill, decode = pair.prefill.runner, pair.decode.runner
    assert prefill.model_fingerprint == decode.model_fingerprint
    assert prefill.cache.layout.fingerprint() == decode.cache.layout.fingerprint()
    assert make_pair("mx").decode.runner.model_fingerprint != decode.model_fingerprint
