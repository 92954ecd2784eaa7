"""Shard: which part of the model a rank of a tensor-parallel group holds.

Attention heads with their output groups, the inner dimension of experts, and rows of the head are cut into equal parts,
in order. All else (latents, compressors, indexer, gate, norms, hyper-connections, embedding) every rank has whole: its
bytes are few, and a rank then knows every token's entries and routing without an exchange. No torch here.
"""

from __future__ import annotations

import msgspec

from engine.model.config import DeepSeekV4Config


class Shard(msgspec.Struct, frozen=True):
    """Part `index` of `count`."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that "index/count" names, the whole for "". Raises ValueError."""
        if not text:
            return cls()
        index, _, count = text.partition("/")
        if not (index.strip().isdecimal() and count.strip().isdecimal() and int(index) < int(count)):
            raise ValueError(f"{text!r} is no part of a group; wanted index/count, such as 0/4")
        return cls(int(index), int(count))

    def of(self, config: DeepSeekV4Config) -> DeepSeekV4Config:
        """Return the config of what this rank computes; its vocabulary stays whole, see `head_rows`.

        Raises ValueError for a size that can't be cut into `count` equal parts.
        """
        cut = ("num_attention_heads", "o_groups", "moe_intermediate_size")
        for name in (*cut, "vocab_size"):
            if getattr(config, name) % self.count:
                raise ValueError(
                    f"{name} {getattr(config, name)} of the model can't be cut into {self.count} equal parts; choose a "
                    "number of ranks that divides it"
                )
        return msgspec.structs.replace(config, **{name: getattr(config, name) // self.count for name in cut})

    def head_rows(self, config: DeepSeekV4Config) -> int:
        """Return how many rows of the head, tokens of the vocabulary, this rank scores."""
        return config.vocab_size // self.count
