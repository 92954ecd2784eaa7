"""Hyper-connections of chunks of prompts: the two launches of hyper_connection_decode.py, cut for many tokens.

What a step of few tokens hides in a wait costs a chunk its bandwidth: there each program of the first launch works out
the mixing matrices of its tokens, and programs are many. Here the second launch works them out, once a token, and the
carry holds C itself in rows 1 + j. The first launch then streams: 2 n + 1 rows of a token in and out, and of sums of
the mix one for each SPAN channels.

Equal inputs give equal bits, and a token's bits depend on nothing of the others but whether there are more than MANY
of them. bfloat16 streams only; the layouts are those of hyper_connection_decode.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels.expert_parts import ExpertParts, add_up
from kernels.hyper_chunk_triton import finish_chunk_kernel, spread_chunk_kernel
from kernels.tiles import Tile

if TYPE_CHECKING:
    from kernels.hyper_connection_decode import Mixer

SPREAD_CHUNK, FINISH_CHUNK = "hyper_spread_chunk", "hyper_finish_chunk"
MANY = 256  # tokens beyond which streams are taken here


def takes(streams: Tensor) -> bool:
    """Return whether a pass that begins with streams [T, n, H] has its launches here."""
    return streams.shape[0] > MANY and streams.dtype == torch.bfloat16


def columns(rows: int) -> int:
    """Return the floats that a program of the first launch leaves for each token: sums in eights, and the squares."""
    return 16 if rows <= 8 else 32


def begin(
    out: Tensor | None,
    streams: Tensor,
    y: Tensor | ExpertParts | None,
    carry: Tensor | None,
    mixer: Mixer | None,
    sequence: Tensor | None,
    tile: Tile,
    *,
    pdl: bool,
) -> Tensor | None:
    """Launch the spread of y (unless it is None), and the sums of the mix (unless mixer is None), which are returned.

    carry: of y, with C in it.
    """
    tokens, n, hidden = streams.shape
    rows = mixer.fn.shape[0] if mixer else 0
    span = tile.constants["SPAN"]
    splits = -(-hidden // span)
    shape = (tokens, columns(rows) // 4, splits, 4)
    parts = torch.empty(shape, device=streams.device) if mixer else None
    if isinstance(y, ExpertParts):
        y = add_up(y)  # has the bits of rows added up in the launch
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    spread_chunk_kernel[(splits, -(-tokens // tile.constants["M"]))](
        out, parts, streams, streams.stride(0), streams.stride(1), y, carry, mixer.fn if mixer else None, sequence,
        tokens, H=hidden, N=n, ROWS=rows, COLUMNS=columns(rows), SPREAD=y is not None, **tile.constants, PDL=pdl,
        num_warps=tile.num_warps, num_stages=1, **launch,
    )  # fmt: skip
    return parts


def finish(
    x: Tensor,
    carry: Tensor | None,
    streams: Tensor,
    mixer: Mixer,
    parts: Tensor,
    sequence: Tensor | None,
    tile: Tile,
) -> None:
    """Launch what makes x [T, H], and the carry [T, 1 + n, 4] unless it is None, of the sums.

    It waits for the first launch to end: begun ahead, its programs would take that one's room (276 for 176 µs).
    """
    tokens, n, hidden = streams.shape
    warps = tile.constants["W"]
    carries = 0 if carry is None else -(-tokens // (32 * warps))
    finish_chunk_kernel[(carries + tokens,)](
        x, carry, parts, streams, streams.stride(0), streams.stride(1), mixer.base, mixer.scale, mixer.norm, sequence,
        tokens, mixer.eps, mixer.norm_eps,
        H=hidden, N=n, ITERS=mixer.iters if carries else 0, SUMS=parts.shape[2], COLUMNS=4 * parts.shape[1], W=warps,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
