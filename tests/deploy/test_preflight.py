"""deploy/preflight.py: what is wrong is said before anything is started."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

from deploy import preflight, tiny_model
from deploy.config import add_cluster_flags, load_cluster_config
from engine.flags import ConfigError


def test_model_folder_without_weights_is_refused_by_file_name(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = tmp_path / "no-weights"
    shutil.copytree(tiny_model.ensure_tiny_model({"XDG_CACHE_HOME": str(cache)}), folder)
    parser = argparse.ArgumentParser()
    add_cluster_flags(parser)
    config = load_cluster_config(parser.parse_args(["--model", str(folder)]), {"XDG_CACHE_HOME": str(cache)})
    preflight.check(config, needs_port=False)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no-weights: lacks model\.safetensors"):
        preflight.check(config, needs_port=False)
