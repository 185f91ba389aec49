"""Limits connections to an HTTP listener: closes those that prove nothing in time, or in a crowd.

A stranger that sends nothing, or little by little, could hold every descriptor that an agent may
have. A connection that has proven nothing is cut after PROOF_SECONDS, and the oldest of them makes
way when there are many. One that has proven itself stays.
"""

from __future__ import annotations

import resource
from typing import Protocol

from holdfast.wire.http.refusals import CONTROL, HEALTH, Refusals

PROOF_TIMEOUT_S = 10.0
"""A connection that has proven nothing for so long is cut."""
MAX_UNPROVEN_CONNECTIONS = 256
"""Connections without a proof that may stay. Any beyond these are closed once they are
GRACE_SECONDS old. A crowd of our own that comes at once needs less to prove itself."""
UNPROVEN_GRACE_S = 1.0
MAX_ACCEPT_BATCH = 64
LISTEN_BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""


class Abortable(Protocol):
    def cut(self) -> None: ...


class ConnectionLimiter:
    """One listener's connections that have proven nothing, the oldest first."""

    def __init__(
        self,
        listener: str = CONTROL,
        refusals: Refusals | None = None,
        *,
        proof_timeout_s: float = PROOF_TIMEOUT_S,
        max_unproven: int = MAX_UNPROVEN_CONNECTIONS,
    ) -> None:
        self.listener = listener
        self.refusals = refusals or Refusals()
        self.proof_timeout_s = proof_timeout_s
        self.needs_no_proof = listener == HEALTH
        """True if a complete request is enough and no proof is required."""
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_unproven_hard = soft // 4 if soft > 0 else 1 << 20  # an agent has two listeners
        self.accept_batch = max(1, min(MAX_ACCEPT_BATCH, self._max_unproven_hard // 4))
        """Connections accepted at a time, so that those too many are closed before the next
        ones."""
        self._max_unproven = min(max_unproven, self._max_unproven_hard)
        self._unproven: dict[Abortable, float] = {}

    def add(self, connection: Abortable, now: float) -> None:
        self._unproven[connection] = now
        if len(self._unproven) > self._max_unproven:
            oldest, since = next(iter(self._unproven.items()))
            if len(self._unproven) > self._max_unproven_hard or now - since > UNPROVEN_GRACE_S:
                self.refusals.count(self.listener, "crowded")
                oldest.cut()

    def remove(self, connection: Abortable) -> None:
        self._unproven.pop(connection, None)
