"""The indexer of chunks compiled on a GPU against its reference, at the model's sizes and at odd ones.

    python -m tests.gpu.indexer_chunk [--device cpu --small] [--jobs N]

Also without pytest. TRITON_INTERPRET=1 with --device cpu --small tries the machinery out. Prints a row for each case
and returns 1 if one failed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import torch

from tests.gpu.runner import Job, load, main

# Of a score, in units of sum |weight| |query| . |key|; see indexer.py.
TOLERANCE = {"fp8_index": 5e-4, "fp4_index": 2e-5}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences (start, tokens) in one step."""

    spans: tuple[tuple[int, int], ...]
    fmt: str = "fp8_index"
    padding: int = 0
    heads: int = 64
    dim: int = 128
    rows: int = 64
    top_k: int = 512
    columns: int = 0
    spare: int = 0
    spread: float = 0.0
    told: bool = True
    room: int = 1 << 26
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        plain = {field.name: field.default for field in dataclasses.fields(self)}
        shown = {name: value for name, value in vars(self).items() if name != "spans" and value != plain[name]}
        spans = " ".join(f"{start}+{length}" for start, length in self.spans[:6])
        more = f" and {len(self.spans) - 6} more" if len(self.spans) > 6 else ""
        return " ".join([spans + more, *(f"{name}={value}" for name, value in shown.items())])


MIXED = ((2040, 1000), (5000, 7), (9000, 1), (0, 3), (12345, 1500), (2047, 5))


def cases_of(*, small: bool = False) -> list[Case]:
    """Return all cases; small: few and tiny ones, for the interpreter."""
    if small:
        return [Case(((90, 9), (0, 1), (20, 11)), fmt, 1, heads=3, dim=64, rows=8, top_k=8) for fmt in TOLERANCE]
    formats = list(TOLERANCE)
    return [
        *(Case(((0, 4096),), fmt) for fmt in formats),
        *(Case(((28672 + 3, 4096),), fmt) for fmt in formats),
        *(Case(((131072 - 301, 301),), fmt, columns=9) for fmt in formats),
        *(Case(((1048576 - 130, 130),), fmt) for fmt in formats),
        *(Case(MIXED, fmt, padding=3) for fmt in formats),
        *(Case(MIXED, fmt, told=False, columns=30, room=1 << 20) for fmt in formats),
        *(Case(tuple((2000 + 7 * i, 1) for i in range(600)), fmt, told=False) for fmt in formats),
        *(Case(((3000, 200), (9000, 64)), fmt, spare=520000) for fmt in formats),  # blocks beyond 2^32 bytes
        *(Case(((700, 70),), fmt, heads=3, dim=32, top_k=20) for fmt in formats),
        *(Case(((700, 70),), fmt, heads=16, dim=64, top_k=20) for fmt in formats),
        *(Case(((900, 99), (3000, 9)), fmt, rows=rows, top_k=64) for fmt in formats for rows in (2, 16, 128)),
        *(Case(((19000, 90),), fmt, top_k=1024, dtype=torch.float32) for fmt in formats),
        Case(((7000, 90),), "fp4_index", spread=3.0),
    ]  # fmt: skip


def make(case: Case, device: str):
    """Return the case's step."""
    return load("indexer_cases").make_case(
        list(case.spans), fmt=case.fmt, heads=case.heads, dim=case.dim, rows=case.rows, top_k=case.top_k,
        padding=case.padding, hadamard=case.fmt == "fp4_index" and case.dim == 128, columns=case.columns,
        spare=case.spare, device=device, dtype=case.dtype, spread=case.spread, told=case.told,
    )  # fmt: skip


def fault_of(case: Case, device: str) -> str:
    """Return what is wrong, "" if nothing."""
    return make(case, device).chunk_fault(tolerance=TOLERANCE[case.fmt], room=case.room)


def part_of(made, first: int, end: int):
    """Return queries and batch of tokens first to end of a step of one sequence."""
    from kernels.indexer_decode import IndexQuery
    from kernels.ragged import DecodeBatch

    query, b, part = made.query(), made.batch, slice(first, end)
    zero = torch.zeros(1, dtype=torch.int32, device=b.device)
    start = torch.tensor([0, end - first], dtype=torch.int32, device=b.device)
    batch = DecodeBatch(
        b.positions[part].clone(), b.sequence[part].clone(), zero, start, zero, b.block_table, end - first, end - first
    )
    return IndexQuery(query.format, query.values[part].contiguous(), query.weight[part].contiguous()), batch


def borders_fault(fmt: str, device: str) -> str:
    """Return whether a token's entries depend on where chunks begin, "" if not."""
    from kernels.indexer_chunk import select_chunk

    made = make(Case(((9001, 1501),), fmt), device)
    how = {"ratio": 4, "top_k": 512}
    whole = select_chunk(made.query(), made.batch, made.keys, **how)
    for first, end in ((0, 1), (0, 137), (137, 863), (863, 1501), (1498, 1501)):
        query, batch = part_of(made, first, end)
        if not torch.equal(select_chunk(query, batch, made.keys, **how), whole[first:end]):
            return f"tokens {first} to {end} select others alone"
    return ""


def decode_fault(fmt: str, device: str) -> str:
    """Return how the chunk's selection differs from the decode kernels' by more than rounding, "" if not."""
    from kernels.indexer_decode import index_scores, select_scored

    made = make(Case(((20000, 64),), fmt), device)
    how = {"ratio": 4, "top_k": 512}
    query = made.query()
    selected = select_scored(index_scores(query, made.batch, made.keys, **how), made.batch, **how)
    return made.selected_fault(query, selected, tolerance=TOLERANCE[fmt]) or made.chunk_fault(tolerance=TOLERANCE[fmt])


def unsound_fault(fmt: str, device: str) -> str:
    """Return what is wrong with the rows of tokens that read a key never written, or have no block for one."""
    made = make(Case(((6000, 700), (9000, 300)), fmt), device)
    made.keys.scales.view(torch.uint8)[int(made.batch.block_table[0, 25]), -1] = 0xFF  # entry 1663, seen from 6655 on
    made.batch.block_table[1, 36] = -1  # entry 2304 on, seen from 9219 on
    return made.chunk_fault(tolerance=TOLERANCE[fmt])


def repeat_fault(device: str) -> str:
    """Return whether twenty calls differ, "" if not."""
    from kernels.indexer_decode import index_select

    made = make(Case(MIXED), device)
    query, how = made.query(), {"ratio": 4, "top_k": 512}
    first = index_select(query, made.batch, made.keys, **how)
    wrong = sum(not torch.equal(first, index_select(query, made.batch, made.keys, **how)) for _ in range(20))
    return f"{wrong} of 20 calls differ" if wrong else ""


def jobs_of(device: str, *, small: bool) -> list[Job]:
    """Return all cases, and what else there is to see."""
    found: list[Job] = [(str(case), functools.partial(fault_of, case, device)) for case in cases_of(small=small)]
    if not small:
        for fmt in TOLERANCE:
            found.insert(0, (f"keys never written {fmt}", functools.partial(unsound_fault, fmt, device)))
            found.insert(0, (f"as decode {fmt}", functools.partial(decode_fault, fmt, device)))
            found.insert(0, (f"chunk borders {fmt}", functools.partial(borders_fault, fmt, device)))
        found.insert(0, ("twenty calls", functools.partial(repeat_fault, device)))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, "indexer_chunk", jobs_of, jobs=8))
