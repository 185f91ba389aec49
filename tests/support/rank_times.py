"""Checks the time ledger of every rank on the records of a run."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from holdfast.events import Record
from holdfast.report.ledger.ordering import order_records
from holdfast.report.ledger.rankledger import RankLedger, RankTimes

MAX_REST = 0.001
"""The share of the wall time that may be in no class."""


def assert_time_adds_up(records: Iterable[Record], wall_s: float | None = None) -> RankTimes:
    """Assert that the classes of each rank and of the fleet add up to the wall time. Return them.

    wall_s: seconds of the run, as the caller knows them; None: what the ledger says."""
    ledger = RankLedger()
    for record in order_records(records):
        ledger.observe(record)
    times, wall = ledger.times(), ledger.time.wall if wall_s is None else wall_s
    totals = times.totals()
    for seconds in totals.values():
        assert min(seconds.values()) >= 0.0
        assert sum(seconds.values()) == pytest.approx(wall, rel=MAX_REST)
    intervals, fleet = times.intervals(), times.fleet_totals()
    spare = sum(i.stop - i.start for i in intervals if i.rank is None)
    assert sum(fleet.values()) == pytest.approx(wall * times.ranks + spare, rel=MAX_REST)
    for name, seconds in fleet.items():
        of_intervals = sum(interval.seconds.get(name, 0.0) for interval in intervals)
        assert seconds == pytest.approx(of_intervals, abs=1e-6)
    return times
