"""A mover dies, or hangs, while a rank trains: that costs saves, and nothing else. Real movers,
killed and stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture, SkippedCapture
from holdfast.checkpoint.capture.reconnecting_capturer import ReconnectingCapturer
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.format.manifest import commit_key
from holdfast.events import CheckpointFailed
from holdfast.layout import Topology
from holdfast.policy.saving.destinations import SaveDestinations
from tests.support.mover_process import (
    TABLE,
    RankState,
    Start,
    assert_holds,
    events_until,
    topology,
)
from tests.support.processes import stop
from tests.support.ranks import wait_until


class Trainer(RankState):
    """One rank that trains: what it captures, and the losses that were reported to it."""

    def __init__(self, client: MoverClient, topo: Topology, rank: int = 0) -> None:
        super().__init__(topo, rank)
        self.skipped: list[SkippedCapture] = []

        def make() -> Capturer:
            return Capturer(client, topo, TABLE, rank, self.tensors, run="test", slots=2)

        self.saver = ReconnectingCapturer(make, make, self.skipped.append)

    def take(self, step: int, durable: bool = False) -> bool:
        """A step, and its snapshot if there is room for it."""
        self.compute(step)
        self.saver.fence()
        if not self.saver.has_free_slot() or not isinstance(
            self.saver.capture(step), CompletedCapture
        ):
            return False
        assert self.saver.announce(step, {"position": step}, SaveDestinations(durable)) is None
        return True

    @property
    def lost(self) -> list[int]:
        return [one.step for one in self.skipped]


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    made: list[Trainer] = []
    yield made
    for trainer in made:
        trainer.saver.close()


def test_a_mover_that_dies_costs_the_save_under_way_and_another_one_takes_over(
    start: Start, trainers: list[Trainer]
) -> None:
    mover, topo = start(), topology()
    trainer = Trainer(mover.begin(topo), topo)
    trainers.append(trainer)
    assert trainer.take(1, durable=True)
    assert trainer.saver.wait_until_committed(1, 60) is None
    mover.kill()
    assert trainer.take(2), "nobody knows it yet"
    wait_until(lambda: trainer.lost == [2])
    assert trainer.saver.is_away
    assert not trainer.take(3)
    assert isinstance(trainer.saver.capture(3), SkippedCapture), "at once: nobody is asked"
    other = start(socket=mover.socket, secret=mover.secret)
    assert not trainer.take(4), "it has not been told of the generation"
    other.begin(topo)
    wait_until(trainer.saver.has_free_slot)
    assert trainer.take(5, durable=True)
    assert trainer.saver.wait_until_committed(5, 60) is None
    assert_holds(Checkpoint.open(other.store, commit_key(1, 5)), 5)
    assert_holds(Checkpoint.open(other.store, commit_key(1, 1)), 1)
    assert trainer.lost == [2]


def test_training_goes_on_beside_a_mover_that_stands_still(
    start: Start, trainers: list[Trainer]
) -> None:
    """Both slots soon wait for the mover. It wakes up, takes them, and continues."""
    mover, topo = start(), topology()
    trainer = Trainer(mover.begin(topo), topo)
    trainers.append(trainer)
    assert trainer.take(1)
    assert trainer.saver.flush(60)
    stop(mover.process.pid)
    try:
        for step in range(2, 20):
            trainer.take(step)
        assert not trainer.saver.has_free_slot()
    finally:
        os.kill(mover.process.pid, signal.SIGCONT)
    wait_until(trainer.saver.has_free_slot)
    assert trainer.take(20, durable=True)
    assert trainer.saver.wait_until_committed(20, 60) is None
    assert_holds(Checkpoint.open(mover.store, commit_key(1, 20)), 20)


def test_a_mover_that_is_killed_while_no_slot_is_free_is_missed(
    start: Start, trainers: list[Trainer]
) -> None:
    """Nothing is handed over any more, because nothing can be captured: it is looked for."""
    mover, topo = start(), topology()
    trainer = Trainer(mover.begin(topo), topo)
    trainers.append(trainer)
    stop(mover.process.pid)
    assert trainer.take(1)
    assert trainer.take(2)
    assert not trainer.saver.has_free_slot()
    mover.kill()
    start(socket=mover.socket, secret=mover.secret).begin(topo)
    wait_until(trainer.saver.has_free_slot)
    assert trainer.take(3)
    assert trainer.saver.flush(60)
    assert set(trainer.lost) == {1, 2}


def test_what_a_dead_mover_was_saving_has_failed_and_who_waits_for_it_hears_so(
    start: Start, trainers: list[Trainer]
) -> None:
    """One of two ranks had handed step 2 over."""
    mover, topo = start(), topology(2)
    client = mover.begin(topo)
    trainers += [Trainer(client, topo, rank) for rank in range(2)]
    for trainer in trainers:
        assert trainer.take(1, durable=True)
    assert trainers[0].saver.wait_until_committed(1, 60) is None
    assert trainers[0].take(2, durable=True)
    assert trainers[0].saver.flush(60)
    mover.kill()
    other = start(socket=mover.socket, secret=mover.secret).begin(topo)
    reason = trainers[0].saver.wait_until_committed(2, 60)
    assert reason is not None
    assert "ended" in reason
    events_until(other, lambda event: isinstance(event, CheckpointFailed) and event.step == 2)
    assert trainers[0].saver.wait_until_committed(1, 60) is None, "it was committed, and is"
    assert trainers[1].take(3), "its mover has changed, and it does not know yet"
    wait_until(lambda: trainers[1].lost == [3])
    wait_until(lambda: all(trainer.saver.has_free_slot() for trainer in trainers))
    for trainer in trainers:
        assert trainer.take(4, durable=True)
    assert trainers[1].saver.wait_until_committed(4, 60) is None
