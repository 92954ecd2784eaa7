"""Linear layers at the model's sizes, compiled, against float64 sums on the same device.

    python -m tests.gpu.gemm [--device cuda]     from the repository's root; exit code 1 if a case fails

Every tile of the table and others, one token to 4,096, e4m3, bf16 and float32, grouped, normed, cut, quantised; graph
replay with other inputs in the same buffers. Under TRITON_INTERPRET=1 with --device cpu --small it tries itself out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys

import torch

from tests.gpu.runner import Job, load, main

# Tiles beside those of the table. few: KS, RS, R, DEPTH, SPLIT.   many: rows, columns, bytes, split, warps, stages.
FEW_DESIGNS = [(8, 1, 1, 4, 1), (4, 2, 1, 2, 1), (4, 1, 2, 1, 4), (2, 2, 2, 3, 2), (16, 1, 1, 1, 3), (1, 4, 1, 4, 1)]
MANY_DESIGNS = [(64, 16, 128, 4, 4, 3), (128, 32, 128, 2, 8, 4), (128, 128, 64, 1, 8, 3), (64, 64, 64, 3, 4, 2)]
OUTS = ("bfloat16", "float32")
# Rows, columns, steps, split, warps, tiles; more than an RTX PRO 6000 has room for.
HELD_DESIGNS = [(64, 64, 8, 1, 8), (64, 32, 16, 1, 8), (64, 32, 4, 4, 4), (64, 64, 8, 4, 16), (64, 64, 8, 1, 8, 2)]


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer [groups, rows, channels] and `tokens` tokens."""

    tokens: int
    rows: int
    channels: int
    dtype: str = "float8_e4m3fn"
    x_dtype: str = "bfloat16"
    out_dtype: str = "float32"
    groups: int = 0
    offset: tuple[int, int] = (0, 0)
    normed: bool = False
    quantize: bool = False
    limit: float | None = None
    gap: int = 0
    powers: bool = False
    few: int | None = None
    many: int | None = None
    held: int | None = None

    def __str__(self) -> str:
        plain = {field.name: field.default for field in dataclasses.fields(self)}
        extra = [f"{name}={value}" for name, value in vars(self).items() if value != plain[name]][3:]
        return f"B={self.tokens} {self.rows} x {self.channels} {' '.join(extra)}"


def cases_of(*, small: bool = False) -> list[Case]:
    """Return all cases; small: few and tiny ones, for the interpreter."""
    if small:
        small_quantised = Case(17, 20, 128, normed=True, quantize=True)
        plain = [Case(3, 20, 128), Case(17, 20, 128), Case(3, 20, 256, few=2), Case(17, 20, 256, many=0, normed=True)]
        plain += [Case(300, 20, 128), Case(300, 20, 128, groups=2, powers=True)]
        return [*plain, small_quantised, Case(17, 20, 256, held=0, quantize=True)]
    batches = (1, 5, 8, 9, 16, 17, 33, 64, 100, 256)
    return [
        *(Case(tokens, 8192, 1024, normed=True) for tokens in batches),
        *(Case(tokens, 16384, 1024, normed=True, gap=512) for tokens in (16, 17, 32, 48, 64, 65)),
        *(Case(64, 1000, 1024, many=i, normed=True) for i in range(len(MANY_DESIGNS))),
        *(Case(64, 1040, 1024, normed=True, dtype=dtype) for dtype in ("bfloat16", "float32")),
        *(Case(tokens, 1040, 1024, normed=True, limit=10.0) for tokens in (5, 33)),
        *(Case(tokens, 640, 1024, normed=True, offset=(17, 0)) for tokens in (5, 33)),
        *(Case(tokens, 4096, 2048) for tokens in batches),
        *(Case(tokens, 1024, 4096, groups=2) for tokens in (1, 16, 64, 256)),
        *(Case(tokens, 1536, 4096, out_dtype="bfloat16") for tokens in (1, 16, 64)),
        *(Case(tokens, 1024, 4096, limit=10.0, out_dtype="bfloat16") for tokens in batches),
        *(Case(tokens, 4096, 4096, limit=10.0) for tokens in (1, 16, 64)),
        *(Case(tokens, 64, 256, limit=1.0, dtype=dtype) for tokens in (3, 64) for dtype in ("bfloat16", "float32")),
        *(Case(tokens, 4096, 512, gap=64) for tokens in (1, 64)),
        *(Case(tokens, 8192, 128, x_dtype="float32", normed=True) for tokens in (1, 4, 64)),
        *(Case(tokens, 128, 2048, x_dtype="float32", groups=4) for tokens in (4, 64)),
        *(Case(tokens, 2624, 4096, dtype="bfloat16") for tokens in (1, 16, 64, 256)),
        *(Case(tokens, 256, 4096, dtype="bfloat16") for tokens in (1, 64)),
        *(Case(tokens, 4099, 4096, dtype="bfloat16", x_dtype="float32", normed=True) for tokens in (1, 16, 64)),
        *(Case(tokens, 24, 16384, dtype="float32", x_dtype=x) for tokens in (1, 64) for x in ("bfloat16", "float32")),
        *(Case(tokens, 640, 192, offset=offset) for tokens in (3, 64) for offset in ((64, 64), (17, 80), (127, 5))),
        *(Case(tokens, 300, 1000) for tokens in (3, 64)),
        *(Case(tokens, 20, 64) for tokens in (1, 64)),
        *(Case(tokens, 4096, 2048, quantize=True) for tokens in (1, 17, 32, 64, 300)),
        *(Case(tokens, 8192, 1024, normed=True, quantize=True) for tokens in (1, 17, 32, 33, 64, 256)),
        *(Case(tokens, 1536, 4096, quantize=True, out_dtype="bfloat16") for tokens in (17, 64)),
        *(Case(64, rows, 1024, normed=True, quantize=True) for rows in (16384, 32768)),
        Case(64, 300, 1000, normed=True, quantize=True),
        Case(64, 640, 256, offset=(17, 0), quantize=True),
        Case(64, 1024, 4096, quantize=True, x_dtype="float32", normed=True),
        Case(17, 1024, 4096, groups=2, quantize=True),
        *(Case(tokens, 1040, 2048, many=i, quantize=True) for tokens in (3, 64) for i in range(len(MANY_DESIGNS))),
        *(Case(tokens, 2048, 1024) for tokens in (512, 4096)),
        *(Case(tokens, 8192, 1024, normed=True, gap=512) for tokens in (257, 4096)),
        *(Case(tokens, 16384, 1024, powers=True, out_dtype="bfloat16") for tokens in (1000, 8192)),
        *(Case(tokens, 1024, 4096, groups=2, powers=True, out_dtype=out) for tokens in (300, 4096) for out in OUTS),
        *(Case(tokens, 1536, 4096, powers=True) for tokens in (257, 8192)),
        *(Case(tokens, 1024, 4096, limit=10.0, powers=True, out_dtype="bfloat16") for tokens in (300, 4096)),
        *(Case(tokens, 4096, 512, powers=True) for tokens in (300, 4096)),
        *(Case(tokens, 2624, 4096, dtype="bfloat16") for tokens in (257, 4096)),
        *(Case(300, 640, 192, offset=offset, powers=True) for offset in ((64, 64), (17, 80), (127, 5))),
        Case(300, 299, 1001, powers=True),
        *(Case(300, 1040, 1024, normed=True, dtype=dtype, x_dtype="float32") for dtype in ("bfloat16", "float32")),
        Case(4096, 1024, 1024, dtype="bfloat16"),
        *(Case(tokens, 1040, 2048, few=i) for tokens in (1, 16) for i in range(len(FEW_DESIGNS))),
        *(Case(tokens, 1040, 2048, many=i) for tokens in (3, 64) for i in range(len(MANY_DESIGNS))),
        *(Case(tokens, 1040, 2048, held=i, quantize=True) for tokens in (3, 64) for i in range(len(HELD_DESIGNS))),
        *(Case(64, 1000, 1000, held=i, quantize=True) for i in range(len(HELD_DESIGNS))),
        *(Case(9, 1040, 2048, few=i, normed=True) for i in range(len(FEW_DESIGNS))),
        *(Case(9, 1040, 2048, few=i, dtype="bfloat16") for i in range(len(FEW_DESIGNS))),
    ]


def make(case: Case, device: str, *, seed: int = 0):
    """Return the case's inputs."""
    return load("gemm_cases").make_case(
        case.tokens, case.rows, case.channels, dtype=getattr(torch, case.dtype), x_dtype=getattr(torch, case.x_dtype),
        offset=case.offset, groups=case.groups, normed=case.normed, quantize=case.quantize, limit=case.limit,
        gap=case.gap, powers=case.powers, seed=seed, device=device,
    )  # fmt: skip


def fault_of(case: Case, device: str) -> str:
    """Return what is wrong, "" if nothing."""
    made = make(case, device)
    options = {"out_dtype": getattr(torch, case.out_dtype)}
    if case.few is not None:
        options["tile"] = load("gemm_cases").few_tile(*FEW_DESIGNS[case.few])
    if case.many is not None:
        options["tile"] = load("gemm_cases").many_tile(*MANY_DESIGNS[case.many])
    if case.held is not None:
        options["tile"] = load("gemm_cases").held_tile(*HELD_DESIGNS[case.held])
    fault = str(made.fault(**options))
    again = made.run(**options), made.run(**options)
    return fault or ("" if torch.equal(*again) else "two calls give different bits")


def pair_fault(device: str, tokens: int, rows: int) -> str:
    """Return how two matrices in one launch differ from each by itself in float64, "" if not beyond the bounds."""
    from kernels.gemm_pair import linear_pair_decode

    first = make(Case(tokens, rows, 4096, dtype="bfloat16"), device)
    second = make(Case(tokens, 1536, 4096), device, seed=1)
    second.x = first.x
    for _ in range(3):
        outs = linear_pair_decode(
            first.x, (first.weight, None), (second.weight, second.scale), out_dtypes=(torch.float32, torch.float32)
        )
        for name, out, case in zip(("first", "second"), outs, (first, second), strict=True):
            fault = case.fault_of(out)
            if fault:
                return f"the {name}: {fault}"
    return ""


def apart_fault(device: str, tokens: int) -> str:
    """Return how a token's sums differ where all others are NaN, "" if not."""
    case = make(Case(tokens, 1024, 4096, normed=True, limit=10.0), device)
    before, kept = case.run(), tokens // 2
    case.x[:kept], case.x[kept + 1 :] = math.nan, math.nan
    after = case.run()
    if not torch.equal(before[kept], after[kept]):
        return "a token's bits depend on the others"
    return "" if int(after.isnan().all(1).sum()) == tokens - 1 else "a token of NaN gives numbers"


def replay_fault(device: str) -> str:
    """Return how a replayed graph differs from eager calls on other inputs in the same buffers, "" if not at all.

    Layers in a chain, each on the output of the one before, so that one that does not wait for it is found out.
    """
    for tokens in (1, 16, 64):
        layers = [
            make(Case(tokens, *shape, **options), device, seed=i)
            for i, (shape, options) in enumerate(
                [
                    ((1536, 2048), {}),
                    ((2048, 1536), {"normed": True}),
                    ((2048, 2048), {"dtype": "bfloat16"}),
                    ((2048, 2048), {"normed": True, "quantize": True}),
                ]
                * 3
            )
        ]

        def chain(x: torch.Tensor, layers=layers) -> torch.Tensor:
            for layer in layers:
                layer.x = x
                x = layer.run() * 0.01
            return x

        first, other = (make(Case(tokens, 16, 2048), device, seed=seed).x for seed in (8, 9))
        x = first.clone()
        chain(x)  # compiles
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = chain(x)
        for source in (first, other, first):
            x.copy_(source)
            graph.replay()
            torch.cuda.synchronize()
            wanted = chain(x)
            if not torch.equal(out, wanted):
                return f"{tokens} tokens: replay differs by {(out - wanted).abs().max():.2e}"
    return ""


def jobs_of(device: str, *, small: bool) -> list[Job]:
    """Return all cases, and what else there is to see."""
    found: list[Job] = [(str(case), functools.partial(fault_of, case, device)) for case in cases_of(small=small)]
    if not small:
        for rows in (2624, 1024):
            for tokens in (1, 8, 9, 16, 17, 32, 33, 64):
                found.append(
                    (f"B={tokens} {rows} and 1536 x 4096", functools.partial(pair_fault, device, tokens, rows))
                )
    for tokens in (300,) if small else (300, 4096):
        found.append((f"B={tokens} all NaN but one", functools.partial(apart_fault, device, tokens)))
    if device == "cuda":
        found.insert(0, ("graph replay of a chain", functools.partial(replay_fault, device)))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, "linear", jobs_of))
