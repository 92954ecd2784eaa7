"""ToolCallParser: the tool calls in generated text, as OpenAI's deltas, while the text is still coming.

The model writes calls as a block behind a blank line (call_arguments.py says what becomes of the values):

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="k" string="true">text</｜DSML｜parameter>
    <｜DSML｜parameter name="n" string="false">{"any": "JSON"}</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

What is well-formed, what is not, and what then:

- A tag is never shown, wherever it stands. Text outside of calls is content, also between and behind them, less the
  blank line before a tag, all white space behind it, and a `</think>` there (the block stood in open reasoning).
- What begins like a tag and goes on otherwise is content. So is such a beginning at the end of the text, unless it
  stands behind a tag or has the DSML token, which models don't write by chance: then it is the rest of a block.
- A call begins when its name is complete, whatever the name is, and inside of a block or not. It is complete at its
  closing tag, the block's, or the next call. Where the text ends before, its arguments are closed so that they parse.
- A value ends at `</｜DSML｜parameter>` and nowhere else; any other markup is part of it.
- Calls without a name, parameters whose tag is not as above, and text between parameters are dropped.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from router.call_arguments import CallArguments
from router.reasoning import DSML, OPEN_BLOCK, OPEN_INVOKE, THINK_CLOSE, before_blank_line

OPEN_PARAMETER = f"<{DSML}parameter"
CLOSE_BLOCK = f"</{DSML}tool_calls>"
CLOSE_INVOKE = f"</{DSML}invoke>"
CLOSE_PARAMETER = f"</{DSML}parameter>"
END_OF_HEAD = '">'  # of the tags that have attributes, so names may have either character

MAX_HEAD_CHARS = 1024  # what has no end by then is no tag

_TAGS = (OPEN_BLOCK, OPEN_INVOKE, OPEN_PARAMETER, CLOSE_BLOCK, CLOSE_INVOKE, CLOSE_PARAMETER)
_ANY_TAG = re.compile("|".join(_TAGS))
_LONGEST_TAG = max(map(len, _TAGS))
_NEXT_CHARACTER = re.compile(r"\S|\Z")
_INVOKE_HEAD = re.compile(r'\s+name="(.*)', re.DOTALL)
_PARAMETER_HEAD = re.compile(r'\s+name="(.*?)(?:"\s+string="([^"]*))?', re.DOTALL)


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to tool call number `index` of an answer.

    id, name: in the first delta of a call, and there only.   arguments: the next piece of its JSON text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


def new_call_id() -> str:
    """Return an id as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Incremental: the joined fields do not depend on how the text was cut. Holds no more than a tag, or a JSON value.

    schemas: the JSON schema of each function's parameters, by its name.   num_complete: calls that came to their end.
    """

    __slots__ = (
        "_arguments",
        "_content",
        "_deltas",
        "_follows_tag",
        "_held",
        "_is_plain",
        "_new_id",
        "_num_calls",
        "_pieces",
        "_read",
        "_schemas",
        "num_complete",
    )

    def __init__(
        self, *, schemas: Mapping[str, dict[str, Any]] | None = None, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self.num_complete = 0
        self._schemas = schemas or {}
        self._new_id = new_id
        self._num_calls = 0
        self._read: Callable[[str, int], int] = self._read_content
        self._arguments: CallArguments | None = None  # of the call that is open
        self._held = ""
        self._follows_tag = False
        self._is_plain = True  # the next character is content unless it begins something
        # What this step adds: content, deltas, and what makes up the next delta.
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._pieces: list[str] = []

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Return the content and the deltas that `text` completes."""
        if self._is_plain and "<" not in text and text[-1:] != "\n":
            return text, []
        text = self._held + text
        self._held = ""
        at = 0
        while at < len(text):
            at = self._read(text, at)
        self._is_plain = not (self._held or self._follows_tag) and self._read == self._read_content
        return self._take_output()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Return what the end of the text decides."""
        held, self._held = self._held, ""
        if self._read == self._read_content and not self._follows_tag and DSML not in held:
            self._content.append(held)
        self._close_call(is_complete=False)
        return self._take_output()

    def _take_output(self) -> tuple[str, list[ToolCallDelta]]:
        self._end_delta()
        content, self._content = "".join(self._content), []
        deltas, self._deltas = self._deltas, []
        return content, deltas

    # Each reader takes text from `at` on and returns where it stopped. What it can't decide yet goes to `_held`.

    def _read_content(self, text: str, at: int) -> int:
        if self._follows_tag:
            at = _NEXT_CHARACTER.search(text, at).start()  # type: ignore[union-attr]  # it always matches
            if text.startswith(THINK_CLOSE, at):
                return at + len(THINK_CLOSE)
            if THINK_CLOSE.startswith(text[at : at + len(THINK_CLOSE)]):
                self._held = text[at:]
                return len(text)
        tag = _ANY_TAG.search(text, at)
        end = before_blank_line(text, at, tag.start() if tag else _undecided(text, at, _TAGS))
        if end > at:
            self._content.append(text[at:end])
            self._follows_tag = False
        if tag:
            return self._take_tag(tag)
        self._held = text[end:]
        return len(text)

    def _read_call(self, text: str, at: int) -> int:
        tag = _ANY_TAG.search(text, at)
        if tag:
            return self._take_tag(tag)
        self._held = text[_undecided(text, at, _TAGS) :]
        return len(text)

    def _take_tag(self, tag: re.Match[str]) -> int:
        self._follows_tag = True
        if tag[0] == OPEN_INVOKE:
            self._close_call(is_complete=True)
            self._read = self._read_invoke_head
        elif tag[0] == OPEN_PARAMETER:
            self._read = self._read_parameter_head
        elif tag[0] in (CLOSE_INVOKE, CLOSE_BLOCK):
            self._close_call(is_complete=True)
            self._read = self._read_content
        return tag.end()

    def _read_invoke_head(self, text: str, at: int) -> int:
        end = self._end_of_head(text, at)
        if end is None:
            return len(text)
        head = _INVOKE_HEAD.fullmatch(text, at, end)
        if head and head[1].strip():
            self._arguments = CallArguments(self._schemas.get(head[1]))
            self._deltas.append(ToolCallDelta(index=self._num_calls, id=self._new_id(), name=head[1]))
        self._read = self._read_call
        return end

    def _read_parameter_head(self, text: str, at: int) -> int:
        end = self._end_of_head(text, at)
        if end is None:
            return len(text)
        head = _PARAMETER_HEAD.fullmatch(text, at, end)
        if head is None:
            self._read = self._read_call
            return end
        if self._arguments is not None:
            self._pieces.append(self._arguments.begin(head[1], is_text=head[2] == "true"))
        self._read = self._read_value
        return end + len(END_OF_HEAD)

    def _end_of_head(self, text: str, at: int) -> int | None:
        """Return where the attributes at `at` end: at `at` itself if they never do; None if that is not known yet."""
        limit = at + MAX_HEAD_CHARS
        end = text.find(END_OF_HEAD, at, limit)
        if text.find(DSML, at, limit if end < 0 else end) >= 0 or (end < 0 and len(text) >= limit):
            return at
        if end < 0:
            self._held = text[at:]
            return None
        return end

    def _read_value(self, text: str, at: int) -> int:
        end = text.find(CLOSE_PARAMETER, at)
        is_whole = end >= 0
        if not is_whole:
            end = _undecided(text, at, (CLOSE_PARAMETER,))
            self._held = text[end:]
        if self._arguments is not None:
            self._pieces.append(self._arguments.feed(text[at:end]))
            if is_whole:
                self._pieces.append(self._arguments.end())
        if not is_whole:
            return len(text)
        self._read = self._read_call
        return end + len(CLOSE_PARAMETER)

    def _close_call(self, *, is_complete: bool) -> None:
        if self._arguments is None:
            return
        self._pieces.append(self._arguments.close())
        self._arguments = None
        self._end_delta()
        self._num_calls += 1
        self.num_complete += is_complete

    def _end_delta(self) -> None:
        arguments, self._pieces = "".join(self._pieces), []
        if arguments:
            self._deltas.append(ToolCallDelta(index=self._num_calls, arguments=arguments))


def _undecided(text: str, start: int, tags: tuple[str, ...]) -> int:
    """Return where the part of `text` begins that may still become one of `tags`: its end if there is none."""
    at = text.rfind("<", max(start, len(text) - _LONGEST_TAG))
    return at if at >= 0 and any(tag.startswith(text[at:]) for tag in tags) else len(text)
