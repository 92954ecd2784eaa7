"""The hosts that groups run on: what each offers, where its files go, and what is done there on our behalf.

Under a private Ray there is one, this one. Under a Ray that was joined, a small actor on every host that a group came
to (`HostAgent`) says what the host is, keeps the run directories and logs of its groups, and watches their processes.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from deploy.local_ray import runtime_environment
from deploy.placement import Placement, choose_nodes, place
from deploy.ray_head import RayHead
from deploy.state import state_directory
from deploy.watchdog import Watchdog
from engine.config import EngineConfig
from engine.flags import ConfigError
from engine.numa import NumaTopology, discover

AGENT_TIMEOUT_S = 60.0
_TAIL_LINES = 15


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """name: for people.   run_dir, log_dir: of this cluster, there."""

    name: str
    topology: NumaTopology
    run_dir: str
    log_dir: str


class HostAgent:
    """Runs inside a Ray actor on one host, for one cluster. port: the router's, which names the cluster's logs."""

    def __init__(self, port: int) -> None:
        import ray

        self._name = f"{ray.util.get_node_ip_address()} ({socket.gethostname()})"  # type: ignore[no-untyped-call]
        self._run_dir = Path(tempfile.mkdtemp(prefix="isthmus-", dir="/tmp"))
        self._log_dir = state_directory(os.environ) / str(port) / "logs"
        self._targets: list[tuple[str, int, str]] = []
        self._watchdog = Watchdog(lambda: self._targets, say=lambda text: print(text, flush=True))
        self._watchdog.start()

    def facts(self) -> HostFacts:
        return HostFacts(name=self._name, topology=discover(), run_dir=str(self._run_dir), log_dir=str(self._log_dir))

    def runtime_environment(self, cpus: str, node: int) -> dict[str, Any]:
        """See local_ray.runtime_environment: whether numactl can bind is found out where it will have to."""
        return runtime_environment(cpus, node, topology=discover())

    def watch(self, targets: list[tuple[str, int, str]]) -> None:
        """Kill those of `targets` that get stuck, from now on; see deploy.watchdog."""
        self._targets = targets

    def kill(self, pids: list[int]) -> None:
        """Kill processes of this host, stopped ones too; return when they are gone."""
        from deploy.group import kill_and_wait

        kill_and_wait(pids)

    def tail(self, path: str) -> str:
        return tail(Path(path))

    def leave(self, ends: bool) -> None:
        """Take away the run directory. ends: this process, too, soon: there is no head that would end it."""
        self._watchdog.stop()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        if ends:
            threading.Timer(0.5, os._exit, (0,)).start()


@dataclass(eq=False)
class Host:
    """What `isthmus up` knows of one host. agent: None: it is this process's own.

    placements: of the groups that are here, by worker id.
    """

    facts: HostFacts
    agent: Any = None
    placements: dict[str, Placement] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return Path(self.facts.run_dir)

    @property
    def log_dir(self) -> Path:
        return Path(self.facts.log_dir)

    def place(self, config: EngineConfig, *, chooses_node: bool = False) -> Placement:
        """Give a group its CPUs and GPUs here; those it has already, if it is here. Raises ConfigError if it can't.

        chooses_node: nobody has set its numa_node; it gets one beside those that are here.
        """
        if config.worker_id not in self.placements:
            taken = {gpu for placement in self.placements.values() for gpu in placement.gpus}
            others = [placement.config for placement in self.placements.values()]
            for other in others:
                if config.port and config.port == other.port:
                    raise ConfigError(
                        f"port {config.port}: given to {other.worker_id} and to {config.worker_id}, which are on one "
                        "host; give each its own, or none"
                    )
            unset = {config.worker_id} if chooses_node else set()
            config = choose_nodes([*others, config], self.facts.topology, unset=unset)[-1]
            (self.placements[config.worker_id],) = place((config,), self.facts.topology, taken=taken)
        return self.placements[config.worker_id]

    def release(self, worker_id: str) -> None:
        """Take back what a group has here: it has left."""
        self.placements.pop(worker_id, None)

    def runtime_environment(self, cpus: str, node: int) -> dict[str, Any]:
        if self.agent is None:
            return runtime_environment(cpus, node, topology=self.facts.topology)
        import ray

        found: dict[str, Any] = ray.get(self.agent.runtime_environment.remote(cpus, node), timeout=AGENT_TIMEOUT_S)
        return found

    def kill(self, pids: list[int]) -> None:
        """Kill processes there, and return when they are gone, or when nobody there answers."""
        if self.agent is None:
            from deploy.group import kill_and_wait

            kill_and_wait(pids)
            return
        import ray

        try:
            ray.get(self.agent.kill.remote(pids), timeout=AGENT_TIMEOUT_S)
        except ray.exceptions.RayError:
            return  # the host is gone, and they with it; or its agent, and then Ray ends them

    def tail(self, path: Path) -> str:
        """Return the last lines of a log there, indented; "" if it can't be read."""
        if self.agent is None:
            return tail(path)
        import ray

        try:
            return str(ray.get(self.agent.tail.remote(str(path)), timeout=AGENT_TIMEOUT_S))
        except ray.exceptions.RayError:
            return ""


class Hosts:
    """The hosts of a cluster. `here` is this one; under a joined Ray others come up as groups are placed on them."""

    def __init__(self, here: Host, *, port: int) -> None:
        self.here = here
        self.head = RayHead()
        self._port = port
        self._by_node: dict[str, Host] = {}
        self._lock = threading.Lock()

    def at(self, node_id: str) -> Host:
        """Return the host that Ray knows as `node_id`. Raises RayError or TimeoutError if nobody answers there."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._lock:
            if node_id not in self._by_node:
                strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
                agent: Any = (
                    ray.remote(HostAgent)
                    .options(name=f"host.{node_id[:8]}", num_cpus=0, max_concurrency=4, scheduling_strategy=strategy)
                    .remote(self._port)
                )
                facts = ray.get(agent.facts.remote(), timeout=AGENT_TIMEOUT_S)
                self._by_node[node_id] = Host(facts, agent)
            return self._by_node[node_id]

    def forget(self, host: Host) -> None:
        """Drop a host that did not answer: its agent is started anew when a group comes to it again."""
        import ray

        with self._lock:
            self._by_node = {node_id: known for node_id, known in self._by_node.items() if known is not host}
        if host.agent is not None and self.head.is_alive():
            ray.kill(host.agent, no_restart=True)

    def watch(self, targets: dict[int, list[tuple[str, int, str]]]) -> None:
        """Tell each host's watchdog what runs there, by id() of the host."""
        for host in self._by_node.values():
            host.agent.watch.remote(targets.get(id(host), []))

    def leave(self) -> None:
        """Let every host take away what the cluster has left there."""
        import ray

        calls = [host.agent.leave.remote(not self.head.is_alive()) for host in self._by_node.values()]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=5)


def tail(path: Path) -> str:
    """Return the last lines of a log, indented; "" if it can't be read."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in lines)
