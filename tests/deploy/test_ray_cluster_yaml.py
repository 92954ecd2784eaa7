"""deploy/ray-cluster.yaml is what `ray up` takes: checked by Ray's own code, its commands by Ray's own parsers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

PATH = Path(__file__).resolve().parents[2] / "deploy" / "ray-cluster.yaml"
COMMANDS = ("head_start_ray_commands", "worker_start_ray_commands")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")


def read(*worker_ips: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(PATH.read_text())
    if worker_ips:
        config["provider"]["worker_ips"] = list(worker_ips)
        config["min_workers"] = config["max_workers"] = len(worker_ips)
    return config


@pytest.mark.parametrize("worker_ips", [(), ("10.0.0.11",), ("10.0.0.11", "10.0.0.12")])
def test_ray_cluster_file_passes_all_that_ray_up_does_before_it_connects(worker_ips) -> None:
    from ray.autoscaler._private.commands import _bootstrap_config
    from ray.autoscaler._private.util import validate_config

    config = _bootstrap_config(read(*worker_ips), no_config_cache=True)
    validate_config(config)
    assert config["provider"]["type"] == "local"
    (kind,) = config["available_node_types"].values()
    assert (kind["min_workers"], kind["max_workers"]) == (len(worker_ips), len(worker_ips))


@pytest.mark.parametrize("section", COMMANDS)
def test_ray_cluster_commands_are_rays_own_with_options_that_exist(section: str) -> None:
    from ray.scripts.scripts import cli

    stop, start = read()[section]
    for line, name in ((stop, "stop"), (start, "start")):
        words = shlex.split(line.split(";")[-1].replace("$RAY_HEAD_IP", "10.0.0.10"))
        words = words[next(n for n, word in enumerate(words) if word.endswith("/ray")) + 1 :]
        assert words[0] == name
        command = cli.commands[name]
        options = command.make_context(name, words[1:]).params  # raises for an option that there is not
        if name == "start":
            assert options["head"] == (section == "head_start_ray_commands")
            assert yaml.safe_load(options["resources"]) == {"numa:0": 1, "numa:1": 1}


@pytest.mark.parametrize("section", COMMANDS)
def test_ray_cluster_hosts_start_with_a_token_or_not_at_all_and_outlive_their_head(section: str) -> None:
    from deploy.local_ray import _ENVIRONMENT

    given = dict(word.split("=", 1) for word in shlex.split(read()[section][1]) if word.startswith("RAY_"))
    assert given.pop("RAY_AUTH_MODE") == "token"
    # what a private Ray is started with; the others are the driver's, or flags
    assert given.items() <= _ENVIRONMENT.items()
    assert given["RAY_gcs_rpc_server_reconnect_timeout_s"] == "600"
    assert read()["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}


def test_ray_cluster_file_names_commands_of_isthmus_that_exist() -> None:
    from deploy.cli import VERBS

    named = set(re.findall(r"isthmus ([a-z]+) CONFIG", PATH.read_text()))
    assert named and named <= VERBS.keys()
