"""Benches and samples of linear layers: DeepSeek-V4-Flash's matrices on one of 1, 2 and 4 ranks.

q_a+kv      both down projections, one matrix; not split among ranks, like all of the indexer and compressors
q_b         heads' queries, a norm in front; index_q: the indexer's; q_b+index_q: both as one
o_a, o_b    output projection: a matrix per group of heads, then one
gate+up, down   of the shared expert, the gates' work included
csa, hca    compressor's values and gates; csa with the indexer's and its head weights; bf16, summed to float32
gate        scores of experts;   head: logits of float32 activations, normed before
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.bench import Bench
from kernels.gemm import BLOCK
from kernels.gemm_decode import grouped_linear_decode, linear_decode
from kernels.gemm_large import LARGE
from kernels.gemm_pair import linear_pair_decode

HIDDEN, QUERY, INNER, VOCABULARY, LIMIT = 4096, 1024, 2048, 129280, 10.0
RANKS = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A matrix [groups, rows, channels], e4m3 unless `is_float`: then bfloat16, with float32 sums."""

    name: str
    rows: int
    channels: int
    groups: int = 1
    is_normed: bool = False
    is_float: bool = False
    is_wide: bool = False  # float32 activations
    is_gated: bool = False  # half of the rows are gates of the others: they act where activations are not quantised

    @property
    def is_quantised(self) -> bool:
        """Whether training rounded its activations to e4m3: all of e4m3 weights, o_a excepted."""
        return not self.is_float and self.groups == 1

    @property
    def bytes(self) -> int:
        return self.groups * self.rows * self.channels * (2 if self.is_float else 1)


def layers(ranks: int) -> list[Layer]:
    """Return the matrices that one of `ranks` ranks has of its own."""
    heads = 64 * 512 // ranks
    return [
        Layer("q_b", heads, QUERY, is_normed=True),
        Layer("q_b+index_q", heads + 8192, QUERY, is_normed=True),
        Layer("o_a", 1024, 4096, groups=8 // ranks),
        Layer("o_b", HIDDEN, 8192 // ranks),
        Layer("gate+up", 2 * INNER // ranks, HIDDEN, is_gated=True),
        Layer("down", HIDDEN, INNER // ranks),
        Layer("head", VOCABULARY // ranks, HIDDEN, is_float=True, is_wide=True),
    ]


SHARED = [
    Layer("q_a+kv", 1536, HIDDEN),
    Layer("csa", 2624, HIDDEN, is_float=True),
    Layer("hca", 1024, HIDDEN, is_float=True),
    Layer("gate", 256, HIDDEN, is_float=True),
]


def benches() -> list[Bench]:
    """Return the benches: all matrices at 1 and 64 tokens, a rank of 4 at others, and a prefill."""
    return [
        *(_bench(layer, tokens) for tokens in (1, 64) for layer in SHARED),
        *(_bench(layer, tokens, ranks=n) for n in RANKS for tokens in (1, 64) for layer in layers(n)),
        *(_bench(layer, tokens, ranks=4) for tokens in (8, 16, 32, 256) for layer in layers(4)[:4]),
        *(_bench(layers(4)[4], tokens, ranks=4) for tokens in (16, 32)),
        *(_bench(layer, tokens) for tokens in (16, 256) for layer in SHARED[:2]),
        *(_bench(layer, tokens, ranks=4) for tokens in (512, 4096) for layer in layers(4)[:6]),
        *(_bench(layer, 4096) for layer in SHARED[:3]),
        *(_bench(layer, 64, quantize=True) for layer in SHARED if layer.is_quantised),
        *(_bench(layer, 64, ranks=n, quantize=True) for n in RANKS for layer in layers(n) if layer.is_quantised),
        *(_bench(layer, 32, ranks=4, quantize=True) for layer in layers(4) if layer.is_quantised),
        _bench(layers(4)[3], 4096, ranks=4, quantize=True),
        *(_pair(layer, SHARED[0], tokens) for tokens in (1, 8, 16, 32, 64) for layer in SHARED[1:3]),
    ]


def samples() -> list[Bench]:
    """Return one small step for each shipped path."""
    wide = Layer("float", 80, 320, is_float=True, is_wide=True, is_normed=True)
    return [
        _bench(Layer("fp8", 80, 320, is_normed=True), 3),
        _bench(Layer("fp8", 200, 1024), 12),
        _bench(Layer("fp8", 80, 320, is_normed=True), 20),
        _bench(Layer("fp8 of few rows", 80, 2048), 20),  # programs share the channels
        _bench(Layer("fp8 cut", 80, 208), 5, offset=(48, 64)),
        _bench(Layer("fp8 cut", 80, 208), 20, offset=(48, 64)),
        _bench(Layer("fp8 gated", 96, 2048, is_gated=True), 5),
        _bench(Layer("fp8 gated", 96, 2048, is_gated=True), 20),
        _bench(Layer("fp8 groups", 80, 256, groups=3), 5),
        _bench(Layer("fp8 groups", 80, 256, groups=3), 20, quantize=True),
        _bench(Layer("fp8", 80, 320, is_normed=True), 20, quantize=True),
        _bench(Layer("fp8 of few rows", 80, 2048), 20, quantize=True),
        _bench(Layer("fp8", 200, 300), 70),
        _bench(Layer("fp8", 80, 320, is_normed=True), LARGE + 1),
        _bench(Layer("fp8 gated", 96, 256, is_gated=True), LARGE + 1),
        _bench(wide, 3),
        _bench(wide, 20),
        _bench(Layer("float of few rows", 32, 8192, is_float=True), 3),  # programs share the channels
        _bench(Layer("float", 80, 320, is_float=True), 70),
        *(_pair(Layer("float", 80, 2048, is_float=True), Layer("fp8", 96, 2048), tokens) for tokens in (3, 20)),
    ]


def _pair(first: Layer, second: Layer, tokens: int) -> Bench:
    """Return the bench of two matrices of one x, in one launch."""
    one, other = _bench(first, tokens), _bench(second, tokens)

    def make(device: torch.device, seed: int) -> Callable[..., tuple[Tensor, Tensor]]:
        given = [make_inputs(layer, tokens, device, seed) for layer in (first, second)]
        x, weights = given[0][0][:, 0], [(weight, scale) for _, weight, scale, _ in given]
        return lambda **options: linear_pair_decode(
            x, weights[0], weights[1], out_dtypes=(torch.float32, torch.bfloat16), **options
        )

    return dataclasses.replace(
        one,
        shape=f"B={tokens} {first.name} {first.rows} and {second.name} {second.rows} x {first.channels}",
        make=make,
        bytes=one.bytes + other.bytes - tokens * 2 * first.channels,
        flops=one.flops + other.flops,
    )


def _bench(
    layer: Layer, tokens: int, *, ranks: int = 1, quantize: bool = False, offset: tuple[int, int] = (0, 0)
) -> Bench:
    x_bytes = layer.groups * layer.channels * (4 if layer.is_wide else 2)
    out_bytes = layer.groups * layer.rows * (4 if layer.is_float else 2) // (2 if layer.is_gated else 1)
    scales = 0 if layer.is_float else layer.bytes // (BLOCK * BLOCK) * 4
    of_rank = f" of {ranks} ranks" if ranks > 1 else ""
    size = f"{layer.groups} x " if layer.groups > 1 else ""
    return Bench(
        group="linear",
        op="linear",
        shape=f"B={tokens} {layer.name} {size}{layer.rows} x {layer.channels}{of_rank}"
        + (" quantised" if quantize else "")
        + (f" at {offset}" if any(offset) else ""),
        make=lambda device, i: make_launch(layer, tokens, device, i, quantize=quantize, offset=offset),
        bytes=layer.bytes + scales + tokens * (x_bytes + out_bytes),
        flops=2 * tokens * layer.groups * layer.rows * layer.channels,
        chain=f"attention B={tokens}" if ranks == 4 and layer.name in ("q_b", "o_a", "o_b") else None,
    )


def make_launch(
    layer: Layer,
    tokens: int,
    device: torch.device,
    seed: int,
    *,
    quantize: bool = False,
    offset: tuple[int, int] = (0, 0),
) -> Callable[..., Tensor]:
    """Return a call of the layer on random weights and activations; it takes options of linear_decode."""
    x, weight, scale, norm = make_inputs(layer, tokens, device, seed, offset=offset)
    given: dict[str, Any] = {"quantize": quantize, "out_dtype": torch.float32 if layer.is_float else torch.bfloat16}
    if layer.groups > 1:
        groups = weight.view(layer.groups, layer.rows, layer.channels)
        return lambda **options: grouped_linear_decode(x, groups, scale, **given, **options)
    given |= {"norm": norm, "offset": offset, "limit": LIMIT if layer.is_gated and not quantize else None}
    return lambda **options: linear_decode(x[:, 0], weight, scale, **given, **options)


def make_inputs(
    layer: Layer, tokens: int, device: torch.device, seed: int, *, offset: tuple[int, int] = (0, 0)
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return random x [T, groups, channels], weight, its scale and the norm's weight, as far as there are any."""
    draw = torch.Generator(device).manual_seed(seed)
    rows = layer.groups * layer.rows
    # The CPU only looks at how kernels are launched on large weights: theirs are of any content there.
    is_drawn = device.type == "cuda" or rows * layer.channels < 1 << 20
    x = torch.randn(tokens, layer.groups, layer.channels, generator=draw, device=device)
    x = x if layer.is_wide else x.to(torch.bfloat16)
    scale = norm = None
    if layer.is_float:
        weight = torch.empty(rows, layer.channels, dtype=torch.bfloat16, device=device)
        if is_drawn:
            weight.normal_(0.0, layer.channels**-0.5, generator=draw)
    else:
        codes = torch.empty((rows, layer.channels), dtype=torch.uint8, device=device)
        if is_drawn:
            codes.random_(0, 256, generator=draw)
            codes[codes & 0x7F == 0x7F] = 0x38  # no NaN
        weight = codes.view(torch.float8_e4m3fn)
        shape = [-(-(at + size) // BLOCK) for at, size in zip(offset, weight.shape, strict=True)]
        scale = (0.5 + torch.rand(shape, generator=draw, device=device)) / 100 / layer.channels**0.5
    if layer.is_normed:
        norm = (0.5 + torch.rand(layer.channels, generator=draw, device=device)).to(torch.bfloat16)
    return x, weight, scale, norm
