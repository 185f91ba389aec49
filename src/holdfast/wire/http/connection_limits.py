"""Limits connections to an HTTP listener: closes those that prove nothing in time, or in a crowd.

A stranger that sends nothing, or little by little, could hold every descriptor that an agent may
have. A connection that has proven nothing is cut after PROOF_SECONDS, and the oldest of them makes
way when there are many. One that has proven itself stays.
"""

from __future__ import annotations

import resource
from typing import Protocol

from holdfast.wire.http.refusals import CONTROL, HEALTH, Refusals

PROOF_SECONDS = 10.0
"""A connection that has proven nothing for so long is cut."""
STRANGERS = 256
"""Connections without a proof that may stay. Any beyond these are closed once they are
GRACE_SECONDS old. A crowd of our own that comes at once needs less to prove itself."""
GRACE_SECONDS = 1.0
BATCH = 64
QUEUE = 2048
"""Connections that the kernel keeps until they are accepted."""


class Cuttable(Protocol):
    def cut(self) -> None: ...


class Doors:
    """One listener's connections that have proven nothing, the oldest first."""

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
        """True if a complete request is enough and no proof is required."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = soft // 4 if soft > 0 else 1 << 20  # an agent has two listeners
        self.batch = max(1, min(BATCH, self._most // 4))
        """Connections accepted at a time, so that those too many are closed before the next
        ones."""
        self._strangers = min(strangers, self._most)
        self._waiting: dict[Cuttable, float] = {}

    def enter(self, connection: Cuttable, now: float) -> None:
        self._waiting[connection] = now
        if len(self._waiting) > self._strangers:
            oldest, since = next(iter(self._waiting.items()))
            if len(self._waiting) > self._most or now - since > GRACE_SECONDS:
                self.refusals.count(self.listener, "crowded")
                oldest.cut()

    def leave(self, connection: Cuttable) -> None:
        self._waiting.pop(connection, None)
