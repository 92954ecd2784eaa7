"""The control socket of `isthmus up`: how `isthmus add` and `isthmus drain` reach it, beside the signals of `down`.

A Unix socket in the cluster's run directory, which belongs to its user alone. Requests are carried out by the main
thread, one after the other, between looking after the groups.

    GET  /groups                              -> Groups
    POST /add    {"role", "settings"}         -> {"worker_id"}      the group's leader listens
    POST /drain  {"worker_id", "timeout_s"}   -> {"worker_id"}      it drains; /groups says when it has left
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deploy.group import StartFailed
from deploy.membership import GroupState, Membership
from engine.flags import ConfigError
from router import control
from router.protocol import WorkerRole

SOCKET_NAME = "control.sock"
_CALL_TIMEOUT_S = 180.0  # a group's processes come up in that time, or don't


class Add(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """settings: of the group, as far as they differ from the last one of its role; see deploy.joining."""

    role: WorkerRole
    settings: dict[str, Any] = {}


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """timeout_s: after which what still runs there is resumed elsewhere; 0: never."""

    worker_id: str
    timeout_s: float = 0.0


class Groups(msgspec.Struct, frozen=True):
    """left: worker ids of groups that have left, and how."""

    groups: list[GroupState]
    left: dict[str, str]


class ControlServer:
    """Serves the socket in a thread; `run_commands` is the main thread's part."""

    def __init__(self, membership: Membership, folder: Path, *, look: Callable[[], None]) -> None:
        """look: learns who is ready; called before each command, which may go by it."""
        self._membership, self._look = membership, look
        self._commands: queue.SimpleQueue[tuple[Callable[[], str], concurrent.futures.Future[str]]] = (
            queue.SimpleQueue()
        )
        self._listener = control.listen(str(folder / SOCKET_NAME))
        app = Starlette(
            routes=[
                Route("/groups", self._groups),
                Route("/add", self._add, methods=["POST"]),
                Route("/drain", self._drain, methods=["POST"]),
            ]
        )
        settings = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._listener]}, name="control", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def run_commands(self) -> None:
        """Carry out what has been asked for; what can't be is answered, what ends the cluster is raised here too."""
        while True:
            try:
                command, reply = self._commands.get_nowait()
            except queue.Empty:
                return
            try:
                self._look()
                reply.set_result(command())
            except (ConfigError, StartFailed) as error:
                reply.set_exception(error)
            except BaseException as error:
                reply.set_exception(StartFailed(f"the cluster ends: {error}"))
                raise

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5)
        self._listener.close()

    async def _groups(self, _: Request) -> Response:
        return _json(Groups(self._membership.describe(), dict(self._membership.left)))

    async def _add(self, request: Request) -> Response:
        return await self._do(request, Add, lambda wanted: self._membership.add(wanted.role, wanted.settings))

    async def _drain(self, request: Request) -> Response:
        def drain(wanted: Drain) -> str:
            self._membership.drain(wanted.worker_id, wanted.timeout_s)
            return wanted.worker_id

        return await self._do(request, Drain, drain)

    async def _do(self, request: Request, kind: type[Any], function: Callable[[Any], str]) -> Response:
        try:
            wanted = msgspec.json.decode(await request.body(), type=kind)
            reply: concurrent.futures.Future[str] = concurrent.futures.Future()
            self._commands.put((lambda: function(wanted), reply))
            return _json({"worker_id": await asyncio.wrap_future(reply)})
        except (msgspec.DecodeError, ConfigError) as error:
            return _json({"error": str(error)}, 400)
        except StartFailed as error:
            return _json({"error": str(error)}, 500)


class ControlClient:
    """The other end, for one command."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def add(self, role: WorkerRole, settings: dict[str, Any]) -> str:
        """Return the new group's worker id. Raises ConfigError or StartFailed, as the cluster says."""
        return self._call("/add", Add(role, settings))

    def drain(self, worker_id: str, timeout_s: float) -> None:
        self._call("/drain", Drain(worker_id, timeout_s))

    def groups(self) -> Groups | None:
        """Return what there is; None if the cluster does not answer any more."""
        try:
            return msgspec.json.decode(self._http.get("/groups").raise_for_status().content, type=Groups)
        except httpx.HTTPError:
            return None

    def _call(self, path: str, message: Add | Drain) -> str:
        try:
            reply = self._http.post(path, content=msgspec.json.encode(message), timeout=_CALL_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise StartFailed(f"the cluster did not answer: {type(error).__name__} {error}") from None
        answer = reply.json()
        if reply.status_code == 400:
            raise ConfigError(answer["error"])
        if reply.status_code != 200:
            raise StartFailed(answer["error"])
        return str(answer["worker_id"])


@contextlib.contextmanager
def connect(run_dir: str) -> Iterator[ControlClient]:
    """Yield a client of the cluster with this run directory. Raises ConfigError if it does not serve the socket yet."""
    path = Path(run_dir) / SOCKET_NAME
    if not path.is_socket():
        raise ConfigError("the cluster is still starting; wait until it has printed `ready`, or see `isthmus status`")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://up", timeout=10) as http:
        yield ControlClient(http)


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
