"""Attention of a step: sparse_attention.py straight from packed rows, ready for wo_a.

    out[t, h] = unrope( sum exp(s_n) key_n / (sum exp(s_n) + exp(sink_h)) ),  s_n and keys as in sparse_attention.py
    unrope: the last 64 channels times the conjugate of the token's rotation

One program takes BLOCK_H heads of one token and a share of its keys, BLOCK_N at a time: locate rows (selection -> block
table -> row, each of them read a tile earlier than the next), unpack once for all heads, S = Q K^T, online softmax in
powers of two, O += P K. Shares ("splits") are combined by the last program of a token to finish (FUSED), or by a second
kernel that is launched early and waits. With one split there is nothing to combine.

What can't be right becomes NaN for its token alone, since nothing may wait for the host: an entry that is not visible
yet or has no block, a slot that doesn't exist, a NaN byte in a row that is named. Rows that no token names are never
read. A padding token (sequence -1) gets zeros. A row without keys: zeros; lse is the sink, or -inf without one.

More than 256 tokens, with several of a sequence, take the kernels of sparse_attention_many.py instead.

Number of splits: by batch size, heads and multiprocessors, all known when a graph is captured. With batch_invariant a
split is always the same number of keys and splits are summed in order, so that a token's bits don't depend on what
else is in the batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from kernels.norm_rope import rope
from kernels.ragged import DecodeBatch
from kernels.row_load import FORMATS, groups_of, key_rows, pointer_of
from kernels.rows import ROPE_CHANNELS, Rows
from kernels.scratch import zeros
from kernels.sparse_attention import attend_reference
from kernels.sparse_attention_many import attend_many, is_many, many_tile
from kernels.sparse_attention_triton import INTEGERS, attention_kernel, combine_kernel
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import HAS_PDL, MULTIPROCESSORS, arch_of, sm_count, uses_triton

OP = "sparse_attention"
_COUNTERS = 1 << 16
INVARIANT_KEYS = 128  # of a split in batch-invariant mode


def sparse_attention_decode_reference(
    q: Tensor,
    batch: DecodeBatch,
    window: Rows,
    *,
    sink: Tensor | None,
    scale: float,
    rotation: Tensor | None = None,
    compressed: Rows | None = None,
    ratio: int = 0,
    selected: Tensor | None = None,
    new: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [T, H, D] and lse [T, H], float32. See sparse_attention_decode."""
    out = torch.zeros(q.shape, device=q.device)
    lse = torch.full(q.shape[:2], -math.inf, device=q.device)
    for token in range(batch.num_tokens):
        sequence, position = int(batch.sequence[token]), int(batch.positions[token])
        keys, is_sound = [], True
        if sequence >= 0:
            slot, start = int(batch.slots[sequence]), int(batch.starts[sequence])
            near = torch.arange(max(0, position - window.rows + 1), position + 1, device=q.device)
            old = near[near < start] if new is not None else near
            if old.numel() and not 0 <= slot < window.num_units:
                is_sound = False
            elif old.numel():
                keys.append(window.read(torch.full_like(old, slot), old % window.rows))
            if new is not None:
                unit = near[near >= start] - start + int(batch.query_start[sequence])
                keys.append(new.read(unit, torch.zeros_like(unit)))
        if sequence >= 0 and compressed is not None:
            visible = (position + 1) // ratio
            entries = torch.arange(visible, device=q.device) if selected is None else selected[token].long()
            entries = entries[entries >= 0]
            column = entries // compressed.rows
            is_known = (entries < visible) & (column < batch.block_table.shape[1])
            blocks = batch.block_table[sequence][column[is_known]].long()
            is_sound &= bool(is_known.all()) and bool(((blocks >= 0) & (blocks < compressed.num_units)).all())
            if is_sound:
                keys.append(compressed.read(blocks, entries % compressed.rows))
        rows = torch.cat(keys)[None] if keys and is_sound else q.new_zeros((1, 0, q.shape[2]), dtype=torch.float32)
        allowed = torch.ones(rows.shape[:2], dtype=torch.bool, device=q.device)
        part, part_lse = attend_reference(q[token : token + 1].float() * scale, [rows], [allowed], sink)
        out[token], lse[token] = (part[0], part_lse[0]) if is_sound else (math.nan, math.nan)
    return out if rotation is None else rope(out, rotation.conj()), lse


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is cut. tiles: BLOCK_N keys each that a split takes, 0 if it depends on the token's position."""

    tile: Tile
    splits: int
    tiles: int
    final: bool

    @property
    def combined(self) -> int:
        """A power of two of at least `splits`: how many sizes a combination looks at in one load.

        One of few, so that few kernels are compiled.
        """
        return next((n for n in (4, 32, 128) if self.splits <= n), int(next_power_of_2(self.splits)))

    @property
    def constants(self) -> dict[str, int]:
        """The plan's part of the kernel's constants. Without combination in it, one kernel does for all splits."""
        c = self.tile.constants
        return {
            "BLOCK_H": c["BLOCK_H"],
            "BLOCK_N": c["BLOCK_N"],
            "SWAP": c["SWAP"],
            "SPREAD": c["SPREAD"],
            "FUSED": int(c["FUSED"] and not self.final),
            "SPLITS": 1 if self.final else self.combined if c["FUSED"] else 2,
            "SINGLE": int(self.tiles == 1),
        }


def plan(
    tile: Tile, *, tokens: int, heads: int, keys: int, is_dynamic: bool, multiprocessors: int, batch_invariant: bool
) -> Plan:
    """Return the splits of a call over at most `keys` keys a token; is_dynamic: how many depends on its position."""
    c = tile.constants
    tiles = -(-keys // c["BLOCK_N"])
    if batch_invariant:
        share = max(1, INVARIANT_KEYS // c["BLOCK_N"])
        return Plan(tile, -(-tiles // share), share, final=False)
    programs = tokens * -(-heads // c["BLOCK_H"])
    wanted = max(1, min(c["RESIDENT"] * multiprocessors // programs, tiles, c["MAX_SPLITS"]))
    share = -(-tiles // wanted)
    splits = -(-tiles // share)
    return Plan(tile, splits, 0 if is_dynamic else share, final=splits == 1)


def sparse_attention_decode(
    q: Tensor,
    batch: DecodeBatch,
    window: Rows,
    *,
    sink: Tensor | None,
    scale: float,
    rotation: Tensor | None = None,
    compressed: Rows | None = None,
    ratio: int = 0,
    selected: Tensor | None = None,
    new: Rows | None = None,
    batch_invariant: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    lse: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Return out [T, H, D] of `out_dtype`, turned back by `rotation`.

    q: [T, H, D] contiguous, any float dtype.   window: the slots' rings; they hold this step's rows already, unless
    `new` does.   new: rows of this step, unit t row 0 for token t, when a sequence has several tokens (the ring would
    lose rows that are still needed).   sink: [H] float32 or None.   rotation: complex64 [T, 32] or None.
    compressed: the layer's entries of `ratio`, those of this step included.   selected: [T, K] int32 entry numbers, -1
    for none; None: every visible entry.   batch_invariant: bits of a token don't depend on the rest of the batch.
    lse: [T, H] float32 to be filled, if wanted.   tile: instead of the table's.
    Calls of one stream share counters (scratch.py). Nothing is read back to the host; an entry that is not
    visible or has no block makes its token's row NaN. With dependent launch the batch, but for its block table, is read
    before the kernel ahead has ended: neither it nor one that lets others begin early may have written it in this step.
    """
    _check(q, batch, window, sink, rotation, compressed, ratio, selected, new, lse)
    if not uses_triton(q):
        x, logs = sparse_attention_decode_reference(
            q, batch, window, sink=sink, scale=scale, rotation=rotation, compressed=compressed, ratio=ratio,
            selected=selected, new=new,
        )  # fmt: skip
        if lse is not None:
            lse.copy_(logs)
        return x.to(out_dtype)
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=out_dtype, device=q.device)
    if not tokens:
        return out
    pdl = HAS_PDL(q.device)
    turn = None if rotation is None else torch.view_as_real(rotation)
    if tile is None:
        tile = many_tile(q.device, batch, new, batch_invariant=batch_invariant)
    if tile is not None and is_many(tile):
        attend_many(
            q, out, batch, window, tile, sink=sink, scale_log2e=scale * math.log2(math.e), turn=turn,
            compressed=compressed, ratio=ratio, selected=selected, new=new, lse=lse, pdl=pdl,
        )  # fmt: skip
        return out
    width = 0 if compressed is None or selected is None else selected.shape[1]
    is_dynamic = compressed is not None and selected is None
    keys = window.rows + width
    if compressed is not None and selected is None:
        # Of a fixed number of keys a split, the last must reach beyond the table: an entry without a column makes NaN.
        keys += batch.block_table.shape[1] * compressed.rows + int(batch_invariant)
    if tile is None:
        shape = {"tokens": 1 if batch_invariant else tokens, "heads": heads, "row_bytes": row_bytes(window.format, dim)}
        tile = tile_for(OP, arch_of(q.device), **shape)
    cut = plan(
        tile, tokens=tokens, heads=heads, keys=keys, is_dynamic=is_dynamic, multiprocessors=sm_count(q.device),
        batch_invariant=batch_invariant,
    )  # fmt: skip

    parts: Tensor | None = None
    sizes: Tensor | None = None
    counters: Tensor | None = None
    if not cut.final:
        parts = torch.empty((tokens, cut.splits, heads, dim), dtype=out_dtype, device=q.device)
        sizes = torch.empty((tokens, cut.splits, heads), dtype=torch.float32, device=q.device)
        if tile.constants["FUSED"]:
            counters = _counters(q.device, tokens * -(-heads // tile.constants["BLOCK_H"]))
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    ring = key_rows(window)
    fresh = (None, None, 0, 0, 0) if new is None else key_rows(new)
    pool = (None, None, 0, 0, 0) if compressed is None else key_rows(compressed)
    attention_kernel[(cut.splits, tokens, -(-heads // tile.constants["BLOCK_H"]))](
        q, out, lse, parts, sizes, counters, sink, turn,
        batch.positions, batch.sequence, batch.starts, batch.query_start, batch.slots, batch.block_table, selected,
        ring[0], ring[1], fresh[0], fresh[1], pool[0], pool[1],
        ring[2], ring[3], ring[4], fresh[2], fresh[4], pool[2], pool[3], pool[4],
        scale * math.log2(math.e), width, batch.block_table.shape[1],
        0 if compressed is None else compressed.num_units, window.num_units, cut.tiles,
        H=heads, D=dim, WINDOW=window.rows, RATIO=ratio if compressed is not None else 0,
        ROWS=1 if compressed is None else compressed.rows, FORMAT=FORMATS[window.format], GROUPS=groups_of(dim),
        PDL=pdl, **cut.constants, num_warps=tile.num_warps, num_stages=tile.num_stages, **launch,
    )  # fmt: skip
    if not cut.final and not tile.constants["FUSED"]:
        rows = tile.constants["COMBINE_H"]
        combine_kernel[(tokens, -(-heads // rows))](
            out, lse, parts, sizes, sink, turn, cut.splits,
            H=heads, D=dim, BLOCK_H=rows, SPLITS=cut.combined, PDL=pdl, num_warps=4, **launch,
        )  # fmt: skip
    return out


def row_bytes(fmt: str, width: int) -> int:
    """Return about the bytes of a row, by which tiles are chosen: they are cut for what fits shared memory."""
    return width * {"packed": 1, "bf16": 2, "fp32": 4}[fmt]


def _counters(device: torch.device, count: int) -> Tensor:
    """Return counters that are zero between calls: the last program to count puts its own back."""
    if count > _COUNTERS:
        raise ValueError(f"{count} tokens x head blocks in a decode step: at most {_COUNTERS}")
    return zeros("sparse_attention_decode", device, _COUNTERS)


def _check(
    q: Tensor, batch: DecodeBatch, window: Rows, sink: Tensor | None, rotation: Tensor | None,
    compressed: Rows | None, ratio: int, selected: Tensor | None, new: Rows | None, lse: Tensor | None,
) -> None:  # fmt: skip
    tokens, heads, dim = q.shape
    if tokens != batch.num_tokens or dim != window.width or not q.is_contiguous():
        raise ValueError(
            f"q {tuple(q.shape)}, strides {q.stride()}: wanted {batch.num_tokens} tokens of {window.width}, contiguous"
        )
    if sink is not None and (sink.shape != (heads,) or not sink.is_contiguous()):
        raise ValueError(f"sink of shape {tuple(sink.shape)} for {heads} heads")
    if rotation is not None and (
        rotation.shape != (tokens, ROPE_CHANNELS // 2)
        or rotation.dtype != torch.complex64
        or not rotation.is_contiguous()
    ):
        raise ValueError(
            f"rotation {tuple(rotation.shape)} {rotation.dtype}, strides {rotation.stride()}: wanted contiguous "
            f"complex64 ({tokens}, {ROPE_CHANNELS // 2})"
        )
    for rows, name in ((compressed, "compressed"), (new, "new")):
        if rows is not None and (rows.format, rows.width) != (window.format, dim):
            raise ValueError(
                f"{name} rows: {rows.format} of {rows.width} channels, the window's {window.format} of {dim}"
            )
    if compressed is not None and ratio < 1:
        raise ValueError(f"compressed rows with a ratio of {ratio}")
    if selected is not None and (
        compressed is None
        or selected.shape[0] != tokens
        or selected.dtype != torch.int32
        or not selected.is_contiguous()
    ):
        raise ValueError(
            f"selection {tuple(selected.shape)} {selected.dtype}: wanted contiguous int32 of {tokens} tokens"
        )
    if new is not None and (new.rows != 1 or new.num_units < tokens):
        raise ValueError(f"{new.num_units} units of {new.rows} new rows for {tokens} tokens: wanted one row a unit")
    if new is None and batch.max_query_len > 1:
        raise ValueError(f"{batch.max_query_len} tokens of one sequence: the ring can't hold them all, pass `new`")
    if lse is not None and (lse.shape != (tokens, heads) or lse.dtype != torch.float32 or not lse.is_contiguous()):
        raise ValueError(f"lse {tuple(lse.shape)} {lse.dtype}: wanted contiguous float32 ({tokens}, {heads})")


# Of a layer: ratio, rows of a block, most keys of a token (entries at 128k context).
_KINDS = {"selected": (4, 64, 128 + 512), "visible": (128, 2, 128 + 1024), "window": (0, 1, 128)}
# Row format, head size, heads, kind of layer, whether rows are staged, most tokens of a step.
_Launched = tuple[str, int, int, str, bool, int]
# What the offline gate compiles: what a TP4 rank of DeepSeek-V4-Flash launches.
_SHIPPED: list[_Launched] = [
    *(("packed", 512, 16, kind, False, 256) for kind in _KINDS),
    ("packed", 512, 16, "selected", True, 64),
]
# Other formats of rows.
_UNPACKED: list[_Launched] = [
    ("bf16", 512, 4, "selected", True, 64),
    ("fp32", 128, 4, "selected", True, 4),  # float32 rows are for tests: with more tokens, or in a loop, they spill
]
# All that is meant to work, batch-invariant too: minutes of compiling, so a long test does it instead of the gate.
_RARE: list[_Launched] = [
    *(
        ("packed", 512, heads, kind, staged, 256)
        for heads in (8, 16, 32, 64)
        for kind in _KINDS
        for staged in (False, True)
    ),
    *((fmt, 128, 4, kind, staged, 64) for fmt in ("packed", "bf16") for kind in _KINDS for staged in (False, True)),
]


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate."""
    return _variants(arch, _SHIPPED, batch_invariant=(False,))


def rare_variants(arch: str) -> list[Variant]:
    """Return the compilations for any usual number of heads, staged rows, rows of 128 channels, and batch-invariant."""
    unpacked = _variants(arch, _UNPACKED, batch_invariant=(False,))
    return [*_variants(arch, _RARE, batch_invariant=(False, True)), *unpacked]


def _variants(arch: str, launched: list[_Launched], *, batch_invariant: tuple[bool, ...]) -> list[Variant]:
    found: dict[str, Variant] = {}
    for fmt, dim, heads, kind, new, most in launched:
        cuts: dict[str, Plan] = {}
        for tokens, is_invariant in itertools.product(range(1, most + 1), batch_invariant):
            shape = {"tokens": 1 if is_invariant else tokens, "heads": heads}
            tile = tile_for(OP, arch, **shape, row_bytes=row_bytes(fmt, dim))
            cut = plan(
                tile, **shape, keys=_KINDS[kind][2], is_dynamic=kind == "visible",
                multiprocessors=MULTIPROCESSORS[arch], batch_invariant=is_invariant,
            )  # fmt: skip
            cuts.setdefault(repr((cut.constants, cut.combined, tile.num_warps)), cut)
        for cut in cuts.values():
            for variant in _variants_of(fmt, dim, heads, kind, new, cut):
                found.setdefault(repr((variant.constants, variant.num_warps)), variant)
    return list(found.values())


def _variants_of(fmt: str, dim: int, heads: int, kind: str, new: bool, cut: Plan) -> list[Variant]:
    tile, (ratio, rows, _) = cut.tile, _KINDS[kind]
    values, scales = pointer_of(fmt)
    out = "*fp32" if fmt == "fp32" else "*bf16"
    signature = dict.fromkeys(attention_kernel.arg_names, "*i32") | dict.fromkeys(INTEGERS, "i32")
    signature |= {"q_ptr": out, "out_ptr": out, "part_ptr": out, "scale_log2e": "fp32"}
    signature |= dict.fromkeys(("part_lse_ptr", "sink_ptr", "rotation_ptr"), "*fp32")
    for source in ("ring", "new", "pool"):
        signature |= {f"{source}_ptr": values, f"{source}_scale_ptr": scales}
    absent = ["lse_ptr"]
    absent += [] if new else ["new_ptr", "new_scale_ptr"]
    absent += [] if kind != "window" else ["pool_ptr", "pool_scale_ptr"]
    absent += [] if kind == "selected" else ["selected_ptr"]
    absent += ["part_ptr", "part_lse_ptr"] if cut.final else []
    absent += [] if cut.constants["FUSED"] else ["counter_ptr"]
    constants: dict[str, Any] = dict.fromkeys(absent) | {
        "H": heads, "D": dim, "WINDOW": 128, "RATIO": ratio, "ROWS": rows, "FORMAT": FORMATS[fmt],
        "GROUPS": groups_of(dim), "PDL": True, **cut.constants,
    }  # fmt: skip
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    found = [
        Variant(
            OP,
            attention_kernel,
            signature,
            constants,
            tile.num_warps,
            tile.num_stages,
            bytes_per_program=tile.constants["BLOCK_N"] * {"packed": dim + 72, "bf16": 2 * dim, "fp32": 4 * dim}[fmt],
            unaligned=INTEGERS,
        )
    ]
    if not cut.final and not tile.constants["FUSED"]:
        given = {"out_ptr": out, "part_ptr": out, "part_lse_ptr": "*fp32", "sink_ptr": "*fp32"}
        given |= {"rotation_ptr": "*fp32", "splits": "i32"}
        fixed = {"lse_ptr": None, "H": heads, "D": dim, "BLOCK_H": tile.constants["COMBINE_H"]}
        fixed |= {"SPLITS": cut.combined, "PDL": True}
        found.append(Variant(OP, combine_kernel, given, fixed, 4, 3, tensor_ops=(), unaligned=("splits",)))
    return found
