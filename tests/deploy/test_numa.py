"""engine/numa.py and deploy/placement.py on invented machines, and on the one we run on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.placement import place
from engine.config import EngineConfig
from engine.flags import ConfigError
from engine.numa import NumaTopology, discover, format_cpu_list, parse_cpu_list, touched_page_nodes
from router.protocol import NumaBinding

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def make_machine(root: Path, *, nodes: list[str], gpu_nodes: list[int]) -> Path:
    """Write a sysfs tree: one CPU list per node, one GPU per entry of gpu_nodes, and a device that is no GPU."""
    base = root / "devices/system/node"
    write(base / "online", format_cpu_list(range(len(nodes))))
    for node, cpus in enumerate(nodes):
        write(base / f"node{node}/cpulist", cpus)
        write(base / f"node{node}/distance", " ".join("10" if other == node else "32" for other in range(len(nodes))))
        write(base / f"node{node}/meminfo", f"Node {node} MemTotal:       1048576 kB\nNode {node} MemFree:  5 kB")
    for index, node in enumerate(gpu_nodes):
        device = root / f"bus/pci/devices/0000:{index + 1:02x}:00.0"
        write(device / "vendor", "0x10de")
        write(device / "class", "0x030200")
        write(device / "numa_node", str(node))
    network_card = root / "bus/pci/devices/0000:00:1f.0"
    write(network_card / "vendor", "0x8086")
    write(network_card / "class", "0x020000")
    return root


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
    assert (len(eight_gpus.nodes), second.id, second.memory_bytes, second.distances) == (2, 1, 1 << 30, (32, 10))
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


def test_too_few_gpus_on_the_node_are_refused(eight_gpus: NumaTopology) -> None:
    with pytest.raises(ConfigError, match="ranks = 5 with device cuda, but 4 GPUs are free on NUMA node 0"):
        place((group(ranks=5, numa_node=0, device="cuda"),), eight_gpus)


def test_firmware_that_tells_no_gpu_node_does_not_stop_placement(tmp_path: Path) -> None:
    topology = discover(make_machine(tmp_path, nodes=["0-3", "4-7"], gpu_nodes=[-1, -1]))
    assert place((group(numa_node=1, device="cuda"),), topology)[0].gpus == (0,)


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


def bind_in_a_process(*, node: int, cpus: str, sysfs: Path | None = None, threads: int = 3) -> tuple[NumaBinding, list]:
    """Bind a process that already has threads; return what it reports, and the affinity the kernel shows for each."""
    code = f"""
import json, os, threading
from pathlib import Path
import msgspec
from engine import numa
done = threading.Event()
others = [threading.Thread(target=done.wait) for _ in range({threads})]
[thread.start() for thread in others]
try:
    binding = numa.bind(node={node}, cpus={cpus!r}, sysfs=Path({str(sysfs or "/sys")!r}))
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
    if touched_page_nodes(1) != ([0], ""):
        pytest.skip("the kernel does not tell where pages lie, or has no node 0")
    binding, _ = bind_in_a_process(node=0, cpus="", sysfs=own_machine_with_nodes(tmp_path, 2))
    assert (binding.status, binding.node) == ("bound", 0)
    assert "64 of 64 fresh pages on node 0" in binding.evidence


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
