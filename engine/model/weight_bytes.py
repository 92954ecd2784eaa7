"""weight_bytes: what the weights of one rank take in its memory, counted from the config, before anything is loaded.

As they lie there, which is not always how they are stored: routed experts packed in four bits, linear layers as e4m3
with a float32 scale per tile, what must stay float32 as that, unless it is bfloat16 in checkpoints (layers.narrow). It
follows tensor_specs.py; where no decode kernels run, all is dequantised to the compute dtype. No torch here.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

from engine.model.config import DeepSeekV4Config
from engine.model.shard import Shard, tiles_of
from engine.model.tensor_specs import tensor_specs

Group = Literal["experts", "attention", "compressors", "hyper-connections", "gate", "embedding", "head", "rest"]

_WIDTH = {"float32": 4, "bfloat16": 2}
_E4M3_TILE = 128
# What kernels.expert_weights packs: whole tiles of rows and channels, and values that share a byte of scale.
_PACKED_ROWS, _PACKED_CHANNELS = 16, 64
_PACKED_GROUP = {"nvfp4": 16, "mxfp4": 32}
# Matrices that checkpoints never quantise.
_NEVER_E4M3 = ("embed.weight", "weights_proj.weight")
# Matrices of which the model keeps bfloat16, since checkpoints have no more of them.
_NARROW = (
    "compressor.wkv.weight",
    "compressor.wgate.weight",
    "weights_proj.weight",
    ".gate.weight",
    "q_norm.weight",
    "head.weight",
)


class WeightBytes(NamedTuple):
    """parts: bytes by group of tensors.   experts, matrices: the form in which these lie in memory."""

    parts: dict[Group, int]
    experts: str
    matrices: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@functools.lru_cache(maxsize=16)
def count_weights(
    model: DeepSeekV4Config, shard: Shard, *, dtype: Literal["float32", "bfloat16"], keeps_packed: bool
) -> WeightBytes:
    """Return the bytes that a rank's weights take, once its model is built.

    model: the whole one.   keeps_packed: as in load_weights: whether decode kernels run there. Raises ValueError for a
    model that can't be cut into so many parts.
    """
    part = shard.of(model)
    is_packed = keeps_packed and model.stored_experts in _PACKED_GROUP and fits_tiles(part)
    is_tiled = model.stored_matrices == "fp8" and tuple(model.weight_block_size) == (_E4M3_TILE, _E4M3_TILE)
    is_e4m3 = keeps_packed and is_tiled
    parts: dict[Group, int] = {}
    whole = tensor_specs(model)
    for name, spec in tensor_specs(model, shard).items():
        values = math.prod(spec.shape)
        if spec.kind == "ids":
            size = 8 * values
        elif name.endswith(_NARROW):
            size = 2 * values
        elif spec.kind == "float32":
            size = 4 * values
        elif ".experts." in name and is_packed:
            size = values // 2 + values // _PACKED_GROUP[model.stored_experts] + 4  # codes, scales, one float32 factor
        elif ".experts." not in name and is_e4m3 and _stays_e4m3(shard, name, whole[name].shape):
            size = values + 4 * math.prod(-(-extent // _E4M3_TILE) for extent in spec.shape)
        else:
            size = _WIDTH[dtype] * values
        group = _group_of(name)
        parts[group] = parts.get(group, 0) + size
    return WeightBytes(parts, model.stored_experts if is_packed else dtype, "e4m3" if is_e4m3 else dtype)


def _stays_e4m3(shard: Shard, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a rank's part of a matrix, of this whole shape, is kept in e4m3."""
    return not name.endswith(_NEVER_E4M3) and tiles_of(shard.cut(name, shape), shape) is not None


def fits_tiles(part: DeepSeekV4Config) -> bool:
    """Return whether the kernels' order can hold this rank's experts; if not, they are dequantised."""
    hidden, inner = part.hidden_size, part.moe_intermediate_size
    is_whole = (2 * inner) % _PACKED_ROWS == hidden % _PACKED_ROWS == 0
    return is_whole and hidden % _PACKED_CHANNELS == inner % _PACKED_CHANNELS == 0


def _group_of(name: str) -> Group:
    if name in ("embed.weight", "head.weight"):
        return "embedding" if name == "embed.weight" else "head"
    for mark, group in _GROUPS:
        if mark in name:
            return group
    return "rest"


_GROUPS: tuple[tuple[str, Group], ...] = (
    ("experts.", "experts"),  # routed and shared
    ("compressor.", "compressors"),
    (".attn.", "attention"),
    (".gate.", "gate"),
    ("hc_", "hyper-connections"),
)
