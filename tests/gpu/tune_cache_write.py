"""Time cache_write for several tiles: what the table in kernels/tiles.py is chosen from.

python -m tests.gpu.tune_cache_write
"""

import itertools
import statistics
import sys

import torch

from kernels.bench import COPIES
from kernels.cache_write_bench import PHASES, step
from kernels.gpu_timer import graph_timer, warm_clocks
from kernels.tiles import Tile


def main() -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    warm_clocks(device)
    cuts = itertools.product((4, 8, 16), (4, 8, 16), (4, 8))
    tiles = [Tile({"BLOCK_H": h, "INDEX_H": i, "AT_ONCE": 0, "REGISTERS": 0}, num_warps=w) for h, i, w in cuts]
    names = [f"H{t.constants['BLOCK_H']} I{t.constants['INDEX_H']} {t.num_warps}w" for t in tiles]
    print(f"{'us, graph replay':<34}" + "".join(f"{name:>11}" for name in names))
    shapes = [(4, n, "mixed", h) for n in (1, 16, 64) for h in (16, 64)]
    shapes += [(4, 64, "all complete", 16), (128, 64, "all complete", 16), (0, 64, "mixed", 16)]
    for ratio, count, phase, heads in shapes:
        positions = [8192 + PHASES[phase](b, ratio) for b in range(count)]
        row = []
        for tile in tiles:
            launches = [
                step(
                    device, i, positions, ratio=ratio, heads=heads, keys="fp8_index" if ratio == 4 else "", length=1,
                    padding=0, tile=tile,
                )
                for i in range(COPIES)
            ]  # fmt: skip
            row.append(statistics.median(graph_timer(launches)) / COPIES)
        print(
            f"{f'ratio {ratio} B={count} {phase} heads={heads}':<34}" + "".join(f"{us:>11.2f}" for us in row),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
