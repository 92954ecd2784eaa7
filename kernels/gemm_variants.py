"""What the offline gate compiles of linear layers: DeepSeek-V4-Flash's matrices, by shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels.gemm_cut import FEW, FEW_OP, MANY_OP, QUANTIZED_OP, Matrix, fit, is_few, is_held, table_tile
from kernels.gemm_decode import KINDS, blocks_of, quantize_warps, register_limit
from kernels.gemm_few_triton import few_kernel
from kernels.gemm_held_triton import held_kernel
from kernels.gemm_triton import many_kernel, norm_kernel, quantize_kernel
from kernels.launch_order import ASIDE, CHAIN, LEAD
from kernels.tiles import Variant
from kernels.triton_env import MULTIPROCESSORS

# What the offline gate compiles: what a decode step launches, of one of four ranks of DeepSeek-V4-Flash.
# groups, rows, channels, dtype of weights, of x, of the output, normed
_FP8, _BF16 = torch.float8_e4m3fn, torch.bfloat16
_STEP: tuple[tuple[int, int, int, torch.dtype, str, str, bool], ...] = (
    (1, 16384, 1024, _FP8, "*bf16", "*bf16", True),  # queries, the indexer's among them
    (1, 8192, 1024, _FP8, "*bf16", "*bf16", True),
    (1, 1536, 4096, _FP8, "*bf16", "*bf16", False),  # latent and values of layers without a compressor
    (2, 1024, 4096, _FP8, "*bf16", "*bf16", False),
    (1, 4096, 2048, _FP8, "*bf16", "*bf16", False),
    (1, 32320, 4096, _BF16, "*fp32", "*fp32", False),
)
_TOKENS = (1, 16, 32, 64)  # cuts change behind them
# Of the shared expert: gates and values lead above FEW tokens, up to which the gate's launch has them; what follows
# leads the routed experts' first product.
_GATES, _DOWN = (1, 1024, 4096, _FP8, "*bf16", "*bf16", False), (1, 4096, 512, _FP8, "*bf16", "*bf16", False)
_LIMIT = 10.0

# What a long test compiles: on other numbers of ranks, in prefills, in the chain, alone, with e4m3 activations.
# tokens, rows, channels, dtype of weights, of x, of the output, normed, quantised
_OTHERS: tuple[tuple[int, int, int, torch.dtype, str, str, bool, bool], ...] = (
    *(
        (tokens, 4096, channels, _FP8, "*bf16", "*bf16", False, False)
        for tokens in (1, 64)
        for channels in (4096, 8192)
    ),
    *((tokens, 4096, 512, _FP8, "*bf16", "*bf16", False, False) for tokens in _TOKENS),
    *((tokens, 2624, 4096, _BF16, "*bf16", "*fp32", False, False) for tokens in (*_TOKENS, 256)),
    *((tokens, 1024, 4096, _BF16, "*bf16", "*fp32", False, False) for tokens in (1, 64)),
    (1, 8192, 4096, _FP8, "*bf16", "*bf16", False, False),
    (1, 256, 4096, _BF16, "*bf16", "*fp32", False, False),
    (1, 4096, 1024, _FP8, "*bf16", "*bf16", False, False),
    (16, 4096, 4096, _FP8, "*bf16", "*bf16", False, False),
    *((64, rows, 1024, _FP8, "*bf16", "*bf16", True, False) for rows in (24576, 32768)),
    (256, 8192, 1024, _FP8, "*bf16", "*bf16", True, False),
    *((tokens, 8192, 1024, _FP8, "*bf16", "*bf16", True, True) for tokens in (32, 64)),
    *((64, rows, 1024, _FP8, "*bf16", "*bf16", True, True) for rows in (16384, 32768)),
    *((64, 4096, channels, _FP8, "*bf16", "*bf16", False, True) for channels in (512, 2048, 4096, 8192)),
    *((32, 4096, channels, _FP8, "*bf16", "*bf16", False, True) for channels in (512, 2048)),
    (64, 1536, 4096, _FP8, "*bf16", "*bf16", False, True),
    (32, 1024, 4096, _FP8, "*bf16", "*bf16", False, True),
    (4096, 4096, 2048, _FP8, "*bf16", "*bf16", False, True),
)
# tokens and rows of e4m3 gates and values of 4096 channels
_GATED = ((1, 1024), (1, 2048), (1, 4096), (16, 1024), (32, 1024), (64, 1024), (64, 2048), (64, 4096), (256, 1024))
_UNALIGNED = ("tokens", "pieces", "row_shift", "splits")


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate."""
    found = [linear_variant(arch, tokens, *shape) for tokens in _TOKENS for shape in _STEP]
    found += [linear_variant(arch, tokens, *_DOWN, order=LEAD) for tokens in _TOKENS]
    found += [linear_variant(arch, tokens, *_GATES, limit=_LIMIT, order=LEAD) for tokens in _TOKENS if tokens > FEW]
    signature = {"out_ptr": "*bf16", "x_ptr": "*bf16", "gamma_ptr": "*bf16", "x_stride": "i32", "channels": "i32"}
    fixed = {"BLOCK": 1024, "PDL": True}
    found.append(Variant("linear_norm", norm_kernel, signature | {"eps": "fp32"}, fixed, 8, 3, tensor_ops=()))
    return list(_distinct(found).values())


def rare_variants(arch: str) -> list[Variant]:
    """Return those that no decode step of one of four ranks launches."""
    found = [
        linear_variant(arch, tokens, 1, rows, channels, dtype, x, out, normed, quantize=quantize)
        for tokens, rows, channels, dtype, x, out, normed, quantize in _OTHERS
    ]
    for tokens, rows in _GATED:
        found.append(linear_variant(arch, tokens, 1, rows, 4096, _FP8, "*bf16", "*bf16", False, limit=_LIMIT))
    found += [linear_variant(arch, tokens, *_DOWN, order=ASIDE) for tokens in (1, 64)]
    quantised = [(channels, False) for channels in (512, 1024, 2048, 4096, 8192)]
    for channels, is_normed in [(1024, True), *quantised]:
        groups = blocks_of(channels)
        signature = {"codes_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "x_ptr": "*bf16", "gamma_ptr": "*bf16"}
        signature |= {"x_stride": "i32", "scale_stride": "i32", "channels": "i32", "eps": "fp32"}
        fixed: dict[str, Any] = {"GROUPS": groups, "PDL": True}
        if not is_normed:
            del signature["gamma_ptr"]
            fixed["gamma_ptr"] = None
        warps = quantize_warps(groups)
        found.append(Variant("linear_quantize", quantize_kernel, signature, fixed, warps, 3, tensor_ops=()))
    shipped = {_identity(variant) for variant in variants(arch)}
    return [variant for name, variant in _distinct(found).items() if name not in shipped]


def _distinct(found: Sequence[Variant]) -> dict[str, Variant]:
    """Return variants by what makes them, each once."""
    return {_identity(variant): variant for variant in reversed(found)}


def _identity(variant: Variant) -> str:
    return repr((variant.kernel, variant.signature, variant.constants, variant.num_warps, variant.maxnreg))


def linear_variant(
    arch: str, tokens: int, groups: int, rows: int, channels: int, dtype: torch.dtype, x: str, out: str,
    normed: bool, *, quantize: bool = False, limit: float | None = None, order: int = CHAIN,
) -> Variant:  # fmt: skip
    unit = torch.empty((), dtype=dtype).element_size()
    tile = table_tile(arch, tokens, rows=groups * rows, channels=channels, unit=unit, is_whole=True, quantize=quantize)
    few, held = is_few(tile), is_held(tile)
    kernel: Any = few_kernel if few else held_kernel if held else many_kernel
    matrix = Matrix(
        rows, channels, unit, groups, quantize or not normed, x == "*fp32" and not quantize, is_gated=limit is not None
    )  # fmt: skip
    cut = fit(tile, tokens, matrix, sms=MULTIPROCESSORS[arch])
    is_split = cut.pop("SPLIT") > 1
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(
        ("scale_ptr", "x_scale_ptr", "part_ptr"), "*fp32"
    )
    signature |= {"out_ptr": out, "x_ptr": "*fp8e4nv" if quantize else x, "counter_ptr": "*i32", "eps": "fp32"}
    signature |= {"w_ptr": {0: "*i32" if few else "*fp8e4nv", 1: "*bf16", 2: "*fp32"}[KINDS[dtype]]}
    signature |= {"gamma_ptr": "*bf16" if few else "*i32"}
    absent = [] if KINDS[dtype] == 0 else ["scale_ptr"]
    absent += [] if is_split else ["part_ptr", "counter_ptr"]
    is_folded = few or bool(tile.constants.get("FOLD") and cut["EVEN"] and x == "*bf16")
    absent += [] if normed and is_folded and not quantize else ["gamma_ptr"]
    absent += [] if quantize else ["x_scale_ptr"]
    fixed: dict[str, Any] = {"LIMIT": limit, "ORDER": order, "PDL": True, **cut}
    fixed |= dict.fromkeys(name for name in absent if name in kernel.arg_names)
    fixed |= {} if held else {"SHIFT": 0, "KIND": KINDS[dtype]}
    fixed |= {} if few or held else {"STAGES": tile.num_stages if quantize else None}
    return Variant(
        QUANTIZED_OP if quantize else FEW_OP if few else MANY_OP,
        kernel,
        {name: signature[name] for name in kernel.arg_names if name not in fixed},
        fixed,
        cut["KS"] * cut["RS"] if few else tile.num_warps,
        tile.num_stages,
        tensor_ops=("QMMA",) if quantize else ("HMMA",),
        unaligned=[name for name in _UNALIGNED if name in kernel.arg_names],
        maxnreg=register_limit(tile, cut, is_wide=x == "*fp32", is_gated=limit is not None, order=order)
        if few
        else None,
    )
