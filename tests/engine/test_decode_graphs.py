"""DecodeGraphs without a GPU: the step that is captured there, run by the kernels' references here.

Beside it an ordinary runner with the same random weights and cache: the same kernels' references, but batches packed on
the host and tokens chosen by the host's sampler. Both must choose the same tokens.
"""

from pathlib import Path

import pytest
import torch

import engine.model.attention
import engine.runner
from engine.batch import PlanError
from engine.config import EngineConfig
from engine.model.config import ConfigError
from engine.plan import PREVIOUS, SequenceStart, SequenceStep, StepPlan
from router.protocol import Guide, SamplingParams

GEO = Path(__file__).resolve().parent.parent / "oracle/geo"
CONTEXT, LAYERS = 300, 3
SAMPLINGS = {
    1: {"temperature": 0.0},
    2: {"temperature": 1.0, "top_p": 0.9, "num_logprobs": 2},
    3: {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    4: {"temperature": 1.3, "min_p": 0.05, "logit_bias": {7: 9.0, 11: -50.0}, "num_logprobs": 0},
    5: {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": list(range(0, 1000)), "ignore_eos": True},
}


@pytest.fixture
def make_runner(monkeypatch):
    def make(*, has_graphs):
        monkeypatch.setattr(engine.runner, "keeps_packed", lambda device: True)
        monkeypatch.setattr(engine.runner, "runs_decode_kernels", lambda cache, device: has_graphs)
        monkeypatch.setattr(engine.model.attention, "runs_decode_kernels", lambda cache, device: True)
        config = EngineConfig(
            model=str(GEO), role="decode", load_format="synthetic", dtype="float32", num_layers=LAYERS, max_num_seqs=6,
            max_model_len=1024,
        )  # fmt: skip
        runner = engine.runner.ModelRunner(config, num_blocks=24, num_slots=8)
        runner.load()
        runner.cache.fill_random()
        return runner

    return make


def start(seq, *, prompt=(5, 6, 7, 7), **sampling):
    chosen = SamplingParams(**{"max_tokens": 99, "seed": seq, **(sampling or SAMPLINGS[seq])})
    return SequenceStart(
        seq=seq, slot=seq, block_ids=[2 * seq, 2 * seq + 1], sampling=chosen, token_ids=[*prompt, 20 + seq],
        num_outputs=1,
    )  # fmt: skip


def step(seq, at, token=PREVIOUS):
    return SequenceStep(seq=seq, start=CONTEXT + at, token_ids=[token], new_block_ids=[], sample=True)


def first(seq):
    return step(seq, 0, 20 + seq)


def test_every_setting_chooses_the_token_that_the_host_would(make_runner):
    plans = [
        StepPlan(number=1, starts=[start(seq) for seq in SAMPLINGS], steps=[first(seq) for seq in SAMPLINGS]),
        *(StepPlan(number=2 + n, steps=[step(seq, 1 + n) for seq in SAMPLINGS]) for n in range(6)),
    ]
    here, there = make_runner(has_graphs=True), make_runner(has_graphs=False)
    for plan in plans:
        ours, theirs = here.run(plan), there.run(plan)
        assert ours.tokens == theirs.tokens
        assert ours.failed == theirs.failed == []
        for (_, a), (_, b) in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a.top_ids == b.top_ids
            assert [a.logprob, *a.top_logprobs] == pytest.approx([b.logprob, *b.top_logprobs], abs=1e-4)


def test_a_step_launched_ahead_runs_the_tokens_of_the_one_before(make_runner):
    runner, other = make_runner(has_graphs=True), make_runner(has_graphs=True)
    begin = StepPlan(number=1, starts=[start(1), start(2)], steps=[first(1), first(2)])
    ahead = [StepPlan(number=n, steps=[step(1, n - 1), step(2, n - 1)]) for n in range(2, 6)]
    expected = [other.run(plan).tokens for plan in (begin, *ahead)]
    tickets, found = [runner.launch(begin)], []
    for plan in ahead:
        tickets.append(runner.launch(plan))
        found.append(runner.collect(tickets.pop(0)).tokens)
    found.append(runner.collect(tickets.pop()).tokens)
    assert found == expected
    assert len({token for tokens in found for _, token in tokens}) > 2


def test_a_row_is_taken_over_while_the_last_step_of_who_ended_is_under_way(make_runner):
    """Sequence 1 ends with its first token, which is known when the second is under way and wasted."""
    plans = [
        StepPlan(number=1, starts=[start(1), start(3)], steps=[first(1), first(3)]),
        StepPlan(number=2, steps=[step(1, 1), step(3, 1)]),
        StepPlan(number=3, ends=[1], starts=[start(4)], steps=[step(3, 2), first(4)]),
        StepPlan(number=4, steps=[step(3, 3), step(4, 1)]),
    ]
    other, runner, found = make_runner(has_graphs=True), make_runner(has_graphs=True), []
    expected = [other.run(plan).tokens for plan in plans]
    tickets = [runner.launch(plans[0])]
    for plan in plans[1:]:
        tickets.append(runner.launch(plan))
        found.append(runner.collect(tickets.pop(0)).tokens)
    found.append(runner.collect(tickets.pop()).tokens)
    assert found == expected


def test_rows_that_come_go_and_move_change_nobodys_tokens(make_runner):
    """Sequence 3 starts in the third row, sits out, and ends in the first; alone it says the same."""
    alone = make_runner(has_graphs=True)
    expected = [alone.run(StepPlan(number=1, starts=[start(3)], steps=[first(3)])).tokens[0]]
    expected += [alone.run(StepPlan(number=1 + n, steps=[step(3, n)])).tokens[0] for n in range(1, 5)]
    runner = make_runner(has_graphs=True)
    plans = [
        StepPlan(number=1, starts=[start(1), start(2), start(3)], steps=[first(1), first(2), first(3)]),
        StepPlan(number=2, steps=[step(1, 1), step(2, 1)]),
        StepPlan(number=3, ends=[1], steps=[step(2, 2), step(3, 1)]),
        StepPlan(number=4, ends=[2], starts=[start(4)], steps=[first(4), step(3, 2)]),
        StepPlan(number=5, ends=[4], steps=[step(3, 3)]),
        StepPlan(number=6, steps=[step(3, 4)]),
    ]
    found = [pair for plan in plans for pair in runner.run(plan).tokens if pair[0] == 3]
    assert found == expected


def test_padding_rows_write_to_nobodys_cache(make_runner):
    runner = make_runner(has_graphs=True)
    before = {name: pool.clone() for name, pool in runner.cache.pools.items()}
    steps = [first(1), first(2), first(3)]  # in a graph of four rows
    assert not runner.run(StepPlan(number=1, starts=[start(1), start(2), start(3)], steps=steps)).failed
    for group in runner.cache.layout.groups:
        changed = (runner.cache.pools[group.name] != before[group.name]).any(1).nonzero()[:, 0].tolist()
        own = {2, 3, 4, 5, 6, 7} if group.unit == "block" else {1, 2, 3}
        assert set(changed) <= own
        assert changed or group.unit == "block"


def test_a_sequence_that_reads_nan_fails_alone(make_runner):
    runner = make_runner(has_graphs=True)
    runner.cache.pools["state"][2].fill_(0xFF)
    outcome = runner.run(StepPlan(number=1, starts=[start(1), start(2)], steps=[first(1), first(2)]))
    assert [seq for seq, _ in outcome.tokens] == [1]
    assert [(seq, "not finite" in reason) for seq, reason in outcome.failed] == [(2, True)]


def test_a_guide_without_a_tokenizer_fails_its_sequence_alone(make_runner):
    runner = make_runner(has_graphs=True)
    guided = start(1, temperature=0.0, guide=Guide(grammar='start: "x"'))
    outcome = runner.run(StepPlan(number=1, starts=[guided, start(2)], steps=[first(1), first(2)]))
    assert [seq for seq, _ in outcome.tokens] == [2]
    assert [seq for seq, _ in outcome.failed] == [1]


def test_growth_is_seen_by_the_next_step(make_runner):
    """At a block's end the block table gets one more entry; a step without it would read an unknown block."""
    runner, other = make_runner(has_graphs=True), make_runner(has_graphs=False)
    for side in (runner, other):
        at = 2 * 256 - CONTEXT
        steps = [SequenceStep(seq=1, start=512, token_ids=[9], new_block_ids=[15], sample=True)]
        side.tokens = [side.run(StepPlan(number=1, starts=[start(1)], steps=[step(1, at - 1, 21)])).tokens]
        side.tokens += [side.run(StepPlan(number=2, steps=steps)).tokens]
        for n in range(1, 5):
            side.tokens.append(side.run(StepPlan(number=2 + n, steps=[step(1, at + n)])).tokens)
    assert runner.tokens == other.tokens


def test_logits_are_shown_to_who_asks(make_runner):
    runner, seen = make_runner(has_graphs=True), []
    runner.on_logits = lambda seq, position, logits: seen.append((seq, position, int(logits.argmax())))
    tokens = runner.run(StepPlan(number=1, starts=[start(1)], steps=[first(1)])).tokens
    assert seen == [(1, CONTEXT, tokens[0][1])]


def test_a_cache_without_decode_kernels_is_refused_where_steps_must_be_captured(make_runner):
    runner = make_runner(has_graphs=False)
    runner.device = torch.device("cuda")
    with pytest.raises(ConfigError, match="kv_cache_dtype packed has no decode kernels"):
        runner.capture()


def test_experts_that_are_not_packed_are_refused_where_steps_must_be_captured(make_runner):
    runner = make_runner(has_graphs=True)
    runner._model.layers[1].experts.w2 = torch.zeros(1)
    runner.device = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"experts of 1 layer \(layer 1 first\) are not packed"):
        runner.capture()


def test_a_first_step_that_relies_on_one_before_is_a_plan_that_contradicts_itself(make_runner):
    """Its row still holds the token of whoever had it last."""
    runner = make_runner(has_graphs=True)
    runner.run(StepPlan(number=1, starts=[start(1)], steps=[first(1)]))
    with pytest.raises(PlanError, match="has drawn none"):
        runner.launch(StepPlan(number=2, ends=[1], starts=[start(2)], steps=[step(2, 0)]))
