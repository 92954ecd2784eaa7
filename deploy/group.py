"""One worker group as Ray sees it: a leader actor and one actor per rank, started and ended together.

In order: `create` asks Ray for the actors, `start` begins their `run` once they exist, `read_address` waits for the
leader to listen, `deaths` tells who has ended and why, `end` returns when every process is gone. Then `create` again,
or `release` when the group leaves for good.
"""

from __future__ import annotations

import textwrap
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from deploy.actors import LEADER_CONCURRENCY, LeaderProcess, RankProcess
from deploy.host_wish import HostWish
from deploy.hosts import Host, Hosts
from deploy.placement import Placement
from engine.config import EngineConfig
from engine.flags import ConfigError

START_TIMEOUT_S = 60.0
POLL_S = 0.25
KILL_TIMEOUT_S = 10.0
HEAD_LOST = "Ray's head does not answer, and without it nothing can be started"
_SHARE = 0.001  # of a resource such as numa:N: it says where, it does not ration


class StartFailed(RuntimeError):
    """Ray did not bring up the processes of a group."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process. run: the never-ending call whose end is the news of its death."""

    name: str
    actor: Any
    run: Any
    pid: int
    log_path: Path


class Group:
    """Owns the actors of one worker group over all its lives; `port` stays, so that the router finds it again.

    Under a private Ray it runs on this host; else Ray finds a host that has what `wish` and its NUMA node ask for, and
    keeps the place in a placement group. num_starts counts its lives and is part of its actors' names, such as
    `decode-0.rank1.3`; generation is what the leader of this life tells everybody.
    """

    def __init__(
        self,
        config: EngineConfig,
        hosts: Hosts,
        *,
        is_private: bool,
        wish: HostWish | None = None,
        chooses_node: bool = False,
    ) -> None:
        """chooses_node: nobody has set its numa_node, so its host gives it one."""
        self._config, self._hosts, self.is_private = config, hosts, is_private
        self._chooses_node = chooses_node
        self._wish = wish or HostWish()
        self.host: Host = hosts.here
        self.placement: Placement | None = None
        self.members: list[Member] = []
        self.url, self.port, self.generation = "", config.port, 0
        self.num_starts = 0
        self.was_ready = False
        self.restarts: deque[float] = deque()
        self._actors: list[Any] = []
        self._log_paths: dict[str, Path] = {}
        self._address_call: Any = None
        self._bundles: Any = None

    @property
    def id(self) -> str:
        return self._config.worker_id

    @property
    def config(self) -> EngineConfig:
        """The group's configuration, as placed; once the leader has a port, with that port."""
        config = self.placement.config if self.placement else self._config
        return msgspec.structs.replace(config, port=self.port)

    @property
    def runs(self) -> list[Any]:
        return [member.run for member in self.members]

    def describe(self) -> str:
        """Say where it runs."""
        where = self.placement.describe() if self.placement else "not placed"
        return where if self.is_private else f"{self.host.facts.name}, {where}"

    def place(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Find host, CPUs and GPUs. Raises StartFailed if no host will do, ConfigError if the one found won't."""
        if not self.is_private:
            host = self._find_host(meanwhile)
            if host is not self.host:
                self.host.release(self.id)
            self.host = host
        self.placement = self.host.place(self._config, chooses_node=self._chooses_node)

    def create(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Ask Ray for one more life of the group; several groups may come up at the same time.

        meanwhile: called while it waits for a place. Raises StartFailed if there is none.
        """
        import ray

        if not self._hosts.head.is_alive():
            raise StartFailed(f"{self.id}: {HEAD_LOST}")
        if self.placement is None or not self.is_private:
            try:
                self.place(meanwhile)
            except ConfigError as error:
                raise StartFailed(f"{self.host.facts.name}: {error}") from None
        assert self.placement is not None
        self.num_starts += 1
        config = msgspec.json.encode(self.config)
        run_dir = str(self.host.run_dir / f"{self.id}.{self.num_starts}")
        names = ["leader", *(f"rank{rank}" for rank in range(self.config.ranks))]
        self._log_paths = {name: self.host.log_dir / f"{self.id}.{name}.log" for name in names}
        try:
            base = self._options()
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._hosts.forget(self.host)
            raise StartFailed(f"{self.host.facts.name} does not answer: {_first_words(error)}") from None
        leader, *ranks = ({"name": f"{self.id}.{name}.{self.num_starts}", **base} for name in names)
        self._actors = [
            ray.remote(LeaderProcess)
            .options(max_concurrency=LEADER_CONCURRENCY, **leader)
            .remote(config, run_dir, str(self._log_paths["leader"]), not self.is_private)
        ]
        for rank, options in enumerate(ranks):
            log_path = str(self._log_paths[f"rank{rank}"])
            self._actors.append(
                ray.remote(RankProcess)
                .options(**options)
                .remote(config, run_dir, log_path, rank, self.placement.environment)
            )

    def start(self) -> None:
        """Begin the `run` of every actor. Raises StartFailed if Ray does not bring them up."""
        import ray

        try:
            pids = ray.get([actor.pid.remote() for actor in self._actors], timeout=START_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise StartFailed(f"{self.id}: Ray did not start its processes: {_first_words(error)}") from None
        self.members = [
            Member(f"{self.id} {name.replace('rank', 'rank ')}", actor, actor.run.remote(), pid, path)
            for (name, path), actor, pid in zip(self._log_paths.items(), self._actors, pids, strict=True)
        ]
        self._address_call = self._actors[0].address.remote()

    def read_address(self, timeout_s: float) -> bool:
        """Wait for the leader to listen; sets url, port and generation. Returns False if it does not yet.

        The leader's death is not told here but by `deaths`.
        """
        import ray

        if self._address_call is None:
            return True
        done, _ = ray.wait([self._address_call], timeout=timeout_s)
        if not done:
            return False
        try:
            address = ray.get(self._address_call)
        except ray.exceptions.RayError:
            return False
        self._address_call = None
        self.url, self.generation = address["url"], address["generation"]
        self.port = int(self.url.rsplit(":", 1)[1])
        return True

    def deaths(self, ended: list[Any]) -> list[tuple[Member, str]]:
        """Return the members whose `run` is among `ended`, each with the reason."""
        return [(member, _reason(member)) for member in self.members if member.run in ended]

    def ask_to_stop(self) -> None:
        """Ask the leader to drain, end its ranks, and return."""
        if self.members:
            self.members[0].actor.stop.remote()  # from process to process: Ray's head has no part in it

    def end(self) -> None:
        """Kill what is left and return when the processes are gone."""
        import ray

        if self._actors and self._hosts.head.is_alive():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
        if self.members:
            self.host.kill([member.pid for member in self.members])
        self.members, self._actors = [], []
        self._address_call = None

    def release(self) -> None:
        """Give the place back to Ray and the GPUs to others: the group has left for good."""
        import ray

        self.host.release(self.id)
        if self._bundles is not None and self._hosts.head.is_alive():
            ray.util.remove_placement_group(self._bundles)
            self._bundles = None

    def _options(self) -> dict[str, Any]:
        """Return the options of each of the group's actors."""
        import ray

        assert self.placement is not None
        config = self.placement.config
        options: dict[str, Any] = {"num_cpus": 0, "resources": self._numa}
        if environment := self.host.runtime_environment(config.cpus, config.numa_node):
            options["runtime_env"] = environment
        if self._bundles is not None:
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            options["scheduling_strategy"] = strategy(self._bundles, placement_group_bundle_index=0)
        return options

    @property
    def _numa(self) -> dict[str, float]:
        """What each process takes of Ray: of a node that is configured; one is chosen only when the host is known."""
        return {f"numa:{self._config.numa_node}": _SHARE} if self._config.numa_node >= 0 else {}

    def _find_host(self, meanwhile: Callable[[], None]) -> Host:
        """Return the host that Ray keeps a place for the group on. Raises StartFailed."""
        import ray

        processes = 1 + self._config.ranks
        # one bundle, hence one host: rings are shared memory, and ranks exchange through it
        bundle = {name: share * processes for name, share in self._numa.items()}
        bundle |= {name: amount for name, amount in self._wish.all_resources.items()}
        bundle = bundle or {"memory": 1.0}  # every host has some; CPUs may all be withheld from Ray
        try:
            if self._bundles is None:
                self._bundles = ray.util.placement_group([bundle], strategy="STRICT_PACK", name=self.id)
            deadline = time.monotonic() + START_TIMEOUT_S
            while not self._bundles.wait(POLL_S):
                meanwhile()
                if time.monotonic() > deadline:
                    offered = ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items())
                    raise StartFailed(
                        f"{self.id}: no host of the Ray cluster has {offered} free; `ray status` says what there is"
                    )
            # Ray itself moves the place to another host when the one it was on dies
            table = ray.util.placement_group_table(self._bundles)
            return self._hosts.at(table["bundles_to_node_id"][0])
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise StartFailed(f"{self.id}: no host found: {_first_words(error)}") from None


def _first_words(error: Exception) -> str:
    """Return the beginning of what may be a page."""
    return textwrap.shorten(str(error), 240, placeholder=" ...")


def kill_and_wait(pids: list[int]) -> None:
    """SIGKILL every process of `pids` that lives here, and wait until each is gone."""
    processes = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            process.kill()
            processes.append(process)
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while any(is_alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def is_alive(process: psutil.Process) -> bool:
    """A zombie counts as gone: it holds no memory, port or descriptor, and its parent will collect it. So does one that
    is being collected, which a busy machine may show for seconds.
    """
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _reason(member: Member) -> str:
    """Say why the member's `run` ended."""
    import ray

    try:
        ray.get(member.run, timeout=0)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return f"{type(cause).__name__}: {cause}"
    except ray.exceptions.RayActorError:
        return "its process was killed or crashed"
    except ray.exceptions.RayError as error:
        return " ".join(str(error).split())
    return "it ended by itself"
