"""Inbox: tokens that wait for a slow client, failures, time."""

from __future__ import annotations

import asyncio

import pytest

from router.client import WorkerError
from router.inbox import Inbox
from router.protocol import ErrorBody, SequenceOutput, TokenLogprobs


def output(index: int, *tokens: int, **fields) -> SequenceOutput:
    logprobs = [TokenLogprobs(logprob=-float(token)) for token in tokens]
    return SequenceOutput(request_id="r", index=index, token_ids=list(tokens), logprobs=logprobs, **fields)


def run(test) -> None:
    asyncio.run(test())


def test_tokens_that_follow_one_another_wait_as_one() -> None:
    async def test() -> None:
        inbox = Inbox()
        for index in range(0, 1000, 2):
            inbox.push(output(index, index, index + 1))
        inbox.push(output(1000, 1000, finish_reason="length"))
        (merged,) = await inbox.take(timeout_s=1)
        assert (merged.index, merged.token_ids, merged.finish_reason) == (0, list(range(1001)), "length")
        assert [p.logprob for p in merged.logprobs] == [-float(token) for token in range(1001)]
        assert inbox._outputs == []

    run(test)


def test_a_gap_stays_visible() -> None:
    async def test() -> None:
        inbox = Inbox()
        inbox.push(output(1, 5))
        inbox.push(output(3, 7))
        assert [o.index for o in await inbox.take(timeout_s=1)] == [1, 3]

    run(test)


def test_an_error_is_not_merged_with_the_tokens_before_it() -> None:
    async def test() -> None:
        inbox = Inbox()
        inbox.push(output(1, 5))
        inbox.push(output(2, finish_reason="error", error=ErrorBody(code="internal", message="no")))
        good, bad = await inbox.take(timeout_s=1)
        assert (good.token_ids, good.error) == ([5], None)
        assert bad.error is not None

    run(test)


def test_what_came_before_a_failure_is_taken_first() -> None:
    async def test() -> None:
        inbox = Inbox()
        inbox.push(output(1, 5))
        inbox.fail(WorkerError("worker_lost", "gone"))
        assert [o.token_ids for o in await inbox.take(timeout_s=1)] == [[5]]
        with pytest.raises(WorkerError, match="gone"):
            await inbox.take(timeout_s=1)

    run(test)


def test_a_silent_worker_is_waited_for_as_long_as_allowed() -> None:
    async def test() -> None:
        inbox = Inbox()
        with pytest.raises(TimeoutError):
            await inbox.take(timeout_s=0.01)
        inbox.push(output(1, 5))
        assert len(await inbox.take(timeout_s=1)) == 1

    run(test)
