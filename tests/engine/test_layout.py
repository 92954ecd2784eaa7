"""Cache geometry: the published byte counts of V4-Flash, and what is refused."""

import msgspec
import pytest

from engine.model.config import DeepSeekV4Config, YarnScaling
from engine.model.layout import build_layout

FLASH = DeepSeekV4Config(
    vocab_size=129280,
    hidden_size=4096,
    num_hidden_layers=43,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(0, 0, *(4, 128) * 20, 4),
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_scaling=YarnScaling(factor=16, original_max_position_embeddings=65536),
    max_position_embeddings=1 << 20,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=512,
    n_routed_experts=256,
    num_experts_per_tok=6,
    moe_intermediate_size=2048,
    num_hash_layers=3,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
)


def layout(kv="packed", index="fp8", block=256, model=FLASH):
    return build_layout(model, block_tokens=block, kv_cache_dtype=kv, index_cache_dtype=index)


def unit_bytes(built, name):
    group = built.group(name)
    assert group is not None
    return group.unit_bytes


@pytest.mark.parametrize(("index", "index_row"), [("fp8", 132), ("fp4", 68)])
def test_packed_history_of_flash_takes_the_published_bytes(index, index_row):
    built = layout(index=index)
    assert unit_bytes(built, "csa_kv") == 21 * 64 * 584
    assert unit_bytes(built, "csa_index") == 21 * 64 * index_row
    assert unit_bytes(built, "hca_kv") == 20 * 2 * 584
    # 3850.25 (fp8 index) and 3514.25 (fp4 index) bytes a token
    assert built.block_bytes / 256 == {"fp8": 3850.25, "fp4": 3514.25}[index]


def test_packed_state_of_flash_takes_the_published_bytes():
    state = layout().group("state")
    assert state is not None
    assert state.region("window").num_bytes == 3_214_336
    assert state.region("hca_state").num_bytes == 122_880
    # eight positions of K and G, attention and indexer: 10,240 bytes a position and layer
    both = state.region("csa_state").num_bytes + state.region("index_state").num_bytes
    assert both == 21 * 8 * 10_240
    assert state.unit_bytes == 3_214_336 + 122_880 + both


def test_bf16_rows_take_two_bytes_a_channel_index_keys_included():
    built = layout(kv="bf16")
    assert unit_bytes(built, "csa_kv") == 21 * 64 * 1024
    assert unit_bytes(built, "csa_index") == 21 * 64 * 256


@pytest.mark.parametrize("kv", ["fp32", "bf16", "packed"])
def test_rows_and_regions_start_on_16_bytes(kv):
    for group in layout(kv=kv).groups:
        assert group.unit_bytes % 16 == 0
        for region in group.regions:
            assert region.offset % 16 == 0
            if region.format != "fp8_index":
                assert region.layer_bytes % 16 == 0


@pytest.mark.parametrize("change", [{"kv": "bf16"}, {"kv": "fp32"}, {"index": "fp4"}, {"block": 128}])
def test_every_storage_choice_has_its_own_fingerprint(change):
    assert layout(**change).fingerprint() != layout().fingerprint()


def test_groups_without_layers_are_left_out():
    plain = msgspec.structs.replace(FLASH, num_hidden_layers=2, compress_ratios=(0, 0), num_hash_layers=0)
    assert [g.name for g in layout(model=plain, block=64).groups] == ["state"]
    pro = msgspec.structs.replace(FLASH, num_hidden_layers=61, compress_ratios=(128, 128, *(4, 128) * 29, 4))
    state = layout(model=pro).group("state")
    assert state is not None
    assert state.region("hca_state").layers == 31


@pytest.mark.parametrize(("block", "suggestion"), [(192, "256"), (0, "128"), (-256, "128"), (130, "128")])
def test_block_size_that_splits_a_compressed_row_is_refused_with_a_suggestion(block, suggestion):
    with pytest.raises(ValueError, match=rf"block size {block} tokens.*multiple of 128.*try {suggestion}$"):
        layout(block=block)


def test_packed_rows_need_64_rope_channels():
    odd = msgspec.structs.replace(FLASH, qk_rope_head_dim=32)
    with pytest.raises(ValueError, match="qk_rope_head_dim 32"):
        layout(model=odd)
