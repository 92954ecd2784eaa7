"""Random weights of a model's shapes, drawn where they will lie: what a step costs does not depend on their values.

Formats are those of the NVFP4 checkpoint where decode kernels run: packed experts, e4m3 matrices in tiles of 128 x 128,
bfloat16 where it has bfloat16. Elsewhere all is in the compute dtype. Values are scaled so that activations stay near 1
and the gate spreads tokens over all experts; the text that comes out means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.config import DeepSeekV4Config
from engine.model.expert_stacks import split_name
from engine.model.shard import Shard
from engine.model.tensor_specs import TensorSpec, tensor_specs
from engine.model.weights import scale_name
from kernels.expert_weights import LANES, STEP, TILE_ROWS
from kernels.gemm import BLOCK

# Matrices that checkpoints store in bfloat16; all others of kind "matrix" are e4m3.
_WIDE = ("embed.weight", "weights_proj.weight")
# float32 after loading, whose stored form is bfloat16: the model may keep them so only if they are exactly that.
_NARROW = ("wkv.weight", "wgate.weight", "gate.weight", "head.weight")
_SCALE = 2.0**-6  # e4m3 has its digits between 2^-6 and 448: codes near 64 times a scale of 1/64


def synthetic_weights(
    config: DeepSeekV4Config,
    shard: Shard,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keeps_packed: bool,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Tensor]:
    """Return tensors by the names under which load_weights has them, of a shard of the model.

    config: of the whole model.   dtype: of matrices that are not packed.   device, keeps_packed: as in load_weights:
    routed experts lie on the device, all else on the CPU, though all is drawn on the device. The same seed on the same
    kind of device gives the same values.
    """
    say = progress or (lambda _: None)
    draw = torch.Generator(device).manual_seed(seed)
    local = shard.of(config)
    tensors: dict[str, Tensor] = {}
    held = shard.experts(config)
    for name, spec in tensor_specs(config, shard).items():
        place = split_name(name)
        if place is None:
            drawn = _tensor(name, spec, local, draw, dtype=dtype, packs=keeps_packed)
            tensors |= {key: tensor.cpu() for key, tensor in drawn.items()}
        elif place[1] == held[0] and not name.endswith("w3.weight"):  # once for w1 with w3, once for w2
            tensors |= _experts(place[0], len(held), local, draw, dtype=dtype, packs=keeps_packed)
            if place[0].endswith("w2"):
                say(f"weights: layer {name.split('.')[1]} of {config.num_hidden_layers} drawn at random")
    return tensors


def _tensor(
    name: str, spec: TensorSpec, config: DeepSeekV4Config, draw: torch.Generator, *, dtype: torch.dtype, packs: bool
) -> dict[str, Tensor]:
    shape, device = spec.shape, draw.device
    if spec.kind == "ids":
        odds = torch.rand(shape[0], config.n_routed_experts, generator=draw, device=device)
        return {name: odds.topk(shape[1]).indices}
    if name.endswith(("norm.weight", "_scale")):
        return {name: torch.ones(shape, device=device)}
    if len(shape) == 1 or name.endswith(".ape"):  # biases, sinks
        return {name: torch.zeros(shape, device=device)}
    values = torch.randn(shape, generator=draw, device=device)
    if name != "embed.weight":
        values *= shape[1] ** -0.5
    if spec.kind == "float32":
        if not name.endswith(_NARROW):
            return {name: values}
        return {name: values.to(torch.bfloat16) if packs else values.to(torch.bfloat16).float()}
    if name.endswith(_WIDE) or not packs:
        return {name: values.to(dtype)}
    scale = torch.full([math.ceil(size / BLOCK) for size in shape], _SCALE, device=device)
    return {name: (values / _SCALE).to(torch.float8_e4m3fn), scale_name(name): scale}


def _experts(
    stack: str, experts: int, config: DeepSeekV4Config, draw: torch.Generator, *, dtype: torch.dtype, packs: bool
) -> dict[str, Tensor]:
    """Return one stack: packed NVFP4, random codes under random scales, or whole matrices."""
    hidden, inner, device = config.hidden_size, config.moe_intermediate_size, draw.device
    rows, channels, parts = (hidden, inner, 1) if stack.endswith("w2") else (2 * inner, hidden, 2)
    if not packs or rows % TILE_ROWS or channels % STEP:
        values = torch.randn(experts, rows, channels, generator=draw, device=device) * channels**-0.5
        return {stack: values.to(dtype)}
    steps = channels // STEP
    together = next(n for n in (4, 2, 1) if steps % n == 0)
    codes = torch.randint(
        -(2**31), 2**31, (experts, rows // TILE_ROWS, steps, 32, 4), generator=draw, device=device, dtype=torch.int32
    )
    shape = (experts, rows // TILE_ROWS, steps // together, LANES["nvfp4"], 2 * together)
    scales = torch.randint(0x28, 0x49, shape, generator=draw, device=device, dtype=torch.uint8)  # 0.25 to 4.5 in e4m3
    factors = torch.full((experts, parts), 1 / (4 * channels**0.5), device=device)
    return {f"{stack}.codes": codes, f"{stack}.scales": scales.view(torch.int16), f"{stack}.factors": factors}
