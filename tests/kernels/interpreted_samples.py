"""Inputs meant for a GPU, tried here first: samples for compute-sanitizer, and the smallest benches."""

from __future__ import annotations

import pytest
import torch

from kernels.bench import Bench, collect

# Bytes. The interpreter takes seconds for a megabyte; benches differ from samples in size alone.
SMALL = {"samples": 1 << 20, "benches": 300_000}


def small(which: str) -> list[Bench]:
    return [one for one in collect(which) if one.bytes < SMALL[which]]


@pytest.mark.parametrize("sample", small("samples"), ids=lambda one: f"{one.op} {one.shape}")
def test_sample_runs_and_stays_inside_its_tensors(sample: Bench):
    sample.make(torch.device("cpu"), 0)()


@pytest.mark.parametrize("bench", small("benches"), ids=lambda one: f"{one.op} {one.shape}")
def test_small_bench_runs_and_stays_inside_its_tensors(bench: Bench):
    bench.make(torch.device("cpu"), 0)()
