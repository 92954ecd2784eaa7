"""config.json as it is found: what newer exporters have renamed, under the names of the official files again.

    official                            transformers 5 writes
    compress_ratios [0, 4, 128, ...]    layer_types ["sliding_attention", ...] and compress_rates
    num_hash_layers 3                   mlp_layer_types ["hash_moe", "hash_moe", "hash_moe", "moe", ...]
    qk_rope_head_dim                    partial_rotary_factor, of head_dim
    rope_scaling, rope_theta,           rope_parameters {"main": {...}, "compress": {...}}, each with rope_type and
    compress_rope_theta                 rope_theta; or flat, with compress_rope_parameters beside it or without

An official field that is there wins, where both say the same; two that contradict one another are refused.
"""

from __future__ import annotations

import math
from typing import Any

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v4"
_RATES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_HASH, _ROUTED = "hash_moe", "moe"
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
_TAKE = "take the file published with the checkpoint"


class ConfigError(ValueError):
    """A config.json that this engine can't serve. The text names the field, its value and what to do."""


def check_architecture(raw: dict[str, Any]) -> None:
    """Raise ConfigError unless a decoded config.json is of a model that this engine is written for."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(f"config.json: architectures is {architectures!r}; wanted [{ARCHITECTURE!r}]")
    if model_type == "deepseek_v41" or "DeepseekV41ForCausalLM" in architectures:
        raise ConfigError(
            "config.json: model_type 'deepseek_v41' (DeepSeek-V4.1) is another architecture (shared KV layers, n-gram "
            "tables, no hash layers) and is not implemented; serve a 'deepseek_v4' checkpoint"
        )
    seeing = [name for name in raw if name.startswith("vision_") or name in ("image_token_id", "aligner_config")]
    if seeing and str(model_type).startswith(MODEL_TYPE):
        raise ConfigError(
            f"config.json: {', '.join(seeing)}: a vision model (DeepSeek-V4-Flash-Vision-Exp), of which only the text "
            "part is implemented here; serve DeepSeek-V4-Flash or -0731"
        )
    if model_type != MODEL_TYPE or (architectures and ARCHITECTURE not in architectures):
        raise ConfigError(
            f"config.json: model_type {model_type!r}, architectures {architectures!r}: "
            f"wanted {MODEL_TYPE!r} and {ARCHITECTURE!r}; serve a DeepSeek-V4 checkpoint"
        )


def official_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded config.json with renamed fields under their official names, too. Raises ConfigError."""
    found: dict[str, Any] = {}
    if isinstance(raw.get("layer_types"), list):
        found["compress_ratios"] = _ratios(raw)
    if isinstance(raw.get("mlp_layer_types"), list):
        found["num_hash_layers"] = _hash_layers(raw["mlp_layer_types"])
    if "num_local_experts" in raw:
        found["n_routed_experts"] = raw["num_local_experts"]
    factor, head_dim = raw.get("partial_rotary_factor"), raw.get("head_dim")
    if isinstance(factor, int | float) and math.isfinite(factor) and isinstance(head_dim, int):
        found["qk_rope_head_dim"] = int(head_dim * factor)
    found |= _rope(raw)
    for name, value in found.items():
        stated = raw.get(name)
        if stated is not None and not _agree(name, stated, value):
            raise ConfigError(f"config.json: {name} is {stated!r}, but its newer fields say {value!r}; {_TAKE}")
    return raw | {name: value for name, value in found.items() if raw.get(name) is None}


def _agree(name: str, stated: Any, found: Any) -> bool:
    if name == "rope_scaling" and isinstance(stated, dict):
        # A field that one of them leaves out has its default, or is checked where it is needed.
        return all(stated.get(key, found[key]) == found[key] for key in _YARN if key in found)
    if name == "compress_ratios" and isinstance(stated, list):
        return bool(stated[: len(found)] == found)  # entries of drafting blocks follow
    return bool(stated == found)


def _ratios(raw: dict[str, Any]) -> list[int]:
    """Return compress_ratios of the layers' names."""
    rates = raw.get("compress_rates")
    known = _RATES | (rates if isinstance(rates, dict) else {})
    for index, kind in enumerate(raw["layer_types"]):
        if not isinstance(kind, str) or kind not in _RATES:
            raise ConfigError(f"config.json: layer_types[{index}] is {kind!r}; known are {', '.join(_RATES)}")
    return [known[kind] for kind in raw["layer_types"]]


def _hash_layers(kinds: list[Any]) -> int:
    count = next((index for index, kind in enumerate(kinds) if kind != _HASH), len(kinds))
    for index, kind in enumerate(kinds[count:], count):
        if kind != _ROUTED:
            raise ConfigError(
                f"config.json: mlp_layer_types[{index}] is {kind!r}; served are layers of {_HASH!r} and then of "
                f"{_ROUTED!r} only"
            )
    return count


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what rope_parameters mean; nothing without them.

    Flat ones of type yarn are what rope_scaling was: of layers with a compressor, but for their rope_theta, which the
    exporter has copied from the top and is that of the others.
    """
    rope, beside = raw.get("rope_parameters"), raw.get("compress_rope_parameters")
    if not isinstance(rope, dict):
        return {}
    is_nested = "main" in rope or "compress" in rope
    if not is_nested:
        nested = {name: value for name, value in rope.items() if isinstance(value, dict)}
        if nested:
            raise ConfigError(
                f"config.json: rope_parameters has sets for {', '.join(nested)}; known are 'main' (layers without a "
                f"compressor) and 'compress'; {_TAKE}"
            )
    main = rope.get("main") if is_nested else rope
    compress = rope.get("compress") if is_nested else beside if isinstance(beside, dict) else rope
    if not isinstance(main, dict) or not isinstance(compress, dict):
        lacking = "compress" if isinstance(main, dict) else "main"
        raise ConfigError(f"config.json: rope_parameters lacks the set {lacking!r}; {_TAKE}")
    if is_nested and _type(main) != "default":
        raise ConfigError(
            f"config.json: rope_parameters.main has rope_type {_type(main)!r}; layers without a compressor are served "
            f"with 'default' only; {_TAKE}"
        )
    found = {"rope_scaling": {"type": _type(compress)} | {key: compress[key] for key in _YARN if key in compress}}
    thetas = {"rope_theta": main.get("rope_theta")}
    if compress is not rope:
        thetas["compress_rope_theta"] = compress.get("rope_theta")
    return found | {name: value for name, value in thetas.items() if value is not None}


def _type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))
