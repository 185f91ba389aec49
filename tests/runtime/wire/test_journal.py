from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from holdfast.errors import OutOfSpaceError, RunFolderError
from holdfast.events import RunStarted, RunStopped, StepDone, WorkerReady
from holdfast.wire.journal import (
    JournalTail,
    JournalWriter,
    follow_journal,
    parse_segment,
    read_contents,
    read_journal,
    segment_key,
)
from holdfast.wire.store.run_store import Buffer, FolderStore
from tests.support.memory_store import MemoryStore


def _step(step: int, loss: float = 1.0) -> StepDone:
    return StepDone(loss, 10, 0.5, 1e-3, 0.1, step=step)


def test_segments_merge_by_generation_step_writer_sequence() -> None:
    store = MemoryStore()
    rank1, rank0 = JournalWriter(store, "rank1", 1), JournalWriter(store, "rank0", 1)
    agent2 = JournalWriter(store, "agent", 2)
    agent2.emit(RunStarted("r", "h", "d", True))
    for step in (1, 2):
        rank1.emit(WorkerReady(1, 0.1, step=step))
        rank0.emit(_step(step))
        rank0.emit(WorkerReady(0, 0.1, step=step))
    for writer in (agent2, rank1, rank0):
        writer.flush()
    found = [(r.generation, r.event.step, r.writer, r.event.kind) for r in read_journal(store)]
    assert found == [
        (1, 1, "rank0", "step_done"),
        (1, 1, "rank0", "worker_ready"),
        (1, 1, "rank1", "worker_ready"),
        (1, 2, "rank0", "step_done"),
        (1, 2, "rank0", "worker_ready"),
        (1, 2, "rank1", "worker_ready"),
        (2, 0, "agent", "run_started"),
    ]


def test_records_come_back_as_they_were_emitted() -> None:
    store = MemoryStore()
    writer = JournalWriter(store, "rank0", 3, clock=lambda: 12.5)
    emitted = [writer.emit(_step(7, float("inf"))), writer.emit(RunStopped("SIGINT", step=7))]
    assert read_journal(store) == []
    writer.flush()
    assert read_journal(store) == emitted
    assert [r.time for r in emitted] == [12.5, 12.5]


def test_a_torn_last_line_never_happened_and_writing_goes_on() -> None:
    store = MemoryStore()
    first = JournalWriter(store, "agent", 1)
    for step in (1, 2, 3):
        first.emit(_step(step))
    first.flush()
    key = segment_key(1, "agent")
    whole = store.get(key)
    store.delete(key)
    store.append(key, whole[:-40])  # a power loss tore the third line
    assert [r.event.step for r in read_journal(store)] == [1, 2]
    second = JournalWriter(store, "agent", 1)
    second.emit(_step(4))
    second.flush(sync=True)
    records = read_journal(store)
    assert [r.event.step for r in records] == [1, 2, 4]
    assert len({r.sequence for r in records}) == 3


def test_kinds_and_keys_of_a_newer_version_are_left_out() -> None:
    store = MemoryStore()
    line = {
        "v": 9,
        "kind": "aliens_landed",
        "generation": 1,
        "writer": "a",
        "sequence": 0,
        "time": 1.0,
        "event": {"step": 1},
    }
    known = line | {"kind": "run_stopped", "event": {"step": 2, "reason": "x", "mood": "good"}}
    store.append(segment_key(1, "a"), "".join(json.dumps(v) + "\n" for v in (line, known)).encode())
    (record,) = read_journal(store)
    assert record.event == RunStopped("x", step=2)


@pytest.mark.parametrize(
    "bad",
    [b"nonsense\n", b'{"kind": "run_stopped"}\n', b"[1]\n", b'{"v":1}}\n', b"[" * 100_000 + b"\n"],
    ids=["text", "no_fields", "list", "too_much", "too_deep"],
)
def test_a_broken_line_is_named_and_hides_no_other(bad: bytes) -> None:
    store = MemoryStore()
    writer = JournalWriter(store, "agent", 1)
    writer.emit(_step(1))
    writer.flush()
    store.append(segment_key(1, "agent"), bad)
    writer.emit(_step(2))
    writer.flush()
    found = read_contents(store)
    assert found.unreadable == (f"{segment_key(1, 'agent')}, line 2",)
    assert [record.event.step for record in found.records] == [1, 2]
    assert [record.event.step for record in JournalTail(store).read_new()] == [1, 2]


class FullStore(MemoryStore):
    full = False

    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        if self.full:
            raise OutOfSpaceError("the disk is full")
        super().append(key, data, sync)


def test_a_failed_flush_loses_nothing() -> None:
    store = FullStore()
    writer = JournalWriter(store, "agent", 1)
    store.full = True
    writer.emit(_step(1))
    with pytest.raises(OutOfSpaceError):
        writer.flush()
    writer.emit(_step(2))
    assert writer.has_pending
    store.full = False
    writer.flush()
    assert [r.event.step for r in read_journal(store)] == [1, 2]
    assert not writer.has_pending


class SlowStore(MemoryStore):
    """Writes only when it is let, and cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.let = threading.Event(), threading.Event()

    def get(self, key: str) -> bytes:
        raise RunFolderError("the disk is sick")

    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        self.asked.set()
        assert self.let.wait(120)
        super().append(key, data, sync)


def test_a_slow_or_sick_disk_holds_up_no_event() -> None:
    """The agent's event loop emits while a thread of it stores."""
    store = SlowStore()
    writer = JournalWriter(store, "agent", 1, is_new_generation=True)
    writer.emit(_step(1))
    storing = threading.Thread(target=writer.flush)
    storing.start()
    assert store.asked.wait(120)
    emitting = threading.Thread(target=writer.emit, args=(_step(2),))
    emitting.start()
    emitting.join(60)
    waited = emitting.is_alive()
    store.let.set()
    storing.join(120)
    assert not waited
    assert writer.has_pending
    writer.flush()
    key = segment_key(1, "agent")
    found = parse_segment(key, MemoryStore.get(store, key)).records
    assert [(r.sequence, r.event.step) for r in found] == [(0, 1), (1, 2)]


def test_following_sees_each_record_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    follower = JournalTail(store)
    assert follower.read_new() == []
    writer = JournalWriter(store, "rank0", 1)
    writer.emit(_step(1))
    writer.flush()
    assert [r.event.step for r in follower.read_new()] == [1]
    assert follower.read_new() == []
    writer.emit(_step(2))
    path = tmp_path / segment_key(1, "rank0")
    whole = path.read_bytes()
    writer.flush()
    line = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + line[:20])  # a reader may see the half of an append
    assert follower.read_new() == []
    path.write_bytes(whole + line)
    assert [r.event.step for r in follower.read_new()] == [2]
    other = JournalWriter(store, "agent", 2)
    other.emit(_step(3))
    other.flush()
    assert [r.event.step for r in follower.read_new()] == [3]


def test_follow_ends_when_told(tmp_path: Path) -> None:
    stop = threading.Event()
    writer = JournalWriter(FolderStore(tmp_path), "agent", 1)
    seen = []
    for number, records in enumerate(
        follow_journal(FolderStore(tmp_path), poll_interval_s=0.001, stop=stop)
    ):
        seen += records
        if number == 3:
            writer.emit(RunStopped("x", step=1))
            writer.flush()
        if seen:
            stop.set()
        assert number < 1000
    assert [r.event.kind for r in seen] == ["run_stopped"]
