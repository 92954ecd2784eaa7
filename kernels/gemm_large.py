"""Linear layers of many tokens: weights to bfloat16, once for all of them, then cuBLAS's product.

    W[o, i] = bf16(code[o, i] * scale[o // 128, i // 128])     into memory of the call's own: 2 bytes a weight
    out = x W^T                                                bfloat16 operands, sums in float32
    out = gated(sums)                                          float32 sums, where rows are gates and values

For bfloat16 x and weights of e4m3 or bfloat16 (those need no first step), as linear_decode has checked them. An e4m3
times a power of two, as published scales are, is exact in bfloat16; other scales round each weight by 2^-9 at most.

A weight costs 3 bytes of traffic a call, and 2 operations for each token: above LARGE tokens little, beside what is
gained over our own product, which widens weights anew for each tile of tokens. As there, a token's bits depend on how
many others there are, not on what they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernels.gemm import BLOCK
from kernels.gemm_large_triton import dequantize_kernel, swiglu_kernel
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import HAS_PDL, arch_of

OP = "linear_dequantize"
LARGE = 256  # tokens above which weights are widened once
_GATED = 512  # channels of a program of swiglu_kernel


def is_large(x: Tensor, weight: Tensor, *, quantize: bool = False) -> bool:
    """Return whether x [T, ..] and a weight take this way. quantize: activations are rounded to e4m3."""
    fits = x.dtype == torch.bfloat16 and weight.dtype in (torch.float8_e4m3fn, torch.bfloat16)
    return x.shape[0] > LARGE and fits and not quantize


def large_linear(
    out: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, *, offset: tuple[int, int], limit: float | None
) -> None:
    """Write x W^T, or gated of it if there is a limit, to out. x: [T, K] or [T, G, K].   weight: [N, K] or [G N, K]."""
    wide = weight if scale is None else dequantize(weight, scale, offset)
    if limit is None:
        _multiply(out, x, wide)
        return
    sums = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _multiply(sums, x, wide)
    inner = out.shape[1]
    pdl, launch = _pdl(x.device)
    swiglu_kernel[(out.shape[0], -(-inner // _GATED))](
        out, sums, inner, limit, BLOCK=_GATED, PDL=pdl, num_warps=4, **launch
    )


def dequantize(weight: Tensor, scale: Tensor, offset: tuple[int, int] = (0, 0), *, tile: Tile | None = None) -> Tensor:
    """Return an e4m3 weight [N, K] as bfloat16; see gemm.dequantize_slice. tile: instead of the table's."""
    rows, channels = weight.shape
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    tile = tile or tile_for(OP, arch_of(weight.device))
    high, blocks = tile.constants["BLOCK_R"], tile.constants["BLOCKS"]
    pdl, launch = _pdl(weight.device)
    dequantize_kernel[(-(-rows // high), -(-(channels + offset[1]) // (BLOCK * blocks)))](
        out, weight, scale, rows, channels, offset[0],
        SHIFT=offset[1], **tile.constants, PDL=pdl, num_warps=tile.num_warps, **launch,
    )  # fmt: skip
    return out


def _multiply(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Write x [T, K] or [T, G, K] times weight [N, K] or [G N, K] to out [T, N] or [T, G, N]."""
    if x.dim() == 3:
        out, x = out.transpose(0, 1), x.transpose(0, 1)
        weight = weight.view(x.shape[0], -1, weight.shape[1])
    turned = weight.transpose(-1, -2)
    if not out.is_cuda:
        out.copy_(x.float() @ turned.float())
        return
    _add_in_float32()
    product: Any = torch.mm if x.dim() == 2 else torch.bmm
    if out.dtype == x.dtype:
        product(x, turned, out=out)
    else:
        product(x, turned, out.dtype, out=out)


@functools.cache
def _add_in_float32() -> None:
    """Have cuBLAS add up shares of the channels in float32: torch's default lets it do so in bfloat16."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _pdl(device: torch.device) -> tuple[bool, dict[str, Any]]:
    pdl = HAS_PDL(device)
    return pdl, {"launch_pdl": True} if pdl else {}


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate."""
    tile = tile_for(OP, arch)
    signature = {"out_ptr": "*bf16", "w_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    signature |= dict.fromkeys(("rows", "channels", "row_shift"), "i32")
    fixed = {"SHIFT": 0, **tile.constants, "PDL": True}
    gate = {"out_ptr": "*bf16", "sums_ptr": "*fp32", "inner": "i32", "limit": "fp32"}
    return [
        Variant(OP, dequantize_kernel, signature, fixed, tile.num_warps, 3, (), unaligned=("rows", "row_shift")),
        Variant("linear_gate", swiglu_kernel, gate, {"BLOCK": _GATED, "PDL": True}, 4, 3, ()),
    ]
