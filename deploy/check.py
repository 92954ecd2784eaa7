"""`isthmus check CONFIG`: could this cluster start on this host, and run well? Every finding says what to do.

What `up` would refuse is asked of the same functions (deploy.preflight); the rest are rules on facts of the host
(deploy.check_facts, deploy.check_rules, deploy.check_gpu_rules). Nothing is started but short probes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy import check_gpu_rules, check_rules, preflight
from deploy.check_facts import Cuda, Host, read_cuda, read_host, read_model_folder, requirements
from deploy.check_rules import GIB, Finding, ask
from deploy.config import ClusterConfig
from deploy.placement import Placement
from engine.memory_plan import MemoryPlan
from engine.numa import SYSFS, NumaTopology, discover
from kernels.table import counted

_console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 160)
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def check(config: ClusterConfig, *, environ: Mapping[str, str], as_json: bool = False, sysfs: Path = SYSFS) -> int:
    """Print the findings; return 1 if one of them is a problem."""
    uses_cuda = any(group.device.startswith("cuda") for group in config.groups)
    host, cuda = read_host(environ), read_cuda(environ) if uses_cuda else None
    findings = judge(config, topology=discover(sysfs), host=host, cuda=cuda)
    counts = {level: sum(finding.level == level for finding in findings) for level in _COLOURS}
    if as_json:
        document = {"configuration": config.source, "counts": counts, "findings": findings}
        print(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
    else:
        _console.print(table(findings))
        total = ", ".join(counted(count, level, "ok" if level == "ok" else "") for level, count in counts.items())
        _console.print(f"{config.source}: {total}")
    return 1 if counts["problem"] else 0


def judge(config: ClusterConfig, *, topology: NumaTopology, host: Host, cuda: Cuda | None) -> list[Finding]:
    """Return every finding. cuda: None if no group wants a GPU."""
    findings, _ = ask("packages", preflight.require_own_packages, "")
    uses_nixl = any(group.transport == "nixl" for group in config.groups)
    findings += check_rules.versions(host.versions, requirements(), uses_nixl=uses_nixl)
    well = f"port {config.router.port} on {config.router.host} is free"
    findings += ask("ports", lambda: preflight.require_free_ports(config), well)[0]
    plans = _plans(config, findings)
    if plans and all(plan.config.load_format != "synthetic" for plan in plans):
        findings += check_rules.model_folder(read_model_folder(config.model))
    outcome, placements = ask("NUMA", lambda: preflight.place_groups(config, topology), "")
    findings += outcome
    if placements is not None:
        findings += check_rules.numa(config, placements, topology, host)
        findings += check_rules.memory(plans, placements, topology, host) if plans else []
    findings += check_rules.limits(config, topology, host)
    findings += check_rules.lanes(config, host)
    if address := config.supervisor.ray_address:
        seen = f"joins the cluster at {address}; this is about one host of it"
        findings.append(Finding("Ray", "ok", seen, "run `isthmus check` on each of the others"))
    if cuda is not None:
        findings += _judge_gpus(cuda, placements or (), plans, host)
    return findings


def _plans(config: ClusterConfig, findings: list[Finding]) -> list[MemoryPlan]:
    """Return every group's plan, or none; adds to `findings` what each is like."""
    plans = []
    for group in config.groups:
        outcome, planned = ask("plan", functools.partial(preflight.plan_group, group), "")
        findings += outcome
        if planned is not None:
            plans.append(planned[0])
            findings.append(Finding("plan", "ok", f"{group.worker_id}: {_plan_text(planned[0])}"))
    return plans if len(plans) == len(config.groups) else []


def _plan_text(plan: MemoryPlan) -> str:
    memory = plan.summary()
    left = f", {memory.left_bytes / GIB:.1f} of {memory.device_bytes / GIB:.1f} GiB left" if memory.device_bytes else ""
    return f"{counted(memory.max_num_seqs, 'sequence')}, {memory.cache_tokens:,} tokens in cache{left}"


def _judge_gpus(cuda: Cuda, placements: Sequence[Placement], plans: Sequence[MemoryPlan], host: Host) -> list[Finding]:
    findings = check_gpu_rules.driver(cuda)
    if any(finding.level == "problem" for finding in findings):
        return findings
    findings += check_gpu_rules.architecture(cuda, [gpu for placement in placements for gpu in placement.gpus])
    if plans and placements:
        findings += check_gpu_rules.gpu_memory(cuda, placements, plans)
    findings += check_gpu_rules.peers(cuda, placements)
    return findings + check_gpu_rules.kernel_cache(host)


def table(findings: list[Finding]) -> Table:
    """Return the findings for people: problems last, where they are seen."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "about", "found", "what to do"):
        shown.add_column(column, overflow="fold")
    order = list(_COLOURS)
    for finding in sorted(findings, key=lambda finding: order.index(finding.level)):
        level = f"[{_COLOURS[finding.level]}]{finding.level}[/]"
        shown.add_row(level, finding.topic, escape(finding.seen), escape(finding.remedy))
    return shown
