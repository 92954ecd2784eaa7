"""One worker group as Ray sees it: a leader actor and one actor per rank, started and ended together.

In order: `create` asks Ray for the actors, `start` begins their `run` once they exist, `read_address` waits for the
leader to listen, `deaths` tells who has ended and why, `end` returns when every process is gone. Then `create` again.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from deploy.actors import LEADER_CONCURRENCY, LeaderProcess, RankProcess
from deploy.local_ray import runtime_environment
from deploy.placement import Placement
from engine.config import EngineConfig
from engine.numa import NumaTopology

START_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
_SHARE = 0.001  # of a numa:N resource: it counts places, it does not ration them


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
    """Owns the actors of one worker group over all its lives; `port` stays, so that the router finds it again."""

    def __init__(
        self, placement: Placement, *, run_dir: Path, log_dir: Path, topology: NumaTopology, is_private: bool
    ) -> None:
        self.placement, self.topology, self.is_private = placement, topology, is_private
        self.run_dir, self.log_dir = run_dir, log_dir
        self.members: list[Member] = []
        self.url, self.port, self.generation = "", placement.config.port, 0
        self.num_starts = 0
        self.was_ready = False
        self.restarts: deque[float] = deque()
        self._actors: list[Any] = []
        self._log_paths: dict[str, Path] = {}
        self._address_call: Any = None
        self._bundles: Any = None

    @property
    def id(self) -> str:
        return self.placement.config.worker_id

    @property
    def config(self) -> EngineConfig:
        """The group's configuration; once the leader has a port, with that port."""
        return msgspec.structs.replace(self.placement.config, port=self.port)

    @property
    def runs(self) -> list[Any]:
        return [member.run for member in self.members]

    def create(self) -> None:
        """Ask Ray for one more life of the group; several groups may come up at the same time."""
        import ray

        self.num_starts += 1
        config = msgspec.json.encode(self.config)
        run_dir = str(self.run_dir / f"{self.id}.{self.num_starts}")
        logs = {"leader": self.log_dir / f"{self.id}.leader.log"}
        logs |= {f"rank {r}": self.log_dir / f"{self.id}.rank{r}.log" for r in range(self.config.ranks)}
        options = self._options()
        self._log_paths = logs
        self._actors = [
            ray.remote(LeaderProcess)
            .options(max_concurrency=LEADER_CONCURRENCY, **options(0))
            .remote(config, run_dir, str(logs["leader"]), not self.is_private)
        ]
        for rank in range(self.config.ranks):
            self._actors.append(
                ray.remote(RankProcess)
                .options(**options(1 + rank))
                .remote(config, run_dir, str(logs[f"rank {rank}"]), rank, self.placement.environment)
            )

    def start(self) -> None:
        """Begin the `run` of every actor. Raises StartFailed if Ray does not bring them up."""
        import ray

        try:
            pids = ray.get([actor.pid.remote() for actor in self._actors], timeout=START_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise StartFailed(f"{self.id}: Ray did not start its processes: {' '.join(str(error).split())}") from None
        self.members = [
            Member(f"{self.id} {name}", actor, actor.run.remote(), pid, path)
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
            self.members[0].actor.stop.remote()

    def end(self) -> None:
        """Kill what is left and return when the processes are gone (of this host: others are Ray's to end)."""
        import ray

        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        if self.is_private:
            kill_and_wait([member.pid for member in self.members])
        self.members, self._actors = [], []
        self._address_call = None

    def _options(self) -> Any:
        """Return a function of the member's index to its actor options."""
        import ray

        config = self.placement.config
        resource = {f"numa:{config.numa_node}": _SHARE} if config.numa_node >= 0 else {}
        base: dict[str, Any] = {"num_cpus": 0, "resources": resource}
        if environment := runtime_environment(config.cpus, config.numa_node, topology=self.topology):
            base["runtime_env"] = environment
        if self.is_private:
            return lambda index: base
        if self._bundles is None:  # rings are shared memory: a group never spans hosts
            bundle = resource or {"CPU": _SHARE}
            self._bundles = ray.util.placement_group([bundle] * (1 + config.ranks), strategy="STRICT_PACK")
            if not self._bundles.wait(START_TIMEOUT_S):
                raise StartFailed(f"{self.id}: no host of the Ray cluster offers {bundle}; see `ray status`")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return lambda index: {
            **base,
            "scheduling_strategy": strategy(self._bundles, placement_group_bundle_index=index),
        }


def kill_and_wait(pids: list[int]) -> None:
    """SIGKILL every process of `pids` that lives, and wait until each is gone."""
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
    """A zombie counts as gone: it holds no memory, port or descriptor, and its parent will collect it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
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
