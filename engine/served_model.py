"""What a worker group serves: the model's config as far as its settings cut it, and the name of config and weights.

Leader, ranks and `isthmus plan` ask here, so that they speak of the same layers. No torch: the leaders import it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.config import EngineConfig
from engine.expert_cut import shares_experts
from engine.model.config import DeepSeekV4Config, load_config, model_fingerprint
from engine.model.published import is_published, published_config
from engine.model.shard import Shard


class ServedModel(NamedTuple):
    """config: of the layers that are served, whole in width.   is_published: not from the folder, which is not here."""

    config: DeepSeekV4Config
    is_published: bool = False


def served_model(config: EngineConfig, *, needs_folder: bool = True) -> ServedModel:
    """Return the model of a group. Raises engine.model.config.ConfigError.

    Where there is no folder, the published config of that name stands in for it when no weights are read: for synthetic
    ones, and with needs_folder=False, for a plan. Synthetic weights have the forms of an NVFP4 checkpoint.
    """
    is_synthetic = config.load_format == "synthetic"
    stands_in = is_published(config.model) and not (Path(config.model) / "config.json").exists()
    stands_in = stands_in and (is_synthetic or not needs_folder)
    model = published_config(config.model) if stands_in else load_config(config.model)
    if is_synthetic:
        model = msgspec.structs.replace(
            model, stored_matrices="fp8", stored_experts="nvfp4", weight_block_size=(128, 128)
        )
    return ServedModel(model.first_layers(config.num_layers), stands_in)


def shard_of(config: EngineConfig, model: DeepSeekV4Config, rank: int = 0) -> Shard:
    """Return the part of the whole `model` that a rank holds: its own, or the one that it is told to play."""
    by_expert = shares_experts(config, model)
    if config.simulate_rank:
        return Shard.parse(config.simulate_rank, by_expert=by_expert)
    return Shard(rank, config.ranks, by_expert)


def served_fingerprint(config: EngineConfig) -> str:
    """Return 16 hex digits that name config and weights of a group's model; both sides of a handover must agree.

    Synthetic weights follow from the config, the part and the layers, which stand for them; read ones are sampled.
    """
    if config.load_format != "synthetic":
        return model_fingerprint(config.model)
    digest = hashlib.sha256(msgspec.json.encode(served_model(config).config))
    digest.update(f"synthetic {config.simulate_rank}".encode())
    return digest.hexdigest()[:16]
