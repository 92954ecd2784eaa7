"""Pools and views: where rows lie, what poison does, what a transport is told."""

import ctypes
from itertools import pairwise

import pytest
import torch

from engine.cache import SCRATCH_BYTES, KVCache
from engine.model.config import load_config
from engine.model.layout import build_layout

STORAGE = [("fp32", "fp8"), ("bf16", "fp8"), ("packed", "fp8"), ("packed", "fp4")]


@pytest.fixture(params=STORAGE, ids="-".join)
def cache(request, oracle):
    kv, index = request.param
    config = load_config(oracle.folder("tiny"))
    layout = build_layout(config, block_tokens=256, kv_cache_dtype=kv, index_cache_dtype=index)
    return KVCache(layout, num_blocks=3, num_slots=2)


def regions(cache):
    return [(g, r) for g in cache.layout.groups for r in g.regions]


def test_every_row_of_every_layer_has_bytes_of_its_own(cache):
    """Writing each row in turn leaves all others as they were: views neither overlap nor leave a pool."""
    generator = torch.Generator().manual_seed(0)
    expected = {}
    for group, region in regions(cache):
        for layer in range(region.layers):
            view = cache.rows(region.name, layer)
            assert (view.num_units, view.rows, view.width) == (
                cache.pools[group.name].shape[0],
                region.rows,
                region.width,
            )
            units, rows = (
                t.flatten()
                for t in torch.meshgrid(torch.arange(view.num_units), torch.arange(view.rows), indexing="ij")
            )
            x = torch.randn(len(units), region.width, generator=generator)
            view.write(units, rows, x)
            expected[region.name, layer] = (units, rows, view.round_trip(x))
    for (name, layer), (units, rows, x) in expected.items():
        assert torch.equal(cache.rows(name, layer).read(units, rows), x)


def test_poison_makes_every_row_nan(cache):
    cache.poison()
    for _, region in regions(cache):
        for layer in range(region.layers):
            view = cache.rows(region.name, layer)
            for unit in range(view.num_units):
                rows = torch.arange(view.rows)
                assert bool(view.read(torch.full_like(rows, unit), rows).isnan().all())


def test_a_unit_is_one_contiguous_range_at_the_told_address(cache):
    pools = {p.name: p for p in cache.pool_addresses()}
    assert list(pools) == [*(g.name for g in cache.layout.groups), "scratch"]
    assert pools["scratch"].num_units * pools["scratch"].unit_bytes == SCRATCH_BYTES
    for group in cache.layout.groups:
        pool = pools[group.name]
        assert pool.unit_bytes == group.unit_bytes
        assert pool.num_units == {"block": 3, "slot": 2}[group.unit]
        assert pool.base % 4096 == 0
        unit = pool.num_units - 1
        cache.pools[group.name][unit].fill_(0x5A)
        seen = ctypes.string_at(pool.base + unit * pool.unit_bytes, pool.unit_bytes)
        assert seen == b"\x5a" * pool.unit_bytes


def test_pools_do_not_overlap(cache):
    ranges = sorted((p.base, p.base + p.unit_bytes * p.num_units) for p in cache.pool_addresses())
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    assert cache.num_bytes == sum(end - start for start, end in ranges)


def test_a_cache_without_units_is_refused(cache):
    with pytest.raises(ValueError, match="0 blocks"):
        KVCache(cache.layout, num_blocks=0, num_slots=1)


def test_a_region_that_the_model_lacks_is_a_key_error(cache):
    with pytest.raises(KeyError):
        cache.rows("window", 99)
