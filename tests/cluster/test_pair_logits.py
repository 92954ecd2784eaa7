"""Logits through prefill, push and decode: the real workers, Writer and transports, every pool poisoned with NaN."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
ORACLE = HERE.parent / "oracle"
TOLERANCE = 1e-4


def _module(name, path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


pair_module = _module("cluster_pair", HERE / "pair.py")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function name -> checkpoint folder; mx is written from its seeds."""
    made = {"tiny": ORACLE / "tiny"}

    def folder(name):
        if name not in made:
            golden = _module("make_golden", ORACLE / "make_golden.py")
            config = json.loads((ORACLE / name / "config.json").read_text())
            target = tmp_path_factory.mktemp(name)
            (target / "config.json").write_text(json.dumps(config))
            tensors = golden.build_weights(config)[0]
            save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors")
            made[name] = target
        return made[name]

    return folder


@pytest.fixture(scope="module")
def pairs(folders):
    made = {}

    def pair(name, **options):
        key = (name, *sorted(options.items()))
        if key not in made:
            made[key] = pair_module.Pair(folders(name), **options)
        return made[key]

    return pair


@pytest.mark.parametrize("transport", ["local", "nixl"])
@pytest.mark.parametrize("name", ["tiny", "mx"])
def test_every_golden_prompt_gives_the_golden_tokens_and_logits(pairs, name, transport):
    pair, golden = pairs(name, transport=transport, chunk=64), load_file(ORACLE / name / "golden.safetensors")
    lengths = sorted(int(key[7:]) for key in golden if key.startswith("prompt_"))
    worst = {}
    for length in lengths:
        expected = golden[f"gen_{length}"].tolist()
        tokens, logits = pair.generate(golden[f"prompt_{length}"], len(expected))
        worst[length] = pair_module.distance(logits, golden[f"steplogits_{length}"])
        assert tokens == expected, length
        assert pair.is_all_free()
    assert max(worst.values()) < TOLERANCE, worst


def _compare_with_colocated(pairs, lengths, chunk, transport):
    pair, rng = pairs("tiny", transport=transport, chunk=chunk), random.Random(chunk)
    colocated = pair_module.Colocated(pair.prefill.config)
    worst = {}
    for length in lengths:
        prompt = [rng.randrange(2, 384) for _ in range(length)]
        _, logits = pair.generate(prompt, 4)
        worst[length] = pair_module.distance(logits, colocated.generate(prompt, 4)[1])
    assert max(worst.values()) < TOLERANCE, {n: d for n, d in worst.items() if d >= TOLERANCE}
    assert pair.is_all_free()


SPREAD = [1, 3, 4, 5, 37, 64, 127, 128, 129, 255, 256, 257, 300]


@pytest.mark.parametrize("chunk", [37, 64, 256])
def test_handed_over_equals_colocated_at_spread_lengths(pairs, chunk):
    _compare_with_colocated(pairs, SPREAD, chunk, "nixl")


@pytest.mark.long
@pytest.mark.parametrize("chunk", [37, 64, 256])
def test_handed_over_equals_colocated_at_every_length(pairs, chunk):
    _compare_with_colocated(pairs, range(1, 301), chunk, "nixl")


def test_bytes_moved_are_the_blocks_of_the_prompt_and_one_record(pairs):
    pair = pairs("tiny", transport="nixl", chunk=64)
    layout = pair.decode.plan.layout
    for length in (1, 255, 256, 257, 511, 512, 513, 700):
        before = pair.prefill.worker.stats().transfer_bytes
        pair.generate([5] * length, 2)
        moved = pair.prefill.worker.stats().transfer_bytes - before
        assert moved == layout.num_blocks_for(length) * layout.block_bytes + layout.slot_bytes, length


def test_seeded_sampling_goes_on_across_the_hand_over(pairs):
    pair = pairs("tiny", transport="local", chunk=64)
    options = dict(temperature=0.9, top_p=0.95, seed=7, frequency_penalty=0.4)
    first, _ = pair.generate([9] * 140, 12, **options)
    again, _ = pair.generate([9] * 140, 12, **options)
    other, _ = pair.generate([9] * 140, 12, **{**options, "seed": 8})
    assert first == again != other
