"""Time the indexer of chunks for several tiles: what the table in kernels/tiles.py is chosen from.

    python -m tests.gpu.tune_indexer_chunk [--small]

--small: tiny shapes on the CPU, to try the machinery out under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import statistics
import sys
import time

import torch

from kernels import indexer_bench, indexer_chunk, indexer_decode
from kernels.indexer_bench import draw_inputs
from kernels.ragged import DecodeBatch
from kernels.tiles import Tile, tile_for
from kernels.triton_env import arch_of

SMALL = "--small" in sys.argv
DEVICE = torch.device("cpu" if SMALL else "cuda")
HOW = {"ratio": 4, "top_k": indexer_bench.TOP_K}


class Skipped:
    """Stands for a kernel that is not to be launched."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


def scores_tile(block, queries, stages, warps, registers=0, span=2048):
    constants = {"BLOCK_N": block, "QUERIES": queries, "STAGES": stages, "SPAN": span // block}
    return Tile(constants | {"REGISTERS": registers}, num_warps=warps)


FP8_TILES = [
    scores_tile(64, 2, 4, 4), scores_tile(64, 4, 4, 4), scores_tile(64, 4, 3, 8), scores_tile(128, 2, 3, 4),
    scores_tile(128, 2, 3, 8), scores_tile(128, 4, 3, 8), scores_tile(64, 2, 3, 4), scores_tile(64, 2, 6, 4),
    scores_tile(64, 2, 3, 4, 128), scores_tile(64, 4, 3, 8, 128), scores_tile(128, 1, 3, 4), scores_tile(64, 1, 4, 4),
    scores_tile(64, 2, 4, 4, 0, 1024), scores_tile(64, 2, 4, 4, 0, 8192),
]  # fmt: skip
FP4_TILES = [
    scores_tile(64, 4, 3, 8), scores_tile(64, 2, 3, 4), scores_tile(64, 2, 3, 8), scores_tile(128, 2, 3, 8),
    scores_tile(64, 1, 3, 4), scores_tile(128, 4, 3, 8),
]  # fmt: skip
TOP_TILES = [
    Tile({"TILE": size}, num_warps=warps)
    for size, warps in ((2048, 8), (1024, 4), (2048, 4), (4096, 16), (4096, 8), (8192, 16))
]
TURNS = (64, 256)  # tokens that the decode step's kernels take at a time
# Tokens, keys that the last one sees.
SHAPES = [(5, 600)] if SMALL else [(4096, 2048), (4096, 32768), (512, 262144)]


def name_of(tile):
    """Return keys x tokens, stages, keys of a program, registers of a scores' tile, or what a selection's has."""
    c = tile.constants
    if "TILE" in c:
        return f"{c['TILE']} {tile.num_warps}w"
    span = c["SPAN"] * c["BLOCK_N"]
    return f"{c['BLOCK_N']}x{c['QUERIES']} s{c['STAGES']} {tile.num_warps}w {span} r{c['REGISTERS']}"


def drawn(tokens, keys, fmt):
    inputs = draw_inputs(DEVICE, 0, 1, keys, fmt=fmt, length=tokens)
    return inputs, inputs.query()


def flops_of(batch):
    return 2 * indexer_bench.HEADS * indexer_bench.DIM * int(((batch.positions.long() + 1) // 4).sum())


def time_ms(run, times=7):
    run()
    if SMALL:
        return 1.0
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)


def scores_alone(run):
    kept, indexer_chunk.row_top_k_kernel = indexer_chunk.row_top_k_kernel, Skipped()
    try:
        return time_ms(run)
    finally:
        indexer_chunk.row_top_k_kernel = kept


def compile_one(fmt, number):
    """Launch one tile on a small chunk, in a process of its own: what it compiles stays in Triton's cache.

    number: of the tile, or less than 0 for the decode step's kernels with as many tokens at a time.
    """
    begin = time.perf_counter()
    if number < 0:
        in_turns(*drawn(-number, 600, fmt), -number)()
        return f"{fmt} decode kernels: {time.perf_counter() - begin:.1f} s"
    tile = (FP8_TILES if fmt == "fp8_index" else FP4_TILES)[number]
    inputs, query = drawn(8, 600, fmt)
    top = TOP_TILES[number % len(TOP_TILES)]
    try:
        indexer_chunk.select_chunk(query, inputs.batch, inputs.keys, **HOW, tile=tile, top_tile=top)
        if not SMALL:
            torch.cuda.synchronize()
    except Exception as error:
        return f"{fmt} {name_of(tile)}: {type(error).__name__}: {str(error)[:200]}"
    return f"{fmt} {name_of(tile)}: {time.perf_counter() - begin:.1f} s"


def in_turns(inputs, query, turn):
    """Return a function that selects with the decode step's kernels, `turn` tokens at a time."""
    b, parts = inputs.batch, []
    for first in range(0, b.num_tokens, turn):
        part = slice(first, min(first + turn, b.num_tokens))
        start = torch.tensor([0, part.stop - first], dtype=torch.int32, device=DEVICE)
        batch = DecodeBatch(
            b.positions[part].clone(), b.sequence[part].clone(), b.starts, start, b.slots, b.block_table,
            part.stop - first, 4,
        )  # fmt: skip
        own = dataclasses.replace(query, values=query.values[part].contiguous(), weight=query.weight[part].contiguous())
        parts.append((own, batch))

    def run():
        for own, batch in parts:
            scores = indexer_decode.index_scores(own, batch, inputs.keys, **HOW)
            indexer_decode.select_scored(scores, batch, **HOW)

    return run


def row(*cells):
    print("  ".join(cells), flush=True)


def main() -> int:
    jobs = [("fp8_index", i) for i in range(len(FP8_TILES))] + [("fp4_index", i) for i in range(len(FP4_TILES))]
    jobs = jobs[::7] if SMALL else [(fmt, -turn) for fmt in indexer_bench.FORMATS for turn in TURNS] + jobs
    if SMALL:
        from tests.gpu.runner import load

        load("interp").repair()
        done = [compile_one(*job) for job in jobs]
    else:
        with concurrent.futures.ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
            done = list(pool.map(compile_one, *zip(*jobs, strict=True)))
    row(*(line for line in done if not line.endswith(" s")), f"{len(done)} tiles compiled")
    for fmt, tiles in (("fp8_index", FP8_TILES), ("fp4_index", FP4_TILES)):
        for tokens, keys in SHAPES[: 1 if SMALL else 3 if fmt == "fp8_index" else 2]:
            inputs, query = drawn(tokens, keys, fmt)
            flops = flops_of(inputs.batch)
            shape = f"{fmt[:3]} {tokens}t {keys}k"
            chosen = tile_for(indexer_chunk.SCORES, arch_of(DEVICE), fp4=int(fmt == "fp4_index"))
            best = None
            select = functools.partial(indexer_chunk.select_chunk, query, inputs.batch, inputs.keys, **HOW)
            for tile in [chosen, *tiles[: 1 if SMALL else None]]:
                run = functools.partial(select, tile=tile)
                try:
                    alone, whole = scores_alone(run), time_ms(run)
                except Exception as error:
                    row(shape, name_of(tile), f"{type(error).__name__}: {str(error)[:150]}")
                    continue
                row(shape, name_of(tile), f"{alone:.3f} ms, {flops / alone / 1e9:.0f} TFLOP/s, whole {whole:.3f}")
                best = min(best or (alone, tile), (alone, tile), key=lambda found: found[0])
            if fmt == "fp8_index" and best:
                for top in TOP_TILES[: 1 if SMALL else None]:
                    run = functools.partial(select, tile=best[1], top_tile=top)
                    row(shape, f"top k {name_of(top)}", f"{time_ms(run) - best[0]:.3f} ms")
            if tokens > 512 or SMALL:
                for turn in TURNS[: 1 if SMALL else 2]:
                    row(
                        shape,
                        f"decode kernels, {turn} at a time",
                        f"{time_ms(in_turns(inputs, query, turn), 3):.3f} ms",
                    )
        inputs, _ = drawn(SHAPES[0][0], SHAPES[0][1], fmt)
        row(fmt, f"{SHAPES[0][0]} queries made ready", f"{time_ms(inputs.query):.3f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
