"""ChunkGraphs without a GPU: what is captured there, padding and all, run by the kernels' references here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import engine.model.attention as attention
import engine.runner
from engine.batch import Batch
from engine.chunk_graphs import ChunkGraphs
from engine.graph_sizes import LONGEST_CHUNK, chunk_sizes, graph_size
from kernels.ragged import RaggedBatch

LENGTHS = (9, 130)


def _prefill():
    name = "gpu_prefill"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "gpu/prefill.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Counting(ChunkGraphs):
    """Remembers the chunks that it ran."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.ran = []

    def run(self, batch):
        self.ran.append(batch.ragged.spans)
        return super().run(batch)


@pytest.fixture
def rig(oracle, monkeypatch):
    for module, name in ((attention, "runs_decode_kernels"), (engine.runner, "keeps_packed")):
        monkeypatch.setattr(module, name, getattr(module, name))
    return _prefill().Rig(oracle.folder("geo"), device="cpu", dtype="float32", index="fp4")


def graphs_of(rig, **options):
    runner = rig.side.runner
    options = {"sizes": (32, 64), "sequences": 3, "longest": 512} | options
    return Counting(runner.model, runner.cache, **options)


def test_padded_chunks_choose_as_golden_and_leave_the_cache_that_others_would(rig):
    with torch.inference_mode():
        plain = rig.logits(LENGTHS, chunk=50, packed=True)
        rig.side.runner.cache.poison()
        graphs = rig.side.runner._eager.graphs = graphs_of(rig)
        found = rig.logits(LENGTHS, chunk=50, packed=True)
    _, fault = rig.judge(found, plain)
    assert fault == ""
    assert graphs.ran[:3] == [((0, 9), (0, 50)), ((50, 50),), ((100, 30),)]
    assert len(graphs.ran) == 3 + _prefill().STEPS - 1  # a token of each, behind the prompts
    # Sums are added in another order, so that a value rounds to another code here and there.
    gaps = [(found[length] - plain[length]).abs().amax(1) for length in LENGTHS]
    assert float(torch.cat(gaps).median()) < 0.03


def batch_of(*spans):
    count = sum(length for _, length in spans)
    ragged = RaggedBatch.build(spans, slots=range(len(spans)), block_tables=[[0, 1]] * len(spans))
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(tuple(range(len(spans))), torch.zeros(count, dtype=torch.int64), ragged, (), none)


def test_chunks_that_are_too_long_too_many_or_too_far_on_are_left(rig):
    graphs = graphs_of(rig)
    assert graphs.takes(batch_of((0, 64))) and graphs.takes(batch_of((448, 60), (0, 2), (7, 2)))
    assert not graphs.takes(batch_of((0, 65)))
    assert not graphs.takes(batch_of((0, 1), (0, 1), (0, 1), (0, 1)))
    assert not graphs.takes(batch_of((460, 53), (0, 2)))


@pytest.mark.parametrize("others", [False, True])
def test_no_rank_captures_unless_all_can(rig, monkeypatch, caplog, others):
    class Two:
        def agree(self, flags):
            return [flag or others for flag in flags]

    runner = rig.side.runner
    assert runner.model.uncapturable == ""
    monkeypatch.setattr(runner, "group", Two())
    assert runner._all_capturable() == (not others)
    assert ("another rank" in caplog.text) == others


@pytest.mark.parametrize("most", [1, 31, 32, 33, 500, 2048, 4096])
def test_a_graph_has_room_for_every_short_chunk_and_few_to_spare(most):
    sizes = chunk_sizes(most)
    assert sizes[-1] == min(most, LONGEST_CHUNK) and list(sizes) == sorted(set(sizes))
    for tokens in range(1, sizes[-1] + 1):
        assert tokens <= graph_size(sizes, tokens) < max(2 * tokens, 33)
