"""Peers: telling the groups of the other role that a generation of one is no more, so that they free what it held."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import httpx

from deploy.group import Group
from router.protocol import WriterLost, encode


class Peers:
    """Owns the connections to the leaders."""

    def __init__(self) -> None:
        self._http = httpx.Client(timeout=2, trust_env=False)

    def tell_of_end(self, group: Group, generation: int, groups: Sequence[Group]) -> None:
        """Tell the leaders among `groups` that work with `group`; its processes are gone. generation 0: none was."""
        if not generation:
            return
        route = "/writer_lost" if group.config.role == "prefill" else "/unlink"
        for peer in groups:
            if peer.config.role != group.config.role and peer.url:
                with contextlib.suppress(httpx.HTTPError):  # a peer that can't be reached is being ended itself
                    self._http.post(
                        peer.url + route,
                        content=encode(WriterLost(generation=generation)),
                        headers={"content-type": "application/msgpack"},
                    )

    def close(self) -> None:
        self._http.close()
