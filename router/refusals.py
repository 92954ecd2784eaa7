"""Fields that are known and not done: refused by name, never ignored in silence, unless they ask for nothing."""

from __future__ import annotations

from typing import Any

from router.errors import InvalidRequest, Unsupported, shown

# What each field may hold; everything else is refused. By type too: False is no neutral value of a count.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (None, False),
    "suffix": (None, ""),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "bad_words": (None, []),
    "documents": (None, []),
    **dict.fromkeys(
        (
            "prompt_logprobs",
            "logits_processors",
            "allowed_token_ids",
            "truncate_prompt_tokens",
            "audio",
            "prediction",
            "web_search_options",
            "chat_template",
        ),
        (None,),
    ),
}
_REMEDIES = {
    "functions": "the older spelling is not supported; send the same in `tools`",
    "function_call": "the older spelling is not supported; send `tool_choice`",
    "prompt_logprobs": "log probabilities of a prompt are not supported; `logprobs` gives those of the answer",
    "modalities": 'only ["text"] is supported: this model writes text',
    "audio": "this model writes text only; leave it out",
    "suffix": "this model does not fill in the middle; leave it out",
    "chat_template": "the model's own format is used; leave it out",
}


def check(request: Any) -> None:
    """Raise Unsupported for a field of `request` that asks for what we don't do, InvalidRequest if two contradict."""
    for field, allowed in NEUTRAL.items():
        value = getattr(request, field, None)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            reason = _REMEDIES.get(field, "not supported; leave it out")
            raise Unsupported(field, f"{shown(value)}: {reason}")
    if getattr(request, "stream_options", None) is not None and not request.stream:
        raise InvalidRequest("stream_options: only allowed with stream true", param="stream_options")
