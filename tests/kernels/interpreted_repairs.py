"""The interpreter's repairs themselves, on the operations that it gets wrong without them."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def dot_kernel(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    left = tl.load(a + m * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n)
    tl.store(out + m * N + n, tl.dot(left, right))


@triton.jit
def cast_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def add_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + tl.load(x + at))


@triton.jit
def shifted_kernel(x, out, shift, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at + shift, tl.load(x + at))


@triton.jit
def count_kernel(length, out):
    total = 0
    for _ in range(tl.load(length)):
        total += 2
    tl.store(out, total)


@triton.jit
def load_kernel(x, out, used, SIZE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at, mask=at < used))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16])
def test_dot_of_narrow_floats_is_the_product(dtype, normal):
    a, b = normal(16, 32).to(dtype), normal(32, 16, seed=1).to(dtype)
    out = torch.full((16, 16), torch.nan)
    dot_kernel[(1,)](a, b, out, 16, 16, 32)
    # products are exact in float32; only the order of the 32 sums differs
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_rounds_to_nearest_even(dtype, normal):
    ties = 1 + torch.arange(64) * torch.finfo(dtype).eps / 2
    x = torch.cat([ties, -ties, normal(128)])
    out = torch.empty(256, dtype=dtype)
    cast_kernel[(1,)](x, out, 256)
    assert torch.equal(out, x.to(dtype))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_cast_to_e4m3_carries_ties_to_even_and_saturates(source, normal):
    edges = torch.tensor([1.97, 0.49, 1.0625, 1.1875, 2**-9, 2**-10, 3 * 2**-10, 448.0, 463.0, 1e6, -1e6, torch.inf])
    x = torch.cat([edges, normal(116) * 20]).to(source)
    out = torch.empty(128, dtype=torch.float8_e4m3fn)
    cast_kernel[(1,)](x, out, 128)
    assert torch.equal(out.float(), x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_cast_to_float32_gives_every_value(dtype):
    x = (torch.arange(256).to(torch.int16) << 8 if dtype.itemsize == 2 else torch.arange(256).to(torch.uint8)).view(
        dtype
    )
    out = torch.empty(256)
    cast_kernel[(1,)](x, out, 256)
    torch.testing.assert_close(out, x.float(), rtol=0, atol=0, equal_nan=True)


def test_arithmetic_on_bf16_is_refused():
    x = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="cast to float32 first"):
        add_kernel[(1,)](x, torch.empty_like(x), 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_load_without_other_gives_nan(dtype):
    out = torch.zeros(16, dtype=dtype)
    load_kernel[(1,)](torch.ones(16, dtype=dtype), out, 5, 16, False)
    assert torch.equal(out.isnan(), torch.arange(16) >= 5)


def test_loop_runs_to_a_length_from_memory():
    out = torch.zeros(1, dtype=torch.int32)
    count_kernel[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.item() == 10


def test_dependent_launch_instructions_do_nothing():
    out = torch.zeros(16)
    load_kernel[(1,)](torch.ones(16), out, 16, 16, True)
    assert torch.equal(out, torch.ones(16))


@pytest.mark.parametrize("shift", [1, -1, 10**6])
def test_access_outside_the_tensors_is_refused(shift):
    pool = torch.zeros(1024)
    with pytest.raises(Exception, match="store outside every tensor of the launch: "):
        shifted_kernel[(1,)](torch.zeros(16), torch.empty(16), shift, 16)
    shifted_kernel[(1,)](torch.ones(16), pool[16:32], shift % 2, 16)  # a view may reach all of its storage
    assert pool.sum() == 16
