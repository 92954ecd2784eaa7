"""published_config: the config.json of models that are published, by name, for machines without their checkpoint.

It is enough to plan memory and to draw synthetic weights; weights themselves always come from a folder. No torch here.
"""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

from engine.model.config import ConfigError, DeepSeekV4Config, parse_config

_FLASH = "DeepSeek-V4-Flash.json"
_NVFP4 = {"moe_quant_algo": "NVFP4", "group_size": 16}
# By name: the built-in file, and what is added to its quantization_config.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V4-Flash": (_FLASH, {}),
    "DeepSeek-V4-Flash-NVFP4": (_FLASH, _NVFP4),
}


def is_published(model: str) -> bool:
    """Return whether `published_config` knows a model, given its name or a path that ends in it."""
    return Path(model).name in PUBLISHED


def published_config(model: str) -> DeepSeekV4Config:
    """Return the config of a published model, given its name or a path that ends in it. Raises ConfigError."""
    if not is_published(model):
        raise ConfigError(f"{model}: no published config of that name is built in; there are {', '.join(PUBLISHED)}")
    file, quantization = PUBLISHED[Path(model).name]
    raw = json.loads((importlib.resources.files("engine.model") / file).read_text(encoding="utf-8"))
    return parse_config(raw | {"quantization_config": raw["quantization_config"] | quantization})
