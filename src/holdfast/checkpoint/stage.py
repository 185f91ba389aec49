"""A staging machine: a mover alone, on a machine that stays, keeping what others send it.

It has no run folder, no workers and no agent, and writes nothing to disk: what it keeps is a copy,
and goes with its process. (ACUTE, IEEE Access 2024, calls such a machine its staging node.)
"""

from __future__ import annotations

import socket
from typing import Any

from holdfast.checkpoint.peer_settings import PeerSettings
from holdfast.checkpoint.peers import Peers
from holdfast.checkpoint.snapshots import Shelf
from holdfast.wire.secret import Secret


class Stage:
    """Listens from the start until `close`."""

    def __init__(self, bound: socket.socket, secret: Secret, room: int) -> None:
        """`room`: bytes of memory that copies may take, two slots a rank."""
        self.shelf = Shelf()
        self._peers = Peers(
            PeerSettings(room=room), self.shelf, secret, None, lambda event: None, bound
        )

    @property
    def address(self) -> str:
        return self._peers.address

    def status(self) -> dict[str, Any]:
        return self._peers.status()

    def close(self) -> None:
        self._peers.close()
