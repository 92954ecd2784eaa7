"""What a cluster has answered, held against one runner of the same checkpoint: `python -m bench.answers`.

    python -m bench.pair --up cluster.yaml --common "--model DIR" --runs answers --json pair.json
    python -m bench.answers --answers pair.json --model DIR --device cuda --json answers.json

One rank in this process, without exchange and transfer, is fed each prompt and then the tokens that the cluster chose,
one by one. A row is wrong if the cluster's token is not the runner's argmax, unless the runner's logits of the two are
a tie: no further apart than `tie`. Distance: the largest difference among the log probabilities that the cluster has
told of a row. control: the same to the runner's row before, which shows what a wrong cache would look like. Exit code 1
only if something could not be compared: bench.bars judges.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from bench.pair_answers import prompt_of
from bench.report import write_json
from bench.step_flags import add_flags, add_prompt_flags
from engine.config import EngineConfig
from engine.flags import ConfigError, engine_config, parse_flags
from engine.plan import SequenceStart, SequenceStep, StepPlan
from engine.runner import ModelRunner
from engine.steady_batch import StepFailed
from kernels.bench import current_commit
from router.protocol import SamplingParams

# By compute dtype: of the distance, for half of the rows and for 95 %; of two logits in a tie; of wrong rows. Ranks
# round partial sums, and where two of 256 experts score alike another one is chosen: that moves a row by 1 or 2, and so
# its token. Four ranks a role against one on the CPU, packed rows, 256 experts, 1,024 channels, 96 rows: in bfloat16
# median 0.10, 95 % within 1.5, 2 wrong; in float32 3e-4, 0.003, none. On a GPU kernels round more: in float32 the
# median of geo is 0.017 there (tests/gpu/tensor_parallel.py).
BOUNDS = {
    "float32": {"median": 0.04, "p95": 0.6, "tie": 0.2, "wrong_share": 0.02},
    "bfloat16": {"median": 0.3, "p95": 3.0, "tie": 0.6, "wrong_share": 0.05},
}


class Alone:
    """One runner with room for one sequence."""

    def __init__(self, config: EngineConfig, *, longest: int, chunk: int) -> None:
        """longest: tokens of a prompt and its answer.   chunk: of a prompt in one step."""
        num_blocks = -(-longest // config.block_size)
        self._config = msgspec.structs.replace(
            config,
            max_num_seqs=1,
            num_blocks=num_blocks,
            max_model_len=longest,
            max_num_batched_tokens=chunk,
            enforce_eager=True,  # the cluster's graphs are part of what is compared
        )
        self._runner = ModelRunner(self._config, num_blocks=num_blocks, num_slots=1)
        self._runner.load()
        self._runner.on_logits = self._keep
        self._rows: list[Tensor] = []
        self._number = 0

    def rows(self, prompt: Sequence[int], outputs: Sequence[int]) -> list[Tensor]:
        """Return the logits [V] float32 before each of `outputs`, those before it fed. Raises StepFailed."""
        self._rows, self._number = [], self._number + 1
        self._runner.cache.poison()
        blocks = list(range(self._runner.cache.num_blocks))
        sampling = SamplingParams(max_tokens=len(outputs) + 1, temperature=0.0, ignore_eos=True)
        self._run(starts=[SequenceStart(seq=self._number, slot=0, block_ids=blocks, sampling=sampling)])
        chunk = self._config.max_num_batched_tokens
        pieces = [list(prompt[at : at + chunk]) for at in range(0, len(prompt), chunk)]
        at = 0
        for piece in [*pieces, *([token] for token in outputs[:-1])]:
            is_last = at + len(piece) >= len(prompt)
            step = SequenceStep(seq=self._number, start=at, token_ids=piece, new_block_ids=[], sample=is_last)
            self._run(steps=[step])
            at += len(piece)
        self._run(ends=[self._number])
        return self._rows

    def _run(self, **what: Any) -> None:
        failed = self._runner.run(StepPlan(number=0, **what)).failed
        if failed:
            raise StepFailed(f"the runner alone failed: {failed[0][1]}")

    def _keep(self, seq: int, position: int, logits: Tensor) -> None:
        self._rows.append(logits.detach().float().cpu())


def compare(answers: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[Tensor]], *, tie: float) -> dict[str, Any]:
    """Return `total` and an entry for each answer, which `rows` has the runner's logits of."""
    entries, distances, controls = [], [], []
    for answer, logits in zip(answers, rows, strict=True):
        logprobs = [row.log_softmax(-1) for row in logits]
        gaps = [_distance(top, row) for top, row in zip(answer["top"], logprobs, strict=True)]
        controls += [_distance(top, row) for top, row in zip(answer["top"][1:], logprobs, strict=False)]
        margins = [float(row.max() - row[token]) for row, token in zip(logits, answer["token_ids"], strict=True)]
        distances += gaps
        entries.append(
            {
                "length": answer["length"],
                "together": answer["together"],
                "rows": len(gaps),
                "equal": sum(margin == 0 for margin in margins),
                "ties": sum(0 < margin <= tie for margin in margins),
                "wrong": sum(not margin <= tie for margin in margins),
                "greatest": max(gaps),
                "median": statistics.median(gaps),
                "margins_of_others": [margin for margin in margins if margin != 0],
            }
        )
    total = {name: sum(entry[name] for entry in entries) for name in ("rows", "equal", "ties", "wrong")}
    total["wrong_share"] = total["wrong"] / total["rows"]
    total |= {
        "greatest": max(distances),
        "median": statistics.median(distances),
        "control": statistics.median(controls),
    }
    total["p95"] = sorted(distances)[math.ceil(0.95 * len(distances)) - 1]
    return {"total": total, "answers": entries}


def _distance(top: Mapping[str, float], row: Tensor) -> float:
    """Return the largest difference of log probabilities; NaN counts as infinitely far, kept finite for JSON."""
    gaps = [abs(value - float(row[int(token)])) for token, value in top.items()]
    return max((gap if gap == gap else 1e9 for gap in gaps), default=1e9)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the report. Raises ConfigError, StepFailed, ValueError for answers that there are none of."""
    answers = json.loads(args.answers.read_bytes()).get("answers") or []
    if not answers:
        raise ValueError(f"{args.answers}: no answers in it; run bench.pair with --runs answers, and see its problems")
    config = engine_config(args, role="prefill", yaml_section=None, environ=os.environ)
    torch.set_num_threads(config.threads)
    longest = max(answer["length"] + len(answer["token_ids"]) for answer in answers)
    alone = Alone(config, longest=longest, chunk=args.chunk_tokens)
    with torch.inference_mode():
        rows = [alone.rows(prompt_of(answer["length"]), answer["token_ids"]) for answer in answers]
    bounds = BOUNDS[config.dtype]
    device = torch.cuda.get_device_name() if config.device == "cuda" else "CPU"
    conditions: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "commit": current_commit(),
        "device": device,
    }
    conditions["config"] = msgspec.to_builtins(config)
    return {"conditions": conditions, "bounds": bounds, **compare(answers, rows, tie=bounds["tie"])}


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m bench.answers") -> int:
    """Compare; return 0 if it was done, 1 if it could not be, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument_group("answers and report").add_argument
    add("--answers", type=Path, required=True, metavar="FILE", help="a report of bench.pair --runs answers")
    add_prompt_flags(add)
    add("--json", type=Path, metavar="FILE", help="all figures")
    add_flags(parser)
    try:
        args = parse_flags(parser, argv)
        report = measure(args)
    except (StepFailed, OSError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    for entry in report["answers"]:
        print(
            f"{entry['length']:>7,} tokens, {'together' if entry['together'] else 'alone':<8} {entry['equal']} of "
            f"{entry['rows']} equal, {entry['ties']} ties, {entry['wrong']} wrong; at most {entry['greatest']:.1e}, "
            f"median {entry['median']:.1e}"
        )
    total = report["total"]
    print(
        f"{total['equal']} of {total['rows']} rows equal, {total['ties']} ties, {total['wrong']} wrong; at most "
        f"{total['greatest']:.1e}, 95 % within {total['p95']:.1e}, median {total['median']:.1e}, control "
        f"{total['control']:.1e}"
    )
    if args.json:
        write_json(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
