"""Prompts of the oracle `geo` through the kernels, in chunks of several lengths, then decode steps behind them.

    PYTHONPATH=. python tests/gpu/prefill.py          from the repository's root; --device cpu: the kernels' references

    alone    one prompt at a time, in chunks of 128, 500 and 2,300 tokens
    packed   all four together, each step with a chunk of every one that is not done

Then all decode together, golden's tokens given. Pools are full of NaN to begin with, rows are packed. On a GPU what
graphs have room for is replayed, unless --eager.
Prints a row per trial; exit code 1 if an argmax is not golden's, if logits leave golden_sim, or those of packed
prompts those of prompts alone, by more than BOUNDS.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import itertools
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

TESTS = Path(__file__).resolve().parent.parent
STEPS = 6
LENGTHS = (9, 130, 700, 2300)
CHUNKS = (128, 500, 2300)
ROWS = (("nvfp4", "fp8"), ("mxfp4", "fp4"))  # formats of experts and of index keys
# (bound of a step, of the median) by compute dtype. Prompts through the kernels' references on the CPU, experts in f16:
# 0.89 and 0.08 from golden_sim in float32, where one step of 24 has another expert, 1.2 and 0.13 in bfloat16; packed
# from alone 0.55 and 0.004, or nothing. geo.py says what moves them. On an H200 one trial in float32 had a median of
# 0.11 from golden_sim (chunks of 128, FP8 keys).
BOUNDS = {"float32": (1.2, 0.15), "bfloat16": (2.0, 0.3)}


def _module(name: str, path: Path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Rig:
    """A runner of geo all of whose steps run kernels, or their references on the CPU."""

    def __init__(self, checkpoint: Path, *, device: str, dtype: str, index: str, is_eager: bool = False) -> None:
        import engine.model.attention as attention
        import engine.runner

        if device == "cpu":
            engine.runner.keeps_packed = lambda device: True
            attention.runs_decode_kernels = lambda cache, device: True
        harness = _module("engine_harness", TESTS / "engine/harness.py")
        self.golden = load_file(TESTS / "oracle/geo/golden.safetensors")
        self.sim = load_file(TESTS / "oracle/geo/golden_sim.safetensors")
        self.dtype = dtype
        runner = harness.make_runner(
            checkpoint, device=device, dtype=dtype, kv_cache_dtype="packed", index_cache_dtype=index, block_size=256,
            pool_poison=True, max_num_batched_tokens=2048, enforce_eager=is_eager,
        )  # fmt: skip
        runner.capture()
        self.side = harness.Side(runner)

    def logits(self, lengths: tuple[int, ...], *, chunk: int, packed: bool) -> dict[int, torch.Tensor]:
        """Return [STEPS, V] logits of each prompt: behind its last token, then of golden's own choices."""
        prompts = {n: self.golden[f"prompt_{n}"].tolist() for n in lengths}
        running = {n: self.side.start(prompts[n], num_tokens=n + STEPS) for n in lengths}
        for group in [lengths] if packed else [(n,) for n in lengths]:
            for first in range(0, max(group), chunk):
                here = [n for n in group if n > first]
                self.side.step(*((running[n], prompts[n][first : first + chunk], first + chunk >= n) for n in here))
        for step in range(STEPS - 1):
            self.side.step(*((running[n], [int(self.golden[f"gen_{n}"][step])], True) for n in lengths))
        for n in lengths:
            if running[n].failed:
                raise RuntimeError(f"prompt of {n} tokens: {running[n].failed}")
            self.side.end(running[n])
        return {n: torch.stack(running[n].logits).float().cpu() for n in lengths}

    def judge(self, found: dict[int, torch.Tensor], like: dict[int, torch.Tensor] | None) -> tuple[str, str]:
        """Return what was found, and what is wrong with it, "" if nothing. like: what it should be close to."""
        wrong, to_sim, to_like = [], [], []
        for n, step in itertools.product(found, range(STEPS)):
            logits, wanted = found[n][step], self.golden[f"steplogits_{n}"][step]
            if int(logits.argmax()) != int(wanted.argmax()):
                wrong.append((n, step))
            to_sim.append(_distance(logits, self.sim[f"simlogits_{n}"][step]))
            if like is not None:
                to_like.append(_distance(logits, like[n][step]))
        faults = [f"argmax of (prompt, step) {wrong}"] if wrong else []
        told = [f"{len(to_sim) - len(wrong)} of {len(to_sim)} argmax equal"]
        for name, gaps in (("golden_sim", to_sim), ("alone", to_like)):
            if gaps:
                most, median = max(gaps), statistics.median(gaps)
                told.append(f"{most:.1e}, median {median:.1e} to {name}")
                if not (most <= BOUNDS[self.dtype][0] and median <= BOUNDS[self.dtype][1]):
                    faults.append(f"{name}: bounds are {BOUNDS[self.dtype]}")
        return ", ".join(told), "; ".join(faults)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    gap = (a - b).abs()
    return float(gap.max()) if bool(gap.isfinite().all()) else float("inf")


def trials(
    device: str,
    dtype: str,
    formats: tuple[str, str],
    lengths: tuple[int, ...],
    chunks: tuple[int, ...],
    is_eager: bool = False,
):
    """Return a line for each trial, those with a fault beginning with FAULT."""
    torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory(prefix="isthmus-prefill-") as folder, torch.inference_mode():
        geo = _module("gpu_geo", TESTS / "gpu/geo.py")
        experts, index = formats
        checkpoint = geo.write_checkpoint(Path(folder), nvfp4=geo.EXPERTS[experts])
        rig = Rig(checkpoint, device=device, dtype=dtype, index=index, is_eager=is_eager)
        for chunk in chunks:
            alone = None
            for packed in (False, True):
                name = f"{dtype}, {experts}, {index} keys, chunks of {chunk}, {'packed' if packed else 'alone'}"
                try:
                    found = rig.logits(lengths, chunk=chunk, packed=packed)
                    told, fault = rig.judge(found, alone)
                    alone = alone or found
                except Exception as error:  # a trial that can't run has failed; the others go on
                    told, fault = "", f"{type(error).__name__}: {error}"
                lines.append(f"{'FAULT ' if fault else 'ok    '}{name}: {told} {fault}".rstrip())
                print(lines[-1], flush=True)
    return lines


def main() -> int:
    """Run what the arguments say, dtypes and formats spread over processes, and print the rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), choices=LENGTHS)
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS))
    parser.add_argument("--eager", action="store_true", help="replay no graphs")
    parser.add_argument("--jobs", type=int, default=4, help="processes, each with a model of its own")
    args = parser.parse_args()
    asked = [
        (args.device, dtype, formats, tuple(args.lengths), tuple(args.chunks), args.eager)
        for dtype, formats in itertools.product(args.dtype, ROWS)
    ]
    with concurrent.futures.ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [line for lines in pool.map(trials, *zip(*asked, strict=True)) for line in lines]
    faults = sum(line.startswith("FAULT") for line in found)
    print(f"{len(found)} trials, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
