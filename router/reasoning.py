"""ReasoningSplitter: parts generated text into reasoning and content at the `</think>` marker.

In thinking mode the prompt ends with `<think>`, so generation starts inside reasoning and only the closing marker is
produced. An answer that ends without it is reasoning throughout: a length cut never turns thoughts into an answer.
A second `<think>` at the very start, which models produce now and then, is dropped.
"""

from __future__ import annotations

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


class ReasoningSplitter:
    """Incremental: the joined fields do not depend on how the text was cut. `is_thinking` says where we are."""

    __slots__ = ("_at_start", "_held", "is_thinking")

    def __init__(self, *, is_thinking: bool) -> None:
        self.is_thinking = is_thinking
        self._at_start = is_thinking
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Return (reasoning, content) completed by `text`; a piece that may begin a marker waits."""
        if not self.is_thinking:
            return "", text
        text = self._held + text
        self._held = ""
        if self._at_start:
            if len(text) < len(THINK_OPEN) and THINK_OPEN.startswith(text):
                self._held = text
                return "", ""
            text = text.removeprefix(THINK_OPEN)
            self._at_start = False
        before, marker, after = text.partition(THINK_CLOSE)
        if marker:
            self.is_thinking = False
            return before, after
        for length in range(min(len(text), len(THINK_CLOSE) - 1), 0, -1):
            if THINK_CLOSE.startswith(text[-length:]):
                self._held = text[-length:]
                return text[:-length], ""
        return text, ""

    def finish(self) -> tuple[str, str]:
        """Return what was held: part of a marker that never came is text."""
        held, self._held = self._held, ""
        return held, ""
