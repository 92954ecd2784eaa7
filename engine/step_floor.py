"""StepFloor: the bytes and operations that a step can't do without, part by part. Arithmetic only, no torch.

Counted are the weights that a rank must read, each once, and the cache rows that its batch attends; of experts the
number of distinct ones that a batch takes if each token chooses at random. Not counted: activations, logits, the rows
that are written, and what launches and dependences cost. A decode step that reaches its floor does nothing but read.
A chunk of a prompt multiplies more than it reads. Of its activations the streams count: each sublayer reads and writes
them, and they are too many for a cache.

Every rank of a tensor-parallel group reads its share of what is cut (q_b, o_a, o_b, experts, head) and all of the rest:
the cache has one head, indexer and compressors are whole everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

from engine.config import EngineConfig
from engine.model.config import CSA_RATIO, HCA_RATIO, DeepSeekV4Config
from engine.model.weight_bytes import count_weights
from engine.served_model import shard_of
from engine.step_work import StepWork, chunk_work, decode_work
from kv_transfer.layout import KVLayout

NVFP4_BYTES = 0.5 + 1 / 16  # a code of four bits, a scale byte for 16
MXFP4_BYTES = 0.5 + 1 / 32
_BYTES = {"nvfp4": NVFP4_BYTES, "mxfp4": MXFP4_BYTES, "e4m3": 1.0, "bfloat16": 2.0, "float32": 4.0}


class Ceilings(Protocol):
    """What a device can reach at most; kernels.gpu_timer.Device is one. Bytes and operations a second."""

    @property
    def bandwidth(self) -> float: ...

    @property
    def bf16(self) -> float: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Bytes of an element of each kind of weight, and of a cached row; by default those of an NVFP4 checkpoint."""

    linear: float = 1.0
    compressor: float = 2.0
    gate: float = 2.0
    mixer: float = 4.0
    stream: float = 2.0
    head: float = 2.0
    expert: float = NVFP4_BYTES
    kv_row: int = 584
    index_row: int = 132


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One part of a step. calls: how often a step comes by it.   num_bytes, flops: of all calls together.

    reads: weights of each matrix and keys that its kernels go through, by the names of kernels.instructions. Channels
    of streams count once for up to 16 tokens.
    """

    name: str
    calls: int
    num_bytes: float
    flops: float
    reads: dict[str, float] = dataclasses.field(default_factory=dict)

    def floor_us(self, device: Ceilings) -> float:
        """Return the microseconds of a step below which the part can't be: the longer of reading and computing."""
        return 1e6 * max(self.num_bytes / device.bandwidth, self.flops / device.bf16)


class StepFloor:
    """The floor of a rank's steps. model: whole in width, the layers that run.   shards: ranks of the group."""

    def __init__(self, model: DeepSeekV4Config, formats: Formats, *, shards: int = 1) -> None:
        """Raises ValueError for a group without ranks."""
        if shards < 1:
            raise ValueError(f"shards {shards}: a group has at least one rank")
        self.model, self.formats, self.shards = model, formats, shards
        self._ratios = model.compress_ratios

    def distinct_experts(self, tokens: float) -> float:
        """Return how many experts of a layer `tokens` tokens take on average, if each chooses at random."""
        experts, chosen = self.model.n_routed_experts, self.model.num_experts_per_tok
        return float(experts * (1 - (1 - chosen / experts) ** tokens))

    def parts(self, batch: float, context: float) -> list[Part]:
        """Return all parts of a step of `batch` sequences, one token each, that have `context` tokens on average."""
        return self._parts(decode_work(self.model, batch, context))

    def chunk_parts(self, start: int, tokens: int, *, logits: int = 0) -> list[Part]:
        """Return all parts of a step of `tokens` tokens of a prompt from `start` on. logits: tokens that have some."""
        return self._parts(chunk_work(self.model, start, tokens, logits=logits))

    def ms(self, batch: float, context: float, device: Ceilings) -> float:
        """Return the floor of a step in milliseconds."""
        return sum(part.floor_us(device) for part in self.parts(batch, context)) / 1000

    def _parts(self, work: StepWork) -> list[Part]:
        return [
            self._hyper_connections(work),
            self._projections(work.tokens),
            self._indexer(work),
            self._attention(work),
            self._output(work.tokens),
            self._gate(work.tokens),
            self._shared_expert(work.tokens),
            self._routed_experts(work.tokens),
            self._head(work.logits),
        ]

    def _layers(self, ratio: int) -> int:
        return self._ratios.count(ratio)

    def _hyper_connections(self, work: StepWork) -> Part:
        m, calls = self.model, 2 * len(self._ratios)
        size = calls * m.hc_mult * m.hidden_size * (2 + m.hc_mult) * m.hc_mult
        channels = calls * m.hidden_size * math.ceil(work.tokens / 16)
        streams = 2 * calls * work.streamed * m.hc_mult * m.hidden_size * self.formats.stream
        return Part(
            "hyper-connections",
            calls,
            size * self.formats.mixer + streams,
            2 * work.tokens * size,
            {"stream channels": channels},
        )

    def _projections(self, batch: float) -> Part:
        """Return all products before attention: queries, kv rows, compressors, index queries and their weights."""
        m, layers, csa, hca = self.model, len(self._ratios), self._layers(CSA_RATIO), self._layers(HCA_RATIO)
        queries = layers * (m.q_lora_rank * m.num_attention_heads * m.head_dim / self.shards)
        queries += csa * m.q_lora_rank * m.index_n_heads * m.index_head_dim
        down = layers * m.hidden_size * (m.q_lora_rank + m.head_dim)
        wide = (csa * 4 + hca * 2) * m.hidden_size * m.head_dim
        wide += csa * m.hidden_size * (4 * m.index_head_dim + m.index_n_heads)
        return Part(
            "projections",
            layers,
            (queries + down) * self.formats.linear + wide * self.formats.compressor,
            2 * batch * (queries + down + wide),
            {"q_b, index q": queries, "q_a, kv": down, "compressors": wide},
        )

    def _indexer(self, work: StepWork) -> Part:
        m, calls = self.model, self._layers(CSA_RATIO)
        products, rows = calls * work.index.products, calls * work.index.rows
        flops = products * m.index_n_heads * m.index_head_dim * 2
        return Part("indexer", calls, rows * self.formats.index_row, flops, {"index keys": products})

    def _attention(self, work: StepWork) -> Part:
        m, layers = self.model, len(self._ratios)
        kinds = ((layers, work.window), (self._layers(CSA_RATIO), work.csa), (self._layers(HCA_RATIO), work.hca))
        products, rows = (sum(n * getattr(keys, name) for n, keys in kinds) for name in ("products", "rows"))
        flops = products * m.num_attention_heads / self.shards * 4 * m.head_dim
        return Part("attention", layers, rows * self.formats.kv_row, flops, {"keys": products})

    def _output(self, batch: float) -> Part:
        m, layers = self.model, len(self._ratios)
        first = layers * m.o_lora_rank * m.num_attention_heads * m.head_dim / self.shards
        last = layers * m.o_lora_rank * m.o_groups * m.hidden_size / self.shards
        size = first + last
        return Part("output", layers, size * self.formats.linear, 2 * batch * size, {"o_a": first, "o_b": last})

    def _gate(self, batch: float) -> Part:
        m, layers = self.model, len(self._ratios)
        size = layers * m.hidden_size * m.n_routed_experts
        return Part("gate", layers, size * self.formats.gate, 2 * batch * size)

    def _expert(self) -> float:
        """Return the elements of one expert's share in all layers."""
        return len(self._ratios) * 3 * self.model.hidden_size * self.model.moe_intermediate_size / self.shards

    def _shared_expert(self, batch: float) -> Part:
        size = self._expert()
        reads = {"shared expert, up": size * 2 / 3, "shared expert, down": size / 3}
        return Part("shared expert", len(self._ratios), size * self.formats.linear, 2 * batch * size, reads)

    def _routed_experts(self, batch: float) -> Part:
        size, chosen = self._expert(), self.model.num_experts_per_tok
        weights = self.distinct_experts(batch) * size
        reads = {"experts, up": weights * 2 / 3, "experts, down": weights / 3}
        flops = 2 * batch * chosen * size
        return Part("routed experts", len(self._ratios), weights * self.formats.expert, flops, reads)

    def _head(self, batch: float) -> Part:
        size = self.model.vocab_size * self.model.hidden_size / self.shards if batch else 0.0
        return Part("head", 1, size * self.formats.head, 2 * batch * size, {"head": size})


def formats_of(config: EngineConfig, model: DeepSeekV4Config, layout: KVLayout, *, keeps_packed: bool) -> Formats:
    """Return the formats of a group's weights, as they lie in memory, and of its cache.

    keeps_packed: whether decode kernels run there; elsewhere matrices are in the compute dtype.
    Compressors, gate and head count as the checkpoint has them, bf16, in whatever form they are kept.
    """
    shard = shard_of(config, model)
    counted = count_weights(model, shard, dtype=config.dtype, keeps_packed=keeps_packed)
    rows = {region.name: region.value_bytes + region.scale_bytes for g in layout.groups for region in g.regions}
    return Formats(
        linear=_BYTES[counted.matrices],
        expert=_BYTES[counted.experts],
        kv_row=rows["window"],
        index_row=rows.get("csa_index", 0),
    )
