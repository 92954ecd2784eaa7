"""TextPipeline: one answer's tokens to shown fields: detokenizer, stop strings, reasoning split, tool calls.

Held text always leaves through the later stages, so nothing is lost or misplaced when the answer ends.

Stop strings are looked for in the text as the model writes it, so also in reasoning and in the markup of tool calls:
the answer ends there, and a call that is under way ends as one that was cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from router.answer import Piece, Usage
from router.protocol import FinishReason, SamplingParams, TokenLogprobs
from router.reasoning import ReasoningSplitter
from router.tokenizer import Detokenizer, StopHolder, Tokenizer
from router.tool_calls import ToolCallParser

ShownReason = FinishReason | Literal["tool_calls"]


class TextPipeline:
    """State of one answer. `finish_reason`, as the client is told, is None until it has ended; `stop_reason` is the
    stop string or the client's stop token that ended it. Counts tokens into `usage`.

    tokenizer None: there is no text, pieces carry token ids only.
    tool_schemas: the JSON schema of each function's parameters, by its name.
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
        parses_tools: bool = False,
        tool_schemas: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.finish_reason: ShownReason | None = None
        self.stop_reason: str | int | None = None
        self._usage = usage
        self._sampling = sampling
        self._include_stop = include_stop
        self._special_ids = tokenizer.special_ids if tokenizer else frozenset[int]()
        self._detokenizer = (
            Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens) if tokenizer is not None else None
        )
        self._holder = StopHolder(stops, include_stop=include_stop) if stops else None
        self._splitter = ReasoningSplitter(is_thinking=is_thinking, ends_at_tool_calls=parses_tools)
        self._parser = ToolCallParser(schemas=tool_schemas) if parses_tools else None
        # While thinking, to count its tokens: characters made, put into the splitter, and known to be reasoning, and
        # where the tokens begin that may still turn out not to be.
        self._num_chars = self._num_split = self._num_reasoning = 0
        self._starts: deque[int] = deque()

    def feed(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Piece:
        """Return what one step's tokens add. Tokens beyond a stop string are dropped and not counted.

        finish_reason: the worker's, if the answer ends with these tokens.   logprobs: one for each token, or none.
        """
        piece = Piece()
        for n, token in enumerate(token_ids):
            ends_here = finish_reason == "stop" and n == len(token_ids) - 1
            self._usage.completion_tokens += 1
            piece.token_ids.append(token)
            is_silent = ends_here and self._ends_silently(token)
            text = "" if is_silent or self._detokenizer is None else self._detokenizer.feed((token,))
            if self._splitter.is_thinking:
                self._usage.reasoning_tokens += 1
                self._starts.append(self._num_chars)
                self._num_chars += len(text)
            if text:
                self._show(text, piece)
            if self._holder is not None and self._holder.matched is not None:
                self._end("stop", piece)
                break
        else:
            if finish_reason is not None:
                self._end(finish_reason, piece)
        if logprobs:
            piece.logprobs.extend(logprobs[: len(piece.token_ids)])
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
            self._split(text, piece)

    def _split(self, text: str, piece: Piece) -> None:
        """Part text that no stop string can be in any more into the fields."""
        if self._splitter.is_thinking:
            reasoning, content = self._splitter.feed(text)
            self._num_split += len(text)
            self._count_reasoning(reasoning, content)
            piece.reasoning += reasoning
            text = content
        if self._parser is not None and text:
            text, deltas = self._parser.feed(text)
            piece.tool_calls += deltas
        piece.content += text

    def _count_reasoning(self, reasoning: str, content: str) -> None:
        """Settle which of the tokens counted as reasoning are: a token belongs where its text begins."""
        if self._splitter.is_thinking:
            self._num_reasoning += len(reasoning)
            while self._starts and self._starts[0] < self._num_reasoning:
                self._starts.popleft()
        else:
            end = self._num_split - len(content)
            self._usage.reasoning_tokens -= sum(start >= end for start in self._starts)
            self._starts.clear()

    def _end(self, finish_reason: FinishReason, piece: Piece) -> None:
        if self._detokenizer is not None:
            self._show(self._detokenizer.finish(), piece)
        if self._holder is not None:
            if self._holder.matched is not None:
                finish_reason, self.stop_reason = "stop", self._holder.matched
            self._split(self._holder.finish(), piece)
        if self._splitter.is_thinking:
            reasoning, content = self._splitter.finish()
            self._count_reasoning(reasoning, content)
            piece.reasoning += reasoning
            if content:
                self._split(content, piece)
        if self._parser is not None:
            content, deltas = self._parser.finish()
            piece.content += content
            piece.tool_calls += deltas
        calls = finish_reason == "stop" and self._parser is not None and self._parser.num_complete > 0
        self.finish_reason = "tool_calls" if calls else finish_reason
