"""The OpenAPI description of the public API, made of the structs that requests are parsed with.

What a struct can't say (ranges, shapes that are checked later) is added here from the constants that check it. Fields
that are known and refused are left out: a client that reads this should not find them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router import prompts, refusals, sampling
from router.chat import ROLES
from router.encoding import EFFORTS
from router.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]

_REF = "#/components/schemas/"
_HIDDEN = {*refusals.NEUTRAL, "forced_token_ids", "use_beam_search"}
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TOKEN_IDS: Schema = {"type": "array", "items": _COUNT}


def _object(required: Schema, **optional: Schema) -> Schema:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": _REF + name}


def _constraints() -> dict[str, Schema]:
    """Return what is checked of each field beyond its type."""
    function = _object(
        {"name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"}},
        description=_TEXT,
        parameters={"type": "object"},
        strict=_or_null({"type": "boolean"}),
    )
    tool = _object({"type": {"const": "function"}, "function": function})
    chosen = _object({"type": {"const": "function"}, "function": _object({"name": _TEXT})})
    stop = {"type": "string", "minLength": 1, "maxLength": sampling.MAX_STOP_CHARS}
    ids = {"type": "array", "items": _COUNT, "minItems": 1}
    text = {"type": "string", "minLength": 1}
    several = {"minItems": 1, "maxItems": prompts.MAX_PROMPTS}
    ranges: dict[str, Schema] = {
        field: {"type": "number", "minimum": low, "maximum": high, "default": default}
        for field, (default, low, high) in sampling.RANGES.items()
    }
    ranges["repetition_penalty"]["exclusiveMinimum"] = ranges["repetition_penalty"].pop("minimum")
    return ranges | {
        "n": {"type": "integer", "minimum": 1, "maximum": sampling.MAX_CHOICES, "default": 1},
        "best_of": {
            "type": "integer",
            "minimum": 1,
            "maximum": sampling.MAX_CHOICES,
            "description": "only the same as n",
        },
        "top_k": {"type": "integer", "minimum": -1},
        "max_tokens": {"type": "integer", "minimum": 1},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
        "min_tokens": _COUNT,
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": sampling.MAX_TOP_LOGPROBS},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
            "additionalProperties": {"type": "number"},
        },
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": sampling.MAX_STOPS}]},
        "stop_token_ids": {"type": "array", "items": _COUNT, "maxItems": sampling.MAX_STOP_TOKEN_IDS},
        "tokens": _TOKEN_IDS,
        "tools": {"type": "array", "items": tool},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, chosen]},
        "reasoning_effort": {"enum": ["none", *EFFORTS]},
        "response_format": _object(
            {"type": {"enum": ["text", "json_object", "json_schema"]}}, json_schema={"type": "object"}
        ),
        "prompt": {
            "anyOf": [text, {"type": "array", "items": text} | several, ids, {"type": "array", "items": ids} | several]
        },
    }


def _requests() -> dict[str, Schema]:
    kinds = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF + "{name}")
    constraints = _constraints()
    for kind in kinds:
        schema = schemas[kind.__name__]
        required = schema.get("required", [])
        for field, shape in list(schema["properties"].items()):
            if field in _HIDDEN:
                del schema["properties"][field]
            elif kind is TokenizeRequest and field == "prompt":
                continue
            elif kind is CompletionRequest and field == "logprobs":
                schema["properties"][field] = _or_null(constraints["top_logprobs"])
            elif field in constraints:
                allowed = constraints[field]
                schema["properties"][field] = allowed if field in required else _or_null(allowed)
            else:
                shape.pop("default", None)
    schemas["ChatRequest"]["properties"]["messages"] |= {"minItems": 1}
    schemas["Thinking"]["properties"]["type"] = {"enum": ["enabled", "disabled"]}
    schemas["ChatMessage"]["properties"]["role"] = {"enum": list(ROLES)}
    return dict(schemas)


def _responses() -> dict[str, Schema]:
    finish = _or_null({"enum": ["stop", "length", "tool_calls"]})
    call = _object(
        {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})}
    )
    message = _object(
        {"role": {"const": "assistant"}, "content": _or_null(_TEXT)},
        refusal={"type": "null"},
        reasoning_content=_TEXT,
        tool_calls={"type": "array", "items": call},
    )
    common = {"index": _COUNT, "logprobs": _or_null({"type": "object"}), "finish_reason": finish}
    more = {"stop_reason": {"type": ["string", "integer", "null"]}, "token_ids": _TOKEN_IDS}
    whole = {"id": _TEXT, "created": _COUNT, "model": _TEXT, "usage": _ref("Usage")}

    def answer(kind: str, choice: Schema) -> Schema:
        return _object(whole | {"object": {"const": kind}, "choices": {"type": "array", "items": choice}})

    return {
        "Error": _object(
            {"error": _object({"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)})}
        ),
        "Usage": _object(
            {
                "prompt_tokens": _COUNT,
                "completion_tokens": _COUNT,
                "total_tokens": _COUNT,
                "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
                "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
            }
        ),
        "ChatAnswer": answer("chat.completion", _object({"message": message, **common}, **more)),
        "CompletionAnswer": answer("text_completion", _object({"text": _TEXT, **common}, **more)),
        "Model": _object(
            {"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT},
            max_model_len=_or_null(_COUNT),
        ),
        "ModelList": _object({"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}),
        "Tokens": _object(
            {"count": _COUNT, "max_model_len": _or_null(_COUNT), "tokens": _TOKEN_IDS},
            token_strs=_or_null({"type": "array", "items": _TEXT}),
        ),
        "Text": _object({"prompt": _TEXT}),
        "State": {"type": "object"},
    }


def _operation(summary: str, answer: str, **fields: Any) -> Schema:
    content = {"application/json": {"schema": _ref(answer)}}
    if fields.pop("streams", False):
        content["text/event-stream"] = {"schema": {}}  # some readers mean the whole stream by it, some one event
    error = {
        "description": "what was wrong, and what to do",
        "content": {"application/json": {"schema": _ref("Error")}},
    }
    return {
        "summary": summary,
        "responses": {"200": {"description": "the answer", "content": content}, "4XX": error, "5XX": error},
    } | fields


def _post(summary: str, request: str, answer: str, *, example: Schema, streams: bool = False) -> Schema:
    content = {"application/json": {"schema": _ref(request), "example": example}}
    body = {"required": True, "content": content}
    return {"post": _operation(summary, answer, streams=streams, requestBody=body)}


def describe(model: str, *, version: str) -> Schema:
    """Return the description, with examples that name this server's model."""
    messages = [{"role": "user", "content": "Hello"}]
    model_name = {"name": "name", "in": "path", "required": True, "schema": _TEXT, "example": model}
    paths: Schema = {
        "/v1/chat/completions": _post(
            "Answer a conversation",
            "ChatRequest",
            "ChatAnswer",
            example={"model": model, "messages": messages, "max_tokens": 16},
            streams=True,
        ),
        "/v1/completions": _post(
            "Continue a text, or several",
            "CompletionRequest",
            "CompletionAnswer",
            example={"model": model, "prompt": "Once upon a time", "max_tokens": 16},
            streams=True,
        ),
        "/tokenize": _post(
            "Show the tokens of a text or a conversation", "TokenizeRequest", "Tokens", example={"messages": messages}
        ),
        "/detokenize": _post("Show the text of tokens", "DetokenizeRequest", "Text", example={"tokens": [19923]}),
        "/v1/models": {"get": _operation("List the models that can be used now", "ModelList")},
        "/v1/models/{name}": {"get": _operation("Show one model", "Model", parameters=[model_name])},
    }
    for path, summary in (
        ("/health", "200 when a pair is ready"),
        ("/health_generate", "200 when a pair has just made tokens"),
        ("/ready", "200 when a pair is ready"),
        ("/live", "200 as long as the process lives"),
        ("/topology", "Workers, their pairs and their states"),
        ("/server_info", "Version, configuration and limits"),
        ("/version", "Version"),
    ):
        paths[path] = {"get": _operation(summary, "State")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Isthmus", "version": version},
        "paths": paths,
        "components": {"schemas": _requests() | _responses()},
    }
