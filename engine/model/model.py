"""DeepSeekV4: the forward pass, in the order of the report.

    S = embedding of each token, copied to n streams
    per layer:  x, post, C = hc_pre(S);  y = attention(rms(x));  S = hc_post(y, S, post, C);  the same with the experts
    logits = rms(hc_head(S)) head^T, float32

What lies between two sublayers, hc_post, hc_pre and the norm, is one operation (kernels/hyper_connection_decode.py).
A step is any mixture of sequences with any number of tokens each. What depends on earlier tokens lies in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from engine.model.attention import Attention, CacheViews, decode_batch
from engine.model.config import DeepSeekV4Config
from engine.model.group import Alone, Group
from engine.model.layers import Rotary, Rotations, Weights, hyper_connection, narrow
from engine.model.moe import MixtureOfExperts
from engine.model.parts import WeightPart, split_parts
from engine.model.placement import move_to
from kernels.expert_parts import ExpertParts
from kernels.gemm import linear
from kernels.gemm_decode import linear_decode
from kernels.hyper_connection_decode import Mixed, Mixer, mix, spread, spread_and_mix
from kernels.ragged import DecodeBatch, RaggedBatch
from kernels.table import counted
from kernels.triton_env import uses_triton

HEAD_ROWS = 64  # at most, for the kernel; of more, such as a prompt whose every token is asked for, torch's product
HEAD_WORDS = 1 << 14  # of the vocabulary, multiplied at once by torch

_Part = TypeVar("_Part")


class Layer:
    """Attention and experts, each between the two halves of a hyper-connection."""

    def __init__(
        self,
        weights: Weights,
        layer: int,
        config: DeepSeekV4Config,
        *,
        use_hadamard: bool,
        group: Group,
    ) -> None:
        prefix = f"layers.{layer}"
        self.attention_mix = hyper_connection(weights, f"{prefix}.hc_attn", f"{prefix}.attn_norm", config)
        self.attention = Attention(weights, layer, config, use_hadamard=use_hadamard, group=group)
        self.experts_mix = hyper_connection(weights, f"{prefix}.hc_ffn", f"{prefix}.ffn_norm", config)
        self.experts = MixtureOfExperts(weights, layer, config, group=group)

    def __call__(
        self,
        mixed: Mixed,
        token_ids: Tensor,
        batch: RaggedBatch | None,
        decode: DecodeBatch | None,
        rotations: Rotations,
        cache: CacheViews,
    ) -> tuple[Tensor | ExpertParts, Mixed]:
        """Return the experts' output [T, H], perhaps in parts, and where they began: what spreads it comes next."""
        y = self.attention(mixed.x, batch, decode, rotations, cache)
        mixed = spread_and_mix(y, mixed, self.experts_mix, sequence=decode.sequence if decode else None)
        return self.experts.parts(mixed.x, token_ids, decode), mixed


class DeepSeekV4:
    """The main model without draft blocks, in one compute dtype (that of the embedding).

    config: of the part that this rank computes.   weights: as load_weights returns them, emptied; or the parts that a
    WeightLoader yields, of which each is built before the next is asked for.   index_hadamard: rotate index queries and
    keys before rounding, where they are rounded at all.   group: ranks with the other parts.   device: where what is
    built is moved, None: it stays where it is.
    """

    def __init__(
        self,
        config: DeepSeekV4Config,
        weights: Weights | Iterable[WeightPart],
        *,
        index_hadamard: bool,
        group: Group | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.group = config, group or Alone()
        layers: dict[int, Layer] = {}
        for number, part in split_parts(weights) if isinstance(weights, dict) else weights:
            if number is None:
                self.embedding, self.head_mix, self.head = _move_to(device, self._ends(part))
            else:
                layer = Layer(part, number, config, use_hadamard=index_hadamard, group=self.group)
                layers[number] = _move_to(device, layer)
            assert not part, f"nobody took {sorted(part)[:5]}"
        self.layers = [layers[number] for number in range(config.num_hidden_layers)]
        self.rotary = _move_to(device, Rotary(config, torch.device("cpu") if device else self.embedding.device))

    def _ends(self, weights: Weights) -> tuple[Tensor, Mixer, Tensor]:
        """Take the embedding, what mixes streams before the head, and the head."""
        mixer = hyper_connection(weights, "hc_head", "norm", self.config)
        return weights.pop("embed.weight"), mixer, narrow(weights.pop("head.weight"))

    @property
    def uncapturable(self) -> str:
        """Return what of a decode step reads values back to the host, "" if nothing does and it may be captured."""
        loose = [layer for layer, each in enumerate(self.layers) if not each.experts.is_packed]
        if not loose:
            return ""
        return (
            f"the routed experts of {counted(len(loose), 'layer')} (layer {loose[0]} first) are not packed in four "
            "bits: sizes or values of this checkpoint do not allow it"
        )

    def forward(self, token_ids: Tensor, batch: RaggedBatch, cache: CacheViews) -> Tensor:
        """Return the streams [T, n, H] after the last layer for token_ids [T] int64, and update the cache."""
        decode = decode_batch(batch, cache)
        if decode is not None:
            return self.chunk(token_ids, decode, self.rotary.of_tokens(batch.positions), cache)
        return spread(*self._layers(token_ids, batch, None, self.rotary.at(batch), cache))

    def chunk(self, token_ids: Tensor, batch: DecodeBatch, rotations: Rotations, cache: CacheViews) -> Tensor:
        """The same with kernels, whatever the step consists of: nothing is read back, it may be captured.

        rotations: as Rotary.of_tokens makes them.
        """
        y, mixed = self._layers(token_ids, None, batch, rotations, cache)
        return spread(y, mixed, sequence=batch.sequence)

    def decode(self, token_ids: Tensor, batch: DecodeBatch, rotations: Rotations, cache: CacheViews) -> Tensor:
        """Return the normed input [T, H] float32 of the head for token_ids [T] int64 with decode kernels; see forward.

        rotations: as Rotary.of_tokens makes them. Nothing is read back: the step may be captured.
        """
        y, mixed = self._layers(token_ids, None, batch, rotations, cache)
        return spread_and_mix(y, mixed, self.head_mix, sequence=batch.sequence).x

    def logits(self, streams: Tensor) -> Tensor:
        """Return [N, num_scored] float32 for the streams [N, n, H] of the tokens that need them."""
        return self.head_logits(mix(streams, self.head_mix).x)

    @property
    def num_scored(self) -> int:
        """Tokens of the vocabulary that logits score: all of them, of every rank's rows of the head."""
        return int(self.head.shape[0]) * self.group.count

    def head_logits(self, x: Tensor) -> Tensor:
        """Return [N, num_scored] float32 of the head's normed input [N, H]."""
        return self.group.all_gather(self._own_logits(x))

    def _own_logits(self, x: Tensor) -> Tensor:
        if uses_triton(x) and x.shape[0] <= HEAD_ROWS:
            return linear_decode(x, self.head, out_dtype=torch.float32)
        # A part of the vocabulary at a time: as float32 the head would take gigabytes.
        return torch.cat([linear(x, some.float()) for some in torch.split(self.head, HEAD_WORDS)], -1)

    def _layers(
        self,
        token_ids: Tensor,
        batch: RaggedBatch | None,
        decode: DecodeBatch | None,
        rotations: Rotations,
        cache: CacheViews,
    ) -> tuple[Tensor | ExpertParts, Mixed]:
        """Return the last sublayer's output and where it began: what spreads it comes next."""
        streams = self.embedding[token_ids][:, None].expand(-1, self.config.hc_mult, -1)
        sequence = decode.sequence if decode else None
        mixed = mix(streams, self.layers[0].attention_mix, sequence=sequence)
        for layer, after in zip(self.layers, [*self.layers[1:], None], strict=True):
            y, mixed = layer(mixed, token_ids, batch, decode, rotations, cache)
            if after is not None:
                mixed = spread_and_mix(y, mixed, after.attention_mix, sequence=sequence)
        return y, mixed


def _move_to(device: torch.device | None, part: _Part) -> _Part:
    moved: _Part = part if device is None else move_to(device, part)
    return moved
