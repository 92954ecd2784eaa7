"""The oracle `geo` through ranks of a group: what they compute together is what one rank does.

    PYTHONPATH=. python tests/gpu/tensor_parallel.py                        one GPU, from the repository's root
    PYTHONPATH=. python tests/gpu/tensor_parallel.py --device cpu           the kernels' references
    PYTHONPATH=. python tests/gpu/tensor_parallel.py --processes            a process and a GPU for each rank; with
                                                                            --device cpu over gloo

Without --processes all ranks share this process and its device, in lock-step: each computes its own partial sums, with
kernels of its own sizes, and is given the others' (tests/engine/lock_step.py). With it they are engine.parallel's.
Prompts and teacher-forced steps are those of geo.py. Experts are cut by their inner dimension, or shared out; on GPUs
of their own, ranks sum by NCCL alone and by one-shot sums, each forced, or as they choose (--all-reduce).

Prints a row per trial, --json has them as figures; exit code 1 if a forced way was not taken, if an argmax is not
golden's, or if logits leave golden_sim, or those of one rank, by more than the bounds of geo.py. That one rank's
experts are packed if the ranks' are.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent
FORMATS, INDEX = "nvfp4", "fp8"


def _module(name: str, path: Path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def teacher_forced(
    checkpoint: Path, group, *, device: str, dtype: str, by_expert: bool, lengths: tuple[int, ...], steps: int,
    packs: bool, oracle: str = "geo", index: str = INDEX,
) -> list[torch.Tensor]:  # fmt: skip
    """Return [steps, V] logits of each prompt, as one rank of `group` has them; None: of one that is alone.

    packs: whether decode kernels are to read the experts. Within geo.decoding().
    """
    geo = _module("gpu_geo", TESTS / "gpu/geo.py")
    harness = _module("engine_harness", TESTS / "engine/harness.py")
    with torch.inference_mode():
        runner = harness.make_runner(
            checkpoint, group=group, role="decode", device=device, dtype=dtype, kv_cache_dtype="packed",
            index_cache_dtype=index, block_size=geo.BLOCK_TOKENS, pool_poison=True, expert_parallel=by_expert,
            ranks=1 if group is None else group.count,
        )  # fmt: skip
        packed = [layer.experts.is_packed for layer in runner._model.layers]
        if packed != [packs] * len(packed):
            raise RuntimeError(f"layers with packed experts: {packed}, wanted {packs}")
        return geo.teach(runner, lengths=lengths, steps=steps, oracle=oracle)


def fits_kernels(checkpoint: Path, count: int, *, by_expert: bool) -> bool:
    """Return whether decode kernels read the experts' matrices of one of `count` ranks, as far as sizes go."""
    from engine.model.config import load_config
    from engine.model.expert_stacks import InnerSlice, size_problem

    config = load_config(checkpoint)
    part = InnerSlice.of(config, 0, 1 if by_expert else count)
    return not any(size_problem(f"layers.0.ffn.experts.{stack}", config, part) for stack in ("w13", "w2"))


def _process(run_dir: str, rank: int, count: int, checkpoint: str, all_reduce: str, options: dict):
    """Return what teacher_forced does, and the group's ExchangeInfo."""
    from engine.parallel import join
    from engine.runner import DTYPES

    torch.set_num_threads(1)
    if options["device"] == "cuda":
        torch.cuda.set_device(rank)
    group = join(
        Path(run_dir), rank=rank, count=count, generation=1, device=options["device"],
        dtype=DTYPES[options["dtype"]], all_reduce=all_reduce,
    )  # fmt: skip
    with _module("gpu_geo", TESTS / "gpu/geo.py").decoding(options["device"]):
        return teacher_forced(Path(checkpoint), group, **options), group.exchange


def in_processes(count: int, checkpoint: Path, *, all_reduce: str, **options):
    """Return what each of `count` ranks has, each a process with a device of its own, and how the first exchanged."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="isthmus-ranks-") as run_dir,
        concurrent.futures.ProcessPoolExecutor(count, mp_context=context) as pool,
    ):
        asked = (count, str(checkpoint), all_reduce, options)
        ranks = [pool.submit(_process, run_dir, rank, *asked) for rank in range(count)]
        found = [rank.result(1800) for rank in ranks]
    return [logits for logits, _ in found], found[0][1]


def in_lock_step(count: int, checkpoint: Path, *, kernels: bool = True, **options) -> list[list[torch.Tensor]]:
    """Return what each of `count` ranks has, all of them in this process; of 1: without a group.

    kernels: see geo.decoding; the other options are those of teacher_forced.
    """
    with _module("gpu_geo", TESTS / "gpu/geo.py").decoding(options["device"], kernels=kernels):
        if count == 1:
            return [teacher_forced(checkpoint, None, **options)]
        hub = _module("engine_lock_step", TESTS / "engine/lock_step.py").Hub(count)
        return hub.run(lambda group: teacher_forced(checkpoint, group, **options))


def way_taken(exchange, asked: str) -> tuple[str, str]:
    """Return how sums went, in words, and what is wrong with that, "" if it is what was asked for."""
    from engine.exchange_choice import Choice, describe

    if exchange is None:
        return "in lock-step", ""
    if exchange.backend != "nccl":
        return exchange.backend, "" if asked == "auto" else f"asked for {asked}, summed by {exchange.backend}"
    taken = describe(Choice(exchange.one_shot_bytes, exchange.small, exchange.large, exchange.large_bytes))
    is_one_shot = exchange.one_shot_bytes > 0
    return taken, "" if asked == "auto" or is_one_shot == (asked == "one-shot") else f"asked for {asked}: {taken}"


def judge(ranks: list[list[torch.Tensor]], one: list[torch.Tensor], dtype: str, lengths: tuple[int, ...]):
    """Return the figures, and what is wrong with them, "" if nothing."""
    geo = _module("gpu_geo", TESTS / "gpu/geo.py")
    faults = []
    if any(not torch.equal(a, b) for other in ranks[1:] for a, b in zip(ranks[0], other, strict=True)):
        faults.append("ranks have different logits")
    found = geo.compare(ranks[0], lengths, dtype, one)
    faults += [f"prompt {s.length} step {s.step}: {s.fault}" for s in found if s.fault]
    if fault := geo.median_fault(found):
        faults.append(f"median {fault}")
    same = sum(s.argmax == s.wanted for s in found)
    sim, ref = ([getattr(s, name) for s in found] for name in ("sim", "reference"))
    figures = {"rows": len(found), "equal_argmax": same}
    figures |= {"to_one_rank": max(ref), "to_one_rank_median": statistics.median(ref)}
    figures |= {"to_golden_sim": max(sim), "to_golden_sim_median": statistics.median(sim)}
    return figures, "; ".join(faults)


def trials(
    *, device: str, dtypes: list[str], counts: list[int], ways: list[str], lengths: tuple[int, ...], steps: int,
    processes: bool, all_reduces: tuple[str, ...] = ("auto",), json_path: Path | None = None,
) -> list[dict]:  # fmt: skip
    """Return an entry for each trial; its `fault` is "" if all is well. json_path: has those so far, at any time."""
    geo, found = _module("gpu_geo", TESTS / "gpu/geo.py"), []
    with tempfile.TemporaryDirectory(prefix="isthmus-geo-") as folder:
        checkpoint = geo.write_checkpoint(Path(folder) / FORMATS, nvfp4=geo.EXPERTS[FORMATS])
        # For ranks whose slices of the experts kernels don't read: one rank that has the same values in bfloat16.
        # Kernels round activations to f16, and what the ranks are compared with must not do so alone.
        plain = geo.write_checkpoint(Path(folder) / "bf16", form="bf16-experts")
        for dtype in dtypes:
            asked = {"device": device, "dtype": dtype, "lengths": lengths, "steps": steps}
            alone: dict[bool, list[torch.Tensor]] = {}
            for count, way, all_reduce in itertools.product(counts, ways, all_reduces):
                packs = fits_kernels(checkpoint, count, by_expert=way == "expert")
                try:
                    if packs not in alone:
                        one = checkpoint if packs else plain
                        alone[packs] = in_lock_step(1, one, by_expert=False, packs=packs, **asked)[0]
                    asked_of_ranks = asked | {"by_expert": way == "expert", "packs": packs}
                    if processes:
                        ranks, exchange = in_processes(count, checkpoint, all_reduce=all_reduce, **asked_of_ranks)
                    else:
                        ranks, exchange = in_lock_step(count, checkpoint, **asked_of_ranks), None
                    taken, not_taken = way_taken(exchange, all_reduce)
                    figures, fault = judge(ranks, alone[packs], dtype, lengths)
                    figures, fault = {"sums": taken, **figures}, "; ".join(filter(None, (not_taken, fault)))
                except Exception as error:  # a trial that can't run has failed; the others go on
                    figures, fault = {}, f"{type(error).__name__}: {error}"
                trial = {"dtype": dtype, "ranks": count, "experts": way, "packed": packs, "all_reduce": all_reduce}
                found.append(trial | figures | {"fault": fault})
                print(line(found[-1]), flush=True)
                if json_path:
                    write_report(json_path, found, device)
    return found


def line(trial: dict) -> str:
    """Return a trial in words, those with a fault beginning with FAULT."""
    packs = "packed" if trial["packed"] else "dequantised"
    name = f"{trial['dtype']}, {trial['ranks']} ranks by {trial['experts']}, {packs} experts"
    if "rows" in trial:
        name += (
            f", {trial['sums']}: {trial['equal_argmax']} of {trial['rows']} argmax equal, to golden_sim "
            f"{trial['to_golden_sim']:.1e}, median {trial['to_golden_sim_median']:.1e}, to one rank "
            f"{trial['to_one_rank']:.1e}, median {trial['to_one_rank_median']:.1e}"
        )
    else:
        name += f", {trial['all_reduce']}:"
    return f"{'FAULT ' if trial['fault'] else 'ok    '}{name} {trial['fault']}".rstrip()


def write_report(path: Path, found: list[dict], device: str) -> None:
    """Write conditions and trials."""
    from kernels.bench import current_commit

    conditions = {"date": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "commit": current_commit(), "torch": torch.__version__}
    conditions["device"] = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    path.write_text(json.dumps({"conditions": conditions, "trials": found}, indent=1) + "\n")


def main() -> int:
    """Run what the arguments say and print a row for each trial."""
    geo = _module("gpu_geo", TESTS / "gpu/geo.py")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--ranks", type=int, choices=[2, 4], nargs="+", default=[2, 4])
    parser.add_argument("--by", choices=["inner", "expert"], nargs="+", default=["inner", "expert"])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(geo.LENGTHS), choices=geo.LENGTHS)
    parser.add_argument("--steps", type=int, default=6, help="decode steps, up to 6")
    parser.add_argument("--processes", action="store_true", help="a process and a device for each rank")
    parser.add_argument(
        "--all-reduce", choices=["auto", "nccl", "one-shot"], nargs="+", default=["auto"],
        help="how ranks with GPUs of their own sum: a trial for each (auto)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    args = parser.parse_args()
    if args.all_reduce != ["auto"] and not (args.processes and args.device == "cuda"):
        parser.error(f"--all-reduce {' '.join(args.all_reduce)}: needs --processes and --device cuda; leave it out")
    from kernels.triton_env import INTERPRETED

    if INTERPRETED:  # slow: a few tokens
        _module("interp", TESTS / "kernels/interp.py").repair()
    torch.set_num_threads(1)
    found = trials(
        device=args.device, dtypes=args.dtype, counts=args.ranks, ways=args.by, lengths=tuple(args.lengths),
        steps=args.steps, processes=args.processes, all_reduces=tuple(args.all_reduce), json_path=args.json,
    )  # fmt: skip
    faults = sum(bool(trial["fault"]) for trial in found)
    print(f"{len(found)} trials, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
