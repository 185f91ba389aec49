"""An agent's side of the journal."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.elastic.event_log import EventLog
from holdfast.errors import RunFolderError
from holdfast.events import GenerationStarted, Record, StepDone, WorkerLost
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import Buffer, FolderStore


def _started(step: int) -> GenerationStarted:
    return GenerationStarted({"nodes": ["a"]}, "worker_lost", None, 0, [0], step=step)


def test_a_step_that_is_told_once_more_is_neither_shown_nor_stored(tmp_path: Path) -> None:
    shown: list[Record] = []

    async def go() -> None:
        board = EventLog(FolderStore(tmp_path), [shown.append], print)
        for generation, start, steps in ((1, 0, range(1, 5)), (2, 4, (3, 4, 5)), (3, 3, (4, 5))):
            board.begin_generation(generation)
            board.emit("agent", _started(start))
            for step in steps:
                board.emit("rank0", StepDone(1.0, 1, 1.0, 1e-3, 0.1, step=step))
        assert await board.flush()

    asyncio.run(go())
    told = [1, 2, 3, 4, 5, 4, 5]  # generation 3 does again what was lost with generation 2
    assert [r.event.step for r in shown if isinstance(r.event, StepDone)] == told
    stored = [r for r in read_journal(FolderStore(tmp_path)) if isinstance(r.event, StepDone)]
    assert [(r.generation, r.event.step) for r in stored] == [
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (2, 5),
        (3, 4),
        (3, 5),
    ]


def test_what_is_told_late_of_a_generation_stands_in_it_beside_what_this_node_wrote_before(
    tmp_path: Path,
) -> None:
    """Node a was killed and started anew, and comes to lead before it takes part in anything."""
    store, shown = FolderStore(tmp_path), list[Record]()

    async def go() -> None:
        before = EventLog(store, [], print, "a")
        before.begin_generation(3)
        before.emit("agent", _started(0))
        assert await before.flush()
        board = EventLog(store, [shown.append], print, "a")
        for rank in (0, 1):
            board.emit_in_generation(
                "term7", 3, WorkerLost(rank, 0, "its agent has ended", "heartbeat", "b")
            )
        board.begin_generation(4)
        board.emit("agent", _started(0))
        board.emit_in_generation(
            "term7", 4, WorkerLost(0, 0, "its agent has ended", "heartbeat", "b")
        )
        assert await board.flush()

    asyncio.run(go())
    told = [(r.generation, r.writer, r.sequence, r.event.kind) for r in read_journal(store)]
    assert told == [
        (3, "agent.a", 0, "generation_started"),
        (3, "term7.a", 0, "worker_lost"),
        (3, "term7.a", 1, "worker_lost"),
        (4, "agent.a", 0, "generation_started"),
        (4, "agent.a", 1, "worker_lost"),
    ]
    assert [(r.generation, r.sequence) for r in shown] == [(3, 0), (3, 1), (4, 0), (4, 1)]


class _Outage(FolderStore):
    """A folder that can be away."""

    is_away = False

    def append(self, key: str, data: Buffer, sync: bool = False) -> None:
        if self.is_away:
            raise RunFolderError("the run folder failed")
        super().append(key, data, sync)


def test_records_of_an_outage_are_stored_once_it_is_over(tmp_path: Path) -> None:
    """Steps, a loss, a new generation and its steps come while the run store is away."""
    store, said = _Outage(tmp_path), list[str]()

    async def go() -> None:
        log = EventLog(store, [], said.append)
        log.begin_generation(1)
        log.emit("agent", _started(0))
        log.emit("rank0", StepDone(1.0, 1, 1.0, 1e-3, 0.1, step=1))
        assert await log.flush()
        store.is_away = True
        log.emit("rank0", StepDone(1.0, 1, 1.0, 1e-3, 0.1, step=2))
        log.emit("agent", WorkerLost(1, 0, "SIGKILL", "exit", "a", step=2))
        assert not await log.flush("rank0", sync=True)
        log.begin_generation(2)
        log.emit("agent", _started(2))
        log.emit("rank0", StepDone(1.0, 1, 1.0, 1e-3, 0.1, step=3))
        assert not await log.flush()
        assert not await log.flush()
        store.is_away = False
        assert await log.flush()

    asyncio.run(go())
    told = [(r.generation, r.writer, r.event.kind, r.event.step) for r in read_journal(store)]
    assert sorted(told) == [
        (1, "agent", "generation_started", 0),
        (1, "agent", "worker_lost", 2),
        (1, "rank0", "step_done", 1),
        (1, "rank0", "step_done", 2),
        (2, "agent", "generation_started", 2),
        (2, "rank0", "step_done", 3),
    ]
    assert len(said) == 1  # one sentence for one outage


class _Bucket(FolderStore):
    """A store in which each append is an object."""

    append_interval_s = 3600.0

    def segment_sizes(self, prefix: str) -> dict[str, int]:
        return {key: self.size(key) for key in self.list(prefix)}


def test_in_a_bucket_a_writer_waits_between_two_appends_unless_something_needs_them(
    tmp_path: Path,
) -> None:
    store = _Bucket(tmp_path)

    def stored() -> list[int]:
        return [r.event.step for r in read_journal(store)]

    async def go() -> None:
        log = EventLog(store, [], print)
        log.begin_generation(1)
        for step in (1, 2, 3):
            log.emit("rank0", StepDone(1.0, 1, 1.0, 1e-3, 0.1, step=step))
            assert await log.flush("rank0")
        assert stored() == [1]
        assert await log.flush("rank0", sync=True)
        assert stored() == [1, 2, 3]
        log.emit("rank0", StepDone(1.0, 1, 1.0, 1e-3, 0.1, step=4))
        assert await log.flush()
        assert stored() == [1, 2, 3]
        assert await log.flush(at_once=True)
        assert stored() == [1, 2, 3, 4]

    asyncio.run(go())
