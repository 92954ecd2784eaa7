"""Who may try for room, and when: strictly in order but for those that prefill alone holds back."""

from __future__ import annotations

import asyncio

from router.turns import Turns


class Waiter:
    """Somebody in line; `has_turn` once it may try. `leave` ends it."""

    def __init__(self, turns: Turns, size: int) -> None:
        self.turns, self.size, self.has_turn = turns, size, False
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        with self.turns.line(self.size) as self.turn:
            await self.turn.take()
            self.has_turn = True
            await self.leave.wait()

    async def again(self) -> None:
        self.has_turn = False
        await self.turn.take()
        self.has_turn = True


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(Turns()), 10))


async def line_up(turns: Turns, *sizes: int) -> list[Waiter]:
    waiters = []
    for size in sizes:
        waiters.append(Waiter(turns, size))
        await settle()
    return waiters


async def end(*waiters: Waiter) -> None:
    for waiter in waiters:
        waiter.leave.set()
    await asyncio.gather(*(w.task for w in waiters))


def test_one_at_a_time_in_order_however_short():
    async def scenario(turns):
        first, second, third = await line_up(turns, 100, 50, 1)
        assert (first.has_turn, second.has_turn, third.has_turn) == (True, False, False)
        await end(first)
        await settle()
        assert (second.has_turn, third.has_turn) == (True, False)
        await end(second, third)

    run(scenario)


def test_half_as_long_may_pass_one_that_stepped_aside_and_nobody_else():
    async def scenario(turns):
        first, longer, alike, half, short = await line_up(turns, 100, 200, 51, 50, 1)
        first.turn.step_aside()
        await settle()
        # 51 is no half of 100; 50 is, but no half of the 51 that it would pass as well
        assert [w.has_turn for w in (longer, alike, half, short)] == [False, False, False, True]
        await end(short)
        await first.again()
        assert first.has_turn
        await end(first, longer, alike, half)

    run(scenario)


def test_who_stepped_aside_is_next_when_it_tries_again():
    async def scenario(turns):
        first, second, third = await line_up(turns, 100, 10, 10)
        first.turn.step_aside()
        await settle()
        assert second.has_turn
        again = asyncio.create_task(first.again())
        await settle()
        assert not first.has_turn
        await end(second)
        await again
        assert not third.has_turn
        await end(first, third)

    run(scenario)


def test_who_leaves_the_line_while_waiting_holds_nobody_up():
    async def scenario(turns):
        first, second, third = await line_up(turns, 10, 10, 10)
        second.task.cancel()
        await asyncio.gather(second.task, return_exceptions=True)
        first.task.cancel()
        await asyncio.gather(first.task, return_exceptions=True)
        await settle()
        assert third.has_turn
        await end(third)

    run(scenario)
