"""The routers of moe_gate_triton.py: eight tokens each, one a warp, from scores that other programs are still writing.

Lane l has the experts 32 i + l of its token: a tensor [32 lanes, 8 tokens] for each i, so that sums over experts stay
in a warp. How often experts are chosen is kept in words for four i, a byte each. Routers tell those behind them their
counts, in words that carry the step's number: with them each knows the ranks of its tokens' choices, and the last one
what there is in all; it lists the experts.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,index,misc,var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from kernels.moe_gate_await_triton import await_counts, await_scores

ROUTED = tl.constexpr(8)  # tokens of a router

_LOWEST = tl.constexpr(-(2**31))
_BYTES = tl.constexpr(0x00FF00FF)  # the even bytes of a word


@triton.jit
def activate(u):
    """Return sqrt(softplus(u)), within some 1e-6 of it: no branches, and small scores don't all become 0.

    log(1 + z) = 2 atanh(s), s = z / (2 + z) <= 1/3: the series.
    """
    z = tl.exp(-tl.abs(u))
    s = z / (2.0 + z)
    q = s * s
    series = 1 / 11 + q * (1 / 13)
    for i in tl.static_range(5):
        series = 1 / (9 - 2 * i) + q * series
    a = tl.where(u > 0.0, u, 0.0) + 2.0 * s * series
    is_small = a < 1e-30  # a fast root takes what is no normal number for 0
    return tl.sqrt(tl.where(is_small, a * 2.0**80, a)) * tl.where(is_small, 2.0**-40, 1.0)


@triton.jit
def _activations(
    part_ptr, lane, t, tokens, rows, layout, SPLIT: tl.constexpr, FILLED: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Return the activations of all experts, a tensor for each 32."""
    EIGHTS: tl.constexpr = PADDED // 256
    N: tl.constexpr = 2 - SPLIT * EIGHTS % 2
    words = ()
    for begin in tl.static_range(0, SPLIT * EIGHTS, N):
        at, left = (), ()
        for i in tl.static_range(begin, begin + N):
            e = i % EIGHTS * 256 + lane
            at += (part_ptr + ((i // EIGHTS * rows + t) * PADDED + e),)
            left += (tl.where(t < tokens, FILLED - e, 0),)
        words += await_scores(at, left, layout, N)
    a = ()
    for i in tl.static_range(PADDED // 32):
        u = words[i].to(tl.float32, bitcast=True)
        for s in tl.static_range(1, SPLIT):
            u += words[s * (PADDED // 32) + i].to(tl.float32, bitcast=True)
        if SPLIT > 1:
            u = activate(u)
        a += (u + 0.0,)  # -0 becomes 0
    return a


@triton.jit
def _choose(a, bias, lane, E: tl.constexpr, TOP_K: tl.constexpr, COUNT: tl.constexpr):
    """Return experts [32, 8], lane k has the k-th, and for each four experts of a lane which are: a bit in each byte.

    The largest of a + bias, the lower one where equal; NaN first.
    """
    keys = ()
    for i in tl.static_range(COUNT):
        choice = a[i] + bias[i]
        ordered = (choice + 0.0).to(tl.int32, bitcast=True)
        key = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)  # orders like the numbers
        key = tl.where(choice != choice, 0x7FFFFFFF, key)
        keys += (tl.where(lane + 32 * i < E, key, _LOWEST),)
    chosen = keys[0] * 0
    for k in range(TOP_K):
        best, e = keys[0], lane
        for i in tl.static_range(1, COUNT):
            is_better = keys[i] > best
            best = tl.where(is_better, keys[i], best)
            e = tl.where(is_better, lane + 32 * i, e)
        e = tl.where(best == tl.max(best, 0)[None, :], e, 32 * COUNT)
        e = tl.min(e, 0)[None, :]
        chosen = tl.where(lane == k, e, chosen)
        rest = ()
        for i in tl.static_range(COUNT):
            rest += (tl.where(lane + 32 * i == e, _LOWEST, keys[i]),)
        keys = rest
    taken = ()
    for g in tl.static_range(COUNT // 4):
        word = keys[0] * 0
        for j in tl.static_range(4):
            is_taken = (keys[4 * g + j] == _LOWEST) & (lane + (128 * g + 32 * j) < E)
            word += is_taken.to(tl.int32) << (8 * j)
        taken += (word,)
    return chosen, taken


@triton.jit
def _ones(x):
    """Return the number of bits in each byte."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return (x + (x >> 4)) & 0x0F0F0F0F


@triton.jit
def _count_scores(taken, n, is_real, WORDS: tl.constexpr):
    """Return how often tokens in front of a token, and how often all of them chose experts: words of four counts."""
    before, own = (), ()
    for g in tl.static_range(0, WORDS, 2):
        two = ((taken[g] << n).to(tl.int64) & 0xFFFFFFFF) | ((taken[g + 1] << n).to(tl.int64) << 32)
        two = tl.sum(tl.where(is_real, two, 0), 1)[:, None]
        for i in tl.static_range(2):
            bits = (two >> (32 * i)).to(tl.int32)
            before += (_ones(bits & (((1 << n) - 1) * 0x01010101)),)
            own += (_ones(bits + n * 0),)
    return before, own


@triton.jit
def _count_listed(listed, lane, n, is_choice, TOP_K: tl.constexpr, WORDS: tl.constexpr):
    """Return the same of listed experts [32, 8], which may be there twice, and how often each was listed before."""
    repeated = listed * 0
    words = ()
    for _ in tl.static_range(WORDS):
        words += (listed * 0,)
    for k in range(TOP_K):
        e = tl.max(tl.where(is_choice & (lane == k), listed, -1), 0)[None, :]
        repeated += ((listed == e) & (lane > k)).to(tl.int32)
        more = ()
        for g in tl.static_range(WORDS):
            is_here = (e >> 7 == g) & ((e & 31) == lane)
            more += (words[g] + tl.where(is_here, 1 << (e >> 5 & 3) * 8, 0),)
        words = more
    before, own = (), ()
    for g in tl.static_range(WORDS):
        before += (tl.cumsum(words[g], 1) - words[g],)
        own += (tl.sum(words[g], 1)[:, None] + n * 0,)
    return before, own, repeated


@triton.jit
def _spread(word):
    """Return four counts of a byte as counts of 16 bits, in the order 0, 2, 1, 3."""
    return (word & _BYTES).to(tl.int64) | (((word >> 8) & _BYTES).to(tl.int64) << 32)


@triton.jit
def _field(word, j, WIDE: tl.constexpr):
    """Return count j of a word; WIDE: as _spread has them."""
    return ((word >> ((j & 1) * 32 + (j >> 1) * 16)) & 0xFFFF).to(tl.int32) if WIDE else (word >> (8 * j)) & 0xFF


@triton.jit
def _tell(count_ptr, own, lane, n, router, step, WORDS: tl.constexpr):
    """Store the router's counts: words with the step's number in their upper halves, those of a lane in pairs."""
    for g in tl.static_range(WORDS):
        at = count_ptr + (router * WORDS + g // 2 * 2) * 32 + lane * 2 + g % 2
        word = (own[g].to(tl.int64) & 0xFFFFFFFF) | (step.to(tl.int64) << 32)
        tl.store(at + n * 0, word, mask=(n == g % 8) & (lane >= 0))


@triton.jit
def _hear(count_ptr, lane, n, router, step, layout, FIRST: tl.constexpr, WORDS: tl.constexpr):
    """Return what the routers in front of this one have told of words FIRST and the next: as _spread has it."""
    one = (layout * 0).to(tl.int64)
    two = (layout * 0).to(tl.int64)
    for turn in range((router + 7) // 8):
        other = turn * 8 + n
        at = count_ptr + ((other * WORDS + FIRST) * 32 + lane * 2)
        wanted = (other < router) & (lane >= 0)
        a, b = await_counts(at, wanted, step, layout)
        one += _spread(a)
        two += _spread(b)
    return tl.sum(one, 1)[:, None], tl.sum(two, 1)[:, None]


@triton.jit
def _take(words, chosen, SHIFT: tl.constexpr, COUNT: tl.constexpr):
    """Return of each chosen expert what its lane has: in words[expert >> SHIFT]."""
    found = tl.gather(words[0], chosen & 31, 0)
    for i in tl.static_range(1, COUNT):
        found = tl.where(chosen >> SHIFT == i, tl.gather(words[i], chosen & 31, 0), found)
    return found


@triton.jit
def _list(first_ptr, active_ptr, words, lane, n, many, E: tl.constexpr, WIDE: tl.constexpr, WORDS: tl.constexpr):
    """Write where experts' rows begin and the list of active ones: those with more than `many` rows, then the others.

    words: counts of all tokens, the same for all n, as _field reads them; not WIDE: none is more than `many`.
    """
    starts, few, much = (), (), ()
    all_many = n * 0
    for g in tl.static_range(WORDS):
        starts += (tl.cumsum(words[g], 0),)
        is_few, is_many = lane * 0 + n * 0, lane * 0 + n * 0
        for j in tl.static_range(4):
            count = _field(words[g], j, WIDE)
            is_few += ((count > 0) & (count <= many)).to(tl.int32) << (8 * j)
            is_many += (count > many).to(tl.int32) << (8 * j)
        few += (is_few,)
        much += (is_many,)
        if WIDE:
            total = tl.sum(is_many, 0)[None, :]
            for j in tl.static_range(4):
                all_many += _field(total, j, False)
    row, place, many_place = n * 0, all_many, n * 0
    for g in tl.static_range(WORDS):
        ends, few_ends, rows = starts[g], tl.cumsum(few[g], 0), tl.sum(words[g], 0)[None, :]
        few_all = tl.sum(few[g], 0)[None, :]
        many_ends = tl.cumsum(much[g], 0) if WIDE else much[g]
        many_all = tl.sum(much[g], 0)[None, :] if WIDE else n * 0
        for j in tl.static_range(4):
            e = lane + (128 * g + 32 * j)
            count = _field(words[g], j, WIDE)
            first = row + _field(ends, j, WIDE) - count
            at = place + _field(few_ends, j, False) - 1
            if WIDE:
                at = tl.where(count > many, many_place + _field(many_ends, j, False) - 1, at)
                many_place += _field(many_all, j, False)
            row += _field(rows, j, WIDE)
            place += _field(few_all, j, False)
            is_mine = (n == (4 * g + j) % 8) & (e < E)
            entry = active_ptr + 4 + 4 * at
            tl.store(first_ptr + e + n * 0, first, mask=is_mine)
            tl.store(entry, e + n * 0, mask=is_mine & (count > 0))
            tl.store(entry + 1, first, mask=is_mine & (count > 0))
            tl.store(entry + 2, count, mask=is_mine & (count > 0))
    head = lane + n * 0
    tl.store(active_ptr + head, tl.where(head == 0, place, all_many), mask=(head < 2) & (n == 0))


@triton.jit
def prepare(
    bias_ptr, table_ptr, token_ids_ptr, sequence_ptr, router, tokens, E: tl.constexpr, TOP_K: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Return what a router knows before the step begins: which tokens are real, and bias, or all about listed experts.

    With a table: what _count_listed gives, the experts [32, 8] and which tokens' lists are wrong.
    """
    WORDS: tl.constexpr = PADDED // 128
    lane = tl.arange(0, 32)[:, None]
    n = tl.arange(0, 8)[None, :]
    t = router * 8 + n
    is_real = tl.load(sequence_ptr + t, mask=(t >= 0) & (t < tokens), other=-1) >= 0
    if table_ptr is not None:
        is_choice = is_real & (lane < TOP_K)
        word = tl.load(token_ids_ptr + t, mask=is_real, other=0)
        listed = tl.load(table_ptr + word * TOP_K + lane, mask=is_choice, other=0)
        exists = (listed >= 0) & (listed < E)
        is_wrong = tl.max(tl.where(exists, 0, 1), 0)[None, :] > 0
        chosen = tl.where(exists, listed, 0).to(tl.int32)
        before, own, repeated = _count_listed(chosen, lane, n, is_choice, TOP_K, WORDS)
        known = (is_real, before, own, repeated, chosen, is_wrong)
    else:
        bias = ()
        for i in tl.static_range(4 * WORDS):
            e = lane + 32 * i + n * 0
            bias += (tl.load(bias_ptr + e, mask=e < E, other=0.0),)
        known = (is_real, bias)
    return known


@triton.jit
def route(
    known, ids_ptr, weights_ptr, rank_ptr, token_ptr, weight_ptr, first_ptr, active_ptr, part_ptr, count_ptr, step_ptr,
    router, routers, tokens, rows, many, scaling, E: tl.constexpr, TOP_K: tl.constexpr, SPLIT: tl.constexpr,
    FILLED: tl.constexpr, GROUPED: tl.constexpr, PADDED: tl.constexpr, BY_TABLE: tl.constexpr,
):  # fmt: skip
    """Route tokens 8 router ... 8 router + 7, once their scores are stored in part [SPLIT, rows, PADDED].

    known: from prepare.   FILLED: experts that have words there.   GROUPED: there are other routers.   count [routers,
    PADDED / 4]: words of 8 bytes with earlier steps' numbers.   step: the last step's number; the last router adds 1.
    """
    WORDS: tl.constexpr = PADDED // 128
    lane = tl.arange(0, 32)[:, None]
    n = tl.arange(0, 8)[None, :]
    t = router * 8 + n
    is_real = known[0]
    is_choice = is_real & (lane < TOP_K)
    step = 0
    if GROUPED:
        step = tl.load(step_ptr, cache_modifier=".cg") + 1
    if BY_TABLE:
        before, own, repeated, chosen = known[1], known[2], known[3], known[4]
        if GROUPED:
            _tell(count_ptr, own, lane, n, router, step, WORDS)
        layout = chosen
        activations = _activations(part_ptr, lane, t, tokens, rows, layout, SPLIT, FILLED, PADDED)
    else:
        layout = known[1][0].to(tl.int32, bitcast=True)
        activations = _activations(part_ptr, lane, t, tokens, rows, layout, SPLIT, FILLED, PADDED)
        chosen, taken = _choose(activations, known[1], lane, E, TOP_K, 4 * WORDS)
        before, own = _count_scores(taken, n, is_real, WORDS)
        repeated = 0
        if GROUPED:
            _tell(count_ptr, own, lane, n, router, step, WORDS)
    a = tl.where(is_choice, _take(activations, chosen, 5, 4 * WORDS), 0.0)
    weight = a / tl.sum(a, 0)[None, :] * scaling
    if BY_TABLE:
        weight = tl.where(known[5], float("nan"), weight)
    at = t * TOP_K + lane
    shown = (t < tokens) & (lane < TOP_K)
    tl.store(ids_ptr + at, tl.where(is_choice, chosen, -1), mask=shown)
    tl.store(weights_ptr + at, tl.where(is_choice, weight, 0.0), mask=shown)
    if GROUPED:
        ranks, counts = (), ()
        for g in tl.static_range(0, WORDS, 2):
            one, two = _hear(count_ptr, lane, n, router, step, layout, g, WORDS)
            ranks += (one + _spread(before[g]), two + _spread(before[g + 1]))
            counts += (one + _spread(own[g]), two + _spread(own[g + 1]))
        before, own = ranks, counts
    rank = _field(_take(before, chosen, 7, WORDS), chosen >> 5 & 3, GROUPED) + repeated
    tl.store(rank_ptr + at, tl.where(is_choice, rank, -1), mask=shown)
    place = chosen.to(tl.int64) * (tokens * TOP_K) + rank
    tl.store(token_ptr + place, t + lane * 0, mask=is_choice)
    tl.store(weight_ptr + place, weight, mask=is_choice)
    if router == routers - 1:
        _list(first_ptr, active_ptr, own, lane, n, many, E, GROUPED, WORDS)
    tl.debug_barrier()  # all have read what is put back now
    e = tl.arange(0, PADDED)[:, None]
    for s in tl.static_range(SPLIT):
        tl.store(part_ptr + (s * rows + t) * PADDED + e, e * 0 + n * 0, mask=t < tokens)
    if GROUPED:  # noqa: SIM102 - one condition is the compiler's, the other one the program's
        if router == routers - 1:
            tl.store(step_ptr, step)
