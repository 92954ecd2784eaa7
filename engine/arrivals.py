"""ArrivalThread: a decode rank's side of transfers: it owns the transport and hears the writers' words.

A thread of its own, since writes end only when the receiver looks, and a step may take longer than a transfer. Looking
often costs a few per cent of a core, so it does so only while landings are open or a writer has announced itself.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from engine.plan import Arrived, RankMessage
from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.link_test import LINK_WORD
from kv_transfer.transport import KvTransport

log = logging.getLogger(__name__)

_BUSY_NAP_S = 0.0002
_IDLE_NAP_S = 0.005
_ALERT_S = 0.5


class ArrivalThread:
    """start() returns the endpoint; then every notification is emitted as Arrived; `stop` waits for the end.

    make runs on the thread, so that the transport belongs to it from the beginning. emit must be safe from any thread.
    on_failed: the thread has died.
    """

    def __init__(
        self,
        make: Callable[[], KvTransport],
        pools: list[PoolAddress],
        *,
        rank: int,
        generation: int,
        emit: Callable[[RankMessage], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._make, self._pools, self._rank, self._generation = make, pools, rank, generation
        self._emit, self._on_failed = emit, on_failed
        self._open_landings = 0
        self._is_stopping = False
        self._wake = threading.Event()
        self._started: queue.SimpleQueue[Endpoint | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)

    def start(self) -> Endpoint:
        self._thread.start()
        outcome = self._started.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def hint(self, open_landings: int) -> None:
        """Say how many landings wait for their cache."""
        self._open_landings = open_landings
        self._wake.set()

    def stop(self) -> None:
        self._is_stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            transport = self._make()
            endpoint = transport.register(self._pools, generation=self._generation, rank=self._rank)
        except BaseException as e:
            self._started.put(e)
            return
        self._started.put(endpoint)
        try:
            self._listen(transport)
            transport.close()
        except Exception as e:
            log.exception("the arrival thread ended")
            self._on_failed(f"arrival thread: {type(e).__name__}: {e}")

    def _listen(self, transport: KvTransport) -> None:
        alert_until = 0.0
        while not self._is_stopping:
            for agent, word in transport.poll():
                if word == LINK_WORD:
                    alert_until = time.monotonic() + _ALERT_S
                else:
                    self._emit(Arrived(rank=self._rank, agent=agent, notification=word, at=time.monotonic()))
            if self._open_landings or time.monotonic() < alert_until:
                time.sleep(_BUSY_NAP_S)
            elif self._wake.wait(_IDLE_NAP_S):
                self._wake.clear()
