"""The experts of a decode step at the model's sizes, compiled, against their torch reference on the same device.

    python -m tests.gpu.moe [--device cuda]     from the repository's root; exit code 1 if a case fails

Both formats and a mixture, every tile of the table and others, all kinds of routing, one token to 8192, padding, graph
replay with other inputs in the same buffers, every code under every scale, tokens alone and among others.
Under TRITON_INTERPRET=1 with --device cpu --small it tries itself out.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import torch

from kernels.tiles import Tile
from tests.gpu.runner import Job, load, main

# Tiles beside those of the table, for the first and the last product.
# R, KS, RS, S, PAIR_S; NB, MANY_R, MANY_S, AHEAD, SPLIT; registers, stages.
DESIGNS = [
    ((1, 4, 1, 4, 4, 4, 2, 1, 2, 2, 0, 3), (1, 1, 4, 4, 4, 4, 2, 2, 2, 1, 0, 2)),
    ((1, 8, 1, 1, 1, 8, 1, 1, 4, 8, 0, 2), (1, 8, 1, 1, 1, 8, 1, 4, 1, 1, 0, 1)),
    ((2, 2, 2, 2, 1, 2, 1, 2, 1, 1, 0, 3), (2, 2, 2, 2, 2, 8, 1, 1, 8, 1, 0, 2)),
    ((4, 2, 1, 2, 2, 2, 1, 1, 1, 4, 0, 1), (4, 1, 2, 2, 1, 1, 4, 1, 4, 1, 0, 2)),
]
# The same for blocks of many rows: W, R, NB, S, AHEAD; stages.
BLOCKS = [
    ((4, 2, 16, 1, 1, 4), (4, 2, 16, 2, 1, 2)),
    ((8, 1, 8, 1, 4, 2), (4, 1, 4, 2, 2, 3)),
    ((8, 2, 16, 1, 2, 3),) * 2,
]


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of `tokens` tokens and `padding` padding ones through `experts` experts of hidden x inner."""

    tokens: int
    formats: tuple[str, str] = ("nvfp4", "nvfp4")
    experts: int = 256
    hidden: int = 4096
    inner: int = 512
    top_k: int = 6
    padding: int = 0
    same: bool = False
    by_table: bool = False
    is_raw: bool = False
    design: int | None = None
    block: int | None = None

    def __str__(self) -> str:
        flags = [name for name in ("same", "by_table", "is_raw") if getattr(self, name)]
        cut = "" if self.design is None else f" design {self.design}"
        cut += "" if self.block is None else f" block design {self.block}"
        size = f"{self.experts} x {self.hidden} x {self.inner}"
        return f"B={self.tokens}+{self.padding} {'/'.join(self.formats)} {size} top {self.top_k} {' '.join(flags)}{cut}"


def cases_of(*, small: bool = False) -> list[Case]:
    """Return all cases; small: few and tiny ones, for the interpreter."""
    mixture = [("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp4", "nvfp4")]
    if small:
        tiny = {"experts": 8, "hidden": 64, "inner": 64, "top_k": 2}
        some = [Case(3, formats, 6, 64, 64, 2, padding=1) for formats in mixture]
        return [*some, Case(300, padding=1, **tiny), Case(260, by_table=True, is_raw=True, **tiny)]
    fewer = {"experts": 64}  # a checkpoint of all is slow to draw
    return [
        *(Case(tokens, formats, **fewer) for tokens in (1, 2, 9, 16, 64) for formats in mixture),
        *(Case(tokens, padding=3) for tokens in (1, 16, 64, 256)),
        *(Case(tokens, same=True, formats=formats, **fewer) for tokens in (8, 9, 64, 200) for formats in mixture[:2]),
        Case(64, by_table=True, is_raw=True, padding=5, **fewer),
        Case(256, is_raw=True, **fewer),
        *(Case(5, formats, 8, 64, 64, 2) for formats in mixture),
        *(Case(33, formats, 16, 192, 320, 3) for formats in mixture),
        Case(64, experts=384, hidden=7168, inner=64, top_k=6),
        *(
            Case(tokens, same=same, design=design, **fewer)
            for design in range(len(DESIGNS))
            for tokens, same in ((1, False), (16, False), (64, True))
        ),
        # Rows are sorted.
        *(Case(tokens, formats, padding=3, **fewer) for tokens in (257, 1000) for formats in mixture),
        *(Case(tokens, formats, same=True, **fewer) for tokens in (300, 2050) for formats in mixture[:2]),
        *(Case(tokens) for tokens in (512, 4096, 8192)),
        Case(700, by_table=True, is_raw=True, padding=5, **fewer),
        Case(600, is_raw=True, **fewer),
        Case(700, ("mxfp4", "nvfp4"), 16, 192, 320, 3),
        Case(300, experts=384, hidden=7168, inner=64, top_k=6),
        *(Case(900, experts=16, block=block) for block in range(len(BLOCKS))),
    ]


def make(case: Case, device: str, *, seed: int = 0):
    """Return the case's inputs."""
    return load("moe_cases").make_case(
        case.tokens, experts=case.experts, top_k=case.top_k, hidden=case.hidden, inner=case.inner,
        formats=case.formats, padding=case.padding, same=case.same, by_table=case.by_table, is_raw=case.is_raw,
        seed=seed, device=device,
    )  # fmt: skip


def fault_of(case: Case, device: str) -> str:
    """Return what is wrong, "" if nothing."""
    made = make(case, device)
    options = {}
    if case.design is not None:
        options["tiles"] = tuple(load("moe_cases").make_tile(*values) for values in DESIGNS[case.design])
    if case.block is not None:
        options["tiles"] = tuple(block_tile(*values) for values in BLOCKS[case.block])
    if case.is_raw:  # log and exp differ by an ulp between torch and Triton: a near tie may go the other way
        return str(made.sum_fault(routing=made.route(), **options))
    fault = str(made.fault(**options))
    again = made.run(**options), made.run(**options)
    return fault or ("" if torch.equal(*again) else "two calls give different bits")


def block_tile(w: int, r: int, nb: int, s: int, ahead: int, stages: int, registers: int = 0) -> Tile:
    """Return a tile of moe_blocks.py."""
    constants = {"W": w, "R": r, "NB": nb, "S": s, "AHEAD": ahead, "REGISTERS": registers}
    return Tile(constants, num_warps=w, num_stages=stages)


def alone_fault(device: str) -> str:
    """Return how a token's bits depend on those beside it in a step of many, "" if not at all."""
    made = make(Case(2000, experts=32), device)
    whole = made.run()
    for some in (torch.arange(300, 700, device=device), torch.randperm(2000, device=device)[:1100]):
        made.x, made.scores = made.x[some], made.scores[some]
        if not torch.equal(made.run(), whole[some]):
            return f"{len(some)} tokens of 2000 differ by {(made.run() - whole[some]).abs().max():.2e}"
        made = make(Case(2000, experts=32), device)
    return ""


def replay_fault(device: str) -> str:
    """Return how a replayed graph differs from eager calls on other inputs in the same buffers, "" if not at all."""
    for case in (Case(1, experts=32), Case(16, experts=32, padding=2), Case(64, experts=32)):
        made, other = make(case, device), make(case, device, seed=1)
        made.run()  # compiles
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = [made.run() for _ in range(3)]
        for source in (made, other, made):
            made.x.copy_(source.x)
            made.scores.copy_(source.scores)
            graph.replay()
            wanted = made.run()
            for out in results:
                if not torch.equal(out, wanted):
                    return f"{case}: replay differs by {(out - wanted).abs().max():.2e}"
    return ""


def exactness_fault(device: str) -> str:
    """Return whether a weight comes out of the last product other than it went in, "" if not."""
    return str(load("moe_cases").exactness_fault(device))


def jobs_of(device: str, *, small: bool) -> list[Job]:
    """Return all cases, and what else there is to see."""
    found: list[Job] = [(str(case), functools.partial(fault_of, case, device)) for case in cases_of(small=small)]
    found.insert(0, ("every code under every scale", functools.partial(exactness_fault, device)))
    if device == "cuda":
        found.insert(0, ("graph replay", functools.partial(replay_fault, device)))
        found.insert(0, ("tokens alone and among others", functools.partial(alone_fault, device)))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, "moe", jobs_of))
