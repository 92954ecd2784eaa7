"""Prefill, hand-over and decode against the golden logits of an independent implementation, float32 rows."""

import pytest

PROMPTS = [("tiny", n) for n in (1, 5, 64, 127, 128, 129, 131, 256, 257, 300, 701)] + [("mx", n) for n in (7, 130, 300)]


@pytest.mark.parametrize("chunk", [37, 64, 256])
@pytest.mark.parametrize(("name", "length"), PROMPTS)
def test_handed_over_decode_gives_the_golden_logits_and_tokens(oracle, make_pair, harness, name, length, chunk):
    golden = oracle.golden(name)
    outputs = golden[f"gen_{length}"]
    served = make_pair(name).serve(golden[f"prompt_{length}"], outputs, chunk=chunk)
    assert harness.distance(served.logits, golden[f"steplogits_{length}"]) < 1e-4
    assert served.tokens == outputs.tolist()


@pytest.mark.parametrize("length", [9, 130, 700, pytest.param(2300, marks=pytest.mark.long)])
def test_flash_head_geometry_gives_the_golden_logits(oracle, make_pair, harness, length):
    golden = oracle.golden("geo")
    outputs = golden[f"gen_{length}"]
    served = make_pair("geo").serve(golden[f"prompt_{length}"], outputs, chunk=512)
    assert harness.distance(served.logits, golden[f"steplogits_{length}"]) < 1e-4
    assert served.tokens == outputs.tolist()


@pytest.mark.parametrize(("name", "lengths"), [("mx", (7, 130, 300)), ("geo", (9, 130, 700, 2300))])
def test_fp4_index_keys_with_hadamard_stay_close_to_the_rounding_used_in_training(
    oracle, make_pair, harness, name, lengths
):
    """The bound is that of rounding flips: the rope tail is bf16 here and float32 in the reference."""
    golden, simulated = oracle.golden(name), oracle.golden_sim(name)
    pair = make_pair(name, kv_cache_dtype="packed", index_cache_dtype="fp4")
    assert pair.decode.runner.config.uses_hadamard
    bound = {"mx": 0.15, "geo": 0.25}[name]
    steps = 0
    for length in lengths:
        wanted = simulated[f"simlogits_{length}"]
        served = pair.serve(golden[f"prompt_{length}"], golden[f"gen_{length}"], chunk=512)
        assert harness.distance(served.logits, wanted) < bound, length
        assert served.tokens == wanted.argmax(-1).tolist(), length
        steps += len(served.tokens)
    assert steps == {"mx": 18, "geo": 24}[name]
