"""Every rank accounts for every second of the run, and the fleet for the sum of them."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.events import GenerationStarted, Record, RunStarted, SparesChanged, WorkerLost
from holdfast.report.history.history import read_history
from holdfast.report.history.summary import summary
from holdfast.report.ledger.ordering import order_records
from holdfast.report.ledger.rankledger import RankLedger, RankTimes
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.journal_builder import Scribe, lossy_run
from tests.support.rank_times import assert_time_adds_up

GOLDEN = Path(__file__).parents[2] / "golden" / "runs"


def times_of(records: list[Record]) -> RankTimes:
    ledger = RankLedger()
    for record in records:
        ledger.observe(record)
    return ledger.times()


@pytest.mark.parametrize("name", ["nodes", "cut", "halfway"])
def test_ranks_of_killed_runs_account_for_every_second(name: str, tmp_path: Path) -> None:
    """Journals of real runs, whose nodes were killed. In `nodes` the coordinator's node too."""
    shutil.copytree(GOLDEN / name, tmp_path / "run")
    records = read_journal(FolderStore(tmp_path / "run"))
    first = min(r.time for r in records if isinstance(r.event, RunStarted))
    wall = max(record.time for record in records) - first
    assert name != "nodes" or any(isinstance(r.event, WorkerLost) for r in records)
    times = assert_time_adds_up(records, wall)
    # The journal is all that the seconds depend on, and the report prints the same ones.
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "run" / "journal", tmp_path / "elsewhere" / "journal")
    history = read_history(FolderStore(tmp_path / "elsewhere"))
    assert history.ranks == times
    printed = json.loads(json.dumps(summary(history)))
    assert printed["seconds_by_rank"] == {str(k): v for k, v in times.totals().items()}
    assert printed["seconds_by_rank"]["0"] == pytest.approx(
        printed["seconds_by_class"] | {"idle": 0.0}
    )


def test_a_run_over_two_sessions_with_a_loss() -> None:
    run = lossy_run()
    times = assert_time_adds_up(run.records, run.at - 1_000_000.0)
    for seconds in times.totals().values():
        assert (seconds["rework"], seconds["stopped"]) == (pytest.approx(3.0), 100.0)
        assert seconds["idle"] == 0.0
    for one, other in pairwise(i for i in times.intervals() if i.rank == 1):
        assert one.stop == pytest.approx(other.start)


def test_a_rank_that_the_generation_has_not_is_idle() -> None:
    run = Scribe()
    run.start()
    run.among("a", "b", "c")
    run.steps(1, 4)
    run.lose(2, after=1.0)
    run.open_generation()
    run.among("a", "b", step=4, reason="worker_lost", rung=0)
    run.steps(5, 9)
    run.finish()
    times = assert_time_adds_up(run.records)
    totals = times.totals()
    assert totals[0]["idle"] == totals[1]["idle"] == 0.0
    # From the second generation's start: two workers report, then five steps.
    assert totals[2]["idle"] == pytest.approx(2 * 0.25 + 5.0)
    assert totals[2]["productive"] == pytest.approx(4 * 0.625)
    places = {(i.rank, i.generation): i.node for i in times.intervals() if i.generation > 1}
    assert places == {(0, 2): "a", (1, 2): "b", (2, 2): ""}


def test_rework_is_charged_to_the_generation_that_did_the_steps_first() -> None:
    run = Scribe()
    run.start()
    run.among("a", "b")
    run.steps(1, 4)
    run.lose(1, after=0.5)
    run.open_generation()
    run.among("a", step=1, reason="worker_lost")
    run.steps(2, 6)
    run.finish()
    intervals = assert_time_adds_up(run.records).intervals()
    rework = {(i.rank, i.generation) for i in intervals if i.seconds.get("rework")}
    assert rework == {(0, 1), (1, 1)}
    assert sum(i.seconds.get("rework", 0.0) for i in intervals) == pytest.approx(2 * 3.0)


def test_a_spare_node_is_idle_until_it_gets_a_rank() -> None:
    run = Scribe()
    run.start()
    run.among("a", "b")
    run.steps(1, 2)
    run.write(SparesChanged(["c"], step=2))
    run.steps(3, 4)
    run.lose(1, after=1.0)
    run.open_generation()
    run.among("a", "c", step=4, reason="worker_lost", rung=3)
    run.steps(5, 6)
    run.finish()
    times = assert_time_adds_up(run.records)
    spare = [i for i in times.intervals() if i.rank is None]
    assert {i.node for i in spare} == {"c"}
    # Two steps, the loss, and the decision of the next generation.
    assert sum(i.stop - i.start for i in spare) == pytest.approx(2.0 + 1.0 + 0.25)
    assert times.fleet_totals()["idle"] == pytest.approx(3.25)


def test_the_ledger_says_the_same_at_every_moment_of_the_run() -> None:
    """Fed record by record, as a running agent does."""
    ledger = RankLedger()
    for record in lossy_run().records:
        ledger.observe(record)
        for seconds in ledger.times().totals().values():
            assert sum(seconds.values()) == pytest.approx(ledger.time.wall, abs=1e-6)
    assert ledger.times() == times_of(order_records(lossy_run().records))


def test_a_journal_without_a_beginning() -> None:
    run = lossy_run()
    rest = [r for r in run.records if not isinstance(r.event, RunStarted)]
    assert isinstance(rest[0].event, GenerationStarted)
    assert_time_adds_up(rest)
    assert times_of([]) == RankTimes()
