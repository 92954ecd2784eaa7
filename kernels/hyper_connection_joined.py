"""A hyper-connection between two sublayers in one launch: what hyper_connection_decode.py does in two.

For four bfloat16 streams and few tokens. Sums over channels have another order than in two launches, and so may a last
place of x have another value: a token's bits depend on whether a step has more tokens than one launch takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.hyper_await_triton import NONE
from kernels.hyper_joined_triton import joined_kernel
from kernels.hyper_spread_triton import TOKENS
from kernels.scratch import filled
from kernels.tiles import Tile, Variant, tiles_of
from kernels.triton_env import HAS_PDL

if TYPE_CHECKING:
    from kernels.hyper_connection_decode import Mixed, Mixer

OP = "hyper_joined"
MAX_TOKENS = 64
_ROWS = 24  # of fn, for four streams


def fits(streams: Tensor, mixer: Mixer, tile: Tile) -> bool:
    """Return whether one launch can do it: four bfloat16 streams [T, 4, H], no head, H that the tile divides."""
    tokens, n, hidden = streams.shape
    c = tile.constants
    divides = hidden % (256 * c["W"]) == 0 and hidden % (16 * c["L"] * c["C"]) == 0
    return (
        n == 4 and mixer.fn.shape[0] == _ROWS and streams.dtype == torch.bfloat16 and divides and tokens <= MAX_TOKENS
    )


def launch_joined(
    given: tuple[Any, ...], top_k: int, before: Mixed, mixer: Mixer, *, sequence: Tensor | None, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, streams and carry as spread_and_mix does. given: y, or rows of experts, and what says whose they are.

    Calls on one stream share scratch, and so do replays of graphs captured on it: they must not overlap. Raises
    ValueError for what does not fit the tile.
    """
    streams, carry = before.streams, before.carry
    if not fits(streams, mixer, tile):
        raise ValueError(
            f"streams {tuple(streams.shape)} {streams.dtype}, fn {tuple(mixer.fn.shape)}, tile {dict(tile.constants)}: "
            f"one launch takes four bfloat16 streams, {MAX_TOKENS} tokens at most, and channels that the tile divides"
        )
    tokens, n, hidden = streams.shape
    device, c = streams.device, tile.constants
    out = torch.empty(streams.shape, dtype=streams.dtype, device=device)
    x = torch.empty((tokens, hidden), dtype=streams.dtype, device=device)
    after = torch.empty((tokens, 1 + n, 4), device=device)
    part, copy = _scratch(device, hidden)
    pdl = HAS_PDL(device)
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    programs = -(-tokens // (TOKENS * (c["W"] // c["C"]))) * (hidden // (16 * c["L"] * c["C"]))
    if tokens:
        joined_kernel[(programs + 2 * tokens,)](
            out, x.view(torch.int32), after, part.view(torch.float32), part, copy.view(torch.bfloat16), copy, streams,
            streams.stride(0), streams.stride(1), *given, carry, mixer.fn, mixer.base, mixer.scale, mixer.norm,
            sequence, tokens, before.eps, mixer.eps, mixer.norm_eps,
            H=hidden, ITERS=before.iters, **c, TOP_K=top_k, PDL=pdl, num_warps=c["W"], num_stages=1, **launch,
        )  # fmt: skip
    return x, out, after


def _scratch(device: torch.device, hidden: int) -> tuple[Tensor, Tensor]:
    """Return int32 words that are NONE between calls: for sums, and for a copy of the streams."""
    sizes = (MAX_TOKENS, 8, hidden // 16, 4), (MAX_TOKENS, 4, hidden // 2)
    part, copy = (filled("a joined hyper-connection", device, *size, value=NONE) for size in sizes)
    return part, copy


_HIDDEN, _ITERS, _TOP_K = 4096, 20, 6


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`, for the offline gate: 4 streams of 4096."""
    return [_variant(tile, top_k) for tile in tiles_of(OP, arch) for top_k in (0, _TOP_K)]


def _variant(tile: Tile, top_k: int) -> Variant:
    signature = dict.fromkeys(joined_kernel.arg_names, "*fp32")
    signature |= dict.fromkeys(("x_ptr", "word_ptr", "copy_word_ptr", "ids_ptr", "rank_ptr", "first_ptr"), "*i32")
    signature |= dict.fromkeys(("out_ptr", "copy_ptr", "streams_ptr", "add_ptr"), "*bf16")
    signature |= {"sequence_ptr": "*i32", "y_ptr": "*fp32" if top_k else "*bf16"}
    signature |= dict.fromkeys(("token_stride", "stream_stride", "tokens"), "i32")
    signature |= dict.fromkeys(("eps", "mixer_eps", "norm_eps"), "fp32")
    fixed: dict[str, Any] = {"H": _HIDDEN, "ITERS": _ITERS, **tile.constants, "TOP_K": top_k, "PDL": True}
    fixed |= {} if top_k else dict.fromkeys(("ids_ptr", "rank_ptr", "first_ptr", "add_ptr"))
    return Variant(
        OP,
        joined_kernel,
        {name: signature[name] for name in joined_kernel.arg_names if name not in fixed},
        fixed,
        tile.num_warps,
        1,
        unaligned=("tokens",),
    )
