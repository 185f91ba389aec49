"""The connections of an agent to its coordinator, and how long a request there may take."""

from __future__ import annotations

import asyncio

from holdfast.policy.membership.election import AgentState, ElectionTimeouts, Role
from holdfast.wire.http.async_client import AsyncClient
from holdfast.wire.secret import Secret


class CoordinatorClients:
    """Two connections to the coordinator: one heartbeat is open on each at most."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._pairs: dict[str, tuple[AsyncClient, AsyncClient]] = {}

    def find_free(self, address: str) -> AsyncClient:
        """Return a connection to this address that no request uses, or the first one."""
        pair = self._connect(address)
        return next((talker for talker in pair if not talker.is_busy), pair[0])

    def _connect(self, address: str) -> tuple[AsyncClient, AsyncClient]:
        if address not in self._pairs:
            self.close()
            self._pairs = {
                address: (AsyncClient(address, self._secret), AsyncClient(address, self._secret))
            }
        return self._pairs[address]

    def close(self) -> None:
        for pair in self._pairs.values():
            for talker in pair:
                talker.close()


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
