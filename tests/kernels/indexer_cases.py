"""Steps of the indexer, for the interpreter and for a GPU, and what is wrong with what kernels make of them."""

from __future__ import annotations

import dataclasses
import math

import torch

from kernels.indexer import select_top_k_reference
from kernels.indexer_chunk import CHUNK_SCORES, is_chunk, select_chunk
from kernels.indexer_decode import (
    UNSEEN,
    IndexQuery,
    index_query,
    index_query_reference,
    index_scores,
    index_select,
    scores_reference,
    select_scored,
    top_k_of_rows,
)
from kernels.norm_rope import rotation_at
from kernels.ragged import DecodeBatch
from kernels.row_store import scale_row_bytes, value_bytes
from kernels.rows import Rows
from kernels.tiles import Tile

RATIO = 4
_DOTS = 1 << 27  # products of a reference at a time


def logits_tile(block=16, *, stages=1, resident=1, warps=4) -> Tile:
    return Tile({"BLOCK_N": block, "STAGES": stages, "RESIDENT": resident}, num_warps=warps)


def top_k_tile(tile=64, chunk=128, *, resident=1, warps=4) -> Tile:
    return Tile({"TILE": tile, "CHUNK": chunk, "RESIDENT": resident}, num_warps=warps)


def chunk_tile(block=16, queries=2, *, span=64, stages=1, warps=4) -> Tile:
    constants = {"BLOCK_N": block, "QUERIES": queries, "STAGES": stages, "SPAN": span // block, "REGISTERS": 0}
    return Tile(constants, num_warps=warps)


def score_rows() -> dict[str, torch.Tensor]:
    """Return rows that selections have got wrong: crowded, tied, short, masked, with NaN, around zero."""
    i = torch.arange(8192)
    draw = torch.Generator().manual_seed(1)

    def permuted(values):
        return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]

    masked = torch.full((4096,), -math.inf)
    masked[::409][:10] = torch.arange(10.0)
    with_nan = torch.randn(4096, generator=draw)
    with_nan[[7, 100, 4095]] = math.nan
    wide = torch.randn(4096, generator=draw) * torch.exp2(torch.randint(-140, 127, (4096,), generator=draw).float())
    infinite = torch.randn(2000, generator=draw)
    infinite[[5, 1999]] = math.inf
    outliers = torch.randn(2000, generator=draw)
    outliers[[3, 77]] = torch.tensor([1e30, -1e30])
    both = torch.randn(1500, generator=draw)
    both[::3], both[1::3] = math.inf, -math.inf
    return {
        "crowded": permuted(1 + i * 2.0**-20),
        "seven levels": permuted(1 + (i % 7) * 2.0**-20),
        "all equal": torch.full((8192,), 0.5),
        "shorter than k": torch.randn(300, generator=draw),
        "as long as k": torch.randn(512, generator=draw),
        "k plus one": torch.randn(513, generator=draw),
        "one": torch.randn(1, generator=draw),
        "none": torch.zeros(0),
        "mostly masked": masked,
        "all NaN": torch.full((700,), math.nan),
        "with NaN": with_nan,
        "zeros and denormals": torch.tensor([0.0, -0.0, 1e-42, -1e-42]).repeat(256),
        "every exponent": wide,
        "infinite": infinite,
        "outliers": outliers,
        "both infinities": both,
        "ascending": torch.arange(5000.0),
        "largest floats": torch.tensor([-3.4e38, 3.4e38, 1.0]).repeat(400),
    }


def rows_fault(rows: list[torch.Tensor], k: int, *, device: str = "cpu", tile: Tile | None = None) -> str:
    """Return what is wrong with the best k of `rows`, all in one call, "" if nothing; what lies behind them is NaN."""
    table = torch.full((len(rows), max(max(map(len, rows)), 1)), math.nan, device=device)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    before = table.clone()
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32, device=device)
    selected, sound = top_k_of_rows(table, lengths, k, tile=tile)
    if not torch.equal(table.view(torch.int32), before.view(torch.int32)):
        return "scores were changed"
    again, _ = top_k_of_rows(table, lengths, k, tile=tile)
    if not torch.equal(selected, again):
        return "two calls select differently"
    for number, values in enumerate(rows):
        fault = selection_fault(selected[number], values.to(device), k)
        if not fault and bool(sound[number]) != bool(values.isfinite().all()):
            fault = f"sound {bool(sound[number])}"
        if fault:
            return f"row {number} of {len(values)}: {fault}"
    return ""


def selection_fault(selected: torch.Tensor, scores: torch.Tensor, k: int) -> str:
    """Return how `selected` [k] differs from the best of scores [n] in ascending order."""
    best = select_top_k_reference(scores[None], k)[0]
    best = best[best >= 0].sort().values
    count = best.shape[0]
    if bool((selected[count:] != -1).any()):
        return f"{int((selected >= 0).sum())} selected, wanted {count}"
    if not torch.equal(selected[:count].long(), best):
        wrong = int((selected[:count].long() != best).sum())
        return (
            f"{wrong} of {count} places hold other entries, first {selected[:4].tolist()}, wanted {best[:4].tolist()}"
        )
    return ""


def is_unsound(selected: torch.Tensor) -> bool:
    """Return whether a row [k] names nothing but an entry that no token sees."""
    return selected.tolist() == [UNSEEN, *[-1] * (len(selected) - 1)]


@dataclasses.dataclass
class Case:
    """A step: queries before rope and rounding, head weights, and keys of which only visible ones are written."""

    q: torch.Tensor
    weight: torch.Tensor
    batch: DecodeBatch
    rotation: torch.Tensor
    keys: Rows
    top_k: int
    hadamard: bool
    scale: float

    def query(self, **options) -> IndexQuery:
        return index_query(self.q, self.weight, self.batch, self.rotation, **self._how(), **options)

    def _how(self) -> dict:
        return {"fmt": self.keys.format, "scale": self.scale, "hadamard": self.hadamard}

    def query_fault(self, **options) -> str:
        """Return what is wrong with the queries: codes are one step off at most, and that seldom (near ties)."""
        got, wanted = self.query(**options), index_query_reference(
            self.q, self.weight, self.batch, self.rotation, **self._how()
        )  # fmt: skip
        mine = got.values.float() * (got.weight / self.weight.float())[..., None]
        its = wanted.values.float() * (wanted.weight / self.weight.float())[..., None]
        if not bool(mine.isfinite().all()) or bool((got.weight[self.batch.sequence < 0] != 0).any()):
            return "queries that are not finite, or padding with a weight"
        if bool((got.values[self.batch.sequence < 0].float() != 0).any()):
            return "padding with a query"
        step = (0.13 if self.keys.format == "fp8_index" else 0.51) * its.abs()
        step += its.abs().amax(-1, keepdim=True) * (2**-9 if self.keys.format == "fp8_index" else 0.13)
        if bool(((mine - its).abs() > step).any()):
            return f"a query is {float((mine - its).abs().max())} off"
        off = float((mine != its).float().mean())
        return "" if off < 0.01 else f"{off:.1%} of the codes differ"

    def fault(self, *, tile=None, top_tile=None, tolerance=4e-6) -> str:
        """Return what is wrong with scores and selection, "" if nothing.

        tolerance: of a score, in units of sum |weight| |query| . |key|.
        """
        query = self.query()
        how = {"ratio": RATIO, "top_k": self.top_k}
        scores = index_scores(query, self.batch, self.keys, **how, tile=tile)
        selected = select_scored(scores, self.batch, **how, tile=top_tile)
        if tile is None and top_tile is None and not is_chunk(self.batch):
            whole = index_select(query, self.batch, self.keys, **how)
            if not torch.equal(whole, selected):
                return "index_select differs from its parts"
        for token, row in enumerate(scores.rows(self.batch, **how)):
            visible = (int(self.batch.positions[token]) + 1) // RATIO
            if row is None:
                count = visible if self.batch.sequence[token] >= 0 else 0
                wanted = [*range(count), *[-1] * (self.top_k - count)]
                if selected[token].tolist() != wanted:
                    return f"token {token}: {selected[token].tolist()}, nothing to score"
                continue
            if visible <= self.top_k:
                wanted = [*range(visible), *[-1] * (self.top_k - visible)]
                if selected[token].tolist() != wanted:
                    return f"token {token}: {selected[token].tolist()}, wanted all {visible}"
                continue
            reference = scores_reference(query, self.batch, self.keys, token=token, visible=visible)
            size = self._size(query, token, visible)
            if not torch.equal(row.isnan(), reference.isnan()):
                return f"token {token}: {int(row.isnan().sum())} scores are NaN, wanted {int(reference.isnan().sum())}"
            off = ((row - reference).abs() / size.clamp(min=1e-30)).nan_to_num(0.0)
            if float(off.max()) > tolerance:
                return f"token {token}: entry {int(off.argmax())} is {float(off.max()):.2g} off"
            fault = selection_fault(selected[token], row, self.top_k)
            if not bool(row.isfinite().all()):
                fault = "" if is_unsound(selected[token]) else f"unsound, but selects {selected[token].tolist()[:4]}"
            if fault:
                return f"token {token}: {fault}"
        return ""

    def chunk_fault(self, *, tile=None, top_tile=None, room=CHUNK_SCORES, tolerance=4e-6) -> str:
        """Return what is wrong with a chunk's selection, "" if nothing.

        tolerance: of a score, as of `fault`: so near to the least one selected, entries may be taken or left.
        """
        query = self.query()
        how = {"ratio": RATIO, "top_k": self.top_k}
        selected = select_chunk(query, self.batch, self.keys, **how, tile=tile, top_tile=top_tile, room=room)
        is_whole = tile is None and top_tile is None and room == CHUNK_SCORES and is_chunk(self.batch)
        if is_whole and not torch.equal(index_select(query, self.batch, self.keys, **how), selected):
            return "index_select does not take the chunk's kernels"
        return self.selected_fault(query, selected, tolerance=tolerance)

    def selected_fault(self, query: IndexQuery, selected: torch.Tensor, *, tolerance: float) -> str:
        """Return how selected [T, top_k] differs from the reference's by more than `tolerance` explains, "" if not."""
        visible = torch.where(self.batch.sequence >= 0, (self.batch.positions + 1) // RATIO, 0)
        column = torch.arange(self.top_k, device=self.q.device)
        wanted = torch.where(column < visible[:, None], column, -1)
        few = visible <= self.top_k
        if not torch.equal(selected[few].long(), wanted[few]):
            return "a token that sees few entries does not take all of them"
        for sequence in self.batch.sequence[~few].unique().tolist():
            tokens = (~few & (self.batch.sequence == sequence)).nonzero()[:, 0]
            key, known = self._keys(sequence, int(visible[tokens].max()))
            for part in tokens.split(max(1, _DOTS // (query.values.shape[1] * len(key)))):
                fault = self._part_fault(query, part, visible[part], key, known, selected[part].long(), tolerance)
                if fault:
                    return f"sequence {sequence}, {fault}"
        return ""

    def _part_fault(self, query, tokens, visible, key, known, selected, tolerance) -> str:
        values, weight = query.values[tokens].float(), query.weight[tokens][:, None]
        key_or_nan = torch.where(known[:, None], key, math.nan)
        dots = values @ key_or_nan.T
        scores = torch.bmm(weight, torch.where(dots < 0, 0.0, dots))[:, 0]
        size = torch.bmm(weight.abs(), (values.abs() @ key.abs().T).nan_to_num(0.0))[:, 0]
        inside = torch.arange(len(key), device=key.device) < visible[:, None]
        sound = (scores.isfinite() | ~inside).all(1)
        unsound = torch.tensor([UNSEEN, *[-1] * (self.top_k - 1)], device=key.device)
        if bool((selected[~sound] != unsound).any()):
            return f"token {int(tokens[~sound][0])} or a later one is unsound, but selects"
        tokens, selected, scores, size, inside = (x[sound] for x in (tokens, selected, scores, size, inside))
        if not len(tokens):
            return ""
        ascending = (selected[:, 1:] > selected[:, :-1]).all(1) & (selected[:, 0] >= 0)
        ascending &= selected[:, -1] < visible[sound]
        if not bool(ascending.all()):
            return f"token {int(tokens[~ascending][0])}: not {self.top_k} visible entries in order"
        scores = scores.masked_fill(~inside, -math.inf)
        bar = scores.topk(self.top_k).values[:, -1:]
        slack = 2 * tolerance * size.amax(1, keepdim=True)
        taken = torch.zeros_like(inside).scatter_(1, selected, True)
        wrong = ((scores > bar + slack) & ~taken) | ((scores < bar - slack) & taken)
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            return f"token {int(tokens[at[0]])}: {int(wrong[at[0]].sum())} entries wrongly taken or left, first {at[1]}"
        return ""

    def _size(self, query: IndexQuery, token: int, visible: int) -> torch.Tensor:
        key, _ = self._keys(int(self.batch.sequence[token]), visible)
        return query.weight[token].abs() @ (query.values[token].float().abs() @ key.abs().T)

    def _keys(self, sequence: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first keys [count, D] of a sequence, 0 without a block, and whether there is one."""
        entry = torch.arange(count, device=self.q.device)
        table = self.batch.block_table[sequence].long()
        column = entry // self.keys.rows
        units = torch.where(column < len(table), table[column.clamp(max=len(table) - 1)], -1)
        known = (units >= 0) & (units < self.keys.num_units)
        key = torch.zeros(count, self.keys.width, device=self.q.device)
        key[known] = self.keys.read(units[known], entry[known] % self.keys.rows)
        return key, known


def make_case(
    spans, *, fmt="fp8_index", heads=5, dim=64, rows=8, top_k=8, padding=0, hadamard=False, columns=0, spare=0, seed=0,
    device="cpu", dtype=torch.float32, spread=0.0, told=False,
) -> Case:  # fmt: skip
    """Return a step of sequences (start, tokens) over a pool of NaN bytes.

    told: the batch tells its longest sequence.

    columns: more of the block table.   spare: more blocks.   spread: keys and queries by powers of two that far apart.
    """
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, device=device)

    held = [-(-(start + length) // (RATIO * rows)) for start, length in spans]
    units = sum(held) + 2 + spare
    values, scales = value_bytes(fmt, dim), scale_row_bytes(fmt, dim)
    unit = -(-rows * (values + scales) // 16) * 16 + 32
    pool = torch.full((units, unit), 0xFF, dtype=torch.uint8, device=device)
    keys = Rows.view(pool, fmt, width=dim, rows=rows, offset=16, value_bytes=values, scale_bytes=scales)
    order = torch.randperm(units, generator=draw, device=device).to(torch.int32)
    table = torch.full((len(spans), max([*held, 1]) + columns), -1, dtype=torch.int32, device=device)
    taken = 0
    for number, ((start, length), blocks) in enumerate(zip(spans, held, strict=True)):
        table[number, :blocks] = order[taken : taken + blocks]
        taken += blocks
        entry = torch.arange((start + length) // RATIO, device=device)
        if entry.numel():
            x = normal(entry.shape[0], dim) * torch.exp2(spread * normal(entry.shape[0], dim))
            keys.write(table[number].long()[entry // rows], entry % rows, x)
    lengths = [length for _, length in spans]
    positions = [start + i for start, length in spans for i in range(length)] + [-1] * padding
    sequence = [number for number, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    first = [sum(lengths[:number]) for number in range(len(spans) + 1)]

    def ints(x):
        return torch.tensor(x, dtype=torch.int32, device=device)

    batch = DecodeBatch(
        ints(positions), ints(sequence), ints([start for start, _ in spans]), ints(first),
        torch.zeros(len(spans), dtype=torch.int32, device=device), table, len(positions), max(lengths),
        max(map(sum, spans)) if told else None,
    )  # fmt: skip
    frequencies = 10000.0 ** -(torch.arange(0, dim // 2, 2, device=device) / (dim // 2))
    q = normal(len(positions), heads, dim) * torch.exp2(spread * normal(len(positions), heads, dim))
    if padding:
        q[-padding:] = math.nan
    weight = normal(len(positions), heads) + 0.3
    return Case(
        q.to(dtype), weight.to(dtype), batch, rotation_at(batch.positions, frequencies), keys, top_k, hadamard,
        (heads * dim) ** -0.5,
    )  # fmt: skip
