"""`isthmus up`: brings a cluster up, shows how it gets ready, watches it, and takes it down without a trace.

    preflight -> Ray -> groups (leader + ranks) -> router -> ready -> watch -> stop router -> drain groups -> Ray

A group whose process dies is ended and started again as one, on the same port and with a new generation; its peers are
told that the old generation is dead. More than max_restarts within the window, or a death before the group was ever
ready, ends the cluster with the reason. This process carries no request and no token.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import MutableMapping
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import psutil

from deploy import local_ray, preflight, state
from deploy.config import ClusterConfig
from deploy.group import Group, Member, StartFailed, kill_and_wait
from deploy.progress import Progress, output_to
from deploy.router_process import RouterProcess
from deploy.router_view import RouterView
from deploy.watchdog import Watchdog
from engine.flags import ConfigError
from router.protocol import WriterLost, encode

POLL_S = 0.25
WATCH_S = 2.0
MAX_BACKOFF_S = 4.0
RANK_END_S = 5.0
_STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TAIL_LINES = 15


class ClusterFailed(RuntimeError):
    """The cluster can't go on; the text says why."""


class Stopped(Exception):
    """Somebody asked the cluster to stop."""


def up(config: ClusterConfig, *, environ: MutableMapping[str, str], progress: Progress) -> int:
    """Run a cluster until SIGINT, SIGTERM or a failure; return the exit code. Call from the main thread."""
    state.running(environ)  # clears up after clusters that were killed
    checked = preflight.check(config)
    # short: Ray's sockets live below it, and a socket's path holds 107 bytes
    run_dir = Path(tempfile.mkdtemp(prefix="isthmus-", dir=None if len(tempfile.gettempdir()) < 24 else "/tmp"))
    cluster = _Cluster(config, checked, run_dir=run_dir, environ=environ, progress=progress)
    with cluster.signals():
        return cluster.run()


class _Cluster:
    def __init__(
        self,
        config: ClusterConfig,
        checked: preflight.Preflight,
        *,
        run_dir: Path,
        environ: MutableMapping[str, str],
        progress: Progress,
    ) -> None:
        self._config, self._checked, self._environ, self._progress = config, checked, environ, progress
        self._run_dir = run_dir
        self._log_dir = state.state_directory(environ) / str(config.router.port) / "logs"
        self._is_private = not config.supervisor.ray_address
        self._groups = [
            Group(
                placement,
                run_dir=run_dir,
                log_dir=self._log_dir,
                topology=checked.topology,
                is_private=self._is_private,
            )
            for placement in checked.placements
        ]
        self._router = RouterProcess(config, log_path=self._log_dir / "router.log", environ=environ)
        self._router_restarts: deque[float] = deque()
        self._http = httpx.Client(timeout=2, trust_env=False)
        self._stop = threading.Event()
        self._watchdog = Watchdog(self._watched, say=progress.problem)
        self._view = RouterView(config.router.url, http=self._http, progress=progress)
        self._silence = contextlib.ExitStack()

    # ------------------------------------------------------------ life

    def run(self) -> int:
        code = 0
        try:
            self._start()
            self._await_ready()
            self._watch()
        except Stopped:
            pass
        except (ClusterFailed, StartFailed, ConfigError) as error:
            self._progress.problem(str(error))
            code = 1
        finally:
            self._take_down()
        self._progress.say("stopped" if code == 0 else f"stopped; logs are in {self._log_dir}")
        return code

    def _start(self) -> None:
        shutil.rmtree(self._log_dir, ignore_errors=True)
        self._log_dir.mkdir(parents=True)
        self._save_state()
        self._silence.enter_context(output_to(self._log_dir / "ray.log"))
        root = str(Path(__file__).resolve().parent.parent)
        # every process of the cluster finds the same sources, whatever folder it was started in
        self._environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, self._environ.get("PYTHONPATH")]))
        self._progress.say(f"{self._config.served_model_name} from {self._config.model}")
        for group in self._groups:
            self._progress.say(f"{group.id}: {group.placement.describe()}")
            for warning in group.placement.warnings:
                self._progress.problem(warning)
        self._progress.say(
            "starting Ray" if self._is_private else f"joining Ray at {self._config.supervisor.ray_address}"
        )
        local_ray.start(
            self._run_dir / "ray",
            topology=self._checked.topology,
            environ=self._environ,
            address=self._config.supervisor.ray_address,
        )
        self._take_signals()  # again: Ray's own handler of SIGTERM aborts the process three seconds after the signal
        self._raise_if_stopped()
        for group in self._groups:
            group.create()
        for group in self._groups:
            self._start_group(group)
        self._await_addresses(self._groups)
        self._start_router()
        self._watchdog.start()

    def _watched(self) -> list[tuple[str, int, str]]:
        """Return name, pid and health URL (of leaders and the router) of every process of this host."""
        watched = []
        for group in self._groups if self._is_private else ():  # a pid of another host says nothing here
            for n, member in enumerate(group.members):
                watched.append((member.name, member.pid, f"{group.url}/health" if group.url and n == 0 else ""))
        if self._router.pid and self._router.exit_code is None:
            watched.append(("router", self._router.pid, f"{self._config.router.url}/live"))
        return watched

    def _start_group(self, group: Group) -> None:
        group.start()
        pids = ", ".join(f"{member.name.removeprefix(group.id + ' ')} pid {member.pid}" for member in group.members)
        self._progress.say(f"{group.id}: {pids}")

    def _await_addresses(self, groups: list[Group]) -> None:
        for group in groups:
            while not group.read_address(POLL_S):
                self._raise_if_stopped()
                self._collect_deaths(0)

    def _start_router(self) -> None:
        self._router.start(
            prefill=[group.url for group in self._groups if group.config.role == "prefill"],
            decode=[group.url for group in self._groups if group.config.role == "decode"],
        )
        self._progress.say(f"router: pid {self._router.pid}, {self._config.router.url}")

    def _await_ready(self) -> None:
        limit = self._config.supervisor.ready_timeout_s
        begun = time.monotonic()
        while not self._view.is_ready():
            self._raise_if_stopped()
            self._view.look(self._groups)
            self._collect_deaths(POLL_S)
            self._mind_router()
            if limit and time.monotonic() - begun > limit:
                raise ClusterFailed(
                    f"not ready after {limit:g} s ({self._view.summary()}); see {self._log_dir}, or raise "
                    "supervisor: ready_timeout_s"
                )
        self._view.look(self._groups)
        self._progress.ready(self._config, self._view.topology(), self._log_dir)

    def _watch(self) -> None:
        looked = 0.0
        while True:
            self._raise_if_stopped()
            self._collect_deaths(0.5)
            self._mind_router()
            if time.monotonic() - looked > WATCH_S:
                looked = time.monotonic()
                self._view.look(self._groups)

    # ------------------------------------------------------------ deaths

    def _collect_deaths(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a process of a group to end; start its group again if one has."""
        import ray

        runs = [run for group in self._groups for run in group.runs]
        try:
            ended, _ = ray.wait(runs, num_returns=1, timeout=timeout_s)
        except ray.exceptions.RayError as error:
            raise ClusterFailed(f"Ray itself has failed: {' '.join(str(error).split())}") from None
        if not ended or self._stop.is_set():
            return
        # a rank that fails takes its leader with it, and the other way round: look once more for the first cause
        ended, _ = ray.wait(runs, num_returns=len(runs), timeout=0.2)
        for group in self._groups:
            if dead := group.deaths(ended):
                self._restart_group(group, dead)

    def _restart_group(self, group: Group, dead: list[tuple[Member, str]]) -> None:
        dead.sort(key=lambda death: death[0].name.endswith("leader"))  # a rank's own reason says more
        for member, reason in dead:
            self._progress.problem(f"{member.name} (pid {member.pid}) ended: {reason}")
        if not group.was_ready and group.num_starts == 1:
            member, reason = dead[0]
            raise ClusterFailed(f"{member.name} failed at start: {reason}\n{_tail(member.log_path)}".rstrip())
        generation = group.generation
        delay = self._admit_restart(group.restarts, group.id)
        group.end()
        self._tell_peers(group, generation)
        while not self._has_started_again(group, delay):
            delay = self._admit_restart(group.restarts, group.id)
            group.end()
        self._await_addresses([group])

    def _has_started_again(self, group: Group, delay: float) -> bool:
        """Start a group after `delay`; return False if one of its processes ended before it said its first word."""
        self._progress.say(f"{group.id}: starting again in {delay:g} s")
        if self._stop.wait(delay):
            raise Stopped
        group.create()
        try:
            self._start_group(group)
        except StartFailed as error:
            self._progress.problem(str(error))
            return False
        return True

    def _mind_router(self) -> None:
        code = self._router.exit_code
        if code is None:
            return
        self._progress.problem(f"router (pid {self._router.pid}) ended with code {code}")
        if not any(group.was_ready for group in self._groups):
            raise ClusterFailed(f"the router failed at start\n{_tail(self._router.log_path)}".rstrip())
        if self._stop.wait(self._admit_restart(self._router_restarts, "router")):
            raise Stopped
        self._start_router()

    def _admit_restart(self, restarts: deque[float], name: str) -> float:
        """Count one more restart; return the seconds to wait before it. Raises ClusterFailed if it is one too many."""
        limits, now = self._config.supervisor, time.monotonic()
        while restarts and now - restarts[0] > limits.restart_window_s:
            restarts.popleft()
        if len(restarts) >= limits.max_restarts:
            raise ClusterFailed(
                f"{name} ended {len(restarts) + 1} times within {limits.restart_window_s:g} s: given up "
                f"(supervisor: max_restarts = {limits.max_restarts})"
            )
        restarts.append(now)
        return min(float(limits.restart_backoff_s * 2 ** (len(restarts) - 1)), MAX_BACKOFF_S)

    def _tell_peers(self, group: Group, generation: int) -> None:
        """Tell the other role's leaders that this generation's processes are gone, so that they free what it held."""
        if not generation:
            return
        route = "/writer_lost" if group.config.role == "prefill" else "/unlink"
        for peer in self._groups:
            if peer.config.role != group.config.role and peer.url:
                with contextlib.suppress(httpx.HTTPError):  # a peer that can't be reached is being ended itself
                    self._http.post(
                        peer.url + route,
                        content=encode(WriterLost(generation=generation)),
                        headers={"content-type": "application/msgpack"},
                    )

    # ------------------------------------------------------------ end

    def _take_down(self) -> None:
        """End everything in the order in which nothing is cut off: router, leaders, ranks, Ray, files."""
        self._watchdog.stop()
        if self._router.pid:
            self._progress.say("stopping: the router takes no more requests and finishes those it has")
            self._router.stop(self._drain_s + 5)
        ray = sys.modules.get("ray")
        pids = [member.pid for group in self._groups for member in group.members]
        if ray is not None and ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                for group in self._groups:
                    group.ask_to_stop()
                # Ranks end with their leader; one whose leader never came up would wait for it much longer.
                leaders = [group.runs[0] for group in self._groups if group.runs]
                runs = [run for group in self._groups for run in group.runs]
                if runs:
                    ray.wait(leaders, num_returns=len(leaders), timeout=self._drain_s + 15)
                    ray.wait(runs, num_returns=len(runs), timeout=RANK_END_S)
                for group in self._groups:
                    group.end()
            children = [] if not self._is_private else psutil.Process().children(recursive=True)
            ray.shutdown()
            pids += [child.pid for child in children]
        if self._is_private:
            kill_and_wait(pids)
        self._http.close()
        self._silence.close()
        self._forget()

    def _forget(self) -> None:
        shutil.rmtree(self._run_dir, ignore_errors=True)
        state.forget(self._config.router.port, self._environ)

    @property
    def _drain_s(self) -> float:
        return max(group.config.drain_timeout_s for group in self._groups)

    def _save_state(self) -> None:
        process = psutil.Process()
        state.save(
            state.ClusterState(
                pid=process.pid,
                created=process.create_time(),
                url=self._config.router.url,
                port=self._config.router.port,
                source=self._config.source,
                model=self._config.model,
                run_dir=str(self._run_dir),
                log_dir=str(self._log_dir),
            ),
            self._environ,
        )

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Stopped

    # ------------------------------------------------------------ signals

    @contextlib.contextmanager
    def signals(self) -> Any:
        """Stop on the first SIGINT, SIGTERM or SIGHUP, kill at once on the second; restore handlers afterwards."""
        before = {number: signal.getsignal(number) for number in _STOPPED_BY}
        self._take_signals()
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take_signals(self) -> None:
        for number in _STOPPED_BY:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        self._progress.problem("killed: requests under way are lost")
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._forget()
        os._exit(128 + number)


def _tail(path: Path) -> str:
    """Return the last lines of a log, indented."""
    try:
        lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in lines)
