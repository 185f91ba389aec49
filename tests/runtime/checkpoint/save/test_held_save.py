"""A run store that takes no more: old checkpoints make room, and the last step's save waits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.checkpoint.mover.service import MoverService, MoverSettings
from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.checkpoint.save import held_save
from holdfast.config.loading.load import load_config
from holdfast.core.format.manifest import commit_key
from holdfast.errors import FencedError, HoldfastError, OutOfSpaceError, RunFolderError, UserError
from holdfast.launch.run.resume_checks import bring_back_fallback
from holdfast.wire.store.run_store import Buffer, FolderStore
from holdfast.wire.term import create_generation
from tests.support.checkpoint_faults import states
from tests.support.checkpoint_faults.movers import Direct, Ranks
from tests.support.checkpoint_faults.verdict import compare
from tests.support.mover_process import newest_verified
from tests.support.ranks import DEADLINE_S, wait_until

LAST = 9
FULL = OutOfSpaceError("the disk is full", where="run", remedy="free some space")
READ_ONLY = RunFolderError("read-only", where="run", remedy="mount it for writing")


class Faulty(FolderStore):
    """A disk with room for `blobs` blobs, whose creation of keys that begin with `stuck` fails."""

    def __init__(self, folder: Path, blobs: int = 100) -> None:
        super().__init__(folder)
        self.blobs, self.stuck = blobs, "nothing"
        self.error: HoldfastError = FULL

    def create(self, key: str, data: Buffer | Iterable[Buffer]) -> None:
        if key.startswith(self.stuck):
            raise self.error
        if key.startswith("data/") and len(self.list("data/")) >= self.blobs:
            raise FULL
        super().create(key, data)


def begin(store: FolderStore, keep_last: int = 3, fallback: str = "") -> tuple[MoverService, Ranks]:
    settings = MoverSettings(
        "campaign", "c", "d", keep_last, extent_bytes=512, last_step=LAST, fallback=fallback
    )
    service, topo = MoverService(store, settings), states.topology(1, 1)
    create_generation(store, 1, {})
    service.expect(1, topo, states.TABLE)
    return service, Ranks(Direct(service, 1), topo)


def save(ranks: Ranks, step: int) -> str | None:
    made = [ranks.capture(rank, step) for rank in range(ranks.topology.world_size)]
    for rank, (slot, head) in enumerate(made):
        ranks.announce(rank, step, slot, head)
    return ranks.client.wait_until_committed(step, DEADLINE_S)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_save, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(held_save, "QUOTA_RETRY_INTERVAL_S", 0.01)


@pytest.mark.parametrize(("room", "keep", "kept"), [(3, 3, [4, 3, 2]), (2, 1, [4]), (1, 1, [1])])
def test_what_retention_would_remove_makes_room_but_never_the_newest(
    tmp_path: Path, room: int, keep: int, kept: list[int]
) -> None:
    """room: checkpoints that fit. With room for one alone, the save of the second one fails."""
    ranks_of_one = states.topology(1, 1).world_size
    store = Faulty(tmp_path, room * ranks_of_one)
    service, ranks = begin(store, keep)
    reasons = [save(ranks, step) for step in (1, 2, 3, 4)]
    wait_until(lambda: [step_of(key) for key in list_commits(store)] == kept, what="retention")
    assert reasons[1:] == [None if room > 1 else str(FULL)] * 3
    service.close()


@pytest.mark.parametrize("stuck", ["data/", "parts/", "commits/"])
@pytest.mark.parametrize("error", [FULL, READ_ONLY])
def test_the_last_save_waits_until_the_disk_takes_it(
    tmp_path: Path, error: UserError, stuck: str
) -> None:
    store = Faulty(tmp_path)
    service, ranks = begin(store)
    assert save(ranks, LAST - 1) is None
    store.stuck, store.error = stuck, error
    made = [ranks.capture(rank, LAST) for rank in range(ranks.topology.world_size)]
    for rank, (slot, head) in enumerate(made):
        ranks.announce(rank, LAST, slot, head)
    ended = service.save_tracker.wait_until_ended
    wait_until(lambda: ended((1, LAST), 0.0)[1] is not None, what="the save waits")
    assert ended((1, LAST), 0.0) == (False, str(error))
    assert all(ranks.arenas[0].is_held(slot) for slot, _ in made[:1] if stuck != "commits/")
    said = [e for kind, e in service.save_tracker.events_since(0, 0.0)[0] if kind == "save_waiting"]
    assert len(said) == 1  # not another one within a minute
    assert (said[0]["reason"], said[0]["folder"]) == (error.message, "run")
    store.stuck = "nothing"
    assert ranks.client.wait_until_committed(LAST, DEADLINE_S) is None
    assert ended((1, LAST), 0.0) == (True, None)
    compare(newest_verified(store), states.topology(2, 2))
    service.close()


@pytest.mark.parametrize("named", ["by the key", "by a link while it waits"])
def test_a_second_place_takes_the_last_save_and_the_next_start_brings_it_back(
    tmp_path: Path, named: str
) -> None:
    store, second = Faulty(tmp_path / "run"), tmp_path / "second"
    service, ranks = begin(store, fallback=str(second) if named == "by the key" else "")
    assert save(ranks, LAST - 1) is None
    store.stuck, store.error = "data/", READ_ONLY
    made = [ranks.capture(rank, LAST) for rank in range(ranks.topology.world_size)]
    for rank, (slot, head) in enumerate(made):
        ranks.announce(rank, LAST, slot, head)
    if named != "by the key":
        (tmp_path / "run" / "fallback").symlink_to(second)
    assert ranks.client.wait_until_committed(LAST, DEADLINE_S) is None
    compare(newest_verified(FolderStore(second)), states.topology(2, 2))
    (done,) = [
        e
        for k, e in service.save_tracker.events_since(0, 0.0)[0]
        if e["step"] == LAST and k == "checkpoint_committed"
    ]
    assert done["place"] == str(second)
    service.close()
    store.stuck, said = "nothing", list[str]()
    config = load_config(None, [f"checkpoint.fallback={second}"]).config
    bring_back_fallback(store, config, "c", False, said.append)
    assert said == [f"step {LAST} was brought back from {second}"]
    compare(newest_verified(store), states.topology(2, 2))


def test_a_newer_generation_and_the_end_of_the_mover_end_the_wait(tmp_path: Path) -> None:
    store = Faulty(tmp_path)
    store.stuck = "data/"
    service, ranks = begin(store)
    slot, head = ranks.capture(0, LAST)
    ranks.announce(0, LAST, slot, head)
    tracker = service.save_tracker
    wait_until(lambda: tracker.wait_until_ended((1, LAST), 0.0)[1] is not None, what="it waits")
    create_generation(store, 2, {})
    service.expect(2, states.topology(1, 2), states.TABLE)
    assert tracker.wait_until_ended((1, LAST), DEADLINE_S)[0]
    newer = Ranks(Direct(service, 2), states.topology(1, 2))
    slot, head = newer.capture(0, LAST)
    newer.announce(0, LAST, slot, head)
    wait_until(lambda: tracker.wait_until_ended((2, LAST), 0.0)[1] is not None, what="it waits")
    service.close()  # it returns, and the save has failed
    assert tracker.failure_reason((2, LAST)) == str(FULL)


@pytest.mark.parametrize("when", ["before its write", "after its write"])
def test_a_newer_generation_finishes_the_save_of_the_state_that_it_continues(
    tmp_path: Path, when: str
) -> None:
    """A worker joins after a step whose checkpoint is under way. It is no failed save."""
    store = Faulty(tmp_path)
    service, ranks = begin(store)
    store.stuck = "data/" if when == "before its write" else "commits/"
    store.error = FencedError("generation 2 has begun; generation 1 may not write")
    made = [ranks.capture(rank, 3) for rank in range(ranks.topology.world_size)]
    for rank, (slot, head) in enumerate(made):
        ranks.announce(rank, 3, slot, head)
    assert service.drain(DEADLINE_S)
    create_generation(store, 2, {})
    store.stuck = "nothing"
    service.expect(2, states.topology(2, 2), states.TABLE, start_step=3)
    tracker = service.save_tracker
    assert tracker.wait_until_ended((1, 3), DEADLINE_S) == (True, None)
    assert list_commits(store) == [commit_key(1, 3)]
    compare(newest_verified(store), states.topology(2, 2))
    assert "checkpoint_failed" not in [kind for kind, _ in tracker.events_since(0, 0.0)[0]]
    service.close()
