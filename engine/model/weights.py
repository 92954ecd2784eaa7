"""From safetensors to tensors the model can multiply: official names, dequantised, checked.

`tensor_specs` is the table of what a checkpoint must hold; `load_weights` reads exactly that and refuses the rest:
anything missing, unused, misshapen or not finite is listed by name before a worker serves. `mtp.*` (drafting) is
read past.

Stored forms of a matrix: BF16, F16, F32; F8_E4M3 with a `.scale` per tile (128x128); I8 with two e2m1 a byte and a
`.scale` per 32 columns (MXFP4). Scales are F8_E8M0 (read as raw exponent bytes: a numeric copy to an integer type would
zero them) or F32. Everything is dequantised in float32 and then cast to the compute dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.config import CSA_RATIO, DeepSeekV4Config, shard_paths
from kernels.quant import dequantize_block_fp8, dequantize_e2m1, ue8m0_to_scale

FLOATS = ("BF16", "F16", "F32")
SCALES = ("F8_E8M0", "U8", "F32")
FP4_GROUP = 32
_SHOWN = 20


class WeightsError(ValueError):
    """The checkpoint does not hold what the config promises. The text lists the tensors."""


class TensorSpec(msgspec.Struct, frozen=True):
    """What a tensor must be. matrix: any stored form, used in the compute dtype. float32: kept so. ids: int64."""

    shape: tuple[int, ...]
    kind: Literal["matrix", "float32", "ids"]


class LoadedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """tensors: by official name, experts stacked as `…experts.w13` [E, 2I, H] and `…experts.w2` [E, H, I].

    skipped: names of `mtp.*` tensors that were read past.   num_bytes: of `tensors`.
    """

    tensors: dict[str, Tensor]
    skipped: tuple[str, ...]
    num_bytes: int


def tensor_specs(c: DeepSeekV4Config) -> dict[str, TensorSpec]:
    """Return every tensor of the main model by official name, scales left out."""
    h, d, hc, inter = c.hidden_size, c.head_dim, c.hc_mult, c.moe_intermediate_size
    heads_per_group = c.num_attention_heads // c.o_groups
    specs: dict[str, TensorSpec] = {}

    def add(name: str, kind: Literal["matrix", "float32", "ids"], *shape: int) -> None:
        specs[name] = TensorSpec(shape, kind)

    def add_hyper_connection(prefix: str, outputs: int, scales: int) -> None:
        add(f"{prefix}_fn", "float32", outputs, hc * h)
        add(f"{prefix}_base", "float32", outputs)
        add(f"{prefix}_scale", "float32", scales)

    def add_compressor(prefix: str, ratio: int, dim: int) -> None:
        width = 2 * dim if ratio == CSA_RATIO else dim
        add(f"{prefix}.ape", "float32", ratio, width)
        add(f"{prefix}.wkv.weight", "float32", width, h)
        add(f"{prefix}.wgate.weight", "float32", width, h)
        add(f"{prefix}.norm.weight", "float32", dim)

    def add_expert(prefix: str) -> None:
        add(f"{prefix}.w1.weight", "matrix", inter, h)
        add(f"{prefix}.w2.weight", "matrix", h, inter)
        add(f"{prefix}.w3.weight", "matrix", inter, h)

    add("embed.weight", "matrix", c.vocab_size, h)
    add("head.weight", "float32", c.vocab_size, h)
    add("norm.weight", "float32", h)
    add_hyper_connection("hc_head", hc, 1)
    for i, ratio in enumerate(c.compress_ratios):
        attn, ffn = f"layers.{i}.attn", f"layers.{i}.ffn"
        add(f"layers.{i}.attn_norm.weight", "float32", h)
        add(f"layers.{i}.ffn_norm.weight", "float32", h)
        add_hyper_connection(f"layers.{i}.hc_attn", (2 + hc) * hc, 3)
        add_hyper_connection(f"layers.{i}.hc_ffn", (2 + hc) * hc, 3)
        add(f"{attn}.attn_sink", "float32", c.num_attention_heads)
        add(f"{attn}.wq_a.weight", "matrix", c.q_lora_rank, h)
        add(f"{attn}.q_norm.weight", "float32", c.q_lora_rank)
        add(f"{attn}.wq_b.weight", "matrix", c.num_attention_heads * d, c.q_lora_rank)
        add(f"{attn}.wkv.weight", "matrix", d, h)
        add(f"{attn}.kv_norm.weight", "float32", d)
        add(f"{attn}.wo_a.weight", "matrix", c.o_groups * c.o_lora_rank, heads_per_group * d)
        add(f"{attn}.wo_b.weight", "matrix", h, c.o_groups * c.o_lora_rank)
        if ratio:
            add_compressor(f"{attn}.compressor", ratio, d)
        if ratio == CSA_RATIO:
            add(f"{attn}.indexer.wq_b.weight", "matrix", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            add(f"{attn}.indexer.weights_proj.weight", "matrix", c.index_n_heads, h)
            add_compressor(f"{attn}.indexer.compressor", ratio, c.index_head_dim)
        add(f"{ffn}.gate.weight", "float32", c.n_routed_experts, h)
        if c.is_hash_layer(i):
            add(f"{ffn}.gate.tid2eid", "ids", c.vocab_size, c.num_experts_per_tok)
        else:
            add(f"{ffn}.gate.bias", "float32", c.n_routed_experts)
        add_expert(f"{ffn}.shared_experts")
        for e in range(c.n_routed_experts):
            add_expert(f"{ffn}.experts.{e}")
    return specs


def load_weights(
    folder: str | Path,
    config: DeepSeekV4Config,
    *,
    dtype: torch.dtype,
    progress: Callable[[str], None] | None = None,
) -> LoadedWeights:
    """Return the weights of a checkpoint folder on the CPU. Raises WeightsError listing what is wrong with it."""
    say = progress or (lambda _: None)
    with contextlib.ExitStack() as stack:
        checkpoint = _Checkpoint(Path(folder), stack)
        specs = tensor_specs(config)
        checkpoint.check_headers(specs, config)
        loaded = _Stacks(config, dtype)
        problems: list[str] = []
        for number, (shard, names) in enumerate(checkpoint.by_shard(specs), 1):
            say(f"weights: shard {number} of {checkpoint.num_shards}, {shard}")
            for name in names:
                tensor = checkpoint.read(name, specs[name], config)
                problem = _content_problem(name, tensor, config)
                if problem:
                    problems.append(problem)
                else:
                    loaded.put(name, tensor if specs[name].kind == "ids" else _cast(tensor, specs[name], dtype))
        _refuse(folder, problems)
        num_bytes = sum(t.numel() * t.element_size() for t in loaded.tensors.values())
        skipped = tuple(sorted(n for n in checkpoint.where if n.startswith("mtp.")))
        say(f"weights: {len(specs)} tensors, {num_bytes / 1e9:.3f} GB as {str(dtype).removeprefix('torch.')}")
        if skipped:
            say(f"weights: read past {len(skipped)} tensors of mtp.* (draft blocks are not used)")
        return LoadedWeights(tensors=loaded.tensors, skipped=skipped, num_bytes=num_bytes)


class _Checkpoint:
    """The shards of a folder, open, and which tensor lies in which."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.where: dict[str, str] = {}
        self._shards: dict[str, Any] = {}
        problems: list[str] = []
        for path in shard_paths(folder):
            try:
                shard = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                problems.append(f"{path.name}: can't be opened ({error})")
                continue
            self._shards[path.name] = shard
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if name in self.where:
                    problems.append(f"{name}: stored in both {self.where[name]} and {path.name}")
                self.where[name] = path.name
        _refuse(folder, problems)

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def by_shard(self, specs: dict[str, TensorSpec]) -> Iterator[tuple[str, list[str]]]:
        """Yield each shard's name with the wanted tensors it holds."""
        for shard in self._shards:
            yield shard, [name for name in specs if self.where[name] == shard]

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return (stored dtype, shape) without reading the data."""
        part = self._shards[self.where[name]].get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())

    def check_headers(self, specs: dict[str, TensorSpec], config: DeepSeekV4Config) -> None:
        """Raise WeightsError for tensors that are missing, superfluous, or of a wrong type or shape."""
        problems, scales = [], set()
        for name, spec in specs.items():
            if name not in self.where:
                problems.append(f"{name}: missing, wanted {list(spec.shape)}")
                continue
            stored, shape = self.header(name)
            wanted, scale_shape = _stored_form(stored, spec, config)
            if wanted is None:
                problems.append(f"{name}: stored as {stored}, which is not a form of a {spec.kind} tensor")
            elif shape != wanted:
                problems.append(f"{name}: shape {list(shape)} as {stored}, wanted {list(wanted)}")
            if scale_shape is not None:
                scale = _scale_name(name)
                scales.add(scale)
                problems.extend(self._scale_problems(scale, scale_shape))
        known = specs.keys() | scales
        others = [n for n in self.where if n not in known and not n.startswith("mtp.")]
        problems.extend(f"{n}: not part of this model" for n in others)
        _refuse(self.folder, problems)

    def _scale_problems(self, name: str, wanted: tuple[int, ...]) -> Iterator[str]:
        if name not in self.where:
            yield f"{name}: missing, its weight is quantised"
            return
        stored, shape = self.header(name)
        if stored not in SCALES:
            yield f"{name}: stored as {stored}, wanted one of {', '.join(SCALES)}"
        if shape != wanted:
            yield f"{name}: shape {list(shape)}, wanted {list(wanted)}"

    def read(self, name: str, spec: TensorSpec, config: DeepSeekV4Config) -> Tensor:
        """Return the tensor dequantised to float32, or as int64 ids. A bad scale comes out as NaN."""
        tensor = self._get(name)
        if spec.kind == "ids":
            return tensor.to(torch.int64)
        stored, _ = self.header(name)
        if stored in FLOATS:
            return tensor.float()
        scale = self._get(_scale_name(name))
        scale = scale.float() if scale.dtype == torch.float32 else ue8m0_to_scale(scale.view(torch.uint8))
        # Zero, negative or subnormal scales are holes of an export: 1/scale would overflow somewhere later.
        scale = scale.masked_fill(~(scale >= torch.finfo(torch.float32).tiny), float("nan"))
        if stored == "I8":
            return dequantize_e2m1(tensor, scale, FP4_GROUP)
        return dequantize_block_fp8(tensor, scale, config.weight_block_size)

    def _get(self, name: str) -> Tensor:
        tensor: Tensor = self._shards[self.where[name]].get_tensor(name)
        return tensor


class _Stacks:
    """Collects tensors, each expert straight into its place of one tensor per layer."""

    def __init__(self, config: DeepSeekV4Config, dtype: torch.dtype) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._dtype = dtype
        h, inter, n = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self._shapes = {"w13": (n, 2 * inter, h), "w2": (n, h, inter)}
        self._inter = inter

    def put(self, name: str, tensor: Tensor) -> None:
        prefix, found, rest = name.partition(".experts.")
        if not found:
            self.tensors[name] = tensor
            return
        expert, matrix, _ = rest.split(".")
        stack = "w2" if matrix == "w2" else "w13"
        key = f"{prefix}.experts.{stack}"
        if key not in self.tensors:
            self.tensors[key] = torch.empty(self._shapes[stack], dtype=self._dtype)
        place = self.tensors[key][int(expert)]
        if stack == "w13":
            place = place[: self._inter] if matrix == "w1" else place[self._inter :]
        place.copy_(tensor)


def _stored_form(
    stored: str, spec: TensorSpec, config: DeepSeekV4Config
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return (shape of the stored tensor, shape of its scale), None where there is no such form or no scale."""
    if spec.kind == "ids":
        return (spec.shape if stored in ("I64", "I32") else None), None
    if stored in FLOATS:
        return spec.shape, None
    if spec.kind == "matrix" and stored == "F8_E4M3":
        rows, columns = config.weight_block_size
        return spec.shape, (-(-spec.shape[0] // rows), -(-spec.shape[1] // columns))
    if spec.kind == "matrix" and stored == "I8" and spec.shape[1] % FP4_GROUP == 0:
        return (spec.shape[0], spec.shape[1] // 2), (spec.shape[0], spec.shape[1] // FP4_GROUP)
    return None, None


def _scale_name(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _cast(tensor: Tensor, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype if spec.kind == "matrix" else torch.float32)


def _content_problem(name: str, tensor: Tensor, config: DeepSeekV4Config) -> str | None:
    if tensor.is_floating_point():
        bad = int((~tensor.isfinite()).sum())
        text = f"{name}: {bad} of {tensor.numel()} values are NaN or infinite, or have an unusable scale"
        return text if bad else None
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= config.n_routed_experts:
        return f"{name}: expert ids {low}..{high}, wanted 0..{config.n_routed_experts - 1}"
    return None


def _refuse(folder: str | Path, problems: list[str]) -> None:
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightsError(f"{folder}: {len(problems)} tensors don't fit config.json:\n  {shown}{more}")
