"""Tokens of a decode step on the GPU: each row by its own settings, without reading anything back.

    a = logits, + bias;   penalties by the counts of the row's history;   -inf where its mask has no bit
    token: as in sampling.py, of a;   log probabilities: of the logits as they are given

Three launches. The first reads the logits: of each block the best token, with noise where a row has no top-k, and for
rows that truncate the largest value of every group of tokens. The second is for rows with top-p, without top-k, and has
several programs for each. The third has one that chooses:

    greedy, temperature alone    the best of the blocks
    top-k, with anything         it reads the few groups again that can hold a token that is kept
    top-p without top-k          the second launch has read the row again, once, and put the tokens of best score to the
                                 test
    min-p alone                  the same test, which needs no reading

So a row pays for what it asks. Where the test leaves it open (for the more tokens the smaller top-p: at 0.95 less than
one in 10,000), it lists what can still be kept, which takes longer the flatter the row. So do many tokens that
are equal to the last of top-k's, or a large top-k.

A row's settings are 16 words, written once when its request begins (pack_settings). What has a value per token lies in
pools of rows, of which a request may have one each: bias, history, mask. After its token is chosen, a row's history
counts it.

What differs from sampling.py: floats. Logarithms, exponents and sums are taken in another order or way, so that tokens
whose scores with noise, or probabilities before them, are within some 1e-5 of each other may change places. Values that
are compared for top-k are the same to the bit, unless penalties round otherwise (1 ulp). The rest is exact: noise bits,
ties to the lower id, what a mask forbids. A row's bits do not depend on the others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from kernels.sampling import apply_penalties_reference, sample_reference, token_logprobs_reference
from kernels.sampling_candidates_triton import CANDIDATES, NUMBERS, weigh_kernel
from kernels.sampling_row_triton import WORDS
from kernels.sampling_scan_triton import scan_kernel
from kernels.sampling_triton import choose_kernel
from kernels.tiles import Tile, Variant, tile_for, tiles_of
from kernels.triton_env import HAS_PDL, arch_of, sm_count, uses_triton

OP = "sampling"
MAX_TOP = 20
IN_PROMPT = -(2**15)  # the bit of a history's word that says so; the others count outputs, up to 2^15 - 1
_WIDTH = 32  # at least MAX_TOP, a power of two
_LOWEST = -1e30  # what a mask allows is at least this, so that a bias of -inf can't forbid it


@dataclasses.dataclass(frozen=True)
class Sampled:
    """tokens [B] int64.   logprob [B] float32: of the token; 0 for rows that do not ask.

    top_ids [B, n] int32, top_logprobs [B, n] float32: the best by the logits as given, in order; -1 and 0 beyond what a
    row asks for.
    """

    tokens: Tensor
    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def pack_settings(
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    presence: Tensor | None = None,
    frequency: Tensor | None = None,
    repetition: Tensor | None = None,
    history_row: Tensor | None = None,
    bias_row: Tensor | None = None,
    mask_row: Tensor | None = None,
    num_logprobs: Tensor | None = None,
) -> Tensor:
    """Return settings [B, 16] int32 of B rows, each given as a tensor [B] of any numeric type on one device.

    The first five as in sampling.sample; penalties as in sampling.apply_penalties, off if None. *_row: rows of the
    pools, -1 for none, None for no row at all.   num_logprobs: -1 for no log probabilities, else how many beside that
    of the token itself, 20 at most.
    """
    off: dict[str, float] = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0}
    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "presence": presence,
        "frequency": frequency, "repetition": repetition, "seed": seed, "history_row": history_row,
        "bias_row": bias_row, "mask_row": mask_row, "num_logprobs": num_logprobs,
    }  # fmt: skip
    words = torch.zeros((temperature.numel(), WORDS), dtype=torch.int32, device=temperature.device)
    at = 0
    for name, value in given.items():
        value = torch.full_like(temperature, off.get(name, -1)) if value is None else value
        if value.shape != words.shape[:1]:
            raise ValueError(f"{name} {tuple(value.shape)} for {words.shape[0]} rows")
        if name == "seed":
            words[:, at : at + 2] = value.to(torch.int64).contiguous().view(torch.int32).view(-1, 2)
            at += 1
        elif name in ("top_k", "history_row", "bias_row", "mask_row", "num_logprobs"):
            words[:, at] = value.clamp(-1, 2**31 - 1).to(torch.int32)
        else:
            words[:, at] = value.to(torch.float32).contiguous().view(torch.int32)
        at += 1
    return words


def sample_decode_reference(
    logits: Tensor,
    settings: Tensor,
    *,
    position: Tensor,
    sequence: Tensor | None = None,
    bias: Tensor | None = None,
    history: Tensor | None = None,
    mask: Tensor | None = None,
    num_top: int = 0,
) -> Sampled:
    """See sample_decode."""
    count, vocab = logits.shape
    real = torch.ones(count, dtype=torch.bool, device=logits.device) if sequence is None else sequence >= 0
    asked = torch.where(real, settings[:, 12], -1)
    given = torch.where(real[:, None], logits.float(), 0.0)
    adjusted = adjusted_reference(logits, settings, sequence=sequence, bias=bias, history=history, mask=mask)
    floats = settings.view(torch.float32)
    tokens = sample_reference(
        adjusted, temperature=torch.where(real, floats[:, 0], 0.0), top_k=settings[:, 1].long(), top_p=floats[:, 2],
        min_p=floats[:, 3], seed=seeds_of(settings), position=position,
    )  # fmt: skip
    of_token, ids, of_top = token_logprobs_reference(given, tokens, min(num_top, vocab))
    is_shown = torch.arange(ids.shape[1], device=logits.device) < asked[:, None]
    rows = torch.where(real, settings[:, 9], -1)
    if history is not None:
        has = rows >= 0
        words = history[rows[has].long(), tokens[has]]
        history[rows[has].long(), tokens[has]] = torch.where(words & 0x7FFF == 0x7FFF, words, words + 1)
    padding = (0, num_top - ids.shape[1])
    return Sampled(
        tokens,
        torch.where(asked >= 0, of_token, 0.0),
        torch.nn.functional.pad(torch.where(is_shown, ids, -1), padding, value=-1).to(torch.int32),
        torch.nn.functional.pad(torch.where(is_shown, of_top, 0.0), padding),
    )


def seeds_of(settings: Tensor) -> Tensor:
    """Return the seeds [B] int64 that settings hold."""
    return (settings[:, 7].long() & 0xFFFFFFFF) | (settings[:, 8].long() << 32)


def adjusted_reference(
    logits: Tensor,
    settings: Tensor,
    *,
    sequence: Tensor | None = None,
    bias: Tensor | None = None,
    history: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return logits [B, V] float32 with bias, penalties and masks, as a token is chosen by them; 0 for padding."""
    x = logits.float().clone()
    real = torch.ones(x.shape[0], dtype=torch.bool, device=x.device) if sequence is None else sequence >= 0
    x[~real] = 0.0
    floats = settings.view(torch.float32)
    of_history, of_bias, of_mask = (torch.where(real, settings[:, at], -1).long() for at in (9, 10, 11))
    if bias is not None:
        has = of_bias >= 0
        x[has] += bias[of_bias[has]]
    if history is not None:
        has = of_history >= 0
        words = history[of_history[has]]
        presence, frequency, repetition = (floats[has, at] for at in (4, 5, 6))
        x[has] = apply_penalties_reference(
            x[has], words != 0, (words & 0x7FFF).float(), presence=presence, frequency=frequency,
            repetition=repetition,
        )  # fmt: skip
    if mask is not None:
        has = of_mask >= 0
        bits = mask[of_mask[has]][:, :, None] >> torch.arange(32, dtype=torch.int32, device=x.device)
        allowed = (bits & 1).bool().flatten(1)[:, : x.shape[1]]
        x[has] = torch.where(allowed, x[has].clamp_min(_LOWEST), -torch.inf)
    return x


def sample_decode(
    logits: Tensor,
    settings: Tensor,
    *,
    position: Tensor,
    sequence: Tensor | None = None,
    bias: Tensor | None = None,
    history: Tensor | None = None,
    mask: Tensor | None = None,
    num_top: int = 0,
    tile: Tile | None = None,
) -> Sampled:
    """Return the next token of each row of logits [B, V], contiguous, float32 or bfloat16; they are left as they are.

    settings [B, 16] int32: of pack_settings.   position [B] int64: absolute, of the token being chosen.
    sequence [B] int32: -1 marks padding, which gets token 0.   num_top: columns of the best, 20 at most; 0 for none.
    bias [rows, V] float32, added.   history [rows, V] int16: how often a token is in the output, + IN_PROMPT if it is
    in the prompt; updated, so that no two rows may share one.   mask [rows, ceil(V / 32)] int32: bit i of word w allows
    token 32 w + i.   tile: instead of the table's; other tiles add in another order.
    A row that is -inf or NaN throughout gives token 0. settings, position and sequence must have been written before
    the kernel in front of this one began. Raises ValueError.
    """
    _check(logits, settings, position, sequence, bias, history, mask, num_top)
    count, vocab = logits.shape
    if not uses_triton(logits) or not count:
        return sample_decode_reference(
            logits, settings, position=position, sequence=sequence, bias=bias, history=history, mask=mask,
            num_top=num_top,
        )  # fmt: skip
    device = logits.device

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    i32 = torch.int32
    out = Sampled(
        empty(count, dtype=torch.int64), empty(count), empty(count, num_top, dtype=i32), empty(count, num_top)
    )
    tile = tile or tile_for(OP, arch_of(device))
    if tile.constants["SMALL"] < num_top:
        raise ValueError(f"a tile that ranks {tile.constants['SMALL']} tokens for {num_top} columns")
    if tile.constants["E"] > 32:
        raise ValueError(f"a tile of {tile.constants['E']} tokens in a row: 32 have a word of a mask")
    constants = _constants(tile, vocab)
    blocks, groups = constants["BLOCKS"], constants["BLOCKS"] * constants["Q"]
    lists, listed = 1 + (num_top > 0), vocab + tile.constants["SMALL"]
    pools = (bias, history, mask)
    inputs = (
        logits, settings, position, _real(device, count) if sequence is None else sequence,
        *(_none(device, dtype) if pool is None else pool for pool, dtype in zip(pools, _POOLS, strict=True)),
    )  # fmt: skip
    found = (
        empty(count, 2, groups), empty(count, 4, blocks), empty(count, 2, blocks), empty(count, 2, blocks, dtype=i32),
    )  # fmt: skip
    weighed = (
        empty(count, CANDIDATES, dtype=torch.int64), empty(count, NUMBERS),
        empty(count, constants["SHARES"], CANDIDATES),
    )  # fmt: skip
    scratch = (
        empty(count, lists, groups, dtype=i32), empty(count, lists, listed), empty(count, lists, listed, dtype=i32)
    )  # fmt: skip
    pdl = HAS_PDL(device)
    launch: dict[str, Any] = {"launch_pdl": True} if pdl else {}

    def cut(kernel: Any) -> dict[str, int]:
        return {name: value for name, value in constants.items() if name in kernel.arg_names} | {"PDL": pdl}

    def programs(parts: int, resident: str) -> int:
        """Return how many share a row's parts evenly, of `resident` to a multiprocessor at most."""
        most = tile.constants[resident] * sm_count(device) // count
        return int(cdiv(parts, cdiv(parts, max(1, most))))

    scans = programs(cdiv(vocab, constants["R"] * constants["Q"] * constants["E"]), "SCANS")
    scan_kernel[(scans, count)](
        *inputs, *found, vocab, **cut(scan_kernel), num_warps=tile.num_warps, num_stages=1,
        maxnreg=tile.constants["SCAN_REGISTERS"], **launch,
    )  # fmt: skip
    shares = programs(cdiv(vocab, constants["SHARE"]), "RESIDENT")
    weigh_kernel[(shares, count)](
        *inputs[:2], *inputs[3:], *found[1:], *weighed, vocab, **cut(weigh_kernel),
        num_warps=tile.constants["WEIGHERS"], num_stages=1, maxnreg=tile.constants["WEIGH_REGISTERS"], **launch,
    )  # fmt: skip
    choose_kernel[(lists, count)](
        out.tokens, out.logprob, out.top_ids, out.top_logprobs, *inputs, *found, *weighed, *scratch, vocab, num_top,
        **cut(choose_kernel), WIDTH=_WIDTH, num_warps=tile.constants["WARPS"], num_stages=1, **launch,
    )  # fmt: skip
    return out


_POOLS = (torch.float32, torch.int16, torch.int32)


def _constants(tile: Tile, vocab: int) -> dict[str, int]:
    """Return the constants of the three kernels."""
    own = ("WARPS", "WEIGHERS", "SCANS", "RESIDENT", "SCAN_REGISTERS", "WEIGH_REGISTERS")
    c = {name: value for name, value in tile.constants.items() if name not in own}
    blocks, shares = cdiv(vocab, c["R"] * c["Q"] * c["E"]), cdiv(vocab, c["SHARE"])
    return c | {"BLOCKS": int(next_power_of_2(blocks)), "SHARES": int(next_power_of_2(shares))}


@functools.cache
def _none(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return what stands for a pool that is not given: no row has a row of it."""
    return torch.zeros(16, dtype=dtype, device=device)


@functools.cache
def _real(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _check(
    logits: Tensor, settings: Tensor, position: Tensor, sequence: Tensor | None, bias: Tensor | None,
    history: Tensor | None, mask: Tensor | None, num_top: int,
) -> None:  # fmt: skip
    if logits.ndim != 2 or logits.dtype not in (torch.float32, torch.bfloat16) or not logits.is_contiguous():
        raise ValueError(f"logits {tuple(logits.shape)} {logits.dtype}: wanted contiguous rows of float32 or bfloat16")
    count, vocab = logits.shape
    if not 0 < vocab < 2**24:
        raise ValueError(f"a vocabulary of {vocab}")
    wanted: list[tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]] = [
        ("settings", settings, torch.int32, (count, WORDS)),
        ("position", position, torch.int64, (count,)),
        ("sequence", sequence, torch.int32, (count,)),
    ]
    widths = (vocab, vocab, cdiv(vocab, 32))
    for name, pool, dtype, width in zip(
        ("bias", "history", "mask"), (bias, history, mask), _POOLS, widths, strict=True
    ):
        wanted.append((name, pool, dtype, (pool.shape[0] if pool is not None else 0, width)))
    for name, value, dtype, shape in wanted:
        if value is not None and (value.shape != shape or value.dtype != dtype or not value.is_contiguous()):
            raise ValueError(
                f"{name} {tuple(value.shape)} {value.dtype}: wanted contiguous {dtype} {shape} for logits "
                f"{tuple(logits.shape)}"
            )
    if not 0 <= num_top <= MAX_TOP:
        raise ValueError(f"{num_top} columns of log probabilities: 0 to {MAX_TOP}")


def variants(arch: str) -> list[Variant]:
    """Return the compilations that are shipped for `arch`: DeepSeek-V4-Flash's vocabulary, both types of logits."""
    found = []
    for tile in tiles_of(OP, arch):
        for dtype in ("*fp32", "*bf16"):
            constants = _constants(tile, 129280) | {"PDL": True}
            launches = (
                (scan_kernel, tile.num_warps, tile.constants["SCAN_REGISTERS"]),
                (weigh_kernel, tile.constants["WEIGHERS"], tile.constants["WEIGH_REGISTERS"]),
                (choose_kernel, tile.constants["WARPS"], None),
            )  # fmt: skip
            for kernel, warps, registers in launches:
                signature = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(("vocab", "width"), "i32")
                integers = ("words_ptr", "sequence_ptr", "mask_ptr", "best_id_ptr", "group_ptr", "id_ptr", "top_id_ptr")
                signature |= dict.fromkeys(integers, "*i32") | {"found_ptr": "*i64"}
                signature |= {"logits_ptr": dtype, "history_ptr": "*i16", "position_ptr": "*i64", "token_ptr": "*i64"}
                fixed = {name: v for name, v in (constants | {"WIDTH": _WIDTH}).items() if name in kernel.arg_names}
                types = {name: signature[name] for name in kernel.arg_names if name not in fixed}
                unaligned = ("width",) if "width" in types else ()
                found.append(
                    Variant(OP, kernel, types, fixed, warps, 1, tensor_ops=(), unaligned=unaligned, maxnreg=registers)
                )
    return found
