"""Triton's CPU interpreter, made fit to judge our kernels: repairs, and a runner that gives it a process of its own.

For owners of kernels. Write interpreter tests as ordinary pytest functions (parametrize, fixtures of conftest.py) into
`tests/kernels/interpreted_<op>.py`. Do not name it test_*: `test_interpreted.py` finds the file and runs it with
TRITON_INTERPRET=1 in a process of its own, as part of `make test`. By hand, with the usual options of pytest:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted_<op>.py -x -k name

Inside, `kernels.triton_env.uses_triton` is true for CPU tensors, so the public wrapper takes the kernel; compare it
with `<op>_reference`. A program costs milliseconds and a launch runs all programs in turn: a few tokens, small pools,
few splits. Keep a file below 30 s. `LIMIT_S` ends one that hangs.

What is repaired (seen in Triton 3.6 to 3.9):

    tl.dot of bf16             multiplied raw bits; now exact products, summed in float32
    casts between floats       f32 -> bf16 cut off, f32 -> e4m3 lost carries; now to nearest even, and fp8 saturates
    arithmetic on bf16 or fp8  worked on raw bits; now an error: compute in float32, as the kernel should
    masked load without other  gave zeros, hardware promises nothing; now all bits one: NaN, or -1
    any load, store, atomic    went anywhere in memory; now an error outside the storages of the launch's tensors
    loops over a tensor        warned of NumPy's future, which pytest makes an error; now as NumPy wants it
    gdc_wait and its sibling   inline assembly, an error; now nothing

What it can't show: races, the order in which hardware sums, tf32 of float32 dots, anything about speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

LIMIT_S = 480.0


def run(path: Path, *args: str, limit_s: float = LIMIT_S, niceness: int = 0) -> subprocess.CompletedProcess[str]:
    """Run pytest over `path` under the interpreter in a new process; its output is in `stdout`, 0 tests are rc 5.

    niceness: how far it stands back for other processes, 19 at most.
    """
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-p", "no:cacheprovider", *args]
    command = ["nice", "-n", str(niceness), *command] if niceness else command
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    try:
        return subprocess.run(
            command, env=env, timeout=limit_s, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return subprocess.CompletedProcess(command, 124, f"{said}\nnot done after {limit_s:.0f} s: smaller inputs?", "")


def repair() -> None:
    """Replace what the interpreter gets wrong. Call it once, under TRITON_INTERPRET=1, before a kernel is imported."""
    import triton.language as tl
    import triton.language.extra.cuda as cuda
    from triton.runtime import interpreter

    np.seterr(all="ignore")  # lanes that are masked away may divide by zero
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    torch_types = {
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float16: torch.float16,
        tl.float32: torch.float32,
    }
    narrow = (tl.bfloat16, tl.float8e4nv, tl.float8e5)

    def decode(x: Any) -> np.ndarray:
        bits = np.ascontiguousarray(x.data)
        carrier = {1: np.uint8, 2: np.int16, 4: np.int32}[bits.dtype.itemsize]
        return torch.from_numpy(bits.view(carrier)).view(torch_types[x.dtype.scalar]).float().numpy()

    def encode(values: np.ndarray, dtype: Any) -> Any:
        wanted = torch_types[dtype]
        x = torch.from_numpy(np.ascontiguousarray(values))
        if wanted.itemsize == 1:  # cvt.rn.satfinite: infinity too becomes the largest number, NaN stays
            x = x.clamp(-torch.finfo(wanted).max, torch.finfo(wanted).max)
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[wanted.itemsize]
        return handle(x.to(wanted).view(carrier).numpy().view(interpreter._get_np_dtype(dtype)), dtype)

    def cast(self: Any, src: Any, dst_type: Any, *rounding: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source not in torch_types or target not in torch_types:
            return plain_cast(self, src, dst_type)
        if rounding and rounding[0] not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"cast of {source} to {target} rounding {rounding[0]}: only to nearest even")
        return encode(decode(src), target)

    def dot(self: Any, a: Any, b: Any, acc: Any, *precision: Any) -> Any:
        if a.dtype.scalar not in torch_types or b.dtype.scalar not in torch_types:
            return plain_dot(self, a, b, acc, *precision)
        return handle(np.matmul(decode(a), decode(b)) + acc.data, acc.dtype.scalar)

    def refuse_narrow(name: str) -> None:
        plain: Callable[..., Any] = getattr(builder, name)

        def checked(self: Any, first: Any, *rest: Any) -> Any:
            if first.dtype.scalar in narrow:
                raise NotImplementedError(
                    f"{name} on {first.dtype.scalar}: the interpreter would work on raw bits, and tensors of that type "
                    "lose digits at every step; cast to float32 first"
                )
            return plain(self, first, *rest)

        setattr(builder, name, checked)

    storages = np.zeros((0, 2), np.uint64)  # [first byte, end) of what the running launch may touch, in order

    def remember_storages(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal storages
        host = plain_init(self, args, kwargs)
        tensors = [x for x in [*host[0], *host[1].values()] if isinstance(x, torch.Tensor)]
        spans = {(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (x.untyped_storage() for x in tensors)}
        storages = np.array(sorted(spans), np.uint64).reshape(-1, 2)
        return host

    def check_inside(what: str, ptrs: Any, mask: Any) -> None:
        width = np.uint64(interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize)
        at = np.broadcast_to(ptrs.data, np.broadcast_shapes(ptrs.data.shape, mask.data.shape))
        at = at[np.broadcast_to(mask.data, at.shape).astype(bool)].astype(np.uint64)  # a scalar mask may be int32
        if not at.size:
            return
        slot = np.searchsorted(storages[:, 0], at, side="right") - 1
        outside = slot < 0 if storages.size else np.ones(at.shape, bool)
        if storages.size:
            outside |= at + width > storages[slot, 1]
        if outside.any():
            raise IndexError(
                f"{what} outside every tensor of the launch: {int(outside.sum())} of {at.size} lanes, the first at "
                f"{int(at[outside][0]):#x}; tensors lie at {[(hex(a), hex(b)) for a, b in storages.tolist()]}"
            )

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *how: Any) -> Any:
        check_inside("store", ptrs, mask)
        return plain_store(self, ptrs, value, mask, *how)

    def atomic_rmw(self: Any, op: Any, ptrs: Any, value: Any, mask: Any, *how: Any) -> Any:
        check_inside("atomic", ptrs, mask)
        return plain_rmw(self, op, ptrs, value, mask, *how)

    def patch_tensor(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def atomic_cas(self: Any, ptrs: Any, *operands: Any) -> Any:
        check_inside("atomic", ptrs, handle(np.ones(ptrs.data.shape, bool), tl.int1))
        return plain_cas(self, ptrs, *operands)

    def masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *how: Any) -> Any:
        check_inside("load", ptrs, mask)
        if other is None:
            element = ptrs.get_element_ty()
            dtype = interpreter._get_np_dtype(element)
            bits = np.full((*ptrs.data.shape, dtype.itemsize), 0xFF, np.uint8)
            filled = np.ones(ptrs.data.shape, dtype) if dtype == np.bool_ else bits.view(dtype)[..., 0]
            other = handle(np.ascontiguousarray(filled), element)
        return plain_load(self, ptrs, mask, other, *how)

    def check_reduced(self: Any, tensors: Any) -> None:
        plain_check(self, tensors)
        for x in tensors:
            if x.dtype.scalar in narrow:
                raise NotImplementedError(f"reduction of {x.dtype.scalar}: cast to float32 first")

    plain_cast, plain_dot, plain_load = builder.cast_impl, builder.create_dot, builder.create_masked_load
    plain_store, plain_rmw = builder.create_masked_store, builder.create_atomic_rmw
    plain_cas, builder.create_atomic_cas = builder.create_atomic_cas, atomic_cas
    plain_patch, interpreter._patch_lang_tensor = interpreter._patch_lang_tensor, patch_tensor
    plain_init = interpreter.GridExecutor._init_args_hst
    plain_check = interpreter.ReduceScanOpInterface.check_tensor
    for name in ("create_fp_ext", "create_fp_trunc", "create_fp_to_fp"):
        setattr(builder, name, cast)
    builder.create_dot, builder.create_masked_load = dot, masked_load
    builder.create_masked_store, builder.create_atomic_rmw = masked_store, atomic_rmw
    interpreter.GridExecutor._init_args_hst = remember_storages
    for name in ("binary_op", "unary_op", "create_fma", "create_clampf", "create_fabs"):
        refuse_narrow(name)
    interpreter.ReduceScanOpInterface.check_tensor = check_reduced
    cuda.gdc_wait = cuda.gdc_launch_dependents = lambda _semantic=None: None
    tl.extra.cuda = cuda
