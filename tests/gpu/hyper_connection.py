"""Hyper-connections at the model's sizes, compiled, against their formula in float64 on the same device.

    python -m tests.gpu.hyper_connection [--device cuda]     from the repository's root; exit code 1 if a case fails

One token to 256, and chunks of up to 8,192, padding, both dtypes of streams, the first layer and the head, other sizes,
other tiles; bits that do not depend on the batch; graph replay of launches that follow one another at once, so that
what the first launch reads before it waits is what the last replay has left.
Under TRITON_INTERPRET=1 with --device cpu --small it tries itself out.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import torch

from tests.gpu.runner import Job, load, main

BF16, FLOAT = torch.bfloat16, torch.float32
# Warps of both launches, and spans of the first; bits do not depend on warps and spans of the first.
TILES = [(1, 4, 1), (1, 8, 2), (2, 16, 1), (4, 32, 2)]
MANY = (257, 300, 1000, 4096, 8192)  # tokens of chunks


@dataclasses.dataclass(frozen=True)
class Case:
    """A sublayer's end and the next one's beginning, as make_case has them. design: which of TILES."""

    tokens: int
    n: int = 4
    hidden: int = 4096
    dtype: torch.dtype = BF16
    y_dtype: torch.dtype = BF16
    padding: int = 0
    head: bool = False
    iters: int = 20
    sharp: float = 1.0
    expanded: bool = False
    top_k: int = 0
    design: int | None = None

    def __str__(self) -> str:
        flags = [name for name in ("head", "expanded") if getattr(self, name)]
        flags += [f"top {self.top_k}"] if self.top_k else []
        flags += [] if self.design is None else ["warps {}, {}, spans {}".format(*TILES[self.design])]
        flags += [f"{self.iters} rounds, sharp {self.sharp:g}"] if self.sharp != 1 else []
        types = f"{self.dtype} y {self.y_dtype}".replace("torch.", "")
        return " ".join([f"B={self.tokens}+{self.padding} {self.n} x {self.hidden} {types}", *flags])


def cases_of(*, small: bool = False) -> list[Case]:
    """Return all cases; small: few and tiny ones, for the interpreter."""
    if small:
        few = [Case(3, n, 64, padding=1, head=head, iters=2) for n in (2, 4) for head in (False, True)]
        return [*few, Case(3, 4, 64, padding=1, iters=2, top_k=3)]
    return [
        *(Case(tokens, top_k=6) for tokens in (1, 5, 16, 17, 64, 256)),
        *(Case(tokens, top_k=6, padding=3) for tokens in (1, 15, 64)),
        *(Case(tokens, top_k=6, head=True) for tokens in (1, 64)),
        *(Case(17, 3, hidden, dtype, top_k=4, padding=2) for hidden in (64, 7168) for dtype in (BF16, FLOAT)),
        *(Case(64, top_k=6, design=design) for design in range(len(TILES))),
        *(Case(tokens, y_dtype=y) for tokens in (1, 5, 16, 17, 64, 256) for y in (BF16, FLOAT)),
        *(Case(tokens, padding=3) for tokens in (1, 15, 64)),
        *(Case(tokens, head=True, y_dtype=FLOAT) for tokens in (1, 64)),
        *(Case(tokens, expanded=True) for tokens in (1, 64)),
        *(Case(9, sharp=sharp, iters=iters) for sharp, iters in ((6.0, 20), (6.0, 1), (12.0, 20))),
        *(Case(33, n, hidden, padding=2) for n in (2, 3, 4) for hidden in (64, 192, 7168)),
        *(Case(17, n, 512, FLOAT, FLOAT) for n in (2, 3, 4)),
        Case(64, dtype=FLOAT, y_dtype=FLOAT),
        *(Case(tokens, design=design) for design in range(len(TILES)) for tokens in (1, 64)),
        *(Case(tokens, y_dtype=y) for tokens in MANY for y in (BF16, FLOAT)),
        *(Case(tokens, padding=31) for tokens in MANY[:4]),
        *(Case(1000, head=True, padding=padding, y_dtype=FLOAT) for padding in (0, 9)),
        *(Case(300, n, hidden, padding=2) for n in (2, 3, 4) for hidden in (64, 192, 7168)),
        *(Case(300, sharp=sharp, iters=iters) for sharp, iters in ((6.0, 20), (6.0, 1), (12.0, 20))),
        Case(1000, expanded=True),
        Case(1000, top_k=6, padding=3),
        Case(300, dtype=FLOAT, y_dtype=FLOAT),
    ]


def make(case: Case, device: str, *, seed: int = 0):
    """Return the case's inputs."""
    sizes = {name: value for name, value in dataclasses.asdict(case).items() if name not in ("tokens", "design")}
    return load("hyper_connection_cases").make_case(case.tokens, **sizes, seed=seed, device=device)


def _tiles(design: int):
    warps, finish_warps, spans = TILES[design]
    return load("hyper_connection_cases").make_tiles(warps, finish_warps, spans=spans)


def fault_of(case: Case, device: str) -> str:
    """Return what is wrong, "" if nothing."""
    made = make(case, device)
    options = {} if case.design is None else {"tiles": _tiles(case.design)}
    fault = str(made.fault(**options))
    first, second = made.run(**options), made.run(**options)
    fault = fault or _bits(first, second, "two calls") or load("hyper_connection_cases").spread_alone_fault(made)
    return fault or (load("hyper_connection_cases").summed_fault(made, **options) if case.top_k else "")


def batch_fault(device: str, *, hidden: int = 4096, tokens: int = 64) -> str:
    """Return whether a token has other bits in a batch than alone, "" if not."""
    made = load("hyper_connection_cases").make_case(tokens, hidden=hidden, device=device)
    whole = made.run()
    for at in (0, tokens // 2 + 1, tokens - 1):
        own = slice(at, at + 1)
        one = type(made)(made.streams[own], made.y[own], made.first, made.second, None).run()
        part = dataclasses.replace(whole, x=whole.x[own], streams=whole.streams[own], carry=whole.carry[own])
        if fault := _bits(one, part, f"token {at} alone and in a batch of {tokens}"):
            return fault
    return ""


def chunk_fault(device: str) -> str:
    """Return whether a chunk's token has other bits in a shorter chunk, or behind other tokens, "" if not."""
    made = load("hyper_connection_cases").make_case(4096, hidden=4096, device=device)
    whole = made.run()
    for own in (slice(0, 257), slice(1021, 1400), slice(3501, 4096)):
        one = type(made)(made.streams[own], made.y[own], made.first, made.second, None).run()
        part = dataclasses.replace(whole, x=whole.x[own], streams=whole.streams[own], carry=whole.carry[own])
        if fault := _bits(one, part, f"tokens {own.start} to {own.stop} alone and in a chunk of 4,096"):
            return fault
    return ""


def cut_fault(device: str, *, hidden: int = 4096, tokens: int = 64) -> str:
    """Return whether bits depend on how the first launch is cut, "" if not."""
    module = load("hyper_connection_cases")
    for dtype in (BF16, FLOAT):
        made = module.make_case(tokens, hidden=hidden, dtype=dtype, device=device)
        one = made.run(tiles=module.make_tiles(1, 4, spans=1))
        for warps, spans in ((1, 2), (2, 2), (4, 1)):
            other = made.run(tiles=module.make_tiles(warps, 4, spans=spans))
            if fault := _bits(one, other, f"{dtype}: {warps} warps, {spans} spans"):
                return fault
    return ""


def replay_fault(device: str) -> str:
    """Return how a replayed graph differs from eager calls on other inputs in the same buffers, "" if not at all."""
    from kernels.hyper_connection_decode import spread_and_mix

    for case in (Case(1), Case(16, padding=2), Case(64), Case(1, top_k=6), Case(16, padding=2, top_k=6), Case(300)):
        made, other = make(case, device), make(case, device, seed=10)
        head = load("hyper_connection_cases").make_mixer(5, n=case.n, hidden=case.hidden, head=True, device=device)

        def run(made=made, head=head):
            first = made.run()
            second = spread_and_mix(made.y, first, made.first, sequence=made.sequence)
            return first, second, spread_and_mix(made.y, second, head, sequence=made.sequence)

        run()  # compiles
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = run()
        for source in (made, other, made, other):
            made.streams.copy_(source.streams)
            _copy(made.y, source.y)
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            wanted = run()
            for number, (got, want) in enumerate(zip(results, wanted, strict=True)):
                if fault := _bits(got, want, f"{case}: launch {number} replayed and called"):
                    return fault
        if torch.equal(made.run().x, make(case, device).run().x):
            return f"{case}: the other inputs are the same"
    return ""


def _copy(to, source) -> None:
    """Copy a sublayer's output in place; rows of experts with all that says whose they are."""
    if isinstance(to, torch.Tensor):
        to.copy_(source)
    else:
        for field in dataclasses.fields(to):
            getattr(to, field.name).copy_(getattr(source, field.name))


def _bits(a, b, what: str) -> str:
    """Return which tensors of two results differ, "" if none."""
    for name in ("x", "streams", "carry"):
        one, two = getattr(a, name), getattr(b, name)
        if name == "carry" and one is not None:
            n = a.streams.shape[1]
            one, two = one[:, :, :n], two[:, :, :n]
        if one is not None and not torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0)):
            return f"{what}: other bits in {name}"
    return ""


def jobs_of(device: str, *, small: bool) -> list[Job]:
    """Return all cases, and what else there is to see."""
    found: list[Job] = [(str(case), functools.partial(fault_of, case, device)) for case in cases_of(small=small)]
    sizes = {"hidden": 64, "tokens": 17} if small else {}
    found.insert(0, ("bits alone and in a batch", functools.partial(batch_fault, device, **sizes)))
    found.insert(0, ("bits of every cut", functools.partial(cut_fault, device, **sizes)))
    if device == "cuda":
        found.insert(0, ("graph replay", functools.partial(replay_fault, device)))
        found.insert(0, ("bits in chunks", functools.partial(chunk_fault, device)))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, "hyper_connection", jobs_of))
