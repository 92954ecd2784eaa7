"""The gate at the model's sizes, compiled, against what is right for each token.

    python -m tests.gpu.moe_gate [--device cuda]     from the repository's root; exit code 1 if a case fails

Every tile of the table and others, one token to 4,096, padding, tables, other sizes, graph replay, the same call twice.
Under TRITON_INTERPRET=1 with --device cpu --small it tries itself out.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import torch

from tests.gpu.runner import Job, load, main

# Tiles beside the table's: KS, SPLIT, NB, CONVERTED.
DESIGNS = [(8, 2, 1, 1024), (8, 8, 1, 4096), (8, 2, 2, 512), (4, 8, 2, 1024), (8, 4, 4, 1024)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of `tokens` tokens and `padding` padding ones through a gate [experts, hidden]."""

    tokens: int
    padding: int = 0
    by_table: bool = False
    same: bool = False
    experts: int = 256
    hidden: int = 4096
    top_k: int = 6
    dtype: torch.dtype = torch.bfloat16
    design: int | None = None

    def __str__(self) -> str:
        flags = [name for name in ("same", "by_table") if getattr(self, name)]
        cut = [] if self.design is None else [f"design {self.design}"]
        size = f"{self.experts} x {self.hidden} top {self.top_k} {str(self.dtype).removeprefix('torch.')}"
        return " ".join([f"B={self.tokens}+{self.padding} {size}", *flags, *cut])


def cases_of(*, small: bool = False) -> list[Case]:
    """Return all cases; small: few and tiny ones, for the interpreter."""
    if small:
        return [Case(n, 1, by_table, experts=20, hidden=128, top_k=3) for n in (2, 12) for by_table in (False, True)]
    return [
        *(Case(n, padding, by_table) for n in (1, 2, 7, 64, 1000) for padding in (0, 1) for by_table in (False, True)),
        *(Case(n) for n in (8, 9, 16, 17, 33, 65, 128, 200, 256, 1024)),
        *(Case(n, same=True) for n in (16, 64, 256)),
        *(Case(n, 3, by_table) for n in (257, 4096) for by_table in (False, True)),
        *(Case(n, dtype=torch.float32) for n in (3, 40)),
        *(Case(n, experts=8, hidden=64, top_k=2) for n in (1, 5, 33)),
        *(Case(n, 2, experts=384, hidden=7168, top_k=8) for n in (4, 50)),
        *(Case(n, experts=160, hidden=576) for n in (4, 50)),
        *(Case(n, 3, design=design) for design in range(len(DESIGNS)) for n in (1, 13, 64)),
    ]


def make(case: Case, device: str, *, seed: int = 0):
    """Return the case's inputs."""
    return load("moe_gate_cases").make_case(
        case.tokens, experts=case.experts, top_k=case.top_k, hidden=case.hidden, by_table=case.by_table,
        padding=case.padding, same=case.same, dtype=case.dtype, seed=seed, device=device,
    )  # fmt: skip


def fault_of(case: Case, device: str) -> str:
    """Return what is wrong, "" if nothing. Two calls must give the same choices and weights."""
    made = make(case, device)
    options = {} if case.design is None else {"tile": load("moe_gate_cases").make_tile(*DESIGNS[case.design])}
    fault = str(made.fault(**options))
    got, again = made.run(**options), made.run(**options)
    same = torch.equal(got.ids, again.ids) and torch.equal(got.weights.nan_to_num(), again.weights.nan_to_num())
    return fault or ("" if same else "two calls give different bits")


def beside_fault(case: Case, rows: int, device: str) -> str:
    """Return what is wrong where a layer of `rows` gates and values shares the launch, "" if nothing."""
    return str(make(case, device).beside_fault(rows))


def replay_fault(device: str) -> str:
    """Return how a replayed graph differs from eager calls on other inputs in the same buffers, "" if not at all."""
    for case in (Case(1), Case(16, padding=2), Case(64), Case(256)):
        made, other = make(case, device), make(case, device, seed=1)
        made.run()  # compiles
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = [made.run() for _ in range(3)]
        for source in (made, other, made):
            made.x.copy_(source.x)
            graph.replay()
            wanted = made.run()
            for out in results:
                for name in ("ids", "weights", "first", "x"):
                    got, right = getattr(out, name).nan_to_num(), getattr(wanted, name).nan_to_num()
                    if not torch.equal(got, right):
                        return f"{case}: replay gives other {name}"
    return ""


def jobs_of(device: str, *, small: bool) -> list[Job]:
    """Return all cases, and what else there is to see."""
    found: list[Job] = [(str(case), functools.partial(fault_of, case, device)) for case in cases_of(small=small)]
    if not small:
        for n in (1, 2, 7, 8, 9, 15, 16, 17):
            for by_table in (False, True):
                beside = Case(n, 1, by_table)
                found += [
                    (f"{beside} beside {rows} rows", functools.partial(beside_fault, beside, rows, device))
                    for rows in (1024, 2048)
                ]
    if device == "cuda":
        found.insert(0, ("graph replay", functools.partial(replay_fault, device)))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, "moe_gate", jobs_of))
