"""Ranks of a group on GPUs: see tensor_parallel.py and exchange.py, which also run without pytest."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _load(name):
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", HERE / f"{name}.py")
    module = sys.modules.setdefault(f"gpu_{name}", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


ranks, geo, one_shot = _load("tensor_parallel"), _load("geo"), _load("one_shot")


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["inner", "expert"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallel_ranks_in_lock_step_choose_as_golden(dtype, count, way):
    found = ranks.trials(
        device="cuda", dtypes=[dtype], counts=[count], ways=[way], lengths=geo.LENGTHS, steps=6, processes=False
    )
    assert [trial["fault"] for trial in found] == [""]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", list(one_shot.DTYPES))
def test_tensor_parallel_sums_through_memory_have_the_reference_s_bits(dtype, count):
    assert one_shot.faults(count, one_shot.DTYPES[dtype], calls=100, replays=100) == []


@pytest.mark.multi_gpu
@pytest.mark.parametrize("script", ["exchange.py", "tensor_parallel.py"])
def test_tensor_parallel_ranks_with_a_gpu_each(script):
    forced = ["--processes", "--all-reduce", "nccl", "one-shot"]
    words = ["--ranks", "2", *(forced if script == "tensor_parallel.py" else [])]
    done = subprocess.run(
        [sys.executable, str(HERE / script), *words], cwd=HERE.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
