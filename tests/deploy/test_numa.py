"""engine/numa.py, engine/numa_binding.py and deploy/placement.py on invented machines, and on the one we run on."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local_ray import runtime_environment
from deploy.placement import Placement, nic_warnings, place
from deploy.status import numa_lines
from engine.config import EngineConfig
from engine.flags import ConfigError
from engine.numa import NumaTopology, discover, format_cpu_list, parse_cpu_list
from engine.numa_binding import Binding
from kv_transfer import host_staging
from kv_transfer.memory_nodes import count_fresh_pages, count_pages
from router.protocol import NumaBinding

from .machines import make_machine, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def eight_gpus(tmp_path: Path) -> NumaTopology:
    # the firmware counts GPUs across sockets in an order of its own
    return discover(make_machine(tmp_path, nodes=["0-15,32-47", "16-31,48-63"], gpu_nodes=[0, 0, 1, 1, 0, 0, 1, 1]))


@pytest.fixture
def one_node(tmp_path: Path) -> NumaTopology:
    return discover(make_machine(tmp_path, nodes=["0-6"], gpu_nodes=[]))


def group(role: str = "prefill", **fields: object) -> EngineConfig:
    return EngineConfig(model="m", role=role, worker_id=f"{role}-0", **fields)


def test_two_nodes_are_read_with_cpus_memory_and_distances(eight_gpus: NumaTopology) -> None:
    second = eight_gpus.nodes[1]
    assert (len(eight_gpus.nodes), second.id, second.distances) == (2, 1, (32, 10))
    assert (second.memory_bytes, second.free_bytes) == (1 << 30, 512 << 10)
    assert second.cpus == (*range(16, 32), *range(48, 64))


def test_gpus_are_found_in_bus_order_with_their_node(eight_gpus: NumaTopology) -> None:
    assert eight_gpus.gpus_of(0) == (0, 1, 4, 5)
    assert eight_gpus.gpus_of(1) == (2, 3, 6, 7)


def test_node_without_cpus_is_no_place_to_pin_to(tmp_path: Path) -> None:
    topology = discover(make_machine(tmp_path, nodes=["0-3", ""], gpu_nodes=[]))
    assert [node.id for node in topology.nodes] == [0]


def test_kernel_without_numa_is_one_node_of_every_cpu(tmp_path: Path) -> None:
    write(tmp_path / "devices/system/cpu/online", "0-3")
    assert [node.cpus for node in discover(tmp_path).nodes] == [(0, 1, 2, 3)]


def test_one_node_is_split_into_disjoint_halves_that_cover_it(one_node: NumaTopology) -> None:
    assert one_node.cpus_of(0) == (0, 1, 2, 3)
    assert one_node.cpus_of(1) == (4, 5, 6)


@pytest.mark.parametrize("node", [2, 7])
def test_missing_node_is_refused_with_those_that_exist(eight_gpus: NumaTopology, node: int) -> None:
    with pytest.raises(ValueError, match=f"numa_node {node}: the machine has node 0-1"):
        eight_gpus.cpus_of(node)


def test_tp4_plus_tp4_takes_each_nodes_gpus_and_cpus(eight_gpus: NumaTopology) -> None:
    groups = (group(ranks=4, numa_node=0, device="cuda"), group("decode", ranks=4, numa_node=1, device="cuda"))
    prefill, decode = place(groups, eight_gpus)
    assert (prefill.gpus, decode.gpus) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert (prefill.config.cpus, decode.config.cpus) == ("0-15,32-47", "16-31,48-63")
    assert not prefill.is_simulated
    assert decode.environment["CUDA_VISIBLE_DEVICES"] == "2,3,6,7"


def test_gpus_are_handed_out_once(eight_gpus: NumaTopology) -> None:
    groups = (group(ranks=2, numa_node=0, device="cuda"), group("decode", ranks=2, numa_node=0, device="cuda"))
    assert [placement.gpus for placement in place(groups, eight_gpus)] == [(0, 1), (4, 5)]


def test_too_few_gpus_on_the_machine_are_refused(eight_gpus: NumaTopology) -> None:
    groups = (group(ranks=5, numa_node=0, device="cuda"), group("decode", ranks=4, numa_node=1, device="cuda"))
    with pytest.raises(ConfigError, match="prefill-0: ranks = 5 with device cuda, but 4 GPUs are free on this machine"):
        place(groups, eight_gpus)


# ---------------------------------------------------------------- machines, their plan and what is said of them


def tp4_plus_tp4(topology: NumaTopology, *nodes: int) -> tuple[Placement, ...]:
    """Place four ranks of each role: on `nodes`, or where nobody has said."""
    where = [{"numa_node": node} for node in nodes] or [{}, {}]
    groups = [
        group(role, ranks=4, device="cuda", **own) for role, own in zip(("prefill", "decode"), where, strict=True)
    ]
    return place(groups, topology, unset=() if nodes else [each.worker_id for each in groups])


def machine(root: Path, gpu_nodes: list[int], nodes: tuple[str, ...] = ("0-15", "16-31")) -> NumaTopology:
    return discover(make_machine(root, nodes=list(nodes), gpu_nodes=gpu_nodes))


def test_two_nodes_with_four_gpus_each_need_no_configuration(tmp_path: Path) -> None:
    prefill, decode = tp4_plus_tp4(machine(tmp_path, [0, 0, 0, 0, 1, 1, 1, 1]))
    assert (prefill.config.numa_node, prefill.config.cpus, prefill.gpus) == (0, "0-15", (0, 1, 2, 3))
    assert (decode.config.numa_node, decode.config.cpus, decode.gpus) == (1, "16-31", (4, 5, 6, 7))
    assert prefill.warnings + decode.warnings == ()


@pytest.mark.parametrize("nodes", [(), (0, 1), (1, 0)])
def test_gpus_counted_across_the_nodes_go_to_the_group_of_their_node(eight_gpus: NumaTopology, nodes) -> None:
    for placement in tp4_plus_tp4(eight_gpus, *nodes):
        assert {eight_gpus.gpus[gpu].node for gpu in placement.gpus} == {placement.config.numa_node}
        assert placement.warnings == ()


def test_crossed_gpu_is_used_with_a_warning_and_takes_no_other_groups_gpu(tmp_path: Path) -> None:
    prefill, decode = tp4_plus_tp4(machine(tmp_path, [0, 0, 1, 0, 1, 1, 1, 1]), 0, 1)
    assert (prefill.gpus, decode.gpus) == ((0, 1, 3, 7), (2, 4, 5, 6))
    (warning,) = prefill.warnings
    assert decode.warnings == ()
    assert "which has 3 GPUs: taken are 7 (0000:08:00.0) on node 1" in warning
    assert "move 1 card to slots of node 0, or set numa_node: 1 for this group" in warning


def test_firmware_that_tells_no_gpu_node_is_said_and_stops_nothing(tmp_path: Path) -> None:
    prefill, decode = tp4_plus_tp4(machine(tmp_path, [-1] * 8))
    assert (prefill.gpus, decode.gpus) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (prefill.config.numa_node, decode.config.numa_node) == (0, 1)
    assert "does not tell on which NUMA node GPUs 0-3 are" in prefill.warnings[0]
    assert "nvidia-smi topo -m" in decode.warnings[0]


def test_single_node_leaves_who_names_no_node_unpinned(tmp_path: Path) -> None:
    topology = machine(tmp_path, [0] * 8, nodes=("0-7",))
    prefill, decode = tp4_plus_tp4(topology)
    assert (prefill.config.cpus, decode.config.cpus, decode.gpus) == ("", "", (4, 5, 6, 7))
    prefill, decode = tp4_plus_tp4(topology, 0, 1)
    assert (prefill.config.cpus, decode.config.cpus) == ("0-3", "4-7")
    assert prefill.is_simulated and decode.is_simulated
    assert prefill.warnings + decode.warnings == ()


def test_kernel_without_numa_information_is_planned_like_a_single_node(tmp_path: Path) -> None:
    write(tmp_path / "devices/system/cpu/online", "0-7")
    prefill, decode = place([group(numa_node=0), group("decode", numa_node=1)], discover(tmp_path))
    assert (prefill.config.cpus, decode.config.cpus, decode.is_simulated) == ("0-3", "4-7", True)


def test_gpus_all_on_one_node_bring_both_roles_there_unless_told_otherwise(tmp_path: Path) -> None:
    topology = machine(tmp_path, [0] * 8)
    prefill, decode = tp4_plus_tp4(topology)
    assert (prefill.config.numa_node, decode.config.numa_node) == (0, 0)
    assert (prefill.gpus, decode.gpus) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert prefill.warnings + decode.warnings == ()
    _, decode = tp4_plus_tp4(topology, 0, 1)
    assert decode.gpus == (4, 5, 6, 7)
    assert "on NUMA node 1, which has 0 GPUs" in decode.warnings[0]
    assert "or set numa_node: 0 for this group" in decode.warnings[0]


def test_groups_without_a_node_fill_the_gaps_that_others_leave(eight_gpus: NumaTopology) -> None:
    groups = [group(ranks=2), group("decode", numa_node=0), group("prefill", ranks=1)]
    groups[2] = msgspec.structs.replace(groups[2], worker_id="prefill-1")
    placements = place(groups, eight_gpus, unset=["prefill-0", "prefill-1"])
    assert [placement.config.numa_node for placement in placements] == [1, 0, 1]


def test_minus_one_that_was_asked_for_stays_unpinned(eight_gpus: NumaTopology) -> None:
    assert place([group(numa_node=-1)], eight_gpus)[0].config.cpus == ""


def test_network_cards_are_found_with_node_and_state(tmp_path: Path) -> None:
    nics = {"mlx5_0:1": 0, "eth0": 1, "eth1-down": 0}
    topology = discover(make_machine(tmp_path, nodes=["0-3", "4-7"], gpu_nodes=[], nics=nics))
    found = [(nic.name, nic.kind, nic.node, nic.is_up) for nic in topology.nics]
    assert found == [
        ("mlx5_0:1", "rdma", 0, True),
        ("eth0", "ethernet", 1, True),
        ("eth1-down", "ethernet", 0, False),
    ]


@pytest.mark.parametrize(
    ("nics", "devices", "prefill", "decode"),
    [
        ({"mlx5_0:1": 0, "mlx5_1:1": 1}, "mlx5_0:1", "", "set UCX_NET_DEVICES=mlx5_1:1"),
        (
            {"mlx5_0:1": 0, "mlx5_1:1": 1},
            "all",
            "UCX may take a network card of another",
            "UCX may take a network card",
        ),
        ({"eth0": 0, "eth1-down": 1}, "", "", "node 1 has no network card that is up"),
        ({"eth0": -1}, "", "", ""),
    ],
)
def test_network_card_of_the_wrong_node_is_a_warning(
    tmp_path: Path, nics: dict[str, int], devices: str, prefill: str, decode: str
) -> None:
    topology = discover(make_machine(tmp_path, nodes=["0-3", "4-7"], gpu_nodes=[], nics=nics))
    for role, node, expected in (("prefill", 0, prefill), ("decode", 1, decode)):
        warnings = nic_warnings([group(role, numa_node=node)], topology, devices)
        assert len(warnings) == bool(expected)
        assert all(expected in warning for warning in warnings)


# ---------------------------------------------------------------- CPU lists


def test_cpu_list_of_the_user_replaces_the_nodes(eight_gpus: NumaTopology) -> None:
    assert place((group(numa_node=0, cpus="3,1-2"),), eight_gpus)[0].config.cpus == "1-3"


def test_cpu_that_does_not_exist_is_refused(eight_gpus: NumaTopology) -> None:
    with pytest.raises(ConfigError, match="the machine has no CPU 64-65"):
        place((group(cpus="60-65"),), eight_gpus)


def test_unpinned_group_says_so(eight_gpus: NumaTopology) -> None:
    placement = place((group(),), eight_gpus)[0]
    assert placement.config.cpus == ""
    assert placement.describe().startswith("not pinned")


def test_split_of_one_node_is_called_simulated(one_node: NumaTopology) -> None:
    placement = place((group("decode", numa_node=1),), one_node)[0]
    assert placement.is_simulated
    assert placement.describe() == "NUMA node 1, CPUs 4-6 (simulated)"


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_survive_a_round_trip(cpus: set[int]) -> None:
    assert set(parse_cpu_list(format_cpu_list(cpus))) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "3-1", "-1", "1,,b"])
def test_malformed_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="wanted a list such as 0-15,32"):
        parse_cpu_list(text)


# ---------------------------------------------------------------- processes, on this machine


def bind_in_a_process(*, node: int, cpus: str, sysfs: Path | None = None, threads: int = 3) -> tuple[NumaBinding, list]:
    """Bind a process that already has threads; return what it reports, and the affinity the kernel shows for each."""
    code = f"""
import json, os, threading
from pathlib import Path
import msgspec
from engine import numa_binding
done = threading.Event()
others = [threading.Thread(target=done.wait) for _ in range({threads})]
[thread.start() for thread in others]
try:
    binding = numa_binding.bind(node={node}, cpus={cpus!r}, sysfs=Path({str(sysfs or "/sys")!r})).report()
    masks = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
    print(json.dumps([msgspec.json.encode(binding).decode(), masks]))
finally:
    done.set()
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    binding, masks = json.loads(result.stdout)
    return msgspec.json.decode(binding, type=NumaBinding), masks


def own_machine_with_nodes(root: Path, count: int) -> Path:
    """Pretend that this machine's CPUs are spread over `count` nodes; the kernel knows better."""
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, len(cpus) // count)
    lists = [cpus[index * share : (index + 1) * share] or cpus[-1:] for index in range(count)]
    return make_machine(root, nodes=[format_cpu_list(each) for each in lists], gpu_nodes=[])


def test_every_thread_is_pinned_not_only_the_caller() -> None:
    first = min(os.sched_getaffinity(0))
    _, masks = bind_in_a_process(node=-1, cpus=str(first))
    assert len(masks) == 4
    assert all(mask == [first] for mask in masks)


def test_one_node_machine_never_claims_locality(tmp_path: Path) -> None:
    binding, _ = bind_in_a_process(node=1, cpus="", sysfs=own_machine_with_nodes(tmp_path, 1))
    assert binding.status == "simulated"
    assert "memory locality is not tested" in binding.evidence


def test_pages_on_the_node_make_it_bound(tmp_path: Path) -> None:
    # node 0 exists everywhere, so the kernel accepts the policy and move_pages reports it for real
    if count_fresh_pages(1).nodes != {0: 1}:
        pytest.skip("the kernel does not tell where pages lie, or has no node 0")
    binding, _ = bind_in_a_process(node=0, cpus="", sysfs=own_machine_with_nodes(tmp_path, 2))
    assert (binding.status, binding.node) == ("bound", 0)
    assert "64 of 64 fresh pages on node 0" in binding.evidence
    assert (binding.threads, binding.stray_threads, binding.pages) == (4, 0, {"fresh": {0: 64}})


def test_node_that_the_kernel_lacks_is_unverified_with_its_answer(tmp_path: Path) -> None:
    num_real = len(discover().nodes)
    sysfs = own_machine_with_nodes(tmp_path, num_real + 1)
    binding, _ = bind_in_a_process(node=num_real, cpus="", sysfs=sysfs)
    assert binding.status == "unverified"
    assert "set_mempolicy" in binding.evidence and "EINVAL" in binding.evidence


def test_unpinned_process_is_unverified_and_keeps_its_cpus() -> None:
    binding, masks = bind_in_a_process(node=-1, cpus="")
    assert (binding.status, binding.evidence) == ("unverified", "not pinned: numa_node is -1")
    assert all(mask == sorted(os.sched_getaffinity(0)) for mask in masks)


HOLDS_A_POOL = """
import sys, threading
from pathlib import Path
import msgspec
from engine import numa_binding
binding = numa_binding.bind(node=0, cpus="", sysfs=Path(sys.argv[1]))
done = threading.Event()
others = [threading.Thread(target=done.wait, daemon=True) for _ in range(3)]
[thread.start() for thread in others]
from engine.cache import KVCache
from kv_transfer.layout import KVLayout, make_group
group = make_group("history", "block", [("kv", 1, 4, "fp32", 256)])
cache = KVCache(KVLayout(block_tokens=4, groups=(group,)), num_blocks=2000, num_slots=1)
cache.pools["history"].fill_(1)
for pool in cache.pool_addresses():
    binding.see_memory(pool.name, pool.base, pool.unit_bytes * pool.num_units)
pools = {pool.name: pool.base for pool in cache.pool_addresses()}
print(msgspec.json.encode([binding.report(), pools]).decode(), flush=True)
sys.stdin.read()
"""


def test_bound_process_shows_every_thread_and_its_pools_pages_where_it_claims(tmp_path: Path) -> None:
    if count_fresh_pages(1).nodes != {0: 1}:
        pytest.skip("the kernel does not tell where pages lie, or has no node 0")
    sysfs = own_machine_with_nodes(tmp_path, 2)
    command = [sys.executable, "-c", HOLDS_A_POOL, str(sysfs)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said, pools = msgspec.json.decode(process.stdout.readline(), type=tuple[NumaBinding, dict[str, int]])
        masks = cpus_of_threads(process.pid)
        where = {name: memory_map_at(process.pid, base) for name, base in pools.items()}
        process.communicate(b"")
    assert (said.status, said.stray_threads) == ("bound", 0)
    # what the process says of itself, beside what the kernel says to others of it
    assert len(masks) >= 4 and set(masks) == {said.cpus}
    assert said.pages["history"] == {0: 2000}
    assert said.pages["scratch"][0] >= 32
    assert said.pages.keys() == {"fresh", "history", "scratch"}
    for policy, pages in where.values():
        assert (policy, pages.keys()) == ("bind:0", {0})
    assert where["history"][1][0] >= 2000


def cpus_of_threads(pid: int) -> list[str]:
    """Return Cpus_allowed_list of every thread of another process."""
    texts = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [line.split()[1] for text in texts for line in text.splitlines() if line.startswith("Cpus_allowed_list:")]


def memory_map_at(pid: int, address: int) -> tuple[str, dict[int, int]]:
    """Return memory policy, and pages by node, of what another process has mapped around `address`."""
    lines = [line.split() for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines()]
    words = max((line for line in lines if int(line[0], 16) <= address), key=lambda line: int(line[0], 16))
    return words[1], {int(m[1]): int(m[2]) for word in words if (m := re.fullmatch(r"N(\d+)=(\d+)", word))}


def test_thread_that_left_its_cpus_is_counted(tmp_path: Path) -> None:
    cpus = os.sched_getaffinity(0)
    binding = Binding(node=0, cpus=[max(cpus) + 1], topology=discover(own_machine_with_nodes(tmp_path, 2)))
    report = binding.report()
    assert report.status == "unverified"
    assert report.stray_threads == report.threads >= 1
    assert f"threads may leave CPUs {max(cpus) + 1}" in report.evidence


def test_pages_elsewhere_are_told_and_end_the_claim(tmp_path: Path) -> None:
    if count_fresh_pages(1).nodes != {0: 1}:
        pytest.skip("the kernel does not tell where pages lie, or has no node 0")
    topology = discover(own_machine_with_nodes(tmp_path, 2))
    binding = Binding(node=1, cpus=os.sched_getaffinity(0), topology=topology)  # bound nowhere: pages go to node 0
    report = binding.report()
    assert report.status == "unverified"
    assert "0 of 64 fresh pages on node 1, 64 on node 0" in report.evidence


def test_gpu_on_another_node_is_a_warning_with_the_remedy(eight_gpus: NumaTopology) -> None:
    binding = Binding(node=0, cpus=os.sched_getaffinity(0), topology=eight_gpus)
    binding.see_gpu("0000:01:00.0")
    assert binding.report().warnings == []
    binding.see_gpu("0000:03:00.0")
    (warning,) = binding.report().warnings
    assert "GPU 0000:03:00.0 is on NUMA node 1 and its rank on node 0" in warning
    assert "set numa_node: 1 for this group" in warning


NUMACTL = """#!/bin/sh
# knows nodes 0 and 1 only, as the real one knows what the kernel has
case "$2" in --membind=[01]) shift 2; exec "$@";; esac
echo "usage: numactl" >&2; exit 1
"""


def test_process_is_started_through_numactl_where_that_works(
    eight_gpus: NumaTopology, one_node: NumaTopology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    numactl = tmp_path / "numactl"
    numactl.write_text(NUMACTL)
    numactl.chmod(0o755)
    expected = f"{numactl} --physcpubind=16-31 --membind=1 {sys.executable}"
    assert runtime_environment("16-31", 1, topology=eight_gpus) == {"py_executable": expected}
    assert runtime_environment("16-31", 5, topology=eight_gpus) == {}  # Ray would start it for ever
    assert runtime_environment("", -1, topology=eight_gpus) == {}
    assert runtime_environment("0-3", 0, topology=one_node) == {}


def test_pages_are_counted_whole_and_untouched_ones_not_at_all() -> None:
    with mmap.mmap(-1, 100 * mmap.PAGESIZE) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        base = ctypes.addressof(anchor)
        assert count_pages(base, len(memory)).nodes == {}
        memory[5 * mmap.PAGESIZE + 7] = 9
        touched = count_pages(base, len(memory), touch=True)
        assert 25 <= sum(touched.nodes.values()) < 100
        assert (touched.asked, touched.total, memory[5 * mmap.PAGESIZE + 7]) == (100, 100, 9)
        memory.write(b"x" * len(memory))
        del anchor
        anchor = ctypes.c_char.from_buffer(memory)
        assert sum(count_pages(base, len(memory)).nodes.values()) == 100
        del anchor
    assert count_pages(0, 0).total == 0


def test_staging_memory_says_on_which_node_it_lies() -> None:
    staging, fd = host_staging.create(buffer_bytes=1 << 16, num_buffers=4)
    try:
        count = staging.count_pages()
        assert (count.error, sum(count.nodes.values())) == ("", (4 << 16) // os.sysconf("SC_PAGE_SIZE"))
        assert count.nodes.keys() <= {node.id for node in discover().nodes}
    finally:
        staging.close()
        os.close(fd)


def test_status_shows_the_evidence_and_what_to_do() -> None:
    numa: dict[str, Any] = {"status": "bound", "node": 0, "evidence": "4 threads on CPUs 0-3", "warnings": ["move it"]}
    assert numa_lines({"id": "decode-0", "ranks": [{"rank": 2, "numa": numa}]}) == [
        "decode-0 rank 2: NUMA bound: 4 threads on CPUs 0-3",
        "decode-0 rank 2: warning: move it",
    ]
