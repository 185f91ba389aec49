"""The views of one node of several show what all nodes do, in one order."""

from __future__ import annotations

import random
from pathlib import Path

from holdfast.cli.journal_follower import HeldRecords, JournalFollower
from holdfast.events import Record
from holdfast.report.metrics import RunMetrics
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_store import FolderStore
from tests.support.journal_builder import Scribe
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
    wait_until(lambda: values(followed) == values(expected), 60)


def values(metrics: RunMetrics) -> list[bytes]:
    """Without the moments at which this process made the series."""
    return [line for line in metrics.render().splitlines() if b"_created" not in line]
