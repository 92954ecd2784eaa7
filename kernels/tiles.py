"""Tiles of every Triton kernel, per architecture: the one table that is tuned.

`TILES[op][arch]` is a tuple of tiles, searched in order: the first whose every limit in `upto` is at least the shape
given to `tile_for` is taken, so the last one has no limits. An op's kernel module turns the same tuple into `variants`,
so what is dispatched is what the offline gate has compiled. This table holds numbers only: no kernel is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, eq=False)
class Tile:
    """How one kernel is cut and launched.

    constants: its tile constexprs by name (BLOCK_N, ...).   upto: largest shape it is meant for, by name of the shape.
    """

    constants: Mapping[str, int]
    num_warps: int
    num_stages: int = 1
    upto: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One compilation that we ship, as the offline gate needs it.

    op: name of the operation.   kernel: the @triton.jit function.
    signature: type of each argument that is no constexpr: "*bf16", "*fp32", "*fp8e4nv", "*u8", "*i32", "i32", "fp32".
    constants: value of every constexpr of the kernel; None for an optional pointer that is left out.
    tensor_ops: SASS opcodes of which each must occur, () for a kernel without matrix products. On sm_90 HGMMA may
    stand for HMMA, and QGMMA for QMMA.   bytes_per_program: bytes that one program reads and writes in device memory
    (of one pass of its loop if that is all the loop body does), for instructions per byte; None: not reported.
    unaligned: integer and pointer arguments that are not multiples of 16; the JIT marks all others so at run time.
    ones: integer arguments that are always 1, which the JIT turns into constants.
    maxnreg: register limit per thread, if the launch sets one.   has_packed_weights: as
    left operand, unpacked and scaled in registers: instructions per weight are reported and bounded.
    has_peers: it writes memory of other GPUs: no atomics, and flags of system scope.
    """

    op: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    tensor_ops: Sequence[str] = ("HMMA",)
    bytes_per_program: int | None = None
    unaligned: Sequence[str] = ()
    ones: Sequence[str] = ()
    maxnreg: int | None = None
    has_packed_weights: bool = False
    has_peers: bool = False


def _attention(
    block_h: int,
    block_n: int,
    *,
    warps: int,
    resident: int,
    splits: int = 32,
    fused: bool = False,
    swap: bool = False,
    spread: bool = False,
    **upto: int,
) -> Tile:
    """A tile of sparse_attention: as many splits, up to `splits`, as give each multiprocessor `resident` programs."""
    constants = {
        "BLOCK_H": block_h,
        "BLOCK_N": block_n,
        "SWAP": int(swap),
        "SPREAD": int(spread),
        "FUSED": int(fused),
        "RESIDENT": resident,
        "MAX_SPLITS": splits,
        "COMBINE_H": 1,
    }
    return Tile(constants, num_warps=warps, num_stages=1, upto=upto)


def _many(block_h: int, block_n: int, *, warps: int) -> Tile:
    """A tile of attention of many tokens: a token's heads and keys at a time."""
    return Tile({"BLOCK_H": block_h, "BLOCK_N": block_n}, num_warps=warps)


def _experts(
    r: int,
    *,
    ks: int = 1,
    rs: int = 1,
    s: int = 4,
    pair_s: int = 0,
    nb: int = 0,
    many_r: int = 1,
    many_s: int = 1,
    ahead: int = 1,
    split: int = 1,
    registers: int = 0,
    resident: int = 0,
    stages: int = 1,
    **upto: int,
) -> Tile:
    """A tile of the experts' products; moe_decode.fit says what the constants mean.

    registers: limit a thread, or 0.   resident: programs a multiprocessor, which then take several items, or 0.
    """
    constants = {"R": r, "KS": ks, "RS": rs, "S": s, "PAIR_S": pair_s}
    constants |= {"NB": nb, "MANY_R": many_r, "MANY_S": many_s, "AHEAD": ahead, "SPLIT": split}
    constants |= {"REGISTERS": registers, "RESIDENT": resident}
    return Tile(constants, num_warps=ks * rs, num_stages=stages, upto=upto)


def _blocks(
    w: int, *, r: int = 1, nb: int = 16, s: int = 1, ahead: int = 2, registers: int = 0, stages: int = 2, **upto: int
) -> Tile:
    """A tile of the experts' products for blocks of many rows; moe_blocks.fit says what the constants mean."""
    constants = {"W": w, "R": r, "NB": nb, "S": s, "AHEAD": ahead, "REGISTERS": registers}
    return Tile(constants, num_warps=w, num_stages=stages, upto=upto)


def _few(ks: int, *, rs: int = 1, r: int = 1, depth: int = 2, split: int = 4, registers: int = 0, **upto: int) -> Tile:
    """A tile of a linear layer with few tokens; gemm_cut.fit_few says what the constants mean."""
    constants = {"R": r, "KS": ks, "RS": rs, "DEPTH": depth, "MAX_SPLIT": split, "RESIDENT": 1, "REGISTERS": registers}
    return Tile(constants, num_warps=ks * rs, num_stages=1, upto=upto)


def _linear(
    rows: int, columns: int, size: int = 128, *, warps: int = 4, stages: int = 4, split: int = 4, least: int = 4,
    resident: int = 1, fold: int = 0, **upto: int,
) -> Tile:  # fmt: skip
    """A tile of a linear layer with many tokens: rows x columns (tokens), `size` bytes of a row at a time.

    What the constants mean: gemm_cut.fit_many.
    """
    constants = {"BLOCK_R": rows, "BLOCK_T": columns, "BYTES": size, "MAX_SPLIT": split, "RESIDENT": resident}
    constants |= {"LEAST": least, "FOLD": fold}
    return Tile(constants, num_warps=warps, num_stages=stages, upto=upto)


def _held(rows: int, columns: int, steps: int, *, warps: int = 8, split: int = 4, least: int = 8, **upto: int) -> Tile:
    """A tile of a linear layer whose operands stay in shared memory; gemm_cut.fit_held says what they mean."""
    constants = {"BLOCK_R": rows, "BLOCK_T": columns, "STEPS": steps, "MAX_SPLIT": split}
    return Tile(constants | {"RESIDENT": 1, "LEAST": least}, num_warps=warps, upto=upto)


def _dequantize(rows: int, blocks: int, *, warps: int = 4) -> Tile:
    """A tile of weights that are widened: rows, and scales along each."""
    return Tile({"BLOCK_R": rows, "BLOCKS": blocks}, num_warps=warps)


def _spread(warps: int, spans: int, **upto: int) -> Tile:
    return Tile({"W": warps, "L": spans}, num_warps=warps, upto=upto)


def _spread_chunk(tokens: int, channels: int, *, span: int, stages: int, warps: int) -> Tile:
    """A tile of a chunk's hyper-connection: tokens and channels of a program, and at a time; loads that many ahead."""
    return Tile({"M": tokens, "C": channels, "SPAN": span, "STAGES": stages}, num_warps=warps)


def _gate(ks: int, split: int, *, nb: int = 1, converted: int = 1024, **upto: int) -> Tile:
    """A tile of the gate; moe_gate._constants says what the constants mean. converted: activations of a program."""
    constants = {"KS": ks, "SPLIT": split, "NB": nb, "CONVERTED": converted}
    return Tile(constants, num_warps=ks, num_stages=1, upto=upto)


def _sampling(
    r: int = 2, q: int = 32, e: int = 16, *, scan: int = 4, scans: int = 8, scan_registers: int = 64, weigh: int = 4,
    share: int = 4096, tokens: int = 512, resident: int = 6, registers: int = 80, choose: int = 8, gather: int = 16,
) -> Tile:  # fmt: skip
    """A tile of sampling: blocks of R Q E tokens, GATHER groups read again at once.   scan, weigh, choose: warps.

    scans, resident: programs to a multiprocessor that scan and that weigh, with `scan_registers` and `registers` to a
    thread.   share: tokens whose masses are added by one program, `tokens` at a time.
    """
    constants = {"R": r, "Q": q, "E": e, "SCANS": scans, "SCAN_REGISTERS": scan_registers, "WEIGHERS": weigh}
    constants |= {"SHARE": share, "TOKENS": tokens, "RESIDENT": resident, "WEIGH_REGISTERS": registers}
    constants |= {"WARPS": choose, "GATHER": gather, "TILE": 512, "PIVOTED": 512, "SMALL": 256, "STEP": 8}
    return Tile(constants, num_warps=scan)


def _logits(block_n: int, *, stages: int, resident: int, warps: int = 4, **upto: int) -> Tile:
    """A tile of the indexer's scores: blocks of keys, of which `stages` are on their way; programs a multiprocessor."""
    return Tile({"BLOCK_N": block_n, "STAGES": stages, "RESIDENT": resident}, num_warps=warps, upto=upto)


def _chunk(
    block_n: int, queries: int, *, stages: int, span: int = 2048, registers: int = 0, warps: int = 4, **upto: int
) -> Tile:  # fmt: skip
    """A tile of a chunk's scores: blocks of keys, `stages` of them on their way; tokens of a program, and its keys.

    registers: limit a thread, or 0.
    """
    constants = {"BLOCK_N": block_n, "QUERIES": queries, "STAGES": stages, "SPAN": span // block_n}
    constants |= {"REGISTERS": registers}
    return Tile(constants, num_warps=warps, upto=upto)


def _write(heads: int, index_heads: int, *, at_once: int = 0, registers: int = 0, warps: int = 4, **upto: int) -> Tile:
    """A tile of cache_write: heads of a program that turns queries, and of one that makes the indexer's ready.

    With several tokens a sequence: at_once: tokens, of those that a program pools at ratio 128.   registers: limit a
    thread, or 0.
    """
    constants = {"BLOCK_H": heads, "INDEX_H": index_heads, "AT_ONCE": at_once, "REGISTERS": registers}
    return Tile(constants, num_warps=warps, upto=upto)


TILES: dict[str, dict[str, tuple[Tile, ...]]] = {
    # row_bytes: of a row of weights.   mib: of all weights.
    "linear_few": {
        "sm_120": (_few(8, r=2, depth=1, row_bytes=1024), _few(8)),
        "sm_90": (
            _few(2, depth=4, row_bytes=512),
            _few(4, depth=4, row_bytes=1024, tokens=8),
            _few(4, r=2, row_bytes=1024),
            _few(4, depth=4, registers=128, row_bytes=2048, tokens=8),
            _few(4, depth=4, row_bytes=2048),
            _few(8, depth=4, mib=15),
            _few(8, depth=4, registers=128, row_bytes=4096, tokens=8, mib=16),
            _few(4, registers=128, row_bytes=4096, tokens=8),
            _few(8, registers=128, row_bytes=8192, tokens=8, mib=64),
            _few(8, mib=16),
            _few(4, depth=4, mib=64),
            _few(4, rs=2),
        ),
    },
    "linear_many": {
        "sm_120": (
            _linear(64, 32, stages=3, fold=1, tokens=32),
            _linear(64, 64, stages=3, fold=1, tokens=64, mib=15),
            _linear(128, 64, warps=8, stages=3, fold=1, tokens=64),
            _linear(128, 128, warps=8, stages=2, split=1),
        ),
        "sm_90": (
            _linear(64, 32, stages=8, fold=1, tokens=32),
            _linear(64, 64, stages=6, fold=1, tokens=64, mib=15, row_bytes=4096),
            _linear(128, 64, warps=8, fold=1, tokens=64, row_bytes=4096),
            _linear(64, 64, stages=8, fold=1, tokens=64, mib=31),
            _linear(128, 64, warps=8, fold=1, tokens=64, mib=64),
            _linear(64, 64, fold=1, tokens=64),
            _linear(64, 128, split=1, tokens=256),
            _linear(128, 128, warps=8, stages=3, split=1),
        ),
    },
    "linear_dequantize": {"sm_120": (_dequantize(8, 4),), "sm_90": (_dequantize(8, 4),)},
    # Two matrices in one launch: programs of both find room at once, two on a multiprocessor.
    "linear_pair_few": {
        "sm_120": (_few(8, registers=128, tokens=8), _few(4, registers=168)),
        "sm_90": (_few(8, registers=128, tokens=8), _few(4, registers=168)),
    },
    "linear_pair_many": {
        "sm_120": (_linear(64, 32, stages=3, tokens=32), _linear(64, 64, stages=2)),
        "sm_90": (_linear(64, 32, tokens=32), _linear(64, 64)),
    },
    # With e4m3 activations.
    "linear_quantized": {
        "sm_120": (
            _linear(64, 32, stages=5, least=8, tokens=32),
            _linear(64, 64, stages=4, least=8, tokens=64),
            _linear(128, 128, warps=8, stages=3, split=1),
        ),
        "sm_90": (
            _held(64, 32, 16, least=16, tokens=64, mib=8, row_bytes=512),
            _held(128, 32, 8, tokens=32, mib=8, row_bytes=1024),
            _held(64, 64, 8, tokens=64, mib=8, row_bytes=1024),
            _held(64, 32, 16, least=16, tokens=64, mib=8, row_bytes=2048),
            _held(128, 32, 8, tokens=32, mib=8),
            _held(64, 64, 8, tokens=64, mib=8),
            _linear(128, 64, stages=5, tokens=64, mib=24, row_bytes=1024),
            _linear(128, 64, tokens=64, row_bytes=1024),
            _linear(64, 64, stages=8, split=2, tokens=64),
            _linear(128, 128, warps=8, stages=4, split=1),
        ),
    },
    # row_bytes: of a row's values. Up to 512 all packed rows, bf16 of 256 channels, fp32 of 128; others take the last.
    "sparse_attention": {
        "sm_120": (
            _attention(16, 16, warps=4, resident=1, row_bytes=128),
            _attention(16, 32, warps=8, resident=1, heads=16, tokens=4, row_bytes=512),
            _attention(16, 64, warps=8, resident=1, heads=16, row_bytes=512),
            _attention(16, 32, warps=8, resident=1, tokens=4, row_bytes=512),
            _attention(32, 32, warps=8, resident=1, row_bytes=512),
            _attention(16, 16, warps=4, resident=1),
        ),
        "sm_90": (
            _attention(16, 64, warps=8, resident=1, heads=16, tokens=4, row_bytes=512),
            _attention(16, 32, warps=4, resident=1, heads=16, tokens=16, row_bytes=512),
            # Fused: 43 nodes less in a step of more than 16 sequences, for 1 % of its time.
            _attention(16, 32, warps=4, resident=2, heads=16, fused=True, row_bytes=512),
            _attention(16, 64, warps=8, resident=1, tokens=4, row_bytes=512),
            _attention(32, 64, warps=8, resident=1, row_bytes=512),
            _attention(16, 16, warps=4, resident=1),
        ),
    },
    "sparse_attention_many": {"sm_120": (_many(16, 32, warps=4),), "sm_90": (_many(16, 64, warps=4),)},
    # tokens: up to 16, no expert has more than 16 rows.
    "moe_up": {
        "sm_120": (
            _experts(1, ks=4, registers=88, tokens=1),
            _experts(1, ks=2, registers=96, tokens=8),
            _experts(1, ks=2, pair_s=2, registers=96, tokens=16),
            _experts(2, rs=4, pair_s=2, nb=4, ahead=2, split=4, registers=128, stages=3),
        ),
        "sm_90": (
            _experts(1, ks=4, registers=80, tokens=1),
            _experts(1, ks=2, registers=96, tokens=8),
            _experts(1, ks=2, pair_s=2, registers=96, tokens=16),
            _experts(2, rs=4, pair_s=2, nb=8, ahead=2, split=4, registers=128, stages=3),
        ),
    },
    "moe_down": {
        "sm_120": (
            _experts(1, ks=2, rs=2, registers=80, tokens=8),
            _experts(2, rs=4, s=2, pair_s=2, registers=104, tokens=16),
            _experts(2, rs=4, pair_s=2, nb=4, ahead=2, registers=128, resident=4, stages=3),
        ),
        "sm_90": (
            _experts(1, ks=2, rs=2, registers=80, tokens=8),
            _experts(2, rs=4, s=2, pair_s=2, registers=96, tokens=16),
            _experts(2, rs=8, pair_s=2, nb=8, many_s=2, registers=128, resident=2, stages=3),
        ),
    },
    "moe_up_blocks": {
        "sm_120": (_blocks(8, nb=8, ahead=1, registers=128, stages=4),),
        "sm_90": (_blocks(8, registers=128, stages=3),),
    },
    "moe_down_blocks": {
        "sm_120": (_blocks(8, nb=8, ahead=1, registers=128, stages=4),),
        "sm_90": (_blocks(8, registers=128, stages=3),),
    },
    # W: warps, 16 tokens each.   L: spans of 16 channels that a program goes through, at most ADDED.
    "hyper_spread": {
        "sm_120": (_spread(1, 1, tokens=8), _spread(1, 2)),
        "sm_90": (_spread(1, 1, tokens=8), _spread(1, 2, tokens=32), _spread(4, 2)),
    },
    # One tile: the order of a token's sums follows from W.
    "hyper_finish": {"sm_120": (Tile({"W": 8}, num_warps=8),), "sm_90": (Tile({"W": 8}, num_warps=8),)},
    # One tile each: bits of a chunk's tokens follow from C and SPAN, and from W.
    "hyper_spread_chunk": {
        "sm_120": (_spread_chunk(64, 16, span=512, stages=2, warps=4),),
        "sm_90": (_spread_chunk(64, 32, span=512, stages=3, warps=4),),
    },
    "hyper_finish_chunk": {"sm_120": (Tile({"W": 4}, num_warps=4),), "sm_90": (Tile({"W": 4}, num_warps=4),)},
    "moe_gate": {
        "sm_120": (_gate(8, 1, tokens=64), _gate(8, 2, nb=4)),
        "sm_90": (_gate(8, 1, tokens=64), _gate(8, 2, nb=4)),
    },
    # One tile: a row's sums, and with them its near ties, must not depend on how many rows there are.
    "sampling": {"sm_120": (_sampling(),), "sm_90": (_sampling(),)},
    "indexer_query": {
        "sm_120": (Tile({"BLOCK_H": 8}, num_warps=4),),
        "sm_90": (Tile({"BLOCK_H": 8}, num_warps=2, upto={"hadamard": 0}), Tile({"BLOCK_H": 2}, num_warps=1)),
    },
    # queries: tokens of a sequence that are scored together.
    "indexer_logits": {
        "sm_120": (_logits(64, stages=3, resident=3, queries=1), _logits(64, stages=3, resident=1, warps=8)),
        "sm_90": (
            _logits(64, stages=4, resident=4, queries=1, fp4=0),
            _logits(64, stages=4, resident=3, queries=1),
            _logits(64, stages=3, resident=3, queries=2),
            _logits(64, stages=4, resident=2, warps=8),
        ),
    },
    "indexer_chunk_scores": {
        "sm_120": (_chunk(64, 2, stages=3, fp4=0), _chunk(64, 2, stages=3, warps=8)),
        "sm_90": (_chunk(64, 2, stages=3, fp4=0), _chunk(64, 2, stages=3)),
    },
    "indexer_row_top_k": {
        "sm_120": (Tile({"TILE": 1024}, num_warps=4),),
        "sm_90": (Tile({"TILE": 2048}, num_warps=8),),
    },
    # CHUNK: scores that one program looks over; a longer row is shared.
    "indexer_top_k": {
        "sm_120": (Tile({"TILE": 2048, "CHUNK": 8192, "RESIDENT": 2}, num_warps=8),),
        "sm_90": (Tile({"TILE": 2048, "CHUNK": 8192, "RESIDENT": 2}, num_warps=8),),
    },
    "cache_write": {
        "sm_120": (_write(4, 8, tokens=16), _write(16, 16)),
        "sm_90": (_write(4, 8, tokens=16), _write(16, 16)),
    },
    # Warps for one_shot.BLOCK values, 16 bytes a lane.
    "one_shot": {"sm_120": (Tile({}, num_warps=4),), "sm_90": (Tile({}, num_warps=4),)},
    # With several tokens a sequence.
    "cache_write_several": {
        "sm_120": (_write(16, 32, at_once=4, registers=128),),
        "sm_90": (_write(16, 32, at_once=4, registers=128),),
    },
}


def tile_for(op: str, arch: str, **shape: int) -> Tile:
    """Return the first tile of `op` on `arch` ("sm_120", "sm_90") that is meant for `shape` (heads=16, tokens=64, ...).

    Raises LookupError when the table has none, or when a tile limits a shape that was not given.
    """
    for tile in tiles_of(op, arch):
        missing = sorted(set(tile.upto) - set(shape))
        if missing:
            raise LookupError(f"{op} on {arch}: a tile depends on {', '.join(missing)}; given were {sorted(shape)}")
        if all(shape[name] <= limit for name, limit in tile.upto.items()):
            return tile
    raise LookupError(f"{op} on {arch}: no tile in kernels/tiles.py for {shape}; its last one must have no limits")


def tiles_of(op: str, arch: str) -> tuple[Tile, ...]:
    """Return all tiles of `op` on `arch`, in the order in which they are tried; LookupError if there are none."""
    try:
        return TILES[op][arch]
    except KeyError:
        raise LookupError(f"kernels/tiles.py has no entry for {op!r} on {arch!r}; it has {sorted(TILES)}") from None
