"""The decode step's indexer compiled on a GPU against its reference, at the model's sizes and at odd ones.

    python -m tests.gpu.indexer [--device cpu --small] [--jobs N]

Also without pytest. TRITON_INTERPRET=1 with --device cpu --small tries the machinery out. Prints a row for each case
and returns 1 if one failed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import torch

from tests.gpu.runner import Job, load, main

# Of a score, in units of sum |weight| |query| . |key|. sm_90's tensor cores keep about 14 bits of a sum of e4m3
# products; f16 ones are summed in float32, cut off.
TOLERANCE = {"fp8_index": 5e-4, "fp4_index": 2e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """`count` sequences of up to `keys` keys each, `length` tokens."""

    count: int
    keys: int
    fmt: str = "fp8_index"
    length: int = 1
    padding: int = 0
    heads: int = 64
    dim: int = 128
    rows: int = 64
    top_k: int = 512
    columns: int = 0
    spare: int = 0
    spread: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        plain = {field.name: field.default for field in dataclasses.fields(self)}
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value != plain[name])


def cases_of(*, small: bool = False) -> list[Case]:
    """Return all cases; small: few and tiny ones, for the interpreter."""
    if small:
        return [
            Case(2, 40, fmt, length, 1, heads=3, dim=64, rows=8, top_k=8)
            for fmt in TOLERANCE
            for length in (1, 2)
        ]  # fmt: skip
    formats = list(TOLERANCE)
    return [
        *(Case(64, keys, fmt, padding=2) for fmt in formats for keys in (600, 2048, 8192)),
        *(Case(count, 3000, fmt) for fmt in formats for count in (1, 7, 100, 600)),
        *(Case(16, 3000, fmt, length, padding=1) for fmt in formats for length in (2, 3, 4, 7)),
        *(Case(1, 262144, fmt) for fmt in formats),
        *(Case(3, 40000, fmt, columns=4000) for fmt in formats),
        *(Case(2, 2000, fmt, spare=520000) for fmt in formats),  # blocks beyond 2^32 bytes
        *(Case(5, 900, fmt, heads=heads, dim=dim, top_k=20) for fmt in formats for heads, dim in ((3, 32), (16, 64))),
        *(Case(5, 900, fmt, rows=rows, top_k=64) for fmt in formats for rows in (2, 16, 128)),
        *(Case(5, 5000, fmt, top_k=1024, dtype=torch.float32) for fmt in formats),
        Case(8, 2000, "fp4_index", spread=3.0),
    ]


def make(case: Case, device: str, *, seed: int = 0):
    """Return the case's step; lengths differ from sequence to sequence, the first is as long as can be."""
    spans = []
    for i in range(case.count):
        keys = case.keys if i == 0 else 1 + (case.keys * (37 * i % 101)) // 100
        spans.append((max(4 * keys - case.length + i % 4, 0), case.length - (case.length > 2 and i % 2)))
    return load("indexer_cases").make_case(
        spans, fmt=case.fmt, heads=case.heads, dim=case.dim, rows=case.rows, top_k=case.top_k, padding=case.padding,
        hadamard=case.fmt == "fp4_index" and case.dim == 128, columns=case.columns, spare=case.spare, seed=seed,
        device=device, dtype=case.dtype, spread=case.spread,
    )  # fmt: skip


def fault_of(case: Case, device: str) -> str:
    """Return what is wrong, "" if nothing."""
    made = make(case, device)
    return made.query_fault() or made.fault(tolerance=TOLERANCE[case.fmt])


def rows_fault(device: str) -> str:
    """Return what is wrong with rows that selections have got wrong, together, alone and with other k."""
    rows = list(load("indexer_cases").score_rows().values())
    for k in (1, 64, 512, 2048):
        fault = load("indexer_cases").rows_fault(rows, k, device=device)
        if fault:
            return f"k {k}: {fault}"
    return next((fault for row in rows if (fault := load("indexer_cases").rows_fault([row], 512, device=device))), "")


def long_rows_fault(device: str, length: int, k: int, count: int) -> str:
    """Return what is wrong with crowded rows of `length`, `count` at once, for four seeds."""
    for seed in range(4):
        draw = torch.Generator(device).manual_seed(seed)
        rows = 1 + 1e-3 * torch.randn(count, length, generator=draw, device=device)
        fault = load("indexer_cases").rows_fault(list(rows), k, device=device)
        if fault:
            return f"seed {seed}: {fault}"
    return ""


def repeat_fault(device: str) -> str:
    """Return whether twenty calls differ, "" if not: parts of long rows finish in any order."""
    from kernels.indexer_decode import top_k_of_rows

    scores = torch.randint(0, 500, (64, 50000), device=device).float()
    lengths = torch.randint(40000, 50000, (64,), device=device).to(torch.int32)
    first, _ = top_k_of_rows(scores, lengths, 512)
    wrong = sum(not torch.equal(first, top_k_of_rows(scores, lengths, 512)[0]) for _ in range(20))
    return f"{wrong} of 20 calls differ" if wrong else ""


def batch_fault(device: str) -> str:
    """Return whether a token's scores or entries depend on the other sequences, "" if not."""
    from kernels.indexer_decode import IndexQuery, index_scores, index_select
    from kernels.ragged import DecodeBatch

    made = make(Case(64, 5000), device)
    query, how = made.query(), {"ratio": 4, "top_k": 512}
    together = index_scores(query, made.batch, made.keys, **how).rows(made.batch, **how)
    selected = index_select(query, made.batch, made.keys, **how)
    for n in (0, 5, 63):
        b, one = made.batch, slice(n, n + 1)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        first = torch.tensor([0, 1], dtype=torch.int32, device=device)
        batch = DecodeBatch(b.positions[one], zero, b.starts[one], first, zero, b.block_table[one], 1, 1)
        alone = IndexQuery(query.format, query.values[one].contiguous(), query.weight[one].contiguous())
        rows = index_scores(alone, batch, made.keys, **how).rows(batch, **how)
        if (rows[0] is None) != (together[n] is None) or (
            rows[0] is not None and not torch.equal(rows[0], together[n])
        ):
            return f"scores of token {n} differ in a batch of 64"
        if not torch.equal(index_select(alone, batch, made.keys, **how)[0], selected[n]):
            return f"entries of token {n} differ in a batch of 64"
    return ""


def unsound_fault(device: str) -> str:
    """Return what is wrong with the rows of tokens that read a key never written, in rows of one part and of many."""
    for keys in (3000, 40000):
        made = make(Case(4, keys), device)
        for token in (0, 2):
            made.keys.scales[int(made.batch.block_table[token, 1]), 5] = float("nan")
        fault = made.fault(tolerance=TOLERANCE["fp8_index"])
        if fault:
            return f"{keys} keys: {fault}"
    return ""


def replay_fault(device: str) -> str:
    """Return how a replayed graph differs from eager calls once lengths, blocks and queries have changed."""
    from kernels.indexer_decode import index_select

    for case in (Case(1, 3000, columns=60), Case(16, 12000, padding=2, columns=10), Case(6, 3000, "fp4_index", 2)):
        made = make(case, device)

        def step(made=made):
            return index_select(made.query(), made.batch, made.keys, ratio=4, top_k=512)

        step()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [step() for _ in range(3)]
        for change in range(3):
            made.q.copy_(torch.randn_like(made.q))
            if change:
                made.batch.positions.sub_(made.batch.positions.clamp(min=0) // (1 + change))
                if case.length > 1:
                    made.batch.positions[1 :: case.length] = made.batch.positions[:: case.length] + 1
            graph.replay()
            torch.cuda.synchronize()
            got = [selected.clone() for selected in results]
            wanted = step()
            for selected in got:
                if not torch.equal(selected, wanted):
                    return f"{case}: a replay selects others after change {change}"
    return ""


def jobs_of(device: str, *, small: bool) -> list[Job]:
    """Return all cases, and what else there is to see."""
    found: list[Job] = [(str(case), functools.partial(fault_of, case, device)) for case in cases_of(small=small)]
    if not small:
        for length, k, count in ((262144, 512, 64), (1048576, 2048, 64)):
            name = f"{count} crowded rows of {length}, k {k}"
            found.insert(0, (name, functools.partial(long_rows_fault, device, length, k, count)))
        found.insert(0, ("rows that were got wrong", functools.partial(rows_fault, device)))
        found.insert(0, ("keys never written", functools.partial(unsound_fault, device)))
        found.insert(0, ("twenty calls", functools.partial(repeat_fault, device)))
        found.insert(0, ("a token's bits in other batches", functools.partial(batch_fault, device)))
    if device == "cuda":
        found.insert(0, ("graph replay", functools.partial(replay_fault, device)))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, "indexer", jobs_of, jobs=6))
