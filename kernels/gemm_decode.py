"""Linear layers of a step: weights as a checkpoint stores them, one launch. Many tokens go on in gemm_large.py.

    out[t] = rms(x[t], norm) W^T     W [N, K]: e4m3 with a float32 scale per 128x128 tile, bfloat16, or float32
    out[t, g] = x[t, g] W_g^T        W [G, N, K]

Weights that read the same input are best kept as one (join_weights) and the output split: `out.split(rows, 1)` gives
views that later kernels take as they are. A norm in front costs no pass where its tile says so (FOLD): its weight goes
onto x, with more than FEW tokens onto W, and its factor onto the sums. It has a launch of its own before tiles without,
before more than FEW tokens that are not bfloat16, and before channels that are not whole steps of a tile.

Weights and x are exact (float32 ones: see gemm_fragment_triton.py), but for the one that a norm went onto: that is
rounded to its dtype, e4m3 to bfloat16. `quantize`: e4m3 weights meet e4m3 activations, a scale per token and 128
channels (quant.py), as in training; a launch of its own makes them, with the norm if there is one, and what it rounds
has been rounded to x's dtype. Sums are float32 in a fixed order: equal inputs give equal bits. A token's bits depend on
how many others there are (which decides the tile), not on what they are. A row of x that is padding gives what its
values give; nothing else is read for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.gemm import BLOCK, grouped_linear_reference, linear_reference
from kernels.gemm_cut import (
    Matrix,
    fit,
    is_few,
    is_held,
    span,
    table_tile,
)
from kernels.gemm_few_triton import few_kernel
from kernels.gemm_held_triton import held_kernel
from kernels.gemm_large import is_large, large_linear
from kernels.gemm_triton import many_kernel, norm_kernel, quantize_kernel
from kernels.launch_order import ASIDE, CHAIN, IN_CHAIN, Order
from kernels.moe import gated
from kernels.norm_rope import rms_norm_reference
from kernels.quant import dequantize_block_fp8, dequantize_e4m3, quantize_e4m3
from kernels.scratch import zeros
from kernels.tiles import Tile
from kernels.triton_env import HAS_PDL, arch_of, sm_count, uses_triton

KINDS = {torch.float8_e4m3fn: 0, torch.bfloat16: 1, torch.float32: 2}
_COUNTERS = 1 << 14
_ROOM = 128  # tokens of the largest tile


def linear_decode(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    *,
    offset: tuple[int, int] = (0, 0),
    norm: Tensor | None = None,
    eps: float = 1e-6,
    limit: float | None = None,
    quantize: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
    order: Order = IN_CHAIN,
) -> Tensor:
    """Return [T, N] of `out_dtype`, bfloat16 or float32: x W^T, of the normed x if there is a norm.

    x: [T, K] bfloat16 or float32, any row stride.   weight: [N, K] e4m3, bfloat16 or float32.   scale: float32
    [ceil((offset[0] + N) / 128), ceil((offset[1] + K) / 128)] of an e4m3 weight.   offset: row and column, below 128,
    at which the weight begins within its first tile.   norm: [K], weight of an RMS norm of x over K, with `eps`.
    limit: the first half of the rows, a multiple of 8, are gates of the others, and moe.gated of both is [T, N / 2].
    quantize: x to e4m3 first, the normed x if there is a norm.   tile: instead of the table's.   order: among launches
    (launch_order.py); of several, a lead's last one leads, and none is aside; of many tokens none leads.   Calls of one
    stream share counters (scratch.py). Nothing but x may be written by the kernel before. Raises ValueError for what
    does not fit.
    """
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: wanted [T, K] and [N, K]")
    _check(x, weight, scale, offset, out_dtype, groups=1)
    _check_norm(x, norm)
    _check_quantize(quantize, weight, offset, groups=1)
    if limit is not None and (weight.shape[0] % 16 or offset[0] or not limit > 0):
        raise ValueError(f"limit {limit} of {weight.shape[0]} rows at {offset}: wanted one above 0, of 16 n rows at 0")
    if not uses_triton(x):
        given = _quantized(x, norm, eps) if quantize else x.float()
        norm = None if quantize else norm
        weight = weight if scale is not None else weight.float()
        sums = linear_reference(given, weight, scale, offset=offset, norm=norm, eps=eps)
        return (sums if limit is None else gated(*sums.chunk(2, -1), limit=limit)).to(out_dtype)
    rows = weight.shape[0] if limit is None else weight.shape[0] // 2
    out = torch.empty((x.shape[0], rows), dtype=out_dtype, device=x.device)
    _launch(
        out, x, weight, scale, norm, groups=1, offset=offset, eps=eps, limit=limit, quantize=quantize, tile=tile,
        order=order,
    )  # fmt: skip
    return out


def grouped_linear_decode(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    *,
    quantize: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """Return [T, G, N]: out[t, g] = x[t, g] weight[g]^T.

    x: [T, G, K], any stride between tokens.   weight: [G, N, K].   scale: [ceil(G N / 128), ceil(K / 128)], of the
    weight as [G N, K].   The rest: see linear_decode.
    """
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1] != weight.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: wanted [T, G, K] and [G, N, K]")
    groups, rows, _ = weight.shape
    flat = weight.view(groups * rows, -1)
    _check(x, flat, scale, (0, 0), out_dtype, groups=groups)
    _check_quantize(quantize, weight, (0, 0), groups=groups)
    if not uses_triton(x):
        given = _quantized(x) if quantize else x.float()
        whole = flat.float() if scale is None else dequantize_block_fp8(flat, scale)
        return grouped_linear_reference(given, whole.view(weight.shape)).to(out_dtype).contiguous()
    out = torch.empty((x.shape[0], groups, rows), dtype=out_dtype, device=x.device)
    _launch(out, x, flat, scale, None, groups=groups, offset=(0, 0), eps=0.0, quantize=quantize, tile=tile)
    return out


def join_weights(weights: Sequence[Tensor], scales: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor | None]:
    """Return weights [N_i, K] of one dtype as one [sum N_i, K], and its scale if there are scales, by copying.

    e4m3 weights must be whole tiles of 128 rows, the last one excepted: ValueError else.
    """
    cut = [tuple(w.shape) for w in weights[:-1] if scales and w.shape[0] % BLOCK]
    if cut or len({(w.dtype, w.shape[1]) for w in weights}) != 1 or len(scales) not in (0, len(weights)):
        raise ValueError(
            f"weights {[(tuple(w.shape), w.dtype) for w in weights]} with {len(scales)} scales can't be joined: wanted "
            f"one dtype, as many channels in all, a scale for each or none, and e4m3 rows in tiles of {BLOCK}: {cut}"
        )
    return torch.cat(tuple(weights)), torch.cat(tuple(scales)) if scales else None


def quantize_rows(x: Tensor, norm: Tensor | None = None, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return quantize_e4m3(x, 128): codes [T, K] and float32 scales [T, ceil(K / 128)] of x [T, K], any row stride.

    norm: [K], weight of an RMS norm of x before, with `eps`; its result is rounded to x's dtype. On a GPU a token's
    scales lie apart, those of many tokens together. Raises ValueError for what does not fit.
    """
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)}, strides {x.stride()}: wanted [T, K] with channels packed")
    _check_norm(x, norm)
    tokens, channels = x.shape
    if not uses_triton(x):
        if norm is not None:
            x = rms_norm_reference(x, norm, eps).to(x.dtype)
        codes, scale = quantize_e4m3(torch.nn.functional.pad(x, (0, -channels % BLOCK)), BLOCK)
        return codes[:, :channels].contiguous(), scale
    codes = torch.empty((tokens, channels), dtype=torch.float8_e4m3fn, device=x.device)
    # many_kernel reads whole tiles of tokens, and what is there for tokens beyond the last has no effect.
    room = -(-tokens // _ROOM) * _ROOM
    scale = torch.empty((-(-channels // BLOCK), room), dtype=torch.float32, device=x.device)
    pdl, launch = _pdl(x.device)
    groups = blocks_of(channels)
    if tokens:
        quantize_kernel[(tokens,)](
            codes, scale, x, norm, x.stride(0), room, channels, eps, GROUPS=groups, PDL=pdl,
            num_warps=quantize_warps(groups), **launch,
        )  # fmt: skip
    return codes, scale.T[:tokens]


def _check_norm(x: Tensor, norm: Tensor | None) -> None:
    if norm is not None and (norm.shape != x.shape[1:] or not norm.is_contiguous()):
        raise ValueError(f"norm {tuple(norm.shape)}, strides {norm.stride()}: wanted packed ({x.shape[1]},)")


def quantize_warps(groups: int) -> int:
    """Return as many warps as give each lane 8 channels, one load of bfloat16: at most 16."""
    return max(1, min(16, groups // 2))


def _quantized(x: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
    flat = x.reshape(x.shape[0], -1)
    codes, scale = quantize_rows(flat, norm, eps=eps)
    pad = scale.shape[1] * BLOCK - flat.shape[1]
    codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, pad)).view(torch.float8_e4m3fn)
    return dequantize_e4m3(codes, scale, BLOCK)[:, : flat.shape[1]].view(x.shape)


def blocks_of(channels: int) -> int:
    return _power(-(-channels // BLOCK))


def _power(count: int) -> int:
    """Return the least power of two that is not below count."""
    return 1 << (count - 1).bit_length()


def _check(
    x: Tensor, weight: Tensor, scale: Tensor | None, offset: tuple[int, int], out_dtype: torch.dtype, *, groups: int
) -> None:
    rows, channels = weight.shape
    if x.shape[-1] != channels or not channels or not rows:
        raise ValueError(f"x of {x.shape[-1]} channels for a weight {rows} x {channels}")
    if x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != channels and groups > 1) or not weight.is_contiguous():
        raise ValueError(f"strides of x {x.stride()} and weight {weight.stride()}: wanted rows packed")
    if x.dtype not in (torch.bfloat16, torch.float32) or out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x {x.dtype}, out_dtype {out_dtype}: wanted bfloat16 or float32")
    if weight.dtype not in KINDS or (scale is None) != (weight.dtype != torch.float8_e4m3fn):
        raise ValueError(f"weight {weight.dtype} {'without' if scale is None else 'with'} a scale")
    if not all(0 <= at < BLOCK for at in offset) or (scale is None and offset != (0, 0)):
        raise ValueError(f"offset {offset}: wanted 0 to {BLOCK - 1}, and (0, 0) for a weight without a scale")
    wanted = tuple(-(-(at + size) // BLOCK) for at, size in zip(offset, weight.shape, strict=True))
    if scale is not None and (scale.shape != wanted or scale.dtype != torch.float32 or not scale.is_contiguous()):
        raise ValueError(f"scale {tuple(scale.shape)} {scale.dtype} of a weight {rows} x {channels} at {offset}: "
                         f"wanted packed float32 {wanted}")  # fmt: skip


def _check_quantize(quantize: bool, weight: Tensor, offset: tuple[int, int], *, groups: int) -> None:
    if quantize and (KINDS[weight.dtype] or offset[1] or (groups > 1 and weight.shape[-1] % BLOCK)):
        raise ValueError(
            f"quantize with a weight {tuple(weight.shape)} {weight.dtype} at {offset}: wanted e4m3, whole tiles along K"
        )


def _launch(
    out: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, norm: Tensor | None,
    *, groups: int, offset: tuple[int, int], eps: float, quantize: bool, tile: Tile | None, limit: float | None = None,
    order: Order = IN_CHAIN,
) -> None:  # fmt: skip
    tokens = x.shape[0]
    if not tokens:
        return
    if weight.data_ptr() % 16:
        raise ValueError(f"weight begins {weight.data_ptr() % 16} bytes behind a multiple of 16: its kernel needs one")
    rows, channels = weight.shape[0] // groups, weight.shape[1]
    if tile is None and is_large(x, weight, quantize=quantize):
        order.behind()  # nothing leads, and nothing is aside
        x = x if norm is None else _normed(x, norm, eps)
        large_linear(out, x, weight, scale, offset=offset, limit=limit)
        return
    kind, unit = KINDS[weight.dtype], weight.element_size()
    tile = tile or table_tile(
        arch_of(x.device), tokens, rows=groups * rows, channels=channels, unit=unit, quantize=quantize,
        is_whole=channels * unit % 16 == 0 and offset[1] % 16 == 0,
    )  # fmt: skip
    few, held = is_few(tile), is_held(tile)
    pdl, launch = _pdl(x.device)
    if few if quantize else held:
        raise ValueError(f"quantize {quantize} with a tile of {dict(tile.constants)}, of another kernel")
    matrix = Matrix(
        rows,
        channels,
        unit,
        groups,
        quantize or norm is None,
        x.dtype == torch.float32 and not quantize,
        offset[1],
        limit is not None,
    )
    cut = fit(tile, tokens, matrix, sms=sm_count(x.device))
    if few and offset[0] % 16:
        cut["LEAN"] = 0
    splits = cut.pop("SPLIT")
    high, wide = span(cut)
    grid = (-(-rows // high), groups * splits, -(-tokens // wide))
    x_scale = None
    if quantize:
        order = order.behind()
        x, x_scale = quantize_rows(x.reshape(tokens, -1), norm, eps=eps)
        norm = None
    elif norm is not None and not few and not _is_folded(tile, cut, x, norm):
        order = order.behind()
        x, norm = _normed(x, norm, eps), None
    part = None
    slots = grid[0] * groups * grid[2]
    if splits > 1:
        part = torch.empty(slots * splits * high * wide, dtype=torch.float32, device=x.device)
    taken = order.take(reads=(x, x_scale), writes=(out, part))
    counters = _counters(x.device, slots, taken) if splits > 1 else None
    fixed: dict[str, Any] = {"LIMIT": limit, "ORDER": taken, "PDL": pdl, "num_stages": tile.num_stages, **cut}
    fixed |= launch
    fixed |= {} if held else {"SHIFT": offset[1], "KIND": kind}
    if few:
        registers = register_limit(tile, cut, is_wide=x.dtype == torch.float32, is_gated=limit is not None, order=taken)
        most = {} if registers is None else {"maxnreg": registers}
        few_kernel[grid](
            out, x, weight.view(torch.int32) if kind == 0 else weight, scale, norm, part, counters, tokens,
            x.stride(0), out.stride(0), eps, rows, channels * unit // 16, offset[0], splits,
            num_warps=cut["KS"] * cut["RS"], **fixed, **most,
        )  # fmt: skip
        return
    if held:
        held_kernel[grid](
            out, x, x_scale, weight, scale, part, counters, tokens, x.stride(0),
            0 if x_scale is None else x_scale.stride(1), out.stride(0), rows, channels, offset[0], splits,
            num_warps=tile.num_warps, **fixed,
        )  # fmt: skip
        return
    gamma = None if norm is None else norm.view(torch.int32)
    many_kernel[grid](
        out, x, x_scale, weight, scale, gamma, part, counters, tokens, x.stride(0),
        0 if x_scale is None else x_scale.stride(1), out.stride(0), eps, rows, channels, offset[0], splits,
        STAGES=tile.num_stages if quantize else None, num_warps=tile.num_warps, **fixed,
    )  # fmt: skip


def _is_folded(tile: Tile, cut: dict[str, int], x: Tensor, norm: Tensor) -> bool:
    """Return whether many_kernel takes a norm along: in bfloat16, pairs of it from a multiple of 16 bytes on."""
    fits = x.dtype == norm.dtype == torch.bfloat16 and norm.data_ptr() % 16 == 0
    return bool(tile.constants["FOLD"] and cut["EVEN"] and fits)


def _normed(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pdl, launch = _pdl(x.device)
    norm_kernel[(x.shape[0],)](
        out, x, norm, x.stride(0), x.shape[1], eps, BLOCK=_power(x.shape[1]), PDL=pdl, num_warps=8, **launch
    )  # fmt: skip
    return out


def register_limit(tile: Tile, cut: dict[str, int], *, is_wide: bool, is_gated: bool, order: int) -> int | None:
    """Return the limit a thread, None for none.

    Programs that share channels are about as many as multiprocessors: nothing is spilled to make room for more. Gated
    ones can't be lean, so they would spill. Aside, without a limit, ptxas spills eight warps to make room for a third
    program.
    """
    if is_wide or (is_gated and cut["SHARES"] == 1):
        return None
    is_large = cut["SHARES"] > 1 or (order == ASIDE and cut["KS"] * cut["RS"] == 8)
    return tile.constants["REGISTERS"] or (128 if is_large else None)


def _pdl(device: torch.device) -> tuple[bool, dict[str, Any]]:
    pdl = HAS_PDL(device)
    return pdl, {"launch_pdl": True} if pdl else {}


def _counters(device: torch.device, count: int, order: int = CHAIN) -> Tensor:
    """Return counters that are zero between calls: the last program to count puts its own back.

    A launch aside runs while the one before still counts, so it has others.
    """
    if count > _COUNTERS:
        raise ValueError(f"{count} blocks of rows and tokens share channels: at most {_COUNTERS}")
    return zeros("linear_decode aside" if order == ASIDE else "linear_decode", device, _COUNTERS)
