"""How linear layers are cut: which tile of the table a matrix takes, and what its constants become there."""

from __future__ import annotations

import dataclasses

from kernels.gemm import BLOCK
from kernels.tiles import Tile, tile_for

FEW_OP, MANY_OP, QUANTIZED_OP = "linear_few", "linear_many", "linear_quantized"
FEW = 16  # tokens that warps read into registers


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A layer's weights [groups, rows, channels] as kernels read them.

    unit: bytes of a weight.   is_split: whether programs may share the channels.   is_wide: x is float32, which takes
    twice the registers, or more.   shift: channels of the first block that lie before the matrix.   is_gated: rows of
    both halves meet in a program.
    """

    rows: int
    channels: int
    unit: int
    groups: int = 1
    is_split: bool = True
    is_wide: bool = False
    shift: int = 0
    is_gated: bool = False


def is_few(tile: Tile) -> bool:
    """Return whether a tile is one of few_kernel's."""
    return "KS" in tile.constants


def is_held(tile: Tile) -> bool:
    """Return whether a tile is one of held_kernel's."""
    return "STEPS" in tile.constants


def table_tile(
    arch: str, tokens: int, *, rows: int, channels: int, unit: int, is_whole: bool, quantize: bool = False
) -> Tile:
    """Return the table's tile. unit: bytes of a weight.   is_whole: rows can be read in pieces of 16 bytes."""
    shape = {"tokens": tokens, "row_bytes": channels * unit, "mib": -(-rows * channels * unit >> 20)}
    few = tokens <= FEW and is_whole
    return tile_for(QUANTIZED_OP if quantize else FEW_OP if few else MANY_OP, arch, **shape)


def span(cut: dict[str, int]) -> tuple[int, int]:
    """Return how many rows and tokens a program has."""
    if "KS" in cut:
        return 16 * cut["R"] * cut["RS"], 8 * cut["NB"]
    return cut["BLOCK_R"], cut["BLOCK_T"]


def fit(tile: Tile, tokens: int, matrix: Matrix, *, sms: int) -> dict[str, int]:
    """Return the constants and SPLIT of the kernel that a tile is for."""
    return (fit_few if is_few(tile) else fit_held if is_held(tile) else fit_many)(tile, tokens, matrix, sms=sms)


def fit_few(tile: Tile, tokens: int, matrix: Matrix, *, sms: int) -> dict[str, int]:
    """Return few_kernel's constants and SPLIT for a matrix, smaller than the tile's where it is too small for them.

    R: tiles of 16 rows a warp.   KS: warps that share the channels.   RS: warps that take different rows.   DEPTH:
    chunks of 128 bytes a row on their way at a time.   SPLIT: programs that share the channels, up to MAX_SPLIT: as
    many as the multiprocessors have room for, RESIDENT each, as long as each has DEPTH chunks for every warp.
    SHARES: the most that SPLIT may be where it is not 1; so matrices of many sizes share a compilation.
    """
    c = {name: value for name, value in tile.constants.items() if name not in ("REGISTERS", "MAX_SPLIT", "RESIDENT")}
    chunks, tiles = -(-(matrix.shift + matrix.channels) * matrix.unit // 128), -(-matrix.rows // 16)
    for name, most in (("KS", chunks), ("RS", tiles), ("R", -(-tiles // c["RS"])), ("DEPTH", -(-chunks // c["KS"]))):
        while c[name] > 1 and c[name] // 2 >= most:
            c[name] //= 2
    c["DEPTH"] = min(c["DEPTH"] // (2 if matrix.is_wide else 1) or 1, -(-chunks // c["KS"]))
    c["NB"] = 1 if tokens <= 8 else 2
    high, wide = span(c)
    programs = matrix.groups * -(-matrix.rows // high) * -(-tokens // wide)
    most = min(tile.constants["MAX_SPLIT"], sms * tile.constants["RESIDENT"] // programs)
    c["SPLIT"] = _split(chunks, most if matrix.is_split else 1, least=c["KS"] * c["DEPTH"])
    c["SHARES"] = tile.constants["MAX_SPLIT"] if c["SPLIT"] > 1 else 1
    taken = c["KS"] * c["SPLIT"]
    share = -(-chunks // taken)
    c["ONCE"] = int(share == c["DEPTH"])
    is_even = matrix.shift == 0 and matrix.channels * matrix.unit == 128 * share * taken and share % c["DEPTH"] == 0
    c["EVEN"] = int(is_even and matrix.rows % high == 0)
    # Fewer registers make room for a second program, which helps only where there are more than multiprocessors.
    c["LEAN"] = int(tile.constants["REGISTERS"] > 0 and c["R"] == 1 and c["EVEN"] and not matrix.is_gated)
    return c


def fit_many(tile: Tile, tokens: int, matrix: Matrix, *, sms: int) -> dict[str, int]:
    """Return many_kernel's constants and SPLIT, of LEAST steps.

    BYTES: of a row of weights in a step.   FOLD: whether a norm in front is a part of the product (gemm_decode.py).
    """
    own = ("BYTES", "MAX_SPLIT", "RESIDENT", "LEAST", "FOLD")
    c = {name: value for name, value in tile.constants.items() if name not in own}
    c["BLOCK_K"] = tile.constants["BYTES"] // matrix.unit // (2 if matrix.is_wide else 1)
    if matrix.unit == 1 and c["BLOCK_K"] > BLOCK:
        raise ValueError(f"a step of {c['BLOCK_K']} e4m3 channels: a scale holds for {BLOCK}")
    while c["BLOCK_R"] > 64 and (matrix.is_wide or c["BLOCK_R"] // 2 >= matrix.rows):
        c["BLOCK_R"] //= 2
    high, wide = span(c)
    programs = matrix.groups * -(-matrix.rows // high) * -(-tokens // wide)
    most = min(tile.constants["MAX_SPLIT"], sms * tile.constants["RESIDENT"] // programs)
    steps = -(-(matrix.shift + matrix.channels) // c["BLOCK_K"])
    c["SPLIT"] = _split(steps, most if matrix.is_split else 1, least=tile.constants["LEAST"])
    c["SHARES"] = tile.constants["MAX_SPLIT"] if c["SPLIT"] > 1 else 1
    c["EVEN"] = int(matrix.shift == 0 and matrix.channels % c["BLOCK_K"] == 0)
    return c


def fit_held(tile: Tile, tokens: int, matrix: Matrix, *, sms: int) -> dict[str, int]:
    """Return held_kernel's constants and SPLIT: as fit_many, and as many more as make a share of at most STEPS."""
    c = {name: tile.constants[name] for name in ("BLOCK_R", "BLOCK_T")}
    steps = -(-matrix.channels // BLOCK)
    high, wide = span(c)
    programs = matrix.groups * -(-matrix.rows // high) * -(-tokens // wide)
    most = min(tile.constants["MAX_SPLIT"], sms * tile.constants["RESIDENT"] // programs)
    split = max(_split(steps, most, least=tile.constants["LEAST"]), -(-steps // tile.constants["STEPS"]))
    c["STEPS"] = -(-steps // split)
    c["SPLIT"] = -(-steps // c["STEPS"])
    c["SHARES"] = max(tile.constants["MAX_SPLIT"], c["SPLIT"]) if c["SPLIT"] > 1 else 1
    c["EVEN"] = int(matrix.channels % (BLOCK * c["STEPS"]) == 0)
    return c


def _split(steps: int, most: int, *, least: int) -> int:
    """Return how many programs share `steps`, at most `most`, each with `least` or more, none with nothing."""
    split = max(1, min(most, steps // least))
    return -(-steps // -(-steps // split))
