"""Captured decode steps on the oracle `geo`: argmax of every stored step, whatever the size of the graph.

    PYTHONPATH=. python tests/gpu/decode_graphs.py          from the repository's root; --device cpu: the references

Four prompts are prefilled but for their last token and their cache is kept. Then, from that cache each time:

    mixed      all four in one batch, golden's tokens given, in a graph of every size of the ladder from 4 to 64
    alone      one prompt at a time, in graphs of 1, 2 and 64 rows
    uncaptured the mixed batch without a graph
    ahead      all four choose for themselves, each step launched before the tokens of the one before are known

Prints a row per trial; exit code 1 if an argmax is not golden's, or a captured step differs from the uncaptured one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import multiprocessing
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

TESTS = Path(__file__).resolve().parent.parent
STEPS = 6
LENGTHS = (9, 130, 700, 2300)
SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def _module(name: str, path: Path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


class Prefilled:
    """A runner whose cache holds the prompts but for their last token; `restore` brings that cache back."""

    def __init__(self, folder: Path, device: str) -> None:
        import engine.model.attention
        import engine.runner

        if device == "cpu":  # the kernels' references
            engine.runner.keeps_packed = lambda device: True
            engine.runner.runs_decode_kernels = lambda cache, device: True
            engine.model.attention.runs_decode_kernels = lambda cache, device: True
        harness = _module("engine_harness", TESTS / "engine/harness.py")
        self.golden = load_file(TESTS / "oracle/geo/golden.safetensors")
        self.runner = harness.make_runner(
            folder, role="decode", device=device, kv_cache_dtype="packed", index_cache_dtype="fp4", block_size=256,
            pool_poison=True, max_num_seqs=SIZES[-1], max_model_len=2560,
        )  # fmt: skip
        side = harness.Side(self.runner)
        self.places = {}
        for length in LENGTHS:
            prompt = self.golden[f"prompt_{length}"].tolist()
            running = side.start(prompt, num_tokens=length + STEPS)
            while running.length < length - 1:
                side.step((running, prompt[running.length : min(running.length + 512, length - 1)], False))
            self.places[length] = running.slot, list(running.blocks)
            side.run(ends=[running.seq])
        self.runner.on_logits = None
        self._cache = {name: pool.clone() for name, pool in self.runner.cache.pools.items()}
        self._next_seq = 1000
        self._number = 1000

    def use(self, size: int | None) -> int:
        """Make one size of graph the only one; None: not captured. Return its nodes."""
        graphs = self.runner._graphs
        graphs._graphs.clear()
        graphs._captures = size is not None
        graphs.sizes = (size or 4,)
        self.runner.capture()
        return graphs.nodes.get(size, 0)

    def start(self, lengths):
        """Return (sequence number, prompt length) of sequences that begin on the cache as prefill has left it."""
        from engine.plan import SequenceStart, StepPlan
        from router.protocol import SamplingParams

        for name, pool in self.runner.cache.pools.items():
            pool.copy_(self._cache[name])
        greedy = SamplingParams(max_tokens=99, temperature=0.0)
        starts = []
        for length in lengths:
            self._next_seq += 1
            slot, blocks = self.places[length]
            prompt = self.golden[f"prompt_{length}"].tolist()
            starts.append(
                SequenceStart(seq=self._next_seq, slot=slot, block_ids=blocks, sampling=greedy, token_ids=prompt)
            )
        self._number += 1
        self.runner.run(StepPlan(number=self._number, starts=starts))
        return [(start.seq, length) for start, length in zip(starts, lengths, strict=True)]

    def plan(self, running, step, token_of):
        from engine.plan import SequenceStep, StepPlan

        self._number += 1
        return StepPlan(
            number=self._number,
            steps=[
                SequenceStep(
                    seq=seq, start=length - 1 + step, token_ids=[token_of(length, step)], new_block_ids=[], sample=True
                )
                for seq, length in running
            ],
        )  # fmt: skip

    def end(self, running) -> None:
        from engine.plan import StepPlan

        self._number += 1
        self.runner.run(StepPlan(number=self._number, ends=[seq for seq, _ in running]))

    def forced(self, lengths) -> dict[int, torch.Tensor]:
        """Return [steps, V] logits of each prompt, golden's tokens given."""
        running, rows = self.start(lengths), {}
        self.runner.on_logits = lambda seq, position, logits: rows.setdefault(seq, []).append(logits.clone())

        def token_of(length, step):
            return int(self.golden[f"gen_{length}"][step - 1] if step else self.golden[f"prompt_{length}"][-1])

        for step in range(STEPS):
            outcome = self.runner.run(self.plan(running, step, token_of))
            if outcome.failed:
                raise RuntimeError(str(outcome.failed))
        self.runner.on_logits = None
        self.end(running)
        return {length: torch.stack(rows[seq]).cpu() for seq, length in running}

    def ahead(self, lengths) -> dict[int, list[int]]:
        """Return the tokens that each prompt chooses for itself, one step launched ahead."""
        from engine.plan import PREVIOUS

        running, tickets = self.start(lengths), []
        found = {seq: [] for seq, _ in running}

        def collect() -> None:
            for seq, token in self.runner.collect(tickets.pop(0)).tokens:
                found[seq].append(token)

        for step in range(STEPS):
            plan = self.plan(running, step, lambda n, s: PREVIOUS if s else int(self.golden[f"prompt_{n}"][-1]))
            tickets.append(self.runner.launch(plan))
            if len(tickets) == 2:
                collect()
        while tickets:
            collect()
        self.end(running)
        return {length: found[seq] for seq, length in running}


def trials(sizes: tuple[int, ...], device: str) -> list[str]:
    """Return a line for each trial with graphs of these sizes, those with a fault beginning with FAULT."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="isthmus-graphs-") as folder, torch.inference_mode():
        geo = _module("gpu_geo", TESTS / "gpu/geo.py")
        rig = Prefilled(geo.write_checkpoint(Path(folder), nvfp4=geo.EXPERTS["nvfp4"]), device)

        def judge(name: str, found: dict[int, torch.Tensor], like: dict[int, torch.Tensor] | None = None) -> None:
            wanted = {n: rig.golden[f"steplogits_{n}"][:STEPS].argmax(-1) for n in found}
            wrong = [(n, s) for n in found for s in range(STEPS) if int(found[n][s].argmax()) != int(wanted[n][s])]
            gap = 0.0 if like is None else max(float((found[n] - like[n]).abs().max()) for n in found)
            beside = "" if like is None else f", at most {gap:.1e} from the uncaptured step of as many rows"
            right = len(found) * STEPS - len(wrong)
            fault = "FAULT " if wrong or (like is not None and gap != 0.0) else ""
            lines.append(f"{fault}{name}: {right} of {len(found) * STEPS} argmax equal{beside} {wrong or ''}".rstrip())

        for size in sizes:
            lengths = [LENGTHS] if size >= 4 else []
            lengths += [(n,) for n in LENGTHS] if size in (1, 2, 64) else []
            rig.runner._graphs.sizes = (size,)
            rig.runner._graphs._graphs.clear()
            uncaptured = [rig.forced(each) for each in lengths]
            nodes = rig.use(size) if device != "cpu" else 0
            for each, like in zip(lengths, uncaptured, strict=True):
                name = f"{size:>3} rows, {nodes} nodes, prompts {', '.join(map(str, each))}"
                judge(name, rig.forced(each), like)
            if size >= 4:
                tokens = rig.ahead(LENGTHS)
                wanted = {n: rig.golden[f"gen_{n}"][:STEPS].tolist() for n in LENGTHS}
                fault = "" if tokens == wanted else f"FAULT {tokens} "
                lines.append(f"{fault}{size:>3} rows, launched ahead: {'golden tokens' if not fault else wanted}")
    return lines


def main() -> int:
    """Run what the arguments say, sizes spread over processes, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--jobs", type=int, default=6, help="processes, each with a model of its own")
    args = parser.parse_args()
    groups = [tuple(args.sizes[i :: args.jobs]) for i in range(args.jobs)]
    groups = [group for group in groups if group]
    faults = 0
    with concurrent.futures.ProcessPoolExecutor(len(groups), mp_context=multiprocessing.get_context("spawn")) as pool:
        for lines in pool.map(trials, groups, [args.device] * len(groups)):
            print("\n".join(lines), flush=True)
            faults += sum(line.startswith("FAULT") for line in lines)
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
