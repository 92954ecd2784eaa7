"""TransferPlan: which byte ranges of which pools go where."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """`num_bytes` from `source` bytes into the own pool to `target` bytes into the peer's pool of the same name."""

    pool: str
    source: int
    target: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class TransferPlan:
    """Pieces sorted by pool and address, neighbours merged."""

    pieces: tuple[Piece, ...]
