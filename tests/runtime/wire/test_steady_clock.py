"""Durations of a run while its machine's clock is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.elastic.event_log import EventLog
from holdfast.events import Record, RunFinished, RunStarted, StepDone
from holdfast.report.ledger.timeledger import TimeLedger
from holdfast.wire.steady_clock import SteadyClock
from holdfast.wire.store.run_store import FolderStore

HOUR, DAY = 3600.0, 86400.0


class Machine:
    """A machine whose wall clock may be set; the other clock counts."""

    def __init__(self) -> None:
        self.wall, self.counted = 1.8e9, 12.0

    def pass_seconds(self, seconds: float) -> None:
        self.wall += seconds
        self.counted += seconds


@pytest.mark.parametrize("jump", [-HOUR, DAY])
def test_a_clock_that_is_set_changes_no_duration(tmp_path: Path, jump: float) -> None:
    machine, records = Machine(), list[Record]()
    clock = SteadyClock(lambda: machine.wall, lambda: machine.counted)
    log = EventLog(FolderStore(tmp_path), [records.append], print, clock=clock.now)
    log.begin_generation(1)
    log.emit("agent", RunStarted("r", "h", "d", False))
    for step in (1, 2, 3, 4):
        machine.pass_seconds(10.0)
        log.emit("rank0", StepDone(1.0, 1.0, 0.1, 100, 10.0, {"compute": 10.0}, step=step))
        if step == 2:
            machine.wall += jump
    log.emit("agent", RunFinished(step=4))
    ledger = TimeLedger()
    for record in records:
        ledger.observe(record)
    assert ledger.wall == pytest.approx(40.0)
    assert ledger.goodput == pytest.approx(1.0)


def test_the_default_clock_follows_the_wall_clock_at_the_start() -> None:
    import time

    assert SteadyClock().now() == pytest.approx(time.time(), abs=60.0)
