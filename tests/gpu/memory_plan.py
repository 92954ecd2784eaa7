"""The memory plan against a card: what was planned, what a rank takes, and a minute of work at the limit.

    PYTHONPATH=. python tests/gpu/memory_plan.py --seconds 60 --json plan.json      from the repository's root

Each configuration is a rank of four with synthetic weights, started as engine/rank.py starts one: pools as planned,
weights, every graph, measured. Then as many sequences as are admitted take all blocks, and decode; or prompts of many
lengths run through a prefill rank, the longest chunks among them. Printed are planned and measured bytes; exit code 1
if their sums differ by more than 3 %, a step fails, or memory grows meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from typing import Any

TOLERANCE = 0.03
GROWTH = 8 << 20  # bytes, over the minute: a few of the allocator's blocks
# The whole card, and a part of it as on a card of 96 GB with another batch and other rows of the index.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "64 sequences, a whole card": {"max_num_seqs": 64, "max_model_len": 1048576},
    "16 sequences, 94.9 GiB": {
        "max_num_seqs": 16, "max_model_len": 1048576, "gpu_memory_gib": 94.9, "index_cache_dtype": "fp4"
    },
    "prefill, 94.9 GiB": {
        "role": "prefill", "max_num_seqs": 8, "max_num_batched_tokens": 4096, "max_model_len": 1048576,
        "gpu_memory_gib": 94.9,
    },
}  # fmt: skip


def measure(name: str, *, seconds: float, layers: int, device: str) -> dict[str, Any]:
    """Start a rank, fill it, decode for `seconds`; return the figures."""
    import torch

    from engine.config import EngineConfig
    from engine.memory_gauge import MemoryGauge, read_cuda
    from engine.memory_plan import plan_memory
    from engine.runner import ModelRunner
    from engine.served_model import served_model
    from engine.warm_up import warm_up

    config = EngineConfig(
        model="DeepSeek-V4-Flash", load_format="synthetic", simulate_rank="0/4", num_layers=layers, device=device,
        kv_cache_memory_gib=0.0, **{"role": "decode"} | CONFIGURATIONS[name],
    )  # fmt: skip
    plan = plan_memory(config, served_model(config).config)
    planned = {part.name: part.num_bytes for part in plan.parts}
    runner = ModelRunner(config, num_blocks=plan.num_blocks, num_slots=plan.num_slots)
    gauge = MemoryGauge(lambda: read_cuda(runner.device))
    runner.load()
    gauge.loaded(state_bytes=runner.state_bytes)
    runner.capture(lambda text: print(f"  {text}", file=sys.stderr, flush=True))
    gauge.captured()
    if config.role == "prefill":
        warm_up(runner)
    measured = gauge.measured(runner.graph_nodes)
    corrected = plan.corrected(measured)
    print(corrected.table(), flush=True)

    runner.cache.fill_random()
    torch.cuda.empty_cache()  # its temporaries are none of the engine's
    work = _decode
    if config.role == "prefill":
        work = _prefill
        work(runner, plan, seconds / 3)  # what chunks take and leave with the allocator
    held = [torch.cuda.mem_get_info(runner.device)[0]]
    steps, context, failed = work(runner, plan, seconds)
    held.append(torch.cuda.mem_get_info(runner.device)[0])
    used = measured.device_bytes - measured.free_bytes
    return {
        "name": name, "config": CONFIGURATIONS[name], "planned": planned,
        "measured": {part.name: part.num_bytes for part in corrected.parts},
        "planned_bytes": sum(planned.values()), "used_bytes": used, "peak_bytes": measured.device_bytes - min(held),
        "device_bytes": measured.device_bytes, "blocks": plan.num_blocks, "tokens": plan.num_blocks * config.block_size,
        "grown_bytes": held[0] - held[1],
        "context": context, "steps": steps, "seconds": seconds, "failed": failed[:4], "num_failed": len(failed),
        "graph_nodes": {str(size): nodes for size, nodes in measured.graph_nodes.items()},
    }  # fmt: skip


def _decode(runner: Any, plan: Any, seconds: float) -> tuple[int, int, list[Any]]:
    """Fill the batch and the blocks, and decode; return steps, the context at the end, and what failed."""
    from engine.plan import PREVIOUS, SequenceStart, SequenceStep, StepPlan
    from router.protocol import SamplingParams

    config = plan.config
    each = plan.num_blocks // config.max_num_seqs
    longest = min(each * config.block_size, plan.max_model_len)
    spare = 1 + int(seconds * 600)  # positions that steps may still take
    begin = max(longest - spare, 1)
    running = list(range(1, config.max_num_seqs + 1))
    sampling = [
        SamplingParams(max_tokens=1 << 20, temperature=0.8, seed=s, top_p=0.95, num_logprobs=20 if s % 4 == 0 else -1)
        for s in running
    ]
    starts = [
        SequenceStart(seq=s, slot=s, block_ids=list(range((s - 1) * each, s * each)), sampling=sampling[s - 1])
        for s in running
    ]
    failed: list[Any] = []
    tickets: list[Any] = []
    steps, ends = 0, time.monotonic() + seconds

    def collect() -> None:
        failed.extend(runner.collect(tickets.pop(0)).failed)

    while time.monotonic() < ends and begin + steps < longest:
        token = PREVIOUS if steps else 7
        plan_of_step = StepPlan(
            number=steps + 1,
            starts=[] if steps else starts,
            steps=[
                SequenceStep(seq=s, start=begin + steps, token_ids=[token], new_block_ids=[], sample=True)
                for s in running
            ],
        )  # fmt: skip
        tickets.append(runner.launch(plan_of_step))
        steps += 1
        if len(tickets) == 2:
            collect()
    while tickets:
        collect()
    return steps, begin + steps, failed


def _prefill(runner: Any, plan: Any, seconds: float) -> tuple[int, int, list[Any]]:
    """Run chunks of every length and at every place, several prompts in some; return as `_decode` does."""
    import random

    from engine.plan import SequenceStart, SequenceStep, StepPlan
    from router.protocol import SamplingParams

    config, draw = plan.config, random.Random(0)
    blocks, most, number = list(range(plan.num_blocks)), config.max_num_batched_tokens, config.max_num_seqs
    sampling = SamplingParams(max_tokens=1, temperature=0.8, seed=1)
    failed: list[Any] = []
    steps, furthest, ends = 0, 0, time.monotonic() + seconds
    # First what takes most memory: the longest chunk at the far end, and the most sequences with states to keep.
    asked = [(1, most, plan.max_model_len - most), (number, most // number, 65536)]
    while asked or time.monotonic() < ends:
        count = draw.choice([1, number])
        count, length, start = (
            asked.pop() if asked else (count, max(1, int(most ** draw.random()) // count), draw.randrange(65536))
        )
        seqs = range(1, count + 1)
        begun = [
            SequenceStart(seq=s, slot=s - 1, block_ids=blocks[s - 1 :: count], sampling=sampling, token_ids=[5])
            for s in seqs
        ]
        made = [SequenceStep(seq=s, start=start, token_ids=[7] * length, new_block_ids=[], sample=True) for s in seqs]
        failed += runner.run(StepPlan(number=steps, starts=begun, steps=made)).failed
        runner.run(StepPlan(number=steps, ends=list(seqs)))
        furthest, steps = max(furthest, start + length), steps + 1
    return steps, furthest, failed


def _fault(found: dict[str, Any]) -> str:
    off = found["planned_bytes"] / found["peak_bytes"] - 1
    faults = [f"planned is {off:+.1%} of what is used"] if abs(off) > TOLERANCE else []
    faults += [f"{found['num_failed']} steps failed: {found['failed']}"] if found["num_failed"] else []
    faults += [f"memory grew by {found['grown_bytes']:,} bytes"] if found["grown_bytes"] > GROWTH else []
    faults += [] if found["steps"] > 10 else [f"{found['steps']} steps only"]
    return "; ".join(faults)


def main() -> int:
    """Run what the arguments say and print a row for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CONFIGURATIONS), nargs="+", default=list(CONFIGURATIONS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of work at the limit")
    parser.add_argument("--layers", type=int, default=0, help="the first layers only; 0: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args()
    rows, faults = [], 0
    for name in args.only:
        # A process of its own: CUDA's context is part of what is measured.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            options = {"seconds": args.seconds, "layers": args.layers, "device": args.device}
            found = pool.apply(measure, (name,), options)
        rows.append(found)
        fault = _fault(found)
        faults += bool(fault)
        off = found["planned_bytes"] / found["peak_bytes"] - 1
        print(
            f"{name}: planned {found['planned_bytes'] / 2**30:.2f} GiB, used {found['peak_bytes'] / 2**30:.2f} GiB "
            f"({off:+.2%}); {found['steps']} steps in {found['seconds']:.0f} s at {found['context']:,} tokens each, "
            f"{found['num_failed']} failed  {fault or 'ok'}",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
