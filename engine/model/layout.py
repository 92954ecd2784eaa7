"""build_layout: from the model's config to the bytes of its cache. The only bridge between model and transfer.

Blocks (one id valid in all three groups, `block_tokens` tokens each):
    csa_kv     ratio-4 layers,   block_tokens/4 rows of head_dim
    csa_index  ratio-4 layers,   block_tokens/4 index keys of index_head_dim
    hca_kv     ratio-128 layers, block_tokens/128 rows of head_dim
One slot per running sequence, group `state`:
    window       every layer, sliding_window rows of head_dim: a ring by position mod sliding_window
    csa_state    ratio-4 layers, 16 fp32 rows of 2*head_dim: row 2*(position mod 8) the compressor's K, the next its G
    index_state  the same for the indexer's compressor, 2*index_head_dim wide
    hca_state    ratio-128 layers, 3 fp32 rows of head_dim: running max, sum of weights, weighted sum (online softmax)

Layers are numbered inside a region in the order of `DeepSeekV4Config.layers_of`. No torch here.
"""

from __future__ import annotations

import math
from typing import Literal

from engine.model.config import CSA_RATIO, HCA_RATIO, DeepSeekV4Config
from kv_transfer.layout import ROPE_CHANNELS, CacheGroup, KVLayout, RowFormat, make_group

CSA_STATE_POSITIONS = 2 * CSA_RATIO
HCA_STATE_ROWS = 3


def build_layout(
    model: DeepSeekV4Config,
    *,
    block_tokens: int,
    kv_cache_dtype: Literal["fp32", "bf16", "packed"],
    index_cache_dtype: Literal["fp8", "fp4"],
) -> KVLayout:
    """Return the cache geometry. index_cache_dtype counts for packed rows only; index keys are stored as kv rows else.

    Raises ValueError if block_tokens is no multiple of every compression ratio, or packed rows don't fit the head size.
    """
    _check_block_tokens(model, block_tokens)
    kv: RowFormat = kv_cache_dtype
    index: RowFormat = kv
    if kv_cache_dtype == "packed":
        if model.qk_rope_head_dim != ROPE_CHANNELS:
            raise ValueError(
                f"packed rows keep {ROPE_CHANNELS} rope channels, this model has qk_rope_head_dim "
                f"{model.qk_rope_head_dim}: use kv_cache_dtype bf16"
            )
        index = "fp8_index" if index_cache_dtype == "fp8" else "fp4_index"
    csa, hca = len(model.layers_of(CSA_RATIO)), len(model.layers_of(HCA_RATIO))
    head, index_head = model.head_dim, model.index_head_dim
    csa_rows, hca_rows = block_tokens // CSA_RATIO, block_tokens // HCA_RATIO
    state_rows = 2 * CSA_STATE_POSITIONS
    groups: list[CacheGroup] = [
        make_group("csa_kv", "block", [("csa_kv", csa, csa_rows, kv, head)]),
        make_group("csa_index", "block", [("csa_index", csa, csa_rows, index, index_head)]),
        make_group("hca_kv", "block", [("hca_kv", hca, hca_rows, kv, head)]),
        make_group(
            "state",
            "slot",
            [
                ("window", model.num_hidden_layers, model.sliding_window, kv, head),
                ("csa_state", csa, state_rows, "fp32", 2 * head),
                ("index_state", csa, state_rows, "fp32", 2 * index_head),
                ("hca_state", hca, HCA_STATE_ROWS, "fp32", head),
            ],
        ),
    ]
    return KVLayout(block_tokens=block_tokens, groups=tuple(g for g in groups if g.regions))


def _check_block_tokens(model: DeepSeekV4Config, block_tokens: int) -> None:
    ratios = sorted({r for r in model.compress_ratios if r})
    step = math.lcm(*ratios)
    if block_tokens <= 0 or block_tokens % step:
        nearest = max(step, round(block_tokens / step) * step)
        raise ValueError(
            f"block size {block_tokens} tokens: must be a positive multiple of {step} "
            f"(compression ratios {', '.join(map(str, ratios)) or 'none'}); try {nearest}"
        )
