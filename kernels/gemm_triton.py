"""The Triton kernels of gemm_decode.py: y = x W^T with few tokens, and with many.

Weights [rows, channels] are read as a checkpoint stores them. They are the left operand, tokens the narrow right one.

few_kernel: a warp loads 16 rows, 128 bytes of each at a time, straight into the registers in which the tensor cores
want their left operand (gemm_fragment_triton.py), before it waits for the kernel that writes x. No shared memory, no
barrier, until the sums of warps that share channels are added.

many_kernel: tiles in shared memory, copied in the background. Of e4m3 activations it copies the scales along.
(gemm_held_triton.py has a kernel for those without a loop.)

The scale of a 128 x 128 block of e4m3 goes onto the sum over 128 channels, in float32. A block may be cut: rows and
channels of the weight then begin inside one.

Where programs share the channels (SPLIT > 1), each writes its sums, and the last one adds all of them in order.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gemm_fragment_triton import (
    BF16,
    FP8,
    lane_gamma,
    lane_tokens,
    lane_weights,
    multiply,
    product,
    weigh,
    widen,
)  # fmt: skip


@triton.jit
def group_and_share(splits, SHARES: tl.constexpr):
    """Return group and share of this program, the second axis of the grid."""
    group, split = tl.program_id(1), 0
    if SHARES > 1:
        group, split = group // splits, group % splits
    return group, split


@triton.jit
def weight_row(row, rows, IS_GATED: tl.constexpr):
    """Return which row of weights a product has as its `row`: if gated eight of the first half, eight of the other."""
    if IS_GATED:
        row = row // 16 * 8 + row % 8 + row // 8 % 2 * (rows // 2)
    return row


@triton.jit
def _halves(x, A: tl.constexpr, N: tl.constexpr):
    """Return the gates' and the values' rows [A / 2, N] of x [A, N]."""
    gate, up = tl.split(tl.permute(tl.reshape(x, (A // 16, 2, 8, N)), (0, 2, 3, 1)))
    return tl.reshape(gate, (A // 2, N)), tl.reshape(up, (A // 2, N))


@triton.jit
def _write(
    out_ptr, out_stride, total, row, token, tokens, column, rows, A: tl.constexpr, N: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Write total [A, N], or what its gates leave of its values: see moe.gated."""
    if LIMIT is None:
        _store(out_ptr, out_stride, total, row, token, tokens, column, rows)
    else:
        gate, up = _halves(total, A, N)
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # comparisons, which let NaN through
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        first, _second = _halves(row[:, None], A, 1)
        row = tl.reshape(first, (A // 2,))
        row = row // 16 * 8 + row % 8
        _store(out_ptr, out_stride, gate / (1.0 + tl.exp(-gate)) * up, row, token, tokens, column, rows // 2)


@triton.jit
def _store(out_ptr, out_stride, total, row, token, tokens, column, rows):
    """Write total [A, N] of rows [A] and tokens [N] behind column `column`."""
    to = out_ptr + token.to(tl.int64)[None, :] * out_stride + (column + row)[:, None]
    tl.store(to, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (token < tokens)[None, :])


@triton.jit
def finish(
    out_ptr, out_stride, part_ptr, counter_ptr, total, row, token, tokens, group, rows, split, splits,
    A: tl.constexpr, N: tl.constexpr, SHARES: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Write total [A, N], or, where programs have parts of it, have the last of them write their sum.

    LIMIT: None, or of gates and values, which alternate by eights (one group): their product is written.
    """
    if SHARES == 1:
        _write(out_ptr, out_stride, total, row, token, tokens, group * rows, rows, A, N, LIMIT)
    else:
        slot = (group * tl.num_programs(2) + tl.program_id(2)) * tl.num_programs(0) + tl.program_id(0)
        part_ptr += slot.to(tl.int64) * splits * (A * N)
        place = part_ptr + tl.arange(0, A)[:, None] * N + tl.arange(0, N)[None, :]
        tl.store(place + split * (A * N), total)
        # All threads have stored before one of them counts; the count releases their stores and acquires others'.
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + slot, 1, sem="acq_rel", scope="gpu") == splits - 1:
            tl.store(counter_ptr + slot, 0)  # for the next launch
            whole = tl.load(place, cache_modifier=".cg")
            for other in tl.static_range(1, SHARES):
                there = tl.zeros((A, N), tl.int32) + other < splits
                whole += tl.load(place + other * (A * N), mask=there, other=0.0, cache_modifier=".cg")
            _write(out_ptr, out_stride, whole, row, token, tokens, group * rows, rows, A, N, LIMIT)


@triton.jit(do_not_specialize=["tokens", "pieces", "row_shift", "splits"])
def few_kernel(
    out_ptr, x_ptr, w_ptr, scale_ptr, gamma_ptr, part_ptr, counter_ptr, tokens, x_stride, out_stride, eps,
    rows, pieces, row_shift, splits,
    SHIFT: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, KS: tl.constexpr, RS: tl.constexpr, NB: tl.constexpr,
    DEPTH: tl.constexpr, SHARES: tl.constexpr, ONCE: tl.constexpr, EVEN: tl.constexpr, LEAN: tl.constexpr,
    LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[token, group rows + row] = sum over the channels, pieces of 16 bytes.

    Grid (tiles of 16 R RS rows, groups x splits, 8 NB tokens). Warp ks RS + rs takes tiles rs, rs + RS, ... of 16 rows
    and every KS-th chunk of 128 bytes; DEPTH chunks are on their way at a time.   SHARES: most splits.   ONCE: a warp
    has DEPTH chunks and no more.   EVEN: every tile has its rows, every warp of every split as many chunks.
    LEAN: even, R 1, and every tile has one row of scales, which is then read once.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    W: tl.constexpr = KS * RS
    C: tl.constexpr = 16 if KIND == FP8 else (8 if KIND == BF16 else 4)
    UNIT: tl.constexpr = 4 if KIND == FP8 else 1
    group, split = group_and_share(splits, SHARES)
    channels = pieces * C
    chunks = (channels + SHIFT + 8 * C - 1) // (8 * C)
    share = DEPTH
    if not ONCE:
        share = chunks
        if SHARES > 1:
            share = (share + splits - 1) // splits
        share = (share + KS - 1) // KS
    first = tl.program_id(0) * (R * RS)
    w_ptr += group.to(tl.int64) * rows * (channels // UNIT)
    x_ptr += group * channels
    warp = tl.arange(0, W)
    chunk = split * (share * KS) + warp // RS
    tile = first + tl.arange(0, R)[None, :] * RS + (warp % RS)[:, None]
    half = tl.arange(0, 8)[:, None, None, None] + tl.arange(0, 2)[None, None, None, :] * 8
    row = weight_row(tile[None, :, :, None] * 16 + half, rows, LIMIT is not None)
    # The scales' rows, in the order of the sums.
    line = tile * 16
    if not LEAN:
        line = tl.reshape(line[:, :, None] + tl.arange(0, 16)[None, None, :], (W, 16 * R))
        line = weight_row(line, rows, LIMIT is not None)
    line = (group * rows + row_shift + line) // 128
    if not EVEN:
        line = tl.minimum(line, (group * rows + row_shift + rows - 1) // 128)
    weights, scales = (), ()
    for d in tl.static_range(DEPTH):
        weights += (lane_weights(w_ptr, row, chunk, d * KS, True, rows, channels, SHIFT, KIND, EVEN),)
        if KIND == FP8:
            scales += (_scale(scale_ptr, line, chunk + d * KS, True, chunks, EVEN),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(2) * (8 * NB) + tl.arange(0, NB)[None, :] * 8 + tl.arange(0, 8)[:, None]
    total = tl.zeros((W, 16 * R, 8 * NB), tl.float32)
    squares = tl.zeros((4, 8, W, NB), tl.float32)
    for step in range(0, DEPTH if ONCE else share, DEPTH):
        next_weights, next_scales, tokens_here = (), (), ()
        follows = step + DEPTH
        onward = tl.where(follows < share, follows, 0)  # the last step asks again for what the first one had
        for d in tl.static_range(DEPTH):
            here = chunk + (step + d) * KS
            tokens_here += (lane_tokens(x_ptr, x_stride, token, tokens, here, channels, C, SHIFT, EVEN),)
        for d in tl.static_range(DEPTH):
            x = tokens_here[d]
            if gamma_ptr is not None:
                here = chunk + (step + d) * KS
                x, squares = weigh(x, lane_gamma(gamma_ptr, here, channels, C, SHIFT, x.shape[6], EVEN), squares)
            sums = multiply(weights[d], x, W, R, NB, KIND)
            if KIND == FP8:
                sums *= scales[d][:, :, None]
            total += sums
            if not ONCE:
                wanted = follows + d < share
                next_weights += (
                    lane_weights(w_ptr, row, chunk, (onward + d) * KS, wanted, rows, channels, SHIFT, KIND, EVEN),
                )
                if KIND == FP8:
                    next_scales += (_scale(scale_ptr, line, chunk + (onward + d) * KS, wanted, chunks, EVEN),)
        if not ONCE:
            weights, scales = next_weights, next_scales
    whole = tl.sum(tl.reshape(total, (KS, RS, 16 * R, 8 * NB)), 0)
    whole = tl.reshape(whole, (RS * R * 16, 8 * NB))
    if gamma_ptr is not None:
        shared = tl.reshape(tl.sum(squares, 0), (8, KS, RS, NB))
        mean = tl.sum(tl.sum(shared, 2), 1) / (RS * channels)
        factor = tl.reshape(tl.permute(tl.rsqrt(mean + eps), (1, 0)), (8 * NB,))
        whole *= factor[None, :]
    place = first + tl.arange(0, RS)[:, None] + tl.arange(0, R)[None, :] * RS
    place = tl.reshape(place[:, :, None] * 16 + tl.arange(0, 16)[None, None, :], (RS * R * 16,))
    finish(
        out_ptr, out_stride, part_ptr, counter_ptr, whole, place, tl.program_id(2) * (8 * NB) + tl.arange(0, 8 * NB),
        tokens, group, rows, split, splits, 16 * R * RS, 8 * NB, SHARES, LIMIT,
    )  # fmt: skip


@triton.jit
def _scale(scale_ptr, line, chunk, wanted, columns, EVEN: tl.constexpr):
    """Return the scales of lines [W, 16 R], or [W, 1], at chunks [W]; 0 beyond the last."""
    place = scale_ptr + line * columns + chunk[:, None]
    live = (chunk < tl.where(wanted, columns, 0))[:, None]
    return tl.load(place) if EVEN else tl.load(place, mask=live, other=0.0)


@triton.jit(do_not_specialize=["tokens", "row_shift", "splits"])
def many_kernel(
    out_ptr, x_ptr, x_scale_ptr, w_ptr, scale_ptr, part_ptr, counter_ptr, tokens, x_stride, scale_stride, out_stride,
    rows, channels, row_shift, splits,
    SHIFT: tl.constexpr, KIND: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As few_kernel, from tiles of BLOCK_R rows and BLOCK_T tokens. Grid (tiles, groups x splits, token tiles).

    x_scale_ptr: scales of x, e4m3, for each 128 channels one of every token, scale_stride apart, and as many as there
    are in whole tiles; None: x is no e4m3.   EVEN: all steps are whole.   STAGES: None, or how many steps ahead scales
    are copied too, which a loop does only if it is told its stages.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    group, split = group_and_share(splits, SHARES)
    steps = (channels + SHIFT + BLOCK_K - 1) // BLOCK_K
    columns = (channels + SHIFT + 127) // 128
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = weight_row(tl.minimum(row, rows - 1), rows, LIMIT is not None)
    first, last = 0, steps
    if SHARES > 1:
        share = (steps + splits - 1) // splits
        first, last = split * share, tl.minimum(split * share + share, steps)
    w_row = w_ptr + (group * rows + inside).to(tl.int64) * channels
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = tl.minimum(token, tokens - 1)
    x_row = x_ptr + known.to(tl.int64) * x_stride + group * channels
    channel = tl.arange(0, BLOCK_K)
    line = (group * rows + row_shift + inside) // 128
    total = tl.zeros((BLOCK_R, BLOCK_T), tl.float32)
    scale = 1.0
    if KIND == FP8:
        scale_line = scale_ptr + line * columns
        if x_scale_ptr is None:
            scale = tl.load(scale_line + first * BLOCK_K // 128)
        else:
            x_line = x_scale_ptr + token + group * columns * scale_stride
    for step in tl.range(first, last, num_stages=STAGES):
        at = step * BLOCK_K + channel - SHIFT
        if EVEN:
            w = tl.load(w_row[:, None] + at[None, :])
            x = tl.load(x_row[:, None] + at[None, :])
        else:
            live = (at >= 0) & (at < channels)
            w = tl.load(w_row[:, None] + at[None, :], mask=live[None, :], other=0.0)
            x = tl.load(x_row[:, None] + at[None, :], mask=live[None, :], other=0.0)
        if KIND != FP8:
            total = product(w, tl.trans(x), total)
        elif x_scale_ptr is None:
            # The next step's, asked for before the product so that it is there behind it.
            following = tl.load(scale_line + tl.minimum(step + 1, steps - 1) * BLOCK_K // 128)
            total += product(widen(w), tl.trans(x), tl.zeros((BLOCK_R, BLOCK_T), tl.float32)) * scale[:, None]
            scale = following
        else:
            block = step * BLOCK_K // 128
            w_scale, x_scale = tl.load(scale_line + block), tl.load(x_line + block * scale_stride)
            sums = tl.dot(w, tl.trans(x), tl.zeros((BLOCK_R, BLOCK_T), tl.float32))
            total += sums * w_scale[:, None] * x_scale[None, :]
    finish(
        out_ptr, out_stride, part_ptr, counter_ptr, total, row, token, tokens, group, rows, split, splits,
        BLOCK_R, BLOCK_T, SHARES, LIMIT,
    )  # fmt: skip


@triton.jit
def quantize_kernel(
    codes_ptr, scale_ptr, x_ptr, gamma_ptr, x_stride, scale_stride, channels, eps,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """quant.quantize_e4m3 of rows of x in groups of 128 channels, the last one possibly cut. Grid (tokens,).

    A group's scales lie together, those of the next one scale_stride behind them.   gamma_ptr: weight of an RMS norm
    before it, whose result is rounded to x's dtype, or None.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = (channels + 127) // 128
    token, group = tl.program_id(0).to(tl.int64), tl.arange(0, GROUPS)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    if gamma_ptr is not None:
        gamma = tl.load(gamma_ptr + at, mask=at < channels, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * x_stride + at, mask=at < channels, other=0.0).to(tl.float32)
    if gamma_ptr is not None:
        y = x * tl.rsqrt(tl.sum(x * x) / channels + eps) * gamma
        x = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    # On the bits, which order magnitudes as the values do, with inf and NaN at the top. 0x38D1B717: 1e-4. A mantissa
    # above that of 448 = 1.75 * 2^8 takes the next power of two.
    largest = tl.maximum(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0x38D1B717)
    broken = largest >= 0x7F800000
    power = ((largest + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    inverse = tl.where(broken, 0, (254 << 23) - power).to(tl.float32, bitcast=True)  # exact; 0 * inf is NaN
    scale = tl.where(broken, largest, power).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + group * scale_stride + token, scale, mask=group < columns)
    tl.store(codes_ptr + token * channels + at, (x * inverse[:, None]).to(tl.float8e4nv), mask=at < channels)


@triton.jit
def norm_kernel(
    out_ptr, x_ptr, gamma_ptr, x_stride, channels, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """out = rms(x, gamma), rows of up to BLOCK channels, in x's dtype. Grid (tokens,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    gamma = tl.load(gamma_ptr + at, mask=at < channels, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + token * x_stride + at, mask=at < channels, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / channels + eps) * gamma
    tl.store(out_ptr + token * channels + at, y.to(out_ptr.dtype.element_ty), mask=at < channels)
