"""Tier 1 of one mover, put together: the listener, the copies it keeps and those it sends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from holdfast.checkpoint.memory.snapshot_store import Shelf, Snapshot
from holdfast.checkpoint.peers.config import Cohort, PeerSettings
from holdfast.checkpoint.peers.rate_limiter import Budget
from holdfast.checkpoint.peers.receiver import Keeper
from holdfast.checkpoint.peers.sender import Copies
from holdfast.checkpoint.peers.server import PeerServer
from holdfast.core.sharding.state_table import StateTable
from holdfast.events import Event
from holdfast.layout import Topology
from holdfast.wire.http.refusals import Refusals
from holdfast.wire.http.sockets import address_of, bind
from holdfast.wire.secret import Secret


class Peers:
    """Starts with the object; `close` ends the listener and what is being sent."""

    def __init__(
        self,
        settings: PeerSettings,
        shelf: Shelf,
        secret: Secret,
        run: str | None,
        add: Callable[[Event], None],
        bound: socket.socket | None = None,
        settled: Callable[[], object] = lambda: None,
        refusals: Refusals | None = None,
    ) -> None:
        """`run`: what is computed (`identity`), None for a machine that only keeps. `bound`: a
        socket to listen on instead of the one that the settings name. `settled`: as in PeerServer.
        `refusals`: where requests that are refused are counted; told by `add` unless given.

        Raises AddressError when that cannot be listened on.
        """
        self.settings = settings
        listening = bound or bind(settings.interface, settings.port, "checkpoint.peer_port")
        stop = threading.Event()
        self._stop = stop
        self.address = settings.advertised(address_of(listening))
        self.refusals = refusals or Refusals(add)
        self.keeper = Keeper(shelf, secret, settings.room)
        self.server = PeerServer(
            listening, secret, shelf, self.keeper,
            Budget(settings.bytes_per_second, time.monotonic, stop.wait), run, settled=settled,
            refusals=self.refusals,
        )  # fmt: skip
        self.copies = Copies(settings, shelf, secret, self.address, run or "", add)
        self.server.start()

    def expect(self, topology: Topology, table: StateTable, cohort: Cohort | None = None) -> None:
        """This node's agent has begun a generation: older ones are fenced from now on. `cohort`:
        who takes part, where that is known; copies go to those, and to whom the run file names.
        Said again of the same generation, the newest list counts."""
        self.server.advance(topology.generation)
        if cohort is not None:
            self.copies.follow(cohort.peers, cohort.before)
        self.copies.expect(topology, table)

    def shelved(self, snapshot: Snapshot, surely: bool = False) -> None:
        """A rank of this node has one more snapshot on the shelf. surely: whatever the rule by
        steps says."""
        part = snapshot.part
        self.copies.shelved(part.generation, part.step, part.rank, surely)

    def status(self) -> dict[str, Any]:
        return {
            "address": self.address, "generation": self.server.newest, "sent": self.server.sent,
            "keeps": self.keeper.status(), "sends": self.copies.status(),
        }  # fmt: skip

    def close(self) -> None:
        self._stop.set()
        self.copies.close()
        self.keeper.close()
        self.server.close()
        self.refusals.close()
