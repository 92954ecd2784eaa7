"""What the router says of the cluster, and the lines printed when it changes."""

from __future__ import annotations

from typing import Any

import httpx

from deploy.group import Group
from deploy.progress import Progress


class RouterView:
    """Reads /ready and /topology of one router. Owns nothing but the last states that were printed."""

    def __init__(self, url: str, *, http: httpx.Client, progress: Progress) -> None:
        self._url, self._http, self._progress = url, http, progress
        self._shown: dict[str, str] = {}

    def is_ready(self) -> bool:
        """Return whether some pair can serve."""
        try:
            return self._http.get(self._url + "/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def topology(self) -> dict[str, Any]:
        """Return /topology, or {} while the router does not answer."""
        try:
            reply = self._http.get(self._url + "/topology")
            return dict(reply.json()) if reply.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}

    def look(self, groups: list[Group]) -> None:
        """Print what has changed since the last look, and mark the groups that have become ready."""
        topology = self.topology()
        for worker in topology.get("workers", []):
            group = next((group for group in groups if group.url == worker["url"]), None)
            if group is None or (worker["state"] == "unreachable" and group.id not in self._shown):
                continue  # a stranger, or the router has not asked it yet
            if worker["state"] == "ready":
                group.was_ready = True
            self._show(group.id, worker["state"], "" if worker["state"] == "ready" else worker.get("reason", ""))
        ids = {group.id for group in groups}
        for pair in topology.get("pairs", []):
            if {pair["prefill"], pair["decode"]} <= ids:
                lane = f"{pair['transport']} over {pair['lane']}" if pair.get("lane") else pair.get("reason", "")
                self._show(f"{pair['prefill']} -> {pair['decode']}", pair["state"], lane)

    def summary(self) -> str:
        return "; ".join(f"{name}: {text}" for name, text in self._shown.items()) or "the router does not answer"

    def _show(self, name: str, state: str, detail: str) -> None:
        text = f"{state} ({detail})" if detail else state
        if self._shown.get(name) != text:
            self._shown[name] = text
            self._progress.say(f"{name}: {text}")
