"""Row formats: what is written is what is read, in the bytes that the layout promises, and nowhere else."""

import pytest
import torch

from kernels.rows import Rows, round_trip
from kv_transfer.layout import row_bytes

FORMATS = ["fp32", "bf16", "packed", "fp8_index", "fp4_index"]
WIDTH = 128


@pytest.mark.parametrize("fmt", FORMATS)
def test_written_rows_read_back_as_the_round_trip(fmt, make_rows, normal):
    rows = make_rows(fmt, WIDTH, units=5, rows=6)
    x = normal(4, WIDTH)
    units, places = torch.tensor([4, 0, 4, 2]), torch.tensor([0, 5, 3, 1])
    rows.write(units, places, x)
    assert torch.equal(rows.read(units, places), round_trip(x, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_never_written_read_as_nan_in_a_poisoned_pool(fmt, make_rows, normal):
    rows = make_rows(fmt, WIDTH, units=2, rows=3)
    rows.write(torch.tensor([1]), torch.tensor([1]), normal(1, WIDTH))
    neighbours = rows.read(torch.tensor([1, 1, 0]), torch.tensor([0, 2, 1]))
    assert bool(neighbours.isnan().all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_row_touches_its_own_bytes_only(fmt, normal):
    """Layout inside a layer: all values first, then all scales."""
    values, scales = row_bytes(fmt, WIDTH)
    num, offset, row = 4, 48, 2
    pool = torch.full((3, 4096), 0xAB, dtype=torch.uint8)
    view = Rows.view(pool, fmt, width=WIDTH, rows=num, offset=offset, value_bytes=values, scale_bytes=scales)
    view.write(torch.tensor([1]), torch.tensor([row]), normal(1, WIDTH) + 1000)
    touched = (pool != 0xAB).nonzero().tolist()
    allowed = set(range(offset + row * values, offset + (row + 1) * values))
    first_scale = offset + num * values + row * scales
    allowed |= set(range(first_scale, first_scale + scales))
    assert touched
    assert {unit for unit, _ in touched} == {1}
    assert {byte for _, byte in touched} <= allowed


def test_packed_row_has_the_published_form(normal):
    values, scales = row_bytes("packed", 512)
    assert (values, scales) == (576, 8)
    pool = torch.full((1, 2 * 584), 0xFF, dtype=torch.uint8)
    rows = Rows.view(pool, "packed", width=512, rows=2, offset=0, value_bytes=values, scale_bytes=scales)
    x = normal(1, 512)
    rows.write(torch.tensor([0]), torch.tensor([1]), x)
    raw = pool[0]
    assert torch.equal(raw[576 + 448 : 1152].view(torch.bfloat16), x[0, 448:].to(torch.bfloat16))
    scale_bytes = raw[1152 + 8 : 1152 + 16]
    assert scale_bytes[7].item() == 0, "the padding byte"
    group = x[0, 64:128]
    scale = 2.0 ** (scale_bytes[1].item() - 127)
    assert group.abs().max() / scale <= 448 < group.abs().max() / (scale / 2)
    assert torch.equal(raw[576 + 64 : 576 + 128].view(torch.float8_e4m3fn), (group / scale).to(torch.float8_e4m3fn))


def test_index_rows_have_the_published_form(normal):
    assert row_bytes("fp8_index", 128) == (128, 4)
    assert row_bytes("fp4_index", 128) == (64, 4)
    pool = torch.zeros((1, 2 * 132), dtype=torch.uint8)
    rows = Rows.view(pool, "fp8_index", width=128, rows=2, offset=0, value_bytes=128, scale_bytes=4)
    x = normal(1, 128)
    rows.write(torch.tensor([0]), torch.tensor([1]), x)
    scale = pool[0, 260:264].view(torch.float32)
    assert torch.equal(pool[0, 128:256].view(torch.float8_e4m3fn), (x[0] / scale).to(torch.float8_e4m3fn))


@pytest.mark.parametrize(("unit", "row"), [(-1, 0), (2, 0), (0, -1), (0, 3)])
def test_numbers_outside_the_pool_are_refused_and_never_wrap(unit, row, make_rows, normal):
    rows = make_rows("fp32", WIDTH, units=2, rows=3)
    with pytest.raises(IndexError, match=r"unit|row"):
        rows.read(torch.tensor([unit]), torch.tensor([row]))
    with pytest.raises(IndexError, match=r"unit|row"):
        rows.write(torch.tensor([unit]), torch.tensor([row]), normal(1, WIDTH))


def test_unknown_format_is_refused(normal):
    with pytest.raises(ValueError, match="int3"):
        round_trip(normal(1, 128), "int3")
