"""What weights take in a rank's memory: counted from the config, it is what loading allocates."""

import msgspec
import pytest
import torch

import kernels.expert_weights as expert_weights
from engine.model import weight_bytes
from engine.model.config import load_config
from engine.model.published import published_config
from engine.model.shard import Shard
from engine.model.weight_bytes import count_weights
from engine.model.weights import load_weights


@pytest.mark.parametrize("keeps_packed", [False, True], ids=["dequantised", "packed"])
@pytest.mark.parametrize("name", ["tiny", "mx", "geo"])
def test_counted_bytes_are_those_of_the_loaded_tensors(oracle, name, keeps_packed):
    folder = oracle.folder(name)
    loaded = load_weights(folder, load_config(folder), dtype=torch.bfloat16, keeps_packed=keeps_packed)
    counted = count_weights(load_config(folder), Shard(), dtype="bfloat16", keeps_packed=keeps_packed)
    assert counted.total == loaded.num_bytes
    assert (counted.experts in loaded.packed.values()) == bool(loaded.packed)


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
