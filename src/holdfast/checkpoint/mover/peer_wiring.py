"""A mover's dealings with other machines, put together: tier 1, and the members of a generation.

Each generation (`expect`), and each choice of a starting state (`newest`), comes with a list of
machines. An entry has the name of its node in the topology, its mover's address, its domains and
its room. The run file's own list (staging machines) is kept in addition. A mover that no topology
names serves one node alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.checkpoint.mover.service import MoverService, MoverSettings
from holdfast.checkpoint.peers.client import run_identity
from holdfast.checkpoint.peers.config import Cohort, Peer, PeerSettings
from holdfast.checkpoint.peers.peer_tier import PeerTier
from holdfast.checkpoint.peers.source import PeerMemories
from holdfast.checkpoint.save.save_follower import SAVE_PATH
from holdfast.core.sharding.state_table import StateTable
from holdfast.events import PeerFailed
from holdfast.layout import Topology
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import newest_generation

HASHING_WAIT_S = 2.0
"""Seconds that a request for the inventory waits at most for snapshots being hashed."""


class PeerWiring:
    """The listener, the copies kept for other machines and sent to them, and their memory as a
    source of a restart. Starts with the object."""

    def __init__(
        self,
        settings: PeerSettings,
        mover_settings: MoverSettings,
        service: MoverService,
        store: RunStore,
        secret: Secret,
    ) -> None:
        """Raises AddressError when the address cannot be listened on."""
        self._settings = settings
        run = run_identity(mover_settings.config_hash, mover_settings.dataset_version)
        self.peer_tier = PeerTier(
            settings,
            service.snapshot_store,
            secret,
            run,
            service.save_tracker.emit,
            wait_until_hashed=lambda: service.drain(HASHING_WAIT_S, durable=False),
        )
        self._peer_memories = PeerMemories(
            settings.peers,
            secret,
            lambda: newest_generation(store),
            lambda name, reason: service.save_tracker.emit(PeerFailed(name, reason)),
            run,
        )
        service.commit_protocol.set_leader_access(secret, run, service.steps_being_written)
        self.peer_tier.server.post_handlers[SAVE_PATH] = service.commit_protocol.on_follower_report
        service.snapshot_listeners.append(self.peer_tier.on_snapshot_stored)
        service.memories.append(self._peer_memories)
        service.locate_on_peers = self._peer_memories.locate_blobs

    def parse_cohort(self, topology: Topology, request: Mapping[str, Any]) -> Cohort | None:
        """Return the members of a generation, as `expect` names them; None if it names no machine.
        Raises ValueError, KeyError, TypeError for malformed values."""
        if request.get("machines") is None:
            return None
        return Cohort.build(
            self._settings.machine.name,
            topology.nodes,
            map(Peer.from_json, request["machines"]),
            map(Peer.from_json, request.get("sources") or ()),
            request.get("placement"),
        )

    def search_machines(self, machines: Sequence[Mapping[str, Any]]) -> None:
        """Search only the memory of these machines and of those that the run file names."""
        found = [Peer.from_json(row) for row in machines]
        self._peer_memories.set_peers([p for p in found if p.name != self._settings.machine.name])

    def search_cohort(self, cohort: Cohort | None) -> None:
        """Look for what a generation begins from where it may lie."""
        if cohort is not None:
            self._peer_memories.set_peers([*cohort.peers, *cohort.sources])

    def expect(self, topology: Topology, table: StateTable, cohort: Cohort | None) -> None:
        self.peer_tier.begin_generation(topology, table, cohort)

    @property
    def placement(self) -> dict[str, tuple[str, ...]]:
        return self.peer_tier.sender.placement

    def close(self) -> None:
        self.peer_tier.close()
