"""A node shows what the agents of other nodes write."""

from __future__ import annotations

from pathlib import Path

from holdfast.cli.run_follower import RunFollower
from holdfast.events import Record, StepDone, StopRequested
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_store import FolderStore
from tests.support.ranks import wait_until


def test_steps_of_other_nodes_are_shown_once_and_our_own_not_again(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    other, own = JournalWriter(store, "rank0", 1), JournalWriter(store, "agent.b", 1)
    other.emit(StepDone(1.0, 1, 1.0, 1.0, 1.0, step=1))
    other.flush()
    shown: list[Record] = []
    follower = RunFollower(store, shown.append, interval_s=0.01)
    follower.observe(own.emit(StopRequested("SIGTERM", step=1)))
    own.flush()
    follower.start()
    other.emit(StepDone(1.0, 1, 1.0, 1.0, 1.0, step=2))
    other.flush()
    wait_until(lambda: shown, 30.0, "a step of the other node")
    other.emit(StepDone(1.0, 1, 1.0, 1.0, 1.0, step=3))
    other.flush()
    follower.close()
    assert [(r.writer, r.event.step) for r in shown] == [("rank0", 2), ("rank0", 3)]
