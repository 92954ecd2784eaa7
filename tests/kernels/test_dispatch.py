"""What the wrappers launch is what the offline gate has compiled: Triton's own binder, asked on the CPU.

Every bench is built with CPU tensors and launched once with the kernels' entry replaced: nothing runs, but Triton sorts
the arguments as it would before compiling. The outcome must be a shipped variant: same types, constants, warps and
stages, and aligned wherever the variant says so. PDL is left aside: it depends on the device, and ships compiled in.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels import gemm_large, triton_env
from kernels.bench import collect
from kernels.check import rare, shipped
from kernels.offline import _source
from kernels.tiles import Variant
from kernels.triton_env import ARCHES


@functools.cache  # the same for every bench
def compiled(arch):
    return shipped(arch) + rare(arch)


def mismatch(variant: Variant, launched: dict) -> list[str]:
    """Return how a launch differs from a variant of its kernel; empty if the gate has compiled it."""
    gate = _source(variant)
    names = variant.kernel.arg_names
    found = []
    for i, name in enumerate(names):
        value = launched["constants"].get((i,))
        if (i,) in gate.constants:
            if name != "PDL" and ((i,) not in launched["constants"] or value != gate.constants[i,]):
                found.append(f"{name} is {value!r}, compiled for {gate.constants[i,]!r}")
        elif value != 1 and launched["types"][name] != gate.signature[name]:  # a 1 becomes a constant: less to do
            found.append(f"{name} is {launched['types'][name]}, compiled for {gate.signature[name]}")
        if (i,) in gate.attrs and (i,) not in launched["aligned"] and value is None:
            found.append(f"{name} is no multiple of 16, compiled as if it were")
    options = launched["options"]
    for name, wanted in (("num_warps", variant.num_warps), ("num_stages", variant.num_stages)):
        if getattr(options, name) != wanted:
            found.append(f"{name} is {getattr(options, name)}, compiled for {wanted}")
    if options.maxnreg != variant.maxnreg:
        found.append(f"maxnreg is {options.maxnreg}, compiled for {variant.maxnreg}")
    return found


@pytest.fixture(params=ARCHES)
def launches(request, monkeypatch):
    """Return (arch, list of launches to come): kernel, types, constants, aligned arguments, options."""
    arch, seen = request.param, []
    backend = make_backend(GPUTarget("cuda", int(arch.removeprefix("sm_")), 32))

    def record(kernel, *args, grid, warmup, **kwargs):
        kwargs["debug"] = False
        kwargs["instrumentation_mode"] = ""
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, options = binder(*args, **kwargs)
        options, types, constants, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
        aligned = {at for at, marks in attrs.items() if ["tt.divisibility", 16] in marks}
        seen.append({"kernel": kernel, "types": types, "constants": constants, "aligned": aligned, "options": options})

    monkeypatch.setattr(JITFunction, "run", record)
    monkeypatch.setattr(triton_env, "INTERPRETED", True)  # CPU tensors take the kernel
    monkeypatch.setattr(triton_env, "_INTERPRETED_ARCH", arch)
    return arch, seen


@pytest.mark.parametrize("bench", collect("benches"), ids=lambda one: f"{one.op} {one.shape}")
def test_every_launch_of_a_bench_is_a_shipped_variant(bench, launches, monkeypatch):
    arch, seen = launches
    products = []  # a library's, which would take long here
    monkeypatch.setattr(gemm_large, "_multiply", lambda *given: products.append(given))
    launch = bench.make(torch.device("cpu"), 0)
    seen.clear()  # what prepares the inputs is not dispatched in a step
    launch()
    assert seen or products, f"{bench.op} launched no kernel"
    for one in seen:
        close = [mismatch(v, one) for v in compiled(arch) if v.kernel is one["kernel"]]
        name = one["kernel"].fn.__name__
        assert close, f"{name} has no variant for {arch}"
        assert [] in close, f"{name} on {arch} is not what the gate compiled; nearest: {min(close, key=len)}"


@triton.jit
def copy_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < size))


COPY = Variant("copy", copy_kernel, {"x": "*fp32", "out": "*fp32", "size": "i32"}, {"BLOCK": 64}, 4, 2, tensor_ops=())
POOL = torch.zeros(80)


@pytest.mark.parametrize(
    ("change", "x", "said"),
    [
        ({}, POOL[:64], []),
        ({}, POOL[1:65], ["x is no multiple of 16, compiled as if it were"]),
        ({"unaligned": ("x",)}, POOL[1:65], []),
        ({"constants": {"BLOCK": 32}}, POOL[:64], ["BLOCK is 64, compiled for 32"]),
        ({"num_warps": 8}, POOL[:64], ["num_warps is 4, compiled for 8"]),
        ({"num_stages": 3}, POOL[:64], ["num_stages is 2, compiled for 3"]),
        ({}, POOL[:64].double(), ["x is *fp64, compiled for *fp32"]),
    ],
)
def test_a_launch_that_the_gate_has_not_seen_is_noticed(change, x, said, launches):
    _, seen = launches
    copy_kernel[(1,)](x, POOL, 64, BLOCK=64, num_warps=4, num_stages=2)
    assert mismatch(dataclasses.replace(COPY, **change), seen[0]) == said
