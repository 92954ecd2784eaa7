"""The kernel of commit_window (cache_write_decode.py): from a step's staging rows to the rings."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.row_store import scale_row_bytes, value_bytes
from kernels.tiles import Variant

UNALIGNED = ("source", "source_scales", "window", "window_scales")


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=UNALIGNED)
def commit_window_kernel(
    starts, query_start, slots, num_slots, source, source_scales, source_unit, window, window_scales, window_unit,
    WINDOW: tl.constexpr, ROW_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (back, sequence), back below WINDOW: copy the sequence's token that far before its last to the ring."""
    back, seq = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    last = tl.load(query_start + seq + 1) - 1
    token = last - back
    slot = tl.load(slots + seq)
    first = tl.load(query_start + seq)
    if (token >= first) & (slot >= 0) & (slot < num_slots):
        row = (tl.load(starts + seq) + token - first) % WINDOW
        base = slot.to(tl.int64) * window_unit
        at = token.to(tl.int64) * source_unit
        word = tl.arange(0, BLOCK)
        inside = word < ROW_BYTES // 4
        old = (source + at).to(tl.pointer_type(tl.int32), bitcast=True)
        new = (window + base + row * ROW_BYTES).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(new + word, tl.load(old + word, mask=inside), mask=inside)
        if SCALE_BYTES > 0:
            byte = tl.arange(0, SCALE_BYTES)
            scale = tl.load(source_scales + at + byte)
            tl.store(window_scales + base + row * SCALE_BYTES + byte, scale)


def variants(arch: str) -> list[Variant]:
    """Return what is shipped: packed rows of the model's head size."""
    rows, scales = value_bytes("packed", 512), scale_row_bytes("packed", 512)
    return [
        Variant(
            op="commit_window",
            kernel=commit_window_kernel,
            signature={
                **dict.fromkeys(("starts", "query_start", "slots"), "*i32"), **dict.fromkeys(UNALIGNED, "*u8"),
                "num_slots": "i32", "source_unit": "i32", "window_unit": "i32",
            },
            constants={
                "WINDOW": 128, "ROW_BYTES": rows, "SCALE_BYTES": scales, "BLOCK": triton.next_power_of_2(rows // 4),
                "PDL": True,
            },
            num_warps=4,
            num_stages=1,
            tensor_ops=(),
            bytes_per_program=2 * (rows + scales),
            unaligned=(*UNALIGNED, "num_slots"),
        )
    ]  # fmt: skip
