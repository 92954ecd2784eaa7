"""Transports that could not carry a cache between processes are refused before anything starts."""

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
