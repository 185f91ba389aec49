"""Two replicas on two nodes, each with its own mover: both keep both halves of the state in memory,
no byte travels between them, and either may be lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.capture.capturer import Captured, Capturer
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.peers.config import Peer, PeerSettings
from holdfast.checkpoint.peers.source import open_peers
from holdfast.core.sharding.state_table import local_boxes
from holdfast.layout import Layout, Topology, place
from holdfast.policy.mirrors import mirror_of
from holdfast.policy.placement import Machine
from holdfast.wire.term import open_generation
from tests.support.mover_process import DTYPE, TABLE, Mover, assert_holds, state
from tests.support.peer_nodes import SECRET, restored, until

NODES = ("left", "right")
RUN = "c-d"  # what the movers of these tests compute


def topology(generation: int = 1) -> Topology:
    return place(Layout(dp_replicate=2), generation, NODES)


class Side:
    """One node: a mover, and a worker with a whole replica, which captures its own share and that
    of the rank that it mirrors."""

    def __init__(self, folder: Path, number: int, *peers: Peer, mirror: float) -> None:
        told = PeerSettings(Machine(NODES[number]), peers, room=1 << 26, mirror_seconds=mirror)
        self.mover = Mover(folder, SECRET, told.to_json())
        self.number = number
        self.client = MoverClient(self.mover.socket, SECRET, 1)
        self.address = str(self.client.status()["peers"]["address"])

    def begin(self) -> None:
        self.client.expect(topology(), TABLE)
        boxes = local_boxes(topology(), TABLE, self.number)
        dtypes = {spec.name: DTYPE[spec.dtype] for spec in TABLE}
        self.tensors = {b.name: torch.zeros(b.lengths, dtype=dtypes[b.name]) for b in boxes}
        self.own = self._capturer(None)
        (mirrored,) = [r for r in range(2) if mirror_of(topology(), {}, r) == self.number]
        self.mirror = self._capturer(mirrored)

    def _capturer(self, part: int | None) -> Capturer:
        return Capturer(
            self.client, topology(), TABLE, self.number, self.tensors, run="test", slots=3,
            part=part,
        )  # fmt: skip

    def compute(self, step: int) -> None:
        for name, full in state(step, TABLE).items():
            self.tensors[name].copy_(full)

    def capture(self, step: int, *capturers: Capturer) -> None:
        for capturer in capturers or (self.mirror, self.own):
            assert isinstance(capturer.capture(step, wait=60), Captured)
            assert capturer.announce(step, {"position": step}, durable=False) is None

    def kept(self, peer: str) -> list[int]:
        return list(self.client.status()["peers"]["sends"][peer]["kept"])

    def keeps(self) -> dict[str, int]:
        found: dict[str, int] = self.client.status()["peers"]["keeps"]
        return found


@pytest.fixture
def sides(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    """The right one offers its parts to the left one."""
    mirror = getattr(request, "param", 300.0)  # a slow machine may take its time to hand over
    left = Side(tmp_path, 0, mirror=mirror)
    right = Side(tmp_path, 1, Peer(Machine("left"), left.address), mirror=mirror)
    open_generation(left.mover.store, 1, {})
    left.begin()
    right.begin()
    yield left, right
    right.mover.close()
    left.mover.close()


def test_both_nodes_have_all_and_nothing_travels(sides: tuple[Side, Side]) -> None:
    left, right = sides
    for step in (1, 2):
        for side in sides:
            side.compute(step)
            side.capture(step)
        until(lambda n=step: right.kept("left") == [1, n])
    keeps = left.keeps()
    assert (keeps["pulled"], keeps["used"], keeps["apart"]) == (0, 0, 2)
    right.mover.kill()
    _restores(left, 2)


@pytest.mark.parametrize("sides", [1.0], indirect=True)
def test_what_a_mirror_lacks_is_sent(sides: tuple[Side, Side]) -> None:
    """It skipped that capture: then the part is pulled, and is there all the same."""
    left, right = sides
    for side in sides:
        side.compute(1)
        side.capture(1)
    until(lambda: right.kept("left") == [1, 1])
    before = left.keeps()["pulled"]
    for side in sides:
        side.compute(2)
    left.capture(2, left.own)
    right.capture(2)
    until(lambda: right.kept("left") == [1, 2])
    assert left.keeps()["pulled"] > before
    right.mover.kill()
    _restores(left, 2)


def test_replicas_that_differ_are_found_out(sides: tuple[Side, Side]) -> None:
    left, right = sides
    for side in sides:
        side.compute(1)
    for tensor in left.tensors.values():
        tensor.view(-1)[:] += 1
    left.capture(1)
    right.capture(1)
    failed = until(lambda: [e for e in right.client.events(0)[0] if e.kind == "peer_failed"])
    assert "the replicas are not the same any more" in failed[0].reason


def _restores(side: Side, step: int) -> None:
    """A new node reads the whole state from this one's memory alone."""
    (source,), silent = open_peers([Peer(Machine("there"), side.address)], SECRET, 2, RUN)
    assert not silent
    assert_holds(restored(source, 1, step), step, TABLE)
    source.close()
