"""published_config: the config.json of models that are published, by name, for machines without their checkpoint.

It is enough to plan memory and to draw synthetic weights; weights themselves always come from a folder. No torch here.
"""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path

from engine.model.config import ConfigError, DeepSeekV4Config, parse_config

PUBLISHED = ("DeepSeek-V4-Flash",)


def is_published(model: str) -> bool:
    """Return whether `published_config` knows a model, given its name or a path that ends in it."""
    return Path(model).name in PUBLISHED


def published_config(model: str) -> DeepSeekV4Config:
    """Return the config of a published model, given its name or a path that ends in it. Raises ConfigError."""
    if not is_published(model):
        raise ConfigError(f"{model}: no published config of that name is built in; there is {', '.join(PUBLISHED)}")
    text = (importlib.resources.files("engine.model") / f"{Path(model).name}.json").read_text(encoding="utf-8")
    return parse_config(json.loads(text))
