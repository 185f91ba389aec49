"""A run on several nodes, as its movers see it. Each node has a real mover, all over one run store.
The capturers of all ranks are in this process."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.checkpoint.peers.source import PeerBlobs
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.checkpoint.restore.sources import (
    BlobSource,
    FallbackReader,
    MappedSource,
    StoreSource,
)
from holdfast.events import Event
from holdfast.layout import Layout, Topology, place_layout
from holdfast.policy.placement import Machine
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation
from tests.support.mover_process import TABLE, Mover, Rank, Start, assert_holds
from tests.support.peer_nodes import SECRET
from tests.support.ranks import wait_until


class Nodes:
    """Movers by the name of their node. What an agent tells its mover is said here to each."""

    def __init__(self, start: Start, *names: str, mover: Mapping[str, Any] | None = None) -> None:
        """mover: settings of every mover."""
        self._start, self._mover = start, dict(mover or {})
        self.movers: dict[str, Mover] = {}
        self.peers: dict[str, Peer] = {}
        self.ranks: dict[int, Rank] = {}
        self._marks: dict[str, int] = {}
        self._heard: dict[str, list[Event]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> Mover:
        told = PeerSettings(Machine(name), room=1 << 28)
        mover = self._start(secret=SECRET, peers=told.to_json(), **self._mover)
        address = str(mover.client(1).status()["peers"]["address"])
        self.movers[name], self.peers[name] = mover, Peer(Machine(name), address)
        self._marks[name] = 0
        self._heard.setdefault(name, [])
        return mover

    def kill(self, name: str) -> None:
        """Kill a node with its workers."""
        self.hear()
        self.movers.pop(name).kill()
        del self.peers[name]

    def topology(self, generation: int, nodes: Sequence[str], **degrees: int) -> Topology:
        return place_layout(Layout(**degrees), generation, tuple(nodes))

    def open(self, generation: int) -> None:
        create_generation(FolderStore(self.folder), generation, {})

    @property
    def store(self) -> FolderStore:
        found = next(iter(self.movers.values())).store
        assert isinstance(found, FolderStore)
        return found

    @property
    def folder(self) -> Path:
        return self.store.folder

    def choose(self, by: str, generation: int, among: Collection[str]) -> RestorePoint:
        """Open the generation, and have a node's mover choose what it begins from."""
        self.open(generation)
        client = self.movers[by].client(generation)
        return client.find_restore_point(machines=[self.peers[name] for name in among])

    def begin(
        self, topo: Topology, newest: RestorePoint | None = None, start: int | None = None
    ) -> None:
        """Tell every node's mover that the generation begins, and have each rank make an arena."""
        names = list(dict.fromkeys(topo.nodes))
        step = start if newest is None else newest.step
        for name in names:
            self.movers[name].client(topo.generation).expect(
                topo,
                TABLE,
                step,
                [self.peers[n] for n in names],
                [],
                newest.placement if newest else None,
                newest,
            )

    def equip(self, topo: Topology, slots: int = 3, only: Iterable[int] | None = None) -> None:
        for rank in range(topo.world_size) if only is None else only:
            client = self.movers[topo.nodes[rank]].client(topo.generation)
            self.ranks[rank] = Rank(client, topo, rank, slots=slots)

    def capture(self, step: int, durable: bool = False, only: Iterable[int] | None = None) -> None:
        for rank in sorted(self.ranks) if only is None else only:
            self.ranks[rank].compute(step)
            self.ranks[rank].hand_over(step, durable)

    def hear(self) -> dict[str, list[Event]]:
        """All events so far, by node."""
        for name, mover in self.movers.items():
            events, self._marks[name] = mover.client(0).events(self._marks[name])
            self._heard[name] += events
        return self._heard

    def heard(self, kind: type[Event], step: int | None = None) -> list[tuple[str, Event]]:
        return [
            (name, event)
            for name, events in self.hear().items()
            for event in events
            if isinstance(event, kind) and step in (None, event.step)
        ]

    def held(self, name: str) -> list[tuple[int, int]]:
        """Return (step, rank) of each snapshot that a node's mover keeps for other nodes."""
        found = self.movers[name].client(0).status()["peers"]["keeps"]["snapshots"]
        return [(step, rank) for _, step, rank in found]

    def until_kept(self, step: int, by: str) -> str:
        """The machine that has taken a node's copies of a step."""

        def kept() -> str | None:
            sends = self.movers[by].client(0).status()["peers"]["sends"]
            return next((name for name, line in sends.items() if line["kept"][1] == step), None)

        return str(wait_until(kept))

    def restored(self, on: str, generation: int, key: str, step: int) -> set[str]:
        """Read the complete state as a worker on a node does; return which sources were read."""
        holdings = self.movers[on].client(generation).holdings(key)
        mapped = MappedSource(holdings.slots)
        peers = [PeerBlobs(p, SECRET, generation) for p in holdings.peers]
        sources: list[BlobSource] = [mapped, *peers, StoreSource(FolderStore(self.folder))]
        found = Checkpoint(FallbackReader(sources), holdings.commit)
        assert_holds(found, step, TABLE)
        for peer in peers:
            peer.close()
        mapped.close()
        return {name for name, count in found.read_stats.bytes_by_source.items() if count}
