"""Outcomes of saves, also of one that is made a second time by other means."""

from __future__ import annotations

import threading
import time

import pytest

from holdfast.checkpoint.save import save_tracker as module
from holdfast.checkpoint.save.save_tracker import SaveTracker
from holdfast.events import CheckpointCommitted, CheckpointFailed, SnapshotComplete, SnapshotKept

SAVE = (1, 20)


def test_who_waits_for_a_save_that_is_made_again_hears_of_the_second_end() -> None:
    outcomes = SaveTracker(time.monotonic)
    outcomes.begin_save(SAVE)
    outcomes.record_failure(SAVE, "generation 2 has begun")
    outcomes.restart(SAVE)
    assert outcomes.wait_until_ended(SAVE, 0.0) == (False, None)
    outcomes.record_failure(SAVE, "the first attempt, late")
    assert outcomes.wait_until_ended(SAVE, 0.0) == (False, None)
    outcomes.record_commit(SAVE, "commits/key", 1)
    assert outcomes.wait_until_ended(SAVE, 0.0) == (True, None)
    kinds = [kind for kind, _ in outcomes.events_since(0, 0.0)[0]]
    assert kinds == [CheckpointFailed.kind, CheckpointCommitted.kind]


def test_a_second_attempt_that_fails_is_an_end_too() -> None:
    outcomes = SaveTracker(time.monotonic)
    outcomes.restart(SAVE)
    outcomes.abort(SAVE, "the disk is full")
    assert outcomes.wait_until_ended(SAVE, 0.0) == (True, "the disk is full")


def test_what_happens_together_is_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting reader gets the copy together with the snapshot. A reader that must not wait gets
    the events so far. At the end of a generation no reader waits."""
    monkeypatch.setattr(module, "EVENT_BATCH_WAIT_S", 3600.0)
    outcomes = SaveTracker(time.monotonic)
    heard: list[list[str]] = []

    def wait() -> None:
        heard.append([kind for kind, _ in outcomes.events_since(0, 60.0)[0]])

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    outcomes.emit(SnapshotComplete(1, 0.1, step=3))
    assert len(outcomes.events_since(0, 0.0)[0]) == 1, "at once"
    waiting.join(0.1)
    outcomes.emit(SnapshotKept("stage", 1, 0.1, step=3))
    assert waiting.is_alive()
    while waiting.is_alive():  # a thread woken before it waits will still wait
        outcomes.wake_event_waiters()
        waiting.join(0.1)
    assert heard == [[SnapshotComplete.kind, SnapshotKept.kind]]
