"""Membership: the groups of a running cluster. They start, are started again, join, drain and leave.

A group whose process dies is ended and started again as one, on the same port and with a new generation; its peers are
told that the old generation is dead. One that dies too often ends the cluster, unless another of its role serves: then
it is given up. One that is drained gets nothing new, and leaves when nothing depends on it any more:

    router gives it nothing new -> its requests end -> router forgets it -> leader and ranks end -> Ray's place is free
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from deploy.config import ClusterConfig
from deploy.group import HEAD_LOST, Group, Member, StartFailed
from deploy.hosts import Hosts
from deploy.joining import new_group
from deploy.peers import Peers
from deploy.progress import Progress
from deploy.restarts import ClusterFailed, GivenUp, Stopped, admit_restart
from deploy.router_control import RouterControl, Wanted
from engine.flags import ConfigError
from router.protocol import WorkerRole

POLL_S = 0.25
SYNC_S = 1.0
RANK_END_S = 5.0


@dataclass
class _Leaving:
    """How far a drained group is. deadline: when what still runs there goes on elsewhere.   kill_at: when it is ended.

    Both of time.monotonic(); None: not set.
    """

    deadline: float | None
    kill_at: float | None = None

    @property
    def is_stopping(self) -> bool:
        return self.kill_at is not None


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """What `isthmus add` and `drain` are told of a group. num_requests: that depend on it, as the router counts."""

    worker_id: str
    role: str
    url: str
    where: str
    is_draining: bool
    num_requests: int


class Membership:
    """Owns the groups. Everything but `describe`, `watched` and `left` is for the main thread alone."""

    def __init__(
        self,
        config: ClusterConfig,
        hosts: Hosts,
        *,
        control: RouterControl,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        self._config, self._hosts, self._control = config, hosts, control
        self._progress, self._stop = progress, stop
        self._is_private = not config.supervisor.ray_address
        self.groups = [
            Group(
                group,
                hosts,
                is_private=self._is_private,
                wish=config.wishes.get(group.worker_id),
                chooses_node=group.worker_id in config.without_node,
            )
            for group in config.groups
        ]
        self.left: dict[str, str] = {}  # worker ids of groups that have left, and how
        self._added: set[str] = set()
        self._leaving: dict[str, _Leaving] = {}
        self._requests: dict[str, int] = {}
        self._synced_at = 0.0
        self._has_head = True
        self.meanwhile: Callable[[], None] = lambda: None  # what else must not wait while a group is waited for
        self._peers = Peers()

    # ------------------------------------------------------------ what there is

    @property
    def has_head(self) -> bool:
        """Whether Ray's head answers; True before Ray is started."""
        return self._has_head

    @property
    def drain_s(self) -> float:
        return max((group.config.drain_timeout_s for group in self.groups), default=0.0)

    def serving(self, role: str) -> list[Group]:
        """Return the groups of a role that are to stay."""
        return [group for group in self.groups if group.config.role == role and group.id not in self._leaving]

    def urls(self, role: str) -> list[str]:
        return [group.url for group in self.serving(role)]

    def describe(self) -> list[GroupState]:
        return [
            GroupState(
                worker_id=group.id,
                role=group.config.role,
                url=group.url,
                where=group.describe(),
                is_draining=group.id in self._leaving,
                num_requests=self._requests.get(group.url, 0),
            )
            for group in [*self.groups]
        ]

    def watched(self) -> list[tuple[str, int, str]]:
        """Return name, pid and health URL (of leaders) of every process on this host."""
        return [target for group in [*self.groups] if group.host.agent is None for target in _targets(group)]

    # ------------------------------------------------------------ starting

    def start(self) -> None:
        """Bring every group up to where its leader listens. Raises StartFailed, ClusterFailed or Stopped."""
        for group in self.groups:
            group.create(self._raise_if_stopped)
        for group in self.groups:
            self._start_group(group)
        self._await_addresses([*self.groups])

    def _start_group(self, group: Group) -> None:
        group.start()
        pids = ", ".join(f"{member.name.removeprefix(group.id + ' ')} pid {member.pid}" for member in group.members)
        self._progress.say(f"{group.id}: {group.describe()}")
        for warning in group.placement.warnings if group.placement and group.num_starts == 1 else ():
            self._progress.problem(warning)
        self._progress.say(f"{group.id}: {pids}")

    def _await_addresses(self, groups: list[Group]) -> None:
        for group in groups:
            while not group.read_address(POLL_S):
                self._look_after_others(group)
        self._tell_watchdogs()

    def _look_after_others(self, group: Group) -> None:
        """Do what must not wait while `group` is waited for. Raises StartFailed if it has left meanwhile."""
        self._raise_if_stopped()
        self.collect_deaths(0)
        self.tick()
        self.meanwhile()
        if group.id in self.left:
            raise StartFailed(f"{group.id}: has left")

    def _tell_watchdogs(self) -> None:
        by_host: dict[int, list[tuple[str, int, str]]] = {}
        for group in self.groups:
            if group.host.agent is not None:
                by_host.setdefault(id(group.host), []).extend(_targets(group))
        self._hosts.watch(by_host)

    # ------------------------------------------------------------ joining and leaving

    def add(self, role: WorkerRole, settings: Mapping[str, Any]) -> str:
        """Start one more group and tell the router; return its worker id. It loads, links and warms up from then on.

        Raises ConfigError for settings that can't be, StartFailed if its processes don't come up.
        """
        used_ids = {group.id for group in self.groups} | self.left.keys()
        config, wish = new_group(self._config, role, settings, used_ids=used_ids)
        chooses_node = "numa_node" not in settings and config.numa_node < 0
        group = Group(config, self._hosts, is_private=self._is_private, wish=wish, chooses_node=chooses_node)
        if self._is_private:
            group.place()
        self._added.add(group.id)
        self.groups.append(group)
        try:
            group.create(lambda: self._look_after_others(group))
            self._start_group(group)
            self._await_addresses([group])
        except StartFailed as error:
            if group.id not in self.left:
                self._part(group, str(error))
        if group.id in self.left:
            raise StartFailed(self.left[group.id])
        self._sync()
        return group.id

    def drain(self, worker_id: str, timeout_s: float) -> None:
        """Begin to drain a group. timeout_s: after which what runs there is resumed elsewhere; 0: never.

        Asked for a second time, it only sets the timeout. Raises ConfigError if there is none of that name, or no other
        of its role, or none that has been ready.
        """
        group = next((group for group in self.groups if group.id == worker_id), None)
        if group is None:
            known = ", ".join(group.id for group in self.groups)
            how = self.left[worker_id].split("\n")[0] if worker_id in self.left else ""
            problem = f"has left: {how}" if how else "there is none of that name"
            raise ConfigError(f"worker {worker_id!r}: {problem}; the cluster has {known}")
        deadline = time.monotonic() + timeout_s if timeout_s else None
        if leaving := self._leaving.get(worker_id):
            leaving.deadline = deadline if deadline is not None else leaving.deadline  # asked for once more, in a hurry
            return
        role = group.config.role
        if len(self.serving(role)) == 1:
            raise ConfigError(
                f"worker {worker_id!r}: the only {role} group that is to stay, and without it nothing is served; first "
                f"`isthmus add {role}`, or end the cluster with `isthmus down`"
            )
        others = [other for other in self.serving(role) if other is not group]
        if group.was_ready and not any(other.was_ready for other in others):
            names = ", ".join(other.id for other in others)
            raise ConfigError(
                f"worker {worker_id!r}: the only {role} group that serves; {names} has not been ready yet: wait until "
                "`isthmus status` shows that it is"
            )
        self._progress.say(f"{worker_id}: drains: nothing new, and it leaves when nothing runs there any more")
        self._leaving[worker_id] = _Leaving(deadline)
        self._sync()

    def tick(self) -> None:
        """Do what is due: keep the router's list right, and let drained groups go on their way."""
        self._look_for_head()
        if time.monotonic() - self._synced_at >= (POLL_S if self._leaving else SYNC_S):
            self._sync()
        for group in [group for group in self.groups if group.id in self._leaving]:
            self._advance(group, self._leaving[group.id])

    def _look_for_head(self) -> None:
        """Say when Ray's head is lost, and when it is back."""
        has_head = self._hosts.head.is_alive()
        if has_head != self._has_head:
            self._has_head = has_head
            if has_head:
                self._progress.say("Ray's head answers again")
            else:
                self._progress.problem(f"{HEAD_LOST}; what runs goes on until Ray gives up (docs/cluster.md)")

    def _advance(self, group: Group, leaving: _Leaving) -> None:
        now = time.monotonic()
        if leaving.is_stopping:
            assert leaving.kill_at is not None
            if now > leaving.kill_at:
                self._part(group, "drained; it did not end by itself and was killed")
            return
        if not group.members:
            self._part(group, "drained")
            return
        is_late = leaving.deadline is not None and now > leaving.deadline
        if self._requests.get(group.url) == 0 or is_late:
            if is_late:
                self._progress.say(f"{group.id}: what still runs there goes on elsewhere")
            leaving.kill_at = now + group.config.drain_timeout_s + RANK_END_S
            self._sync()
            group.ask_to_stop()

    def _sync(self) -> None:
        """Make the router's list what it should be, and learn what depends on each."""
        self._synced_at = time.monotonic()
        wanted = {}
        for group in self.groups:
            leaving = self._leaving.get(group.id)
            if group.url and not (leaving and leaving.is_stopping):
                wanted[group.url] = Wanted(group.config.role, leaving is not None)
        # without an answer nothing is known to have ended; a router that died is started with those that stay
        self._requests = self._control.sync(wanted) or {}

    def _part(self, group: Group, how: str) -> None:
        """End a group for good: its processes, its place, and what its peers hold for it."""
        generation = group.generation
        self._leaving.pop(group.id, None)
        group.end()
        self._peers.tell_of_end(group, generation, self.groups)
        group.release()
        self.groups = [other for other in self.groups if other is not group]
        self.left[group.id] = how
        self._tell_watchdogs()
        self._sync()
        self._progress.say(f"{group.id}: left: {how}")

    # ------------------------------------------------------------ deaths

    def collect_deaths(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a process of a group to end; start its group again if one has.

        Raises ClusterFailed if the cluster can't go on.
        """
        import ray

        runs = [run for group in self.groups for run in group.runs]
        if not runs:
            self._stop.wait(timeout_s)
            return
        try:
            ended, _ = ray.wait(runs, num_returns=1, timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise ClusterFailed(f"Ray itself has failed: {' '.join(str(error).split())}") from None
        if not ended or self._stop.is_set():
            return
        # a rank that fails takes its leader with it, and the other way round: look once more for the first cause
        ended, _ = ray.wait(runs, num_returns=len(runs), timeout=0.2)
        for group in [*self.groups]:
            if not (dead := group.deaths(ended)):
                continue
            leaving = self._leaving.get(group.id)
            if leaving is None:
                self.restart(group, dead)
            elif not leaving.is_stopping:
                cause = min(dead, key=_says_less)
                self._part(group, f"died while it drained: {cause[0].name}: {cause[1]}")
            elif len(dead) == len(group.members):
                self._part(group, "drained")

    def restart(self, group: Group, dead: list[tuple[Member, str]]) -> None:
        """Start a group again, `dead` of which have ended; or give it up. Raises ClusterFailed."""
        dead.sort(key=_says_less)
        for member, reason in dead:
            self._progress.problem(f"{member.name} (pid {member.pid}) ended: {reason}")
        if not group.was_ready and group.num_starts == 1:
            member, reason = dead[0]
            text = f"{member.name} failed at start: {reason}\n{group.host.tail(member.log_path)}".rstrip()
            if group.id not in self._added:
                raise ClusterFailed(text)
            self._part(group, text)
            return
        generation = group.generation
        try:
            if not self._hosts.head.is_alive():
                raise GivenUp(f"{group.id}: {HEAD_LOST}")
            delay = admit_restart(group.restarts, group.id, self._config.supervisor)
            group.end()
            self._peers.tell_of_end(group, generation, self.groups)
            while not self._has_started_again(group, delay):
                if group.id in self.left:
                    return
                delay = admit_restart(group.restarts, group.id, self._config.supervisor)
                group.end()
        except GivenUp as error:
            if not any(other.was_ready for other in self.serving(group.config.role) if other is not group):
                raise
            self._progress.problem(f"{error}; others of its role go on")
            self._part(group, str(error))
            return
        with contextlib.suppress(StartFailed):  # it has left
            self._await_addresses([group])

    def _has_started_again(self, group: Group, delay: float) -> bool:
        """Start a group after `delay`; return False if one of its processes ended before it said its first word."""
        self._progress.say(f"{group.id}: starting again in {delay:g} s")
        if self._stop.wait(delay):
            raise Stopped
        try:
            group.create(lambda: self._look_after_others(group))
            self._start_group(group)
        except StartFailed as error:
            self._progress.problem(str(error))
            return False
        return True

    # ------------------------------------------------------------ end

    def end(self) -> None:
        """End every group: leaders drain, ranks end with them, what is left is killed."""
        import ray

        self._look_for_head()
        try:
            for group in self.groups:
                group.ask_to_stop()
            # Ranks end with their leader; one whose leader never came up would wait for it much longer.
            leaders = [group.runs[0] for group in self.groups if group.runs]
            runs = [run for group in self.groups for run in group.runs]
            if runs:
                ray.wait(leaders, num_returns=len(leaders), timeout=self.drain_s + 15)
                ray.wait(runs, num_returns=len(runs), timeout=RANK_END_S)
            for group in self.groups:
                group.end()
                group.release()
        except ray.exceptions.RayError as error:
            self._progress.problem(f"Ray did not end every group: {' '.join(str(error).split())}")
        self._hosts.leave()

    def close(self) -> None:
        self._peers.close()

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Stopped


def _targets(group: Group) -> list[tuple[str, int, str]]:
    return [
        (member.name, member.pid, f"{group.url}/health" if group.url and n == 0 else "")
        for n, member in enumerate([*group.members])
    ]


def _says_less(death: tuple[Member, str]) -> bool:
    """Sort a rank's own reason before its leader's."""
    return death[0].name.endswith("leader")
