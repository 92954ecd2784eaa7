"""JSON schemas as clients send them, made ready for the grammar library."""

from __future__ import annotations

import re
from typing import Any

# Whitespace between tokens of JSON is allowed where JSON allows it, but not without end: models lose themselves in it.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
# The formats that are enforced. Any other is an annotation, as the JSON Schema standard has it.
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions"}
_VALUES = {"const", "enum", "required"}
_MAX_REFERENCES = 32


def bare(schema: Any) -> Any:
    """Return `schema` without what no answer depends on. Raises RecursionError if it is nested too deeply."""
    if isinstance(schema, list):
        return [bare(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            kept[key] = {name: bare(part) for name, part in value.items()}
        elif key in _VALUES:
            kept[key] = value
        elif key not in _ANNOTATIONS and not (key == "format" and value not in FORMATS):
            kept[key] = bare(value)
    return kept


def grammar_schema(schema: Any) -> Any:
    """Return a bare schema with the library's options at its top."""
    options = {"whitespace_pattern": WHITESPACE}
    return {**schema, "x-guidance": options} if isinstance(schema, dict) else schema


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Follow `schema` while it is nothing but a reference into the definitions of `root`."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or set(schema) != {"$ref"}:
            break
        found = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", str(schema["$ref"]))
        definitions = root.get(found[1]) if found else None
        if not found or not isinstance(definitions, dict) or found[2] not in definitions:
            break
        schema = definitions[found[2]]
    return schema
