"""`python -m router`, the same as `isthmus router`: serve until SIGTERM or SIGINT, then drain and leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

import uvicorn

from router import control
from router.app import Router
from router.config import load
from router.connection import Connection

log = logging.getLogger("isthmus.router")

SHUTDOWN_TIMEOUT_S = 5
# Longer than clients keep an idle connection (5 to 60 s): one that they use again must not be closing just then.
KEEP_ALIVE_S = 75
# What the system may hold for a client that does not read. Left alone it takes megabytes; a stream needs far less.
SEND_BUFFER_BYTES = 128 << 10


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first, and the process then leaves with status 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router of a command line (default: sys.argv). Returns the process's exit status."""
    config = load(sys.argv[1:] if argv is None else argv, os.environ)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _allow_connections()
    try:
        listener = _listen(config.host, config.port)
    except OSError as error:
        print(
            f"isthmus router: can't listen on {config.host}:{config.port}: {error.strerror or error}; "
            "stop what uses it, or choose another with --port",
            file=sys.stderr,
        )
        return 1
    try:
        controller = control.listen(config.control_socket) if config.control_socket else None
    except OSError as error:
        print(f"isthmus router: --control-socket {config.control_socket}: {error}", file=sys.stderr)
        listener.close()
        return 1
    try:
        router = Router(config)
    except ValueError as error:
        print(f"isthmus router: {error}", file=sys.stderr)
        listener.close()
        return 1
    if router.tokenizer is None:
        log.warning("%s has no tokenizer.json: only token ids are served, no text", config.model)
    # What is here now stays: to walk through it, again and again, would stop every answer for 60 ms.
    gc.collect()
    gc.freeze()
    asyncio.run(_serve_and_end(router, listener, controller))
    return 0


async def _serve_and_end(router: Router, listener: socket.socket, controller: socket.socket | None) -> None:
    """Serve, then end the process: threads that still encode or compile for clients who have left must not hold it."""
    await serve(router, listener, controller)
    logging.shutdown()
    os._exit(0)


async def serve(router: Router, listener: socket.socket, controller: socket.socket | None = None) -> None:
    """Serve on `listener` until a signal comes: then drain, and close. A second signal cuts the drain short.

    controller: where to serve the control routes, a Unix socket.
    """
    config = uvicorn.Config(
        router.app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        http=Connection,
        ws="none",
        server_header=False,
        proxy_headers=False,
    )
    server = _Server(config)
    stop = asyncio.Event()
    stop_now = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    if controller is not None:
        settings = uvicorn.Config(router.control_app, log_level="warning", access_log=False, lifespan="off", ws="none")
        controlling = asyncio.create_task(_Server(settings).serve(sockets=[controller]))
        controlling.add_done_callback(_note_end)
    stopping = asyncio.create_task(stop.wait())
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d for model %s", host, port, router.config.model_name)
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not serving.done():
        log.info("stopping: %d requests are running", len(router.dispatcher.records))
        draining = asyncio.create_task(router.drain())
        hurry = asyncio.create_task(stop_now.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        hurry.cancel()
        await router.dispatcher.close()
        server.should_exit = True
    await serving
    log.info("stopped")


def _note_end(controlling: asyncio.Task[None]) -> None:
    if not controlling.cancelled() and controlling.exception() is not None:
        log.error("the control socket is closed", exc_info=controlling.exception())


def _allow_connections() -> None:
    """Take all the file descriptors that the system lets us have: the usual soft limit is below 1,000 clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises OSError if the address can't be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, or asyncio leaves Nagle's algorithm on and every small write waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    raise SystemExit(main())
