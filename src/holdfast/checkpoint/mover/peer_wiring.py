"""A mover's dealings with other machines, put together: tier 1, and the members of a generation.

Each generation (`expect`), and each choice of a starting state (`newest`), comes with a list of
machines. An entry has the name of its node in the topology, its mover's address, its domains and
its room. The run file's own list (staging machines) is kept in addition. A mover that no topology
names serves one node alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.checkpoint.mover.service import Service, Settings
from holdfast.checkpoint.peers.client import identity
from holdfast.checkpoint.peers.config import Cohort, Peer, PeerSettings
from holdfast.checkpoint.peers.peer_tier import Peers
from holdfast.checkpoint.peers.source import PeerMemories
from holdfast.checkpoint.save.commit_protocol import SAVE
from holdfast.core.sharding.state_table import StateTable
from holdfast.events import PeerFailed
from holdfast.layout import Topology
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import newest_generation

SETTLE_SECONDS = 2.0
"""Seconds that a request for the inventory waits at most for snapshots being hashed."""


class Neighbours:
    """The listener, the copies kept for other machines and sent to them, and their memory as a
    source of a restart. Starts with the object."""

    def __init__(
        self, settings: PeerSettings, about: Settings, service: Service, store: RunStore,
        secret: Secret,
    ) -> None:  # fmt: skip
        """Raises AddressError when the address cannot be listened on."""
        self._settings = settings
        run = identity(about.config_hash, about.dataset_version)
        self.peers = Peers(
            settings, service.shelf, secret, run, service.outcomes.add,
            settled=lambda: service.drain(SETTLE_SECONDS, durable=False),
        )  # fmt: skip
        self._memories = PeerMemories(
            settings.peers, secret, lambda: newest_generation(store),
            lambda name, reason: service.outcomes.add(PeerFailed(name, reason)), run,
        )  # fmt: skip
        service.together.reach(secret, run, service.writing)
        self.peers.server.verbs[SAVE] = service.together.told
        service.shelved.append(self.peers.shelved)
        service.memories.append(self._memories)
        service.elsewhere = self._memories.holders

    def cohort(self, topology: Topology, said: Mapping[str, Any]) -> Cohort | None:
        """Return the members of a generation, as `expect` names them; None if it names no machine.
        Raises ValueError, KeyError, TypeError for malformed values."""
        if said.get("machines") is None:
            return None
        return Cohort.of(
            self._settings.machine.name, topology.nodes, map(Peer.from_json, said["machines"]),
            map(Peer.from_json, said.get("sources") or ()), said.get("placement"),
        )  # fmt: skip

    def look_at(self, machines: Sequence[Mapping[str, Any]]) -> None:
        """Search only the memory of these machines and of those that the run file names."""
        found = [Peer.from_json(row) for row in machines]
        self._memories.follow([p for p in found if p.name != self._settings.machine.name])

    def follow(self, cohort: Cohort | None) -> None:
        """Look for what a generation begins from where it may lie."""
        if cohort is not None:
            self._memories.follow([*cohort.peers, *cohort.sources])

    def expect(self, topology: Topology, table: StateTable, cohort: Cohort | None) -> None:
        self.peers.expect(topology, table, cohort)

    @property
    def placement(self) -> dict[str, tuple[str, ...]]:
        return self.peers.copies.placement

    def close(self) -> None:
        self.peers.close()
