"""TextPipeline: one answer's tokens to shown text: detokenizer, then stop strings, then the reasoning split.

Held text always leaves through the later stages, so nothing is lost or misplaced when the answer ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.answer import Piece, Usage
from router.protocol import FinishReason, SamplingParams
from router.reasoning import ReasoningSplitter
from router.tokenizer import Detokenizer, StopHolder, Tokenizer


class TextPipeline:
    """State of one answer. `finish_reason` is None until it has ended; `stop_reason` is the stop string or the
    client's stop token that ended it. Counts tokens into `usage`.

    tokenizer None: there is no text, pieces carry token ids only.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        sampling: SamplingParams,
        *,
        usage: Usage,
        stops: Sequence[str] = (),
        is_thinking: bool = False,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._usage = usage
        self._sampling = sampling
        self._include_stop = include_stop
        self._special_ids = tokenizer.special_ids if tokenizer else frozenset[int]()
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens) if tokenizer is not None else None
        )
        self._holder = StopHolder(stops, include_stop=include_stop) if stops else None
        self._splitter = ReasoningSplitter(is_thinking=is_thinking)

    def feed(self, token_ids: Sequence[int], finish_reason: FinishReason | None = None) -> Piece:
        """Return what one step's tokens add. Tokens beyond a stop string are dropped and not counted.

        finish_reason: the worker's, if the answer ends with these tokens.
        """
        piece = Piece()
        for n, token in enumerate(token_ids):
            ends_here = finish_reason == "stop" and n == len(token_ids) - 1
            self._usage.completion_tokens += 1
            if self._splitter.is_thinking:
                self._usage.reasoning_tokens += 1
            piece.token_ids.append(token)
            if ends_here and self._ends_silently(token):
                continue
            if self._detokenizer is not None:
                self._show(self._detokenizer.feed((token,)), piece)
            if self._holder is not None and self._holder.matched is not None:
                self._end("stop", piece)
                return piece
        if finish_reason is not None:
            self._end(finish_reason, piece)
        return piece

    def _ends_silently(self, token: int) -> bool:
        """Return whether the token that ended the answer has no place in its text."""
        if token in self._sampling.stop_token_ids:
            self.stop_reason = token
            return not self._include_stop
        return token in self._special_ids

    def _show(self, text: str, piece: Piece) -> None:
        if self._holder is not None and self._usage.completion_tokens > self._sampling.min_tokens:
            text = self._holder.feed(text)
        if text:
            reasoning, content = self._splitter.feed(text)
            piece.reasoning += reasoning
            piece.content += content

    def _end(self, finish_reason: FinishReason, piece: Piece) -> None:
        self.finish_reason = finish_reason
        matched = self._holder is not None and self._holder.matched is not None
        if self._detokenizer is not None and not matched:
            self._show(self._detokenizer.finish(), piece)
        if self._holder is not None:
            if self._holder.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._holder.matched
            reasoning, content = self._splitter.feed(self._holder.finish())
            piece.reasoning += reasoning
            piece.content += content
        reasoning, content = self._splitter.finish()
        piece.reasoning += reasoning
        piece.content += content
