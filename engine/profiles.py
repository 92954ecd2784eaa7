"""Profiles: the leader's side of POST /profile, which asks rank 0 for a kernel bill of its next steps.

POST /profile {"steps": 20, "timeout_s": 60}   ->   200 and the report of engine.step_profiler, JSON
                                                    400 a wrong request, 409 one is under way, 504 too few steps ran
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.plan import LeaderMessage, Profile, Profiled

if TYPE_CHECKING:
    from engine.loop import EngineLoop


class ProfileRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """steps: whole decode steps wanted in the bill.   timeout_s: how long to wait for so many to run."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 20
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0


class ProfileError(Exception):
    """There is no bill; `status` is the answer's, the text says why."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Profiles:
    """At most one profile at a time. Lives on the engine loop's thread."""

    def __init__(self, send: Callable[[LeaderMessage], None]) -> None:
        self._send = send
        self._number = 0
        self._waiting: concurrent.futures.Future[bytes] | None = None

    def start(self, steps: int) -> concurrent.futures.Future[bytes]:
        """Return what will hold the report or a ProfileError. Raises ProfileError if one is under way."""
        if self._waiting is not None:
            raise ProfileError(409, "a profile is under way; wait for it")
        self._number += 1
        self._waiting = concurrent.futures.Future()
        self._waiting.set_running_or_notify_cancel()  # nobody else may end it
        self._send(Profile(number=self._number, steps=steps))
        return self._waiting

    def on_profiled(self, message: Profiled) -> None:
        """Take in an answer; one to a profile that was given up is nobody's."""
        if message.number != self._number or self._waiting is None:
            return
        waiting, self._waiting = self._waiting, None
        if message.error:
            waiting.set_exception(ProfileError(504, message.error))
        else:
            waiting.set_result(message.report)

    def give_up(self, reason: str, *, of: concurrent.futures.Future[bytes] | None = None) -> None:
        """End the profile under way, for whoever waits and at the rank; `of`: only if it is this one."""
        if self._waiting is not None and of in (None, self._waiting):
            waiting, self._waiting = self._waiting, None
            self._send(Profile(number=self._number, steps=0))
            waiting.set_exception(ProfileError(504, reason))


def profile_route(loop: EngineLoop[Any]) -> Route:
    """Return the route; see the top of this file."""

    async def profile(request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await request.body() or b"{}", type=ProfileRequest)
            report = await asyncio.wrap_future(loop.call(lambda _: loop.profiles.start(wanted.steps)))
            timer = asyncio.get_running_loop().call_later(
                wanted.timeout_s,
                lambda: loop.call(
                    lambda _: loop.profiles.give_up(
                        f"fewer than {wanted.steps} steps in {wanted.timeout_s:g} s; profile while requests run",
                        of=report,
                    )
                ),
            )
            try:
                return Response(await asyncio.wrap_future(report), media_type="application/json")
            finally:
                timer.cancel()
        except msgspec.MsgspecError as error:
            return Response(f"/profile: {error}", status_code=400)
        except ProfileError as error:
            return Response(f"/profile: {error}", status_code=error.status)

    return Route("/profile", profile, methods=["POST"])
