"""The registry of runs, and a budget that stops a run: of real runs."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from holdfast.events import BudgetReached, NodesPresent, Record, RunStarted, RunStopped, StepDone
from holdfast.policy.spending import meter_of
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from holdfast_platform.observe.runs import CHECK_UP_MARK, RunsRegistry, runs_below
from tests.runtime.cli.conftest import Trained, trained
from tests.support.commands import start, within, write_run_file
from tests.support.followed_run import FollowedRun, assert_same_bits
from tests.support.journal_builder import lossy_run, store_run
from tests.support.nodes import nodes_of, prepared
from tests.support.ranks import wait_until

__all__ = ["trained"]

CLUSTER = "pools:\n  small: {device: cpu, devices: 2, nodes: 1, usd_per_hour: 1800}\n"
"""A dollar for two seconds."""
PLAIN = (
    *("train.schedule.kind=constant", "checkpoint.every_steps=0", "train.evaluate.every=0"),
    *("layout.workers=1", "tags={team: search, project: demo}"),
)


def priced_run_file(root: Path) -> Path:
    run_file = write_run_file(root)
    (root / "cluster.yaml").write_text(CLUSTER)
    run_file.write_text(run_file.read_text() + f"plan: {{cluster: {root}/cluster.yaml}}\n")
    return run_file


def stays_of(folder: Path) -> float:
    return meter_of(read_journal(FolderStore(folder))).spent().usd


@pytest.mark.slow
def test_a_budget_stops_with_a_checkpoint_and_a_larger_one_continues_to_the_same_bits(
    tmp_path: Path,
) -> None:
    run_file = priced_run_file(tmp_path)
    words = ("train", run_file, *PLAIN, "--yes", "train.steps=100000", "budget.max_cost=8")
    ended = FollowedRun(tmp_path / "run", start(*words)).end()
    assert ended.code == 4, ended.err
    records = read_journal(FolderStore(tmp_path / "run"))
    steps = [r for r in records if isinstance(r.event, StepDone)]
    last = max(r.event.step for r in steps)
    (stopped,) = (r.event for r in records if isinstance(r.event, RunStopped))
    assert stopped.step == last, "the state after the last step is committed"
    begun = next(r.time for r in records if isinstance(r.event, NodesPresent))
    slowest = max(r.event.seconds for r in steps)
    spent = (max(r.time for r in steps) - begun) / 2
    assert spent <= 8 + slowest / 2, "at most one step beyond the budget"

    # The same budget begins no more; a larger one continues.
    within(*words, "budget.max_cost=1").refuses_last("budget.max_cost", code=4)
    steps_now = f"train.steps={last + 10}"
    within("train", run_file, *PLAIN, steps_now, "budget.max_cost=60").succeeds()
    within("train", run_file, *PLAIN, steps_now, f"folder={tmp_path}/undisturbed").succeeds()
    assert_same_bits(tmp_path / "run", tmp_path / "undisturbed", last + 10)


@pytest.mark.slow
def test_a_run_that_asks_continues_when_its_budget_is_raised(tmp_path: Path) -> None:
    run_file = priced_run_file(tmp_path)
    run = FollowedRun(
        tmp_path / "run",
        start(
            *("train", run_file, *PLAIN, "train.steps=250", "budget.max_cost=100"),
            *("budget.on_exceed=ask", "budget.warn_at=0.005"),
        ),
    )
    asked = run.until(lambda r: isinstance(r.event, BudgetReached)).event
    assert isinstance(asked, BudgetReached)
    assert asked.action == "near"
    command = asked.command.split()
    assert command[:3] == ["holdfast", "runs", "budget"]
    within(*command[1:], "9").refuses("can only rise")
    within(*command[1:], "9000").succeeds()
    run.until(lambda r: isinstance(r.event, BudgetReached) and r.event.action == "raised")
    assert run.end().code == 0
    told = json.loads(within("runs", "budget", run_file, "--json").succeeds().out)
    assert told["limits"] == {"max_cost": 9000}
    assert told["usd"] == pytest.approx(stays_of(tmp_path / "run"))


@pytest.mark.slow
def test_a_budget_holds_when_the_coordinator_is_lost(tmp_path: Path) -> None:
    run_file = prepared(tmp_path)
    pool = "{device: cpu, devices: 1, nodes: 2, market: spot, losses_per_day: 2, usd_per_hour: "
    (tmp_path / "cluster.yaml").write_text(f"pools:\n  kept: {pool}360}}\n  spot: {pool}72}}\n")
    words = (
        "train.steps=100000",
        "layout.workers=2",
        "train.evaluate.every=0",
        "budget.max_cost=4",
    )
    words += (f"plan.cluster={tmp_path}/cluster.yaml", "plan.ask_above_usd=1e9")
    with nodes_of(run_file, tmp_path / "run", *words) as nodes:
        for name, pool in (("a", "kept"), ("b", "spot"), ("c", "spot")):
            nodes.start(name, settings=[f"checkpoint.machine.pool={pool}"])
        wait_until(lambda: len(nodes.events(StepDone)) > 20)
        begun = next(r for r in nodes.records() if isinstance(r.event, RunStarted))
        leader = begun.writer.partition(".")[2]
        nodes.kill(leader)
        (stopped,) = wait_until(lambda: nodes.events(RunStopped))
        codes = {name: agent.wait(120) for name, agent in nodes.agents.items()}
    assert "budget.max_cost" in stopped.reason
    assert sorted(codes.values()) == [0, 4], "the new coordinator's, and that of a node that leaves"
    meter = meter_of(nodes.records())
    assert {stay.node: stay.price.pool for stay in meter.stays} == {
        "a": "kept",
        "b": "spot",
        "c": "spot",
    }
    spent = meter.spent()
    assert spent.unpriced_hours == 0
    slowest = max(event.seconds for event in nodes.events(StepDone))
    assert spent.usd <= 4 + slowest * meter_rate(nodes.records())


def meter_rate(records: list[Record]) -> float:
    """Dollars a second of all nodes that ever were there."""
    prices = {stay.node: stay.price.usd_per_hour or 0.0 for stay in meter_of(records).stays}
    return sum(prices.values()) / 3600


def test_a_budget_in_dollars_needs_a_price(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    within("train", run_file, "budget.max_cost=6").refuses_last(
        "budget.max_cost", "plan.cluster", "max_node_hours"
    )


def test_rows_come_from_journals_and_are_found_by_tags(trained: Trained, tmp_path: Path) -> None:
    file = ("--registry", tmp_path / "runs.sqlite")
    for name, team in (("a", "search"), ("b", "ads")):
        shutil.copytree(trained.folder, tmp_path / "runs" / name)
        for segment in (tmp_path / "runs" / name / "journal").glob("*/*.jsonl"):
            text = segment.read_text()
            segment.write_text(
                text.replace('"resumed":false', f'"resumed":false,"tags":{{"team":"{team}"}}')
            )
    within("runs", "add", tmp_path / "runs", *file).succeeds()
    found = json.loads(within("runs", "list", "--json", *file).succeeds().out)
    assert {Path(row["place"]).name: row["tags"] for row in found} == {
        "a": {"team": "search"},
        "b": {"team": "ads"},
    }
    assert {row["state"] for row in found} == {"finished"}
    assert all(row["node_hours"] > 0 for row in found)
    only = json.loads(within("runs", "list", "--tag", "team=ads", "--json", *file).succeeds().out)
    assert [Path(row["place"]).name for row in only] == ["b"]

    # A lost file is made again, with the same rows but for the time of the look.
    (tmp_path / "runs.sqlite").unlink()
    within("runs", "add", tmp_path / "runs", *file).succeeds()
    again = json.loads(within("runs", "list", "--json", *file).succeeds().out)
    assert [{**row, "seen": 0} for row in again] == [{**row, "seen": 0} for row in found]

    # A run whose folder is missing keeps its row; a new one shows by itself.
    (tmp_path / "runs" / "b").rename(tmp_path / "runs" / "c")
    rows = json.loads(within("runs", "list", "--json", *file).succeeds().out)
    states = {Path(row["place"]).name: row["state"] for row in rows}
    assert states == {"a": "finished", "b": "missing", "c": "finished"}
    within("runs", "forget", tmp_path / "runs", *file).succeeds()
    assert json.loads(within("runs", "list", "--json", *file).succeeds().out) == []
    within("runs", "forget", tmp_path / "runs", *file).refuses("does not know")


def _look(path: Path, place: Path) -> None:
    registry = RunsRegistry(path)
    for _ in range(5):
        registry.add(str(place))
        registry.refresh(anew=True)


def test_copies_of_check_ups_are_no_runs(tmp_path: Path) -> None:
    for name in ("mine", "mine.ready/disturbed/run", "mine.ready/kept/run"):
        store_run(tmp_path / name, lossy_run().records, 30)
    (tmp_path / "mine.ready/disturbed" / CHECK_UP_MARK).touch()
    places = [str(tmp_path / name) for name in ("mine", "mine.ready/kept/run")]
    assert sorted(runs_below(str(tmp_path))) == places
    copy = str(tmp_path / "mine.ready/disturbed/run")
    assert list(runs_below(copy)) == [copy], "it is named"


def test_several_processes_may_write_the_registry(trained: Trained, tmp_path: Path) -> None:
    for name in "abc":
        shutil.copytree(trained.folder, tmp_path / "runs" / name)
    path = tmp_path / "runs.sqlite"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_look, args=(path, tmp_path / "runs")) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    rows = RunsRegistry(path).entries()
    assert len(rows) == 3
    assert {row.state for row in rows} == {"finished"}


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.sqlite"
    file.write_text("no database, but long enough to be read as one" * 100)
    within("runs", "list", "--registry", file).refuses("no registry of runs", "runs add")
    within("runs", "add", tmp_path / "nothing").refuses("there is no run here")
    within("runs", "list", "--tag", "team").refuses("KEY=VALUE")
