"""Two linear layers of a decode step that read the same x, in one launch: for weights of types that can't be joined.

    first[t] = x[t] W^T,  second[t] = x[t] V^T     W [N, K], V [M, K]: as in gemm_decode.py

The programs are those of two launches. What it saves is a launch, and that the second one's weights wait for the first.
Up to MOST tokens in bfloat16, of rows that are whole pieces of 16 bytes; everything else is two launches.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernels.gemm_cut import FEW, Matrix, fit, span
from kernels.gemm_decode import KINDS, linear_decode
from kernels.gemm_pair_triton import INTEGERS, few_pair_kernel, many_pair_kernel
from kernels.scratch import zeros
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import HAS_PDL, MULTIPROCESSORS, arch_of, sm_count, uses_triton

FEW_OP, MANY_OP = "linear_pair_few", "linear_pair_many"
MOST = 64
_COUNTERS = 1 << 14
_SUMS = {torch.bfloat16, torch.float32}
Weights = tuple[Tensor, Tensor | None]  # as linear_decode's weight and scale


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How a call is cut: constants of the kernel, and of each matrix blocks of rows, splits, rows of a block."""

    tile: Tile
    is_few: bool
    constants: dict[str, Any]
    blocks: tuple[int, int]
    splits: tuple[int, int]
    high: tuple[int, int]
    wide: int

    @property
    def registers(self) -> int | None:
        """The limit a thread, None for none; see gemm_decode.register_limit."""
        shares = max(self.constants["SHARES_A"], self.constants["SHARES_B"])
        return (self.tile.constants["REGISTERS"] or (128 if shares > 1 else None)) if self.is_few else None


def linear_pair_decode(
    x: Tensor,
    first: Weights,
    second: Weights,
    *,
    out_dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.bfloat16),
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Return linear_decode(x, *first) and linear_decode(x, *second), of `out_dtypes`.

    x: [T, K] bfloat16 or float32, any row stride.   tile: instead of the table's. Calls of one stream share counters
    (scratch.py). Nothing but x may be written by the kernel before. Raises ValueError as linear_decode.
    """
    apart = [(weights, dtype) for weights, dtype in zip((first, second), out_dtypes, strict=True)]
    cut = _cut_for(x, first, second, tile) if uses_triton(x) and set(out_dtypes) <= _SUMS else None
    if cut is None:
        one, other = (linear_decode(x, *weights, out_dtype=dtype) for weights, dtype in apart)
        return one, other
    tokens = x.shape[0]
    outs = [torch.empty((tokens, w[0].shape[0]), dtype=dtype, device=x.device) for w, dtype in apart]
    counters = zeros("linear_pair_decode", x.device, 2, _COUNTERS)
    given: list[Any] = []
    for which, ((weight, scale), _) in enumerate(apart):
        part, slots = None, cut.blocks[which] * -(-tokens // cut.wide)
        if cut.splits[which] > 1:
            if slots > _COUNTERS:
                raise ValueError(f"{slots} blocks of rows and tokens share channels: at most {_COUNTERS}")
            size = slots * cut.splits[which] * cut.high[which] * cut.wide
            part = torch.empty(size, dtype=torch.float32, device=x.device)
        as_words = weight.view(torch.int32) if cut.is_few and scale is not None else weight
        given += [outs[which], as_words, scale, part, None if part is None else counters[which]]
        given += [outs[which].stride(0), weight.shape[0]]
        given += [weight.shape[1] * weight.element_size() // 16] if cut.is_few else []
        given += [cut.blocks[which], cut.splits[which]]
    pdl = HAS_PDL(x.device)
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    launch |= {} if cut.registers is None else {"maxnreg": cut.registers}
    grid = (sum(b * s for b, s in zip(cut.blocks, cut.splits, strict=True)), 1, -(-tokens // cut.wide))
    head = (x, tokens, x.stride(0)) if cut.is_few else (x, tokens, x.stride(0), x.shape[1])
    kernel: Any = few_pair_kernel if cut.is_few else many_pair_kernel
    kernel[grid](
        *head, *given, **cut.constants, PDL=pdl, num_warps=cut.tile.num_warps, num_stages=cut.tile.num_stages, **launch
    )
    return outs[0], outs[1]


def _cut_for(x: Tensor, first: Weights, second: Weights, tile: Tile | None) -> _Cut | None:
    """Return how the kernel takes a call, None if it does not."""
    both, channels = (first[0], second[0]), x.shape[-1]
    fits = x.dim() == 2 and 0 < x.shape[0] <= MOST and x.dtype == torch.bfloat16 and x.stride(-1) == 1
    for weight, scale in (first, second):
        fits &= weight.shape[-1] == channels and weight.is_contiguous() and weight.dtype in KINDS
        fits &= weight.dtype != torch.float32 and (scale is not None) == (weight.dtype == torch.float8_e4m3fn)
        fits &= channels * weight.element_size() % 16 == 0 and weight.data_ptr() % 16 == 0
        wanted = tuple(-(-size // 128) for size in weight.shape)
        fits &= scale is None or (tuple(scale.shape) == wanted and scale.is_contiguous())
    if not fits:
        return None
    tile = tile or _tile(arch_of(x.device), x.shape[0])
    matrices = [Matrix(w.shape[0], channels, w.element_size()) for w in both]
    return _cut(tile, x.shape[0], matrices, [KINDS[w.dtype] for w in both], sms=sm_count(x.device))


def _tile(arch: str, tokens: int) -> Tile:
    return tile_for(FEW_OP if tokens <= FEW else MANY_OP, arch, tokens=tokens)


def _cut(tile: Tile, tokens: int, matrices: list[Matrix], kinds: list[int], *, sms: int) -> _Cut | None:
    is_few = "KS" in tile.constants
    cuts = [fit(tile, tokens, matrix, sms=sms) for matrix in matrices]
    splits = [cut.pop("SPLIT") for cut in cuts]
    sizes = [span(cut) for cut in cuts]
    if is_few and any(cut["KS"] * cut["RS"] != tile.num_warps for cut in cuts):
        return None
    shared = "NB" if is_few else "BLOCK_T"
    constants: dict[str, Any] = {shared: cuts[0][shared]}
    for letter, cut, kind in zip("AB", cuts, kinds, strict=True):
        del cut[shared]
        constants |= {f"KIND_{letter}": kind} | {f"{name}_{letter}": value for name, value in cut.items()}
    blocks = [-(-matrix.rows // high) for matrix, (high, _) in zip(matrices, sizes, strict=True)]
    return _Cut(
        tile, is_few, constants, (blocks[0], blocks[1]), (splits[0], splits[1]), (sizes[0][0], sizes[1][0]), sizes[0][1]
    )


# What the offline gate compiles: what reads x in a CSA and in an HCA layer of DeepSeek-V4-Flash.
_POOLED, _DOWN, _HIDDEN = (2624, 1024), 1536, 4096


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate."""
    found: dict[str, Variant] = {}
    for tokens in (1, 16, 32, 64):
        for rows in _POOLED:
            variant = _variant(arch, tokens, rows)
            found.setdefault(repr((variant.signature, variant.constants, variant.maxnreg)), variant)
    return list(found.values())


def _variant(arch: str, tokens: int, rows: int) -> Variant:
    matrices = [Matrix(rows, _HIDDEN, 2), Matrix(_DOWN, _HIDDEN, 1)]
    kinds = [KINDS[torch.bfloat16], KINDS[torch.float8_e4m3fn]]
    cut = _cut(_tile(arch, tokens), tokens, matrices, kinds, sms=MULTIPROCESSORS[arch])
    assert cut is not None
    kernel: Any = few_pair_kernel if cut.is_few else many_pair_kernel
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"x_ptr": "*bf16", "out_a": "*fp32", "out_b": "*bf16"}
    signature |= {"w_a": "*bf16", "w_b": "*i32" if cut.is_few else "*fp8e4nv", "scale_b": "*fp32"}
    signature |= dict.fromkeys(("part_a", "part_b"), "*fp32") | dict.fromkeys(("counter_a", "counter_b"), "*i32")
    fixed: dict[str, Any] = {"scale_a": None, "PDL": True, **cut.constants}
    for letter, splits in zip("ab", cut.splits, strict=True):
        fixed |= {} if splits > 1 else {f"part_{letter}": None, f"counter_{letter}": None}
    return Variant(
        FEW_OP if cut.is_few else MANY_OP,
        kernel,
        {name: signature[name] for name in kernel.arg_names if name not in fixed},
        fixed,
        cut.tile.num_warps,
        cut.tile.num_stages,
        unaligned=INTEGERS,
        maxnreg=cut.registers,
    )
