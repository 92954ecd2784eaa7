"""Steps of one layer for cache_write, on any device: inputs, two sets of poisoned pools, and the comparison.

Pools, staging rows and outputs are full of NaN bytes. State holds numbers where the sequence has been and NaN
elsewhere; block tables lead only to blocks that the step may touch; padding tokens carry NaN.
"""

import dataclasses
import random

import torch

from kernels.cache_write_decode import Pooling, cache_write, cache_write_reference, commit_window, staging_rows
from kernels.indexer_decode import IndexQuery, index_query
from kernels.norm_rope import rotation_at
from kernels.ragged import DecodeBatch
from kernels.row_store import scale_row_bytes, value_bytes
from kernels.rows import Rows

EPS = 1e-6
WINDOW = 128


def make_rows(fmt, width, *, units, rows, device="cpu", fill=0xFF):
    """Return Rows over a pool of their own, full of NaN bytes."""
    values, scales = value_bytes(fmt, width), scale_row_bytes(fmt, width)
    pool = torch.full((units, -(-rows * (values + scales) // 16) * 16), fill, dtype=torch.uint8, device=device)
    return Rows.view(pool, fmt, width=width, rows=rows, offset=0, value_bytes=values, scale_bytes=scales)


def normal(*shape, seed=0, device="cpu"):
    """Return standard normal float32, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def hard_rows(width):
    """Zeros of both signs, huge and tiny rows, amax where the scale changes, ties, codes below the normal ones; a zero
    block beside others, denormals, one huge value among ordinary ones, amax at the limits of the scales."""
    n = 24
    x = normal(n, width) * torch.exp(6 * normal(n, 1, seed=1))
    x[1], x[2], x[3], x[4] = 0.0, -0.0, 1e30 * x[3], 3.4e38
    x[5] *= 1e-6
    x[6] = torch.arange(width) * 1.75
    x[7] = 1.75
    x[8] = torch.arange(width) % 29 / 4 - 3.5
    x[9] = x[8] * 2**-9
    x[10] = (torch.arange(width) - width // 2) * 2.0**-10
    x[10, ::32] = 448.0
    x[11, : width // 2] = 0.0
    x[12], x[13] = 1e-38, 1e-45
    x[14], x[14, 3] = 1.0, 3e38
    for row, amax in enumerate((1e-40, 1.0, 448.0, 449.0, 3e38), 15):
        x[row] *= amax / x[row].abs().max()
    return x


def decode_batch(spans, *, block_tokens, padding=0, empty=0, device="cpu", seed=0, columns=0):
    """Return a batch of (first position, tokens) a sequence; then `empty` sequences and `padding` tokens.

    columns: of the block table, if more than needed.
    """
    draw = torch.Generator().manual_seed(seed)
    total = sum(n for _, n in spans)
    needed = sum((start + n - 1) // block_tokens - start // block_tokens + 1 for start, n in spans)
    free = torch.randperm(max(3 * len(spans), needed), generator=draw).tolist()
    columns = max(columns, max((start + n - 1) // block_tokens for start, n in spans) + 2)
    table = torch.full((len(spans) + empty, columns), -1)
    for index, (start, n) in enumerate(spans):
        for column in range(start // block_tokens, (start + n - 1) // block_tokens + 1):
            table[index, column] = free.pop()
    query_start = [sum(n for _, n in spans[:i]) for i in range(len(spans) + 1)]

    def ints(values):
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    return DecodeBatch(
        positions=ints([p for start, n in spans for p in range(start, start + n)] + [-1] * padding),
        sequence=ints([i for i, (_, n) in enumerate(spans) for _ in range(n)] + [-1] * padding),
        starts=ints([start for start, _ in spans] + [-1] * empty),
        query_start=ints(query_start + [total] * empty),
        slots=ints(torch.randperm(len(spans) + 2, generator=draw)[: len(spans)].tolist() + [-1] * empty),
        block_table=ints(table),
        num_tokens=total + padding,
        max_query_len=max(n for _, n in spans),
    )


def random_spans(seed, *, tokens):
    """Return (first position, tokens) of sequences of 1 to 700 tokens, `tokens` in all, that begin anywhere."""
    draw = random.Random(seed)
    spans = []
    while tokens:
        count = min(tokens, draw.choice((1, 2, 3, 5, 8, 127, 128, 129, draw.randint(1, 700))))
        start = draw.choice((0, 0, draw.randint(0, 300), draw.randint(0, 131072)))
        spans.append((start, count))
        tokens -= count
    return spans


@dataclasses.dataclass
class Layer:
    """given: arguments of cache_write.   mine, reference: pools for the kernel and for the reference, equal so far.

    shadow: as reference, full of zeros: what comes out of both alike has been written.
    """

    batch: DecodeBatch
    given: dict
    mine: dict
    reference: dict
    shadow: dict


def make_layer(
    batch, *, ratio, fmt="packed", index="", dim=128, heads=3, block_tokens=128, hadamard=False, dtype=torch.float32
):
    """Return a layer of compression `ratio`, with index keys of format `index` if that is not ""."""
    device, tokens = batch.device, batch.num_tokens
    is_padding = batch.sequence < 0
    frequencies = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float32, device=device) / 64)
    given = {
        "kv": (normal(tokens, dim, seed=1) * torch.exp(2 * normal(tokens, 1, seed=2))).to(device, dtype),
        "kv_norm": 1 + 0.1 * normal(dim, seed=3, device=device),
        "rotation": rotation_at(batch.positions, frequencies),
        "eps": EPS,
        "q": 3 * normal(tokens, heads, dim, seed=4).to(device, dtype),
        "ratio": ratio,
    }
    if ratio:
        given["entry_rotation"] = rotation_at(batch.positions - ratio + 1, frequencies)
    if index in ("fp8_index", "fp4_index"):
        given["index_q"] = 2 * normal(tokens, 5, 128, seed=5).to(device, dtype)
        # Among the columns of a wider matrix, as a linear of several layers gives them.
        given["index_weight"] = normal(tokens, 24, seed=6, device=device)[:, 16:21]
        given["index_scale"] = 0.04
    for name in ("kv", "q", "index_q", "index_weight"):
        if name in given:
            given[name][is_padding] = float("nan")
    slots = batch.slots.shape[0] + 2
    sets = []
    for fill in (0xFF, 0xFF, 0):
        views = {"window": make_rows(fmt, dim, units=slots, rows=WINDOW, device=device, fill=fill)}
        for name, width, form in (("main", dim, fmt), ("index", 128, index)):
            if ratio and form:
                seed = 20 + len(views)
                views[name] = Pooling(
                    projected=normal(tokens, (8 if ratio == 4 else 4) * width // 2, seed=seed, device=device),
                    bias=0.5 * normal(ratio, 2 * width if ratio == 4 else width, seed=seed + 10, device=device),
                    norm=1 + 0.1 * normal(width, seed=seed + 20, device=device),
                    state=_state(batch, ratio, width, slots),
                    pool=make_rows(
                        form,
                        width,
                        units=max(3 * batch.slots.shape[0], int(batch.block_table.max()) + 1),
                        rows=block_tokens // ratio,
                        device=device,
                        fill=fill,
                    ),
                    hadamard=hadamard and name == "index",
                )
                views[name].projected[is_padding] = float("nan")
        sets.append(views)
    return Layer(batch, given, *sets)


def _state(batch, ratio, width, slots):
    """Numbers for positions that have been, NaN for all others."""
    double = 2 * width if ratio == 4 else width
    state = make_rows("fp32", double, units=slots, rows=16 if ratio == 4 else 3, device=batch.device)
    for i, (slot, start) in enumerate(zip(batch.slots.tolist(), batch.starts.tolist(), strict=True)):
        if slot < 0:
            continue
        if ratio == 4:
            for p in range(max(0, start - 8), start):
                row = 2 * (p % 8)
                state.values[slot, row : row + 2] = normal(2, double, seed=100 + 1000 * i + p, device=batch.device)
        elif start % 128:
            state.values[slot] = normal(3, double, seed=100 + i, device=batch.device)
            state.values[slot, 1] = 1 + state.values[slot, 1].abs()  # a sum of weights
    return state


def raw(rows):
    """Return all bytes of the rows, scales included."""
    parts = [rows.values, rows.rope, rows.scales]
    return torch.cat([t.contiguous().view(torch.uint8).flatten() for t in parts if t is not None])


def state_difference(got, wanted):
    """Return what is wrong with a state, "" if nothing. Bound: a few ulp, from sums in another order."""
    x, y = got.values, wanted.values
    if not torch.equal(x.isnan(), y.isnan()):
        return f"{int((x.isnan() != y.isnan()).sum())} values written or left by only one"
    gap = (x - y).abs().nan_to_num() / (1 + y.abs().nan_to_num())
    return "" if float(gap.max()) < 2e-5 else f"relative distance {float(gap.max()):.1e}"


def difference(got, wanted, shadow):
    """Return what is wrong with the pool `got`, "" if nothing.

    Sums of squares and weights are added in another order, which moves a row by a few ulp: a code may fall to the other
    side of a tie. One byte in five hundred may differ (of float32 rows, each by a few ulp); what was not written must
    be as before.
    """
    a, b = raw(got), raw(wanted)
    written = (b != 0xFF) | (raw(shadow) != 0)  # not b == raw(shadow): sums of the reference may vary on a GPU
    if bool((a[~written] != 0xFF).any()):
        return f"{int((a[~written] != 0xFF).sum())} bytes written that should not be"
    if got.format == "fp32":
        return state_difference(got, wanted)
    apart = int((a[written] != b[written]).sum())
    return "" if apart <= max(1, int(written.sum()) // 500) else f"{apart} of {int(written.sum())} bytes differ"


def check(layer):
    """Run kernel and reference; return what differs, "" if nothing. Stages the window where a sequence has several."""
    batch, sets = layer.batch, [dict(layer.mine), dict(layer.reference), dict(layer.shadow)]
    mine, reference, shadow = sets
    found = []
    if batch.max_query_len > 1:
        for views, fill in zip(sets, (0xFF, 0xFF, 0), strict=True):
            views["staging"] = staging_rows(batch.num_tokens, views["window"])
            for part in (views["staging"].values, views["staging"].rope, views["staging"].scales):
                if part is not None:
                    part.view(torch.uint8).fill_(fill)
    got = cache_write(batch, **layer.given, **mine)
    wanted = cache_write_reference(batch, **layer.given, **reference)
    cache_write_reference(batch, **layer.given, **shadow)
    if batch.max_query_len > 1:
        found.append(("ring before the commit", "" if bool((raw(mine["window"]) == 0xFF).all()) else "was written"))
        commit_window(batch, mine["staging"], mine["window"])
        for views in (reference, shadow):
            _commit_by_hand(batch, views["staging"], views["window"])
        found.append(("staging", difference(mine["staging"], reference["staging"], shadow["staging"])))
    return _join([*found, *_differences(got, wanted, *sets)])


def check_replayed(captured, layer):
    """Capture the launch on one layer, replay it on the values of another of the same shapes; return what differs."""
    q_out = torch.full_like(captured.given["q"], float("nan"), dtype=torch.bfloat16)

    def launch():
        return cache_write(captured.batch, **captured.given, **captured.mine, q_out=q_out)

    launch()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = launch()
    for old, new in zip(_tensors(captured), _tensors(layer), strict=True):
        old.copy_(new)
    q_out.fill_(float("nan"))
    graph.replay()
    wanted = cache_write_reference(layer.batch, **layer.given, **layer.reference)
    cache_write_reference(layer.batch, **layer.given, **layer.shadow)
    return _join(_differences(got, wanted, captured.mine, layer.reference, layer.shadow))


def _tensors(layer):
    """Return all that the launch reads or writes."""
    found = [v for v in (*vars(layer.batch).values(), *layer.given.values()) if isinstance(v, torch.Tensor)]
    rows = [layer.mine["window"]]
    for name in ("main", "index"):
        if name in layer.mine:
            part = layer.mine[name]
            found += [part.projected, part.bias, part.norm]
            rows += [part.state, part.pool]
    parts = [t for r in rows for t in (r.values, r.rope, r.scales) if t is not None]
    return [*found, *(t.view(torch.uint8) for t in parts)]


def _differences(got, wanted, mine, reference, shadow):
    gap = (got.q.float() - wanted.q.float()).abs() - 2**-7 * wanted.q.float().abs()
    is_close = bool((gap <= 1e-5).all())
    yield "queries", "" if is_close else f"{float(gap.max()):.1e} beyond the last place of bfloat16"
    if (got.index is None) != (wanted.index is None):
        yield "the indexer's queries", "made by only one"
    elif got.index is not None:
        yield "the indexer's queries", _query_difference(got.index, wanted.index)
    yield "window", difference(mine["window"], reference["window"], shadow["window"])
    for name in ("main", "index"):
        if name in mine:
            yield f"{name} state", state_difference(mine[name].state, reference[name].state)
            yield name, difference(mine[name].pool, reference[name].pool, shadow[name].pool)


def _query_difference(got, wanted):
    """Return what is wrong with queries made ready: sums of the transform are in another order, codes seldom differ."""
    for name, most in (("values", 0.01), ("weight", 0.01)):
        mine, right = (getattr(x, name).float() for x in (got, wanted))
        off = float((mine != right).float().mean())
        if off > most or not bool(mine.isfinite().all()):
            return f"{off:.1%} of their {name} differ"
    return ""


def _join(found):
    return "; ".join(f"{name}: {text}" for name, text in found if text)


def _commit_by_hand(batch, staging, window):
    slots, positions = batch.slots.tolist(), batch.positions.tolist()
    last = {
        (slots[sequence], positions[token] % WINDOW): token
        for token, sequence in enumerate(batch.sequence.tolist())
        if sequence >= 0
    }
    slot, row = torch.tensor(list(last), device=batch.device).T
    token = torch.tensor(list(last.values()), device=batch.device)
    for source, target in (
        (staging.values, window.values), (staging.rope, window.rope), (staging.scales, window.scales)
    ):  # fmt: skip
        if source is not None:
            target.view(torch.uint8)[slot, row] = source.view(torch.uint8)[token, 0]


def queries_fault(index, hadamard, *, count=20, heads=64, device="cpu"):
    """Return how the indexer's queries of `count` tokens and padding differ from those of other launches, "" if not.

    From a launch of their own: in no bit without the transform, whose sums may be in another order, seldom with it.
    From a step of the first token alone: in no bit.
    """
    batch = decode_batch([(129 * i + 5, 1) for i in range(count)], block_tokens=256, padding=1, device=device)
    layer = make_layer(
        batch, ratio=4, index=index, hadamard=hadamard, block_tokens=256, dim=512, dtype=torch.bfloat16
    )  # fmt: skip
    q, weight = normal(count + 1, heads, 128, seed=7, device=device).bfloat16(), normal(count + 1, heads, device=device)
    given = layer.given | {"index_q": q, "index_weight": weight}
    got = cache_write(batch, **given, **layer.mine).index
    scale, rotation = given["index_scale"], given["rotation"]
    alone = index_query(q, weight, batch, rotation, fmt=index, scale=scale, hadamard=hadamard)
    apart = _bits_apart(got, alone)
    if apart > (0.005 if hadamard else 0):
        return f"{apart:.2%} differ from a launch of their own"
    one = decode_batch([(5, 1)], block_tokens=256, device=device)
    small = make_layer(one, ratio=4, index=index, hadamard=hadamard, block_tokens=256, dim=512, dtype=torch.bfloat16)
    given = small.given | {"index_q": q[:1], "index_weight": weight[:1]}
    first = cache_write(one, **given, **small.mine).index
    apart = _bits_apart(IndexQuery(index, got.values[:1], got.weight[:1]), first)
    return f"{apart:.2%} depend on the other tokens" if apart else ""


def alone_fault(spans, *, ratio, index="", device="cpu", dim=128, heads=2, block_tokens=128):
    """Return which bytes of the first of several sequences depend on the others, "" if none."""
    hadamard = index == "fp4_index"
    size = {"dim": dim, "heads": heads, "block_tokens": block_tokens, "hadamard": hadamard}
    batch = decode_batch(spans, block_tokens=block_tokens, padding=1, device=device)
    layer = make_layer(batch, ratio=ratio, index=index, **size)
    tokens = spans[0][1]
    alone = DecodeBatch(
        *(x[:tokens].clone() for x in (batch.positions, batch.sequence)), batch.starts[:1].clone(),
        batch.query_start[:2].clone(), batch.slots[:1].clone(), batch.block_table[:1].clone(), num_tokens=tokens,
        max_query_len=tokens,
    )  # fmt: skip
    small, written = make_layer(batch, ratio=ratio, index=index, **size), []
    per_token = ("kv", "rotation", "entry_rotation", "q", "index_q", "index_weight")
    small.given |= {name: small.given[name][:tokens] for name in per_token if name in small.given}
    for name in ("main", "index"):
        if name in small.mine:
            part = small.mine[name]
            small.mine[name] = dataclasses.replace(part, projected=part.projected[:tokens])
    for used, one in ((batch, layer), (alone, small)):
        staging = staging_rows(used.num_tokens, one.mine["window"])
        out = cache_write(used, **one.given, **one.mine, staging=staging)
        commit_window(used, staging, one.mine["window"])
        found = {"queries": out.q[:tokens].contiguous().view(torch.uint8), "staging": staging}
        if out.index is not None:
            found["the indexer's queries"] = out.index.values[:tokens].contiguous().view(torch.uint8)
            found["their weights"] = out.index.weight[:tokens].contiguous().view(torch.uint8)
        unit = {"window": int(batch.slots[0]), "staging": slice(0, tokens)}
        own = {int(b) for b in batch.block_table[0] if b >= 0}
        pools = {"staging": staging, "window": one.mine["window"]}
        for name in ("main", "index"):
            if name in one.mine:
                pools |= {name: one.mine[name].pool, f"{name} state": one.mine[name].state}
                unit |= {name: sorted(own), f"{name} state": int(batch.slots[0])}
        found |= {name: _bytes_of(rows, unit[name]) for name, rows in pools.items()}
        written.append(found)
    first, second = written
    return ", ".join(name for name, x in first.items() if not torch.equal(x, second[name]))


def _bytes_of(rows, units):
    parts = (t for t in (rows.values, rows.rope, rows.scales) if t is not None)
    return torch.cat([t.view(torch.uint8)[units].flatten() for t in parts])


def _bits_apart(a, b):
    """Return the larger of the shares of values and of weights whose bits differ."""
    values = (a.values.view(torch.uint8) != b.values.view(torch.uint8)).float().mean()
    return max(float(values), float((a.weight.view(torch.int32) != b.weight.view(torch.int32)).float().mean()))


def _with(batch, name, value):
    numbers = getattr(batch, name).clone()
    numbers[0] = value
    return dataclasses.replace(batch, **{name: numbers})


LOST = {
    "an entry without a block": lambda batch: _with(batch, "block_table", -1),
    "a block that the pool lacks": lambda batch: _with(batch, "block_table", 1000),
    # in memory the neighbour's block comes next
    "a table too short": lambda batch: dataclasses.replace(batch, block_table=batch.block_table[:, :1].contiguous()),
    "no slot": lambda batch: _with(batch, "slots", -1),
    "a slot that the pool lacks": lambda batch: _with(batch, "slots", 1000),
}


def lost_fault(lost, ratio, length, *, device="cpu", dim=128):
    """Take away the place of what the first of two sequences stores; return what is wrong then, "" if nothing.

    Its last token completes an entry. Its row of keys must be NaN, its entry nowhere, all other bytes as with a place.
    """
    batch = decode_batch([(256 - length, length), (100 - length, length)], block_tokens=128, padding=1, device=device)
    broken = LOST[lost](batch)
    layer = make_layer(batch, ratio=ratio, index="fp8_index" if ratio == 4 else "", dim=dim)
    for views, used in ((layer.mine, broken), (layer.reference, batch)):
        views["staging"] = staging_rows(used.num_tokens, views["window"]) if length > 1 else None
        cache_write(used, **layer.given, **views)
        if length > 1:
            commit_window(used, views["staging"], views["window"])
    slot, block = int(batch.slots[0]), int(batch.block_table[0, 1])
    found = [("window", _beside(slot, layer.mine["window"], layer.reference["window"]))]
    for name in ("main", "index")[: 2 if ratio == 4 else 1]:
        got, wanted = layer.mine[name], layer.reference[name]
        found.append((name, _beside(block, got.pool, wanted.pool)))
        found.append((f"{name} state", _beside(slot, got.state, wanted.state)))
        found.append((f"{name} entry", "" if bool((_unit(got.pool, block) == 0xFF).all()) else "was written"))
    last = [(views["window"], slot, 127) for views in (layer.mine, layer.reference)]
    last += [(views["staging"], length - 1, 0) for views in (layer.mine, layer.reference) if length > 1]
    for at, (rows, unit, row) in enumerate(last):
        read = rows.read(*torch.tensor([[unit], [row]], device=device))
        is_right = bool(read.isfinite().all() if at % 2 else read.isnan().all())
        found.append((f"row of keys {at}", "" if is_right else f"{int(read.isnan().sum())} channels are NaN"))
    return _join(found)


def _unit(rows, unit):
    parts = (rows.values, rows.rope, rows.scales)
    return raw(Rows(rows.format, rows.width, *(None if t is None else t[unit : unit + 1] for t in parts)))


def _beside(unit, got, wanted):
    others = [u for u in range(wanted.num_units) if u != unit and not torch.equal(_unit(got, u), _unit(wanted, u))]
    return f"units {others} differ" if others else ""
