"""The hand-over: any length, any chunk, nothing left out; and sequences that share a batch without noticing."""

import json

import pytest
import torch

from router.protocol import SamplingParams

CHUNKS = (37, 64, 256)
SPREAD = (1, 2, 3, 4, 5, 7, 8, 9, 31, 63, 68, 100, 120, 126, 127, 128, 129, 130, 131, 132, 200, 255, 256, 257, 300)


def prompt_of(length, vocab=384, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(2, vocab, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def alone(make_pair, harness):
    """Return a function length -> (prompt, outputs to feed, what a colocated run of the whole prompt gives), kept.

    Of the prompts of a length the first is taken in which no choice of experts or entries hangs on the last bits.
    """
    kept = {}

    def run(length):
        side, outputs = harness.Side(make_pair("tiny").prefill.runner, seed=3), prompt_of(12, seed=7)
        for seed in range(50):
            if length in kept:
                break
            prompt = prompt_of(length, seed=seed)
            with harness.SelectionMargins() as margins:
                wanted = harness.colocated(side, prompt, outputs, chunk=length)
            if margins.smallest > margins.ENOUGH:
                kept[length] = (prompt, outputs, wanted)
        return kept[length]

    return run


def served_like_alone(make_pair, harness, alone, length, chunk):
    prompt, outputs, wanted = alone(length)
    served = make_pair("tiny").serve(prompt, outputs, chunk=chunk)
    assert harness.distance(served.logits, wanted.logits) < 1e-4
    assert served.tokens == wanted.tokens


@pytest.mark.parametrize("length", SPREAD)
def test_handed_over_decode_equals_a_colocated_run(make_pair, harness, alone, length):
    for chunk in CHUNKS:
        served_like_alone(make_pair, harness, alone, length, chunk)


@pytest.mark.parametrize("chunk", [1, 3, 5, 128])
@pytest.mark.parametrize("length", [1, 4, 9, 130])
def test_odd_chunks_change_nothing(make_pair, harness, alone, length, chunk):
    served_like_alone(make_pair, harness, alone, length, chunk)


@pytest.mark.long
@pytest.mark.parametrize("length", range(1, 301))
def test_handed_over_decode_equals_a_colocated_run_at_every_length(make_pair, harness, alone, length):
    for chunk in CHUNKS:
        served_like_alone(make_pair, harness, alone, length, chunk)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 36, 126, 128, 131, 257])
def test_narrow_window_and_small_top_k_match_the_slow_reference(oracle, make_pair, harness, length):
    """A window smaller than a chunk, an index that must choose early, and an HCA entry that closes during decode."""
    config = json.loads((oracle.folder("tiny") / "config.json").read_text())
    config |= {"sliding_window": 16, "index_topk": 8}
    oracle.write("narrow", config)
    prompt, outputs = prompt_of(length, seed=2), prompt_of(12, seed=3)
    reference, state = oracle.reference.RefV4(config, float_weights(oracle, "narrow")), {}
    with torch.no_grad():
        wanted = [reference.forward(state, torch.tensor(prompt), 0)[0][-1]]
        for i, token in enumerate(outputs[:-1]):
            wanted.append(reference.forward(state, torch.tensor([token]), length + i)[0][-1])
    served = make_pair("narrow").serve(prompt, outputs, chunk=37)
    assert harness.distance(served.logits, torch.stack(wanted)) < 1e-4


def float_weights(oracle, name):
    return {k: v.float() if v.is_floating_point() else v for k, v in oracle.weights(name).items()}


# At 250 tokens and 12 decoded ones every part of the cache is needed: the index chooses among more entries than top-k,
# an HCA entry is complete, another is begun and completes at 256, and CSA entries complete across the hand-over.
PARTS = ["csa_kv", "csa_index", "hca_kv", "window", "csa_state", "index_state", "hca_state", "state"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_cache_that_never_arrives_fails_closed(make_pair, part):
    served = make_pair("tiny").serve(prompt_of(250), prompt_of(12, seed=7), chunk=64, skip=(part,))
    assert "not finite" in served.failed


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_the_cache_left_stale_changes_the_logits(make_pair, harness, part):
    """Pools full of zeros instead of NaN: what is skipped is plausible, and must still show."""
    pair, outputs = make_pair("tiny"), prompt_of(12, seed=7)
    whole = pair.serve(prompt_of(250), outputs, chunk=64)
    for cache in (pair.prefill.runner.cache, pair.decode.runner.cache):
        for pool in cache.pools.values():
            pool.zero_()
    stale = pair.serve(prompt_of(250), outputs, chunk=64, skip=(part,), poison=False)
    assert not stale.failed
    assert harness.distance(whole.logits, stale.logits) > 1e-3


def test_parts_listed_here_are_all_there_are(make_pair):
    layout = make_pair("tiny").decode.runner.cache.layout
    names = {g.name for g in layout.groups} | {r.name for g in layout.groups for r in g.regions}
    assert names == set(PARTS)


def test_a_slot_and_blocks_used_before_leave_no_trace(make_pair, harness):
    pair, outputs = make_pair("tiny"), prompt_of(8, seed=5)
    fresh = pair.serve(prompt_of(131), outputs, chunk=64)
    for length in (300, 257, 40):
        pair.serve(prompt_of(length, seed=9), outputs, chunk=64, poison=False)
    again = pair.serve(prompt_of(131), outputs, chunk=64, poison=False)
    assert harness.distance(fresh.logits, again.logits) < 1e-5


def test_sequences_in_one_batch_get_what_they_get_alone(make_pair, harness, alone):
    """Decode steps of four sequences, one of them still in prefill chunks, in the same plans."""
    side = harness.Side(make_pair("tiny").decode.runner, seed=5)
    side.runner.cache.poison()
    lengths = (1, 68, 131, 250)
    work = []
    for prompt, outputs, wanted in map(alone, lengths):
        work.append((side.start(prompt, num_tokens=len(prompt)), prompt, outputs, wanted))
    late, late_prompt = work[-1][0], work[-1][1]
    for running, prompt, *_ in work[:-1]:
        side.prefill(running, prompt, 64)
    fed = [0] * len(work)
    while any(f < 11 for f in fed):
        batch = []
        for i, (running, _, outputs, _) in enumerate(work):
            if running is late and running.length < len(late_prompt):
                piece = late_prompt[running.length : running.length + 100]
                batch.append((running, piece, running.length + len(piece) == len(late_prompt)))
            elif fed[i] < 11:
                batch.append((running, [outputs[fed[i]]], True))
                fed[i] += 1
        side.step(*batch)
    for running, _, _, wanted in work:
        assert harness.distance(torch.stack(running.logits), wanted.logits) < 1e-4
        assert running.tokens == wanted.tokens
        side.end(running)


def test_a_poisoned_sequence_fails_alone(make_pair, harness, alone):
    side = harness.Side(make_pair("tiny").decode.runner, seed=6)
    side.runner.cache.poison()
    prompt, outputs, wanted = alone(131)
    well = side.start(prompt, num_tokens=131)
    ill = side.start(prompt_of(68), num_tokens=68)
    side.prefill(well, prompt, 64)
    side.prefill(ill, prompt_of(68), 64)
    side.runner.cache.pools["state"][ill.slot] = 0xFF
    for i in range(6):
        side.step((ill, [5], True), (well, [outputs[i]], True))
    assert "not finite" in ill.failed
    assert len(ill.tokens) == 1, "no token may come from NaN"
    assert not well.failed
    assert harness.distance(torch.stack(well.logits), wanted.logits[:7]) < 1e-4
    side.end(ill)
    side.end(well)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "kv_cache_dtype": "packed"}])
def test_bfloat16_hands_over_without_loss(make_pair, harness, options):
    """bf16 rounding differs with the shape of a product, so chunks of one are compared with chunks of one."""
    kind = {"kv_cache_dtype": "bf16", **options}
    pair, outputs = make_pair("tiny", **kind), prompt_of(6, seed=4)
    wanted = harness.colocated(pair.prefill, prompt_of(21), outputs, chunk=1)
    served = pair.serve(prompt_of(21), outputs, chunk=1)
    assert harness.distance(served.logits, wanted.logits) < 1e-4
    assert served.tokens == wanted.tokens


def test_bfloat16_rows_stay_near_the_golden_logits(oracle, make_pair, harness):
    """float32 weights, bf16 rows: only the cache rounds. Router flips make random nets jumpy, so the bound is loose."""
    golden = oracle.golden("mx")
    pair = make_pair("mx", kv_cache_dtype="bf16")
    served = pair.serve(golden["prompt_130"], golden["gen_130"], chunk=64)
    gap = harness.distance(served.logits, golden["steplogits_130"])
    assert 1e-6 < gap < 0.2


def test_bfloat16_weights_and_rows_choose_the_golden_tokens(oracle, make_pair, harness):
    golden = oracle.golden("mx")
    served = make_pair("mx", dtype="bfloat16", kv_cache_dtype="bf16").serve(
        golden["prompt_7"], golden["gen_7"], chunk=64
    )
    assert served.tokens == golden["gen_7"].tolist()
    assert harness.distance(served.logits, golden["steplogits_7"]) < 0.5


def test_the_first_token_of_a_resumed_request_is_drawn_as_if_it_had_never_stopped(make_pair, harness):
    """Noise is keyed by position, penalties by counts: prefilling prompt + outputs goes on with the same sample."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=11, presence_penalty=1.0, repetition_penalty=1.3)
    side = harness.Side(make_pair("tiny").prefill.runner, seed=8)
    whole = side.start(prompt_of(40), num_tokens=40, sampling=params)
    side.prefill(whole, prompt_of(40), 64)
    for _ in range(9):
        side.step((whole, [whole.tokens[-1]], True))
    known = [*prompt_of(40), *whole.tokens[:4]]
    resumed = side.start(known, num_tokens=44, sampling=params, num_outputs=4)
    side.prefill(resumed, known, 64)
    for _ in range(5):
        side.step((resumed, [resumed.tokens[-1]], True))
    assert resumed.tokens == whole.tokens[4:]
    side.end(whole)
    side.end(resumed)
