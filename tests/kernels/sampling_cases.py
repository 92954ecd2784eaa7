"""Rows to sample from, for the interpreter and for a GPU, and what tokens are right but for float near ties."""

from __future__ import annotations

import dataclasses

import torch

from kernels.sampling import GREEDY_TEMPERATURE, gumbel_noise
from kernels.sampling_decode import (
    IN_PROMPT,
    Sampled,
    adjusted_reference,
    pack_settings,
    sample_decode,
    sample_decode_reference,
    seeds_of,
)
from kernels.tiles import Tile

# How far floats may lie: of a score with noise (and of its size), of the probability before a token, of a logarithm.
SCORE, RELATIVE, MASS, LOG = 1e-5, 4e-7, 2e-5, 2e-5
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.9},
    "low top-p": {"top_p": 0.2, "temperature": 1.5},
    "min-p": {"min_p": 0.1},
    "top-k and top-p": {"top_k": 40, "top_p": 0.8, "temperature": 1.3},
    "min-p and top-p": {"min_p": 0.02, "top_p": 0.7},
    "all": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
}
PENALTIES = {"presence": 0.5, "frequency": 0.3, "repetition": 1.2}


@dataclasses.dataclass
class Case:
    """sample_decode(logits, settings, **given)."""

    logits: torch.Tensor
    settings: torch.Tensor
    given: dict

    def run(self, **options) -> Sampled:
        """Choose, and leave the history as it was."""
        return sample_decode(self.logits, self.settings, **self._again(), **options)

    def expect(self) -> Sampled:
        return sample_decode_reference(self.logits, self.settings, **self._again())

    def _again(self) -> dict:
        return {name: x.clone() if name == "history" else x for name, x in self.given.items()}

    def fault(self, **options) -> str:
        """Return what is wrong with what the kernels give, "" if nothing."""
        given = self._again()
        got = sample_decode(self.logits, self.settings, **given, **options)
        return self.token_fault(got.tokens) or self.history_fault(given, got.tokens) or self.logprob_fault(got)

    def token_fault(self, tokens: torch.Tensor) -> str:
        """Return which row has a token that is wrong, not just the other one of a near tie; "" if none.

        A token is right if it is kept for limits that are looser by what floats may differ, and its score reaches that
        of every token which stricter limits keep, but for the same.
        """
        given = {name: self.given.get(name) for name in ("sequence", "bias", "history", "mask")}
        adjusted = adjusted_reference(self.logits, self.settings, **given)
        floats = self.settings.view(torch.float32)
        seeds = seeds_of(self.settings)
        for row, token in enumerate(tokens.tolist()):
            if not 0 <= token < self.logits.shape[1]:
                return f"row {row}: token {token}"
            if self.given.get("sequence") is not None and self.given["sequence"][row] < 0:
                if token:
                    return f"row {row}: token {token} of padding"
                continue
            temperature, top_p, min_p = (float(floats[row, at]) for at in (0, 2, 3))
            top_k, a = int(self.settings[row, 1]), adjusted[row]
            rounds = self.settings[row, 9] >= 0 and self.given.get("history") is not None
            if temperature < GREEDY_TEMPERATURE or top_k == 1 or top_p <= 0 or min_p >= 1:
                slack = RELATIVE * float(a.abs().masked_fill(a.isinf(), 0).max()) if rounds else 0.0
                if a[token] < a.max() - slack or (not slack and token != int(a.argmax())):
                    return f"row {row}: greedy token {token} of {a[token]}, the best is {int(a.argmax())} of {a.max()}"
                continue
            if bool((a == -torch.inf).all()):
                if token:
                    return f"row {row}: token {token} of none"
                continue
            s = a / floats[row, 0]
            slack = RELATIVE * float(s.abs().masked_fill(s.isinf(), 0).max())
            noise = gumbel_noise(seeds[row : row + 1], self.given["position"][row : row + 1], len(a))[0]
            loose, strict = (self._kept(s, top_k, top_p, min_p, way * slack, way * MASS, rounds) for way in (1, -1))
            score = s.double() + noise.double()
            best = score.masked_fill(~strict, -torch.inf).max()
            if not loose[token] or score[token] < best - SCORE - slack:
                other = int(score.masked_fill(~strict, -torch.inf).argmax())
                return (
                    f"row {row}: token {token} {'' if loose[token] else 'not '}kept, score {score[token]:.6f}, "
                    f"wanted {other} of {best:.6f}; kept are {int(strict.sum())} to {int(loose.sum())}"
                )
        return ""

    @staticmethod
    def _kept(s, top_k, top_p, min_p, slack, mass, rounds) -> torch.Tensor:
        """Return which tokens are kept, by limits that slack and mass loosen, or tighten if negative."""
        kept = s > -torch.inf
        if min_p > 0:
            kept &= s.double() >= s.max().double() + torch.tensor(min_p).double().log() - slack
        order = torch.where(kept, s, -torch.inf).sort(descending=True, stable=True).indices
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(s), device=s.device)
        value = s[order].double()
        if rounds:  # penalties may round otherwise: what is as good counts, or not
            ascending = value.flip(0).contiguous()
            first = len(s) - torch.searchsorted(ascending, value + slack, right=slack > 0)
            rank = first[rank].clamp(min=0) if slack > 0 else (first - 1)[rank]
        if top_k > 0:
            kept = kept & (rank < top_k)
        if top_p < 1:
            weight = torch.where(kept, (s - s.max()).double().exp(), 0.0)[order]
            before = torch.cat([weight.new_zeros(1), weight.cumsum(0)])[rank.clamp(max=len(s))] / weight.sum()
            kept = kept & ((before < top_p + mass) | (rank == 0))
        return kept

    def history_fault(self, given: dict, tokens: torch.Tensor) -> str:
        """Return whether a history counts anything but its row's token, "" if not."""
        if given.get("history") is None:
            return ""
        wanted = self.given["history"].clone()
        for row, token in enumerate(tokens.tolist()):
            at = int(self.settings[row, 9])
            if at >= 0 and (given.get("sequence") is None or given["sequence"][row] >= 0):
                wanted[at, token] += 0 if wanted[at, token] & 0x7FFF == 0x7FFF else 1
        return "" if torch.equal(wanted, given["history"]) else "the history does not count what was chosen"

    def logprob_fault(self, got: Sampled) -> str:
        """Return how log probabilities are wrong for the tokens that were chosen, "" if they are not."""
        wanted = self.expect()
        logs = torch.log_softmax(self.logits.double(), -1)
        for row, token in enumerate(got.tokens.tolist()):
            padding = self.given.get("sequence") is not None and bool(self.given["sequence"][row] < 0)
            asks = int(self.settings[row, 12]) >= 0 and not padding
            right = float(logs[row, token]) if asks else 0.0
            if not abs(float(got.logprob[row]) - right) <= LOG * max(1.0, abs(right)):
                return f"row {row}: log probability {float(got.logprob[row])} of {token}, wanted {right}"
        if not torch.equal(got.top_ids, wanted.top_ids):
            row = int((got.top_ids != wanted.top_ids).any(1).nonzero()[0])
            return f"row {row}: the best are {got.top_ids[row].tolist()}, wanted {wanted.top_ids[row].tolist()}"
        if not torch.allclose(got.top_logprobs, wanted.top_logprobs, rtol=LOG, atol=LOG):
            return f"log probabilities of the best off by {(got.top_logprobs - wanted.top_logprobs).abs().max()}"
        return ""


def draw_logits(count: int, vocab: int, kind: str, *, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Return [count, vocab] float32: normal, peaked (a few far above), flat, ties (few values), or equal."""
    draw = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, vocab, generator=draw, device=device)
    if kind == "normal":
        return x * 2.5
    if kind == "peaked":
        at = torch.randint(0, vocab, (count, 6), generator=draw, device=device)
        return (x * 2.0).scatter_(1, at, 14 + 2 * torch.randn(count, 6, generator=draw, device=device))
    if kind == "flat":
        return 20.0 + x * 0.1
    if kind == "ties":
        return (x * 2).round() / 2
    assert kind == "equal"
    return torch.full_like(x, 3.0)


def make_case(
    rows: list[dict],
    *,
    vocab: int = 300,
    kind: str = "normal",
    penalties: bool = False,
    bias: bool = False,
    mask: bool = False,
    padding: int = 0,
    num_top: int = 0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
) -> Case:
    """Return a row for each of `rows` (settings over PLAIN), then padding; pools have rows to spare, full of NaN.

    penalties, bias, mask: of every other row, in a row of the pool that is not its own number.
    """
    draw = torch.Generator(device).manual_seed(seed)
    total = len(rows) + padding
    rows = [PLAIN | row for row in rows] + [PLAIN | {"top_p": 0.5, "num_logprobs": 3}] * padding

    def column(name, default, *, whole=False):
        values = [row.get(name, default) for row in rows]
        return torch.tensor(values, device=device, dtype=torch.int64 if whole else torch.float32)

    def pool_rows(wanted):
        numbers = torch.full((total,), -1, device=device, dtype=torch.int64)
        if wanted:
            numbers[::2] = total - torch.arange(0, total, 2, device=device)
        return numbers

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw, device=device)

    settings = pack_settings(
        temperature=column("temperature", 1.0), top_k=column("top_k", 0, whole=True), top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0), seed=integers(-(2**63), 2**63 - 1, total),
        **{name: torch.full((total,), value, device=device) for name, value in PENALTIES.items()},
        history_row=pool_rows(penalties), bias_row=pool_rows(bias), mask_row=pool_rows(mask),
        num_logprobs=column("num_logprobs", -1, whole=True),
    )  # fmt: skip
    given: dict = {"position": integers(0, 2**40, total), "num_top": num_top}
    shape = (total + 1, vocab)
    if padding:
        given["sequence"] = torch.arange(total, device=device).to(torch.int32)
        given["sequence"][len(rows) - padding :] = -1
    if penalties:
        counts = integers(0, 3, *shape) * (integers(0, 4, *shape) == 0)
        given["history"] = (counts + IN_PROMPT * integers(0, 2, *shape)).to(torch.int16)
        given["history"][:, 0] = 0x7FFF  # as many as are counted
    if bias:
        given["bias"] = torch.randn(shape, generator=draw, device=device) * (integers(0, 4, *shape) == 0)
        given["bias"][:, 3] = -torch.inf
        used = settings[settings[:, 10] >= 0, 10].long()
        unused = torch.ones(total + 1, dtype=torch.bool, device=device)
        unused[used] = False
        given["bias"][unused] = torch.nan
    if mask:
        given["mask"] = integers(-(2**31), 2**31, total + 1, -(-vocab // 32)).to(torch.int32)
    logits = draw_logits(total, vocab, kind, seed=seed + 1, device=device)
    logits[len(rows) - padding :] = torch.nan
    return Case(logits.to(dtype), settings, given)


def make_tile(
    r=2, q=4, e=4, scans=2, gather=4, tile=32, pivoted=16, small=16, step=8, share=32, tokens=16, resident=2
) -> Tile:
    """Return a tile so small that short rows have many blocks, and lists that need narrowing."""
    constants = {"R": r, "Q": q, "E": e, "SCANS": scans, "SCAN_REGISTERS": 255, "WEIGHERS": 4, "SHARE": share}
    constants |= {"TOKENS": tokens, "RESIDENT": resident, "WEIGH_REGISTERS": 255, "WARPS": 4, "GATHER": gather}
    return Tile(constants | {"TILE": tile, "PIVOTED": pivoted, "SMALL": small, "STEP": step}, num_warps=4)
