"""Tier 1 of one mover, put together: the listener, the copies it keeps and those it sends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from holdfast.checkpoint.memory.snapshot_store import Snapshot, SnapshotStore
from holdfast.checkpoint.peers.config import Cohort, PeerSettings
from holdfast.checkpoint.peers.rate_limiter import TokenBucket
from holdfast.checkpoint.peers.receiver import SnapshotReceiver
from holdfast.checkpoint.peers.sender import SnapshotSender
from holdfast.checkpoint.peers.server import PeerServer
from holdfast.core.json_parsing import JsonObject
from holdfast.core.sharding.state_table import StateTable
from holdfast.events import Event, RequestsRefused
from holdfast.layout import Topology
from holdfast.wire.http.refusals import Refusals
from holdfast.wire.http.sockets import address_of, bind_listener
from holdfast.wire.secret import Secret


class PeerTier:
    """Starts with the object; `close` ends the listener and what is being sent."""

    def __init__(
        self,
        settings: PeerSettings,
        snapshot_store: SnapshotStore,
        secret: Secret,
        run_id: str | None,
        emit: Callable[[Event], None],
        bound_socket: socket.socket | None = None,
        wait_until_hashed: Callable[[], object] = lambda: None,
        refusals: Refusals | None = None,
    ) -> None:
        """`run_id`: what is computed (`identity`), None for a machine that only keeps.
        `bound_socket`: a socket to listen on instead of the one that the settings name.
        `wait_until_hashed`: as in PeerServer. `refusals`: where requests that are refused are
        counted; told by `emit` unless given.

        Raises AddressError when that cannot be listened on.
        """
        self.settings = settings
        listening = bound_socket or bind_listener(
            settings.interface, settings.port, "checkpoint.peer_port"
        )
        stop = threading.Event()
        self._stop = stop
        self.address = settings.advertised_address(address_of(listening))
        self.refusals = refusals or Refusals(emit)
        self.receiver = SnapshotReceiver(snapshot_store, secret, settings.room)
        self.server = PeerServer(
            listening,
            secret,
            snapshot_store,
            self.receiver,
            TokenBucket(settings.bytes_per_second, time.monotonic, stop.wait),
            run_id,
            wait_until_hashed=wait_until_hashed,
            refusals=self.refusals,
        )
        self.sender = SnapshotSender(
            settings, snapshot_store, secret, self.address, run_id or "", emit
        )
        self.server.start()

    def begin_generation(
        self, topology: Topology, table: StateTable, cohort: Cohort | None = None
    ) -> None:
        """This node's agent has begun a generation: older ones are fenced from now on. `cohort`:
        who takes part, where that is known; copies go to those, and to whom the run file names.
        Said again of the same generation, the newest list counts."""
        self.server.advance_generation(topology.generation)
        if cohort is not None:
            self.sender.set_peers(cohort.peers, cohort.previous_placement)
        self.sender.begin_generation(topology, table)

    def on_snapshot_stored(self, snapshot: Snapshot, ignore_step_rule: bool = False) -> None:
        """A rank of this node has one more snapshot on the shelf. ignore_step_rule: whatever the
        rule by steps says."""
        part = snapshot.part
        self.sender.on_snapshot_stored(part.generation, part.step, part.rank, ignore_step_rule)

    def status(self) -> JsonObject:
        return {
            "address": self.address,
            "generation": self.server.newest_generation,
            "sent": self.server.sent_bytes,
            "keeps": self.receiver.status(),
            "sends": self.sender.status(),
        }

    def close(self) -> None:
        self._stop.set()
        self.sender.close()
        self.receiver.close()
        self.server.close()
        self.refusals.close()


class StagingNode(PeerTier):
    """A mover alone, on a machine that stays, keeping what other movers send it: from the start
    until `close`. It has no run folder, no workers and no agent, and writes nothing to disk. Its
    copies end with its process. (ACUTE, IEEE Access 2024, calls such a machine its staging node.)
    """

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
        settings, refusals = PeerSettings(room=max_bytes), Refusals(on_refused)
        super().__init__(
            settings,
            self.snapshot_store,
            secret,
            None,
            lambda event: None,
            bound_socket,
            refusals=refusals,
        )
