"""ReasoningSplitter: parts generated text into reasoning and content at the `</think>` marker.

In thinking mode the prompt ends with `<think>`, so generation starts inside reasoning and only the closing marker is
produced. An answer that ends without it is reasoning throughout: a length cut never turns thoughts into an answer.
A second `<think>` at the very start, which models produce now and then, is dropped.

Where tool calls are parsed, a block of them ends reasoning too: its first tag with the tag of a call behind it, so
that thoughts about the markup stay thoughts. The block, and the blank line before it, are left to the parser.
"""

from __future__ import annotations

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"
OPEN_BLOCK = f"<{DSML}tool_calls>"
OPEN_INVOKE = f"<{DSML}invoke"

MAX_SPACE = 8  # white space that is read between the two tags
_WINDOW = len(OPEN_BLOCK) + MAX_SPACE + len(OPEN_INVOKE)
_BLOCK_OR_CLOSE = re.compile(rf"{THINK_CLOSE}|{OPEN_BLOCK}(?=\s{{0,{MAX_SPACE}}}{OPEN_INVOKE})")
_CLOSE = re.compile(THINK_CLOSE)


def before_blank_line(text: str, start: int, end: int) -> int:
    """Return `end`, less the line ends before it that belong to a tag there: two at most, and none before `start`."""
    first = max(start, end - 2)
    while end > first and text[end - 1] == "\n":
        end -= 1
    return end


class ReasoningSplitter:
    """Incremental: the joined fields do not depend on how the text was cut. `is_thinking` says where we are.

    ends_at_tool_calls: tool calls are parsed behind it.
    """

    __slots__ = ("_at_start", "_ends_at_tool_calls", "_held", "is_thinking")

    def __init__(self, *, is_thinking: bool, ends_at_tool_calls: bool = False) -> None:
        self.is_thinking = is_thinking
        self._ends_at_tool_calls = ends_at_tool_calls
        self._at_start = is_thinking
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Return (reasoning, content) completed by `text`; a piece that may begin a marker waits."""
        if not self.is_thinking:
            return "", text
        if not (self._held or self._at_start or "<" in text or text[-1:] == "\n"):
            return text, ""
        text = self._held + text
        self._held = ""
        if self._at_start:
            if len(text) < len(THINK_OPEN) and THINK_OPEN.startswith(text):
                self._held = text
                return "", ""
            text = text.removeprefix(THINK_OPEN)
            self._at_start = False
        end = (_BLOCK_OR_CLOSE if self._ends_at_tool_calls else _CLOSE).search(text)
        if end is None:
            sure = self._num_sure(text)
            self._held = text[sure:]
            return text[:sure], ""
        self.is_thinking = False
        if end[0] == THINK_CLOSE:
            return text[: end.start()], text[end.end() :]
        sure = before_blank_line(text, 0, end.start())
        return text[:sure], text[sure:]

    def finish(self) -> tuple[str, str]:
        """Return what was held: part of a marker that never came is text, part of a block that was cut is a block."""
        held, self._held = self._held, ""
        if self._ends_at_tool_calls and DSML in held:
            self.is_thinking = False
            return "", held
        return held, ""

    def _num_sure(self, text: str) -> int:
        """Return how much of `text` is reasoning whatever follows."""
        at = text.find("<", max(0, len(text) - _WINDOW))
        while at >= 0 and not self._may_begin_an_end(text[at:]):
            at = text.find("<", at + 1)
        if not self._ends_at_tool_calls:
            return len(text) if at < 0 else at
        return before_blank_line(text, 0, len(text) if at < 0 else at)

    def _may_begin_an_end(self, tail: str) -> bool:
        if THINK_CLOSE.startswith(tail):
            return True
        if not self._ends_at_tool_calls:
            return False
        if OPEN_BLOCK.startswith(tail):
            return True
        rest = tail.removeprefix(OPEN_BLOCK)
        invoke = rest.lstrip()
        return rest != tail and len(rest) - len(invoke) <= MAX_SPACE and OPEN_INVOKE.startswith(invoke)
