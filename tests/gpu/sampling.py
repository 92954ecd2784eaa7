"""Sampling at the model's vocabulary, compiled, against what is right for each row.

    python -m tests.gpu.sampling [--device cuda]     from the repository's root; exit code 1 if a case fails

Every kind of row on every kind of logits, one row to 200, mixed batches, pools, padding, other tiles, other
vocabularies, graph replay, a row's bits in other batches, noise bit by bit.
Under TRITON_INTERPRET=1 with --device cpu --small it tries itself out.
"""

from __future__ import annotations

import dataclasses
import functools
import sys

import torch

from tests.gpu.runner import Job, load, main

LOGITS = ("normal", "peaked", "flat", "ties", "equal")
# Tiles beside the table's: as make_tile takes them.
DESIGNS = [
    {
        "r": 4, "q": 16, "e": 32, "gather": 16, "tile": 2048, "pivoted": 1024, "small": 256, "step": 32, "share": 2048,
        "tokens": 1024, "scans": 4,
    },
    {
        "r": 8, "q": 64, "e": 16, "gather": 16, "tile": 512, "pivoted": 256, "small": 128, "step": 16, "share": 4096,
        "tokens": 512, "resident": 0, "scans": 0,
    },
    {
        "r": 2, "q": 16, "e": 16, "gather": 64, "tile": 1024, "pivoted": 512, "small": 64, "step": 16, "share": 1024,
        "tokens": 256, "resident": 4, "scans": 8,
    },
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """`count` rows of all kinds in turn (or one kind), log probabilities for every third."""

    count: int
    logits: str = "normal"
    kind: str = ""
    vocab: int = 129280
    padding: int = 0
    pools: bool = False
    num_top: int = 0
    dtype: torch.dtype = torch.float32
    design: int | None = None

    def __str__(self) -> str:
        flags = [name for name in ("pools",) if getattr(self, name)]
        cut = "" if self.design is None else f"design {self.design}"
        kind, dtype = self.kind or "mixed", str(self.dtype).removeprefix("torch.")
        parts = [f"B={self.count}+{self.padding} {kind} of {self.vocab} {self.logits} {dtype} top {self.num_top}"]
        return " ".join([*parts, *flags, cut]).strip()


def cases_of(*, small: bool = False) -> list[Case]:
    """Return all cases; small: few and tiny ones, for the interpreter."""
    if small:
        return [Case(8, vocab=200, padding=1, pools=pools, num_top=5, design=2) for pools in (False, True)]
    kinds = list(load("sampling_cases").KINDS)
    return [
        *(Case(40, logits, kind) for logits in LOGITS for kind in kinds[2:]),
        *(Case(64, logits, num_top=20, padding=3) for logits in LOGITS),
        *(Case(64, logits, num_top=20, pools=True) for logits in LOGITS),
        *(Case(count, num_top=5, pools=True) for count in (1, 2, 16, 200)),
        *(Case(64, logits, num_top=20, pools=True, dtype=torch.bfloat16) for logits in ("normal", "peaked")),
        *(Case(24, logits, vocab=vocab, num_top=4) for vocab in (1, 37, 2048, 2049, 32000) for logits in LOGITS[:4:3]),
        Case(8, vocab=262144, num_top=3),
        *(
            Case(32, logits, num_top=20, pools=True, design=design)
            for design in range(len(DESIGNS))
            for logits in ("normal", "ties")
        ),
    ]


def make(case: Case, device: str, *, seed: int = 0):
    """Return the case's inputs."""
    kinds = list(load("sampling_cases").KINDS.values())
    chosen = [load("sampling_cases").KINDS[case.kind]] if case.kind else kinds
    rows = [chosen[i % len(chosen)] | {"num_logprobs": (i % 3 - 1) * case.num_top} for i in range(case.count)]
    return load("sampling_cases").make_case(
        rows, vocab=case.vocab, kind=case.logits, penalties=case.pools, bias=case.pools, mask=case.pools,
        padding=case.padding, num_top=case.num_top, dtype=case.dtype, seed=seed, device=device,
    )  # fmt: skip


def options_of(case: Case) -> dict:
    """Return the arguments of sample_decode besides the inputs."""
    return {} if case.design is None else {"tile": load("sampling_cases").make_tile(**DESIGNS[case.design])}


def fault_of(case: Case, device: str) -> str:
    """Return what is wrong, "" if nothing.

    A near tie may go either way, but few rows have one: at most 1 in 20 may have another token than the reference's.
    """
    made, options = make(case, device), options_of(case)
    fault = str(made.fault(**options))
    got, again = made.run(**options), made.run(**options)
    for name in ("tokens", "logprob", "top_ids", "top_logprobs"):
        if not torch.equal(getattr(got, name), getattr(again, name)):
            fault = fault or f"two calls give different {name}"
    others = int((got.tokens != made.expect().tokens).sum())
    return fault or ("" if others <= max(1, case.count // 20) else f"{others} tokens are not the reference's")


def batch_fault(device: str) -> str:
    """Return how rows differ in other batches, "" if they have the same bits."""
    made = make(Case(64, num_top=20), device)
    together = made.run()
    for rows in (slice(3, 4), slice(7, 23), slice(10, 64)):
        given = {"position": made.given["position"][rows], "num_top": 20}
        alone = (
            load("sampling_cases").Case(made.logits[rows].contiguous(), made.settings[rows].contiguous(), given).run()
        )
        for name in ("tokens", "logprob", "top_ids", "top_logprobs"):
            if not torch.equal(getattr(alone, name), getattr(together, name)[rows]):
                return f"{name} of rows {rows} differ in a batch of 64"
    return ""


def noise_fault(device: str) -> str:
    """Return whether noise strays from the reference's, "" if not: equal logits are drawn by noise alone.

    Two rows of three tokens each: their noise, read off by how much a logit must be lifted to win, is the reference's.
    """
    module = load("sampling_cases")
    count = 512
    made = module.make_case([{}] * count, vocab=3, kind="equal", device=device)
    noise = torch.stack([
        module.gumbel_noise(seed[None], position[None], 3)[0]
        for seed, position in zip(module.seeds_of(made.settings), made.given["position"], strict=True)
    ])  # fmt: skip
    for token in range(3):
        others = [other for other in range(3) if other != token]
        needed = noise[:, others].amax(1) - noise[:, token]
        for way in (1, -1):  # just enough, and just not
            made.logits[:] = 0.0
            made.logits[:, token] = needed + way * 1e-5
            won = made.run().tokens == token
            if not bool((won == (way > 0)).all()):
                return f"token {token} of {int((won != (way > 0)).sum())} rows: noise is off by more than 1e-5"
    return ""


def replay_fault(device: str) -> str:
    """Return how a replayed graph differs from eager calls on other inputs in the same buffers, "" if not at all."""
    for case in (Case(1, num_top=20), Case(16, num_top=5, pools=True, padding=2)):
        made, other = make(case, device), make(case, device, seed=1)
        made.run()  # compiles
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = [made.run() for _ in range(3)]
        for source in (made, other, made):
            for mine, its in ((made.logits, source.logits), (made.settings, source.settings)):
                mine.copy_(its)
            made.given["position"].copy_(source.given["position"])
            graph.replay()
            wanted = made.run()
            for out in results:
                if not torch.equal(out.tokens, wanted.tokens) or not torch.equal(out.top_ids, wanted.top_ids):
                    return f"{case}: replay chooses {out.tokens.tolist()}, wanted {wanted.tokens.tolist()}"[:300]
    return ""


def jobs_of(device: str, *, small: bool) -> list[Job]:
    """Return all cases, and what else there is to see."""
    found: list[Job] = [(str(case), functools.partial(fault_of, case, device)) for case in cases_of(small=small)]
    if not small:
        found.insert(0, ("a row's bits in other batches", functools.partial(batch_fault, device)))
        found.insert(0, ("noise", functools.partial(noise_fault, device)))
    if device == "cuda":
        found.insert(0, ("graph replay", functools.partial(replay_fault, device)))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, "sampling", jobs_of, jobs=6))
