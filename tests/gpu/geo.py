"""The oracle `geo` (head geometry of V4-Flash) with packed rows: every teacher-forced step against golden.

    python -m tests.gpu.geo --device cuda            from the repository's root; --device cpu runs the references

Each prompt is prefilled but for its last token. Then all prompts decode in one batch, one token each: the last token of
the prompt and golden's own choices, so all 24 rows of golden logits come from decode steps. On cuda (or under
TRITON_INTERPRET=1, slowly) those run the Triton kernels. Prints a row per step; exit code 1 if an argmax is not
golden's, or logits leave golden_sim (the same with FP8 rows and FP4 index keys rounded) by more than the bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TESTS = Path(__file__).resolve().parent.parent
LENGTHS = (9, 130, 700, 2300)
BLOCK_TOKENS = 256
# What is rounded besides the rows: nothing on the CPU, where grids of FP8 and FP4 flip at most; queries, keys,
# probabilities and output to bfloat16 in the kernels. See the measured values in docs/performance.md.
BOUNDS = {"reference": 2e-2, "kernels": 0.2}


@dataclasses.dataclass(frozen=True)
class Step:
    """One row of logits. sim, golden: largest distance to golden_sim, to golden.   margin: golden's top-2 distance."""

    length: int
    step: int
    argmax: int
    wanted: int
    sim: float
    golden: float
    margin: float

    def fault(self, bound: float) -> str:
        if self.argmax != self.wanted:
            return f"argmax {self.argmax}, golden has {self.wanted}"
        return "" if self.sim <= bound else f"{self.sim:.2e} from golden_sim, bound {bound:.0e}"


def write_checkpoint(folder: Path) -> Path:
    """Make the 29 MB of weights, which no repository holds, and return the checkpoint's folder."""
    make_golden = _module("make_golden", TESTS / "oracle/make_golden.py")
    config = json.loads((TESTS / "oracle/geo/config.json").read_text())
    stored, _ = make_golden.build_weights(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    return folder


def run(
    checkpoint: Path, *, device: str, dtype: str, index: str, lengths: tuple[int, ...] = LENGTHS, steps: int = 6
) -> list[Step]:
    """Return every step of every prompt, by prompt, then by step. The pools are full of NaN to begin with."""
    harness = _module("engine_harness", TESTS / "engine/harness.py")
    golden, sim = (load_file(TESTS / f"oracle/geo/{name}.safetensors") for name in ("golden", "golden_sim"))
    runner = harness.make_runner(
        checkpoint, role="decode", device=device, dtype=dtype, kv_cache_dtype="packed", index_cache_dtype=index,
        block_size=BLOCK_TOKENS, pool_poison=True,
    )  # fmt: skip
    side = harness.Side(runner)
    sequences = []
    for length in lengths:
        prompt = golden[f"prompt_{length}"].tolist()
        running = side.start(prompt, num_tokens=length + steps)
        while running.length < length - 1:
            side.step((running, prompt[running.length : min(running.length + 512, length - 1)], False))
        sequences.append((running, [prompt[-1], *golden[f"gen_{length}"].tolist()]))
    for step in range(steps):
        side.step(*((running, [forced[step]], True) for running, forced in sequences))
    found = []
    for length, (running, _) in zip(lengths, sequences, strict=True):
        if running.failed:
            raise RuntimeError(f"prompt of {length} tokens: {running.failed}")
        for step, logits in enumerate(running.logits):
            logits, wanted = logits.float().cpu(), golden[f"steplogits_{length}"][step]
            top = wanted.topk(2).values
            found.append(
                Step(
                    length=length,
                    step=step,
                    argmax=int(logits.argmax()),
                    wanted=int(wanted.argmax()),
                    sim=_distance(logits, sim[f"simlogits_{length}"][step]),
                    golden=_distance(logits, wanted),
                    margin=float(top[0] - top[1]),
                )
            )
    return found


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    gap = (a - b).abs()
    return float(gap.max()) if bool(gap.isfinite().all()) else float("inf")


def _module(name: str, path: Path):
    """Import a file of the tests, which are no package, under a name of its own."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def main() -> int:
    """Run what the arguments say and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of what is not a kernel")
    parser.add_argument("--index", choices=["fp4", "fp8"], nargs="+", default=["fp4", "fp8"], help="index keys")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--steps", type=int, default=6, help="decode steps, up to 6")
    parser.add_argument("--bound", type=float, help="of the distance to golden_sim")
    args = parser.parse_args()
    from kernels.triton_env import uses_triton

    kind = "kernels" if uses_triton(torch.empty(0, device=args.device)) else "reference"
    bound = BOUNDS[kind] if args.bound is None else args.bound
    bad = 0
    with tempfile.TemporaryDirectory(prefix="isthmus-geo-") as folder:
        checkpoint = write_checkpoint(Path(folder))
        for index in args.index:
            found = run(
                checkpoint, device=args.device, dtype=args.dtype, index=index, lengths=tuple(args.lengths),
                steps=args.steps,
            )  # fmt: skip
            print(f"\n{args.device}, {kind}, {args.dtype}, packed rows, {index} index keys, bound {bound:.0e}")
            print(f"{'prompt':>6} {'step':>4} {'argmax':>6} {'golden':>6} {'to sim':>9} {'to golden':>9} {'margin':>8}")
            for s in found:
                fault = s.fault(bound)
                bad += bool(fault)
                print(
                    f"{s.length:>6} {s.step:>4} {s.argmax:>6} {s.wanted:>6} {s.sim:>9.2e} {s.golden:>9.2e} "
                    f"{s.margin:>8.4f}  {fault}".rstrip()
                )
            same = sum(s.argmax == s.wanted for s in found)
            print(f"{same} of {len(found)} argmax equal, at most {max(s.sim for s in found):.2e} from golden_sim")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
