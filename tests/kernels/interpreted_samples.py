"""Inputs meant for a GPU, tried here first: samples for compute-sanitizer, and the smallest benches."""

from __future__ import annotations

import pytest
import torch

from kernels.bench import Bench, collect

SMALL = 1 << 20  # bytes; larger benches take the interpreter minutes


@pytest.mark.parametrize("sample", collect("samples"), ids=lambda one: f"{one.op} {one.shape}")
def test_sample_runs_and_stays_inside_its_tensors(sample: Bench):
    sample.make(torch.device("cpu"), 0)()


@pytest.mark.parametrize(
    "bench", [one for one in collect("benches") if one.bytes < SMALL], ids=lambda one: f"{one.op} {one.shape}"
)
def test_small_bench_runs_and_stays_inside_its_tensors(bench: Bench):
    bench.make(torch.device("cpu"), 0)()
