"""Run: what the transfer benchmark reports of one prompt length and block order, and what it is made from."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

ORDERS = ("merged", "fragmented")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One line of the result: medians of the repetitions, and the best one where the name says so.

    chunk_tokens: 0 if the prompt went in one write; otherwise every chunk was a write of its own, through Writer,
    posted when the one before had ended, as it has while the next is computed; the times are then those of the last
    chunk, from the moment it could be planned: what a user waits for.
    post_us: inside the post.   done_us: from the post to the end of the write.   arrival_us: from the post until the
    receiver's poll returned the notification.   gb_per_s: of num_bytes in done_us; in total_us, of all chunks, if
    chunked.   one_piece, memcpy: as many bytes in one piece over the same lane, and copied within the source's memory.
    """

    transport: str
    lane: str
    device: str
    tokens: int
    order: str
    chunk_tokens: int
    num_bytes: int
    num_pieces: int
    repetitions: int
    post_us: float
    done_us: float
    arrival_us: float
    best_done_us: float
    best_arrival_us: float
    total_us: float
    gb_per_s: float
    best_gb_per_s: float
    one_piece_gb_per_s: float
    best_one_piece_gb_per_s: float
    share_of_one_piece: float
    best_share_of_one_piece: float
    memcpy_gb_per_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Progress: repetitions done of all, and what is being measured."""

    done: int
    total: int
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """The last word. error: "" if everything was measured.  has_started: the processes were connected before."""

    error: str = ""
    has_started: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One repetition, in seconds. num_pieces: of the whole."""

    num_pieces: int
    post: float
    done: float
    arrival: float
    total: float


def summarise(
    samples: Sequence[Sample],
    one_piece: Sequence[Sample],
    copies: Sequence[float],
    *,
    transport: str,
    lane: str,
    device: str,
    tokens: int,
    order: str,
    chunk_tokens: int,
    num_bytes: int,
) -> Run:
    """Return the run that samples make. one_piece, copies (seconds): of the same number of bytes."""

    def rates(seconds: Sequence[float]) -> tuple[float, float]:
        return num_bytes / statistics.median(seconds) / 1e9, num_bytes / min(seconds) / 1e9

    def median_us(name: str) -> float:
        return 1e6 * float(statistics.median(getattr(s, name) for s in samples))

    rate, best = rates([s.total if chunk_tokens else s.done for s in samples])
    whole, best_whole = rates([s.done for s in one_piece])
    return Run(
        transport=transport,
        lane=lane,
        device=device,
        tokens=tokens,
        order=order,
        chunk_tokens=chunk_tokens,
        num_bytes=num_bytes,
        num_pieces=statistics.median_low(s.num_pieces for s in samples),
        repetitions=len(samples),
        post_us=median_us("post"),
        done_us=median_us("done"),
        arrival_us=median_us("arrival"),
        best_done_us=min(s.done for s in samples) * 1e6,
        best_arrival_us=min(s.arrival for s in samples) * 1e6,
        total_us=median_us("total"),
        gb_per_s=rate,
        best_gb_per_s=best,
        one_piece_gb_per_s=whole,
        best_one_piece_gb_per_s=best_whole,
        share_of_one_piece=rate / whole,
        best_share_of_one_piece=best / best_whole,
        memcpy_gb_per_s=rates(copies)[1],
    )
