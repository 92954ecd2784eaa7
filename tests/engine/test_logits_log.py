"""LogitsLog: rows of logits named by the tokens that they follow."""

import numpy as np
import torch

from engine.logits_log import DIGEST_BYTES, LogitsLog, digest
from engine.plan import PREVIOUS, SequenceStart, SequenceStep, StepPlan
from router.protocol import SamplingParams

GREEDY = SamplingParams(max_tokens=9)


def step(seq, start, tokens, *, sample=True):
    return SequenceStep(seq=seq, start=start, token_ids=tokens, new_block_ids=[], sample=sample)


def records(folder):
    (path,) = folder.iterdir()
    size = DIGEST_BYTES + 3 * 4
    data = path.read_bytes()
    assert len(data) % size == 0
    rows = [data[at : at + size] for at in range(0, len(data), size)]
    return [(row[:DIGEST_BYTES], np.frombuffer(row[DIGEST_BYTES:], np.float32).tolist()) for row in rows]


def test_row_of_a_chunked_prompt_and_of_its_next_tokens_is_named_by_all_before_it(tmp_path):
    log = LogitsLog(tmp_path / "new", "decode-0")
    entered = SequenceStart(seq=4, slot=0, block_ids=[0], sampling=GREEDY, token_ids=[7, 8, 9])
    log.on_plan(StepPlan(number=1, starts=[entered], steps=[step(4, 0, [7, 8], sample=False)]))
    log.on_plan(StepPlan(number=2, steps=[step(4, 2, [9])]))
    log.on_logits(4, 2, torch.tensor([1.0, 2.0, 3.0]))
    log.on_plan(StepPlan(number=3, steps=[step(4, 3, [5])]))
    log.on_logits(4, 3, torch.tensor([4.0, 5.0, 6.0], dtype=torch.bfloat16))
    assert records(tmp_path / "new") == [(digest([7, 8, 9]), [1.0, 2.0, 3.0]), (digest([7, 8, 9, 5]), [4.0, 5.0, 6.0])]


def test_row_of_a_step_ahead_is_named_by_the_token_that_was_drawn(tmp_path):
    log = LogitsLog(tmp_path, "decode-0")
    entered = SequenceStart(seq=4, slot=0, block_ids=[0], sampling=GREEDY, token_ids=[7, 8])
    log.on_plan(StepPlan(number=1, starts=[entered], steps=[step(4, 1, [8])]))
    log.on_tokens([(4, 5), (99, 6)])
    log.on_plan(StepPlan(number=2, steps=[step(4, 2, [PREVIOUS])]))
    log.on_logits(4, 2, torch.tensor([1.0, 2.0, 3.0]))
    assert records(tmp_path) == [(digest([7, 8, 5]), [1.0, 2.0, 3.0])]


def test_number_of_a_sequence_that_ended_stands_for_nothing_any_more(tmp_path):
    log = LogitsLog(tmp_path, "decode-0")
    entered = SequenceStart(seq=4, slot=0, block_ids=[0], sampling=GREEDY, token_ids=[7])
    log.on_plan(StepPlan(number=1, starts=[entered], steps=[step(4, 0, [7])]))
    log.on_plan(StepPlan(number=2, ends=[4]))
    assert log._tokens == {}
