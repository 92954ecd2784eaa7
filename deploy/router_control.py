"""RouterControl: makes the router's list of workers what it should be, over its control socket (router/control.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from router.protocol import WorkerRole

_TIMEOUT_S = 5.0


class Wanted(msgspec.Struct, frozen=True):
    """is_draining: it gets nothing new."""

    role: WorkerRole
    is_draining: bool = False


class RouterControl:
    """Knows nothing between two calls, so that a router that was started again is soon right again."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path

    def sync(self, wanted: Mapping[str, Wanted]) -> dict[str, int] | None:
        """Add, drain and remove workers until the router has those of `wanted`, by URL.

        Returns the requests that depend on each, counted after it was told to drain; None if the router did not answer.
        """
        if not self._path.is_socket():
            return None
        try:
            transport = httpx.HTTPTransport(uds=str(self._path))
            with httpx.Client(transport=transport, base_url="http://router", timeout=_TIMEOUT_S) as http:
                entries = _by_url(http)
                for url in entries.keys() - wanted.keys():
                    _post(http, "/workers/remove", {"url": url})
                for url, worker in wanted.items():
                    if url not in entries:
                        _post(http, "/workers", {"role": worker.role, "url": url})
                    if worker.is_draining and entries.get(url, {}).get("state") != "draining":
                        _post(http, "/workers/drain", {"url": url})
                return {url: entry["num_requests"] for url, entry in _by_url(http).items()}
        except (httpx.HTTPError, ValueError, KeyError):
            return None


def _by_url(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {entry["url"]: entry for entry in http.get("/workers").raise_for_status().json()}


def _post(http: httpx.Client, path: str, body: dict[str, str]) -> None:
    http.post(path, json=body).raise_for_status()
