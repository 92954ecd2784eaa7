"""Whether a checkpoint folder can be loaded, by config and headers: asked by all who start something. No torch.

The loader (weights.py) asks the same of the same functions, but only when a rank has its GPU and torch in memory.
"""

from __future__ import annotations

import functools
from pathlib import Path

from engine.model.config import WEIGHT_INDEX, ConfigError, DeepSeekV4Config, shard_paths
from engine.model.stored_forms import check_folder, listed


def require_loadable(folder: str | Path, config: DeepSeekV4Config) -> None:
    """Raise ConfigError listing weight files and tensors that would not be loaded. A second for a published model.

    config: of the whole model.
    """
    index = Path(folder) / WEIGHT_INDEX
    paths = [*shard_paths(folder), *([index] if index.exists() else [])]
    stamps = tuple((path.name, (status := path.stat()).st_size, status.st_mtime_ns) for path in paths)
    problems = _problems(str(folder), config, stamps)
    if problems:
        told = listed(folder, list(problems))
        raise ConfigError(f"{told}\n; `isthmus model check {folder}` says what to do about each")


@functools.lru_cache(maxsize=4)
def _problems(folder: str, config: DeepSeekV4Config, stamps: tuple[tuple[str, int, int], ...]) -> tuple[str, ...]:
    """stamps: of the files, so that groups of one folder have it looked at once, and again when it has changed."""
    return tuple(check_folder(folder, config))
