"""cache_write at the model's sizes, compiled, against its torch reference on the same device.

    python -m tests.gpu.cache_write [--device cpu --small] [--jobs N]

Also without pytest. TRITON_INTERPRET=1 with --device cpu --small tries the machinery out. Prints a row for each case
and returns 1 if one failed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable

import torch

from tests.gpu.runner import Job, load, main

BLOCK_TOKENS = 256
KINDS = (
    (0, "", False), (4, "fp8_index", False), (4, "fp8_index", True), (4, "fp4_index", True), (4, "fp4_index", False),
    (128, "", False),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A step of `count` sequences with `length` tokens each at most; chunks: of that many tokens in all, drawn."""

    count: int
    length: int
    ratio: int
    index: str = ""
    hadamard: bool = False
    heads: int = 16
    dim: int = 512
    fmt: str = "packed"
    dtype: torch.dtype = torch.bfloat16
    chunks: int = 0

    def __str__(self) -> str:
        kind = {0: "window", 4: "CSA", 128: "HCA"}[self.ratio]
        turned = " hadamard" if self.hadamard else ""
        size = f"B={self.count} x {self.length}" if not self.chunks else f"chunks of {self.chunks} #{self.count}"
        return (
            f"{size} {kind} {self.fmt} {self.index}{turned} heads={self.heads} dim={self.dim} "
            f"{str(self.dtype).removeprefix('torch.')}"
        )


def cases_of(*, small: bool = False) -> list[Case]:
    """Return all cases; small: few and tiny ones, for the interpreter."""
    if small:
        return [Case(2, length, *kind, heads=9) for kind in KINDS[::2] for length in (1, 3)] + [
            Case(3, 0, ratio, index, heads=1, dim=128, chunks=300) for ratio, index, _ in KINDS[::2]
        ]
    return [
        *(Case(64, length, *kind) for kind in KINDS for length in (1, 4)),
        *(Case(count, 1, 4, "fp8_index", heads=heads) for count in (1, 3, 17, 128) for heads in (1, 16, 64, 128)),
        *(Case(20, 1, ratio, index, dim=128, heads=4) for ratio, index, _ in KINDS),
        *(Case(20, 1, ratio, "bf16" if ratio == 4 else "", fmt="bf16") for ratio in (0, 4, 128)),
        *(Case(20, 1, ratio, "fp32" if ratio == 4 else "", fmt="fp32") for ratio in (0, 4, 128)),
        *(Case(20, 2, *kind, dtype=torch.float32) for kind in KINDS),
        *(Case(seed, 0, *kind, chunks=8192 - seed) for kind in KINDS for seed in range(2)),
        *(Case(0, 0, *kind, chunks=700, dtype=torch.float32) for kind in KINDS),
    ]


def fault_of(case: Case, device: str) -> str:
    """Return what is wrong, "" if nothing. Positions run from 0 to 128k; two tokens and a sequence are padding."""
    cases = load("cache_write_cases")
    edges = (0, 1, 3, 4, 7, 8, 126, 127, 128, 131, 255, 256, 259, 511, 8191, 131071)
    spans = []
    for i in range(0 if case.chunks else case.count):
        start = edges[i] if i < len(edges) else (7919 * i + 3) % 131072
        # A sequence that is about to complete both kinds of entry, wherever the list of edges ends.
        spans.append((131071 - 128 * i if case.count < 4 else start, 1 + i % case.length if i else case.length))
    if case.chunks:
        spans = cases.random_spans(case.count, tokens=case.chunks)
    batch = cases.decode_batch(spans, block_tokens=BLOCK_TOKENS, padding=2, empty=1, device=device)
    layer = cases.make_layer(
        batch, ratio=case.ratio, fmt=case.fmt, index=case.index, dim=case.dim, heads=case.heads,
        block_tokens=BLOCK_TOKENS, hadamard=case.hadamard, dtype=case.dtype,
    )  # fmt: skip
    return str(cases.check(layer))


def long_fault(ratio: int, index: str, device: str, *, start: int, length: int, size: int = 512) -> str:
    """Return what is wrong with one chunk, "" if nothing."""
    cases = load("cache_write_cases")
    batch = cases.decode_batch([(start, length)], block_tokens=BLOCK_TOKENS, device=device)
    layer = cases.make_layer(
        batch, ratio=ratio, index=index, dim=size, heads=size // 32, block_tokens=BLOCK_TOKENS, dtype=torch.bfloat16
    )  # fmt: skip
    return str(cases.check(layer))


def replay_fault(ratio: int, index: str, device: str) -> str:
    """Return what is wrong after a CUDA graph was captured on one step and replayed on another, "" if nothing."""
    cases = load("cache_write_cases")
    layers = []
    for shift in (0, 3):
        spans = [(127 + 129 * i + shift, 1) for i in range(16)]
        batch = cases.decode_batch(
            spans, block_tokens=BLOCK_TOKENS, padding=2, empty=1, device=device, columns=16, seed=shift
        )
        layers.append(
            cases.make_layer(batch, ratio=ratio, index=index, dim=512, heads=16, block_tokens=BLOCK_TOKENS)
        )  # fmt: skip
    return str(cases.check_replayed(*layers))


def stored_bytes_fault(fmt: str, width: int, device: str) -> str:
    """Return how bytes stored on `device` differ from those of Rows.write on the CPU, "" if in nothing."""
    from kernels.row_store import store_rows

    cases = load("cache_write_cases")
    x = cases.hard_rows(width)
    place = torch.randperm(40, generator=torch.Generator().manual_seed(2))[: len(x)].int()
    got = cases.make_rows(fmt, width, units=8, rows=5, device=device)
    wanted = cases.make_rows(fmt, width, units=8, rows=5)
    wanted.write((place // 5).long(), (place % 5).long(), x)
    store_rows(got, (place // 5).to(device), (place % 5).to(device), x.to(device))
    apart = int((cases.raw(got).cpu() != cases.raw(wanted)).sum())
    return f"{apart} bytes differ" if apart else ""


def lost_fault(lost: str, ratio: int, length: int, device: str, *, dim: int = 512) -> str:
    """Return what is wrong where a row or an entry has no place, "" if nothing."""
    return str(load("cache_write_cases").lost_fault(lost, ratio, length, device=device, dim=dim))


def alone_fault(ratio: int, index: str, device: str, *, small: bool = False) -> str:
    """Return which bytes of a sequence depend on the others of a step, "" if none."""
    spans, size = list(ALONE), {"dim": 512, "heads": 16}
    if small:
        spans, size = [(126, 9), (0, 3)], {}
    cases = load("cache_write_cases")
    return str(cases.alone_fault(spans, ratio=ratio, index=index, device=device, block_tokens=BLOCK_TOKENS, **size))


def ready_fault(index: str, hadamard: bool, device: str, *, count: int = 20) -> str:
    """Return how the indexer's queries differ from those of other launches, "" if not."""
    return str(load("cache_write_cases").queries_fault(index, hadamard, count=count, device=device))


LONG = ((0, 8192), (1_000_003, 4096), (8190, 4097))  # first position, tokens
ALONE = ((8190, 1030), (1_000_003, 700), (0, 129), (77, 1))
READY = (("fp8_index", False), ("fp8_index", True), ("fp4_index", True), ("fp4_index", False))
STORED = (("packed", 512), ("packed", 128), ("fp8_index", 128), ("fp4_index", 128), ("bf16", 128), ("fp32", 64))


def jobs_of(device: str, *, small: bool = False) -> list[Job]:
    """Return all cases by name."""
    kinds = [(ratio, index) for ratio, index, turned in KINDS if not turned]
    found: list[Job] = []

    def add(name: str, fault: Callable[..., str], *given: object, **options: object) -> None:
        found.append((name, functools.partial(fault, *given, device=device, **options)))

    # The longest to compile and to run come first.
    for case in sorted(cases_of(small=small), key=lambda case: -case.chunks):
        add(str(case), fault_of, case)
    for ratio, index in kinds:
        add(f"alone, ratio {ratio} {index}", alone_fault, ratio, index, small=small)
        if not small:
            for start, length in LONG:
                name = f"{length} tokens from {start}, ratio {ratio} {index}"
                add(name, long_fault, ratio, index, start=start, length=length)
            add(f"replayed, ratio {ratio} {index}", replay_fault, ratio, index)
    for index, turned in READY:
        name = f"the indexer's queries {index}{' hadamard' * turned}"
        add(name, ready_fault, index, turned, count=2 if small else 20)
    for fmt, width in STORED:
        add(f"rows stored {fmt} {width}", stored_bytes_fault, fmt, width)
    for lost in load("cache_write_cases").LOST:
        for ratio in (4, 128):
            for length in (1, 2, 9):
                name = f"without a place: {lost}, ratio {ratio}, {length} tokens"
                add(name, lost_fault, lost, ratio, length, dim=128 if small else 512)
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", "cache_write", jobs_of))
