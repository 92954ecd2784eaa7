"""Norm, rope, linear layers, hyper-connections, experts and cache writes against plain loops in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from kernels.cache_write import write_entries, write_window
from kernels.gemm import grouped_linear, linear
from kernels.hyper_connection import hc_head, hc_post, hc_pre
from kernels.moe import expert_scores, experts, gated_mlp, route
from kernels.norm_rope import rms_norm, rope, rotation_at
from kernels.quant import quantize_e4m3
from kernels.ragged import RaggedBatch


def test_rms_norm_matches_its_formula(normal):
    x, w = normal(5, 64), normal(64, seed=1)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
    assert torch.allclose(rms_norm(x, w, eps=1e-6).double(), wanted, atol=1e-6)
    assert rms_norm(torch.zeros(1, 64), eps=1e-6).abs().max() == 0
    with pytest.raises(ValueError, match="64 channels"):
        rms_norm(x, w[:32], eps=1e-6)


def test_rope_turns_adjacent_pairs_of_the_tail_only(normal):
    x = normal(3, 2, 10)
    positions, frequencies = torch.tensor([0, 5, 900000]), torch.tensor([1.0, 0.01, 1e-4])
    y = rope(x, rotation_at(positions, frequencies))
    assert torch.equal(y[..., :4], x[..., :4])
    for t, position in enumerate(positions.tolist()):
        for i, f in enumerate(frequencies):
            a, b = x[t, :, 4 + 2 * i], x[t, :, 5 + 2 * i]
            angle = float(torch.tensor(float(position)) * f)
            assert torch.allclose(y[t, :, 4 + 2 * i], a * math.cos(angle) - b * math.sin(angle), atol=1e-5)
            assert torch.allclose(y[t, :, 5 + 2 * i], a * math.sin(angle) + b * math.cos(angle), atol=1e-5)


def test_the_conjugate_rotation_turns_back(normal):
    x, rotation = normal(4, 3, 16), rotation_at(torch.arange(4) * 1000, torch.tensor([1.0, 0.1]))
    assert torch.allclose(rope(rope(x, rotation), rotation.conj()), x, atol=1e-6)
    flat = rope(x[:, 0], rotation)
    assert torch.equal(flat, rope(x, rotation)[:, 0])


def test_block_scaled_linear_equals_the_dequantised_one(normal):
    weight = normal(256, 384)
    tiles = weight.view(2, 128, 3, 128).transpose(1, 2).reshape(6, -1)
    codes, scale = quantize_e4m3(tiles, 128 * 128)
    codes = codes.view(2, 3, 128, 128).transpose(1, 2).reshape(256, 384)
    x = normal(5, 384, seed=1)
    exact = x.double() @ (codes.double() * scale.view(2, 3).double().kron(torch.ones(128, 128).double())).T
    assert torch.allclose(linear(x, codes, scale.view(2, 3)).double(), exact, atol=1e-3)
    with pytest.raises(ValueError, match="without a scale"):
        linear(x, codes)


def test_grouped_linear_gives_each_group_its_own_matrix(normal):
    x, w = normal(4, 3, 8), normal(3, 5, 8, seed=1)
    y = grouped_linear(x, w)
    for g in range(3):
        assert torch.allclose(y[:, g], x[:, g] @ w[g].T, atol=1e-5)
    with pytest.raises(ValueError, match="don't fit"):
        grouped_linear(x, w[:2])


def mixing(normal, n=4, hidden=16, tokens=3):
    outputs = (2 + n) * n
    return (
        normal(tokens, n, hidden),
        normal(outputs, n * hidden, seed=1) / 8,
        normal(outputs, seed=2),
        normal(3, seed=3),
    )


def test_hyper_connection_matches_its_formula_token_by_token(normal):
    streams, fn, base, scale = mixing(normal)
    x, post, comb = hc_pre(streams, fn, base, scale, eps=1e-6, norm_eps=1e-6, iters=20)
    y = normal(3, 16, seed=5)
    after = hc_post(y, streams, post, comb)
    for t in range(3):
        flat = streams[t].double().flatten()
        mix = fn.double() @ flat / (flat.square().mean() + 1e-6).sqrt()
        b, s = base.double(), scale.double()
        pre = torch.sigmoid(mix[:4] * s[0] + b[:4]) + 1e-6
        m = torch.softmax((mix[8:] * s[2] + b[8:]).view(4, 4), -1) + 1e-6
        m = m / (m.sum(0, keepdim=True) + 1e-6)
        for _ in range(19):
            m = m / (m.sum(1, keepdim=True) + 1e-6)
            m = m / (m.sum(0, keepdim=True) + 1e-6)
        assert torch.allclose(x[t].double(), sum(pre[j] * streams[t, j].double() for j in range(4)), atol=1e-5)
        gain = 2 * torch.sigmoid(mix[4:8] * s[1] + b[4:8])
        for k in range(4):
            wanted = gain[k] * y[t].double() + sum(m[j, k] * streams[t, j].double() for j in range(4))
            assert torch.allclose(after[t, k].double(), wanted, atol=1e-5)


def test_mixing_matrices_are_doubly_stochastic_and_head_collapses_with_pre(normal):
    streams, fn, base, scale = mixing(normal)
    x, _, comb = hc_pre(streams, fn, base, scale, eps=1e-6, norm_eps=1e-6, iters=20)
    assert torch.allclose(comb.sum(1), torch.ones(3, 4), atol=1e-4)
    assert torch.allclose(comb.sum(2), torch.ones(3, 4), atol=1e-2)
    head = hc_head(streams, fn[:4], base[:4], scale[:1], eps=1e-6, norm_eps=1e-6)
    assert torch.allclose(head, x, atol=1e-6)
    with pytest.raises(ValueError, match="wanted fn"):
        hc_head(streams, fn, base, scale, eps=1e-6, norm_eps=1e-6)


def test_streams_keep_their_dtype(normal):
    streams, fn, base, scale = mixing(normal)
    _, post, comb = hc_pre(streams.bfloat16(), fn, base, scale, eps=1e-6, norm_eps=1e-6, iters=3)
    assert post.dtype == comb.dtype == torch.float32
    assert hc_post(normal(3, 16), streams.bfloat16(), post, comb).dtype == torch.bfloat16


def test_bias_chooses_experts_but_does_not_weigh_them(normal):
    scores, bias = torch.tensor([[0.9, 0.8, 0.7, 0.1]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    ids, weights = route(scores, bias=bias, top_k=2, scaling=1.5)
    assert ids.tolist() == [[3, 0]]
    assert torch.allclose(weights, torch.tensor([[0.1, 0.9]]) * 1.5)


def test_hash_routing_takes_the_table_s_experts_with_their_own_scores():
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.1]])
    ids, weights = route(scores, chosen=torch.tensor([[3, 1]]), top_k=2, scaling=1.0)
    assert ids.tolist() == [[3, 1]]
    assert torch.allclose(weights, torch.tensor([[1 / 9, 8 / 9]]))


def test_equal_scores_go_to_the_lower_experts():
    ids, _ = route(torch.full((1, 6), 0.5), top_k=3, scaling=1.0)
    assert ids.tolist() == [[0, 1, 2]]


def test_expert_scores_are_root_softplus(normal):
    x, gate = normal(4, 8) * 30, normal(6, 8, seed=1)
    wanted = torch.log1p(torch.exp(x.double() @ gate.double().T)).sqrt()
    assert torch.allclose(expert_scores(x, gate).double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_experts_equal_a_loop_over_tokens_with_both_clamps(tokens, normal):
    x, w13, w2 = 3 * normal(tokens, 8), normal(5, 12, 8, seed=1), normal(5, 8, 6, seed=2)
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(t))[:2] for t in range(tokens)])
    weights = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(9))
    out = experts(x, w13, w2, ids, weights, limit=1.5)
    assert (x @ w13[0, :6].T).max() > 1.5, "the clamp must bite"
    for t in range(tokens):
        wanted = torch.zeros(8).double()
        for e, g in zip(ids[t].tolist(), weights[t], strict=True):
            h = x[t].double() @ w13[e].double().T
            wanted += (F.silu(h[:6].clamp(max=1.5)) * h[6:].clamp(-1.5, 1.5) * g) @ w2[e].double().T
        assert torch.allclose(out[t].double(), wanted, atol=1e-5)
    single = gated_mlp(x, w13[2], w2[2], limit=1.5)
    alone = experts(x, w13, w2, torch.full((tokens, 1), 2), torch.ones(tokens, 1), limit=1.5)
    assert torch.allclose(single, alone, atol=1e-5)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_the_window_ring_keeps_the_last_rows_at_position_mod_size(length, make_rows, normal):
    window, kv = make_rows("fp32", 64, units=3, rows=16), normal(length, 64)
    write_window(kv, RaggedBatch.build([(7, length)], slots=[2], block_tables=[[]]), window)
    held = {p % 16: p for p in range(7, 7 + length)}
    for row in range(16):
        stored = window.read(torch.tensor([2]), torch.tensor([row]))[0]
        if row in held:
            assert torch.equal(stored, kv[held[row] - 7])
        else:
            assert bool(stored.isnan().all())
    assert bool(window.read(torch.tensor([0, 1]), torch.tensor([0, 0])).isnan().all())


def test_entries_go_to_the_blocks_of_their_sequence(make_rows, normal):
    pool = make_rows("fp32", 64, units=6, rows=2)
    batch = RaggedBatch.build([(6, 10), (0, 3), (0, 5)], slots=[0, 1, 2], block_tables=[[4, 1], [0], [5]])
    rows = normal(4, 64)
    write_entries(rows, batch, 4, pool)
    for (unit, row), wanted in zip([(4, 1), (1, 0), (1, 1), (5, 0)], rows, strict=True):
        assert torch.equal(pool.read(torch.tensor([unit]), torch.tensor([row]))[0], wanted)
    assert bool(pool.read(torch.tensor([4, 0, 5]), torch.tensor([0, 0, 1])).isnan().all())
    with pytest.raises(ValueError, match="for 4 entries"):
        write_entries(rows[:3], batch, 4, pool)
