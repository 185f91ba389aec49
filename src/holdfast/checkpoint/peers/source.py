"""Another machine's memory as a source of a restore: its inventory, and ranged reads of its blobs.

The inventory is one signed request when the source is opened; after that `has` needs none. A
restoring rank has opened its generation first and names it in the request. So nothing older can be
added to the peer's list afterwards. The reader checks the bytes, as those of every source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from holdfast.checkpoint.memory.snapshot_store import InventoryEntry
from holdfast.checkpoint.peers.client import USE_RESTORE, PeerClient
from holdfast.checkpoint.peers.config import Peer
from holdfast.checkpoint.restore.sources import Scatter
from holdfast.core.format.manifest import PartManifest
from holdfast.core.json_parsing import JsonMessage
from holdfast.core.sharding.state_table import StateTable
from holdfast.errors import HoldfastError
from holdfast.layout import Topology
from holdfast.policy.placement import Machine, shared_risk
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import MissingKeyError, ReadPreference

INVENTORY_TIMEOUT_S = 5.0
"""A peer that does not answer within this time is not restored from."""
PEER_SILENCE_TIMEOUT_S = 20.0
"""A peer that sends nothing for so long is given up; the next source is asked."""
PEER_READS = ReadPreference(4, 8 * 2**20)
MAX_CONCURRENT_INVENTORIES = 64
"""Peers that are asked for their inventory at a time."""


@dataclass(frozen=True)
class BlobHolder(JsonMessage):
    """A peer that has some blobs in its memory."""

    name: str
    address: str  # "host:port"
    keys: list[str]
    run: str = ""  # what is computed (`run_identity`)


class PeerBlobs:
    """Some blobs on one peer's shelf, for a reader that knows which: no inventory needed. Safe to
    use from any thread."""

    reads = PEER_READS

    def __init__(self, holder: BlobHolder, secret: Secret, generation: int) -> None:
        """Raises ValueError for what is no address."""
        self.name, self.address = holder.name, holder.address
        self._keys = frozenset(holder.keys)
        self._client = PeerClient(
            holder.address, secret, generation, holder.run, silence_timeout_s=PEER_SILENCE_TIMEOUT_S
        )

    def has(self, key: str) -> bool:
        return key in self._keys

    def data(self, key: str, start: int, length: int, buffer: memoryview) -> memoryview:
        """Raises MissingKeyError, PeerError, AuthError, FencedError."""
        view = buffer[:length]
        self._client.read_into(key, start, view, USE_RESTORE)
        return view

    def scatter(self, key: str, start: int, outs: Sequence[memoryview]) -> None:
        """Raises as `data` does."""
        self._client.scatter(key, start, outs, USE_RESTORE)

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out`; raises as `data` does."""
        self._client.read_into(key, start, out, USE_RESTORE)

    def close(self) -> None:
        self._client.close()


class PeerSource(PeerBlobs):
    """Snapshots on one peer's shelf. Safe to use from any thread."""

    def __init__(
        self, name: str, address: str, secret: Secret, generation: int, run_id: str = ""
    ) -> None:
        """Ask for the inventory.

        Raises PeerError, AuthError, FencedError, and CorruptError for a manifest that is broken.
        """
        asking = PeerClient(
            address, secret, generation, run_id, silence_timeout_s=INVENTORY_TIMEOUT_S
        )
        try:
            inventory = asking.inventory()
        finally:
            asking.close()
        self._entries: list[InventoryEntry] = []
        keys = []
        for text in inventory.snapshots:
            stored = text.encode()
            part = PartManifest.from_bytes(stored, f"a part manifest of {name}")
            keys.append(part.blob.key)
            self._entries.append(
                InventoryEntry(part.generation, part.step, part.rank, part.blob.size, stored)
            )
        self._plans = inventory.plans
        super().__init__(BlobHolder(name, address, keys, run_id), secret, generation)

    def inventory(self) -> list[InventoryEntry]:
        """Newest step first, as of when this source was opened."""
        return list(self._entries)

    def topology_and_table(self, generation: int) -> tuple[Topology, StateTable]:
        """Raises KeyError for a generation that the peer does not know."""
        plan = self._plans[generation]
        return plan.topology, plan.table


def open_peers(
    peers: Sequence[Peer], secret: Secret, generation: int, run_id: str = ""
) -> tuple[list[PeerSource], list[tuple[str, str]]]:
    """Return a source for every peer that answers, in the order given, and (name, reason) for each
    other peer. The requests run in parallel, so lost peers cost OPEN_SECONDS together."""
    if not peers:
        return [], []

    def ask(peer: Peer) -> PeerSource | str:
        try:
            return PeerSource(f"peer {peer.name}", peer.address, secret, generation, run_id)
        except (HoldfastError, KeyError, TypeError, ValueError) as error:
            return str(error)

    with ThreadPoolExecutor(min(len(peers), MAX_CONCURRENT_INVENTORIES), "ask") as threads:
        answers = list(threads.map(ask, peers))
    found = [answer for answer in answers if isinstance(answer, PeerSource)]
    silent = [
        (peer.name, answer)
        for peer, answer in zip(peers, answers, strict=True)
        if isinstance(answer, str)
    ]
    return found, silent


class PeerMemories:
    """All peers of a mover as one source of snapshots. Each inventory is requested again, with the
    current generation, which fences every peer that answers."""

    name = "peers"
    reads = PEER_READS
    scatter: Scatter | None = None

    def __init__(
        self,
        peers: Sequence[Peer],
        secret: Secret,
        current_generation: Callable[[], int],
        on_unreachable: Callable[[str, str], None] = lambda name, reason: None,
        run_id: str = "",
        own: Machine | None = None,
    ) -> None:
        """`silent(name, reason)` is called for each peer that does not answer. own: the machine of
        this mover, which reads from the nearest peer that has a blob."""
        self._configured_peers, self._secret, self._run_id = tuple(peers), secret, run_id
        self._own = own
        self._peers = self._nearest_first(self._configured_peers)
        self._current_generation, self._on_unreachable = current_generation, on_unreachable
        self._peers_asked: frozenset[Peer] = frozenset()
        self._inventory_lock = threading.Lock()
        self._sources: list[PeerSource] = []

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Use these peers from now on, in addition to those that the run file names. Peers not
        listed are no longer waited for."""
        named = {peer.name: peer for peer in (*self._configured_peers, *peers)}
        self._peers = self._nearest_first(named.values())

    def _nearest_first(self, peers: Iterable[Peer]) -> tuple[Peer, ...]:
        own = self._own
        if own is None:
            return tuple(peers)
        return tuple(sorted(peers, key=lambda peer: -shared_risk(own, peer.machine)))

    def inventory(self) -> list[InventoryEntry]:
        with self._inventory_lock:
            return [line for source in self._reopen_sources() for line in source.inventory()]

    def _reopen_sources(self) -> list[PeerSource]:
        """Ask all peers again; return those that answer."""
        peers = self._peers
        sources, silent = open_peers(peers, self._secret, self._current_generation(), self._run_id)
        old, self._sources = self._sources, sources
        self._peers_asked = frozenset(peers)
        for source in old:
            source.close()
        for name, reason in silent:
            self._on_unreachable(name, reason)
        return sources

    def topology_and_table(self, generation: int) -> tuple[Topology, StateTable]:
        """Raises KeyError for a generation that no peer knows."""
        for source in self._sources:
            with suppress(KeyError):
                return source.topology_and_table(generation)
        raise KeyError(generation)

    def has(self, key: str) -> bool:
        return any(source.has(key) for source in self._sources)

    def data(self, key: str, start: int, length: int, buffer: memoryview) -> memoryview:
        """From the first peer that gives it. Raises what the last one raised."""
        error: HoldfastError = MissingKeyError(f"no peer has {key}")
        for source in self._sources:
            if source.has(key):
                try:
                    return source.data(key, start, length, buffer)
                except HoldfastError as raised:
                    error = raised
        raise error

    def locate_blobs(self, keys: Collection[str]) -> tuple[BlobHolder, ...]:
        """Return which peers have which of these blobs: enough to make a PeerBlobs of each. Peers
        that were not asked before are asked."""
        with self._inventory_lock:
            if not self._peers_asked >= frozenset(self._peers):
                self._reopen_sources()
        holders = (
            BlobHolder(source.name, source.address, sorted(filter(source.has, keys)), self._run_id)
            for source in self._sources
        )
        return tuple(holder for holder in holders if holder.keys)
