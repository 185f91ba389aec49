"""The requests of an agent that are open at its coordinator, and how long one may take."""

from __future__ import annotations

import asyncio

from holdfast.policy.membership.election import AgentState, ElectionTimeouts, Role


class OpenRequests:
    """The requests to the coordinator that are open: the newest, and those that it superseded."""

    def __init__(self) -> None:
        self.newest: asyncio.Task[None] | None = None
        self._superseded: set[asyncio.Task[None]] = set()

    def add_superseded(self, request: asyncio.Task[None]) -> None:
        """Keep a request that stays open though a newer one follows."""
        self._superseded.add(request)
        request.add_done_callback(self._superseded.discard)

    def cancel(self) -> None:
        """Cancel the requests that are open."""
        for task in (self.newest, *self._superseded):
            if task is not None:
                task.cancel()
        self.newest = None


def reply_timeout(
    state: AgentState, timeouts: ElectionTimeouts, max_wait_s: float, now: float
) -> float:
    """Return the timeout of a request whose answer is due within `max_wait_s` seconds.

    A follower's timeout leaves time for one more request on a new connection before the
    coordinator counts as silent."""
    silence = timeouts.leader_timeout_s
    if state.role is not Role.FOLLOWER:
        return max_wait_s + silence / 2
    left = state.role_since + silence - now
    return max(silence / 6, min(max_wait_s + silence / 3, left))
