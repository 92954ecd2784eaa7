"""`isthmus model check DIR`: what a checkpoint folder holds, what each rank would, and whether it can be served.

Headers and configs alone, without torch or a GPU: some seconds for the 70,000 tensors of a published model. Values are
looked at when they are loaded. What is a problem here, a worker refuses with the same words (stored_forms.py).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.check import table as findings_table
from deploy.check_rules import GIB, Finding, Level
from deploy.model_facts import ModelFacts, Stored, read_facts
from engine.config import EngineConfig
from engine.device_memory import driver_memory
from engine.flags import ConfigError, parse_flags
from engine.memory_parts import MARGIN_BYTES
from engine.memory_plan import PlanError, plan_memory
from engine.model.config import DeepSeekV4Config
from engine.model.weight_bytes import count_weights
from engine.served_model import shard_of
from kernels.table import counted
from router.protocol import WorkerRole

_console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 160)
_RANKS = (1, 2, 4, 8)
_UNBOUNDED_GIB = 1e5
_CACHE_GIB = 1.0
_SHOWN = 20
_DESCRIPTION = """\
Look at a checkpoint folder without loading it: which variant it is, in which forms its tensors are stored, what each
rank of a group would hold, whether tokenizer and encoding are there, and whether GPUs of this machine (or of
--gpu-memory-gib) have room. Reads headers and JSON only; needs no GPU.
"""
_EPILOG = """\
examples:
  isthmus model check /models/DeepSeek-V4-Flash
  isthmus model check /models/DeepSeek-V4-Flash-NVFP4 --ranks 4 --gpu-memory-gib 94.9
  isthmus model check dsv4-tiny --json

Exit code 0: it can be served, with warnings maybe; 1: it can't, and what is wrong stands by name, each with what to do;
2: wrong usage. Values (NaN, zero scales) are looked at when a worker loads them. docs/checkpoints.md says more.
"""


class RankBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of a group would hold on a GPU, in bytes.

    needed: of a GPU with a cache of 1 GiB, by role.   cache_tokens: that fit into a GPU, by role; -1: it does not fit,
    None: no GPU is known.   reason: why the model can't be cut so; "".
    """

    ranks: int
    weights: int = 0
    experts: str = ""
    needed: dict[str, int] = {}
    cache_tokens: dict[str, int] | None = None
    reason: str = ""


def main(argv: list[str]) -> int:
    """Run `isthmus model check`; return its exit code. Raises ConfigError for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="isthmus model check",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", metavar="DIR", help="folder with config.json and safetensors")
    parser.add_argument("--ranks", type=int, metavar="N", help="of a group; default: 1, 2, 4 and 8")
    parser.add_argument(
        "--gpu-memory-gib", type=float, default=0.0, metavar="GIB", help="of one GPU; default: what it has"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parse_flags(parser, argv)
    folder = Path(args.folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the one that has the checkpoint's config.json")
    if args.ranks is not None and args.ranks < 1:
        raise ConfigError(f"--ranks {args.ranks}: wanted 1 or more")
    if args.gpu_memory_gib < 0:
        raise ConfigError(f"--gpu-memory-gib {args.gpu_memory_gib:g}: wanted GiB of one GPU, as CUDA counts them")
    facts = read_facts(folder)
    gpu_bytes = int(args.gpu_memory_gib * GIB) or driver_memory() or 0
    ranks = []
    if facts.config is not None:
        ranks = [count_rank(facts.config, n, gpu_bytes) for n in ((args.ranks,) if args.ranks else _RANKS)]
        is_asked = bool(args.ranks or args.gpu_memory_gib)
        facts.findings.append(_verdict(ranks, gpu_bytes, is_asked=is_asked))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(_document(facts, ranks, gpu_bytes)), indent=1).decode())
    else:
        _show(facts, ranks, gpu_bytes)
    return 1 if any(finding.level == "problem" for finding in facts.findings) else 0


def count_rank(config: DeepSeekV4Config, ranks: int, gpu_bytes: int) -> RankBytes:
    """Return what one of so many ranks holds. gpu_bytes: of a GPU, 0 if none is known."""
    try:
        group = _group("decode", ranks, _UNBOUNDED_GIB, _CACHE_GIB)
        weights = count_weights(config, shard_of(group, config), dtype="bfloat16", keeps_packed=True)
        needed, tokens = {}, {}
        for role in _roles():
            plan = plan_memory(_group(role, ranks, _UNBOUNDED_GIB, _CACHE_GIB), config)
            needed[str(role)] = sum(part.num_bytes for part in plan.parts) + MARGIN_BYTES
    except ValueError as error:  # a cut that does not come out even, or no cache at all
        return RankBytes(ranks=ranks, reason=str(error))
    for role in _roles() if gpu_bytes else ():
        try:
            tokens[str(role)] = plan_memory(_group(role, ranks, gpu_bytes / GIB, 0), config).summary().cache_tokens
        except PlanError:
            tokens[str(role)] = -1
    return RankBytes(
        ranks=ranks,
        weights=weights.total,
        experts=weights.experts,
        needed=needed,
        cache_tokens=tokens if gpu_bytes else None,
    )


def _roles() -> tuple[WorkerRole, WorkerRole]:
    return "prefill", "decode"


def _group(role: WorkerRole, ranks: int, gpu_gib: float, cache_gib: float) -> EngineConfig:
    """Return a group with the default settings; the folder does not matter to its memory."""
    return EngineConfig(
        model="", role=role, ranks=ranks, device="cuda", gpu_memory_gib=gpu_gib, kv_cache_memory_gib=cache_gib
    )


def _verdict(ranks: list[RankBytes], gpu_bytes: int, *, is_asked: bool) -> Finding:
    """is_asked: for ranks or GPUs that were named; what does not fit is a problem then."""
    level: Level = "problem" if is_asked else "warning"
    possible = [each for each in ranks if not each.reason]
    if not possible:
        seen, _, remedy = ranks[0].reason.partition("; ")
        return Finding("memory", level, seen, remedy or "choose another number of ranks")
    if not gpu_bytes:
        least = possible[-1]
        needed = f"{counted(least.ranks, 'rank')} each needs {_gib(max(least.needed.values()))} GiB"
        seen = f"no GPU here tells its memory: with {needed}"
        return Finding("memory", "ok", seen, "give --gpu-memory-gib to see what fits")
    fits = [each for each in possible if each.cache_tokens and min(each.cache_tokens.values()) > 0]
    size = f"GPUs of {_gib(gpu_bytes)} GiB"
    if not fits:
        need = min(max(each.needed.values()) for each in possible)
        *others, most = (each.ranks for each in ranks)
        asked = "".join(f"{count} or " for count in others) + counted(most, "rank")
        seen = f"does not fit {size} with {asked}: {_gib(need)} are needed"
        return Finding("memory", level, seen, "take more ranks (--ranks), or GPUs with more memory")
    seen = f"fits {size} with {fits[0].ranks} or more ranks a group"
    return Finding("memory", "ok", seen, "`isthmus plan` counts a configuration")


def _document(facts: ModelFacts, ranks: list[RankBytes], gpu_bytes: int) -> dict[str, Any]:
    counts = {level: sum(each.level == level for each in facts.findings) for level in ("ok", "warning", "problem")}
    return {**msgspec.structs.asdict(facts), "gpu_bytes": gpu_bytes, "ranks": ranks, "counts": counts}


def _show(facts: ModelFacts, ranks: list[RankBytes], gpu_bytes: int) -> None:
    size = f"{facts.num_bytes / 1e9:,.2f} GB ({_gib(facts.num_bytes)} GiB)"
    _console.print(f"{escape(facts.folder)}: {facts.variant}")
    _console.print(f"{counted(facts.num_files, 'weight file')}, {counted(facts.num_tensors, 'tensor')}, {size}\n")
    if facts.stored:
        _console.print(_stored_table([*facts.stored, *facts.drafting]))
        _console.print()
    if ranks:
        _console.print(_rank_table(ranks, gpu_bytes))
        _console.print()
    problems = [finding for finding in facts.findings if finding.level == "problem"]
    hidden = problems[_SHOWN:]
    _console.print(findings_table([finding for finding in facts.findings if finding not in hidden]))
    if hidden:
        _console.print(f"… and {counted(len(hidden), 'more problem')}: --json lists them all")
    warnings = sum(finding.level == "warning" for finding in facts.findings)
    verdict = "can't be served" if problems else "can be served"
    _console.print(
        f"\n{escape(facts.folder)} {verdict}: {counted(len(problems), 'problem')}, {counted(warnings, 'warning')}"
    )


def _stored_table(stored: list[Stored]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stored")
    table.add_column("form")
    for column in ("tensors", "MiB with scales"):
        table.add_column(column, justify="right")
    for each in stored:
        table.add_row(each.group, each.form, f"{each.tensors:,}", f"{each.num_bytes / 2**20:,.1f}")
    return table


def _rank_table(ranks: list[RankBytes], gpu_bytes: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("ranks", "weights of each, GiB", "prefill needs", "decode needs"):
        table.add_column(column, justify="right")
    table.add_column(f"on a GPU of {_gib(gpu_bytes)} GiB" if gpu_bytes else "experts")
    for each in ranks:
        if each.reason:
            table.add_row(str(each.ranks), "", "", "", escape(each.reason))
            continue
        last = each.experts
        if each.cache_tokens is not None:
            last = ", ".join(
                f"{role}: {f'{tokens:,} tokens of cache' if tokens >= 0 else 'does not fit'}"
                for role, tokens in each.cache_tokens.items()
            )
        needed = [_gib(each.needed[role]) for role in _roles()]
        table.add_row(str(each.ranks), _gib(each.weights), *needed, last)
    return table


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}"
