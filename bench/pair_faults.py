"""SIGKILL of either side of a pair while the cache moves, and whether what comes of it is right.

A long prompt is held before its second push (a test seam), let go, and a moment later all ranks of one side are killed.
Right is: the request is answered with the tokens of an undisturbed run, or refused with an error within its limit; the
group, started again, serves the same tokens; nothing is held any more.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import time
from typing import Any

from bench.pair_processes import Cluster, NotReady

DELAYS_MS = (0.0, 1.0, 3.0)  # from the push to the kill
_ANSWER_WITHIN_S = 30.0
_READY_WITHIN_S = 200.0
_IDLE_WITHIN_S = 20.0
_OUTPUT = 8
_GAUGES = ("held_blocks", "quarantined_blocks", "open_landings", "num_running", "num_waiting")


def strike(cluster: Cluster, *, prompt: int, model: str) -> list[dict[str, Any]]:
    """Return an entry for each strike; `fault` is "" if all went right."""
    body = {"model": model, "max_tokens": _OUTPUT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body["prompt"] = random.Random(0).choices(range(1000, 100_000), k=prompt)
    wanted = _tokens(cluster.post("/v1/completions", body, timeout_s=_ANSWER_WITHIN_S))
    found = []
    for role in ("prefill", "decode"):
        for delay in DELAYS_MS:
            entry: dict[str, Any] = {"what": f"{role} killed {delay:g} ms after a push", "fault": ""}
            try:
                entry |= _strike(cluster, role, delay, body, wanted)
            except (NotReady, OSError, TimeoutError) as error:
                entry["fault"] = f"{type(error).__name__}: {error}"
            found.append(entry)
            print(f"{entry['what']}: {entry['fault'] or entry['outcome']}", flush=True)
    return found


def _strike(
    cluster: Cluster, role: str, delay_ms: float, body: dict[str, Any], wanted: list[int] | None
) -> dict[str, Any]:
    if wanted is None:
        return {"fault": "the undisturbed request was not answered"}
    writer, victim = cluster.worker("prefill"), cluster.worker(role)
    seam = {"point": "kv_mid", "request": "", "n": 2, "action": "hold", "target": "rank"}
    cluster.post("/seams", seam, base=writer["url"])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(cluster.post, "/v1/completions", body, timeout_s=_ANSWER_WITHIN_S + _READY_WITHIN_S)
        _await_held(cluster, writer["url"])
        cluster.post("/seams/release", None, base=writer["url"])
        time.sleep(delay_ms / 1000)
        for rank in victim["ranks"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank["pid"], signal.SIGKILL)
        struck = time.monotonic()
        if not cluster.await_end(role, _IDLE_WITHIN_S):
            return {"fault": f"the {role} leader has outlived its ranks by {_IDLE_WITHIN_S:.0f} s"}
        cluster.start(role)
        answer = asked.result()
    answered_s = time.monotonic() - struck
    tokens = _tokens(answer)
    outcome = "complete" if tokens == wanted else "error" if tokens is None else "wrong tokens"
    result = {"outcome": outcome, "answered_s": round(answered_s, 2), "fault": ""}
    if outcome == "wrong tokens":
        return result | {"fault": f"tokens {tokens}, undisturbed {wanted}"}
    if outcome == "error" and answered_s > _ANSWER_WITHIN_S:
        return result | {"fault": f"its error came after {answered_s:.0f} s"}
    cluster.await_ready(_READY_WITHIN_S)
    result["ready_s"] = round(time.monotonic() - struck, 2)
    again = _tokens(cluster.post("/v1/completions", body, timeout_s=_ANSWER_WITHIN_S))
    if again != wanted:
        return result | {"fault": f"afterwards tokens {again}, undisturbed {wanted}"}
    return result | {"fault": _held(cluster)}


def _await_held(cluster: Cluster, url: str) -> None:
    until = time.monotonic() + _IDLE_WITHIN_S
    while "kv_mid" not in cluster.get("/seams", base=url):
        if time.monotonic() > until:
            raise TimeoutError("the prompt did not come to its second push: has it several chunks?")
        time.sleep(0.002)


def _held(cluster: Cluster) -> str:
    """Return what is still held once nothing runs, "" if nothing."""
    until = time.monotonic() + _IDLE_WITHIN_S
    while True:
        held: dict[str, Any] = {}
        for role in ("prefill", "decode"):
            stats = json.loads(cluster.get("/info", base=cluster.worker(role)["url"]))["stats"]
            held |= {f"{role} {name}": stats[name] for name in _GAUGES if stats.get(name)}
        if not held:
            return ""
        if time.monotonic() > until:
            return f"still held: {held}"
        time.sleep(0.2)


def _tokens(answer: Any) -> list[int] | None:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return list(choices[0]["token_ids"]) if choices else None
