"""Reading rows from inside a Triton kernel: the counterpart of row_store.py for attention's keys.

A tile of keys is BLOCK_N rows that may lie anywhere: in a slot's ring, among this step's rows, in a block. A row of
packed, bf16 or fp32 format is read in two parts, the body of D - 64 channels and the tail of 64 (rope) channels. The
body is padded to GROUPS x 64 channels, GROUPS a power of two that leaves at least one group free.

Packed rows become f16: codes are exact there, scales from 2^-24 to 2^7 too, and so is the product but for what is lost
below 2^-24. Smaller scales, which no writer gives (its floor is 2^-22), count as 0. What f16 can't hold (a scale above
2^7, a rope value above 65,504) comes out as NaN, and so does a NaN code or scale byte: a key that was never written, or
is too large, must not pass for one that scored low.

The free group carries the key's verdict into the scores: it is 0 for a key, -inf for an empty place and NaN for a
wrong one; q holds ones there. So a score needs no mask. Float formats have their verdict added to the score instead.

Words are 4 bytes: one load of 16 bytes holds 16 codes, and no register holds less than 4 of them. The conversion is
inline assembly, since Triton's own unpacks and packs every byte; the interpreter, which has none, takes a plain form.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rows import PACKED_GROUP, ROPE_CHANNELS, Rows
from kernels.triton_env import INTERPRETED

PACKED, BF16, FP32 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FORMATS = {"packed": 0, "bf16": 1, "fp32": 2}

_GROUP, _TAIL = tl.constexpr(PACKED_GROUP), tl.constexpr(ROPE_CHANNELS)
_PLAIN = tl.constexpr(INTERPRETED)
_SIGNS = tl.constexpr(0x0080808080808080)  # bit 7 of the scales of seven groups
_ONES = tl.constexpr(0x38383838)  # four e4m3 codes of 1.0: what the free group holds before its scale, the verdict

_UNPACK = tl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mul.rn.f16x2 first, first, $5;
    mul.rn.f16x2 second, second, $5;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}""")


def key_rows(rows: Rows) -> tuple[Tensor, Tensor, int, int, int]:
    """Return what the kernel takes of a pool: values, scales, then strides of unit, row (values) and unit (scales).

    packed: words of 4 bytes and, for scales, of 8; else the floats, which stand in for the scales too. Strides of
    values count pieces of 16 bytes, so that the compiler sees how wide it may load whatever the numbers are.
    Raises ValueError for a view that can't be read in 16-byte pieces.
    """
    if rows.format not in FORMATS or rows.width <= ROPE_CHANNELS or rows.width & (rows.width - 1):
        raise ValueError(
            f"{rows.format} rows of {rows.width} channels: attention reads {', '.join(FORMATS)} rows of 128, 256, 512 "
            "... channels"
        )
    values, scales = rows.values, rows.values
    if rows.format == "packed":
        assert rows.rope is not None and rows.scales is not None
        body = rows.width - ROPE_CHANNELS
        if rows.scales.shape[-1] != 8 or rows.rope.data_ptr() != rows.values.data_ptr() + body:
            raise ValueError(
                f"packed rows of {rows.width} channels with {rows.scales.shape[-1]} scale bytes: attention reads rows "
                "of at most 512 channels, 8 scale bytes each, the rope tail right behind the codes"
            )
        values, scales = rows.values.view(torch.int32), rows.scales.view(torch.int64)
        if rows.rows > 1 and scales.stride(1) != 1:
            raise ValueError(f"scales of {8 * scales.stride(1)} bytes a row: wanted 8")
    piece = 16 // values.element_size()
    stride_u = values.stride(0) if rows.num_units > 1 else 0
    stride_r = values.stride(1) if rows.rows > 1 else 0
    if values.data_ptr() % 16 or stride_u % piece or stride_r % piece:
        raise ValueError(
            f"{rows.format} rows {values.data_ptr() % 16} bytes off, {stride_u} and {stride_r} x "
            f"{values.element_size()} bytes between units and rows: all must be multiples of 16 bytes; pad the units"
        )
    return values, scales, stride_u // piece, stride_r // piece, scales.stride(0) if rows.num_units > 1 else 0


def groups_of(width: int) -> int:
    """Return GROUPS for rows of `width` channels."""
    return int(triton.next_power_of_2((width - ROPE_CHANNELS) // PACKED_GROUP + 1))


def pointer_of(fmt: str) -> tuple[str, str]:
    """Return the types of the values' and the scales' pointers, as a Variant's signature has them."""
    return {"packed": ("*i32", "*i64"), "bf16": ("*bf16", "*bf16"), "fp32": ("*fp32", "*fp32")}[fmt]


@triton.jit
def pick(
    n, end, token, selected_ptr, width, WINDOW: tl.constexpr, POOL: tl.constexpr, SELECTED: tl.constexpr
):  # fmt: skip
    """Return the entries that keys n [N] of a token are, -1 for those of the window, for none, and beyond `end`."""
    in_pool = (n >= WINDOW) & (n < end)
    if not POOL:
        entry = tl.where(n < 0, n, -1)
    elif SELECTED:
        entry = tl.load(selected_ptr + token.to(tl.int64) * width + (n - WINDOW), mask=in_pool, other=-1)
    else:
        entry = tl.where(in_pool, n - WINDOW, -1)
    return entry


@triton.jit
def look_up(
    entry, sequence, position, table_ptr, table_width, RATIO: tl.constexpr, ROWS: tl.constexpr, POOL: tl.constexpr
):  # fmt: skip
    """Return the blocks of entries [N], -1 where there is none or the entry is not visible yet."""
    block = entry
    if POOL:
        column = entry // ROWS
        sound = (entry >= 0) & (entry < (position + 1) // RATIO) & (column < table_width)
        block = tl.load(table_ptr + sequence.to(tl.int64) * table_width + column, mask=sound, other=-1)
    return block


@triton.jit
def locate(
    n, end, entry, block, place, ring, new, pool, num_blocks, num_slots,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, NEW: tl.constexpr, POOL: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Return where keys n [N] lie: row pointers, scale pointers, is_key, wrong; those beyond `end` are no keys.

    entry, block: of pick and look_up.   place: (position, first position and first token of the step, slot) of the
    query.   ring, new, pool: as key_rows.   PIECE: values in 16 bytes.
    wrong: a key that can't be read: an entry not visible yet or without a block, a slot that doesn't exist.
    """
    position, start, first, slot = place
    values, scales, stride_u, stride_r, stride_su = ring
    near = position - (WINDOW - 1) + n
    is_key = (n < WINDOW) & (n < end) & (near >= 0)
    row = near % WINDOW
    at = values + (slot.to(tl.int64) * stride_u + row * stride_r) * PIECE
    scale_at = scales + (slot.to(tl.int64) * stride_su + row)
    from_ring = is_key
    if NEW:
        values, scales, stride_u, stride_r, stride_su = new
        is_new = near >= start
        unit = (first + near - start).to(tl.int64)
        at = tl.where(is_new, values + unit * stride_u * PIECE, at)
        scale_at = tl.where(is_new, scales + unit * stride_su, scale_at)
        from_ring = is_key & (near < start)
    lost = tl.where((slot < 0) | (slot >= num_slots), WINDOW, 0)
    wrong = from_ring & (n < lost)
    if POOL:
        values, scales, stride_u, stride_r, stride_su = pool
        in_pool = (n >= WINDOW) & (n < end)
        is_entry = entry >= 0
        sound = (block >= 0) & (block < num_blocks)
        row = entry % ROWS
        at = tl.where(in_pool, values + (block.to(tl.int64) * stride_u + row * stride_r) * PIECE, at)
        scale_at = tl.where(in_pool, scales + (block.to(tl.int64) * stride_su + row), scale_at)
        is_key = is_key | is_entry
        wrong = wrong | (is_entry & (sound == 0))
    return at, scale_at, is_key, wrong


@triton.jit
def read_rows(at, scale_at, is_key, wrong, D: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr):
    """Return (body, tail, scales, verdict) of located keys, as stored; what is no key, or wrong, is not read."""
    BODY: tl.constexpr = D - _TAIL
    readable = is_key & (wrong == 0)
    g = tl.arange(0, GROUPS)
    if FORMAT == PACKED:
        # Words. The tail is cut like the body so that both are read by the same threads, rows located once.
        scales = tl.load(scale_at, mask=readable, other=0)
        # Bytes above 134, eight at a time: bit 7 is set, and adding 121 to the rest carries into it.
        top = (scales & 0x7F7F7F7F7F7F7F7F) + 0x7979797979797979
        wrong = wrong | ((top & scales & (_SIGNS >> (56 - BODY // 8))) != 0)
        word = g[:, None] * 16 + tl.arange(0, 16)[None, :]
        used = readable[:, None, None] & (g < BODY // _GROUP)[None, :, None]
        body = tl.load(at[:, None, None] + word[None, :, :], mask=used, other=_ONES)
        word = BODY // 4 + tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tail = tl.load(at[:, None, None] + word[None, :, :], mask=readable[:, None, None], other=0)
    else:
        scales = wrong
        c = g[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        used = readable[:, None, None] & (g < BODY // _GROUP)[None, :, None]
        body = tl.load(at[:, None, None] + c[None, :, :], mask=used, other=0.0)
        tail = tl.load(at[:, None] + (tl.arange(0, _TAIL) + BODY)[None, :], mask=readable[:, None], other=0.0)
    verdict = tl.where(is_key, tl.where(wrong, float("nan"), 0.0), -float("inf"))
    return body, tail, scales, verdict


@triton.jit
def unpack_body(body, scales, verdict, N: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr):
    """Return the body [N, GROUPS * 64] of N keys: f16 with the verdict in its free groups, or the floats themselves."""
    if FORMAT == PACKED:
        g = tl.arange(0, GROUPS)
        exponent = ((scales[:, None] >> (8 * g)[None, :]) & 255).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        scale = tl.where((g < (D - _TAIL) // _GROUP)[None, :], scale, verdict[:, None])
        keys = keep(unpack_f16(body, scale, N, GROUPS))
    else:
        keys = tl.reshape(body, (N, GROUPS * _GROUP))
    return keys


@triton.jit
def unpack_f16(words, scale, N: tl.constexpr, GROUPS: tl.constexpr):
    """Return e4m3 codes, words [N, GROUPS, 16] of four, times scale [N, GROUPS] float32: f16 [N, GROUPS * 64]."""
    if _PLAIN:
        scale = scale.to(tl.float16)[:, :, None]
        a = _code(words) * scale
        b = _code(words >> 8) * scale
        c = _code(words >> 16) * scale
        d = _code(words >> 24) * scale
    else:
        twice = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,r", [scale], dtype=tl.int32, is_pure=True, pack=1
        )
        twice = tl.broadcast_to(twice[:, :, None], (N, GROUPS, 16))
        a, b, c, d = tl.inline_asm_elementwise(
            _UNPACK, "=h,=h,=h,=h,r,r", [words, twice],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (N, GROUPS * _GROUP))


@triton.jit
def unpack_tail(tail, N: tl.constexpr, FORMAT: tl.constexpr):
    """Return the tail [N, 64] of N keys, of the same type as the body."""
    if FORMAT == PACKED:
        even = (tail << 16).to(tl.float32, bitcast=True)
        odd = (tail & -65536).to(tl.float32, bitcast=True)
        keys = keep(tl.reshape(tl.join(to_f16(even), to_f16(odd)), (N, _TAIL)))
    else:
        keys = tail
    return keys


@triton.jit
def _code(words):
    """Return the e4m3 code in the low byte of each word as f16."""
    return (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def to_f16(x):
    """Return x in f16, NaN where that overflows: minus infinity would silence a key."""
    x = x.to(tl.float16)
    return x * 0.0 + x


@triton.jit
def keep(x):
    """Return x [.., even] f16 as something that the compiler can't see through.

    Triton looks back from a dot to the narrowest type it came from, takes every join for half of that, and would lay
    out f16 as if it were 8 bits wide: twice the shared memory, element by element.
    """
    if not _PLAIN:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)
    return x
