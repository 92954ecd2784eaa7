"""A group that dies is started again, also when one of its processes dies before it has said a word."""

from __future__ import annotations

import argparse
import io
import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from deploy.config import load_cluster_config
from deploy.group import Member, StartFailed
from deploy.membership import Membership
from deploy.progress import Progress
from deploy.restarts import ClusterFailed

ORACLE = Path(__file__).resolve().parents[1] / "oracle" / "tiny"


class Group:
    """Stands for deploy.group.Group; its first `failures` starts fail as Ray's do."""

    id, config, placement = "prefill-0", SimpleNamespace(role="prefill"), None
    was_ready, num_starts, generation, url = True, 1, 0, "http://127.0.0.1:1"

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, []
        self.restarts: deque[float] = deque()
        self.members: list[Member] = []

    def create(self, meanwhile: Any) -> None:
        self.calls.append("create")

    def start(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StartFailed("prefill-0: Ray did not start its processes: the actor died")
        self.calls.append("started")

    def end(self) -> None:
        self.calls.append("end")

    def describe(self) -> str:
        return "here"

    def read_address(self, timeout_s: float) -> bool:
        return True


@pytest.fixture
def restart(tmp_path: Path) -> Any:
    """A function that lets a group's rank die in a cluster that allows three restarts."""
    path = tmp_path / "cluster.yaml"
    path.write_text("supervisor: {max_restarts: 3, restart_backoff_s: 0.001}\n")
    config = load_cluster_config(argparse.Namespace(config=str(path), model=str(ORACLE)), {})
    progress = Progress(Console(file=io.StringIO()))
    head = SimpleNamespace(is_alive=lambda: True)
    hosts = SimpleNamespace(here=None, head=head, watch=lambda targets: None)
    members = Membership(config, hosts, control=None, progress=progress, stop=threading.Event())
    members.groups = []
    yield lambda group: members.restart(group, [(Member("prefill-0 rank 0", None, None, 1, path), "killed")])
    members.close()


def test_death_at_birth_counts_as_one_more_restart(restart: Any) -> None:
    group = Group(failures=2)
    restart(group)
    assert group.calls == ["end", "create", "end", "create", "end", "create", "started"]


def test_group_that_never_starts_ends_the_cluster_with_the_number_of_tries(restart: Any) -> None:
    with pytest.raises(ClusterFailed, match="max_restarts = 3"):
        restart(Group(failures=100))
