"""Load on a real cluster: requests with known answers, clients that send, stay or leave, and what became of each.

Plain sockets through http.client: a client must be able to leave at any moment, and to say exactly how an answer ended.
"""

from __future__ import annotations

import http.client
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any, Literal

VOCAB_SIZE = 384

Kind = Literal["whole", "error", "closed", "left", "hang"]


@dataclass(frozen=True)
class Request:
    """One request of a pool; tokens and finish_reason of its answer follow from it alone."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def body(self, model: str, *, stream: bool) -> bytes:
        fields: dict[str, Any] = {"model": model, "prompt": self.prompt, "max_tokens": self.max_tokens}
        fields |= {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed, "stream": stream}
        return json.dumps(fields | {"ignore_eos": self.ignore_eos, "return_token_ids": True}).encode()


@dataclass
class Outcome:
    """How an exchange ended.

    whole: the answer said that it had ended, and how.   error: an error object (detail: status or event, and code).
    closed: no answer, or the connection ended within it.   left: we did.   hang: nothing of that within the deadline.
    """

    kind: Kind
    request_id: str
    began: float
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    detail: str = ""
    message: str = ""


def random_request(
    rng: random.Random, *, prompt_tokens: tuple[int, int] = (1, 700), max_tokens: tuple[int, int] = (1, 60)
) -> Request:
    prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(*prompt_tokens))]
    count, ignore_eos = rng.randint(*max_tokens), rng.random() < 0.5
    if rng.random() < 0.5:
        return Request(prompt, count, ignore_eos)
    temperature, top_p = rng.choice([0.5, 0.8, 1.0, 1.3]), rng.choice([1.0, 0.95, 0.8])
    return Request(prompt, count, ignore_eos, temperature, top_p, seed=rng.randrange(2**40))


class Client:
    """One connection at a time to the router, kept between requests as long as it is whole."""

    def __init__(self, port: int, model: str, *, deadline_s: float) -> None:
        self._port, self._model, self._deadline_s = port, model, deadline_s
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def send(
        self, request: Request, request_id: str, *, stream: bool = False, leaves_after_s: float | None = None
    ) -> Outcome:
        """Run one exchange; never raises for what the cluster does."""
        limit = self._deadline_s if leaves_after_s is None else leaves_after_s
        outcome = Outcome("closed", request_id, time.monotonic())
        try:
            self._exchange(request, outcome, stream, limit)
        except TimeoutError:
            outcome.kind = "hang" if leaves_after_s is None else "left"
        except (OSError, http.client.HTTPException) as error:
            outcome.kind, outcome.detail = "closed", type(error).__name__
        outcome.ended = time.monotonic()
        if outcome.kind in ("closed", "left", "hang"):
            self.close()
        return outcome

    def _exchange(self, request: Request, outcome: Outcome, stream: bool, limit: float) -> None:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=limit)
            self._connection.connect()
        connection = self._connection
        assert connection.sock is not None
        connection.sock.settimeout(limit)
        headers = {"content-type": "application/json", "x-request-id": outcome.request_id}
        connection.request("POST", "/v1/completions", request.body(self._model, stream=stream), headers)
        response = connection.getresponse()
        if response.status != 200:
            error = json.loads(response.read())["error"]
            outcome.kind, outcome.detail = "error", f"{response.status} {error['code']}"
            outcome.message = error["message"]
        elif not stream:
            (choice,) = json.loads(response.read())["choices"]
            outcome.kind, outcome.tokens, outcome.finish_reason = "whole", choice["token_ids"], choice["finish_reason"]
        else:
            self._read_events(response, outcome, limit)
        if response.will_close:
            self.close()

    def _read_events(self, response: http.client.HTTPResponse, outcome: Outcome, limit: float) -> None:
        while line := response.readline():
            if time.monotonic() - outcome.began > limit:
                raise TimeoutError
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                if outcome.kind != "error":
                    outcome.kind = "whole"
                response.read()
                return
            event = json.loads(line[6:])
            if "error" in event:
                outcome.kind, outcome.detail = "error", f"event {event['error']['code']}"
                outcome.message = event["error"]["message"]
                continue
            for choice in event["choices"]:
                outcome.tokens += choice.get("token_ids") or []
                outcome.finish_reason = choice["finish_reason"] or outcome.finish_reason
        outcome.detail = outcome.detail or "cut"
