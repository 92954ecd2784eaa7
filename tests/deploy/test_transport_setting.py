"""Transports that could not carry a cache, and sums that ranks could not make, are refused before anything starts."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.flags import ConfigError, Layer, resolve


def configured(**values: object) -> EngineConfig:
    return resolve([Layer("YAML", {"model": "m", **values})], role="decode")[0]


def test_local_is_refused_by_name_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"transport = 'local' \(YAML\): works inside one process.*wanted auto, nixl"):
        configured(transport="local")


def test_ucxx_is_refused_for_device_memory() -> None:
    with pytest.raises(
        ConfigError, match=r"transport = 'ucxx' \(YAML\): carries host memory only, and device is 'cuda'"
    ):
        configured(transport="ucxx", device="cuda")


@pytest.mark.parametrize("name", ["auto", "nixl", "host", "ucxx"])
def test_transports_between_processes_are_accepted(name: str) -> None:
    assert configured(transport=name).transport == name


@pytest.mark.parametrize("name", ["nccl", "one-shot"])
def test_ways_of_gpus_are_refused_for_ranks_on_the_cpu(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"all_reduce = '{name}' \(YAML\): a way of GPUs.*leave it at auto"):
        configured(all_reduce=name, device="cpu")
    assert configured(all_reduce=name, device="cuda").all_reduce == name
