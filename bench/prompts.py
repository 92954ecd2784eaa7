"""Prompts of a wanted number of tokens, as token ids or as text.

They are random and never alike, also between runs, so that a prefix cache does not make a later run look faster.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Protocol

from router.tokenizer import Tokenizer

# of a vocabulary that nobody has named: low ids are often special, and few models have less than this many
ASSUMED_IDS = (1_000, 20_000)
_MAX_CORRECTIONS = 32
_PLAIN_WORD = re.compile(rb" [a-z]{2,12}")
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face others level office "
    "door health person art war history party result change morning reason research girl guy moment air teacher"
)


class Prompts(Protocol):
    @property
    def description(self) -> str:
        """What the conditions of a report say of these prompts."""

    def make(self, rng: random.Random, length: int) -> str | list[int]:
        """Return a prompt of `length` tokens."""


class TokenPrompts:
    """Ids from `ids`, or from a range that nearly every vocabulary has."""

    def __init__(self, ids: Sequence[int] | None = None) -> None:
        self._ids = range(*ASSUMED_IDS) if ids is None else ids
        self.description = f"random token ids ({len(self._ids):,} different ones)"

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenPrompts:
        """Use all of a vocabulary but its special tokens."""
        return cls([i for i, data in enumerate(tokenizer.token_bytes) if data and i not in tokenizer.special_ids])

    def make(self, rng: random.Random, length: int) -> list[int]:
        return rng.choices(self._ids, k=length)


class TextPrompts:
    """Random words. With the model's tokenizer the length is exact; without one it is about a token a word."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._words = [f" {word}" for word in _COMMON.split()]
        self.description = "random words, about one token each (no --tokenizer: see the server's own count)"
        if tokenizer is not None:
            words = {data.decode() for data in tokenizer.token_bytes if _PLAIN_WORD.fullmatch(data)}
            self._words = sorted(word for word in words if len(tokenizer.encode(word)) == 1)
            self.description = "random words, of an exact number of tokens"
            if not self._words:
                raise ValueError("the tokenizer has no plain words as tokens; use prompts of token ids instead")

    def make(self, rng: random.Random, length: int) -> str:
        words = rng.choices(self._words, k=length)
        if self._tokenizer is None:
            return "".join(words).lstrip()
        for _ in range(_MAX_CORRECTIONS):
            text = "".join(words)
            surplus = len(self._tokenizer.encode(text)) - length
            if surplus == 0:
                return text
            # words that melt into one token, or split: leave some out, or add some
            words = words[:-surplus] if surplus > 0 else words + rng.choices(self._words, k=-surplus)
        raise ValueError(f"found no text of exactly {length} tokens; use prompts of token ids instead")
