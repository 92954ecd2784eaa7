"""The sizes for which steps are captured. The memory plan counts them, the runner makes them.

A step of n sequences runs in the smallest graph of at least n rows. Steps between sizes are small where a row more
costs most of a step (few sequences), and a fixed share of the batch where it does not, so that the ladder stays short:
every graph takes memory and a part of a second at start-up.

A prompt's chunk of T tokens runs in the smallest graph of at least T tokens, as far as it is worth while: beyond
LONGEST_CHUNK the host is as quick as the device.
"""

from __future__ import annotations

import bisect

_STEPS = ((8, 64), (16, 256))  # rows between two sizes, up to that many rows
_WIDEST = 64

LONGEST_CHUNK = 2048
CHUNK_CONTEXT = 32768  # tokens of a sequence up to which its chunks are captured: the indexer's work has a fixed bound
_CHUNKS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, LONGEST_CHUNK)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the rows of every graph, ascending; the last is exactly `max_num_seqs`. Raises ValueError below 1."""
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs {max_num_seqs}: a batch has at least one sequence")
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_num_seqs:
        step = next((rows for rows, up_to in _STEPS if sizes[-1] < up_to), _WIDEST)
        sizes.append(sizes[-1] + step)
    return (*sizes[: bisect.bisect_left(sizes, max_num_seqs)], max_num_seqs)


def chunk_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the tokens of every graph of a chunk, ascending, where chunks have up to `max_num_batched_tokens`."""
    most = min(max_num_batched_tokens, LONGEST_CHUNK)
    return (*_CHUNKS[: bisect.bisect_left(_CHUNKS, most)], most)


def graph_size(sizes: tuple[int, ...], num_seqs: int) -> int:
    """Return the smallest of `sizes` with room for `num_seqs`. Raises ValueError for more than the largest."""
    if num_seqs > sizes[-1]:
        raise ValueError(f"{num_seqs} sequences: the largest graph has {sizes[-1]} rows; admit no more at once")
    return sizes[bisect.bisect_left(sizes, num_seqs)]
