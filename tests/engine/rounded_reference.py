"""The slow reference over the engine's row formats. It follows the engine where only the last bit decides a rounding.

Two float32 computations of the same row differ by about 1e-6. Where a value lies on a rounding boundary they round to
neighbouring codes, and the logits part by far more than 1e-4, though both are right. So the reference is given what the
engine stored, and takes it only after checking that it is the correct rounding of a row within TOLERANCE of its own:

    scale of a group: one that a group maximum within the tolerance gives
    each value: between the roundings, at that scale, of its own value less and plus the tolerance

Anything else raises. `adopted` and `seen` count the values that differ from the reference's own rounding, and all.
The indexer's choice is handled likewise: it is accepted if no score left out exceeds a chosen one by more than
TOLERANCE; `choices` counts entries that the reference would have chosen otherwise.
"""

import math

import torch
from ref_v4 import RefV4, rms

from kernels.quant import E2M1_AMAX_FLOOR, E2M1_MAX, E4M3_AMAX_FLOOR, E4M3_MAX, hadamard

TOLERANCE = 1e-5
GRIDS = {
    "e4m3": (E4M3_MAX, E4M3_AMAX_FLOOR),
    "e2m1": (E2M1_MAX, E2M1_AMAX_FLOOR),
}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Mismatch(AssertionError):
    """The engine stored something that is not a rounding of the reference's row."""


def power_of_two(x):
    """Smallest power of two that is at least x, in float64."""
    return torch.exp2(torch.ceil(torch.log2(x.double())))


def to_grid(y, grid):
    """Round y (already divided by its scale) to the grid, ties to even, in float64."""
    if grid == "e4m3":
        return y.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).double()
    magnitude = y.abs().clamp(max=E2M1_MAX)
    distance = (magnitude[..., None] - E2M1.double()).abs()
    nearest = distance.amin(-1, keepdim=True)
    # Of two equally near codes the even one: odd codes are pushed back by a hair.
    code = (distance + (distance == nearest) * torch.tensor([0.0, 1e-12] * 4)).argmin(-1)
    return torch.copysign(E2M1.double()[code], y)


class Rounding:
    """Rounds like the engine, or accepts what the engine did."""

    def __init__(self):
        self.seen = self.adopted = self.choices = 0

    def groups(self, x, stored, grid, group):
        """Check `stored` [n, d] against x [n, d] float32 in groups of `group` channels; return it."""
        x, s = (t.double().unflatten(-1, (-1, group)) for t in (x, stored))
        top, floor = GRIDS[grid]
        amax = x.abs().amax(-1, keepdim=True)
        low, own, high = (power_of_two((amax + d).clamp(min=floor) / top) for d in (-TOLERANCE, 0.0, TOLERANCE))
        ok = torch.zeros_like(s, dtype=torch.bool)
        for scale in (low, high):
            least, most = (to_grid((x + d) / scale, grid) * scale for d in (-TOLERANCE, TOLERANCE))
            ok |= ((least <= s) & (s <= most)).all(-1, keepdim=True)
        if not bool(ok.all()):
            raise Mismatch(f"{int((~ok.any(-1)).sum())} groups of {grid} are no rounding of the reference's row")
        self.seen += s.numel()
        self.adopted += int((to_grid(x / own, grid) * own != s).sum())
        return stored

    def bf16(self, x, stored):
        """The same for bfloat16 values."""
        least, most = (x - TOLERANCE).to(torch.bfloat16).float(), (x + TOLERANCE).to(torch.bfloat16).float()
        if not bool(((least <= stored) & (stored <= most)).all()):
            raise Mismatch("bf16 values are no rounding of the reference's row")
        self.seen += stored.numel()
        self.adopted += int((x.to(torch.bfloat16).float() != stored).sum())
        return stored

    def packed(self, x, stored, rope):
        """Check a packed row: e4m3 in groups of 64, then `rope` channels of bf16."""
        return torch.cat(
            [self.groups(x[:, :-rope], stored[:, :-rope], "e4m3", 64), self.bf16(x[:, -rope:], stored[:, -rope:])], -1
        )

    def choice(self, scores, chosen):
        """Check a chosen set [T, k] (-1: none) against scores [T, N] (-inf: not to be had); return it as a mask."""
        mask = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
        mask.scatter_(1, chosen.where(chosen >= 0, scores.shape[1]), True)
        mask = mask[:, :-1]
        worst_in = scores.masked_fill(~mask, math.inf).amin(1)
        best_out = scores.masked_fill(mask, -math.inf).amax(1)
        available = (scores > -math.inf).sum(1).clamp(max=chosen.shape[1])
        if not bool(((best_out <= worst_in + TOLERANCE) & (mask.sum(1) == available)).all()):
            raise Mismatch("the engine chose an entry or expert that is clearly not among the best")
        own = scores.topk(chosen.shape[1], -1).indices
        self.choices += int((~mask.gather(1, own) & (scores.gather(1, own) > -math.inf)).sum())
        return mask


class RoundedReference(RefV4):
    """RefV4 over packed rows. `tape`: what the engine did in the same step, see `Tape`."""

    def __init__(self, config, weights, *, index):
        super().__init__(config, weights)
        self.index, self.rounding, self.tape = index, Rounding(), None

    def round_index(self, x, stored):
        """index "fp8": one scale per row, no rotation. "fp4": Hadamard, then groups of 32."""
        flat, flat_stored = x.flatten(0, -2), stored.flatten(0, -2)
        if self.index == "fp4":
            return self.rounding.groups(hadamard(flat), flat_stored, "e2m1", 32).view_as(stored)
        return self.rounding.groups(flat, flat_stored, "e4m3", flat.shape[-1]).view_as(stored)

    def compress(self, st, key, p, x, p0, ratio, dim, rotate):
        before = st[key].shape[0] if key in st else 0
        super().compress(st, key, p, x, p0, ratio, dim, rotate)
        if key in st and st[key].shape[0] > before:
            new, stored = st[key][before:], self.tape.take("entries")
            rounded = self.round_index(new, stored) if rotate else self.rounding.packed(new, stored, self.rd)
            st[key] = torch.cat([st[key][:before], rounded])

    def attn(self, st, p, x, p0, ratio):
        c, w, tokens, d = self.c, self.w, x.shape[0], self.c["head_dim"]
        pos, size = torch.arange(p0, p0 + tokens), c["sliding_window"]
        qr = rms(x @ w[p + "wq_a.weight"].T, w[p + "q_norm.weight"])
        q = self.rope(rms((qr @ w[p + "wq_b.weight"].T).unflatten(1, (-1, d))), pos, ratio)
        kv = self.rope(rms(x @ w[p + "wkv.weight"].T, w[p + "kv_norm.weight"]), pos, ratio)
        kv = self.rounding.packed(kv, self.tape.take("window"), self.rd)
        keys = torch.cat([st["win"], kv]) if "win" in st else kv
        kpos = torch.arange(p0 + tokens - keys.shape[0], p0 + tokens)
        ok = (kpos <= pos[:, None]) & (kpos > pos[:, None] - size)
        st["win"] = keys[-size:].clone()
        if ratio:
            self.compress(st, "comp", p + "compressor.", x, p0, ratio, d, False)
            visible = torch.arange(st["comp"].shape[0] if "comp" in st else 0) < ((pos + 1) // ratio)[:, None]
            if ratio == 4:
                dim = c["index_head_dim"]
                self.compress(st, "idx", p + "indexer.compressor.", x, p0, 4, dim, True)
                chosen, query = self.tape.take("selected"), self.tape.take("query")
                if visible.shape[1] > c["index_topk"]:
                    iq = self.rope((qr @ w[p + "indexer.wq_b.weight"].T).unflatten(1, (-1, dim)), pos, ratio)
                    iq = self.round_index(iq, query)
                    hw = (x @ w[p + "indexer.weights_proj.weight"].T) * (dim * c["index_n_heads"]) ** -0.5
                    scores = (torch.relu(torch.einsum("thd,nd->thn", iq, st["idx"])) * hw[..., None]).sum(1)
                    visible = self.rounding.choice(scores.masked_fill(~visible, -math.inf), chosen)
            if "comp" in st:
                keys, ok = torch.cat([keys, st["comp"]]), torch.cat([ok, visible], 1)
        s = torch.einsum("thd,nd->thn", q, keys) * d**-0.5
        s = s.masked_fill(~ok[:, None], -math.inf)
        s = torch.cat([s, w[p + "attn_sink"][None, :, None].expand(tokens, -1, 1)], -1)
        o = torch.einsum("thn,nd->thd", torch.softmax(s, -1)[..., :-1], keys)
        o = self.rope(o, pos, ratio, inverse=True)
        g = c["o_groups"]
        o = torch.einsum("tgi,gri->tgr", o.reshape(tokens, g, -1), w[p + "wo_a.weight"].unflatten(0, (g, -1)))
        return o.flatten(1) @ w[p + "wo_b.weight"].T


class Tape:
    """Records what the engine rounds and chooses during a step, in the order in which the reference will ask."""

    def __init__(self, monkeypatch):
        from engine.model import attention, compressor

        self._kept = {"window": [], "entries": [], "selected": [], "query": []}
        attend, write, index = attention.sparse_attention, compressor.write_entries, compressor.index_entries

        def sparse_attention(q, new_rows, *args, **kwargs):
            self._kept["window"].append(new_rows)
            return attend(q, new_rows, *args, **kwargs)

        def write_entries(rows, batch, ratio, pool):
            write(rows, batch, ratio, pool)
            entries = batch.entries(ratio)
            self._kept["entries"].append(pool.read(*batch.places(entries.sequence, entries.block, pool.rows)))

        def index_entries(query, *args, **kwargs):
            outcome = index(query, *args, **kwargs)
            self._kept["selected"].append(outcome[0])
            self._kept["query"].append(query)
            return outcome

        monkeypatch.setattr(attention, "sparse_attention", sparse_attention)
        monkeypatch.setattr(compressor, "write_entries", write_entries)
        monkeypatch.setattr(compressor, "index_entries", index_entries)

    def take(self, kind):
        return self._kept[kind].pop(0)

    def is_empty(self):
        return not any(self._kept.values())
