"""Benches and samples of the hyper-connection's two launches at DeepSeek-V4-Flash's sizes, alone and between sublayers.

Where a sublayer belongs there stands a launch that reads 4 MB of weights before it waits for x, as a linear layer does,
and makes y of x. The hyper-connection's first launch begins while it runs, as it would in a step. In the chains of 8
sublayers (4 layers) every one has weights of its own; what they cost without a hyper-connection is measured beside.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.bench import Bench
from kernels.gpu_timer import Launch
from kernels.hyper_connection_decode import mix, spread, spread_and_mix
from kernels.hyper_connection_inputs import HIDDEN, STREAMS, TOP_K, draw_inputs
from kernels.tiles import Tile, Variant
from kernels.triton_env import HAS_PDL, uses_triton

SUBLAYERS = 8
_CHANNELS, _WORDS, _TOKENS = 32, 8192, 64  # of a program of the stand-in: channels of x, words of weights, tokens


@triton.jit
def sublayer_kernel(
    y_ptr, x_ptr, weight_ptr, tokens,
    H: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = x times 1 or 2, as an even or odd number of a program's weights are odd."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    weights = tl.load(weight_ptr + part * WORDS + tl.arange(0, WORDS), cache_modifier=".cg")
    factor = 1 + (tl.xor_sum(weights) & 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    at = token * H + part * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    x = tl.load(x_ptr + at, mask=token < tokens, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=token < tokens)


def stand_in(x: Tensor, weights: Tensor) -> Tensor:
    """Return y [T, H] of x. weights: int32 [H / 32, 8192]."""
    if not uses_triton(x):
        return x
    y = torch.empty_like(x)
    pdl = HAS_PDL(x.device)
    sublayer_kernel[(x.shape[1] // _CHANNELS, -(-x.shape[0] // _TOKENS))](
        y, x, weights, x.shape[0], H=x.shape[1], CHANNELS=_CHANNELS, WORDS=_WORDS, TOKENS=_TOKENS, PDL=pdl,
        num_warps=8, num_stages=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return y


def benches() -> list[Bench]:
    """Return the benches: one sublayer behind a stand-in, the ends of the model, chains of sublayers."""
    return [
        *(bench for n in (1, 16, 64) for bench in (_stand_in(n), _both(n))),
        *(_both(n, top_k=TOP_K, sums=sums) for n in (1, 16, 64) for sums in (False, True)),
        *(_both(n, head=True, top_k=top_k) for n in (1, 64) for top_k in (0, TOP_K)),
        *(_spread(n, hidden=HIDDEN, top_k=TOP_K) for n in (1, 64)),
        *(_first(n) for n in (1, 64)),
        *(_chain(n, mixes=mixes) for n in (1, 16, 64) for mixes in (False, True)),
        _both(4096, group="prefill"),
    ]


def samples() -> list[Bench]:
    """Return one small step for each shipped path."""
    small = [_both(5, n=n, hidden=64 * n, padding=1, head=head) for n in (2, 3, 4) for head in (False, True)]
    small += [_both(5, hidden=128, padding=1, head=head, top_k=TOP_K) for head in (False, True)]
    small += [_both(17, hidden=128, top_k=TOP_K, sums=sums) for sums in (False, True)]
    return [
        *small,
        _spread(3, hidden=128, top_k=TOP_K),
        _both(18, hidden=128, dtype=torch.float32),
        _both(257, n=2, hidden=64, padding=1),
        _first(3, hidden=128),
        _spread(3, hidden=128),
    ]


def _both(
    tokens: int,
    *,
    n: int = STREAMS,
    hidden: int = HIDDEN,
    padding: int = 0,
    head: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    top_k: int = 0,
    sums: bool = False,
    group: str = "linear",
) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        return draw_inputs(
            device, i, tokens, n=n, hidden=hidden, padding=padding, head=head, dtype=dtype, top_k=top_k, sums=sums
        ).launch

    shape = [f"B={tokens}", *(["head"] if head else []), *([f"{n} x {hidden} {dtype}"] if hidden != HIDDEN else [])]
    shape += ["experts" + " summed before" * sums] if top_k else []
    is_chained = not head and not top_k and hidden == HIDDEN and group == "linear"
    return _bench(
        " ".join(shape),
        tokens,
        n,
        hidden,
        make,
        head=head,
        top_k=top_k,
        chain=f"hyper B={tokens}" if is_chained else None,
        group=group,
    )


def _first(tokens: int, *, hidden: int = HIDDEN) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(device, i, tokens, hidden=hidden)
        embedded = inputs.before.streams[:, :1].contiguous().expand(-1, STREAMS, -1)
        return lambda: mix(embedded, inputs.mixer, sequence=inputs.sequence)

    return _bench(f"B={tokens} first of {hidden}", tokens, STREAMS, hidden, make, streams=1)


def _spread(tokens: int, *, hidden: int, top_k: int = 0) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        inputs = draw_inputs(device, i, tokens, hidden=hidden, top_k=top_k)
        return lambda: spread(inputs.y, inputs.before, sequence=inputs.sequence)

    shape = f"B={tokens} spread of {hidden}" + " experts" * (top_k > 0)
    return _bench(shape, tokens, STREAMS, hidden, make, top_k=top_k)


def draw_weights(device: torch.device, seed: int) -> Tensor:
    """Return a stand-in's weights."""
    draw = torch.Generator(device).manual_seed(seed)
    shape = (HIDDEN // _CHANNELS, _WORDS)
    return torch.randint(-(2**31), 2**31, shape, generator=draw, device=device, dtype=torch.int32)


def _stand_in(tokens: int) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        x, weights = draw_inputs(device, i, tokens).before.x, draw_weights(device, i)
        return lambda: stand_in(x, weights)

    size = 4 * HIDDEN // _CHANNELS * _WORDS + 4 * tokens * HIDDEN
    return Bench("linear", "sublayer stand-in", f"B={tokens}", make, bytes=size, chain=f"hyper B={tokens}")


def _chain(tokens: int, *, mixes: bool) -> Bench:
    def make(device: torch.device, i: int) -> Launch:
        return chain(device, i, tokens, mixes=mixes)

    each = 4 * HIDDEN // _CHANNELS * _WORDS + 4 * tokens * HIDDEN + mixes * _bytes(tokens, STREAMS, HIDDEN)
    shape = f"B={tokens} {SUBLAYERS} sublayers"
    op = "hyper_connection" if mixes else "sublayer stand-in"
    return Bench("linear", op, shape, make, bytes=SUBLAYERS * each)


def chain(
    device: torch.device, seed: int, tokens: int, *, mixes: bool = True, tiles: tuple[Tile, Tile] | None = None
) -> Launch:
    """Return a run through SUBLAYERS sublayers. mixes: with hyper-connections, else with stand-ins alone."""
    inputs = [draw_inputs(device, SUBLAYERS * seed + at, tokens) for at in range(SUBLAYERS)]
    weights = [draw_weights(device, SUBLAYERS * seed + at) for at in range(SUBLAYERS)]

    def run() -> Tensor:
        now = inputs[0].before
        x = now.x
        for one, weight in zip(inputs, weights, strict=True):
            y = stand_in(x, weight)
            if mixes:
                now = spread_and_mix(y, now, one.mixer, sequence=one.sequence, tiles=tiles)
            x = now.x if mixes else y
        return x

    return run


def _bench(
    shape: str,
    tokens: int,
    n: int,
    hidden: int,
    make: Callable[[torch.device, int], Launch],
    *,
    head: bool = False,
    streams: int | None = None,
    top_k: int = 0,
    chain: str | None = None,
    group: str = "linear",
) -> Bench:
    rows = n if head else (2 + n) * n
    return Bench(
        group=group,
        op="hyper_connection",
        shape=shape,
        make=make,
        bytes=_bytes(tokens, n, hidden, rows=rows, streams=streams) + 4 * tokens * top_k * hidden,
        flops=2 * tokens * rows * n * hidden,
        chain=chain,
    )


def _bytes(tokens: int, n: int, hidden: int, *, rows: int = 0, streams: int | None = None) -> int:
    """fn, then of each token: streams as they are in memory, streams written, y and x, in two bytes."""
    each = 2 * hidden * ((2 * n if streams is None else streams) + 2)
    return 4 * (rows or (2 + n) * n) * n * hidden + tokens * each


def variants(arch: str) -> list[Variant]:
    """Return the stand-in as it is launched here."""
    return [
        Variant(
            "sublayer stand-in",
            sublayer_kernel,
            {"y_ptr": "*bf16", "x_ptr": "*bf16", "weight_ptr": "*i32", "tokens": "i32"},
            {"H": HIDDEN, "CHANNELS": _CHANNELS, "WORDS": _WORDS, "TOKENS": _TOKENS, "PDL": True},
            8,
            1,
            tensor_ops=(),
            unaligned=("tokens",),
        )
    ]
