"""A request leaves nothing that only a garbage collection finds: collecting it would stop every answer."""

from __future__ import annotations

import collections
import gc

import pytest


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "n": 2}, {"max_tokens": 1}])
def test_a_request_leaves_no_cycles(cluster, fields):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, **fields}
    cluster.post("/v1/chat/completions", body)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(5):
            assert cluster.post("/v1/chat/completions", body).status_code == 200
        cluster.assert_clean()
        cluster.call(gc.collect)
        ours = collections.Counter(
            type(thing).__name__ for thing in gc.garbage if type(thing).__module__.startswith("router.")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    # The workers of this test live in the same process, and what they were sent may be among it.
    assert {name for name, count in ours.items() if count >= 5} <= {"AbortRequest"}
