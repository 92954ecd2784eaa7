"""ArrivalThread: a decode rank's side of transfers: it owns the transport and hears the writers' words.

A thread of its own, since writes end only when the receiver looks, and a step may take longer than a transfer. Looking
often costs a few per cent of a core, so it does so only while landings are open or a writer has announced itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from engine.plan import Arrived, RankMessage
from engine.transport_thread import TransportThread
from kv_transfer.landing import Endpoint, PoolAddress
from kv_transfer.link_test import LINK_WORD
from kv_transfer.transport import KvTransport

_BUSY_NAP_S = 0.0002
_IDLE_NAP_S = 0.005
_ALERT_S = 0.5


class ArrivalThread(TransportThread[KvTransport]):
    """Emits every notification as Arrived until `stop`. emit must be safe from any thread. See TransportThread."""

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
        def register() -> tuple[KvTransport, Endpoint]:
            transport = make()
            return transport, transport.register(pools, generation=generation, rank=rank)

        super().__init__("arrivals", register, on_failed=on_failed)
        self._rank, self._emit = rank, emit
        self._open_landings = 0
        self._is_stopping = False
        self._wake = threading.Event()

    def hint(self, open_landings: int) -> None:
        """Say how many landings wait for their cache."""
        self._open_landings = open_landings
        self._wake.set()

    def stop(self) -> None:
        self._is_stopping = True
        self._wake.set()
        self.join()

    def serve(self, transport: KvTransport) -> None:
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
        transport.close()
