"""ApiError: a failure that a client of the public API is told about, and the OpenAI error object that says it.

The object is always `{"error": {"message", "type", "param", "code"}}`, also for what the framework refuses itself.
"""

from __future__ import annotations

from typing import Any

import msgspec

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


class ApiError(Exception):
    """A refused or failed request. `param` is the field at fault, `retry_after_s` fills Retry-After (0: left out)."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return the JSON error object."""
        return error_body(self.status, self.message, code=self.code, param=self.param)

    def headers(self) -> dict[str, str]:
        if self.status == 501:
            return {"x-should-retry": "false"}  # the openai SDK tries every other 5xx again
        return {"retry-after": str(max(1, round(self.retry_after_s)))} if self.retry_after_s > 0 else {}


class InvalidRequest(ApiError):
    """The client is at fault in one field; the same request will fail again. Answered with 400."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, code=code, param=param)


class Unsupported(InvalidRequest):
    """A field that we know and can't honour: refused, never ignored in silence."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param}: {reason}", param=param, code="unsupported_parameter")


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> bytes:
    """Return the error object of `status` as JSON."""
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def shown(value: Any) -> str:
    """Return a client's value as a message may quote it: short."""
    text = repr(value if not isinstance(value, str) else value[:200])
    return text if len(text) <= 60 else text[:57] + "..."
