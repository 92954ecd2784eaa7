"""One-shot sums on one GPU: ranks are streams that run at the same time, each with a region of its own.

    PYTHONPATH=. python tests/gpu/one_shot.py          from the repository's root

Sums of random sizes one after the other, in an order of streams that changes, then captured chains replayed. What it
can't show is the bus between GPUs: tests/gpu/exchange.py does, on two or more. Exit code 1 if a sum is wrong.
"""

from __future__ import annotations

import argparse
import sys

import torch

from kernels import one_shot

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CHAIN = (4096, 65536, 1000, 4096)


class Ranks:
    """`count` ranks of one GPU. run: of each, on its stream."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        size = one_shot.region_bytes(count, dtype)
        self.regions = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(count)]
        addresses = torch.tensor([region.data_ptr() for region in self.regions], device="cuda")
        programs = one_shot.num_programs(dtype)
        self.peers = [
            one_shot.PeerRegions(
                rank, count, dtype, addresses, torch.zeros(programs, dtype=torch.int32, device="cuda"), self.regions
            )
            for rank in range(count)
        ]
        self.streams = [torch.cuda.Stream() for _ in range(count)]
        torch.cuda.synchronize()

    def sums(self, parts: list[torch.Tensor], order: list[int]) -> list[torch.Tensor]:
        """Return what each rank makes of everybody's values; the streams are launched in `order`."""
        found = {}
        torch.cuda.synchronize()  # values are there, whichever stream reads them
        for rank in order:
            with torch.cuda.stream(self.streams[rank]):
                found[rank] = one_shot.one_shot_sum(parts[rank], self.peers[rank])
        torch.cuda.synchronize()
        return [found[rank] for rank in range(len(parts))]


def values(rank: int, call: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(1000 * call + rank)
    return torch.randn(size, generator=draw, device="cuda").to(dtype)


def faults(count: int, dtype: torch.dtype, *, calls: int, replays: int) -> list[str]:
    """Return what is wrong, nothing if all sums have the reference's bits."""
    ranks, found = Ranks(count, dtype), list[str]()
    draw = torch.Generator().manual_seed(count)
    for call in range(calls):
        size = int(torch.randint(1, one_shot.capacity(dtype) + 1, (1,), generator=draw))
        parts = [values(rank, call, size, dtype) for rank in range(count)]
        wanted = one_shot.one_shot_sum_reference(parts)
        order = torch.randperm(count, generator=draw).tolist()
        wrong = [rank for rank, got in enumerate(ranks.sums(parts, order)) if not torch.equal(got, wanted)]
        if wrong:
            found.append(f"sum {call} of {size} values: wrong at ranks {wrong}")
    parts = [[values(rank, at, size, dtype) for at, size in enumerate(CHAIN)] for rank in range(count)]
    outs, graphs = [[torch.empty_like(x) for x in own] for own in parts], []
    for rank in range(count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for x, out in zip(parts[rank], outs[rank], strict=True):
                out.copy_(one_shot.one_shot_sum(x, ranks.peers[rank]))
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(replays):
        for rank in torch.randperm(count, generator=draw).tolist():
            with torch.cuda.stream(ranks.streams[rank]):
                graphs[rank].replay()
    torch.cuda.synchronize()
    for at in range(len(CHAIN)):
        wanted = one_shot.one_shot_sum_reference([own[at] for own in parts])
        wrong = [rank for rank in range(count) if not torch.equal(outs[rank][at], wanted)]
        if wrong:
            found.append(f"replayed sum {at} of {CHAIN[at]} values: wrong at ranks {wrong}")
    return found


def main() -> int:
    """Run what the arguments say and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--replays", type=int, default=200)
    args = parser.parse_args()
    num_faults = 0
    for name, dtype in DTYPES.items():
        for count in args.ranks:
            wrong = faults(count, dtype, calls=args.calls, replays=args.replays)
            num_faults += len(wrong)
            print(f"{name}, {count} ranks: {args.calls} sums, {args.replays} replays, {len(wrong)} wrong {wrong[:3]}")
    print(f"{num_faults} faults")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
