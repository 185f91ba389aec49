"""A mover dies, or hangs, while a rank trains: that costs saves, and nothing else. Real movers,
killed and stopped, and none that has memory."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from holdfast.checkpoint.capture.capturer import Capturer, CompletedCapture, SkippedCapture
from holdfast.checkpoint.capture.no_room_capturer import ROOM_CHECK_INTERVAL_S, NoRoomCapturer
from holdfast.checkpoint.capture.reconnecting_capturer import ReconnectingCapturer
from holdfast.checkpoint.memory.arena import Arena
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.mover.protocol import error_from_json, error_to_json
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.core.format.manifest import commit_key
from holdfast.elastic.worker.checkpointer import make_unless_no_room
from holdfast.errors import HoldfastError, NoRoomError
from holdfast.events import CheckpointFailed, GenerationStarted, Record, SettingIgnored
from holdfast.layout import Topology
from holdfast.machine import limits
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.report.history.progress import RunProgress
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


def test_an_arena_without_room_is_told_over_the_movers_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 1 << 16)
    with pytest.raises(NoRoomError, match="no memory for an arena") as found:
        Arena.create("a", 2, 1 << 20)
    assert isinstance(error_from_json(error_to_json(found.value)), NoRoomError)


@pytest.mark.parametrize(
    "error", [NoRoomError("no memory for an arena"), MemoryError(), OSError(errno.ENOMEM, "no")]
)
def test_training_continues_without_snapshots_and_says_so(error: Exception) -> None:
    def make() -> object:
        raise error

    said: list[str] = []
    capturer = make_unless_no_room(make, lambda key, reason: said.append(f"{key}: {reason}"))
    assert isinstance(capturer, NoRoomCapturer)
    assert not capturer.has_free_slot()
    assert capturer.begin(3).step == 3
    (sentence,) = said
    assert "training continues without snapshots" in sentence


def test_another_fault_is_no_lack_of_room() -> None:
    def make() -> object:
        raise HoldfastError("fenced")

    with pytest.raises(HoldfastError, match="fenced"):
        make_unless_no_room(make, pytest.fail)


def test_once_there_is_room_an_arena_takes_its_place() -> None:
    now = [0.0]
    none = NoRoomCapturer("no memory", lambda: now[0])

    class Roomy(NoRoomCapturer):
        def has_free_slot(self) -> bool:
            return True

    made: list[Roomy] = []

    def make() -> Roomy:
        made.append(Roomy("has room", lambda: 0.0))
        return made[-1]

    with closing(ReconnectingCapturer(lambda: none, make, pytest.fail)) as capturer:
        assert not capturer.has_free_slot()
        now[0] = ROOM_CHECK_INTERVAL_S
        wait_until(capturer.has_free_slot, what="an arena")
        assert len(made) == 1


def test_every_rank_reports_it_and_the_user_reads_it_once() -> None:
    progress = RunProgress(10)
    start = GenerationStarted({"nodes": ["a", "a"]}, "start")
    progress.observe(Record(1, "agent", 0, 1.0, start))
    lines = [
        line.text
        for rank in (0, 1)
        for line in progress.observe(
            Record(1, f"rank{rank}", 0, 2.0, SettingIgnored("checkpoint", f"{rank} bytes left"))
        )
    ]
    assert lines == ["checkpoint is not honoured here: 0 bytes left"]
