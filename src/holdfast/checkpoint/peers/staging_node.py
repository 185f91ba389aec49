"""A staging machine: a mover alone, on a machine that stays, keeping what other movers send it.

It has no run folder, no workers and no agent, and writes nothing to disk. It keeps only copies,
which end with its process. (ACUTE, IEEE Access 2024, calls such a machine its staging node.)
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from holdfast.checkpoint.memory.snapshot_store import SnapshotStore
from holdfast.checkpoint.peers.config import PeerSettings
from holdfast.checkpoint.peers.peer_tier import PeerTier
from holdfast.core.json_parsing import JsonObject
from holdfast.events import RequestsRefused
from holdfast.wire.http.refusals import Refusals
from holdfast.wire.secret import Secret


class StagingNode:
    """Listens from the start until `close`."""

    def __init__(
        self,
        bound_socket: socket.socket,
        secret: Secret,
        max_bytes: int,
        on_refused: Callable[[RequestsRefused], None] = lambda event: None,
    ) -> None:
        """`max_bytes`: bytes of memory that copies may take, two slots a rank. `on_refused` is
        called with requests that were refused, at most once a minute, on a thread of its own."""
        self.snapshot_store = SnapshotStore()
        self._peer_tier = PeerTier(
            PeerSettings(room=max_bytes),
            self.snapshot_store,
            secret,
            None,
            lambda event: None,
            bound_socket,
            refusals=Refusals(on_refused),
        )

    @property
    def address(self) -> str:
        return self._peer_tier.address

    def status(self) -> JsonObject:
        return self._peer_tier.status()

    def close(self) -> None:
        self._peer_tier.close()
