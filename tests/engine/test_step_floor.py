"""The floor of a decode step: the figures known of V4-Flash, and what moves them."""

import dataclasses

import msgspec
import pytest

from engine.config import EngineConfig
from engine.model.layout import build_layout
from engine.step_floor import MXFP4_BYTES, Formats, StepFloor, formats_of


@dataclasses.dataclass
class Device:
    bandwidth: float = 4.3e12
    bf16: float = 788e12


@pytest.mark.parametrize(("batch", "wanted"), [(1, 0.89), (16, 3.60), (64, 7.99)])
def test_one_of_four_ranks_of_flash_on_an_h200_has_the_known_floor(flash, batch, wanted):
    assert StepFloor(flash, Formats(), shards=4).ms(batch, 8192, Device()) == pytest.approx(wanted, rel=0.01)


def test_a_part_takes_the_longer_of_reading_and_computing(flash):
    floor = StepFloor(flash, Formats())
    head = floor.parts(1, 1)[-1]
    assert head.floor_us(Device()) == pytest.approx(head.num_bytes / 4.3e6)
    assert head.floor_us(Device(bf16=1e9)) == pytest.approx(head.flops / 1e3)


def test_distinct_experts_are_those_of_one_token_at_first_and_all_at_last(flash):
    floor = StepFloor(flash, Formats())
    assert floor.distinct_experts(1) == pytest.approx(6)
    assert floor.distinct_experts(2) == pytest.approx(12 - 36 / 256)
    assert floor.distinct_experts(10_000) == pytest.approx(256)


def test_only_what_is_cut_gets_smaller_with_more_ranks(flash):
    whole, quarter = (
        {part.name: part.num_bytes for part in StepFloor(flash, Formats(), shards=n).parts(4, 8192)} for n in (1, 4)
    )
    fourths = {name for name in whole if quarter[name] == whole[name] / 4}
    assert fourths == {"output", "shared expert", "routed experts", "head"}
    assert {name for name in whole if quarter[name] == whole[name]} == {
        "hyper-connections",
        "indexer",
        "attention",
        "gate",
    }


def test_context_moves_attention_and_indexer_only_and_attention_of_csa_layers_not_beyond_top_k(flash):
    floor = StepFloor(flash, Formats())
    short, long = ({part.name: part.num_bytes for part in floor.parts(1, n)} for n in (8192, 131072))
    assert {name for name in short if long[name] != short[name]} == {"attention", "indexer"}
    assert long["attention"] - short["attention"] == 20 * 584 * (1024 - 64)
    assert long["indexer"] == 16 * short["indexer"]


def test_fewer_layers_and_other_formats_are_counted_as_they_are(flash):
    two = {part.name: part for part in StepFloor(flash.first_layers(2), Formats()).parts(1, 8192)}
    assert two["indexer"].num_bytes == 0
    assert two["attention"].num_bytes == 2 * 128 * 584
    experts = [
        StepFloor(flash, formats).parts(1, 1)[-2].num_bytes for formats in (Formats(), Formats(expert=MXFP4_BYTES))
    ]
    assert experts[1] / experts[0] == pytest.approx(0.53125 / 0.5625)


def test_formats_are_those_in_memory_packed_where_decode_kernels_run(flash):
    config = EngineConfig(model="flash", role="decode", simulate_rank="0/4")
    stored = msgspec.structs.replace(flash, stored_matrices="fp8", stored_experts="nvfp4")
    layout = build_layout(flash, block_tokens=256, kv_cache_dtype="packed", index_cache_dtype="fp8")
    assert formats_of(config, stored, layout, keeps_packed=True) == Formats()
    assert formats_of(config, stored, layout, keeps_packed=False) == Formats(linear=2.0, expert=2.0)
