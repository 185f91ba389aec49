"""The views of one node of several show what all nodes do, in one order."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest

from holdfast.api.journal_follower import HeldRecords, JournalFollower
from holdfast.api.views import RunViews
from holdfast.config.run import RunConfig
from holdfast.errors import RunFolderError
from holdfast.events import Record, to_json
from holdfast.machine.hardware import HardwareInfo
from holdfast.report.live.metrics import RunMetrics
from holdfast.wire.journal import JournalWriter, segment_key
from holdfast.wire.store.run_store import FolderStore
from tests.support.journal_builder import Scribe
from tests.support.memory_store import MemoryStore
from tests.support.ranks import wait_until


def lost_and_continued() -> list[Record]:
    """Two generations of two nodes, in the order in which they happened."""
    scribe = Scribe()
    scribe.start()
    scribe.among("a", "b")
    scribe.steps(1, 20)
    scribe.open_generation()
    scribe.among("a", step=20, reason="node_lost")
    scribe.steps(21, 40)
    return scribe.records


def test_records_that_come_late_are_shown_in_their_order() -> None:
    """No record is more than the hold late; each batch has records of any writer."""
    chooser, records = random.Random(3), lost_and_continued()
    arrivals = sorted((place + chooser.uniform(0, 0.9), place) for place, _ in enumerate(records))
    held, shown = HeldRecords(hold_s=1.0), list[Record]()
    for at, place in arrivals:
        held.add([records[place]], at)
        shown += held.take(at)
    shown += held.take(float("inf"))
    assert shown == records


def test_a_follower_has_the_metrics_of_one_who_saw_it_happen(tmp_path: Path) -> None:
    records = lost_and_continued()
    expected, followed = RunMetrics("demo"), RunMetrics("demo")
    for record in records:
        expected.observe(record)
    store = FolderStore(tmp_path)
    writers: dict[tuple[int, str], JournalWriter] = {}
    times = iter([record.time for record in records])
    follower = JournalFollower(store, [followed.observe])

    def write(some: list[Record]) -> None:
        for record in some:
            place = record.generation, record.writer
            if place not in writers:
                generation, name = place
                writers[place] = JournalWriter(store, name, generation, times.__next__)
            assert writers[place].emit(record.event) == record
            writers[place].flush()

    write(records[:30])
    followed.replay(follower.read_all())
    follower.start()
    write(records[30:])
    follower.close()
    wait_until(lambda: values(followed) == values(expected))


def test_own_records_are_shown_while_the_run_store_hangs() -> None:
    store, shown = HangingStore(), list[Record]()
    follower = JournalFollower(store, [shown.append])
    follower.start()
    assert store.is_asked.wait(120)
    own = [record for record in lost_and_continued() if record.writer == "rank0"]
    for record in own:
        follower.observe(record)
    wait_until(lambda: shown == own)
    store.answers.set()
    follower.close()
    assert shown == own


class HangingStore(MemoryStore):
    """A run store that does not return from a request."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.answers = threading.Event(), threading.Event()

    def list(self, prefix: str) -> list[str]:
        self.is_asked.set()
        self.answers.wait(120)
        return super().list(prefix)


def test_own_records_are_shown_once_and_without_the_journal() -> None:
    """The run store answers nothing at first; then it has all records, of both nodes."""
    records = lost_and_continued()
    own = [record for record in records if record.writer == "rank0"]
    store = SilentStore()
    shown: list[Record] = []
    follower = JournalFollower(store, [shown.append])
    follower.start()
    for record in own:
        follower.observe(record)
    wait_until(lambda: shown == own)
    for record in records:
        line = json.dumps(to_json(record)).encode() + b"\n"
        store.append(segment_key(record.generation, record.writer), line)
    store.is_silent = False
    wait_until(lambda: len(shown) == len(records))
    follower.close()
    assert sorted(shown, key=lambda r: r.order) == sorted(records, key=lambda r: r.order)


def test_the_result_is_printed_after_the_last_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last steps are still held back when the agent has the result."""
    config = RunConfig.model_validate({"cluster": {"node": "a"}, "train": {"steps": 40}})
    machine = HardwareInfo("a", "Linux", 1, 2**30, 2**30)
    with RunViews(config, tmp_path, "d1", machine, json=False) as views:
        for record in lost_and_continued():
            for observer in views.observers:
                observer(record)
        views.say("a line meanwhile")
        views.say_last("stopped after step 40 (SIGINT); resume with: holdfast train run.yaml")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("stopped after step 40 (SIGINT); resume with:")
    assert lines[-2].startswith("step 40/40")
    assert "a line meanwhile" in lines[:-2]


class SilentStore(MemoryStore):
    """A run store that does not answer a reader at first."""

    is_silent = True

    def list(self, prefix: str) -> list[str]:
        if self.is_silent:
            raise RunFolderError("the run folder failed: it does not answer")
        return super().list(prefix)


def values(metrics: RunMetrics) -> list[bytes]:
    """Without the moments at which this process made the series."""
    return [line for line in metrics.render().splitlines() if b"_created" not in line]
