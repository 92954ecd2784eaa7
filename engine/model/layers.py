"""Small parts that several layers use: norm, linear, rotary frequencies, hyper-connection.

Modules hold their weights and call one kernel each. They take their tensors out of the loaded dict (`pop`), so that
nothing is held twice and what nobody took shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.config import CSA_RATIO, HCA_RATIO, DeepSeekV4Config
from kernels.gemm import BLOCK, grouped_linear, linear
from kernels.gemm_decode import grouped_linear_decode, join_weights, linear_decode
from kernels.gemm_pair import linear_pair_decode
from kernels.hyper_connection_decode import Mixer
from kernels.launch_order import IN_CHAIN, Order
from kernels.moe import gated
from kernels.norm_rope import rms_norm, rotation_at
from kernels.quant import dequantize_block_fp8
from kernels.ragged import RaggedBatch

Weights = dict[str, Tensor]


_AT_ONCE = 1 << 24  # weights looked at: of a head, a copy of all of them would be gigabytes


def narrow(weight: Tensor) -> Tensor:
    """Return a float32 weight as bfloat16 where that loses nothing, so that a step reads half; else as it is.

    What is float32 here checkpoints mostly store as bfloat16.
    """
    if weight.dtype != torch.float32:
        return weight
    short = torch.empty_like(weight, dtype=torch.bfloat16)
    rows = max(1, _AT_ONCE // max(1, weight[:1].numel()))
    for some, given in zip(torch.split(short, rows), torch.split(weight, rows), strict=True):
        some.copy_(given)
        if not torch.equal(some.float(), given):
            return weight
    return short


class RMSNorm:
    """Norm over the last axis, float32 in and out. is_narrow: see `narrow`; what linear kernels want."""

    def __init__(self, weights: Weights, name: str, eps: float, *, is_narrow: bool = False) -> None:
        weight = weights.pop(f"{name}.weight")
        self.weight = narrow(weight) if is_narrow else weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, eps=self.eps)


class Matrix(NamedTuple):
    """weight: [out, in] float, or e4m3 with `scale`, float32, for each tile of 128 x 128."""

    weight: Tensor
    scale: Tensor | None = None

    @classmethod
    def take(cls, weights: Weights, name: str) -> Matrix:
        return cls(weights.pop(f"{name}.weight"), weights.pop(f"{name}.scale", None))

    def product(
        self, x: Tensor, norm: RMSNorm | None, *, decodes: bool, out_dtype: torch.dtype, order: Order = IN_CHAIN
    ) -> Tensor:
        """Return x W^T [T, out] of x, or of the normed x; decodes: with decode kernels, in `order` among launches."""
        if decodes:
            gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return linear_decode(x, *self, norm=gain, eps=eps, out_dtype=out_dtype, order=order)
        x = (x if norm is None else norm(x).to(x.dtype)).to(out_dtype)
        return linear(x, self.weight if self.scale is not None else self.weight.to(out_dtype), self.scale)


class Linear:
    """y = x W^T, in x's dtype. W: [out, in], in that dtype or e4m3."""

    def __init__(self, weights: Weights, name: str) -> None:
        self.matrix = Matrix.take(weights, name)

    def __call__(
        self, x: Tensor, *, norm: RMSNorm | None = None, decodes: bool = False, order: Order = IN_CHAIN
    ) -> Tensor:
        """x: [T, in].   norm: of x, before the product.   decodes: with decode kernels, in `order` among launches."""
        return self.matrix.product(x, norm, decodes=decodes, out_dtype=x.dtype, order=order)


class Linears:
    """y_i = x W_i^T of matrices that read the same x, in x's dtype or, if `is_wide`, in float32.

    One product where all are of one dtype and, in e4m3, begin with a tile; as many as there are matrices where not.
    """

    def __init__(self, *matrices: Matrix, is_wide: bool = False) -> None:
        self.rows, self.is_wide = [matrix.weight.shape[0] for matrix in matrices], is_wide
        self.parts = _join(matrices)

    def __call__(self, x: Tensor, *, norm: RMSNorm | None = None, decodes: bool = False) -> list[Tensor]:
        """Return y_i [T, out_i], views of one tensor where there is one product. The rest: see Linear."""
        outs = [part.product(x, norm, decodes=decodes, out_dtype=self.dtype(x)) for part in self.parts]
        return list(torch.split(outs[0], self.rows, 1)) if len(outs) == 1 else outs

    def only(self, which: int, x: Tensor, *, norm: RMSNorm | None = None) -> Tensor:
        """Return one y_i, without decode kernels: for steps that do not need all of them."""
        part = self.parts[which if len(self.parts) > 1 else 0]
        if len(self.parts) == 1:
            first = sum(self.rows[:which])
            last = first + self.rows[which]
            scale = None if part.scale is None else part.scale[first // BLOCK : -(-last // BLOCK)]
            part = Matrix(part.weight[first:last], scale)
        return part.product(x, norm, decodes=False, out_dtype=self.dtype(x))

    def dtype(self, x: Tensor) -> torch.dtype:
        """Return that of y_i."""
        return torch.float32 if self.is_wide else x.dtype


def read_once(x: Tensor, first: Linears, second: Linears) -> tuple[list[Tensor], list[Tensor]]:
    """Return first(x) and second(x) with decode kernels, in one launch where each is one product."""
    if len(first.parts) != 1 or len(second.parts) != 1:
        return first(x, decodes=True), second(x, decodes=True)
    dtypes = (first.dtype(x), second.dtype(x))
    outs = linear_pair_decode(x, first.parts[0], second.parts[0], out_dtypes=dtypes)
    return list(torch.split(outs[0], first.rows, 1)), list(torch.split(outs[1], second.rows, 1))


class GatedLinear:
    """silu(min(x W1^T, limit)) * clamp(x W3^T, -limit, limit), in x's dtype; what `gated` says."""

    def __init__(self, gate: Matrix, up: Matrix) -> None:
        self.both = Linears(gate, up)

    def __call__(self, x: Tensor, *, limit: float, decodes: bool = False) -> Tensor:
        """x: [T, in].   decodes: with decode kernels."""
        parts = self.both.parts
        if decodes and len(parts) == 1:
            return linear_decode(x, *parts[0], limit=limit, out_dtype=x.dtype)
        return gated(*self.both(x, decodes=decodes), limit=limit)


def _join(matrices: Sequence[Matrix]) -> list[Matrix]:
    """Return matrices as one, or as they are if they have several dtypes or begin within a tile."""
    if len(matrices) < 2:
        return list(matrices)
    scales = [matrix.scale for matrix in matrices if matrix.scale is not None]
    try:
        return [Matrix(*join_weights([matrix.weight for matrix in matrices], scales))]
    except ValueError:
        return list(matrices)


class GroupedLinear:
    """y[t, g] = x[t, g] W_g^T, in x's dtype. weight: [groups, out, in], in that dtype or e4m3."""

    def __init__(self, weights: Weights, name: str, groups: int) -> None:
        flat = weights.pop(f"{name}.weight")
        self.weight = flat.view(groups, -1, flat.shape[1])
        self.scale = weights.pop(f"{name}.scale", None)

    def __call__(self, x: Tensor, *, decodes: bool = False) -> Tensor:
        """x: [T, groups, in].   decodes: with decode kernels."""
        if decodes:
            return grouped_linear_decode(x, self.weight, self.scale, out_dtype=x.dtype)
        weight = self.weight
        if self.scale is not None:
            weight = dequantize_block_fp8(weight.flatten(0, 1), self.scale).to(x.dtype).view(weight.shape)
        return grouped_linear(x, weight)


@dataclasses.dataclass(frozen=True, slots=True)
class Rotations:
    """exp(1j * angle) of one step, complex64 [.., R/2].

    window: tokens, in layers without compressor.   compressed: tokens, in the others (another base, YaRN).
    csa, hca: the entries completed in this step, at their first position; for decode kernels a row per token, at the
    first position of the entry that it would complete.
    """

    window: Tensor
    compressed: Tensor
    csa: Tensor
    hca: Tensor

    def tokens(self, ratio: int) -> Tensor:
        return self.compressed if ratio else self.window

    def entries(self, ratio: int) -> Tensor:
        return self.csa if ratio == CSA_RATIO else self.hca


class Rotary:
    """The two frequency sets: plain for window-only layers, YaRN-blended for layers with a compressor. No mscale."""

    def __init__(self, config: DeepSeekV4Config, device: torch.device) -> None:
        channels, yarn = config.qk_rope_head_dim, config.rope_scaling
        exponent = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
        self.window = config.rope_theta**-exponent
        plain = config.compress_rope_theta**-exponent

        def channel_of(rotations: float) -> float:
            wavelength = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
            return channels * math.log(wavelength) / (2 * math.log(config.compress_rope_theta))

        low = max(math.floor(channel_of(yarn.beta_fast)), 0)
        high = min(math.ceil(channel_of(yarn.beta_slow)), channels - 1)
        ramp = (torch.arange(channels // 2, device=device) - low) / max(high - low, 1e-3)
        ramp = ramp.clamp(0, 1)
        self.compressed = plain / yarn.factor * ramp + plain * (1 - ramp)

    def at(self, batch: RaggedBatch) -> Rotations:
        """Return the rotations of a step's tokens and of the entries that it completes."""
        return Rotations(
            window=rotation_at(batch.positions, self.window),
            compressed=rotation_at(batch.positions, self.compressed),
            csa=rotation_at(batch.entries(CSA_RATIO).position, self.compressed),
            hca=rotation_at(batch.entries(HCA_RATIO).position, self.compressed),
        )

    def of_tokens(self, positions: Tensor) -> Rotations:
        """Return what `at` does for tokens at positions [T], as decode kernels read it. It may be captured."""
        return Rotations(
            window=rotation_at(positions, self.window),
            compressed=rotation_at(positions, self.compressed),
            csa=rotation_at(positions - CSA_RATIO + 1, self.compressed),
            hca=rotation_at(positions - HCA_RATIO + 1, self.compressed),
        )


def hyper_connection(weights: Weights, prefix: str, norm: str, config: DeepSeekV4Config) -> Mixer:
    """Take the weights of a hyper-connection, or of the head, and those of the norm behind it."""
    return Mixer(
        fn=weights.pop(f"{prefix}_fn"),
        base=weights.pop(f"{prefix}_base"),
        scale=weights.pop(f"{prefix}_scale"),
        norm=weights.pop(f"{norm}.weight"),
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        iters=config.hc_sinkhorn_iters,
    )
