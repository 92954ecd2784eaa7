"""The plan's workspace of a prompt's chunk, against what the operations for prompts really hold at once."""

from __future__ import annotations

import weakref
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from engine.cache import KVCache
from engine.config import EngineConfig
from engine.memory_parts import MIB, fixed_parts
from engine.model.config import DeepSeekV4Config
from engine.model.layers import Rotary
from engine.model.layout import build_layout
from engine.model.model import DeepSeekV4
from engine.model.published import published_config
from engine.model.shard import Shard
from engine.model.synthetic import synthetic_weights
from kernels.ragged import RaggedBatch

TOKENS = 384


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that live at once; `peak` is the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def held_by_attention(model: DeepSeekV4Config, layer: int) -> int:
    """Return the peak of a layer's attention over one prompt of TOKENS, weights, cache and input left out."""
    shard = Shard(0, 4)
    weights = synthetic_weights(model, shard, dtype=torch.bfloat16, device=torch.device("cpu"), keeps_packed=False)
    local = shard.of(model)
    attention = DeepSeekV4(local, weights, index_hadamard=False).layers[layer].attention
    layout = build_layout(model, block_tokens=256, kv_cache_dtype="packed", index_cache_dtype="fp8")
    cache = KVCache(layout, 2, 1)
    batch = RaggedBatch.build([(0, TOKENS)], slots=[0], block_tables=[[0, 1]], device="cpu")
    rotations = Rotary(local, torch.device("cpu")).at(batch)
    x = torch.randn(TOKENS, local.hidden_size).to(torch.bfloat16)
    with torch.inference_mode(), Held() as held:
        attention(x, batch, None, rotations, cache)
    return held.peak


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(1, id="window", marks=pytest.mark.long),
        pytest.param(2, id="csa"),
        pytest.param(3, id="hca", marks=pytest.mark.long),
    ],
)
def test_a_chunk_holds_no_more_than_is_planned_and_not_much_less(layer: int) -> None:
    whole = published_config("DeepSeek-V4-Flash").first_layers(4)
    model = msgspec.structs.replace(
        whole, hidden_size=512, q_lora_rank=128, n_routed_experts=6, moe_intermediate_size=256, vocab_size=512
    )
    config = EngineConfig(
        model="m", role="prefill", device="cuda", ranks=4, max_num_batched_tokens=TOKENS, max_num_seqs=1,
        kv_cache_dtype="bf16",  # packed rows have kernels there, which hold less of a layer
    )  # fmt: skip
    layout = build_layout(model, block_tokens=256, kv_cache_dtype="packed", index_cache_dtype="fp8")
    planned = next(part.num_bytes for part in fixed_parts(config, model, layout) if part.name == "workspace")
    held = held_by_attention(model, layer)
    assert planned / 3 < held < planned, f"{held / MIB:.1f} of {planned / MIB:.1f} MiB"
