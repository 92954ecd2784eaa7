"""Groups that join and leave, those that are given up, and the hosts they go to: decisions, without Ray."""

from __future__ import annotations

import argparse
import io
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from deploy.config import ClusterConfig, load_cluster_config
from deploy.group import Member
from deploy.host_wish import HostWish, take_wish
from deploy.hosts import Host, HostFacts
from deploy.joining import new_group
from deploy.membership import Membership
from deploy.progress import Progress
from deploy.ray_head import RayHead
from deploy.restarts import ClusterFailed
from deploy.router_control import Wanted
from engine.flags import ConfigError
from engine.numa import GpuPlace, NumaNode, NumaTopology

ORACLE = Path(__file__).resolve().parents[1] / "oracle" / "tiny"
YAML = """
dtype: float32
kv_cache_dtype: fp32
kv_cache_memory_gib: 0.05
prefill: {numa_node: 0, port: 7001, cpus: '0'}
decode: [{numa_node: 0}, {numa_node: 1, max_num_seqs: 4}]
"""
JOINED = YAML + "supervisor: {ray_address: auto, max_restarts: 1, restart_backoff_s: 0.001}\n"


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str = YAML) -> ClusterConfig:
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return load_cluster_config(argparse.Namespace(config=str(path), model=str(ORACLE)), {})

    return load


# ---------------------------------------------------------------- settings of a group that joins


def test_ray_cluster_group_that_joins_is_like_the_last_of_its_role_under_a_name_of_its_own(load) -> None:
    group, wish = new_group(load(), "decode", {}, used_ids={"decode-0", "decode-1", "decode-2"})
    assert (group.worker_id, group.numa_node, group.max_num_seqs, group.port) == ("decode-3", 1, 4, 0)
    assert not wish


def test_ray_cluster_group_that_joins_has_the_settings_it_was_given(load) -> None:
    group, _ = new_group(load(), "prefill", {"numa_node": "1", "max_num_seqs": 2}, used_ids={"prefill-0"})
    # the pattern's port is taken, and its CPUs are of another node
    assert (group.numa_node, group.max_num_seqs, group.port, group.cpus) == (1, 2, 0, "")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"block_size": 128}, "block_size: decode-1 has 256"),
        ({"num_block": 3}, "did you mean num_blocks"),
        ({"worker_id": "decode-0"}, "used before"),
        ({"node": "10.0.0.9"}, "a private Ray has this host only"),
        ({"max_model_len": 10**9}, "max_model_len"),
    ],
)
def test_ray_cluster_group_that_could_not_serve_is_refused(load, settings, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        new_group(load(), "decode", settings, used_ids={"decode-0", "decode-1"})


def test_ray_cluster_host_is_wished_for_by_address_or_by_what_it_offers(load) -> None:
    text = JOINED.replace("{numa_node: 0, port", "{node: 10.0.0.1, numa_node: 0, port")
    config = load(text.replace("{numa_node: 1, max", "{ray_resources: {big: 2}, numa_node: 1, max"))
    assert config.wishes["prefill-0"].all_resources == {"node:10.0.0.1": 0.001}
    assert config.wishes["decode-1"].all_resources == {"big": 2}
    assert not config.wishes["decode-0"]
    _, like_the_last = new_group(config, "decode", {}, used_ids=set())
    _, own = new_group(config, "decode", {"node": "10.0.0.2"}, used_ids=set())
    assert (like_the_last, own) == (HostWish(ray_resources={"big": 2}), HostWish(node="10.0.0.2"))


@pytest.mark.parametrize("wish", [{"node": 3}, {"ray_resources": ["big"]}, {"ray_resources": {"big": 0}}])
def test_ray_cluster_wish_that_is_none_is_refused_with_the_way_to_write_it(wish) -> None:
    with pytest.raises(ConfigError, match="ray_resources"):
        take_wish(dict(wish), where="file, decode")


def test_ray_cluster_gpus_of_a_group_that_left_are_the_next_ones(load) -> None:
    nodes = tuple(NumaNode(n, (n,), 0, (10, 20)) for n in (0, 1))
    topology = NumaTopology(nodes, tuple(GpuPlace(f"0000:0{n}:00.0", 1) for n in range(2)))
    host = Host(HostFacts(name="h", topology=topology, run_dir="/r", log_dir="/l"))
    groups = [
        new_group(load(), "decode", {"device": "cuda", "numa_node": 1, "gpu_memory_gib": 8}, used_ids=used)[0]
        for used in ({"decode-0", "decode-1"} | {f"decode-{n}" for n in range(2, last)} for last in (2, 3, 4))
    ]
    assert [host.place(group).gpus for group in groups[:2]] == [(0,), (1,)]
    assert host.place(groups[0]).gpus == (0,)  # its next life
    with pytest.raises(ConfigError, match="0 GPUs are free"):
        host.place(groups[2])
    host.release("decode-2")
    assert host.place(groups[2]).gpus == (0,)


def test_ray_cluster_leaders_of_one_host_have_ports_of_their_own(load) -> None:
    topology = NumaTopology((NumaNode(0, (0,), 0, (10,)),))
    one, another = (Host(HostFacts(name=name, topology=topology, run_dir="/r", log_dir="/l")) for name in "hi")
    used = {"prefill-0", "decode-0", "decode-1"}
    prefill, decode = (new_group(load(), role, {"port": 9001}, used_ids=used)[0] for role in ("prefill", "decode"))
    one.place(prefill)
    with pytest.raises(ConfigError, match="port 9001: given to prefill-1 and to decode-2, which are on one host"):
        one.place(decode)
    another.place(decode)
    assert one.place(prefill).config.port == 9001  # its next life


def test_ray_cluster_group_that_nobody_gave_a_node_gets_one_beside_those_that_are_there(load) -> None:
    nodes = tuple(NumaNode(n, (n,), 0, (10, 20)) for n in (0, 1))
    host = Host(HostFacts(name="h", topology=NumaTopology(nodes), run_dir="/r", log_dir="/l"))
    used = {"prefill-0", "decode-0", "decode-1"}
    prefill, _ = new_group(load(), "prefill", {"numa_node": 0}, used_ids=used)
    decode, _ = new_group(load(), "decode", {"numa_node": -1}, used_ids=used)
    host.place(prefill)
    assert host.place(decode, chooses_node=True).config.numa_node == 1
    host.release(decode.worker_id)
    assert host.place(decode).config.numa_node == -1


# ---------------------------------------------------------------- a life in the cluster


class FakeGroup:
    """Stands for deploy.group.Group; `steps` is what was done to it. Its processes end when a test says so."""

    placement = None
    url, was_ready, num_starts, generation = "", True, 1, 7

    def __init__(self, worker_id: str) -> None:
        self.id, self.steps = worker_id, list[str]()
        self.url = f"http://127.0.0.1:1/{worker_id}"
        self.config = SimpleNamespace(role=worker_id.split("-")[0], drain_timeout_s=30.0)
        self.host = SimpleNamespace(agent=None, tail=lambda path: "")
        self.restarts: deque[float] = deque()
        self.members = [Member(f"{worker_id} leader", None, object(), 1, Path("x"))]

    def describe(self) -> str:
        return "here"

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.steps.append(name)


class Cluster:
    """A Membership of fake groups behind a fake router. requests: what the router counts, by worker id."""

    def __init__(self, config: ClusterConfig) -> None:
        self.requests: dict[str, int] = {}
        self.wanted: dict[str, Wanted] = {}
        self.has_head = True
        hosts = SimpleNamespace(here=None, head=SimpleNamespace(is_alive=lambda: self.has_head), watch=lambda _: None)
        self.members = Membership(
            config,
            hosts,
            control=SimpleNamespace(sync=self._sync),
            progress=Progress(Console(file=io.StringIO())),
            stop=threading.Event(),
        )
        self.groups = {name: FakeGroup(name) for name in ("prefill-0", "decode-0", "decode-1")}
        self.members.groups = list(self.groups.values())
        for group in self.groups.values():
            group.url = ""  # nobody is told of anybody's death over HTTP
        self.members._synced_at = time.monotonic() + 1000

    def _sync(self, wanted: dict[str, Wanted]) -> dict[str, int]:
        self.wanted = wanted
        return {url: self.requests.get(url.rsplit("/", 1)[-1], 0) for url in wanted}

    def look(self) -> None:
        self.members._synced_at = 0.0
        self.members.tick()

    def kill(self, name: str) -> None:
        group = self.groups[name]
        self.members.restart(group, [(group.members[0], "killed")])


@pytest.fixture
def cluster(load):
    cluster = Cluster(load(JOINED))
    yield cluster
    cluster.members.close()


def test_ray_cluster_group_drains_leaves_the_router_ends_and_frees_its_place(cluster) -> None:
    group = cluster.groups["decode-0"]
    group.url = "http://127.0.0.1:1/decode-0"
    cluster.requests["decode-0"] = 2
    cluster.members.drain("decode-0", 0)
    cluster.look()
    assert cluster.wanted[group.url].is_draining
    assert group.steps == []
    cluster.requests["decode-0"] = 0
    cluster.look()
    assert group.url not in cluster.wanted
    assert group.steps == ["ask_to_stop"]
    group.url = ""
    cluster.members._part(group, "drained")
    assert group.steps == ["ask_to_stop", "end", "release"]
    assert cluster.members.left == {"decode-0": "drained"}
    with pytest.raises(ConfigError, match="'decode-0': has left: drained; the cluster has prefill-0, decode-1"):
        cluster.members.drain("decode-0", 0)


def test_ray_cluster_drain_that_takes_too_long_goes_on_without_what_still_runs(cluster) -> None:
    group = cluster.groups["decode-0"]
    group.url = "http://127.0.0.1:1/decode-0"
    cluster.requests["decode-0"] = 2
    cluster.members.drain("decode-0", 1e-6)
    cluster.look()
    assert group.steps == ["ask_to_stop"]
    assert group.url not in cluster.wanted  # the router resumes elsewhere what it had there
    group.url = ""


def test_ray_cluster_does_not_stop_a_group_that_it_has_no_count_of(cluster) -> None:
    """The router does not answer: it may be starting again, or busy."""
    group = cluster.groups["decode-0"]
    group.url = "http://127.0.0.1:1/decode-0"
    cluster.members._control = SimpleNamespace(sync=lambda wanted: None)
    cluster.members.drain("decode-0", 0)
    cluster.look()
    assert group.steps == []
    group.url = ""


@pytest.mark.parametrize(
    ("name", "problem"), [("prefill-0", "isthmus add prefill"), ("decode-9", "decode-0, decode-1")]
)
def test_ray_cluster_drain_that_can_not_be_is_refused_with_the_remedy(cluster, name, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        cluster.members.drain(name, 0)
    assert cluster.members.left == {}


def test_ray_cluster_keeps_the_last_of_a_role_also_when_the_other_is_leaving(cluster) -> None:
    cluster.members.drain("decode-0", 0)
    with pytest.raises(ConfigError, match="the only decode group that is to stay"):
        cluster.members.drain("decode-1", 0)


def test_ray_cluster_drains_no_group_that_serves_before_another_has_been_ready(cluster) -> None:
    """It could still fail to load, and requests would be refused until it has."""
    cluster.groups["decode-1"].was_ready = False
    with pytest.raises(ConfigError, match="the only decode group that serves; decode-1 has not been ready yet"):
        cluster.members.drain("decode-0", 0)
    cluster.members.drain("decode-1", 0)


def test_ray_cluster_drain_is_hurried_by_asking_again_with_a_timeout(cluster) -> None:
    group = cluster.groups["decode-0"]
    group.url = "http://127.0.0.1:1/decode-0"
    cluster.requests["decode-0"] = 2
    cluster.members.drain("decode-0", 0)
    cluster.members.drain("decode-0", 1e-6)
    cluster.members.drain("decode-0", 0)  # takes nothing back
    cluster.look()
    assert group.steps == ["ask_to_stop"]
    group.url = ""


def test_ray_cluster_group_that_dies_while_it_drains_leaves_with_its_ranks_reason(cluster, monkeypatch) -> None:
    ended = [SimpleNamespace(name="decode-0 leader"), SimpleNamespace(name="decode-0 rank 1")]
    ray = SimpleNamespace(wait=lambda runs, **_: (runs, []), exceptions=SimpleNamespace(RayError=OSError))
    monkeypatch.setitem(sys.modules, "ray", ray)
    for group in cluster.groups.values():
        group.runs = [1]
    cluster.members.drain("decode-0", 0)
    cluster.groups["decode-0"].deaths = lambda _: [(ended[0], "returned 1"), (ended[1], "was killed")]
    cluster.members.collect_deaths(0)
    assert cluster.members.left == {"decode-0": "died while it drained: decode-0 rank 1: was killed"}


def test_ray_cluster_gives_up_a_group_that_dies_too_often_if_another_of_its_role_serves(cluster) -> None:
    cluster.groups["decode-0"].restarts.append(time.monotonic())  # one was all that it may
    cluster.kill("decode-0")
    assert cluster.groups["decode-0"].steps == ["end", "release"]
    assert "max_restarts = 1" in cluster.members.left["decode-0"]
    cluster.groups["prefill-0"].restarts.append(time.monotonic())
    with pytest.raises(ClusterFailed, match="max_restarts = 1"):
        cluster.kill("prefill-0")


def test_ray_cluster_without_its_head_goes_on_with_who_is_left(cluster) -> None:
    cluster.has_head = False
    cluster.kill("decode-0")
    assert "create" not in cluster.groups["decode-0"].steps
    assert "head" in cluster.members.left["decode-0"]
    with pytest.raises(ClusterFailed, match="head"):
        cluster.kill("decode-1")


def test_ray_cluster_head_is_alive_as_long_as_it_accepts_connections() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        head = RayHead(f"127.0.0.1:{listener.getsockname()[1]}")
        assert head.is_alive()
    head._asked_at -= 10
    assert not head.is_alive()
