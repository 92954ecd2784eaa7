"""From safetensors to tensors the model can multiply: official names, checked, dequantised but for packed experts.

tensor_specs.py is the table of what a checkpoint must hold; `load_weights` reads exactly that and refuses the rest:
anything missing, unused, misshapen or not finite is listed by name before a worker serves. `mtp.*` (drafting) is
read past. checkpoint.py knows how tensors are stored.

For decode kernels routed experts may stay in four bits (expert_stacks.py), and other matrices in e4m3. All else is
dequantised in float32 and then cast to the compute dtype. A rank of a group keeps its part (shard.py) of what it reads:
a tensor is checked whole, whoever needs which rows of it.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint, UnusableTensor, WeightsError, refuse
from engine.model.config import DeepSeekV4Config
from engine.model.expert_stacks import ExpertStacks, InnerSlice, split_name
from engine.model.shard import Shard, tiles_of
from engine.model.tensor_specs import TensorSpec, tensor_specs
from kernels.expert_weights import Format


class LoadedWeights(msgspec.Struct, frozen=True, kw_only=True):
    """tensors: by official name, experts as ExpertStacks has them: `…experts.w13` and `…experts.w2`, packed or not.

    skipped: names of `mtp.*` tensors that were read past.   num_bytes: of `tensors`.   packed: formats of the experts'
    matrices that stay in four bits, by stack.   dequantized: why others do not, where packing was asked for.
    """

    tensors: dict[str, Tensor]
    skipped: tuple[str, ...]
    num_bytes: int
    packed: dict[str, Format]
    dequantized: dict[str, str]


def load_weights(
    folder: str | Path,
    config: DeepSeekV4Config,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    keeps_packed: bool = False,
    shard: Shard | None = None,
    progress: Callable[[str], None] | None = None,
) -> LoadedWeights:
    """Return the weights of a checkpoint folder. Raises WeightsError listing what is wrong with it.

    device: of the routed experts; all else is on the CPU.   keeps_packed: keep experts of four bits packed, as far as
    possible, and other matrices of e4m3, whose float32 scales are `….scale`.   shard: of which part; None: the whole.
    """
    say, shard = progress or (lambda _: None), shard or Shard()
    try:
        inner = InnerSlice.of(config, *((0, 1) if shard.by_expert else (shard.index, shard.count)))
        held = shard.experts(config)
    except ValueError as problem:
        raise WeightsError(f"{folder}: {problem}") from None
    with contextlib.ExitStack() as stack:
        checkpoint = Checkpoint(Path(folder), stack)
        specs = tensor_specs(config)
        checkpoint.check_headers(specs, config)
        packings = checkpoint.packings(specs, config, inner) if keeps_packed else {}
        tensors: dict[str, Tensor] = {}
        experts = ExpertStacks(config, inner, packings, dtype=dtype, device=torch.device(device), held=held)
        problems: list[str] = []
        for number, (file, names) in enumerate(checkpoint.by_shard(specs), 1):
            say(f"weights: shard {number} of {checkpoint.num_shards}, {file}")
            for name in names:
                try:
                    place, part = split_name(name), shard.cut(name, specs[name].shape)
                    if place is not None and place[1] not in held:
                        continue
                    tiles = None
                    if place is None and keeps_packed and checkpoint.is_e4m3(name, config):
                        tiles = tiles_of(part, specs[name].shape)
                    if tiles is not None:
                        codes, scale = checkpoint.e4m3(name, specs[name], config)
                        tensors[name], tensors[scale_name(name)] = codes[part].clone(), scale[tiles].contiguous()
                    elif place is None:
                        tensors[name] = _cast(checkpoint.read(name, specs[name], config)[part], specs[name], dtype)
                    elif experts.is_packed(place[0]):
                        experts.put(name, checkpoint.four_bits(name, inner.within(place[2])))
                    else:
                        experts.put(name, checkpoint.read(name, specs[name], config)[inner.within(place[2])])
                except UnusableTensor as problem:
                    problems.append(str(problem))
        refuse(folder, problems)
        tensors |= experts.tensors
        num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        skipped = tuple(sorted(n for n in checkpoint.where if n.startswith("mtp.")))
        say(f"weights: {len(specs)} tensors, {num_bytes / 1e9:.3f} GB as {str(dtype).removeprefix('torch.')}")
        kept = sum(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values())
        if kept:
            say(f"weights: {kept} other matrices stay in e4m3")
        for line in _told(experts):
            say(line)
        if skipped:
            say(f"weights: read past {len(skipped)} tensors of mtp.* (draft blocks are not used)")
        return LoadedWeights(
            tensors=tensors,
            skipped=skipped,
            num_bytes=num_bytes,
            packed=experts.formats,
            dequantized=experts.dequantized,
        )


def scale_name(name: str) -> str:
    """Return what the scales of a matrix `….weight` are called among loaded tensors."""
    return name.removesuffix("weight") + "scale"


def _cast(tensor: Tensor, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    """Return the part of a tensor in the dtype it is used in, contiguous; nothing of the whole is kept with it."""
    wanted = {"matrix": dtype, "float32": torch.float32, "ids": torch.int64}[spec.kind]
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.to(wanted, copy=is_part).contiguous()


def _told(experts: ExpertStacks) -> Iterator[str]:
    """Yield what to say about stacks that stay in four bits, and those that were to but do not."""
    formats = collections.Counter(experts.formats.values())
    for format, count in sorted(formats.items()):
        yield f"weights: {count} matrices of experts stay in four bits ({format})"
    if experts.dequantized:
        stack, reason = next(iter(experts.dequantized.items()))
        more = f" (and {len(experts.dequantized) - 1} more)" if len(experts.dequantized) > 1 else ""
        yield f"weights: no decode kernels for {stack}{more}, its experts are dequantised: {reason}"
