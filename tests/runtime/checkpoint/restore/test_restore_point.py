"""Restore points that real movers choose: which candidates are skipped, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoint.bucket.copy import copy_checkpoint
from holdfast.checkpoint.mover.client import MoverClient
from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.start_records import newest_started_generation, record_start
from holdfast.core.format.manifest import commit_key
from holdfast.errors import FencedError
from holdfast.events import CheckpointCommitted
from holdfast.policy.saving.destinations import SaveDestinations
from holdfast.wire.term import create_generation
from tests.support.mover_process import TABLE, Mover, Start, Workers, events_until, topology


def _open(mover: Mover, generation: int) -> tuple[MoverClient, RestorePoint]:
    """Open a generation and ask what it begins from, as the agent does."""
    create_generation(mover.store, generation, {})
    client = mover.client(generation)
    return client, client.find_restore_point()


def _begin(mover: Mover, generation: int) -> tuple[Workers, RestorePoint]:
    client, newest = _open(mover, generation)
    topo = topology(generation=generation)
    client.expect(topo, TABLE, newest.step)
    return Workers(client, topo), newest


def _zombie(start: Start, mover: Mover, at: Path, step: int) -> str:
    """Commit a step under generation 1, as a mover does that passed the check of the fence and
    slept before it wrote. The commit is written elsewhere and comes late."""
    at.mkdir()
    elsewhere = start(at=at)
    elsewhere.workers().commit(step)
    (key,) = list_commits(elsewhere.store)
    copy_checkpoint(elsewhere.store, key, mover.store)
    return key


@pytest.mark.parametrize("kept", [1, 3])
def test_a_commit_that_came_after_a_newer_generation_had_begun_earlier_is_passed_over(
    start: Start, tmp_path: Path, kept: int
) -> None:
    mover = start(keep_last=kept)
    workers, _ = _begin(mover, 1)
    workers.commit(5)
    workers, newest = _begin(mover, 2)
    assert newest.step == 5
    workers.commit(6)
    late = _zombie(start, mover, tmp_path / "zombie", 8)
    workers.commit(7)  # and retention does not take the late one for the newest
    assert mover.client(2).drain()
    assert commit_key(2, 7) in list_commits(mover.store)
    _, newest = _open(mover, 3)
    assert (newest.step, newest.generation) == (7, 2)
    assert newest.rejected == ((late, "a later generation began again from an older step"),)


def test_a_generation_that_begins_late_notes_nothing(start: Start) -> None:
    """An older one that was cut off must not give up what a newer one has begun from."""
    mover = start()
    workers, _ = _begin(mover, 1)
    workers.commit(5)
    create_generation(mover.store, 2, {})
    _, newest = _begin(mover, 3)
    assert newest.step == 5
    with pytest.raises(FencedError, match="generation 3"):
        record_start(mover.store, 2, 0)
    _, newest = _open(mover, 4)
    assert newest.step == 5


def test_a_step_that_was_begun_from_is_not_passed_over(start: Start) -> None:
    """A step that only memory held is made durable under the key of the generation that made it.
    That generation is older than the one that began from it, but the step stays a restore point."""
    mover = start()
    workers, _ = _begin(mover, 1)
    workers.compute(4)
    workers.capturers[0].capture(4)
    assert workers.capturers[0].announce(4, {"position": 64}, SaveDestinations(False)) is None
    assert mover.client(1).drain()
    client, newest = _open(mover, 2)
    assert (newest.step, newest.durable) == (4, False)
    client.expect(topology(generation=2), TABLE, 4)
    events_until(client, lambda e: isinstance(e, CheckpointCommitted) and e.step == 4)
    mover.kill()
    for generation in (3, 4):
        _, newest = _begin(start(), generation)
        assert (newest.step, newest.generation, newest.durable) == (4, 1, True)
        assert newest.rejected == ()


def _list_for_a_number(data: bytes) -> bytes:
    assert b"[0,0]" in data
    return data.replace(b"[0,0]", b"[[0]]", 1)


def _brackets(data: bytes) -> bytes:
    return b"[" * 100_000


def _brackets_in_the_header(data: bytes) -> bytes:
    return data[:8] + b"[" * 4088 + data[4096:]


@pytest.mark.parametrize(
    ("kind", "rot", "words"),
    [
        ("data", _list_for_a_number, "not a blob's header"),
        ("data", _brackets_in_the_header, "not a blob's header: nested too deep"),
        ("commits", _brackets, "not a manifest"),
    ],
)
def test_a_newest_state_that_is_rotten_in_a_strange_way_is_passed_over(
    start: Start, kind: str, rot: Callable[[bytes], bytes], words: str
) -> None:
    """JSON with other types in it, or that no parser can follow, counts as corrupt."""
    mover = start(keep_last=3)
    workers, _ = _begin(mover, 1)
    workers.commit(5)
    workers.commit(6)
    mover.kill()
    newest_key = commit_key(1, 6)
    names = mover.store.list("data/0000000001/0000000006-") if kind == "data" else [newest_key]
    path = mover.store.folder / names[0]
    path.write_bytes(rot(path.read_bytes()))
    _, newest = _open(start(), 2)
    assert newest.step == 5
    ((key, reason),) = newest.rejected
    assert key == newest_key
    assert words in reason


def test_a_note_of_a_start_that_cannot_be_read_makes_no_commit_worthless(start: Start) -> None:
    mover = start()
    workers, _ = _begin(mover, 1)
    workers.commit(5)
    _begin(mover, 2)
    (note,) = (mover.store.folder / "starts").glob("*2.json")
    note.write_bytes(b"{")
    mover.kill()
    _, newest = _open(start(), 3)
    assert (newest.step, newest.rejected) == (5, ())


def test_a_strange_file_among_the_notes_is_ignored(start: Start) -> None:
    mover = start()
    workers, _ = _begin(mover, 1)
    workers.commit(5)
    for folder in ("starts", "generations"):
        for name in ("notes.txt", "0000000001.json~", "zzz"):
            (mover.store.folder / folder / name).write_bytes(b"not ours\n")
    mover.kill()
    _, newest = _begin(start(), 2)
    assert (newest.step, newest.rejected) == (5, ())
    assert newest_started_generation(mover.store) == 2
