"""Shard: which part of the model a rank of a group holds, and how each tensor is cut for it.

Attention heads with their output groups, the inner dimension of experts, and rows of the head are cut into equal parts,
in order. All else (latents, compressors, indexer, gate, norms, hyper-connections, embedding) every rank has whole: its
bytes are few, and a rank then knows every token's entries and routing without an exchange.

By expert: routed experts stay whole, and a rank has some of them; the shared expert is cut as ever. Which is better is
engine/expert_cut.py's to say. No torch here.
"""

from __future__ import annotations

import msgspec

from engine.model.config import DeepSeekV4Config

WHOLE = slice(None)
TILE = 128  # rows and columns of an e4m3 matrix that share a scale
_ROWS = (".attn_sink", ".attn.wq_b.weight", ".attn.wo_a.weight", ".w1.weight", ".w3.weight")
_COLUMNS = (".attn.wo_b.weight", ".w2.weight")


class Shard(msgspec.Struct, frozen=True):
    """Part `index` of `count`.   by_expert: of the routed experts, whole ones."""

    index: int = 0
    count: int = 1
    by_expert: bool = False

    @classmethod
    def parse(cls, text: str, *, by_expert: bool = False) -> Shard:
        """Return the shard that "index/count" names, the whole for "". Raises ValueError."""
        if not text:
            return cls()
        index, _, count = text.partition("/")
        if not (index.strip().isdecimal() and count.strip().isdecimal() and int(index) < int(count)):
            raise ValueError(f"{text!r} is no part of a group; wanted index/count, such as 0/4")
        return cls(int(index), int(count), by_expert)

    def of(self, config: DeepSeekV4Config) -> DeepSeekV4Config:
        """Return the config of what this rank computes, its vocabulary and experts whole: see `head_rows`, `experts`.

        moe_intermediate_size is that of the routed experts. Raises ValueError for a size that can't be cut into `count`
        equal parts.
        """
        cut = ["num_attention_heads", "o_groups", "moe_intermediate_size"]
        for name in (*cut, "vocab_size", *(["n_routed_experts"] if self.by_expert else [])):
            if getattr(config, name) % self.count:
                raise ValueError(
                    f"{name} {getattr(config, name)} of the model can't be cut into {self.count} equal parts; choose a "
                    "number of ranks that divides it"
                )
        if self.by_expert:
            cut.remove("moe_intermediate_size")
        return msgspec.structs.replace(config, **{name: getattr(config, name) // self.count for name in cut})

    def head_rows(self, config: DeepSeekV4Config) -> int:
        """Return how many rows of the head, tokens of the vocabulary, this rank scores."""
        return config.vocab_size // self.count

    def experts(self, config: DeepSeekV4Config) -> range:
        """Return which routed experts this rank holds, whole or a slice of each."""
        if not self.by_expert:
            return range(config.n_routed_experts)
        each = config.n_routed_experts // self.count
        return range(self.index * each, (self.index + 1) * each)

    def cut(self, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return which rows and columns of a tensor, by its official name and whole shape, this rank computes with."""
        is_whole = ".indexer." in name or (self.by_expert and ".experts." in name)
        if not is_whole and (name.endswith(_ROWS) or name == "head.weight"):
            return (self._slice(shape[0]), *(WHOLE,) * (len(shape) - 1))
        if not is_whole and name.endswith(_COLUMNS):
            return WHOLE, self._slice(shape[1])
        return (WHOLE,) * len(shape)

    def _slice(self, size: int) -> slice:
        if self.count == 1:
            return WHOLE
        return slice(self.index * size // self.count, (self.index + 1) * size // self.count)


def cut_shape(shape: tuple[int, ...], slices: tuple[slice, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor of `shape` at `slices`."""
    return tuple(len(range(*at.indices(size))) for size, at in zip(shape, slices, strict=True))


def tiles_of(part: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """Return which of a matrix's scales, one for each tile of 128 x 128, belong to a part of it.

    A part may begin within a tile if it ends there, too: it keeps that tile's scale. None for one that begins within a
    tile and goes on: no grid of tiles of its own has its values.
    """
    tiles = []
    for at, size in zip(part, shape, strict=True):
        start, stop, _ = at.indices(size)
        first, last = start // TILE, -(-stop // TILE)
        if start % TILE and last - first > 1:
            return None
        tiles.append(slice(first, last))
    return tuple(tiles)
