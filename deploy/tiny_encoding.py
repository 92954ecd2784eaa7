"""Prompt texts of dsv4-tiny, copied into its folder as encoding/encoding_dsv4.py; read there, never imported.

The names, and the places in braces, are those of DeepSeek-V4's own file, so that tools, response formats and efforts
can be tried without a checkpoint. The words are not: random weights were trained on none.
"""

DS_TASK_SP_TOKENS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}

response_format_template: str = "## Answer\n\nAnswer with JSON that this schema describes, and nothing else:\n{schema}"

tool_output_template: str = "<tool_result>{content}</tool_result>"
tool_call_template: str = '<{dsml_token}invoke name="{name}">\n{arguments}\n</{dsml_token}invoke>'
tool_calls_template: str = "<{dsml_token}{tc_block_name}>\n{tool_calls}\n</{dsml_token}{tc_block_name}>"

REASONING_EFFORT_MAX = "Effort: all that you have.\nTake nothing for granted, and check every step twice.\n\n"

TOOLS_TEMPLATE = """## Functions

The functions below are yours to call. A call is written like this:

<{dsml_token}tool_calls>
<{dsml_token}invoke name="$FUNCTION">
<{dsml_token}parameter name="$KEY" string="true|false">$VALUE</{dsml_token}parameter>
</{dsml_token}invoke>
</{dsml_token}tool_calls>

A text is written as it is, with `string="true"`; any other value as JSON, with `string="false"`.
What comes between {thinking_start_token} and {thinking_end_token} calls nothing.

One function a line:

{tool_schemas}

Call no other function, and keep to the schemas.
"""
