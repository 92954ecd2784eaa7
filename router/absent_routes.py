"""Routes of OpenAI's API, and of its relatives, that this server lacks: each says so, and what there is instead."""

from __future__ import annotations

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from router.errors import ApiError

HAS = "this server has /v1/chat/completions, /v1/completions, /v1/models, /tokenize and /detokenize"

# Path, also with anything below it: what it would be for.
ABSENT = {
    "/v1/embeddings": "embeddings are",
    "/v1/responses": "the responses API is",
    "/v1/conversations": "the responses API is",
    "/v1/messages": "Anthropic's messages API is",
    "/v1/images": "images are",
    "/v1/audio": "audio is",
    "/v1/videos": "videos are",
    "/v1/realtime": "realtime sessions are",
    "/v1/moderations": "moderation is",
    "/v1/files": "files are",
    "/v1/uploads": "files are",
    "/v1/batches": "batches are",
    "/v1/fine_tuning": "fine-tuning is",
    "/v1/assistants": "assistants are",
    "/v1/threads": "assistants are",
    "/v1/vector_stores": "vector stores are",
    "/v1/containers": "containers are",
    "/v1/evals": "evaluations are",
    "/v1/rerank": "reranking is",
    "/v2/rerank": "reranking is",
    "/rerank": "reranking is",
    "/v1/score": "scores are",
    "/score": "scores are",
    "/classify": "classification is",
    "/pooling": "pooling is",
}


class _Refusal:
    """An endpoint that refuses. Plain ASGI, for routes without a list of methods: every method is told the same."""

    def __init__(self, what: str) -> None:
        self._what = what

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope["path"])[:200]
        raise ApiError(501, f"{path}: {self._what} not supported; {HAS}", code="unsupported_route")


def absent_routes() -> list[Route]:
    """Return a route for each path, and for all below it, that answers 501 `unsupported_route`."""
    return [
        Route(pattern, _Refusal(what), include_in_schema=False)
        for path, what in ABSENT.items()
        for pattern in (path, path + "/{rest:path}")
    ]
