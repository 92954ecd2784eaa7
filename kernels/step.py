"""Begin and end of a captured decode step: from a row per sequence to what kernels read, and back, in one launch each.

Everything that changes from step to step lies on the device, one row a sequence, so that a graph of the step can be
replayed without the host knowing the tokens of the step before:

    rows [R, 4] int32 = (is_active, position, slot, token)    token -1: the one that was sampled last
    last_token [R] int64

    begin_step   positions, slots, sequence, token ids, and every rotation of the step, of the first `size` rows
    end_step     last_token = sampled token, position += 1, token = -1 of each active row; and what the host reads

A row with is_active 0 is padding: sequence -1, no slot, token 0. Positions up to 2^24 are exact, as in
norm_rope.rotation_at. The kernels are in step_triton.py.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from triton import next_power_of_2

from kernels.compress import CSA_RATIO, HCA_RATIO
from kernels.norm_rope import rotation_at
from kernels.ragged import DecodeBatch
from kernels.step_triton import begin_step_kernel, end_step_kernel
from kernels.tiles import Variant
from kernels.triton_env import uses_triton

IS_ACTIVE, POSITION, SLOT, TOKEN = range(4)
LAST_SAMPLED = -1
MOST_HIDDEN = 16384
_BEGIN_WARPS, _END_WARPS = 1, 8


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What a step of one token a sequence is run on, of `size` rows.

    positions, starts, slots, sequence [size], query_start [size+1]: as DecodeBatch has them, int32; slot -1 of padding.
    token_ids [size] int64.   next_position [size] int64: of the token to be sampled, which keys its noise.
    window, compressed, csa, hca: complex64 [size, R/2], rotations of the token by either set of frequencies, and by the
    second one of the first position of the CSA and of the HCA entry that the token would complete.
    """

    positions: Tensor
    sequence: Tensor
    starts: Tensor
    slots: Tensor
    query_start: Tensor
    token_ids: Tensor
    next_position: Tensor
    window: Tensor
    compressed: Tensor
    csa: Tensor
    hca: Tensor

    def batch(self, block_table: Tensor) -> DecodeBatch:
        """Return the rows as decode kernels read them. block_table: [at least size, N] int32, row b of sequence b."""
        size = self.positions.shape[0]
        return DecodeBatch(
            self.positions, self.sequence, self.starts, self.query_start, self.slots, block_table[:size],
            num_tokens=size, max_query_len=1,
        )  # fmt: skip


def begin_step_reference(
    rows: Tensor, last_token: Tensor, *, size: int, window: Tensor, compressed: Tensor
) -> StepInputs:
    """See begin_step."""
    is_active, position, slot, token = rows[:size].unbind(1)
    real = is_active != 0
    position = torch.where(real, position, 0)
    number = torch.arange(size + 1, dtype=torch.int32, device=rows.device)
    tokens = torch.where(token < 0, last_token[:size], token)
    return StepInputs(
        positions=position,
        sequence=torch.where(real, number[:size], -1),
        starts=position.clone(),
        slots=torch.where(real, slot, -1),
        query_start=number,
        token_ids=torch.where(real, tokens, 0),
        next_position=position.long() + 1,
        window=rotation_at(position, window),
        compressed=rotation_at(position, compressed),
        csa=rotation_at(position - CSA_RATIO + 1, compressed),
        hca=rotation_at(position - HCA_RATIO + 1, compressed),
    )


def begin_step(rows: Tensor, last_token: Tensor, *, size: int, window: Tensor, compressed: Tensor) -> StepInputs:
    """Return the inputs of a step over the first `size` rows.

    rows: [R, 4] int32.   last_token: [R] int64.   window, compressed: [R/2] float32 frequencies (see
    engine/model/layers.Rotary).   Nothing is written but the result.
    An ordinary launch: it waits for all before it. What comes right behind must be one as well, or read nothing of
    this before its gdc_wait; kernels after that may read it early. Raises ValueError.
    """
    _check_rows(rows, last_token, size)
    if window.dim() != 1 or window.shape != compressed.shape:
        raise ValueError(f"frequencies {tuple(window.shape)} and {tuple(compressed.shape)}: wanted two vectors alike")
    for name, values in (("window", window), ("compressed", compressed)):
        if values.dtype != torch.float32 or not values.is_contiguous():
            raise ValueError(f"{name} frequencies {values.dtype}, strides {values.stride()}: wanted contiguous float32")
    if not uses_triton(rows):
        return begin_step_reference(rows, last_token, size=size, window=window, compressed=compressed)
    pairs = window.shape[0]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=rows.device)

    # Tensors of their own: kernels were compiled for addresses that are multiples of 16.
    positions, sequence, starts, slots, query_start = (empty(n) for n in (size, size, size, size, size + 1))
    token_ids, next_position = (empty(size, dtype=torch.int64) for _ in range(2))
    turns = empty(4, size, pairs, 2, dtype=torch.float32)
    begin_step_kernel[(size, 4)](
        rows, last_token, window, compressed, positions, sequence, starts, slots, query_start, token_ids, next_position,
        turns, **_begin_constants(pairs), num_warps=_BEGIN_WARPS, num_stages=1,
    )  # fmt: skip
    rotations = torch.view_as_complex(turns)
    return StepInputs(positions, sequence, starts, slots, query_start, token_ids, next_position, *rotations)


def end_step_reference(rows: Tensor, last_token: Tensor, tokens: Tensor, x: Tensor) -> Tensor:
    """See end_step."""
    size = tokens.shape[0]
    real = rows[:size, IS_ACTIVE] != 0
    is_finite = x.isfinite().all(1)
    last_token[:size] = torch.where(real, tokens, last_token[:size])
    rows[:size, POSITION] += real.to(torch.int32)
    rows[:size, TOKEN] = torch.where(real, LAST_SAMPLED, rows[:size, TOKEN])
    return torch.stack([torch.where(real, tokens, 0).int(), torch.where(real, is_finite, True).int()], 1)


def end_step(rows: Tensor, last_token: Tensor, tokens: Tensor, x: Tensor) -> Tensor:
    """Move the first `size` rows on by the tokens they have sampled; return what the host reads, int32 [size, 2].

    rows, last_token: as for begin_step, updated in place where a row is active.   tokens: [size] int64.
    x: [size, H] float32, the head's normed input: a row that is not finite throughout has read what nobody wrote, and
    its token means nothing.   Returned: (token, 1 if x is finite throughout else 0); (0, 1) of padding.
    An ordinary launch, as begin_step. Raises ValueError.
    """
    size = tokens.shape[0]
    _check_rows(rows, last_token, size)
    if tokens.shape != (size,) or tokens.dtype != torch.int64 or not tokens.is_contiguous():
        raise ValueError(f"tokens {tuple(tokens.shape)} {tokens.dtype}: wanted contiguous int64 ({size},)")
    if x.dim() != 2 or x.shape[0] != size or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)} {x.dtype}: wanted contiguous float32 ({size}, hidden)")
    if x.shape[1] > MOST_HIDDEN:
        raise ValueError(f"x of {x.shape[1]} channels: the kernel looks at {MOST_HIDDEN} at most")
    if not uses_triton(rows):
        return end_step_reference(rows, last_token, tokens, x)
    out = torch.empty((size, 2), dtype=torch.int32, device=rows.device)
    end_step_kernel[(size,)](
        rows, last_token, tokens, x, out, **_end_constants(x.shape[1]), num_warps=_END_WARPS, num_stages=1
    )
    return out


def _check_rows(rows: Tensor, last_token: Tensor, size: int) -> None:
    if rows.dim() != 2 or rows.shape[1] != 4 or rows.dtype != torch.int32 or not rows.is_contiguous():
        raise ValueError(f"rows {tuple(rows.shape)} {rows.dtype}: wanted contiguous int32 (R, 4)")
    if last_token.shape != rows.shape[:1] or last_token.dtype != torch.int64 or not last_token.is_contiguous():
        raise ValueError(
            f"last tokens {tuple(last_token.shape)} {last_token.dtype}: wanted contiguous int64 ({rows.shape[0]},)"
        )
    if not 0 < size <= rows.shape[0]:
        raise ValueError(f"a step of {size} of {rows.shape[0]} rows: wanted 1 to {rows.shape[0]}")


def _begin_constants(pairs: int) -> dict[str, int]:
    return {"PAIRS": pairs, "BLOCK": int(next_power_of_2(pairs)), "CSA": CSA_RATIO, "HCA": HCA_RATIO}


def _end_constants(hidden: int) -> dict[str, int]:
    return {"H": hidden, "BLOCK": int(next_power_of_2(hidden))}


def variants(arch: str) -> list[Variant]:
    """Return both compilations: 64 rotary channels, DeepSeek-V4-Flash's hidden size."""
    begin = dict.fromkeys(
        ("rows_ptr", "position_ptr", "sequence_ptr", "start_ptr", "slot_ptr", "query_start_ptr"), "*i32"
    )
    begin |= dict.fromkeys(("last_token_ptr", "token_ptr", "next_position_ptr"), "*i64")
    begin |= dict.fromkeys(("window_ptr", "compressed_ptr", "turn_ptr"), "*fp32")
    end = {"rows_ptr": "*i32", "last_token_ptr": "*i64", "token_ptr": "*i64", "x_ptr": "*fp32", "out_ptr": "*i32"}
    return [
        Variant("begin_step", begin_step_kernel, begin, _begin_constants(32), _BEGIN_WARPS, 1, tensor_ops=()),
        Variant(
            "end_step", end_step_kernel, end, _end_constants(4096), _END_WARPS, 1, tensor_ops=(),
            bytes_per_program=4 * 4096 + 16 + 16 + 8,
        ),
    ]  # fmt: skip
