"""What comes with a request besides its fields: the body's bytes, no more of them than allowed, and its id."""

from __future__ import annotations

import asyncio
import re
import time
import uuid

from starlette.requests import ClientDisconnect, Request

from router.config import RouterConfig
from router.errors import ApiError

# Beyond the limit a body is read on, unstored, so that the client gets to read the refusal; up to this much.
MAX_DISCARDED_BYTES = 64 << 20
_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:-]")


async def read_body(request: Request, config: RouterConfig) -> bytes:
    """Return the body. Raises ApiError 413 beyond the limit, 408 if it comes too slowly, 415 if it is compressed."""
    limit = config.max_body_bytes
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "content-encoding: compressed bodies are not supported", param="content-encoding")
    too_large = ApiError(
        413, f"body: larger than {limit} bytes (max_body_mib {config.max_body_mib:g})", code="body_too_large"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit and "expect" in request.headers:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                elif size > limit + MAX_DISCARDED_BYTES:
                    break
    except TimeoutError:
        raise ApiError(408, f"body: not complete after {config.body_timeout_s:g} s", code="body_timeout") from None
    except ClientDisconnect:
        raise ApiError(499, "client left while sending its request", code="client_left") from None
    if size > limit:
        raise too_large
    return b"".join(chunks)


def request_id(request: Request) -> str:
    """Return the client's x-request-id, cleaned, or a new one."""
    given = _REQUEST_ID.sub("", request.headers.get("x-request-id", ""))[:128]
    return given or f"req-{time.time_ns():x}-{uuid.uuid4().hex[:8]}"
