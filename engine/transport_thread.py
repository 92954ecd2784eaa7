"""TransportThread: the thread that owns a rank's transport, from its making to its end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kv_transfer.landing import Endpoint

log = logging.getLogger(__name__)

Owned = TypeVar("Owned")


class TransportThread(Generic[Owned]):
    """Subclasses say what is done with what `make` returns: on this thread, in `serve`, until they end it.

    make: returns what the thread owns, and its endpoint; runs on the thread, so that the transport belongs to it from
    the beginning.   on_failed: the thread has died.
    """

    def __init__(
        self, name: str, make: Callable[[], tuple[Owned, Endpoint]], *, on_failed: Callable[[str], None]
    ) -> None:
        self._make, self._on_failed = make, on_failed
        self._started: queue.SimpleQueue[Endpoint | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Endpoint:
        """Return the endpoint, or raise what `make` raised."""
        self._thread.start()
        outcome = self._started.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def serve(self, owned: Owned) -> None:
        raise NotImplementedError

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            owned, endpoint = self._make()
        except BaseException as e:
            self._started.put(e)
            return
        self._started.put(endpoint)
        try:
            self.serve(owned)
        except Exception as e:
            log.exception("the thread of %s ended", self._thread.name)
            self._on_failed(f"thread of {self._thread.name}: {type(e).__name__}: {e}")
