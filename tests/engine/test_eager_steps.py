"""Steps of any shape: which sequences have streams that are not finite; warming; chunks through kernels' references."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

import engine.model.attention as attention
import engine.runner
from engine.batch import Batch
from engine.eager_steps import _finite_sequences
from engine.warm_up import warm_up
from kernels.ragged import RaggedBatch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("token", [2, 4, 6])
def test_one_value_that_is_not_finite_fails_its_sequence_alone(dtype, value, token):
    ragged = RaggedBatch.build([(0, 2), (7, 5), (3, 1)], slots=[0, 1, 2], block_tables=[[0], [1], [2]])
    streams = torch.randn(8, 4, 64).to(dtype)
    streams[token, 1, 17] = value
    batch = Batch((1, 2, 3), torch.zeros(8, dtype=torch.int64), ragged, (), torch.zeros(0, dtype=torch.int64))
    assert _finite_sequences(streams, batch) == [True, False, True]


def _prefill():
    name = "gpu_prefill"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "gpu/prefill.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize(
    ("lengths", "chunk"),
    [((9, 130), 50), pytest.param((9, 130, 700), 300, marks=pytest.mark.long)],
)
def test_chunks_of_packed_prompts_through_kernels_choose_as_golden(oracle, monkeypatch, lengths, chunk):
    for module, name in ((attention, "runs_decode_kernels"), (engine.runner, "keeps_packed")):
        monkeypatch.setattr(module, name, getattr(module, name))
    with torch.inference_mode():
        rig = _prefill().Rig(oracle.folder("geo"), device="cpu", dtype="float32", index="fp4")
        _, fault = rig.judge(rig.logits(lengths, chunk=chunk, packed=True), None)
    assert fault == ""


def test_warming_runs_chunks_of_falling_lengths_and_leaves_a_cache_that_serves(oracle, harness):
    golden = oracle.golden("tiny")
    prompt = golden["prompt_131"].tolist()
    options = {"max_num_batched_tokens": 150, "pool_poison": True, "num_blocks": 4}
    cold, warm = (harness.make_runner(oracle.folder("tiny"), **options) for _ in range(2))
    told = []
    warm_up(warm, told.append)
    assert [text.split(":")[0] for text in told] == [f"a chunk of {n} tokens" for n in (150, 75, 37, 18, 9, 4, 2, 1)]
    rows = []
    for runner in (cold, warm):
        side = harness.Side(runner)
        running = side.start(prompt, num_tokens=131)
        side.prefill(running, prompt, 64)
        assert not running.failed
        rows.append(running.logits[0])
    assert torch.equal(*rows)


def test_warming_without_memory_for_the_longest_chunk_is_refused_with_a_remedy(oracle, harness, monkeypatch):
    runner = harness.make_runner(oracle.folder("tiny"), max_num_batched_tokens=32)

    def forward(*_):
        raise torch.OutOfMemoryError("none")

    monkeypatch.setattr(runner._model, "forward", forward)
    with pytest.raises(engine.runner.ConfigError, match="no memory for a chunk of 32 tokens; lower it"):
        warm_up(runner)
