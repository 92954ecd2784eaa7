"""LogitsLog: a test seam of a rank. It appends the logits of every token that is sampled to a file.

A record names what it is about by content, not by request: blake2b of the tokens that came before, so that logits of
any process, batch or life of a request can be compared with those of another. Record: digest [16 bytes], logits [V]
float32; a file has records of one size only. What a killed process wrote is there: each record is one write.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.plan import PREVIOUS, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

DIGEST_BYTES = 16


def digest(token_ids: Sequence[int]) -> bytes:
    """Return the name of the place after these tokens."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class LogitsLog:
    """Hears of every plan before it runs (`on_plan`), of every row of logits (`on_logits`), and then of the tokens."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Open as long as the process lives.
        self._fd = os.open(folder / f"{name}-{os.getpid()}.bin", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._tokens: dict[int, list[int]] = {}

    def on_plan(self, plan: StepPlan) -> None:
        for seq in plan.ends:
            self._tokens.pop(seq, None)
        for start in plan.starts:
            self._tokens[start.seq] = list(start.token_ids)
        for step in plan.steps:
            if step.token_ids != [PREVIOUS]:
                self._tokens[step.seq][step.start :] = step.token_ids

    def on_tokens(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Hear what a plan has sampled: the next may go on from it without naming it."""
        for seq, token_id in tokens:
            if seq in self._tokens:  # not a branch
                self._tokens[seq].append(token_id)

    def on_logits(self, seq: int, position: int, logits: Tensor) -> None:
        """Append one record: logits [V] for what follows `position`."""
        row = logits.detach().float().cpu().contiguous().numpy().tobytes()
        os.write(self._fd, digest(self._tokens[seq][: position + 1]) + row)
