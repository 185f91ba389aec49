"""Outcomes of saves, also of one that is made a second time by other means. A mover's memory of its
saves does not grow with the run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.mover.service import MoverService
from holdfast.checkpoint.save import save_tracker as module
from holdfast.checkpoint.save.save_tracker import MAX_SAVES_KEPT, SaveTracker
from holdfast.core.format.manifest import commit_key
from holdfast.errors import OutOfSpaceError
from holdfast.events import CheckpointCommitted, CheckpointFailed, SnapshotComplete, SnapshotKept
from holdfast.wire.store.run_store import Buffer, FolderStore
from tests.runtime.checkpoint.save.test_pending_blob import begin
from tests.support.checkpoint_faults.movers import Direct, Ranks
from tests.support.ranks import DEADLINE_S

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


STEPS = 5000
BOUND = 4 * MAX_SAVES_KEPT


def sizes(thing: object) -> dict[str, int]:
    """How many items its collections hold; those that have a bound of their own aside."""
    return {
        name: len(value)
        for name, value in vars(thing).items()
        if isinstance(value, dict | set | list)
        or (isinstance(value, deque) and value.maxlen is None)
    }


def test_thousands_of_saves_are_counted_and_the_newest_are_known() -> None:
    outcomes = SaveTracker(time.monotonic)
    outcomes.is_under_way = lambda save: save == (1, 3)
    for step in range(STEPS):
        outcomes.begin_save((1, step))
        if step % 3 == 1:
            outcomes.record_commit((1, step), commit_key(1, step), 1)
        elif step % 3 == 2:
            outcomes.record_failure((1, step), f"reason {step}")
    assert max(sizes(outcomes).values()) <= BOUND
    counts = outcomes.counts()
    assert (counts["committed"], counts["failed"]) == (1667, 1666)
    assert outcomes.wait_until_ended((1, 4999), 0.0) == (True, None)
    assert outcomes.failure_reason((1, 4997)) == "reason 4997"
    assert 4998 in outcomes.open_steps(1)
    assert 3 in outcomes.open_steps(1), "it is under way, however old"
    ended, reason = outcomes.wait_until_ended((1, 4), DEADLINE_S)  # no caller waits for it
    assert ended
    assert "too long ago" in (reason or "")
    mark = outcomes.events_since(0, 0.0)[1]
    outcomes.record_failure((1, 5), "once more")
    assert outcomes.events_since(mark - 1, 0.0)[1] == mark, "no event again of what had ended"


def test_a_new_generation_s_low_steps_are_newer_than_the_last_one_s() -> None:
    outcomes = SaveTracker(time.monotonic)
    for step in range(STEPS):
        outcomes.record_failure((1, step), "no")
    outcomes.record_commit((2, 1), commit_key(2, 1), 1)
    for step in range(2, MAX_SAVES_KEPT):
        outcomes.record_failure((2, step), "no")
    assert outcomes.wait_until_ended((2, 1), 0.0) == (True, None)
    assert outcomes.wait_until_ended((2, MAX_SAVES_KEPT), 0.0) == (False, None)


def test_a_promotion_of_an_old_step_is_known_until_it_ends() -> None:
    outcomes = SaveTracker(time.monotonic)
    outcomes.restart((1, 7))
    for step in range(STEPS):
        outcomes.record_failure((2, step), "no")
    assert outcomes.wait_until_ended((1, 7), 0.0) == (False, None)
    outcomes.abort((1, 7), "the disk is full")
    assert outcomes.wait_until_ended((1, 7), 0.0) == (True, "the disk is full")


class Full(FolderStore):
    """Takes no blob."""

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        if key.startswith("data/"):
            raise OutOfSpaceError("the disk is full")
        super().create(key, data)


class KeptBack(Direct):
    """Every checkpoint is to stay out of the bucket."""

    def announce_capture(
        self, rank: int, step: int, slot: int, sequence: int, meta: Mapping[str, Any]
    ) -> None:
        self.service.accept_capture(
            self.generation, rank, step, slot, sequence, meta, uploaded=False
        )


def test_a_service_whose_saves_fail_for_thousands_of_steps_keeps_few(tmp_path: Path) -> None:
    service, ranks = begin(Full(tmp_path))
    kept_back = Ranks(KeptBack(service, 1), ranks.topology)
    failing = 3 * MAX_SAVES_KEPT
    for step in range(1, failing):
        assert kept_back.save(step) == "the disk is full"
        assert service.drain(DEADLINE_S)
    for step in range(failing, STEPS):
        service.accept_skip(1, 0, step, "no slot is free")
    saves = service._save_manager
    for thing in (service, service.save_tracker, saves.pending_parts, saves.cleaner):
        assert max(sizes(thing).values()) <= BOUND, sizes(thing)
    assert not service.should_upload(commit_key(1, failing - 1))
    assert service.should_upload(commit_key(1, failing - 1)), "it is asked once"
    assert _status(service)["failed"] == STEPS - 1
    service.close()


def _status(service: MoverService) -> dict[str, Any]:
    return dict(service.status().saves)


def test_a_reason_that_names_the_rank_names_it_once(tmp_path: Path) -> None:
    service, _ = begin(Full(tmp_path))
    reasons: list[str] = []
    service.save_tracker.failure_listeners.append(lambda save, reason: reasons.append(reason))
    service.accept_skip(1, 0, 7, "rank 0 has no arena")
    service.accept_skip(1, 1, 8, "no slot is free")
    service.close()
    assert reasons == ["rank 0 has no arena", "rank 1: no slot is free"]
