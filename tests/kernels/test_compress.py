"""Compression against a float64 loop, over any chunk boundaries, with state full of NaN to begin with."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.compress import compress_csa, compress_hca
from kernels.ragged import RaggedBatch
from kernels.rows import Rows

DIM = 8


def state_rows(rows, width, slots=3):
    pool = torch.full((slots, rows * width * 4), 0xFF, dtype=torch.uint8)
    return Rows.view(pool, "fp32", width=width, rows=rows, offset=0, value_bytes=4 * width, scale_bytes=0)


def csa_by_hand(k, g):
    """k, g [L, 2D]: entry b from positions 4b-4..4b+3."""
    out = []
    for b in range(len(k) // 4):
        keys, gates = [], []
        for p in range(4 * b - 4, 4 * b + 4):
            if p >= 0:
                half = slice(0, DIM) if p < 4 * b else slice(DIM, 2 * DIM)
                keys.append(k[p, half].double())
                gates.append(g[p, half].double())
        out.append((torch.stack(keys) * torch.softmax(torch.stack(gates), 0)).sum(0))
    return out


def hca_by_hand(k, g):
    out = []
    for b in range(len(k) // 128):
        rows = slice(128 * b, 128 * b + 128)
        out.append((k[rows].double() * torch.softmax(g[rows].double(), 0)).sum(0))
    return out


KINDS = {
    "csa": (compress_csa, 16, 2 * DIM, csa_by_hand),
    "hca": (compress_hca, 3, DIM, hca_by_hand),
}


def run(kind, inputs, cuts):
    """Feed each sequence's (k, g) in pieces, all sequences in one batch per round; return its entries."""
    compress, rows, width, _ = KINDS[kind]
    state, done, entries = state_rows(rows, width), [0] * len(inputs), [[] for _ in inputs]
    for round_cuts in cuts:
        active = [i for i, (k, _) in enumerate(inputs) if round_cuts[i] and done[i] < len(k)]
        if not active:
            continue
        lengths = [min(round_cuts[i], len(inputs[i][0]) - done[i]) for i in active]
        batch = RaggedBatch.build(
            [(done[i], n) for i, n in zip(active, lengths, strict=True)],
            slots=[2 - i for i in active],
            block_tables=[[0]] * len(active),
        )
        parts = [[x[done[i] : done[i] + n] for x in inputs[i]] for i, n in zip(active, lengths, strict=True)]
        out = compress(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), batch, state)
        owner = batch.entries(4 if kind == "csa" else 128).sequence.tolist()
        assert len(owner) == len(out)
        for i, row in zip(owner, out, strict=True):
            entries[active[i]].append(row)
        for i, n in zip(active, lengths, strict=True):
            done[i] += n
    assert done == [len(k) for k, _ in inputs]
    return entries


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 5, 37, 127, 128, 129, 300])
def test_any_chunk_size_gives_the_entries_of_the_whole(kind, chunk, normal):
    _, _, width, by_hand = KINDS[kind]
    k, g = normal(300, width), 3 * normal(300, width, seed=1)
    (entries,) = run(kind, [(k, g)], [[chunk]] * 300)
    wanted = by_hand(k, g)
    assert len(entries) == len(wanted) == 300 // (4 if kind == "csa" else 128)
    assert torch.allclose(torch.stack(entries).double(), torch.stack(wanted), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_sequences_in_one_batch_do_not_mix(kind, data):
    _, _, width, by_hand = KINDS[kind]
    lengths = data.draw(st.lists(st.integers(1, 280), min_size=1, max_size=3))
    cuts = data.draw(st.lists(st.lists(st.integers(0, 140), min_size=3, max_size=3), max_size=4))
    generator = torch.Generator().manual_seed(sum(lengths))
    inputs = [(torch.randn(n, width, generator=generator), torch.randn(n, width, generator=generator)) for n in lengths]
    entries = run(kind, inputs, [*cuts, [300] * 3])
    for (k, g), rows in zip(inputs, entries, strict=True):
        wanted = by_hand(k, g)
        assert len(rows) == len(wanted)
        if wanted:
            assert torch.allclose(torch.stack(rows).double(), torch.stack(wanted), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_gates_do_not_overflow(kind, shift, normal):
    _, _, width, by_hand = KINDS[kind]
    k, g = normal(256, width), 30 * normal(256, width, seed=1) + shift
    (entries,) = run(kind, [(k, g)], [[100]] * 3)
    assert torch.allclose(torch.stack(entries).double(), torch.stack(by_hand(k, g)), atol=1e-4)


def test_state_of_the_wrong_form_is_refused(normal):
    batch = RaggedBatch.build([(0, 2)], slots=[0], block_tables=[[]])
    with pytest.raises(ValueError, match="wanted 3 fp32 rows"):
        compress_hca(normal(2, DIM), normal(2, DIM), batch, state_rows(16, DIM))
    with pytest.raises(ValueError, match="float32"):
        compress_hca(normal(3, DIM), normal(3, DIM), batch, state_rows(3, DIM))
