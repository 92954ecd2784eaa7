"""The decode launch that writes the cache, against its torch reference."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kernels.cache_write_decode import cache_write, cache_write_reference
from kernels.row_store import scale_row_bytes, store_rows, value_bytes
from kv_transfer.layout import row_bytes


def _cases():
    spec = importlib.util.spec_from_file_location("cache_write_cases", Path(__file__).with_name("cache_write_cases.py"))
    module = sys.modules.setdefault("cache_write_cases", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


cases = _cases()


@pytest.mark.parametrize("fmt", ["packed", "bf16", "fp32"])
def test_a_window_layer_stores_its_row_in_the_ring(fmt):
    batch = cases.decode_batch([(0, 1), (127, 1), (128, 1), (300, 1)], block_tokens=128, padding=1)
    assert cases.check(cases.make_layer(batch, ratio=0, fmt=fmt)) == ""


@pytest.mark.parametrize(("index", "rotated"), [("fp8_index", False), ("fp4_index", True), ("bf16", False)])
def test_a_csa_layer_keeps_its_rings_and_stores_entries_and_index_keys(index, rotated):
    spans = [(p, 1) for p in (0, 3, 4, 7, 127, 131, 258)]
    batch = cases.decode_batch(spans, block_tokens=128, padding=2, empty=1)
    fmt = "bf16" if index == "bf16" else "packed"
    assert cases.check(cases.make_layer(batch, ratio=4, fmt=fmt, index=index, hadamard=rotated)) == ""


def test_a_csa_layer_at_the_models_head_size():
    batch = cases.decode_batch([(7, 1), (9, 1)], block_tokens=128)
    assert cases.check(cases.make_layer(batch, ratio=4, index="fp8_index", dim=512, heads=9)) == ""


def test_an_hca_layer_carries_its_sums_and_stores_a_full_entry():
    batch = cases.decode_batch([(p, 1) for p in (0, 1, 126, 127, 128, 255)], block_tokens=128, padding=1)
    assert cases.check(cases.make_layer(batch, ratio=128)) == ""


def test_inputs_may_be_bfloat16():
    batch = cases.decode_batch([(7, 1), (8, 1)], block_tokens=128)
    assert cases.check(cases.make_layer(batch, ratio=4, index="fp8_index", dtype=torch.bfloat16)) == ""


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_several_tokens_a_sequence_equal_the_reference(ratio):
    spans = [(0, 5), (2, 15), (124, 6), (5, 1), (253, 4)]
    batch = cases.decode_batch(spans, block_tokens=128, padding=2, empty=1)
    assert cases.check(cases.make_layer(batch, ratio=ratio, index="fp8_index" if ratio == 4 else "")) == ""


def test_entries_of_128_that_earlier_steps_began_that_lie_in_the_step_and_that_it_leaves_unfinished():
    batch = cases.decode_batch([(126, 133)], block_tokens=128, padding=1)
    assert cases.check(cases.make_layer(batch, ratio=128, heads=1)) == ""


@pytest.mark.parametrize(("ratio", "index"), [(4, "fp4_index"), (128, "")])
def test_a_sequence_writes_the_same_bytes_alone(ratio, index):
    assert cases.alone_fault([(6, 9), (121, 20), (0, 3)], ratio=ratio, index=index) == ""


@pytest.mark.long
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("seed", range(2))
def test_any_mixture_of_chunks_equals_the_reference(ratio, seed):
    batch = cases.decode_batch(cases.random_spans(seed, tokens=300), block_tokens=256, padding=3, empty=1)
    index = "" if ratio != 4 else ("fp8_index", "fp4_index")[seed % 2]
    layer = cases.make_layer(batch, ratio=ratio, index=index, heads=1, block_tokens=256, hadamard=index == "fp4_index")
    assert cases.check(layer) == ""


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("lost", cases.LOST)
def test_what_has_no_place_makes_its_row_nan_and_touches_nothing_else(lost, ratio, length):
    assert cases.lost_fault(lost, ratio, length) == ""


def test_a_step_of_padding_alone_writes_nothing_but_zero_queries():
    batch = cases.decode_batch([(3, 1)], block_tokens=128, padding=2)
    batch.sequence.fill_(-1)
    layer = cases.make_layer(batch, ratio=4, index="fp8_index")
    written = cache_write(batch, **layer.given, **layer.mine)
    for zeros in (written.q, written.index.values.float(), written.index.weight):
        assert torch.equal(zeros, torch.zeros_like(zeros))
    for name in ("main", "index"):
        assert (cases.raw(layer.mine[name].pool) == 0xFF).all()
    assert (cases.raw(layer.mine["window"]) == 0xFF).all()


def test_queries_may_be_turned_in_place():
    batch = cases.decode_batch([(5, 1), (77, 1)], block_tokens=128, padding=1)
    layer = cases.make_layer(batch, ratio=0, heads=10, dtype=torch.bfloat16)
    wanted = cache_write_reference(batch, **layer.given, **layer.reference).q
    q = layer.given["q"]
    assert cache_write(batch, **layer.given, **layer.mine, q_out=q).q is q
    torch.testing.assert_close(q.float(), wanted.float(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"ratio": 4}, "no compressor"),
        ({"kv_norm": torch.ones(64)}, "norm"),
        ({"q": torch.ones(1, 3, 64)}, "queries"),
        ({"rotation": torch.ones(2, 32, dtype=torch.complex64)}, "rotation"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(fault, says):
    batch = cases.decode_batch([(5, 1)], block_tokens=128)
    layer = cases.make_layer(batch, ratio=0)
    with pytest.raises(ValueError, match=says):
        cache_write(batch, **{**layer.given, **fault}, **layer.mine)


@pytest.mark.parametrize(("index", "rotated"), [("fp8_index", False), ("fp4_index", True)])
def test_the_indexers_queries_are_those_of_a_launch_of_their_own_and_of_a_smaller_step(index, rotated):
    assert cases.queries_fault(index, rotated, count=2, heads=9) == ""


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"index_weight": None}, "need their weights"),
        ({"index_q": torch.ones(1, 5, 64)}, "keys of 128 channels"),
        ({"index_weight": torch.ones(1, 4)}, "weights"),
    ],
)
def test_queries_of_the_indexer_that_do_not_fit_are_refused(fault, says):
    batch = cases.decode_batch([(5, 1)], block_tokens=128)
    layer = cases.make_layer(batch, ratio=4, index="fp8_index")
    with pytest.raises(ValueError, match=says):
        cache_write(batch, **{**layer.given, **fault}, **layer.mine)


def test_several_tokens_without_staging_are_refused():
    batch = cases.decode_batch([(5, 2)], block_tokens=128)
    layer = cases.make_layer(batch, ratio=0)
    with pytest.raises(ValueError, match="staging"):
        cache_write(batch, **layer.given, **layer.mine)


FORMATS = [("packed", 512), ("packed", 128), ("fp8_index", 128), ("fp4_index", 128), ("bf16", 128), ("fp32", 64)]


@pytest.mark.parametrize(("fmt", "width"), FORMATS)
def test_stored_bytes_are_those_of_the_reference(fmt, width):
    x = cases.hard_rows(width)
    place = torch.randperm(40, generator=torch.Generator().manual_seed(2))[: len(x)].int()
    got, wanted = (cases.make_rows(fmt, width, units=8, rows=5) for _ in range(2))
    wanted.write((place // 5).long(), (place % 5).long(), x)
    store_rows(got, place // 5, place % 5, x)
    assert torch.equal(cases.raw(got), cases.raw(wanted))


@pytest.mark.parametrize(("fmt", "width"), FORMATS)
def test_rows_are_as_large_as_the_layout_says(fmt, width):
    assert (value_bytes(fmt, width), scale_row_bytes(fmt, width)) == row_bytes(fmt, width)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("fmt", "width", "group"), [("packed", 256, 64), ("fp8_index", 128, 128), ("fp4_index", 128, 32)]
)
def test_a_bad_value_spoils_its_own_group_only(bad, fmt, width, group):
    x = cases.normal(1, width)
    x[0, 5] = bad
    rows = cases.make_rows(fmt, width, units=1, rows=1)
    zero = torch.zeros(1, dtype=torch.int32)
    store_rows(rows, zero, zero, x)
    read = rows.read(zero.long(), zero.long())[0]
    assert read[:group].isnan().all()
    assert read[group:].isfinite().all()


def test_a_row_of_unit_minus_one_is_left_out():
    got, wanted = (cases.make_rows("packed", 128, units=1, rows=1) for _ in range(2))
    x, zero = cases.normal(2, 128), torch.zeros(2, dtype=torch.int32)
    store_rows(got, torch.tensor([-1, 0], dtype=torch.int32), zero, x)
    wanted.write(zero[:1].long(), zero[:1].long(), x[1:])
    assert torch.equal(cases.raw(got), cases.raw(wanted))
