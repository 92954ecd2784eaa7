"""Index scores of a long prompt's chunk, split over ranks: each selects for some of the tokens, and all hear of it.

Every rank has all index heads, since their scores are added up before entries are chosen: by default each scores all
tokens, and nothing is exchanged. Split by tokens, a rank scores T / n of them and is told what the others' tokens have
selected. What counts are bytes, of one layer with E visible entries:

    saved    (1 - 1/n) 8 T E      scores, written and read again, of device memory (their products are saved as well)
    costs    (1 - 1/n) 4 T k      selected entries, over the link, and the latency of one more exchange

With memory of 1.6 TB/s, a link of 50 GB/s and k = 512 that pays from some 8k entries on, prompts of 32k tokens: a chunk
of 4,096 at 128k tokens writes 1.1 GB of scores a layer to select 8 MB. Decode steps never pay: a token of a sequence
of 128k has 0.26 MB of scores, 0.2 µs, and any exchange takes several. Both rates are assumptions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.model.group import Group

_MEMORY_BYTES_PER_US = 1.6e6
_LINK_BYTES_PER_US = 50e3
_LATENCY_US = 20.0
_LEAST_TOKENS = 16  # of a rank: a part is never empty


def pays(num_tokens: int, entries: int, *, top_k: int, ranks: int) -> bool:
    """Return whether a chunk whose last token sees `entries` is scored in parts."""
    if ranks == 1 or num_tokens < _LEAST_TOKENS * ranks * ranks or entries <= top_k:
        return False
    of_others = num_tokens * (1 - 1 / ranks)
    saved = of_others * 8 * entries / _MEMORY_BYTES_PER_US
    return saved > of_others * 4 * top_k / _LINK_BYTES_PER_US + _LATENCY_US


def own_tokens(num_tokens: int, group: Group) -> slice:
    """Return which tokens of a chunk this rank scores."""
    each = -(-num_tokens // group.count)
    return slice(group.index * each, min((group.index + 1) * each, num_tokens))


def gather_rows(own: Tensor, num_tokens: int, group: Group) -> Tensor:
    """Return the rows [T, C] of all tokens, of which `own` [t, C] are this rank's: those of own_tokens."""
    each = -(-num_tokens // group.count)
    padded = torch.nn.functional.pad(own, (0, 0, 0, each - own.shape[0]))
    return group.all_gather(padded.view(1, -1)).view(-1, own.shape[1])[:num_tokens]
