"""Inputs meant for a GPU, tried here first: samples for compute-sanitizer, and the smallest benches."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kernels.bench import Bench, collect

# Bytes. The interpreter takes seconds for a megabyte; benches differ from samples in size alone.
SMALL = {"samples": 1 << 20, "benches": 300_000}


def small(which: str) -> list[Bench]:
    return [one for one in collect(which) if one.bytes < SMALL[which]]


def samples() -> list:
    """Return the samples, all but two of each operation as long tests."""
    of_op: Counter[str] = Counter()
    found = []
    for one in small("samples"):
        of_op[one.op] += 1
        marks = pytest.mark.long if of_op[one.op] > 2 else ()
        found.append(pytest.param(one, marks=marks, id=f"{one.op} {one.shape}"))
    return found


@pytest.mark.parametrize("sample", samples())
def test_sample_runs_and_stays_inside_its_tensors(sample: Bench):
    sample.make(torch.device("cpu"), 0)()


@pytest.mark.parametrize("bench", small("benches"), ids=lambda one: f"{one.op} {one.shape}")
def test_small_bench_runs_and_stays_inside_its_tensors(bench: Bench):
    bench.make(torch.device("cpu"), 0)()
