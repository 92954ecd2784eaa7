"""A measured step carried over to another card: the arithmetic, what decides a part, and what is refused."""

import dataclasses
import math

import pytest

from engine.step_floor import Formats, Part, StepFloor
from engine.step_projection import (
    H200,
    NCCL_US,
    ONE_SHOT_US,
    RTX_PRO_6000,
    StepProjection,
    all_reduce_us,
    load_counts,
)

KIB = 1024


@pytest.fixture(scope="module")
def floor(flash):
    return StepFloor(flash, Formats(), shards=4)


@pytest.fixture(scope="module")
def counts():
    return load_counts()["per_unit"]


def free(counts):
    """Return counts of kernels that issue nothing."""
    return {
        arch: {tokens: dict.fromkeys(of, 0.0) for tokens, of in by_tokens.items()} for arch, by_tokens in counts.items()
    }


class TwoParts:
    """A floor of two parts with round numbers; 10 layers of 4,096 channels."""

    shards, formats = 4, Formats()

    def __init__(self):
        self.model = dataclasses.make_dataclass("Model", ["hidden_size", "compress_ratios"])(4096, (0,) * 10)

    def parts(self, batch, context):
        return [Part("reading", 1, 4.3e9, 0, {"weights": 1e9}), Part("issuing", 1, 0, 0, {"weights": 1e9, "keys": 1e6})]


def test_a_step_is_bytes_or_issue_of_each_part_and_what_is_fixed_and_the_exchange():
    per_unit = {"weights": 10.0, "keys": 500.0}
    fast = dataclasses.replace(H200, multiprocessors=100, clock_hz=1e9)  # 12.8e12 instructions a second
    slow = dataclasses.replace(RTX_PRO_6000, bandwidth=2.15e12, multiprocessors=200, clock_hz=2e9)  # 51.2e12
    one = StepProjection(TwoParts(), {"sm_90": {"4": per_unit}, "sm_120": {"4": per_unit}}, measured_on=fast, card=slow)
    step = one.step(2, 8192, 5.0)
    issued = 1e10 + 5e8
    assert step.measured_sum_ms == pytest.approx(1 + 1000 * issued / 12.8e12)
    assert step.sum_ms == pytest.approx(2 + 1000 * issued / 51.2e12)
    assert step.fixed_ms == pytest.approx(5 - step.measured_sum_ms)
    assert step.all_reduce_ms == pytest.approx(20 * 0.0077)  # 16 KiB each
    assert step.step_ms == pytest.approx(step.sum_ms + step.fixed_ms + step.all_reduce_ms)
    assert step.tokens_per_s == pytest.approx(2000 / step.step_ms)
    assert [bound.by for bound in step.projected.values()] == ["bytes", "issue"]


def test_a_step_bound_by_memory_alone_is_longer_by_the_ratio_of_bandwidths(floor, counts):
    step = StepProjection(floor, free(counts)).step(16, 8192, 0.0)
    assert step.sum_ms / step.measured_sum_ms == pytest.approx(4.3 / 1.597)
    assert {bound.by for bound in step.projected.values()} == {"bytes"}


def test_a_step_faster_than_its_sum_has_no_negative_fixed_part(floor, counts):
    assert StepProjection(floor, counts).step(1, 8192, 0.1).fixed_ms == 0


def test_what_should_not_be_exceeded_is_the_whole_step_slowed_by_memory(floor, counts):
    step = StepProjection(floor, counts).step(1, 8192, 3.0)
    assert step.scaled_ms == pytest.approx(3 * 4.3 / 1.597 + step.all_reduce_ms)
    assert step.scaled_ms > step.step_ms


@pytest.mark.parametrize(
    ("num_bytes", "us"),
    [(1, 6.1), (8 * KIB, 6.4), (12 * KIB, 7.05), (512 * KIB, 51.0), (1024 * KIB, 51.0 + 2 * 22.3)],
)
def test_an_all_reduce_lies_between_the_sizes_measured_and_goes_on_beyond_them(num_bytes, us):
    assert all_reduce_us(num_bytes, ONE_SHOT_US) == pytest.approx(us)


def test_both_ways_to_exchange_are_told(floor, counts):
    step = StepProjection(floor, counts).step(64, 8192, 14.0)
    assert (step.all_reduce_ms, step.nccl_ms) == pytest.approx((86 * 0.0510, 86 * 0.0717))
    assert len(NCCL_US) == len(ONE_SHOT_US)


@pytest.mark.parametrize("batch", [1, 5, 16, 33, 64])
def test_every_weight_and_key_of_a_step_has_a_count_on_both_chips(floor, counts, batch):
    reads = {name for part in floor.parts(batch, 8192) for name in part.reads}
    for chip in (H200, RTX_PRO_6000):
        assert all(reads == set(by_read) for by_read in counts[chip.arch].values())
        for part in floor.parts(batch, 8192):
            bound = StepProjection(floor, counts).bound(part, batch, chip)
            assert math.isfinite(bound.us) and bound.us > 0


def test_a_batch_takes_the_counts_of_the_next_number_of_tokens(floor, counts):
    changed = {arch: {tokens: dict(of) for tokens, of in by_tokens.items()} for arch, by_tokens in counts.items()}
    changed["sm_120"]["32"]["head"] = 1000.0
    head = floor.parts(1, 1)[-1]
    projection = StepProjection(floor, changed)
    slow = [batch for batch in (16, 17, 32, 33) if projection.bound(head, batch, RTX_PRO_6000).issue_us > 1000]
    assert slow == [17, 32]


def test_weights_read_are_those_whose_bytes_are_counted(floor):
    parts = {part.name: part for part in floor.parts(4, 8192)}
    for name, size in (
        ("output", 1),
        ("shared expert", 1),
        ("routed experts", 0.5625),
        ("head", 2),
        ("attention", 584),
    ):
        assert sum(parts[name].reads.values()) * size == pytest.approx(parts[name].num_bytes)
    given = parts["projections"].reads
    assert given["q_b, index q"] + given["q_a, kv"] + 2 * given["compressors"] == parts["projections"].num_bytes


def test_a_batch_for_which_nothing_is_counted_is_refused(floor, counts):
    with pytest.raises(ValueError, match="batch 65: instructions are counted up to 64"):
        StepProjection(floor, counts).step(65, 8192, 20.0)


def test_other_ranks_and_formats_are_refused_by_name(flash, counts):
    with pytest.raises(ValueError, match="shards 2"):
        StepProjection(StepFloor(flash, Formats(), shards=2), counts)
    with pytest.raises(ValueError, match=r"formats\.linear 2"):
        StepProjection(StepFloor(flash, Formats(linear=2.0), shards=4), counts)
