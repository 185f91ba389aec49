"""A mover's dealings with other machines, put together: tier 1, and the members of a generation.

Each generation (`expect`), and each choice of a starting state (`newest`), comes with a list of
machines. An entry has the name of its node in the topology, its mover's address, its domains and
its room. The run file's own list (staging machines) is kept in addition. A mover that no topology
names serves one node alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.checkpoint.mover.messages import ExpectRequest
from holdfast.checkpoint.mover.service import MoverService, MoverSettings
from holdfast.checkpoint.peers.client import run_identity
from holdfast.checkpoint.peers.config import Cohort, Peer, PeerSettings
from holdfast.checkpoint.peers.peer_tier import PeerTier
from holdfast.checkpoint.peers.source import PeerMemories
from holdfast.checkpoint.save.commit_protocol import SAVE_PATH, SaveReport
from holdfast.events import PeerFailed
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
            settings.machine,
        )
        service.commit_protocol.set_leader_access(secret, run, service.steps_being_written)
        on_report = service.commit_protocol.on_follower_report
        self.peer_tier.server.post_handlers[SAVE_PATH] = lambda generation, body: on_report(
            generation, SaveReport.from_json(body)
        ).to_json()
        service.snapshot_listeners.append(self.peer_tier.on_snapshot_stored)
        service.memories.append(self._peer_memories)
        service.locate_on_peers = self._peer_memories.locate_blobs

    def cohort_of(self, request: ExpectRequest) -> Cohort | None:
        """Return the members of a generation; None if the request names no machine. Raises
        ValueError if the first rank's machine is not among them."""
        if request.machines is None:
            return None
        return Cohort.build(
            self._settings.machine.name,
            request.topology.nodes,
            request.machines,
            request.sources or (),
            request.placement,
        )

    def search_machines(self, machines: Iterable[Peer]) -> None:
        """Search only the memory of these machines and of those that the run file names."""
        own_name = self._settings.machine.name
        self._peer_memories.set_peers([peer for peer in machines if peer.name != own_name])

    def search_cohort(self, cohort: Cohort | None) -> None:
        """Look for what a generation begins from where it may lie."""
        if cohort is not None:
            self._peer_memories.set_peers([*cohort.peers, *cohort.sources])

    @property
    def placement(self) -> dict[str, tuple[str, ...]]:
        return self.peer_tier.sender.placement

    def close(self) -> None:
        self.peer_tier.close()
