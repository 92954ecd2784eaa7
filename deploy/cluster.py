"""`isthmus up`: brings a cluster up, shows how it gets ready, watches it, and takes it down without a trace.

    preflight -> Ray -> groups (leader + ranks) -> router -> ready -> watch -> stop router -> drain groups -> Ray

What becomes of groups that die, join or leave meanwhile is decided in deploy/membership.py. This process carries no
request and no token.
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

from deploy import hosts, local_ray, preflight, state
from deploy.config import ClusterConfig
from deploy.control import ControlServer
from deploy.group import StartFailed, kill_and_wait
from deploy.membership import POLL_S, Membership
from deploy.progress import Progress, output_to
from deploy.restarts import ClusterFailed, Stopped, admit_restart
from deploy.router_control import RouterControl
from deploy.router_process import RouterProcess
from deploy.router_view import RouterView
from deploy.watchdog import Watchdog
from engine.flags import ConfigError

WATCH_S = 2.0
_STOPPED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def up(config: ClusterConfig, *, environ: MutableMapping[str, str], progress: Progress) -> int:
    """Run a cluster until SIGINT, SIGTERM or a failure; return the exit code. Call from the main thread."""
    state.running(environ)  # clears up after clusters that were killed
    checked = preflight.check(config)
    # short: Ray's and our sockets live below it, and a socket's path holds 107 bytes
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
        self._stop = threading.Event()
        here = hosts.Host(
            hosts.HostFacts(
                name="this host", topology=checked.topology, run_dir=str(run_dir), log_dir=str(self._log_dir)
            ),
            placements={placement.config.worker_id: placement for placement in checked.placements},
        )
        router_socket = run_dir / "router.sock"
        self._members = Membership(
            config,
            hosts.Hosts(here, port=config.router.port),
            control=RouterControl(router_socket),
            progress=progress,
            stop=self._stop,
        )
        self._router = RouterProcess(
            config, log_path=self._log_dir / "router.log", control_socket=router_socket, environ=environ
        )
        self._router_restarts: deque[float] = deque()
        self._control: ControlServer | None = None
        self._http = httpx.Client(timeout=2, trust_env=False)
        self._watchdog = Watchdog(self._watched, say=progress.problem)
        self._view = RouterView(config.router.url, http=self._http, progress=progress)
        self._looked_at = 0.0
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
        if not self._members.has_head:
            os._exit(code)  # Ray would wait for its head at exit
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
        self._members.start()
        self._start_router()
        self._watchdog.start()

    def _watched(self) -> list[tuple[str, int, str]]:
        """Return name, pid and health URL (of leaders and the router) of every process of this host."""
        watched = self._members.watched()
        if self._router.pid and self._router.exit_code is None:
            watched.append(("router", self._router.pid, f"{self._config.router.url}/live"))
        return watched

    def _start_router(self) -> None:
        self._router.start(prefill=self._members.urls("prefill"), decode=self._members.urls("decode"))
        self._progress.say(f"router: pid {self._router.pid}, {self._config.router.url}")

    def _await_ready(self) -> None:
        limit = self._config.supervisor.ready_timeout_s
        begun = time.monotonic()
        while not self._view.is_ready():
            self._raise_if_stopped()
            self._view.look(self._members.groups)
            self._members.collect_deaths(POLL_S)
            self._mind_router()
            if limit and time.monotonic() - begun > limit:
                raise ClusterFailed(
                    f"not ready after {limit:g} s ({self._view.summary()}); see {self._log_dir}, or raise "
                    "supervisor: ready_timeout_s"
                )
        self._view.look(self._members.groups)
        self._control = ControlServer(self._members, self._run_dir, look=lambda: self._view.look(self._members.groups))
        self._control.start()
        self._members.meanwhile = self._look_after_rest
        self._progress.ready(self._config, self._view.topology(), self._log_dir)

    def _watch(self) -> None:
        while True:
            self._raise_if_stopped()
            self._members.collect_deaths(POLL_S)
            self._members.tick()
            self._look_after_rest()

    def _look_after_rest(self) -> None:
        """Look after all but the groups: also called while one of them is waited for."""
        self._mind_router()
        if self._control is not None:
            self._control.run_commands()
        if time.monotonic() - self._looked_at > WATCH_S:
            self._looked_at = time.monotonic()
            self._view.look(self._members.groups)

    def _mind_router(self) -> None:
        code = self._router.exit_code
        if code is None:
            return
        self._progress.problem(f"router (pid {self._router.pid}) ended with code {code}")
        if not any(group.was_ready for group in self._members.groups):
            raise ClusterFailed(f"the router failed at start\n{hosts.tail(self._router.log_path)}".rstrip())
        if self._stop.wait(admit_restart(self._router_restarts, "router", self._config.supervisor)):
            raise Stopped
        self._start_router()

    # ------------------------------------------------------------ end

    def _take_down(self) -> None:
        """End everything in the order in which nothing is cut off: router, leaders, ranks, Ray, files."""
        self._watchdog.stop()
        if self._control is not None:
            self._control.stop()
        if self._router.pid:
            self._progress.say("stopping: the router takes no more requests and finishes those it has")
            self._router.stop(self._members.drain_s + 5)
        ray = sys.modules.get("ray")
        pids = [member.pid for group in self._members.groups for member in group.members]
        if ray is not None and ray.is_initialized():
            self._members.end()
            children = [] if not self._is_private else psutil.Process().children(recursive=True)
            if self._members.has_head:
                ray.shutdown()
            pids += [child.pid for child in children]
        if self._is_private:
            kill_and_wait(pids)
        self._members.close()
        self._http.close()
        self._silence.close()
        self._forget()

    def _forget(self) -> None:
        shutil.rmtree(self._run_dir, ignore_errors=True)
        state.forget(self._config.router.port, self._environ)

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
