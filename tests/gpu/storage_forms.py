"""The oracles `geo` and `mx` in every form in which a checkpoint may be stored, through one rank and several.

    PYTHONPATH=. python tests/gpu/storage_forms.py --jobs 12       one GPU, from the repository's root
    PYTHONPATH=. python tests/gpu/storage_forms.py --device cpu    the kernels' references

engine/storage_forms.py writes the forms and proves that their values are those stored. Ranks of a group share this
process and its device, in lock-step. Prompts and teacher-forced steps are those of geo.py; packed rows, FP4 index keys.
Most of the time goes into compiling, so trials of other shapes come first, and --jobs shares them out to processes.

Prints a row per trial; exit code 1 if an argmax is not golden's, if ranks differ, if experts are not kept as the form
says, or if logits leave golden_sim by more than the bounds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import itertools
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent
LENGTHS, STEPS, INDEX = {"geo": (9, 130, 700, 2300), "mx": (7, 130, 300)}, 6, "fp4"


def _module(name: str, path: Path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


geo = _module("gpu_geo", TESTS / "gpu/geo.py")
FORMS = _module("engine_storage_forms", TESTS / "engine/storage_forms.py").FORMS
# (bound of a step, of the median) of the distance to golden_sim by model and compute dtype. geo's are those of
# prefill.py, through whose kernels prompts go: in prompt 2300, step 1, two experts of layer 3 are 0.002 apart, and
# where rounding takes the other one, logits move by 0.89.
BOUNDS = {
    "geo": {"float32": (1.2, 0.15), "bfloat16": (2.0, 0.3)},
    "mx": {"float32": (0.6, 0.1), "bfloat16": (2.0, 0.3)},
}
# (model, prompt, step) at which that may choose another token in bfloat16. Two experts of layer 1 are 0.004 apart here;
# with dequantised experts and two ranks the other one is taken on the CPU, which moves logits by 1.8.
TIES = {("mx", 7, 3)}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One checkpoint, loaded and run by so many ranks.   way: how they share experts, inner or expert."""

    model: str
    form: str
    ranks: int
    dtype: str
    way: str = "inner"

    def __str__(self) -> str:
        return f"{self.model:<3} {self.form:<20} {self.ranks} by {self.way:<6} {self.dtype:<8}"

    @property
    def is_possible(self) -> bool:
        """Whether the model can be cut so."""
        from engine.model.config import parse_config
        from engine.model.shard import Shard

        try:
            Shard(0, self.ranks, self.way == "expert").of(parse_config(geo.read_config(self.model)))
        except ValueError:
            return False
        return self.ranks > 1 or self.way == "inner"


def run(
    trial: Trial, *, device: str, kernels: bool = True, lengths: tuple[int, ...] = (), steps: int = STEPS
) -> tuple[str, str]:
    """Return what a trial found, and what is wrong with it, "" if nothing.

    lengths: of prompts; none: all.   kernels: decode steps go through decode kernels or their references; see geo.py.
    """
    ranks = _module("gpu_tensor_parallel", TESTS / "gpu/tensor_parallel.py")
    lengths, by_expert = lengths or LENGTHS[trial.model], trial.way == "expert"
    with tempfile.TemporaryDirectory(prefix="isthmus-forms-") as folder:
        checkpoint = geo.write_checkpoint(Path(folder), form=trial.form, oracle=trial.model)
        fits = ranks.fits_kernels(checkpoint, trial.ranks, by_expert=by_expert)
        packs = kernels and all(FORMS[trial.form].kept) and fits
        found = ranks.in_lock_step(
            trial.ranks, checkpoint, device=device, dtype=trial.dtype, by_expert=by_expert, lengths=lengths,
            steps=steps, packs=packs, oracle=trial.model, index=INDEX, kernels=kernels,
        )  # fmt: skip
    rows = geo.compare(found[0], lengths, trial.dtype, found[0], oracle=trial.model)
    ties = TIES if trial.dtype == "bfloat16" else set()
    judged = [s for s in rows if (trial.model, s.length, s.step) not in ties]
    faults = [
        f"prompt {s.length} step {s.step}: argmax {s.argmax}, golden has {s.wanted} (margin {s.margin:.3f})"
        for s in judged
        if s.argmax != s.wanted
    ]
    if any(not torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)):
        faults.append("ranks have different logits")
    most, median = max(s.sim for s in judged), statistics.median(s.sim for s in judged)
    gaps = {"a step is": most, "the median is": median}
    for (name, gap), bound in zip(gaps.items(), BOUNDS[trial.model][trial.dtype], strict=True):
        if not gap <= bound:
            faults.append(f"{name} {gap:.2e} from golden_sim, bound {bound}")
    same = sum(s.argmax == s.wanted for s in rows)
    told = (
        f"{'packed' if packs else 'dequantised':<11} {same} of {len(rows)} argmax equal, to golden_sim {most:.1e}, "
        f"median {median:.1e}"
    )
    return told, "; ".join(faults)


def trials(models: list[str], forms: list[str], ranks: list[int], dtypes: list[str], ways: list[str]) -> list[Trial]:
    """Return all that are possible, those of one form together."""
    every = (
        Trial(model, form, count, dtype, way)
        for form, model, dtype, count, way in itertools.product(forms, models, dtypes, ranks, ways)
    )
    return [trial for trial in every if trial.is_possible]


def _line(trial: Trial, device: str, lengths: tuple[int, ...], steps: int) -> str:
    torch.set_num_threads(1)
    chosen = tuple(length for length in LENGTHS[trial.model] if length in lengths)
    try:
        told, fault = run(trial, device=device, lengths=chosen, steps=steps)
    except Exception as error:  # a trial that can't run has failed; the others go on
        told, fault = "", f"{type(error).__name__}: {error}"
    return f"{'FAULT' if fault else 'ok   '} {trial} {told} {fault}".rstrip()


def main() -> int:
    """Run what the arguments say and print a row for each trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", choices=list(LENGTHS), nargs="+", default=list(LENGTHS))
    parser.add_argument("--forms", choices=list(FORMS), nargs="+", default=list(FORMS))
    parser.add_argument("--ranks", type=int, choices=[1, 2, 4], nargs="+", default=[1, 2, 4])
    parser.add_argument("--by", choices=["inner", "expert"], nargs="+", default=["inner"], help="how experts are cut")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=sorted({n for each in LENGTHS.values() for n in each})
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="decode steps, up to 6")
    parser.add_argument("--jobs", type=int, default=1, help="processes, default: %(default)s")
    args = parser.parse_args()
    from kernels.triton_env import INTERPRETED

    if INTERPRETED:  # slow: a few tokens, and in this process, which is the one that is repaired
        _module("interp", TESTS / "kernels/interp.py").repair()
        args.jobs = 1
    chosen, faults = trials(args.models, args.forms, args.ranks, args.dtype, args.by), 0
    asked = [(trial, args.device, tuple(args.lengths), args.steps) for trial in chosen]
    for line in _each(asked, args.jobs):
        print(line, flush=True)
        faults += line.startswith("FAULT")
    print(f"{len(chosen)} trials, {faults} faults")
    return 1 if faults else 0


def _each(asked: list[tuple], jobs: int):
    """Yield lines as they come."""
    if jobs == 1:
        yield from (_line(*each) for each in asked)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in concurrent.futures.as_completed([pool.submit(_line, *each) for each in asked]):
            yield done.result()


if __name__ == "__main__":
    sys.exit(main())
