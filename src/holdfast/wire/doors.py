"""Connections to an HTTP listener: whoever proves nothing is cut in time, or makes way.

uvicorn waits without end for the head of a request, so a stranger could hold every descriptor that
an agent may have. Here a connection that has proven nothing is cut after PROOF_SECONDS, and the
oldest of them makes way when there are many. One that has proven itself stays.

A connection that sends what is no HTTP in the midst of an answer would make uvicorn raise, and
asyncio print a traceback: it is cut instead.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import MutableMapping
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast.wire.refusals import CONTROL, HEALTH, Refusals

PROOF_SECONDS = 10.0
"""A connection that has proven nothing for so long is cut."""
STRANGERS = 256
"""Connections without a proof beyond these make way, once they are GRACE_SECONDS old: a crowd of
our own that comes at once needs less to prove itself."""
GRACE_SECONDS = 1.0
BATCH = 64
QUEUE = 2048
"""Connections that the kernel keeps until they are accepted."""
HEAD_BYTES = 16 << 10
"""A request's head at most; ours have less than one KiB."""
_KEY = "holdfast.connection"


class Doors:
    """Who is connected to one listener without having proven anything, the oldest first."""

    def __init__(
        self,
        listener: str = CONTROL,
        refusals: Refusals | None = None,
        *,
        patience: float = PROOF_SECONDS,
        strangers: int = STRANGERS,
    ) -> None:
        self.listener = listener
        self.refusals = refusals or Refusals()
        self.patience = patience
        self.open = listener == HEALTH
        """Whether a whole request is enough, and nobody proves anything."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = soft // 4 if soft > 0 else 1 << 20  # an agent has two listeners
        self.batch = max(1, min(BATCH, self._most // 4))
        """Connections accepted at a time, so that those too many are gone before the next ones."""
        self._strangers = min(strangers, self._most)
        self._waiting: dict[_Connection, float] = {}

    @property
    def protocol(self) -> Any:
        """For uvicorn: called with the arguments of `H11Protocol`."""
        return partial(_Connection, self)

    def enter(self, connection: _Connection) -> None:
        now = connection.loop.time()
        self._waiting[connection] = now
        if len(self._waiting) > self._strangers:
            oldest, since = next(iter(self._waiting.items()))
            if len(self._waiting) > self._most or now - since > GRACE_SECONDS:
                self.refusals.count(self.listener, "crowded")
                oldest.cut()

    def leave(self, connection: _Connection) -> None:
        self._waiting.pop(connection, None)


class _Connection(H11Protocol):
    """One connection; its requests' scopes lead back to it."""

    def __init__(self, doors: Doors, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._doors = doors
        self._timer: asyncio.TimerHandle | None = None
        self._application: Any = self.app
        self.app = self._ask

    async def _ask(self, scope: Any, receive: Any, send: Any) -> None:
        if self._doors.open and self._timer is not None:  # it may ask again
            self._timer.cancel()
            self._timer = self.loop.call_later(self._doors.patience, self._late)
        await self._application({**scope, _KEY: self}, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._doors.patience, self._late)
        self._doors.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settled()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception:  # what h11 or uvicorn make of nonsense must not reach the log
            self._doors.refusals.count(self._doors.listener, "not ours")
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._doors.refusals.count(self._doors.listener, "not ours")
        super().send_400_response(msg)

    def proven(self) -> None:
        self._settled()

    def cut(self) -> None:
        self._settled()
        self.transport.abort()

    def _late(self) -> None:
        self._doors.refusals.count(self._doors.listener, "slow")
        self.cut()

    def _settled(self) -> None:
        self._doors.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def proven(scope: MutableMapping[str, Any]) -> None:
    """The connection of a request that carried a proof may stay."""
    connection = scope.get(_KEY)
    if connection is not None:
        connection.proven()
