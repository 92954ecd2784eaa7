"""Run every kernel once on small inputs, for a checker to watch.

    compute-sanitizer --tool memcheck --error-exitcode 3 python -m kernels.sanitize --group attention
    compute-sanitizer --tool racecheck --error-exitcode 3 python -m kernels.sanitize --group attention

Inputs are the `samples()` of the kernels' modules (kernels/bench.py). Every tensor gets an allocation of its own, so
that memcheck sees an access one byte past it. racecheck sees shared memory only. Under TRITON_INTERPRET=1 they run on
the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from kernels.bench import GROUPS, collect
from kernels.table import counted
from kernels.triton_env import INTERPRETED


def main(argv: Sequence[str] | None = None) -> int:
    """Run the samples; return 0 if all ran, 1 if one failed or there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.sanitize", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--group", choices=GROUPS, help="only these operations")
    parser.add_argument("--filter", metavar="TEXT", help="only where op and shape contain it")
    args = parser.parse_args(argv)
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at the first allocation
    samples = [s for s in collect("samples") if args.group in (None, s.group)]
    samples = [s for s in samples if (args.filter or "") in f"{s.op} {s.shape}"]
    if not samples:
        parser.error("no sample matches")
    if not torch.cuda.is_available() and not INTERPRETED:
        print(f"kernels.sanitize: no CUDA device here (torch {torch.__version__})", file=sys.stderr)
        return 1
    target = torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())
    for sample in samples:
        print(f"{sample.op} {sample.shape}", flush=True)  # before it runs: the checker's report follows it
        sample.make(target, 0)()
        if target.type == "cuda":
            torch.cuda.synchronize()
    print(f"{counted(len(samples), 'sample')} ran", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
