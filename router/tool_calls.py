"""Tool calls in generated text."""

from __future__ import annotations

import msgspec


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to tool call number `index` of an answer.

    id, name: in the first delta of a call, and there only.   arguments: the next piece of its JSON text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
