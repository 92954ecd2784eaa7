"""What can go wrong with a request, as types a caller can act on; each maps to one protocol error code."""

from __future__ import annotations

from engine.plan import CACHE_CORRUPT, GUIDE_FAILED
from router.protocol import ErrorBody, ErrorCode


class RequestError(Exception):
    """Base: `code` tells the router what to do, the text tells a person."""

    code: ErrorCode = "internal"
    status = 500

    def body(self) -> ErrorBody:
        return ErrorBody(code=self.code, message=str(self))


class InvalidRequest(RequestError):
    code: ErrorCode = "invalid_request"
    status = 400


class NoCapacity(RequestError):
    code: ErrorCode = "no_capacity"
    status = 503


class NotReady(RequestError):
    code: ErrorCode = "not_ready"
    status = 503


class Draining(RequestError):
    code: ErrorCode = "draining"
    status = 503


class Aborted(RequestError):
    code: ErrorCode = "aborted"
    status = 409


class FingerprintMismatch(RequestError):
    code: ErrorCode = "fingerprint_mismatch"
    status = 409


class StaleGeneration(RequestError):
    code: ErrorCode = "stale_generation"
    status = 409


class DeadlineExceeded(RequestError):
    code: ErrorCode = "deadline"
    status = 504


class TransferFailed(RequestError):
    code: ErrorCode = "transfer_failed"
    status = 502


class WorkerLost(RequestError):
    code: ErrorCode = "worker_lost"
    status = 502


def of_step(role: str, reason: str) -> RequestError:
    """Return what a request is told whose step has failed at the ranks; its own grammar is its own fault."""
    kind = RequestError
    if GUIDE_FAILED in reason:
        kind = InvalidRequest
    elif CACHE_CORRUPT in reason:
        kind = TransferFailed
    return kind(f"{role} failed: {reason}")
