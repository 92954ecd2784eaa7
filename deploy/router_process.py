"""The router as a child process of `isthmus up`: `python -m router` with the flags of the configuration."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.config import ClusterConfig

RESUME_TIMEOUT_S = "30"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class RouterProcess:
    """Owns one child at a time. Its session is its own, so that Ctrl-C reaches it in our order, not the shell's."""

    def __init__(
        self, config: ClusterConfig, *, log_path: Path, control_socket: Path, environ: Mapping[str, str]
    ) -> None:
        self._config, self.log_path, self._environ = config, log_path, environ
        self._control_socket = control_socket
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._child.pid if self._child else 0

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self._child.poll() if self._child else None

    def start(self, *, prefill: list[str], decode: list[str]) -> None:
        flags = router_flags(self._config, prefill=prefill, decode=decode)
        flags += ["--control-socket", str(self._control_socket)]
        command = [sys.executable, "-P", "-m", "router", *flags]
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=router_environment(self._environ),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def stop(self, timeout_s: float) -> None:
        """Ask it to drain; kill it if it has not ended in time."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        try:
            self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def router_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the router's variables: here a dead worker is started again, so that waiting for it is worth while."""
    return {"ISTHMUS_RESUME_TIMEOUT_S": RESUME_TIMEOUT_S, **environ}


def router_flags(config: ClusterConfig, *, prefill: list[str], decode: list[str]) -> list[str]:
    """Return the command line of the router; options of the YAML section become flags of the same name."""
    flags = ["--host", config.router.host, "--port", str(config.router.port)]
    flags += ["--model", config.model, "--served-model-name", config.served_model_name]
    for url in prefill:
        flags += ["--prefill", url]
    for url in decode:
        flags += ["--decode", url]
    for name, value in config.router.options.items():
        flags += _flag(name, value)
    return flags


def _flag(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, str(value)]


def _end_with_parent() -> None:
    # even if this process is killed outright, the router must not stay and hold the port
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
