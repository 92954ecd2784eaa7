"""Linear layers of all kinds of weights, for the interpreter and for a GPU, with the bound that each must keep."""

from __future__ import annotations

import dataclasses
import math

import torch

from kernels.gemm import dequantize_slice
from kernels.gemm_decode import grouped_linear_decode, linear_decode
from kernels.gemm_large import is_large
from kernels.moe import gated
from kernels.quant import dequantize_e4m3, quantize_e4m3
from kernels.tiles import Tile

FP8 = torch.float8_e4m3fn


@dataclasses.dataclass
class Case:
    """linear_decode(x, weight, scale, offset=.., norm=..), or grouped_linear_decode for a weight [G, N, K]."""

    x: torch.Tensor
    weight: torch.Tensor
    scale: torch.Tensor | None
    offset: tuple[int, int] = (0, 0)
    norm: torch.Tensor | None = None
    quantize: bool = False
    limit: float | None = None

    def run(self, **options) -> torch.Tensor:
        if self.weight.dim() == 3:
            return grouped_linear_decode(self.x, self.weight, self.scale, quantize=self.quantize, **options)
        return linear_decode(
            self.x, self.weight, self.scale, offset=self.offset, norm=self.norm, limit=self.limit,
            quantize=self.quantize, **options,
        )  # fmt: skip

    def expect(self) -> torch.Tensor:
        """Return the sums in float64, of x as given or normed, or of that, rounded to x's dtype, as quantised."""
        x, flat = self.x.double(), self.weight.reshape(-1, self.weight.shape[-1])
        w = flat.double() if self.scale is None else dequantize_slice(flat, self.scale, self.offset).double()
        if self.norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norm.double()
        if self.quantize:
            rows = x.to(self.x.dtype).reshape(x.shape[0], -1)
            codes, scale = quantize_e4m3(torch.nn.functional.pad(rows, (0, -rows.shape[1] % 128)), 128)
            x = dequantize_e4m3(codes, scale, 128)[:, : rows.shape[1]].view(x.shape).double()
        if self.weight.dim() == 3:
            return torch.einsum("tgi,gri->tgr", x, w.view(self.weight.shape))
        return x @ w.T if self.limit is None else gated(*(x @ w.T).chunk(2, -1), limit=self.limit)

    @property
    def rounds_weights(self) -> bool:
        """Whether weights lose digits on their way to bf16."""
        scale = self.scale
        if scale is None or not is_large(self.x, self.weight, quantize=self.quantize):
            return False
        return bool((scale.view(torch.int32) & 0x7FFFFF).any())

    def fault(self, **options) -> str:
        """Return how the sums differ from the reference, "" if not.

        Errors are counted against the largest sum. Products are exact; tensor cores add sixteen of them at a time and
        cut the sum off, by half of 2^-23 on average and always towards 0: K / 16 times, three or six times that for
        float32. Behind a norm bf16 rounds each product by 2^-9 at most, at random, and so it does a weight for many
        tokens whose scale is no power of two.
        """
        return self.fault_of(self.run(out_dtype=options.pop("out_dtype", torch.float32), **options))

    def fault_of(self, out: torch.Tensor) -> str:
        """Return the same of given sums."""
        got, wanted, out_dtype = out.double(), self.expect(), out.dtype
        if not torch.equal(got.isnan(), wanted.isnan()):
            return f"NaN in {int(got.isnan().sum())} places, wanted {int(wanted.isnan().sum())}"
        size = wanted.nan_to_num().abs().max().clamp(min=1e-30)
        error = float((got - wanted).nan_to_num().abs().max() / size)
        bound = 1e-5 + 2e-8 * self.weight.shape[-1]
        if self.quantize:  # the tensor cores of sm_90 sum e4m3 products with fewer digits
            bound = 2e-3 if self.norm is None else 4e-3  # a value between two codes may fall to either
        elif (self.norm is not None and self.x.dtype == torch.bfloat16) or self.rounds_weights:
            bound = 5e-3
        if out_dtype == torch.bfloat16:
            bound += 2**-8
        return "" if error < bound else f"off by {error:.2e} of the largest, {float(size):.3g}; bound {bound:.1e}"


def make_case(
    tokens: int,
    rows: int,
    channels: int,
    *,
    dtype: torch.dtype = FP8,
    x_dtype: torch.dtype = torch.bfloat16,
    offset: tuple[int, int] = (0, 0),
    groups: int = 0,
    normed: bool = False,
    quantize: bool = False,
    limit: float | None = None,
    gap: int = 0,
    powers: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Return a layer of random weights. groups: 0 for a plain one.   gap: unread channels behind each token's.

    powers: scales are powers of two.
    """
    draw = torch.Generator(device).manual_seed(seed)
    total = max(groups, 1) * rows
    x = torch.randn(tokens, max(groups, 1) * channels + gap, generator=draw, device=device).to(x_dtype)
    if gap:
        x[:, -gap:] = math.nan
    x = x[:, : x.shape[1] - gap]
    weight = torch.randn(total, channels, generator=draw, device=device)
    scale = None
    if dtype == FP8:
        weight = (weight * 40).clamp(-448, 448)
        shape = (-(-(offset[0] + total) // 128), -(-(offset[1] + channels) // 128))
        scale = 0.01 + torch.rand(shape, generator=draw, device=device) / 10
    weight = weight.to(dtype)
    if limit is not None:  # sums of its size: beyond it a gate multiplies the rounding of what it is given
        size = limit / 2 / math.sqrt(channels) / (1 if scale is None else 40 * 0.06)
        weight, scale = (weight * size, None) if scale is None else (weight, scale * size)
    if powers and scale is not None:
        scale = torch.exp2(scale.log2().round())
    norm = None
    if normed:
        norm = (0.5 + torch.rand(channels, generator=draw, device=device)).to(torch.bfloat16)
        x *= 3
    if groups:
        x, weight = x.unflatten(1, (groups, channels)), weight.view(groups, rows, channels)
    return Case(x, weight, scale, offset, norm, quantize, limit)


def few_tile(ks=1, rs=1, r=1, depth=1, split=1, registers=0) -> Tile:
    """Return a tile of few tokens; gemm_cut.fit_few says what the constants mean."""
    constants = {"R": r, "KS": ks, "RS": rs, "DEPTH": depth, "MAX_SPLIT": split, "RESIDENT": 8, "REGISTERS": registers}
    return Tile(constants, num_warps=ks * rs)


def held_tile(rows=64, columns=32, steps=4, split=1, warps=8, least=1) -> Tile:
    """Return a tile of quantised activations; gemm_cut.fit_held says what the constants mean."""
    constants = {"BLOCK_R": rows, "BLOCK_T": columns, "STEPS": steps, "MAX_SPLIT": split, "RESIDENT": 8}
    return Tile(constants | {"LEAST": least}, num_warps=warps)


def many_tile(rows=64, columns=32, size=128, split=1, warps=4, stages=3, least=1, fold=1) -> Tile:
    """Return a tile of many tokens; gemm_cut.fit_many says what the constants mean."""
    constants = {"BLOCK_R": rows, "BLOCK_T": columns, "BYTES": size, "MAX_SPLIT": split, "RESIDENT": 8, "LEAST": least}
    return Tile(constants | {"FOLD": fold}, num_warps=warps, num_stages=stages)
