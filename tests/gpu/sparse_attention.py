"""sparse_attention_decode at the model's sizes, compiled, against its torch reference on the same device.

    python -m tests.gpu.sparse_attention [--device cuda]     from the repository's root; exit code 1 if a case fails

Every tile of the table and both other designs, all kinds of layer, lengths from 1 to 128k, padding, several tokens a
sequence, steps of hundreds of tokens, with what can't be read among them, chunks that begin elsewhere, graph replay
with other inputs in the same buffers, batch invariance.
Under TRITON_INTERPRET=1 with --device cpu --small it tries itself out.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import torch

from kernels.tiles import Tile
from tests.gpu.runner import Job, load, main

SPANS = (8191, 0, 131071, 127, 128, 700, 3, 2047, 131, 5000, 255, 12345, 511, 512, 513, 65535)


@dataclasses.dataclass(frozen=True)
class Case:
    """`count` sequences of `length` tokens at most, heads, kind of layer; designs as constants of the tile."""

    count: int
    heads: int
    kind: str
    length: int = 1
    dim: int = 512
    fmt: str = "packed"
    top_k: int = 512
    design: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        design = "".join(f" {name}={value}" for name, value in self.design)
        return f"B={self.count} x {self.length} {self.kind} {self.fmt} heads={self.heads} dim={self.dim}{design}"


def cases_of(*, small: bool = False) -> list[Case]:
    """Return all cases; small: few and tiny ones, for the interpreter."""
    kinds = ("selected", "visible", "window")
    if small:
        return [Case(3, 9, kind, length, 128, top_k=40) for kind in kinds for length in (1, 3)]
    designs = [
        (("BLOCK_N", 32), ("SWAP", swap), ("SPREAD", spread), ("FUSED", fused), ("MAX_SPLITS", splits))
        for swap, spread in ((0, 0), (1, 0), (0, 1))
        for fused, splits in ((1, 3), (0, 40), (0, 1))
    ]
    return [
        *(Case(count, heads, "selected") for count in (1, 2, 16, 64) for heads in (1, 16, 17, 64, 128)),
        *(Case(count, 16, kind) for count in (1, 16, 64, 128) for kind in ("visible", "window")),
        *(Case(count, 16, kind, length) for count, length in ((1, 8), (16, 4)) for kind in kinds),
        *(Case(16, 4, kind, length, 128, fmt) for kind in kinds for length in (1, 3) for fmt in ("packed", "fp32")),
        *(Case(16, 16, kind, length, 512, "bf16") for kind in kinds for length in (1, 3)),
        *(Case(3, 16, "selected", design=design) for design in designs),
        # Steps of many tokens: a chunk of a prompt, several of them, and many sequences with a token or two each.
        *(Case(count, 16, kind, n) for count, n in ((1, 600), (3, 300), (200, 2), (300, 1)) for kind in kinds),
        *(Case(1, heads, kind, 300) for heads in (1, 8, 17, 32, 64, 128) for kind in kinds),
        *(Case(3, 4, kind, 200, 128, fmt) for kind in kinds for fmt in ("packed", "bf16")),
    ]


def make(case: Case, device: str, *, seed: int = 0):
    """Return the case's inputs. "visible" layers are HCA's: ratio 128, 2 entries a block."""
    ratio, block_rows = (128, 2) if case.kind == "visible" else (4, 64)
    longest = 131072 if case.kind == "visible" else 16384
    if case.dim == 128:
        longest = 2048
    spans = [(SPANS[b % len(SPANS)] % longest, 1 + b % case.length if b else case.length) for b in range(case.count)]
    return load("sparse_attention_cases").make_case(
        spans, fmt=case.fmt, dim=case.dim, heads=case.heads, kind=case.kind, top_k=case.top_k, padding=2,
        staged=case.length > 1, seed=seed, window_rows=128, ratio=ratio, block_rows=block_rows, device=device,
    )  # fmt: skip


def fault_of(case: Case, device: str) -> str:
    """Return what is wrong, "" if nothing."""
    made = make(case, device)
    tile = load("sparse_attention_cases").make_tile(warps=8, **dict(case.design)) if case.design else None
    fault = str(made.fault(tile=tile, every=1 + made.batch.num_tokens // 257 * 6))  # the reference takes its time
    if fault or case.kind == "window" or case.count > 16:
        return fault
    return str(made.fault(batch_invariant=True, tile=tile))


def invariance_fault(device: str, *, small: bool = False) -> str:
    """Return whether bits of a token depend on the batch in batch-invariant mode, "" if not."""
    for kind in ("selected", "visible"):
        case = Case(3, 16, kind, dim=128, top_k=40) if small else Case(33, 16, kind)
        made = make(case, device)
        together = made.run(batch_invariant=True)[0]
        for token in range(0, case.count, 1 if small else 8):
            alone = load("sparse_attention_cases").alone(made, token).run(batch_invariant=True)[0]
            if not torch.equal(alone[0], together[token]):
                return f"{kind}: token {token} alone differs by {(alone[0] - together[token]).abs().max():.2e}"
    return ""


def replay_fault(device: str) -> str:
    """Return how a replayed graph differs from eager calls on other inputs in the same buffers, "" if not at all."""
    for case in (
        Case(1, 16, "selected"),
        Case(16, 16, "visible"),
        Case(64, 64, "selected"),
        Case(4, 16, "selected", 4),
    ):
        made, other = make(case, device), make(case, device, seed=1)
        made.run()  # compiles
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = [made.run() for _ in range(3)]
        for source in (made, other, made):
            made.q.copy_(source.q)
            if source.rest["selected"] is not None:
                made.rest["selected"].copy_(source.rest["selected"])
            graph.replay()
            wanted = made.run()
            for out, lse in results:
                if not (torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])):
                    return f"{case}: replay differs by {(out - wanted[0]).abs().max():.2e}"
    return ""


def chunk_fault(kind: str, device: str, *, small: bool = False, tile=None) -> str:
    """Return whether bits of a token depend on where its chunk begins, or on a row that it doesn't see."""
    cases = load("sparse_attention_cases")
    lengths, options = ((40, 30, 9), {"dim": 128, "top_k": 20}) if small else ((900, 301, 77), {"dim": 512})
    options |= {"window_rows": 16} if small else {"window_rows": 128, "top_k": 512}
    options |= {"ratio": 128, "block_rows": 2} if kind == "visible" and not small else {}
    length, second, spoilt = lengths
    span = (100 if small else 5000, length)
    made = cases.make_case([span], heads=16, kind=kind, staged=True, padding=1, device=device, **options)
    whole = made.run(tile=tile)[0]
    cases.spoil(made, spoilt)
    out = made.run(tile=tile)[0]
    bad = torch.zeros(length + 1, dtype=torch.bool, device=device)
    bad[spoilt : spoilt + options["window_rows"]] = True
    if not bool(out[bad].isnan().all()) or not torch.equal(out[~bad], whole[~bad]):
        return f"a spoilt row: {int(out[bad].isnan().sum())} NaN of {out[bad].numel()}, others differ or are NaN"
    rest = cases.later(made, second).run(tile=tile)[0]
    # NumPy's products, of the interpreter, depend on a row's place.
    if not (torch.allclose(rest, whole[second:], atol=2**-8) if small else torch.equal(rest, whole[second:])):
        return f"a chunk that begins {second} tokens later differs by {(rest - whole[second:]).abs().max():.2e}"
    return ""


def jobs_of(device: str, *, small: bool) -> list[Job]:
    """Return all cases, and what else there is to see."""
    found: list[Job] = [(str(case), functools.partial(fault_of, case, device)) for case in cases_of(small=small)]
    tile = Tile({"BLOCK_H": 16, "BLOCK_N": 16}, num_warps=4) if small else None  # so few would go another way
    for kind in ("selected", "visible", "window"):
        found.append((f"chunks {kind}", functools.partial(chunk_fault, kind, device, small=small, tile=tile)))
    found.append(("batch invariance", functools.partial(invariance_fault, device, small=small)))
    if device == "cuda":
        found.insert(0, ("graph replay", functools.partial(replay_fault, device)))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, "sparse_attention", jobs_of))
