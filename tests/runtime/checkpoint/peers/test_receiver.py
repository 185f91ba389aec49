"""Contents of a receiver through any order of offers, refusals and generations.

The newest step that was complete here stays until a newer one is complete. Partial offers, corrupt
bytes and abandoned steps in between do not change that. Every byte in the store is what its
manifest says.
"""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace

import pytest
from xxhash import xxh3_128_hexdigest

from holdfast.checkpoint.memory.snapshot_store import SnapshotStore
from holdfast.checkpoint.peers.client import PeerClient
from holdfast.checkpoint.peers.config import PeerSettings
from holdfast.checkpoint.peers.messages import Offer
from holdfast.checkpoint.peers.receiver import OFFER_HELD, SnapshotReceiver, _adjacent_extents
from holdfast.core.format.manifest import Extent, PartManifest
from holdfast.errors import CorruptError, HoldfastError
from tests.support.peer_nodes import SECRET, TABLE, offer_of, topology
from tests.support.peer_tier_process import Node

Step = tuple[int, int]  # generation, step


class Play:
    """One owner, and a keeper that it offers to in a seeded order."""

    def __init__(self, seed: int, room: int) -> None:
        self.random = random.Random(seed)
        boot = {"secret": SECRET.hex(), "extent_bytes": 8192, "settings": PeerSettings().to_json()}
        self.owner = Node(boot)
        self.shelf = SnapshotStore()
        self.keeper = SnapshotReceiver(self.shelf, SECRET, room)
        self.complete: list[Step] = []  # in the order in which they became so
        self.held: dict[Step, set[int]] = {}

    def close(self) -> None:
        self.keeper.close()
        self.owner.peers.close()

    def generation(self, number: int) -> None:
        world = self.random.randint(1, 3)
        topo = topology(number, dp_shard=world)
        self.owner.begin(topo.to_json(), [spec.to_json() for spec in TABLE])
        step = 10 * number
        for _ in range(self.random.randint(1, 5)):
            step += self.random.randint(1, 3)
            self.step(number, step, world)

    def step(self, generation: int, step: int, world: int) -> None:
        assert self.owner.put(step, list(range(world))) == []
        ranks = list(range(world))
        self.random.shuffle(ranks)
        for rank in ranks:
            fate = self.random.random()
            if fate < 0.2:
                break  # the step is superseded, or its sender is lost
            if fate < 0.35:
                self.owner.flip(generation, step, rank)
            self.offer(generation, step, rank, world)
            self.check()

    def offer(self, generation: int, step: int, rank: int, world: int) -> None:
        assert self.owner.topology is not None
        part = self.owner.shelf.get(generation, step, rank).sealed_manifest
        body = offer_of(part, self.owner.peers.address, self.owner.topology, range(world))
        try:
            state = self.keeper.answer_offer(generation, Offer.from_json(body)).state
        except HoldfastError:
            return
        assert state == OFFER_HELD
        self.held.setdefault((generation, step), set()).add(rank)
        if len(self.held[generation, step]) == world:
            self.complete.append((generation, step))

    def check(self) -> None:
        here: dict[Step, set[int]] = {}
        for line in self.shelf.inventory():
            part = PartManifest.from_bytes(line.sealed_manifest, "test")
            here.setdefault((line.generation, line.step), set()).add(line.rank)
            for extent in part.blob.extents():
                out = memoryview(bytearray(extent.length))
                self.shelf.read_into(line.generation, line.step, line.rank, extent.offset, out)
                assert xxh3_128_hexdigest(out) == extent.xxh3
        if self.complete:
            newest = self.complete[-1]
            assert here.get(newest) == self.held[newest], (newest, here)


@pytest.mark.parametrize("seed", range(12))
def test_the_newest_complete_step_stays_until_a_newer_one_is(seed: int) -> None:
    with closing(Play(seed, room=1 << 28)) as play:
        for number in range(1, 5):
            play.generation(number)
        assert play.complete
        # Older generations were dropped with the first complete step of a newer one.
        newest = play.complete[-1][0]
        assert all(line.generation >= newest for line in play.shelf.inventory())


def test_a_keeper_never_takes_more_than_its_room() -> None:
    size = sum(spec.nbytes for spec in TABLE)
    with closing(Play(3, room=3 * size)) as play:
        for number in range(1, 6):
            play.complete.clear()  # with so little room an older generation goes for a newer one
            play.generation(number)
            status = play.keeper.status()
            assert status["used"] <= status["room"]


def test_extents_are_asked_for_together_up_to_a_gap_and_to_the_room() -> None:
    extents = [Extent(start, 10, "") for start in (0, 10, 20, 40, 50)]
    cut = {room: _adjacent_extents(extents, 0, room) for room in (0, 19, 20, 1000)}
    assert {room: len(run) for room, run in cut.items()} == {0: 1, 19: 1, 20: 2, 1000: 3}
    assert _adjacent_extents(extents, 3, 1000) == extents[3:]


def test_a_copy_over_a_quick_link_takes_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = PeerClient.read_into

    def counted(self: PeerClient, key: str, start: int, out: memoryview, use: str = "") -> None:
        asked.append(len(out))
        read(self, key, start, out, use)

    monkeypatch.setattr(PeerClient, "read_into", counted)
    play = Play(1, room=1 << 28)
    # no request takes long
    play.keeper = SnapshotReceiver(play.shelf, SECRET, 1 << 28, clock=lambda: 0.0)
    try:
        topo = topology(1)
        play.owner.begin(topo.to_json(), [spec.to_json() for spec in TABLE])
        assert play.owner.put(1, [0]) == []
        play.offer(1, 1, 0, 1)
        play.check()
        blob = play.owner.shelf.get(1, 1, 0).part.blob
        assert sum(asked) == blob.size
        assert len(asked) <= 2 + len(blob.checksums) // 3
    finally:
        play.close()


def test_a_manifest_that_lists_other_tensors_than_its_blob_is_refused_at_any_step() -> None:
    """Also after one of the same rank whose header was right, and what comes after it is kept."""
    with closing(Play(1, room=1 << 28)) as play:
        plan = topology(1)
        play.owner.begin(plan.to_json(), [spec.to_json() for spec in TABLE])
        for step, wrong in ((1, True), (2, False), (3, True), (4, False)):
            assert play.owner.put(step, [0]) == []
            part = play.owner.shelf.get(1, step, 0).part
            if wrong:
                part = replace(part, tensors=part.tensors[1:])
            body = offer_of(part.to_bytes(), play.owner.peers.address, plan)
            if wrong:
                with pytest.raises(CorruptError, match="does not list what its part does"):
                    play.keeper.answer_offer(1, Offer.from_json(body))
            else:
                assert play.keeper.answer_offer(1, Offer.from_json(body)).state == OFFER_HELD
        assert {line.step for line in play.shelf.inventory()} == {2, 4}
