"""Hyper-connections in two launches a sublayer: {spread the last one's output, begin the mix}, {finish it, norm}.

    S' = post[k] * y + sum_j C[j, k] * S[j]     rounded to the streams' dtype; the first sublayer has S' = S
    x  = rms(sum_j pre[j] * S'[j]) * norm       the sum rounded to that dtype, too, and x
    carry = post, and the logits of C           of S', for the next spread

pre, post, C as in hyper_connection.py, everything between the roundings in float32. The product of S' with fn is cut
into spans of H, whose sums the second launch adds up in a fixed order; the normalisations that make C of its logits are
the first launch's, done while it waits for y. The head is the same with n rows of fn; its x
stays float32, and it carries nothing.

More than 256 tokens have launches of their own, with the same arguments: hyper_connection_chunk.py.

Equal inputs give equal bits, and a token's bits depend on nothing but its own rows, and on whether there are more than
256 of them. Layout: streams [T, n, H], carry [T, 1 + n, 4] float32 (row 0: post, row 1 + j: logits of C[j], or
C[j] where `ready`; columns from n on hold anything).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kernels import hyper_connection_chunk as chunk
from kernels.expert_parts import ExpertParts, add_up_reference
from kernels.hyper_connection import collapse_reference, hc_head_reference, hc_post_reference, sinkhorn_reference
from kernels.hyper_connection_chunk import FINISH_CHUNK, SPREAD_CHUNK, columns
from kernels.hyper_finish_triton import finish_kernel
from kernels.hyper_spread_triton import TOKENS, spread_kernel
from kernels.norm_rope import rms_norm_reference
from kernels.tiles import Tile, tile_for
from kernels.triton_env import HAS_PDL, arch_of, uses_triton

SPREAD, FINISH = "hyper_spread", "hyper_finish"
ADDED = 2  # spans of 16 channels whose sums are added up first: by a program of the first launch, or by the second one
SUMMED = 16 * ADDED
_STREAM_TYPES = (torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class Mixer:
    """Weights of a hyper-connection, and of the norm behind it; all float32 and contiguous.

    fn: [R, n H], R = (2 + n) n, or n in the head.   base: [R].   scale: [3], in the head [1].   norm: [H].
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor
    eps: float
    norm_eps: float
    iters: int


@dataclasses.dataclass(frozen=True, slots=True)
class Mixed:
    """Where a sublayer begins, or what the head returns.

    x: [T, H], the sublayer's input, in the streams' dtype; behind the head float32.   streams: [T, n, H].
    carry: see the module; None behind the head.   eps, iters: of C.   ready: whether the carry holds C, not its logits.
    """

    x: Tensor
    streams: Tensor
    carry: Tensor | None
    eps: float
    iters: int
    ready: bool = False


def mix_reference(streams: Tensor, mixer: Mixer, *, sequence: Tensor | None = None) -> Mixed:
    """See mix."""
    dtype, n = streams.dtype, streams.shape[1]
    weights = (mixer.fn, mixer.base, mixer.scale)
    alive = streams if sequence is None else torch.where((sequence >= 0)[:, None, None], streams, 0)
    carry = None
    if mixer.fn.shape[0] == n:
        x = hc_head_reference(alive, *weights, eps=mixer.eps, norm_eps=mixer.norm_eps)
    else:
        x, post, logits = collapse_reference(alive, *weights, eps=mixer.eps, norm_eps=mixer.norm_eps)
        carry = torch.nn.functional.pad(torch.cat([post[:, None], logits], 1), (0, 4 - n))
    x = rms_norm_reference(x.to(dtype), mixer.norm, mixer.norm_eps)
    return Mixed(x if carry is None else x.to(dtype), streams, carry, mixer.eps, mixer.iters)


def spread_reference(y: Tensor | ExpertParts, before: Mixed, *, sequence: Tensor | None = None) -> Tensor:
    """See spread."""
    assert before.carry is not None
    n = before.streams.shape[1]
    comb = before.carry[:, 1:, :n]
    if not before.ready:
        comb = sinkhorn_reference(comb, eps=before.eps, iters=before.iters)
    y = add_up_reference(y) if isinstance(y, ExpertParts) else y
    streams = hc_post_reference(y, before.streams, before.carry[:, 0, :n], comb)
    return streams if sequence is None else torch.where((sequence >= 0)[:, None, None], streams, 0)


def mix(
    streams: Tensor, mixer: Mixer, *, sequence: Tensor | None = None, tiles: tuple[Tile, Tile] | None = None
) -> Mixed:
    """Return where the first sublayer begins, or what the head makes of streams [T, n, H].

    streams: bfloat16 or float32, channels contiguous; the n may be one in memory (an expanded embedding).
    sequence: [T] int32, negative for padding, whose streams count as 0; None: no padding.   tiles: of both launches,
    instead of the table's. Raises ValueError for what does not fit together.
    """
    _check(streams, mixer, sequence)
    if not uses_triton(streams):
        return mix_reference(streams, mixer, sequence=sequence)
    if _is_chunk(streams, None, tiles[0] if tiles else None):
        return _pass_chunk(None, streams, None, mixer, sequence, tiles)
    return _finish(streams, mixer, _begin(None, streams, None, mixer, sequence, tiles), sequence, tiles)


def spread_and_mix(
    y: Tensor | ExpertParts,
    before: Mixed,
    mixer: Mixer,
    *,
    sequence: Tensor | None = None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Mixed:
    """Return where the next sublayer begins, or what the head returns, given a sublayer's output y.

    y: [T, H] of any float dtype, contiguous; or rows of experts, which are added up here.   before: where that sublayer
    began.   mixer: the next one's; its n is 2 to 4, H a multiple of 64.   sequence: as in `mix`; the streams of padding
    become 0, whatever its y.
    """
    _check(before.streams, mixer, sequence)
    _check_output(y, before)
    if not uses_triton(before.streams):
        streams = spread_reference(y, before, sequence=sequence)
        return mix_reference(streams, mixer, sequence=sequence)
    streams = torch.empty(before.streams.shape, dtype=before.streams.dtype, device=before.streams.device)
    if _is_chunk(streams, before, tiles[0] if tiles else None):
        return _pass_chunk(streams, before.streams, (y, before), mixer, sequence, tiles)
    parts = _begin(streams, before.streams, (y, before), mixer, sequence, tiles)
    return _finish(streams, mixer, parts, sequence, tiles)


def _given(y: Tensor | ExpertParts | None) -> tuple[tuple[Any, ...], int]:
    """Return y as kernels take it: y, or rows of experts and what says whose they are; and how many a token has."""
    if isinstance(y, ExpertParts):
        return (y.parts, y.ids, y.rank, y.first, y.add), y.ids.shape[1]
    return (y, None, None, None, None), 0


def spread(
    y: Tensor | ExpertParts, before: Mixed, *, sequence: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """Return the streams [T, n, H] behind a sublayer, in their dtype: spread_and_mix without what follows."""
    _check_output(y, before)
    if not uses_triton(before.streams):
        return spread_reference(y, before, sequence=sequence)
    streams = torch.empty(before.streams.shape, dtype=before.streams.dtype, device=before.streams.device)
    if _is_chunk(streams, before, tile):
        _begin_chunk(streams, before.streams, (y, before), None, sequence, tile)
    else:
        _begin(streams, before.streams, (y, before), None, sequence, (tile, tile) if tile else None)
    return streams


def _is_chunk(streams: Tensor, before: Mixed | None, tile: Tile | None) -> bool:
    """Return whether the launches are those of chunks: of a pass that has begun so, or one of many tokens that begins.

    tile: of the first launch, if it was given, and then it decides where a pass begins.
    """
    found = chunk.takes(streams) if before is None else before.ready
    if tile is None or ("SPAN" in tile.constants) == found:
        return found
    if before is not None:
        raise ValueError(f"tile {dict(tile.constants)}: wanted one of {SPREAD_CHUNK if found else SPREAD}, as before")
    return not found


def _begin_chunk(
    out: Tensor | None,
    streams: Tensor,
    after: tuple[Tensor | ExpertParts, Mixed] | None,
    mixer: Mixer | None,
    sequence: Tensor | None,
    tile: Tile | None,
) -> Tensor | None:
    y, before = after or (None, None)
    tile = tile or tile_for(SPREAD_CHUNK, arch_of(streams.device))
    if not len(streams):
        return None
    carry = before.carry if before else None
    return chunk.begin(out, streams, y, carry, mixer, sequence, tile, pdl=HAS_PDL(streams.device))


def _pass_chunk(
    out: Tensor | None,
    streams: Tensor,
    after: tuple[Tensor | ExpertParts, Mixed] | None,
    mixer: Mixer,
    sequence: Tensor | None,
    tiles: tuple[Tile, Tile] | None,
) -> Mixed:
    """Both launches of a chunk. out: the next streams, or None where there are none."""
    parts = _begin_chunk(out, streams, after, mixer, sequence, tiles[0] if tiles else None)
    streams = streams if out is None else out
    x, carry = _empty_results(streams, mixer)
    if parts is not None:
        tile = tiles[1] if tiles else tile_for(FINISH_CHUNK, arch_of(streams.device))
        chunk.finish(x, carry, streams, mixer, parts, sequence, tile)
    return Mixed(x, streams, carry, mixer.eps, mixer.iters, ready=carry is not None)


def _begin(
    out: Tensor | None,
    streams: Tensor,
    after: tuple[Tensor | ExpertParts, Mixed] | None,
    mixer: Mixer | None,
    sequence: Tensor | None,
    tiles: tuple[Tile, Tile] | None,
) -> Tensor:
    """Launch the spread (unless after is None) and the sums of the mix (unless mixer is None); return the latter."""
    tokens, n, hidden = streams.shape
    rows = mixer.fn.shape[0] if mixer else 0
    tile = tiles[0] if tiles else tile_for(SPREAD, arch_of(streams.device), tokens=tokens)
    warps, spans = tile.constants["W"], tile.constants["L"]
    parts = torch.empty((tokens, columns(rows) // 4, hidden // SUMMED, ADDED // spans, 4), device=streams.device)
    y, before = after or (None, None)
    given, top_k = _given(y)
    pdl, launch = _pdl(streams.device)
    if tokens:
        spread_kernel[(-(-tokens // (TOKENS * warps)), hidden // (16 * spans))](
            out, parts if mixer else None, streams, streams.stride(0), streams.stride(1), *given,
            before.carry if before else None, mixer.fn if mixer else None, sequence, tokens,
            before.eps if before else 0.0,
            H=hidden, N=n, ROWS=rows, ITERS=before.iters if before else 0, COLUMNS=columns(rows), W=warps, L=spans,
            SPREAD=after is not None, TOP_K=top_k, PDL=pdl, num_warps=warps, num_stages=1, **launch,
        )  # fmt: skip
    return parts


def _finish(
    streams: Tensor, mixer: Mixer, parts: Tensor, sequence: Tensor | None, tiles: tuple[Tile, Tile] | None
) -> Mixed:
    tokens, n, hidden = streams.shape
    tile = tiles[1] if tiles else tile_for(FINISH, arch_of(streams.device))
    warps = warps_of(tile, hidden=hidden)
    x, carry = _empty_results(streams, mixer)
    pdl, launch = _pdl(streams.device)
    if tokens:
        finish_kernel[(1 if carry is None else 2, tokens)](
            x, carry, parts, streams, streams.stride(0), streams.stride(1), mixer.base, mixer.scale, mixer.norm,
            sequence, mixer.eps, mixer.norm_eps,
            H=hidden, N=n, SUMS=parts.shape[2], ADDED=parts.shape[3], COLUMNS=4 * parts.shape[1], BLOCK=32 * warps,
            PDL=pdl, num_warps=warps, num_stages=1, **launch,
        )  # fmt: skip
    return Mixed(x, streams, carry, mixer.eps, mixer.iters)


def _empty_results(streams: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor | None]:
    """Return room for x [T, H], and for the carry [T, 1 + n, 4] unless this is the head."""
    tokens, n, hidden = streams.shape
    is_head = mixer.fn.shape[0] == n
    x = torch.empty((tokens, hidden), dtype=torch.float32 if is_head else streams.dtype, device=streams.device)
    return x, None if is_head else torch.empty((tokens, 1 + n, 4), device=streams.device)


def warps_of(tile: Tile, *, hidden: int) -> int:
    """Return the warps of a program of the second launch, none without channels."""
    return min(tile.constants["W"], 1 << max(0, (hidden - 1) // 256).bit_length())


def _pdl(device: torch.device) -> tuple[bool, dict[str, Any]]:
    pdl = HAS_PDL(device)
    return pdl, {"launch_pdl": True} if pdl else {}


def _check(streams: Tensor, mixer: Mixer, sequence: Tensor | None) -> None:
    if streams.dim() != 3 or not 2 <= streams.shape[1] <= 4 or streams.shape[2] % 64 or not streams.shape[2]:
        raise ValueError(f"streams {tuple(streams.shape)}: wanted [T, 2 to 4, multiple of 64]")
    if streams.dtype not in _STREAM_TYPES or streams.stride(2) != 1:
        raise ValueError(
            f"streams of {streams.dtype}, strides {streams.stride()}: wanted bfloat16 or float32, channels contiguous"
        )
    tokens, n, hidden = streams.shape
    rows = n if mixer.fn.shape[0] == n else (2 + n) * n
    scales = 1 if rows == n else 3
    wanted = {"fn": (rows, n * hidden), "base": (rows,), "scale": (scales,), "norm": (hidden,)}
    for name, shape in wanted.items():
        found = getattr(mixer, name)
        if found.shape != shape or found.dtype != torch.float32 or not found.is_contiguous():
            raise ValueError(
                f"{name} {tuple(found.shape)} {found.dtype}, strides {found.stride()}: wanted contiguous {shape} "
                f"float32 for streams {tuple(streams.shape)}"
            )
    if mixer.iters < 1:
        raise ValueError(f"iters {mixer.iters}: wanted at least 1")
    if sequence is not None and (sequence.shape != (tokens,) or sequence.dtype != torch.int32):
        raise ValueError(f"sequence {tuple(sequence.shape)} {sequence.dtype}: wanted {(tokens,)} int32")


def _check_output(y: Tensor | ExpertParts, before: Mixed) -> None:
    tokens, n, hidden = before.streams.shape
    if before.carry is None:
        raise ValueError("carry None: there is nothing to spread behind the head")
    if before.carry.shape != (tokens, 1 + n, 4) or not before.carry.is_contiguous():
        raise ValueError(f"carry {tuple(before.carry.shape)}: wanted contiguous {(tokens, 1 + n, 4)}")
    is_sound = isinstance(y, ExpertParts) or (y.is_floating_point() and y.is_contiguous())
    if tuple(y.shape) != (tokens, hidden) or not is_sound:
        found = "" if isinstance(y, ExpertParts) else f" {y.dtype}, strides {y.stride()}"
        raise ValueError(
            f"y {tuple(y.shape)}{found}: wanted contiguous floats {(tokens, hidden)}, or rows of experts for as many, "
            f"for streams {tuple(before.streams.shape)}"
        )
