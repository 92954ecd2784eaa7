"""LogprobFormat: log probabilities of an answer's tokens, in the shapes of both routes.

Chat: one entry a token with its text, its bytes and its alternatives. Completions: four lists side by side. Tokens that
are not shown, such as the end marker, have no entry, so the joined bytes are the generated text before it is parted
into reasoning, content and calls. A token that is no whole character shows as U+FFFD in chat, where `bytes` says
what it is, and as `bytes:\\xf0\\x9f` in completions, which has no such field.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from router.protocol import TokenLogprobs
from router.tokenizer import Tokenizer

# JSON has no infinity: what a mask made impossible shows as this.
LOWEST = -9999.0


class LogprobFormat:
    """Format of one choice; it remembers how much text has gone by. num_top: alternatives shown of each token.

    tokenizer None: tokens show as `token_id:5`.   offset: characters of text before the first token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        is_chat: bool,
        num_top: int,
        hides_special: bool = True,
        offset: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._num_top = num_top
        self._hidden = tokenizer.special_ids if tokenizer and hides_special else frozenset[int]()
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def shows(self, token_ids: Sequence[int]) -> bool:
        """Return whether any of these tokens has an entry."""
        return any(token not in self._hidden for token in token_ids)

    def format(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of these tokens."""
        shown = [(t, p) for t, p in zip(token_ids, logprobs, strict=False) if t not in self._hidden]
        if self._is_chat:
            return {
                "content": [
                    self._entry(token, of.logprob) | {"top_logprobs": [self._entry(t, p) for t, p in self._top(of)]}
                    for token, of in shown
                ],
                "refusal": None,
            }
        return {
            "tokens": [self._name(token) for token, _ in shown],
            "token_logprobs": [max(of.logprob, LOWEST) for _, of in shown],
            # The chosen token is always there, as a further one if it is not among the best.
            "top_logprobs": [
                {self._name(t): max(p, LOWEST) for t, p in [*self._top(of), (token, of.logprob)]} for token, of in shown
            ]
            if self._num_top
            else None,
            "text_offset": [self._advance(token) for token, _ in shown],
        }

    def _top(self, of: TokenLogprobs) -> list[tuple[int, float]]:
        return list(zip(of.top_ids, of.top_logprobs, strict=True))[: self._num_top]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token)
        return {
            "token": f"token_id:{token}" if data is None else data.decode("utf-8", "replace"),
            "logprob": max(logprob, LOWEST),
            "bytes": None if data is None else list(data),
        }

    def _name(self, token: int) -> str:
        data = self._bytes(token)
        if data is None:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token: int) -> bytes | None:
        if self._tokenizer is None or not 0 <= token < len(self._tokenizer.token_bytes):
            return None
        return self._tokenizer.token_bytes[token]

    def _advance(self, token: int) -> int:
        """Return the characters complete before `token`, and count its own."""
        before = self._offset
        self._offset += len(self._decoder.decode(self._bytes(token) or b""))
        return before
