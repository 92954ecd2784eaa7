"""Ranks that compute one model together: what each holds, what they exchange, and what they do when one fails."""

import importlib.util
import sys
import threading
from pathlib import Path

import pytest
import torch

from engine.eager_steps import NoMemoryInGroup
from engine.model.config import load_config
from engine.model.index_split import pays
from engine.model.shard import Shard, cut_shape, tiles_of
from engine.model.tensor_specs import tensor_specs
from engine.model.weights import load_weights
from engine.parallel import ExchangeFailed, join
from engine.plan import CACHE_CORRUPT, SequenceStart, SequenceStep, StepPlan
from kernels.quant import dequantize_block_fp8
from router.protocol import SamplingParams

HERE = Path(__file__).parent


def _module(name):
    spec = importlib.util.spec_from_file_location(f"engine_{name}", HERE / f"{name}.py")
    loaded = sys.modules.setdefault(f"engine_{name}", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(loaded)
    return loaded


Hub = _module("lock_step").Hub


def both(work, count=2):
    """Return what `work(rank)` returns, each rank in a thread of its own."""
    found = [None] * count

    def one(rank):
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


# ---------------------------------------------------------------- what a rank holds


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("name", ["tiny", "mx", "geo"])
def test_parts_of_all_ranks_are_the_whole(oracle, name, by_expert):
    config = load_config(oracle.folder(name))
    whole = load_weights(oracle.folder(name), config, dtype=torch.float32).tensors
    shards = [Shard(index, 2, by_expert) for index in range(2)]
    parts = [load_weights(oracle.folder(name), config, dtype=torch.float32, shard=shard).tensors for shard in shards]
    specs = [tensor_specs(config, shard) for shard in shards]
    for key, tensor in whole.items():
        here, there = (part[key] for part in parts)
        if ".experts." in key:
            axis = 0 if by_expert else (2 if key.endswith("w2") else 1)
            inner = 1 if axis != 1 else 2  # w1 over w3
            pieces = [torch.cat(pair, axis) for pair in zip(here.chunk(inner, 1), there.chunk(inner, 1), strict=True)]
            assert torch.equal(torch.cat(pieces, 1) if inner > 1 else pieces[0], tensor), key
            continue
        assert tuple(here.shape) == specs[0][key].shape == specs[1][key].shape
        if here.shape == tensor.shape:
            assert torch.equal(here, tensor) and torch.equal(there, tensor), key
        else:
            axis = next(i for i, size in enumerate(here.shape) if size != tensor.shape[i])
            assert torch.equal(torch.cat([here, there], axis), tensor), key


def test_a_part_that_cuts_a_tile_keeps_its_scale(oracle):
    """geo's shared expert has 128 inner channels: one tile, of which each of two ranks has a half."""
    config = load_config(oracle.folder("geo"))
    name = "layers.1.ffn.shared_experts.w1"
    whole = load_weights(oracle.folder("geo"), config, dtype=torch.float32).tensors[f"{name}.weight"]
    for index in range(2):
        tensors = load_weights(
            oracle.folder("geo"), config, dtype=torch.float32, keeps_packed=True, shard=Shard(index, 2)
        ).tensors
        weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.scale"]
        assert weight.dtype == torch.float8_e4m3fn and weight.shape[0] == 64
        assert torch.equal(dequantize_block_fp8(weight, scale), whole[64 * index : 64 * index + 64])
        assert weight.untyped_storage().nbytes() == weight.numel()


def test_a_part_that_begins_in_a_tile_and_goes_on_has_no_tiles_of_its_own():
    assert tiles_of((slice(0, 192), slice(None)), (384, 256)) == (slice(0, 2), slice(0, 2))
    assert tiles_of((slice(192, 384), slice(None)), (384, 256)) is None
    assert tiles_of((slice(64, 128), slice(128, 256)), (384, 256)) == (slice(0, 1), slice(1, 2))
    assert cut_shape((384, 256), (slice(192, 384), slice(None))) == (192, 256)


@pytest.mark.parametrize(("shard", "named"), [(Shard(0, 3), "num_attention_heads 4"), (Shard(0, 4), "o_groups 2")])
def test_a_model_that_can_not_be_cut_is_refused_with_the_size(oracle, shard, named):
    with pytest.raises(ValueError, match=named):
        shard.of(load_config(oracle.folder("tiny")))


# ---------------------------------------------------------------- what they compute


@pytest.mark.parametrize("by_expert", [False, True])
def test_tensor_parallel_ranks_give_the_golden_logits_and_tokens(oracle, harness, by_expert):
    golden, lengths = oracle.golden("tiny"), (5, 131, 300)

    def serve(group):
        side = harness.Side(harness.make_runner(oracle.folder("tiny"), group=group, expert_parallel=by_expert, ranks=2))
        return [
            harness.colocated(side, golden[f"prompt_{n}"], golden[f"gen_{n}"], chunk=64, poison=False) for n in lengths
        ]

    with torch.inference_mode():
        ranks = Hub(2).run(serve)
    for length, first, second in zip(lengths, *ranks, strict=True):
        assert torch.equal(first.logits, second.logits)
        assert harness.distance(first.logits, golden[f"steplogits_{length}"]) < 1e-4
        assert first.tokens == second.tokens == golden[f"gen_{length}"].tolist()


@pytest.mark.parametrize("packs", [False, True], ids=["rows", "kernels"])
def test_tensor_parallel_ranks_that_share_index_scores_select_the_same(oracle, harness, monkeypatch, packs):
    """Chunks of one sequence, the last of them shorter; as kernels have it, through their references."""
    shared = []

    def pays(num_tokens, entries, *, top_k, ranks):
        fits = ranks > 1 and num_tokens > 4 and entries > top_k
        shared.append(fits)
        return fits

    monkeypatch.setattr("engine.model.compressor.pays", pays)
    options = {}
    if packs:
        options = {"kv_cache_dtype": "packed", "index_cache_dtype": "fp8"}
        monkeypatch.setattr("engine.model.model.decode_batch", lambda batch, cache: batch.decode)
        monkeypatch.setattr("engine.model.attention.runs_decode_kernels", lambda cache, device: True)
    golden = oracle.golden("tiny")
    prompt = golden["prompt_300"].tolist()[:271]

    def serve(group):
        side = harness.Side(harness.make_runner(oracle.folder("tiny"), group=group, ranks=2 if group else 1, **options))
        return harness.colocated(side, prompt, golden["gen_300"][:3], chunk=90, poison=False)

    with torch.inference_mode():
        first, second = Hub(2).run(serve)
        assert any(shared)
        assert torch.equal(first.logits, second.logits)
        assert harness.distance(first.logits, serve(None).logits) < (0.2 if packs else 1e-4)
        monkeypatch.setattr("engine.model.compressor.pays", lambda *_, **__: False)
        assert torch.equal(Hub(2).run(serve)[0].logits, first.logits)


def test_index_scores_are_shared_where_their_bytes_outweigh_what_is_selected():
    chunk = {"top_k": 512, "ranks": 4}
    assert pays(4096, 131072 // 4, **chunk) and not pays(4096, 8192 // 4, **chunk)
    assert pays(4096, 9600, **chunk) and not pays(4096, 9400, **chunk)
    assert not pays(1, 1 << 20, **chunk) and not pays(64, 131072 // 4, **chunk)
    assert not pays(4096, 131072 // 4, top_k=512, ranks=1)


def test_tensor_parallel_ranks_draw_the_same_tokens(oracle, harness):
    """Each from the same logits, with the same noise; a token's log probability is of the whole vocabulary."""
    sampling = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=11, num_logprobs=2, presence_penalty=0.5)

    def draw(group):
        side = harness.Side(harness.make_runner(oracle.folder("tiny"), group=group, ranks=2 if group else 1))
        running = side.start([3, 4, 5], num_tokens=20, sampling=sampling)
        side.prefill(running, [3, 4, 5], 64)
        for _ in range(6):
            side.step((running, [running.tokens[-1]], True))
        return running.tokens

    with torch.inference_mode():
        first, second = Hub(2).run(draw)
        assert first == second == draw(None)


# ---------------------------------------------------------------- when one fails


def test_a_cache_that_is_corrupt_at_one_rank_is_left_out_at_both(oracle, harness, monkeypatch):
    """Else they would exchange sums of different tokens."""
    sums = [{"block": 0}, {"block": 0}]

    def difference(start, cache, *, rank):
        return f"{CACHE_CORRUPT}block" if rank == 1 and start.seq == 1 else ""

    monkeypatch.setattr("engine.cache_check.difference", difference)

    def run(group):
        runner = harness.make_runner(oracle.folder("tiny"), group=group, ranks=2)
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        starts = [
            SequenceStart(seq=seq, slot=seq, block_ids=[seq], sampling=sampling, token_ids=[5, 6], checksums=sums)
            for seq in (1, 2)
        ]
        steps = [SequenceStep(seq=seq, start=0, token_ids=[5, 6], new_block_ids=[], sample=True) for seq in (1, 2)]
        return runner.run(StepPlan(number=1, starts=starts, steps=steps))

    with torch.inference_mode():
        first, second = Hub(2).run(run)
    assert [seq for seq, _ in first.tokens] == [2] and first.tokens == second.tokens
    assert first.failed == [(1, f"{CACHE_CORRUPT}so says another rank of the group")]
    assert second.failed == [(1, f"{CACHE_CORRUPT}block")]


def test_a_rank_without_memory_ends_its_group(oracle, harness):
    """It can't try again without the newest sequence, as it would alone: the other rank has not failed."""

    def run(group):
        runner = harness.make_runner(oracle.folder("tiny"), group=group, ranks=2)
        start = SequenceStart(seq=1, slot=0, block_ids=[0], sampling=SamplingParams(max_tokens=1, temperature=0.0))
        step = SequenceStep(seq=1, start=0, token_ids=[5], new_block_ids=[], sample=True)
        return runner.run(StepPlan(number=1, starts=[start], steps=[step], exhaust=40 if group.index else 0))

    with torch.inference_mode(), pytest.raises(NoMemoryInGroup, match="no memory for a step of 1 sequences"):
        Hub(2).run(run)


def test_a_rank_that_does_not_come_is_waited_for_so_long(tmp_path):
    with pytest.raises(ExchangeFailed, match="rank 1 of 2 found not all others within 0 s"):
        join(tmp_path, rank=1, count=2, generation=7, device="cpu", timeout_s=0.2)


@pytest.fixture
def joined():
    """A function of (folder, rank) that joins two ranks. Closed at the end: a fork later on must not find threads."""
    groups = []

    def join_two(folder, rank):
        groups.append(join(folder, rank=rank, count=2, generation=7, device="cpu"))
        return groups[-1]

    yield join_two
    for group in groups:
        group.close()


def test_ranks_exchange_over_loopback(joined, tmp_path):
    def exchange(rank):
        group = joined(tmp_path, rank)
        mine = torch.arange(6.0).view(2, 3) * (rank + 1)
        sums = group.all_reduce(mine.to(torch.bfloat16)).float()
        found = (sums, group.all_gather(mine), group.agree([rank == 1, False]), group.largest([rank, -rank]))
        return *found, group.every(bytes([rank, 9])), group.all_reduce(torch.empty(0, 3)).shape

    first, second = both(exchange)
    x = torch.arange(6.0).view(2, 3)
    for found in (first, second):
        assert torch.equal(found[0], 3 * x) and torch.equal(found[1], torch.cat([x, 2 * x], 1))
        assert found[2:] == ([True, False], [1.0, 0.0], [b"\0\x09", b"\x01\x09"], (0, 3))


def test_who_loses_the_others_says_so(joined, tmp_path):
    def exchange(rank):
        group = joined(tmp_path, rank)
        group.agree([True])
        if rank == 1:
            return group.close()
        return group.agree([True])

    first, _ = both(exchange)
    assert isinstance(first, ExchangeFailed) and "rank 0 of 2 lost the others" in str(first)
