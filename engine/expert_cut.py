"""How ranks cut routed experts: each by its inner dimension (tensor parallel), or whole ones shared out (by expert).

Hidden states are the same on all ranks, since attention is cut by heads and needs every token. So both ways end in the
same exchange, a sum of [T, H] over ranks; what differs is how evenly the work is spread. Sending tokens to where their
experts are (dispatch) moves less for the experts alone, but then hidden states must be gathered again for attention.

    exchange   bytes that a rank sends for one layer's experts, of T tokens of H channels in bfloat16, n ranks:
        inner, expert   all-reduce                   2 (n - 1) / n  T H 2
        dispatch        out and back, then gather    2 m T / n  H 2 + (n - 1) / n  T H 2,   m: other ranks a token needs
    weights    bytes that the busiest rank reads: of d distinct experts d / n each, or those of the rank with most

Figures are expectations for tokens that choose at random. Times need a link and a memory: LINK and MEMORY_GB_PER_S are
assumptions for the machine that we build for, PCIe 5.0 x16 and GDDR7, not measurements. No torch here.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from engine.config import EngineConfig
from engine.model.config import DeepSeekV4Config
from engine.model.shard import Shard
from engine.model.weight_bytes import fits_tiles

Way = Literal["inner", "expert", "dispatch"]
WAYS: tuple[Way, ...] = ("inner", "expert", "dispatch")
MEMORY_GB_PER_S = 1600.0
_VALUE_BYTES = 2
_BYTES_OF_WEIGHT = 0.5625  # NVFP4: four bits, and a byte of scale for sixteen
# Expected largest of n values of a normal distribution, in standard deviations.
_LARGEST = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766}


class Link(NamedTuple):
    """Between two GPUs: GB/s one way, and microseconds that an exchange takes however little it moves."""

    gb_per_s: float
    latency_us: float


LINK = Link(gb_per_s=50.0, latency_us=8.0)


class Cost(NamedTuple):
    """One layer's experts, one way: bytes sent by a rank, of weights read by the busiest; microseconds of both."""

    way: Way
    tokens: int
    sent_bytes: int
    read_bytes: int
    exchange_us: float
    read_us: float

    @property
    def total_us(self) -> float:
        return self.exchange_us + self.read_us


def shares_experts(config: EngineConfig, model: DeepSeekV4Config) -> bool:
    """Return whether the ranks of a group share experts out: as configured, else by `cheaper`."""
    if config.ranks == 1 and not config.simulate_rank:
        return False
    if config.expert_parallel is not None:
        return config.expert_parallel
    ranks = Shard.parse(config.simulate_rank).count if config.simulate_rank else config.ranks
    return config.device == "cuda" and cheaper(model, ranks, tokens=config.max_num_seqs) == "expert"


def cheaper(model: DeepSeekV4Config, ranks: int, *, tokens: int, link: Link = LINK) -> Way:
    """Return how to cut: the way of less time for a step of so many tokens, among those that the kernels can read.

    A slice of the inner dimension that is no whole tile would be dequantised, which costs four times the memory: then
    whole experts are shared out, if they can be. `dispatch` is here to be compared with; no rank does it.
    """
    can_share = ranks > 1 and model.n_routed_experts % ranks == 0
    if model.moe_intermediate_size % ranks or not fits_tiles(Shard(0, ranks).of(model)):
        return "expert" if can_share and fits_tiles(model) else "inner"
    costs = [cost_of(way, model, ranks, tokens=tokens, link=link) for way in ("inner", "expert")]
    return min(costs, key=lambda cost: cost.total_us).way if can_share else "inner"


def cost_of(way: Way, model: DeepSeekV4Config, ranks: int, *, tokens: int, link: Link = LINK) -> Cost:
    """Return what one layer's experts cost a group of `ranks` for a step of `tokens`."""
    row = tokens * model.hidden_size * _VALUE_BYTES
    sent, exchanges = 2 * (ranks - 1) / ranks * row, 1
    if way == "dispatch":
        others = (ranks - 1) * (1 - (1 - 1 / ranks) ** model.num_experts_per_tok)
        sent, exchanges = 2 * others * row / ranks + (ranks - 1) / ranks * row, 3
    expert = 3 * model.hidden_size * model.moe_intermediate_size * _BYTES_OF_WEIGHT
    read = expert * _busiest(model, 1 if way == "inner" else ranks, tokens) / (ranks if way == "inner" else 1)
    return Cost(
        way=way,
        tokens=tokens,
        sent_bytes=round(sent),
        read_bytes=round(read),
        exchange_us=(exchanges * link.latency_us + sent / link.gb_per_s / 1e3) if ranks > 1 else 0.0,
        read_us=read / MEMORY_GB_PER_S / 1e3,
    )


def cost_table(model: DeepSeekV4Config, ranks: int, *, link: Link = LINK) -> list[Cost]:
    """Return costs of every way for a few sizes of steps, as docs/ranks.md has them."""
    return [cost_of(way, model, ranks, tokens=tokens, link=link) for tokens in (1, 16, 64, 4096) for way in WAYS]


def _busiest(model: DeepSeekV4Config, ranks: int, tokens: int) -> float:
    """Return how many distinct experts the busiest of `ranks` has to read, each with an equal share of all."""
    experts = model.n_routed_experts
    distinct = experts * (1 - (1 - model.num_experts_per_tok / experts) ** tokens)
    mean, share = distinct / ranks, 1 / ranks
    spread = math.sqrt(distinct * share * (1 - share) * (experts - distinct) / max(1, experts - 1))
    largest = _LARGEST.get(ranks, math.sqrt(2 * math.log(ranks)))
    return min(mean + largest * spread, experts / ranks, distinct)
