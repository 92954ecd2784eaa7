# The markers are written with full-width bars.
"""Tool calls of earlier assistant turns, as clients send them back, in the markup that the model wrote them in.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="function">
<｜DSML｜parameter name="key" string="true">text as it is</｜DSML｜parameter>
<｜DSML｜parameter name="key" string="false">JSON</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from router.encoding import EncodingTexts
from router.errors import InvalidRequest
from router.reasoning import DSML
from router.tools import to_json


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


def render_calls(calls: Sequence[ToolCall], where: str, texts: EncodingTexts) -> str:
    """Return the block that the assistant wrote to call `calls`. Raises InvalidRequest naming the field at fault."""
    blocks = []
    for n, call in enumerate(calls):
        field = f"{where}.tool_calls[{n}].function"
        lines = []
        for key, value in _arguments(call, f"{field}.arguments").items():
            is_text = isinstance(value, str)
            shown = value if is_text else to_json(value, f"{field}.arguments")
            lines.append(
                f'<{DSML}parameter name="{key}" string="{"true" if is_text else "false"}">{shown}</{DSML}parameter>'
            )
        name = call.function.name
        blocks.append(
            texts.render("tool_call_template", param=field, dsml_token=DSML, name=name, arguments="\n".join(lines))
        )
    return "\n\n" + texts.render(
        "tool_calls_template",
        param=f"{where}.tool_calls",
        dsml_token=DSML,
        tc_block_name="tool_calls",
        tool_calls="\n".join(blocks),
    )


def _arguments(call: ToolCall, where: str) -> dict[str, Any]:
    """Return a call's arguments; null, "" and "null" are a call without any."""
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{where}: must be the text of a JSON object: {error}", param=where) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: must be a JSON object, found {type(value).__name__}", param=where)
    return value
