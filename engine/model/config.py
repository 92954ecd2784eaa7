"""DeepSeekV4Config: the numbers of a checkpoint's config.json, checked once, before anything is built from them.

Every size in the project comes from here: nothing else reads config.json, nothing hard-codes a size. What this
architecture can't express is refused with the field, its value and the remedy. `model_fingerprint` names a checkpoint,
so that two workers can tell whether they hold the same weights. No torch here: the leaders import it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.model.config_fields import ARCHITECTURE, check_architecture, official_fields
from engine.model.config_fields import ConfigError as ConfigError

CSA_RATIO = 4
HCA_RATIO = 128
SUPPORTED_RATIOS = (0, CSA_RATIO, HCA_RATIO)
NVFP4_GROUP = 16
WEIGHT_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

LayerKind = Literal["window", "csa", "hca"]
StoredMatrices = Literal["float", "fp8"]
StoredExperts = Literal["float", "fp8", "mxfp4", "nvfp4"]
_KINDS: dict[int, LayerKind] = {0: "window", CSA_RATIO: "csa", HCA_RATIO: "hca"}

# What the forward pass is written for. Another value means another model, not an option.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

_HASHED_WHOLE_BYTES = 16 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 4096


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Frequency blending of the layers with a compressor (model report, rotary embedding)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class DeepSeekV4Config(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and constants under the names of config.json.

    compress_ratios: one entry per layer (0 window only, 4 CSA, 128 HCA); entries beyond num_hidden_layers belong to
    `mtp.*` blocks and are cut off. eos_token_ids: from config.json and generation_config.json, ascending.
    stored_matrices, stored_experts: how the checkpoint is said to hold its linear layers and routed experts; the memory
    plan counts by it. What tensors are really stored as, the loader sees.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: YarnScaling
    max_position_embeddings: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    weight_block_size: tuple[int, int] = (128, 128)
    bos_token_id: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stored_matrices: StoredMatrices = "float"
    stored_experts: StoredExperts = "float"

    def first_layers(self, count: int) -> DeepSeekV4Config:
        """Return the config of the model's first `count` layers, of all for 0. Raises ConfigError if it has fewer."""
        if count > self.num_hidden_layers:
            raise ConfigError(f"num_layers {count}: the model has {self.num_hidden_layers}; lower it, or use 0 for all")
        layers = count or self.num_hidden_layers
        return msgspec.structs.replace(
            self,
            num_hidden_layers=layers,
            compress_ratios=self.compress_ratios[:layers],
            num_hash_layers=min(self.num_hash_layers, layers),
        )

    def kind(self, layer: int) -> LayerKind:
        """Return what layer number `layer` attends besides its window."""
        return _KINDS[self.compress_ratios[layer]]

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Return the numbers of the layers with this compression ratio, ascending."""
        return tuple(i for i, r in enumerate(self.compress_ratios) if r == ratio)

    def is_hash_layer(self, layer: int) -> bool:
        """Whether this layer chooses its experts by token id."""
        return layer < self.num_hash_layers


def load_config(folder: str | Path) -> DeepSeekV4Config:
    """Return the checked config of a checkpoint folder (config.json, generation_config.json). Raises ConfigError."""
    raw = _read_json(Path(folder) / "config.json")
    generation = Path(folder) / "generation_config.json"
    return parse_config(raw, _read_json(generation) if os.path.lexists(generation) else None)


def parse_config(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> DeepSeekV4Config:
    """Return the checked config of a decoded config.json (and generation_config.json). Raises ConfigError."""
    check_architecture(raw)
    raw = official_fields(raw)
    for name, wanted in _FIXED.items():
        if name in raw and raw[name] != wanted:
            raise ConfigError(f"config.json: {name} is {raw[name]!r}; {ARCHITECTURE} is served with {wanted!r} only")
    needed = [f.name for f in msgspec.structs.fields(DeepSeekV4Config) if f.required]
    missing = [name for name in needed if raw.get(name) is None]
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(missing)}: take the file published with the checkpoint")
    _check_scaling(raw["rope_scaling"])
    values = {name: raw[name] for name in needed}
    quantization = raw.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise ConfigError(f"config.json: quantization_config is {quantization!r}; wanted an object, or none")
    values["weight_block_size"] = _block_size(quantization)
    values["compress_ratios"] = _layer_ratios(raw)
    values["stored_matrices"], values["stored_experts"] = _stored_forms(raw)
    values["bos_token_id"] = raw.get("bos_token_id") or 0
    values["eos_token_ids"] = sorted({*_ids(raw), *_ids(generation or {})})
    try:
        config = msgspec.convert(values, DeepSeekV4Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}") from None
    _check_sizes(config)
    return config


def shard_paths(folder: str | Path) -> list[Path]:
    """Return the checkpoint's weight files, sorted: those of model.safetensors.index.json, or model.safetensors.

    Other safetensors files in the folder are none of our business. Raises ConfigError if a file is missing.
    """
    folder = Path(folder)
    names = sorted(set(weight_map(folder).values())) or [SINGLE_FILE]
    if strange := [name for name in names if not (name.isprintable() and Path(name).name == name != "")]:
        raise ConfigError(f"{folder / WEIGHT_INDEX}: names {strange[0]!r}, wanted files beside it; fetch it again")
    missing = [name for name in names if not os.path.isfile(folder / name)]  # false, too, where asking fails
    if missing:
        shown = ", ".join(name + _why_no_file(folder / name) for name in missing[:5])
        raise ConfigError(
            f"{folder}: lacks {shown} ({len(missing)} of {len(names)} weight files); fetch what is missing"
        )
    return [folder / name for name in names]


def _why_no_file(path: Path) -> str:
    if os.path.isdir(path):
        return " (a folder is in its place)"
    if os.path.exists(path):
        return " (what is in its place is not a regular file)"
    return f" (a link to {path.readlink()}, which leads to no file)" if os.path.islink(path) else ""


def weight_map(folder: str | Path) -> dict[str, str]:
    """Return which file holds each tensor as the index says, nothing without an index. Raises ConfigError."""
    index = Path(folder) / WEIGHT_INDEX
    if not os.path.lexists(index):
        return {}
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{index}: has no weight_map; fetch it again")
    return {str(name): str(file) for name, file in found.items()}


def model_fingerprint(folder: str | Path) -> str:
    """Return 16 hex digits that name config and weights of a checkpoint folder.

    Hashed: the checked config; of each safetensors shard its name, size, header (names, dtypes, shapes, offsets) and
    content: all of it up to 16 MiB, beyond that 64 pieces of 4 KiB spread evenly over the data. So 160 GB cost a few
    thousand small reads; a change that misses every piece is not seen. Raises ConfigError if there are no weights.
    """
    folder = Path(folder)
    digest = hashlib.sha256(msgspec.json.encode(load_config(folder)))
    for shard in shard_paths(folder):
        size = shard.stat().st_size
        digest.update(f"{shard.name}:{size};".encode())
        with shard.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > size - 8:
                raise ConfigError(f"{shard}: cut short (header of {header_bytes} bytes in a file of {size})")
            digest.update(file.read(header_bytes))
            if size <= _HASHED_WHOLE_BYTES:
                digest.update(file.read())
                continue
            first = 8 + header_bytes
            step = (size - first - _SAMPLE_BYTES) // (_SAMPLES - 1)
            for i in range(_SAMPLES):
                file.seek(first + i * step)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _read_json(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():  # to open a pipe is to wait for who writes into it
        raise ConfigError(f"{path}: is not a regular file; fetch it again")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the folder of a DeepSeek-V4 checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); fetch it again, or see who may read it") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); fetch it again") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: wanted a JSON object, found {type(raw).__name__}; fetch it again")
    return raw


def _check_scaling(scaling: Any) -> None:
    kind = scaling.get("type", scaling.get("rope_type", "yarn")) if isinstance(scaling, dict) else scaling
    if kind != "yarn":
        raise ConfigError(f"config.json: rope_scaling type is {kind!r}; only 'yarn' is implemented")
    if scaling.get("attention_factor", 1) != 1:
        raise ConfigError(
            f"config.json: attention_factor of the rotary embedding is {scaling['attention_factor']!r}; the model is "
            "served with 1 only: take the file published with the checkpoint"
        )


def _layer_ratios(raw: dict[str, Any]) -> tuple[int, ...]:
    """Return compress_ratios without the entries of `mtp.*`, after checking its length and values."""
    ratios, layers = raw["compress_ratios"], raw["num_hidden_layers"]
    if not isinstance(ratios, list) or not all(isinstance(r, int) for r in ratios):
        raise ConfigError(f"config.json: compress_ratios must be a list of integers, found {ratios!r}")
    if not isinstance(layers, int):
        raise ConfigError(f"config.json: num_hidden_layers must be an integer, found {layers!r}")
    # Exports differ in how many drafting blocks they count, and none of these has a compressor.
    if len(ratios) < layers or any(ratios[layers:]):
        raise ConfigError(
            f"config.json: compress_ratios has {len(ratios)} entries; wanted {layers} (num_hidden_layers), and zeros "
            f"for drafting blocks after them: {ratios[layers:]}"
        )
    for index, ratio in enumerate(ratios):
        if ratio not in SUPPORTED_RATIOS:
            raise ConfigError(f"config.json: compress_ratios[{index}] is {ratio}; supported are 0, 4 and 128")
    return tuple(ratios[:layers])


def _block_size(quantization: dict[str, Any]) -> Any:
    """Return the tile of an FP8 scale, after refusing formats that the loader can't read.

    Which experts are NVFP4 and which MXFP4 is not read from here: their scales tell (weights.py).
    """
    method, experts = quantization.get("quant_method", "fp8"), quantization.get("moe_quant_algo")
    if method != "fp8" or experts not in (None, "NVFP4", "MXFP4"):
        raise ConfigError(
            f"config.json: quantization_config has quant_method {method!r}, moe_quant_algo {experts!r}; "
            "the loader reads bf16, FP8 in 128x128 tiles and MXFP4 or NVFP4 experts: take the official "
            "checkpoint or its NVFP4 form"
        )
    group = quantization.get("group_size", NVFP4_GROUP)
    if experts == "NVFP4" and group != NVFP4_GROUP:
        raise ConfigError(
            f"config.json: quantization_config has group_size {group!r} for NVFP4 experts; only {NVFP4_GROUP} is "
            "implemented: export the checkpoint with it"
        )
    return quantization.get("weight_block_size") or (128, 128)


def _stored_forms(raw: dict[str, Any]) -> tuple[StoredMatrices, StoredExperts]:
    """Return how linear layers and routed experts are stored, as far as the config tells."""
    quantization = raw.get("quantization_config") or {}
    if not quantization:
        return "float", "float"
    if (raw.get("expert_dtype") or "fp4") != "fp4":
        return "fp8", "fp8"
    return "fp8", "nvfp4" if quantization.get("moe_quant_algo") == "NVFP4" else "mxfp4"


def _ids(raw: dict[str, Any]) -> list[int]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ConfigError(f"eos_token_id is {value!r}; wanted an integer or a list of integers")
    return ids


def _check_sizes(c: DeepSeekV4Config) -> None:
    """Raise ConfigError for sizes that contradict one another."""
    numbers = msgspec.structs.asdict(c)
    numbers |= {f"rope_scaling.{name}": value for name, value in msgspec.structs.asdict(c.rope_scaling).items()}
    for name, value in numbers.items():
        zero_is_fine = name in ("num_hash_layers", "bos_token_id")
        if isinstance(value, int | float) and not (0 < value < math.inf or (value == 0 and zero_is_fine)):
            raise ConfigError(f"config.json: {name} is {value}; must be positive")
    if min(c.weight_block_size) < 1:
        raise ConfigError(f"config.json: weight_block_size is {list(c.weight_block_size)}; must be positive")
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim >= c.head_dim:
        raise ConfigError(
            f"config.json: qk_rope_head_dim {c.qk_rope_head_dim} must be even and below head_dim {c.head_dim}"
        )
    if c.qk_rope_head_dim > c.index_head_dim:
        raise ConfigError(
            f"config.json: index_head_dim {c.index_head_dim} has no room for qk_rope_head_dim {c.qk_rope_head_dim}"
        )
    if c.num_attention_heads % c.o_groups:
        raise ConfigError(
            f"config.json: o_groups {c.o_groups} does not divide num_attention_heads {c.num_attention_heads}"
        )
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}"
        )
    if c.num_hash_layers > c.num_hidden_layers:
        raise ConfigError(
            f"config.json: num_hash_layers {c.num_hash_layers} exceeds num_hidden_layers {c.num_hidden_layers}"
        )
    for token_id in (c.bos_token_id, *c.eos_token_ids):
        if not 0 <= token_id < c.vocab_size:
            raise ConfigError(
                f"config.json: token id {token_id} (bos or eos) is outside the vocabulary of {c.vocab_size}"
            )
