"""The first and last launch of a step, compiled, against their torch references on the same device.

    python -m tests.gpu.step [--device cuda]     from the repository's root; exit code 1 if a case fails

Under TRITON_INTERPRET=1 with --device cpu --small it tries itself out.
"""

from __future__ import annotations

import functools
import sys

import torch

from tests.gpu.runner import Job, load, main

SIZES = (1, 2, 12, 16, 64, 200)


def size_fault(size: int, device: str, *, rope: int = 64, hidden: int = 4096) -> str:
    """Return what is wrong with a step of `size` rows, "" if nothing."""
    step = load("step_cases").make_step(size=size, rope=rope, hidden=hidden, device=device)
    return load("step_cases").begin_fault(step) or load("step_cases").end_fault(step)


def replay_fault(device: str) -> str:
    """Return how steps replayed from a graph, each going on from the last, differ from the reference's."""
    from kernels.step import begin_step_reference, end_step_reference

    step = load("step_cases").make_step(size=16, hidden=4096, device=device)
    other = load("step_cases").make_step(size=16, hidden=4096, device=device)

    def launch():
        inputs = step.begin()
        return inputs, step.end()

    launch()  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        inputs, out = launch()
    step.rows.copy_(other.rows)
    step.last_token.copy_(other.last_token)
    for number in range(3):
        for each in (step, other):
            each.tokens.copy_(torch.arange(16) + 100 * number)
        wanted = other.begin(begin_step_reference), other.end(end_step_reference)
        graph.replay()
        for name in ("positions", "sequence", "slots", "token_ids", "next_position"):
            if not torch.equal(getattr(inputs, name), getattr(wanted[0], name)):
                return f"step {number}: other {name}"
        if not torch.equal(out, wanted[1]) or not torch.equal(step.rows, other.rows):
            return f"step {number}: ends otherwise"
    return ""


def jobs_of(device: str, *, small: bool) -> list[Job]:
    """Return all cases."""
    found: list[Job] = [
        (f"of {size} rows", functools.partial(size_fault, size, device)) for size in (SIZES[:3] if small else SIZES)
    ]
    found.append(("of odd sizes", functools.partial(size_fault, 5, device, rope=12, hidden=70)))
    if device == "cuda":
        found.append(("graph replay", functools.partial(replay_fault, device)))
    return found


if __name__ == "__main__":
    sys.exit(main(__doc__, "step", jobs_of))
