"""How many instructions the kernels of a decode step issue for each weight or key, by the gate's compilations.

    python -m kernels.instructions        # minutes, no GPU; writes kernels/instructions.json

Lane instructions: what a warp issues counts 32 times, whether its lanes have work or not. Of a kernel with a loop that
multiplies, those of that loop, else all of the program; each stands for the weights or keys of one pass. Branches
count as if taken. Matrices are those of one of four ranks of DeepSeek-V4-Flash; two that one launch takes count apart.
A step of some tokens takes the smallest number in TOKENS that is not below.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton

from kernels import gemm_variants, hyper_connection_variants, indexer_decode, moe_decode, sparse_attention_decode
from kernels.bench import current_commit
from kernels.check import cache_folder, check
from kernels.gemm_cut import Matrix, fit, is_few, table_tile
from kernels.offline import Report, tile_name
from kernels.table import format_table
from kernels.tiles import Tile, Variant, tile_for
from kernels.triton_env import ARCHES, MULTIPROCESSORS

FILE = Path(__file__).with_suffix(".json")
TOKENS = (1, 8, 16, 32, 64)  # of a step: tiles change there
_HEADS, _KEYS = 16, 128 + 512  # of a rank; of a token of a CSA layer
_FP8, _BF16 = 1, 2  # bytes of a weight
_MATRICES: dict[str, Matrix] = {
    "q_a, kv": Matrix(1536, 4096, _FP8),
    "compressors": Matrix(2624, 4096, _BF16),
    "q_b, index q": Matrix(16384, 1024, _FP8),
    "o_a": Matrix(1024, 4096, _FP8, groups=2),
    "o_b": Matrix(4096, 2048, _FP8),
    "shared expert, up": Matrix(1024, 4096, _FP8, is_gated=True),
    "shared expert, down": Matrix(4096, 512, _FP8),
    "head": Matrix(32320, 4096, _BF16, is_wide=True),
}
_NORMED = "q_b, index q"  # a norm goes in front, and keeps programs from sharing channels


@dataclasses.dataclass(frozen=True)
class Count:
    """What one kernel issues. read: what it goes through.   units: of it, weights or keys, that one pass stands for.

    loops: whether a pass is one of the loop that multiplies, else the whole program.
    """

    read: str
    arch: str
    tokens: int
    variant: Variant
    units: int
    loops: bool

    def per_unit(self, report: Report) -> float:
        """Return lane instructions for a weight or a key. Raises ValueError if the report has no such loop."""
        if self.variant.has_packed_weights:
            if report.per_weight is None:
                raise ValueError(f"{self.read}: {report.kernel} [{report.tile}] on {self.arch} says none per weight")
            return report.per_weight
        if self.loops and not report.loop:
            raise ValueError(f"{self.read}: {report.kernel} [{report.tile}] on {self.arch} has no loop")
        return 32 * self.variant.num_warps * (report.loop if self.loops else report.instructions) / self.units


def counts(arch: str) -> list[Count]:
    """Return what is to be compiled for `arch`. Raises LookupError for a kernel that the gate does not compile."""
    found = []
    linears = gemm_variants.variants(arch) + gemm_variants.rare_variants(arch)  # those of a pair, too, each alone
    attention = sparse_attention_decode.variants(arch)
    spreads, experts = hyper_connection_variants.variants(arch), moe_decode.variants(arch)
    indexer = indexer_decode.variants(arch)
    for tokens in TOKENS:
        found += [_linear(read, matrix, arch, tokens, linears) for read, matrix in _MATRICES.items()]
        tile = tile_for("sparse_attention", arch, tokens=tokens, heads=_HEADS, row_bytes=512)
        cut = sparse_attention_decode.plan(
            tile, tokens=tokens, heads=_HEADS, keys=_KEYS, is_dynamic=False, multiprocessors=MULTIPROCESSORS[arch],
            batch_invariant=False,
        )  # fmt: skip
        wanted: dict[str, Any] = {**cut.constants, "H": _HEADS, "D": 512, "RATIO": 4, "new_ptr": None}
        one = _only(attention, "attention_kernel", wanted, tile.num_warps)
        found.append(Count("keys", arch, tokens, one, tile.constants["BLOCK_N"], not cut.constants["SINGLE"]))
        tile = tile_for("indexer_logits", arch, queries=1, fp4=0)
        one = _only(indexer, "logits_kernel", {"QUERIES": 1, "FORMAT": 0}, tile.num_warps)
        found.append(Count("index keys", arch, tokens, one, tile.constants["BLOCK_N"], True))
        tile = tile_for("hyper_spread", arch, tokens=tokens)
        wanted = {**tile.constants, "ROWS": 24, "SPREAD": True, "TOP_K": 6}
        one = _only(spreads, "spread_kernel", wanted, tile.num_warps)
        found.append(Count("stream channels", arch, tokens, one, 16 * tile.constants["L"] * tile.num_warps, False))
        for op, read in (("moe_up", "experts, up"), ("moe_down", "experts, down")):
            tile = tile_for(op, arch, tokens=tokens)
            wanted = {name: tile.constants[name] for name in ("R", "KS", "RS", "S", "PAIR_S", "NB")} | {"FORMAT": 0}
            kernel = f"{op.removeprefix('moe_')}_kernel"
            one = _only(experts, kernel, wanted, tile.num_warps, _limited(tile))
            found.append(Count(read, arch, tokens, one, 1, True))
    return found


def _limited(tile: Tile) -> Callable[[Variant], bool]:
    """Return whether a variant has the register limit of a tile."""
    return lambda one: one.maxnreg == (tile.constants["REGISTERS"] or None)


def _linear(read: str, matrix: Matrix, arch: str, tokens: int, variants: Sequence[Variant]) -> Count:
    is_normed = read == _NORMED
    matrix = dataclasses.replace(matrix, is_split=not is_normed)
    rows = matrix.rows * matrix.groups
    tile = table_tile(arch, tokens, rows=rows, channels=matrix.channels, unit=matrix.unit, is_whole=True)
    cut = fit(tile, tokens, matrix, sms=MULTIPROCESSORS[arch])
    del cut["SPLIT"]
    few = is_few(tile)
    wanted = {**cut, "KIND": 0 if matrix.unit == _FP8 else 1}
    x, gate = "*fp32" if matrix.is_wide else "*bf16", 10.0 if matrix.is_gated else None

    def fits(one: Variant) -> bool:
        normed = one.signature.get("gamma_ptr") is not None
        return (one.signature["x_ptr"], one.constants["LIMIT"], normed) == (x, gate, is_normed)

    warps = cut["KS"] * cut["RS"] if few else tile.num_warps
    one = _only(variants, "few_kernel" if few else "many_kernel", wanted, warps, fits)
    units = 16 * cut["R"] * warps * cut["DEPTH"] * 128 // matrix.unit if few else cut["BLOCK_R"] * cut["BLOCK_K"]
    return Count(read, arch, tokens, one, units, not (few and cut["ONCE"]))


def _only(
    variants: Sequence[Variant], kernel: str, wanted: Mapping[str, Any], warps: int,
    fits: Callable[[Variant], bool] = lambda one: True,
) -> Variant:  # fmt: skip
    """Return the first variant of a kernel that has all constants wanted."""
    for one in variants:
        own = {name: one.constants.get(name, "absent") for name in wanted}
        if one.kernel.__name__ == kernel and own == wanted and one.num_warps == warps and fits(one):
            return one
    raise LookupError(
        f"the gate compiles no {kernel} with {dict(wanted)}, {warps} warps: add it to its module's variants"
    )


def table(found: Sequence[Count], reports: Mapping[int, Report]) -> dict[str, Any]:
    """Return what the file holds: {arch: {tokens: {read: instructions}}} and where they come from.

    reports: of each count's variant, by its id.
    """
    per_unit: dict[str, dict[str, dict[str, float]]] = {}
    kernels: dict[str, dict[str, dict[str, str]]] = {}
    for one in found:
        report, key = reports[id(one.variant)], str(one.tokens)
        per_unit.setdefault(one.arch, {}).setdefault(key, {})[one.read] = round(one.per_unit(report), 3)
        name = f"{report.kernel} [{tile_name(one.variant)}]"
        kernels.setdefault(one.arch, {}).setdefault(key, {})[one.read] = name
    return {"commit": current_commit(), "triton": triton.__version__, "per_unit": per_unit, "kernels": kernels}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print the counts and write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.instructions", description="Count instructions per weight."
    )
    parser.add_argument("--json", type=Path, default=FILE, metavar="FILE", help="(%(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="compile what the gate has compiled, too")
    args = parser.parse_args(argv)
    found = [one for arch in ARCHES for one in counts(arch)]
    jobs = list({id(one.variant): (one.variant, one.arch) for one in found}.values())
    print(f"{len(jobs)} compilations, those that the gate keeps excepted", file=sys.stderr, flush=True)
    kept = check(jobs, cache=None if args.no_cache else cache_folder())
    broken = [f"{r.kernel} [{r.tile}] on {r.arch}: {fault}" for r in kept for fault in r.faults]
    if broken:
        print("\n".join(broken), file=sys.stderr)
        return 1
    written = table(found, {id(variant): report for (variant, _), report in zip(jobs, kept, strict=True)})
    args.json.write_text(json.dumps(written, indent=1) + "\n")
    by_arch = written["per_unit"]
    head = ["lane instructions per", *(f"{arch} {tokens}" for arch in ARCHES for tokens in TOKENS)]
    rows = [
        [read, *(f"{by_arch[arch][str(tokens)][read]:,.1f}" for arch in ARCHES for tokens in TOKENS)]
        for read in by_arch[ARCHES[0]]["1"]
    ]
    print(format_table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
