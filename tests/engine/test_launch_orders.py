"""Which launches of a decode step run beside each other: what the model hands to the kernels' wrappers."""

from pathlib import Path

import pytest
import torch

import engine.model.attention as attention
import engine.model.moe as moe
import engine.runner
from engine.config import EngineConfig
from engine.plan import SequenceStart, SequenceStep, StepPlan
from kernels.launch_order import ASIDE, IN_CHAIN, LEAD
from router.protocol import SamplingParams

GEO = Path(__file__).resolve().parent.parent / "oracle/geo"
LAYERS = 3


@pytest.fixture
def handed(monkeypatch):
    """Return a function that runs one step: what is added to the experts of each layer, and their order."""

    def run():
        found, plain = [], moe.expert_parts

        def expert_parts(*args, add, order=IN_CHAIN, **given):
            found.append((add, order))
            return plain(*args, add=add, order=order, **given)

        monkeypatch.setattr(moe, "expert_parts", expert_parts)
        monkeypatch.setattr(engine.runner, "keeps_packed", lambda device: True)
        monkeypatch.setattr(engine.runner, "runs_decode_kernels", lambda cache, device: True)
        monkeypatch.setattr(attention, "runs_decode_kernels", lambda cache, device: True)
        config = EngineConfig(
            model=str(GEO), role="decode", load_format="synthetic", num_layers=LAYERS, max_num_seqs=2,
            max_model_len=1024,
        )  # fmt: skip
        runner = engine.runner.ModelRunner(config, num_blocks=8, num_slots=4)
        runner.load()
        runner.cache.fill_random()
        sampling = SamplingParams(max_tokens=9, temperature=0.0)
        start = SequenceStart(seq=1, slot=1, block_ids=[2, 3], sampling=sampling, token_ids=[5, 6], num_outputs=1)
        step = SequenceStep(seq=1, start=300, token_ids=[6], new_block_ids=[], sample=True)
        runner.run(StepPlan(number=1, starts=[start], steps=[step]))
        return found

    return run


def test_the_shared_experts_last_product_leads_and_the_experts_are_aside(handed, monkeypatch):
    plain = moe.Linear.__call__

    def product(self, x, *, order=IN_CHAIN, **given):
        out = plain(self, x, order=order, **given)
        if order is not IN_CHAIN:
            assert order.take(reads=[x], writes=[out]) == LEAD
        return out

    monkeypatch.setattr(moe.Linear, "__call__", product)
    found = handed()
    assert len(found) == LAYERS
    for add, order in found:
        assert torch.is_tensor(add)
        assert order.take(reads=(), writes=()) == ASIDE
