"""What weights take in a rank's memory: counted from the config, it is what loading allocates."""

import msgspec
import pytest
import torch

import kernels.expert_weights as expert_weights
from engine.model import weight_bytes
from engine.model.config import load_config
from engine.model.model import DeepSeekV4
from engine.model.published import published_config
from engine.model.shard import Shard
from engine.model.synthetic import synthetic_weights
from engine.model.weight_bytes import count_weights
from engine.model.weights import load_weights


@pytest.mark.parametrize("keeps_packed", [False, True], ids=["dequantised", "packed"])
@pytest.mark.parametrize("name", ["tiny", "mx", "geo"])
def test_counted_bytes_are_those_of_the_model_that_was_built(oracle, name, keeps_packed):
    config = load_config(oracle.folder(name))
    loaded = load_weights(oracle.folder(name), config, dtype=torch.bfloat16, keeps_packed=keeps_packed)
    model = DeepSeekV4(config, loaded.tensors, index_hadamard=False)
    del model.rotary  # frequencies are no weights
    counted = count_weights(config, Shard(), dtype="bfloat16", keeps_packed=keeps_packed)
    assert counted.total == sum(held(model).values())
    assert (counted.experts in loaded.packed.values()) == bool(loaded.packed)


def test_counted_bytes_of_a_shard_are_those_of_its_model():
    whole = published_config("DeepSeek-V4-Flash-NVFP4").first_layers(4)
    config = msgspec.structs.replace(whole, n_routed_experts=6, vocab_size=512, hidden_size=512, q_lora_rank=256)
    shard = Shard(1, 4)
    tensors = synthetic_weights(config, shard, dtype=torch.bfloat16, device=torch.device("cpu"), keeps_packed=True)
    model = DeepSeekV4(shard.of(config), tensors, index_hadamard=False)
    del model.rotary
    assert count_weights(config, shard, dtype="bfloat16", keeps_packed=True).total == sum(held(model).values())


def held(thing, found=None):
    """Return the bytes of every tensor's memory that an object holds, by address."""
    found = {} if found is None else found
    if isinstance(thing, torch.Tensor):
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, list | tuple):
        for part in thing:
            held(part, found)
    elif type(thing).__module__.startswith(("engine", "kernels")):
        names = getattr(thing, "__slots__", None) or vars(thing)
        for name in names:
            held(getattr(thing, name), found)
    return found


def test_experts_that_kernels_cannot_hold_are_counted_dequantised(oracle):
    model = load_config(oracle.folder("mx"))
    assert count_weights(model, Shard(0, 2), dtype="bfloat16", keeps_packed=True).experts == "mxfp4"
    thin = msgspec.structs.replace(model, moe_intermediate_size=64)  # of two ranks 32 channels: no whole step of 64
    assert count_weights(thin, Shard(0, 2), dtype="bfloat16", keeps_packed=True).experts == "bfloat16"


def test_packing_is_counted_by_the_kernels_own_sizes():
    assert (weight_bytes._PACKED_ROWS, weight_bytes._PACKED_CHANNELS) == (expert_weights.TILE_ROWS, expert_weights.STEP)
    assert weight_bytes._PACKED_GROUP == expert_weights.GROUP


def test_a_rank_of_four_holds_a_quarter_of_the_experts_and_the_embedding_whole():
    model = published_config("DeepSeek-V4-Flash")
    whole = count_weights(model, Shard(), dtype="bfloat16", keeps_packed=True).parts
    quarter = count_weights(model, Shard(3, 4), dtype="bfloat16", keeps_packed=True).parts
    assert quarter["experts"] == pytest.approx(whole["experts"] / 4, rel=1e-5)
    assert quarter["head"] * 4 == whole["head"]
    assert quarter["embedding"] == whole["embedding"] == 129280 * 4096 * 2
    assert quarter["compressors"] == whole["compressors"]
    # 256 + 1 experts of 3 matrices, 43 layers, four bits and a byte of scale per 32 values (one of 8 bits is shared).
    routed = 43 * 256 * 3 * 4096 * 2048 * (1 / 2 + 1 / 32)
    shared = 43 * 3 * 4096 * 2048 * (1 + 4 / 128**2)
    assert whole["experts"] == pytest.approx(routed + shared, rel=1e-4)
