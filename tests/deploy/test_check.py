"""`isthmus check`: every rule on invented facts, the facts of this machine, and what it has in common with `up`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy import check_gpu_rules, check_rules, cli, preflight, tiny_model
from deploy.check import judge
from deploy.check_facts import Cuda, Gpu, Host, ModelFolder, cuda_of, read_cuda, read_host, read_model_folder
from deploy.check_rules import Finding, ask
from deploy.config import ClusterConfig, add_cluster_flags, load_cluster_config
from deploy.placement import Placement, place
from engine.config import EngineConfig
from engine.flags import ConfigError
from engine.memory_plan import MemoryPlan, plan_memory
from engine.model.published import published_config
from engine.numa import NumaTopology, discover

from .machines import make_machine

GIB = 1 << 30
EIGHT = Path(__file__).resolve().parents[2] / "deploy" / "rtx-pro-6000-x8.yaml"
ONE_NODE = NumaTopology(discover().nodes[:1])


def host(**facts: Any) -> Host:
    """A host that lacks nothing, but for `facts`."""
    whole = {
        "memory_bytes": 512 * GIB,
        "available_bytes": 500 * GIB,
        "shm_bytes": 8 * GIB,
        "open_files": 1 << 20,
        "locked_bytes": -1,
        "allowed_cpus": frozenset(range(256)),
        "allowed_nodes": frozenset({0, 1}),
        "numactl": "/usr/bin/numactl",
        "versions": {"torch": "2.13.0", "triton": "3.6.0", "nixl-cu13": "1.5.1", "ray": "2.60.0"},
    }
    return Host(**{**whole, **facts})


def cuda(num_gpus: int = 8, *, gib: float = 95.0, **facts: Any) -> Cuda:
    """Eight cards that reach each other, under a driver that serves torch, but for `facts`."""
    gpu = Gpu("RTX PRO 6000", (12, 0), int((gib - 0.5) * GIB), int(gib * GIB))
    peers = tuple(frozenset(range(num_gpus)) - {index} for index in range(num_gpus))
    whole = {
        "driver": "580.95.05",
        "driver_cuda": 13000,
        "torch_cuda": "13.0",
        "gpus": (gpu,) * num_gpus,
        "peers": peers,
    }
    return Cuda(**{**whole, **facts})


def load(*words: str, environ: dict[str, str] | None = None) -> ClusterConfig:
    parser = argparse.ArgumentParser()
    add_cluster_flags(parser)
    return load_cluster_config(parser.parse_args(list(words)), environ or {})


def with_groups(config: ClusterConfig, **fields: Any) -> ClusterConfig:
    groups = tuple(msgspec.structs.replace(group, **fields) for group in config.groups)
    return msgspec.structs.replace(config, groups=groups)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ClusterConfig:
    return load(environ={"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))})


@pytest.fixture(scope="module")
def eight() -> ClusterConfig:
    """deploy/rtx-pro-6000-x8.yaml by the published name, so that its checkpoint need not be here."""
    return load(str(EIGHT), "--model", "DeepSeek-V4-Flash", "--load-format", "synthetic", "--port", "20126")


@pytest.fixture
def two_nodes(tmp_path: Path) -> NumaTopology:
    topology = discover(make_machine(tmp_path, nodes=["0-15", "16-31"], gpu_nodes=[0, 0, 0, 0, 1, 1, 1, 1]))
    nodes = tuple(dataclasses.replace(node, memory_bytes=256 * GIB, free_bytes=9 * GIB) for node in topology.nodes)
    return dataclasses.replace(topology, nodes=nodes)


@pytest.fixture
def placements(eight: ClusterConfig, two_nodes: NumaTopology) -> tuple[Placement, ...]:
    return place(eight.groups, two_nodes)


@pytest.fixture(scope="module")
def plans(eight: ClusterConfig) -> tuple[MemoryPlan, ...]:
    return tuple(plan_memory(group, published_config("DeepSeek-V4-Flash")) for group in eight.groups)


def worst(findings: list[Finding]) -> list[tuple[str, str, str]]:
    """Return (level, seen, remedy) of what is not ok."""
    return [(f.level, f.seen, f.remedy) for f in findings if f.level != "ok"]


def the(findings: list[Finding], level: str) -> tuple[str, str]:
    """Return (seen, remedy) of the one finding that is not ok, which must be of `level`."""
    ((found, seen, remedy),) = worst(findings)
    assert found == level
    assert remedy
    return seen, remedy


# ---------------------------------------------------------------- the whole


def test_machine_as_it_was_meant_has_no_finding_but_ok(eight: ClusterConfig, two_nodes: NumaTopology) -> None:
    findings = judge(eight, topology=two_nodes, host=host(), cuda=cuda())
    assert worst(findings) == []
    topics = {"versions", "ports", "plan", "NUMA", "host memory", "memory of node 0", "memory of node 1", "limits"}
    assert topics | {"lanes", "driver", "GPUs", "GPU memory", "P2P", "kernels"} == {f.topic for f in findings}


def test_tiny_cluster_is_well_on_this_machine(tiny: ClusterConfig) -> None:
    found = [f.topic for f in judge(with_groups(tiny), topology=ONE_NODE, host=host(), cuda=None) if f.level != "ok"]
    assert [topic for topic in found if topic != "ports"] == []  # somebody may serve on 8000


def test_exit_code_and_json_tell_a_problem(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert cli.main(["check", "--port", port, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (problem,) = [finding for finding in document["findings"] if finding["level"] == "problem"]
    assert (problem["topic"], document["counts"]["problem"]) == ("ports", 1)
    assert f"port {port} on 127.0.0.1: taken by another program" in problem["seen"]
    assert "choose another --port" in problem["remedy"]


def test_table_shows_every_finding_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(EIGHT), "--port", "20127"]) == 1
    out = capsys.readouterr().out
    assert "/models/DeepSeek-V4-Flash/config.json: no such file" in out
    assert "give the folder of a DeepSeek-V4 checkpoint" in out
    assert "problem" in out.splitlines()[-1]


def test_what_up_refuses_is_a_problem_by_the_same_words(tiny: ClusterConfig, tmp_path: Path) -> None:
    folder = tmp_path / "no-weights"
    shutil.copytree(tiny.model, folder)
    (folder / "model.safetensors").unlink()
    broken = {
        "folder": with_groups(tiny, model=str(folder)),
        "node": with_groups(tiny, numa_node=7),
        "GPUs": with_groups(tiny, device="cuda", gpu_memory_gib=90.0, dtype="bfloat16", kv_cache_dtype="bf16"),
    }
    for config in broken.values():
        with pytest.raises(ConfigError) as refused:
            preflight.check(config, needs_port=False)
        problems = [f for f in judge(config, topology=discover(), host=host(), cuda=cuda(0)) if f.level == "problem"]
        assert any(str(refused.value).startswith(problem.seen) for problem in problems)
        assert all(problem.remedy for problem in problems)


def test_two_processes_given_one_port_are_refused(tiny: ClusterConfig) -> None:
    findings, _ = ask("ports", lambda: preflight.require_free_ports(with_groups(tiny, port=20128)), "free")
    assert the(findings, "problem")[0] == "port 20128: given to prefill-0 and to decode-0"


def test_joining_several_hosts_is_said_to_be_about_one(eight: ClusterConfig, two_nodes: NumaTopology) -> None:
    joined = msgspec.structs.replace(eight, supervisor=msgspec.structs.replace(eight.supervisor, ray_address="auto"))
    findings = judge(joined, topology=two_nodes, host=host(), cuda=cuda())
    (ray,) = [finding for finding in findings if finding.topic == "Ray"]
    assert "run `isthmus check` on each of the others" in ray.remedy


# ---------------------------------------------------------------- rules on the host


@pytest.mark.parametrize(
    ("found", "level", "seen", "remedy"),
    [
        ({"ray": "1.0"}, "problem", "ray 1.0, wanted >=2.49,<3", "pip install 'ray>=2.49,<3'"),
        ({"torch": ""}, "problem", "torch is not installed", "pip install 'torch'"),
        ({"nixl-cu13": ""}, "warning", "nixl-cu13 is not installed", "pip install 'nixl-cu13'"),
    ],
)
def test_versions(found: dict[str, str], level: str, seen: str, remedy: str) -> None:
    assert the(check_rules.versions(found, {"ray": ">=2.49,<3"}, uses_nixl=False), level) == (seen, remedy)


def test_nixl_that_was_asked_for_by_name_must_be_there() -> None:
    assert the(check_rules.versions({"nixl-cu13": ""}, {}, uses_nixl=True), "problem")


@pytest.mark.parametrize(
    ("facts", "level", "seen", "remedy"),
    [
        ({"numactl": ""}, "warning", "ranks bind themselves", "apt-get install numactl"),
        ({"page_error": "EPERM"}, "warning", "does not tell where pages lie (EPERM)", "SYS_NICE"),
        ({"numa_balancing": True}, "warning", "automatic NUMA balancing", "kernel.numa_balancing=0"),
        ({"allowed_cpus": frozenset(range(16))}, "problem", "decode-0: CPUs 16-31, but only 0-15 are open", "cpuset"),
        ({"allowed_nodes": frozenset({0})}, "problem", "decode-0: memory of node 1 is not open", "cpuset.mems"),
        ({"allowed_nodes": None}, "ok", "", ""),
    ],
)
def test_numa_facts(
    eight: ClusterConfig,
    two_nodes: NumaTopology,
    placements: tuple[Placement, ...],
    facts: dict[str, Any],
    level: str,
    seen: str,
    remedy: str,
) -> None:
    findings = check_rules.numa(eight, placements, two_nodes, host(**facts))
    if level == "ok":
        assert worst(findings) == []
        return
    found = the(findings, level)
    assert seen in found[0] and remedy in found[1]


def test_numa_warning_of_a_far_gpu_is_a_finding_with_its_remedy(eight: ClusterConfig, tmp_path: Path) -> None:
    topology = discover(make_machine(tmp_path, nodes=["0-15", "16-31"], gpu_nodes=[0, 0, 0, 1, 1, 1, 1, 1]))
    seen, remedy = the(check_rules.numa(eight, place(eight.groups, topology), topology, host()), "warning")
    assert "prefill-0: ranks = 4 on NUMA node 0, which has 3 GPUs" in seen
    assert remedy == "move 1 card to slots of node 0, or set numa_node: 1 for this group"


def test_numa_of_network_cards_counts_where_there_are_other_hosts(eight: ClusterConfig, tmp_path: Path) -> None:
    topology = discover(make_machine(tmp_path, nodes=["0-15", "16-31"], gpu_nodes=[0] * 4 + [1] * 4, nics={"eth0": 0}))
    placed = place(eight.groups, topology)
    assert worst(check_rules.numa(eight, placed, topology, host())) == []
    joined = msgspec.structs.replace(eight, supervisor=msgspec.structs.replace(eight.supervisor, ray_address="auto"))
    seen, _ = the(check_rules.numa(joined, placed, topology, host()), "warning")
    assert "NUMA node 1 has no network card that is up" in seen


def test_numa_on_one_node_is_said_to_be_simulated(tiny: ClusterConfig) -> None:
    findings = check_rules.numa(tiny, place(tiny.groups, ONE_NODE), ONE_NODE, host(numactl="", page_error="EPERM"))
    assert worst(findings) == []
    assert "reported as `simulated`" in findings[-1].seen


@pytest.mark.parametrize(("total", "available", "level"), [(512, 500, "ok"), (512, 20, "warning"), (32, 30, "problem")])
def test_host_memory(
    plans: tuple[MemoryPlan, ...], placements: tuple[Placement, ...], total: int, available: int, level: str
) -> None:
    facts = host(memory_bytes=total * GIB, available_bytes=available * GIB)
    (finding,) = check_rules.memory(plans, placements, ONE_NODE, facts)
    assert finding.level == level
    assert "about 50.0 GiB wanted" in finding.seen


def test_memory_of_a_numa_node_that_a_group_is_bound_to(
    plans: tuple[MemoryPlan, ...], placements: tuple[Placement, ...], two_nodes: NumaTopology
) -> None:
    small = dataclasses.replace(two_nodes.nodes[1], memory_bytes=16 * GIB)
    topology = dataclasses.replace(two_nodes, nodes=(two_nodes.nodes[0], small))
    findings = check_rules.memory(plans, placements, topology, host())
    assert [(f.topic, f.level) for f in findings] == [
        ("host memory", "ok"),
        ("memory of node 0", "ok"),
        ("memory of node 1", "problem"),
    ]


def test_limits(tiny: ClusterConfig, tmp_path: Path) -> None:
    seen, remedy = the(check_rules.limits(tiny, ONE_NODE, host(open_files=1024)), "warning")
    assert seen.startswith("1,024 open files at most") and "ulimit -n 65536" in remedy
    seen, remedy = the(check_rules.limits(tiny, ONE_NODE, host(shm_bytes=64 << 20)), "warning")
    assert "/dev/shm has 64 MiB free" in seen and "--shm-size=1g" in remedy
    assert worst(check_rules.limits(tiny, ONE_NODE, host(locked_bytes=65536, open_files=-1))) == []
    joined = msgspec.structs.replace(tiny, supervisor=msgspec.structs.replace(tiny.supervisor, ray_address="auto"))
    rdma = discover(make_machine(tmp_path, nodes=["0-1"], gpu_nodes=[], nics={"mlx5_0:1": 0}))
    seen, remedy = the(check_rules.limits(joined, rdma, host(locked_bytes=65536)), "warning")
    assert "RDMA locks what it registers" in seen and "ulimit -l unlimited" in remedy


@pytest.mark.parametrize(("transport", "level"), [("auto", "warning"), ("nixl", "problem"), ("host", "ok")])
def test_process_that_may_not_write_into_its_sibling(tiny: ClusterConfig, transport: str, level: str) -> None:
    facts = host(cma_error="Operation not permitted", ptrace_scope=1)
    findings = check_rules.lanes(with_groups(tiny, transport=transport), facts)
    if level == "ok":
        assert findings == []
        return
    seen, remedy = the(findings, level)
    assert "Operation not permitted, kernel.yama.ptrace_scope is 1" in seen
    assert "kernel.yama.ptrace_scope=0" in remedy and "SYS_PTRACE" in remedy


@pytest.mark.parametrize(("tls", "is_cut"), [("tcp", True), ("tcp,self", True), ("^tcp", False), ("tcp,cma", False)])
def test_ucx_told_to_use_tcp_only(tiny: ClusterConfig, tls: str, is_cut: bool) -> None:
    findings = check_rules.lanes(tiny, host(environ={"UCX_TLS": tls}))
    assert [remedy for _, _, remedy in worst(findings)] == ["unset UCX_TLS"] * is_cut


def test_model_folder() -> None:
    whole = ModelFolder("/m", num_files=46, num_bytes=160 * GIB)
    assert worst(check_rules.model_folder(whole)) == []
    seen, _ = the(check_rules.model_folder(dataclasses.replace(whole, unreadable=("a", "b"))), "problem")
    assert seen == "/m: 2 of 46 weight files can't be read: a, b"
    seen, _ = the(check_rules.model_folder(dataclasses.replace(whole, cut=("c",))), "problem")
    assert seen == "/m: 1 of 46 weight files is not whole: c"
    seen, _ = the(check_rules.model_folder(dataclasses.replace(whole, has_tokenizer=False)), "warning")
    assert "only prompts of token ids" in seen


@pytest.mark.parametrize(
    "content", [lambda whole: whole[:-1], lambda whole: whole[:100], lambda _: b"version https://"]
)
def test_weight_file_that_is_not_whole_is_found(tiny: ClusterConfig, tmp_path: Path, content) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(tiny.model, folder)
    weights = folder / "model.safetensors"
    assert read_model_folder(str(folder)).cut == ()
    weights.write_bytes(content(weights.read_bytes()))
    assert read_model_folder(str(folder)).cut == ("model.safetensors",)


# ---------------------------------------------------------------- rules on GPUs


@pytest.mark.parametrize(
    ("facts", "seen", "remedy"),
    [
        ({"error": "exit code 1 undefined symbol"}, "undefined symbol", "run nvidia-smi"),
        ({"torch_cuda": ""}, "torch is a CPU build", "pip install"),
        ({"driver_cuda": 0, "driver": ""}, "libcuda is not here", "--gpus all"),
        ({"driver_cuda": 0}, "driver 580.95.05 is loaded, but libcuda is not here", "--gpus all"),
        ({"driver_cuda": 12080}, "for CUDA 12.8, torch for 13.0", "a driver for CUDA 13.0 or later"),
        ({"gpus": ()}, "no GPU answers", "Xid"),
    ],
)
def test_driver(facts: dict[str, Any], seen: str, remedy: str) -> None:
    found = the(check_gpu_rules.driver(cuda(**facts)), "problem")
    assert seen in found[0] and remedy in found[1]


@pytest.mark.parametrize(("capability", "level"), [((12, 0), "ok"), ((10, 0), "warning"), ((8, 0), "problem")])
def test_architecture(capability: tuple[int, int], level: str) -> None:
    gpu = Gpu("a card", capability, GIB, GIB)
    (finding,) = check_gpu_rules.architecture(cuda(gpus=(gpu,) * 8), range(8))
    assert finding.level == level
    assert f"GPUs 0-7: a card, sm_{capability[0]}{capability[1]}" in finding.seen


def test_cards_of_several_kinds_are_told() -> None:
    cards = (Gpu("large", (12, 0), GIB, GIB), Gpu("small", (12, 0), GIB, GIB))
    seen, _ = the(check_gpu_rules.architecture(cuda(gpus=cards), range(2)), "warning")
    assert "several kinds" in seen


def test_memory_of_cards(placements: tuple[Placement, ...], plans: tuple[MemoryPlan, ...]) -> None:
    assert worst(check_gpu_rules.gpu_memory(cuda(), placements, plans)) == []
    (seen, remedy), *others = [f[1:] for f in worst(check_gpu_rules.gpu_memory(cuda(gib=80.03), placements, plans))]
    assert (len(others), seen) == (7, "prefill-0: GPU 0 has 80.03 GiB, planned are 94.90")
    assert remedy == "gpu_memory_gib: 80.0"
    busy = [dataclasses.replace(gpu, free_bytes=50 * GIB) if i == 5 else gpu for i, gpu in enumerate(cuda().gpus)]
    seen, remedy = the(check_gpu_rules.gpu_memory(cuda(gpus=tuple(busy)), placements, plans), "problem")
    assert "decode-0: GPU 5 has 50.0 of 95.0 GiB free" in seen and "nvidia-smi" in remedy
    missing = worst(check_gpu_rules.gpu_memory(cuda(6), placements, plans))
    assert [seen for _, seen, _ in missing] == [
        f"decode-0: GPU {index} is on the PCI bus, but CUDA shows 6 GPUs" for index in (6, 7)
    ]


def test_gpus_that_do_not_reach_each_other(placements: tuple[Placement, ...]) -> None:
    assert worst(check_gpu_rules.peers(cuda(), placements)) == []
    sockets = tuple(frozenset(range(4 * (i // 4), 4 * (i // 4) + 4)) - {i} for i in range(8))
    seen, remedy = the(check_gpu_rules.peers(cuda(peers=sockets), placements), "warning")
    assert seen.startswith("prefill-0 -> decode-0: no peer-to-peer between GPUs 0-4, 0-5, 0-6, 0-7 and 12 more")
    assert "nothing with transport: auto" in remedy
    alone = (frozenset[int](),) * 8
    found = worst(check_gpu_rules.peers(cuda(peers=alone), placements))
    assert [seen.split(":")[0] for _, seen, _ in found] == ["prefill-0", "decode-0", "prefill-0 -> decode-0"]
    assert "ACS" in found[0][2]


def test_gpus_of_which_only_one_reaches_the_other_are_cut(placements: tuple[Placement, ...]) -> None:
    one_way = list(cuda().peers)
    one_way[3] = one_way[3] - {0}
    seen, _ = the(check_gpu_rules.peers(cuda(peers=tuple(one_way)), placements), "warning")
    assert seen.startswith("prefill-0: no peer-to-peer between GPUs 0-3:")


def test_place_of_compiled_kernels() -> None:
    assert worst(check_gpu_rules.kernel_cache(host(kernel_cache_entries=130))) == []
    assert "takes minutes" in check_gpu_rules.kernel_cache(host())[0].seen
    _, remedy = the(check_gpu_rules.kernel_cache(host(kernel_cache_writable=False)), "warning")
    assert "TRITON_CACHE_DIR" in remedy


# ---------------------------------------------------------------- facts of this machine


def test_facts_are_read_below_their_roots(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("2\n")
    (tmp_path / "proc/sys/kernel/numa_balancing").write_text("1\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/status").write_text("Name:\tx\nMems_allowed_list:\t0-1\n")
    (tmp_path / "cache/one").mkdir(parents=True)
    environ = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "UCX_TLS": "tcp", "SECRET": "x"}
    facts = read_host(environ, proc=tmp_path / "proc", shared_memory=tmp_path / "missing")
    assert (facts.ptrace_scope, facts.numa_balancing, facts.allowed_nodes) == (2, True, {0, 1})
    assert (facts.kernel_cache_entries, facts.kernel_cache_writable, facts.shm_bytes) == (1, True, 0)
    assert facts.environ == {"UCX_TLS": "tcp"}
    assert facts.memory_bytes >= facts.available_bytes > 0


def test_cuda_is_asked_in_a_process_of_its_own_and_answers_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    (tmp_path / "driver/nvidia/version").write_text(version)
    found = read_cuda({"CUDA_VISIBLE_DEVICES": ""}, proc=tmp_path)
    assert (found.driver, found.error, len(found.peers)) == ("580.95.05", "", len(found.gpus))


def test_answer_of_two_gpus_is_understood() -> None:
    gpu = {"name": "N", "capability": [12, 0], "free_bytes": 1, "total_bytes": 2}
    text = json.dumps({"torch_cuda": "13.0", "driver_cuda": 13000, "gpus": [gpu, gpu], "peers": [[1], []]})
    found = cuda_of("580", "a line of somebody's\n" + text)
    assert found.gpus == (Gpu("N", (12, 0), 1, 2),) * 2
    assert found.peers == (frozenset({1}), frozenset())


def test_model_folder_is_read_with_its_sizes(tmp_path: Path) -> None:
    folder = Path(tiny_model.ensure_tiny_model({"XDG_CACHE_HOME": str(tmp_path)}))
    found = read_model_folder(str(folder))
    assert (found.num_files, found.num_bytes) == (1, (folder / "model.safetensors").stat().st_size)
    assert found.has_tokenizer and not found.unreadable


def test_groups_of_the_published_yaml_are_what_it_says(eight: ClusterConfig) -> None:
    group: EngineConfig = eight.groups[0]
    assert [(g.role, g.ranks, g.numa_node) for g in eight.groups] == [("prefill", 4, 0), ("decode", 4, 1)]
    assert group.device == "cuda"
