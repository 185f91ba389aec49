"""How a run is disturbed: when it ends, and what is told of it. No process is started."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.elastic.protocol.fault_orders import FaultHit, FaultOrders
from holdfast.events import CheckpointFailed, FaultInjected, NonFinite, Record, WorkerLost
from holdfast_lab.chaos import experiment
from holdfast_lab.chaos.actions import FaultAction
from holdfast_lab.chaos.catalog import FAULTS
from holdfast_lab.chaos.experiment import MAX_REJECTED_IN_A_ROW, Experiment
from holdfast_lab.chaos.layouts import CHAOS_LAYOUTS
from holdfast_lab.chaos.results import NOT_RECOVERED, FaultResult
from holdfast_lab.chaos.run_driver import RunStuckError
from holdfast_lab.chaos.schedule import Draw

KILL = Draw(FAULTS["kill"], ("forward",), 1, gap=1)
FULL = Draw(FAULTS["full-disk"], ("begin",), 1, gap=1)
PIPELINE = Draw(FAULTS["pipeline"], ("sending",), 1)


class _Said:
    """A run of four nodes that take part, and what is said of it."""

    def __init__(self, root: Path) -> None:
        self.lines: list[str] = []
        armoury = FaultOrders(root / "faults")
        armoury.prepare()
        fleet = SimpleNamespace(alive_nodes=["a", "b", "c", "d"], take_ended=list)
        scene: Any = SimpleNamespace(
            fleet=fleet, real_folder=root, notices_folder=root, network=None
        )
        self.it = Experiment(
            scene, armoury, CHAOS_LAYOUTS["replicated"], list("abcd"), 100, self.lines.append
        )
        self.it.view.nodes, self.it.view.world = ("a", "b", "c", "d"), 4


@pytest.fixture
def said(tmp_path: Path) -> _Said:
    return _Said(tmp_path)


def test_draws_that_are_all_rejected_come_to_an_end(said: _Said) -> None:
    said.it._inject_faults(repeat(PIPELINE), 5, time.monotonic() + 60)
    assert len(said.it.report.rejected_draws) == MAX_REJECTED_IN_A_ROW
    assert said.it.report.cut == f"{MAX_REJECTED_IN_A_ROW} draws in a row were rejected"
    assert said.it.report.cut in said.lines[-1]


def test_a_run_whose_time_is_over_says_so(said: _Said) -> None:
    said.it._inject_faults(repeat(PIPELINE), 5, time.monotonic() - 1)
    assert said.it.report.cut == "its time was over"
    assert said.it.report.cut in said.lines[-1]


def test_a_run_that_had_all_its_faults_was_not_cut_short(said: _Said) -> None:
    said.it._inject_faults(repeat(PIPELINE), 0, time.monotonic() - 1)
    assert said.it.report.cut == ""


def test_a_run_whose_steps_are_used_up_says_so(said: _Said) -> None:
    said.it._inject_faults(repeat(replace(KILL, step=98)), 5, time.monotonic() + 60)
    assert said.it.report.cut == "its steps were used up"
    assert said.it.report.cut in said.lines[-1]


def test_a_trace_names_the_very_step(said: _Said) -> None:
    said.it.view.start_step = 7
    assert said.it._step_for(replace(KILL, step=8)) == 8
    assert said.it._try_draw(1, replace(KILL, step=7))
    assert [row["why"] for row in said.it.report.rejected_draws] == ["its step had begun"]


def test_what_befalls_a_disk_comes_when_the_state_is_saved(said: _Said) -> None:
    said.it._save_interval_steps = 10
    for after in range(1, 21):
        said.it.view.start_step = after
        assert said.it._step_for(FULL) in (10, 20, 30)
        assert said.it._step_for(FULL) > after
        assert said.it._step_for(KILL) == after + 1


def test_a_fault_that_came_to_nothing_does_not_count(
    said: _Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "JOURNAL_EVIDENCE_TIMEOUT_S", 0.1)
    view, outcomes = said.it.view, list[str]()
    view.reached_steps = {1: 12}
    view.generation = 1
    said.it._fault_orders.claim(FaultHit(10, 1, 10, 0, 5, "a"))
    record = Record(1, "chaos", 0, 0.0, FaultInjected(10, "full-disk", "a", "begin", step=10))
    view.apply_record(record)
    for _ in range(2):
        done = FaultResult(1, "full-disk", "begin", 10, "the disk of a", 1)
        said.it._wait_for_recovery(1, FULL, done)
        outcomes.append(done.outcome)
        view.apply_record(replace(record, event=CheckpointFailed("no room", step=10)))
    assert outcomes == ["came to nothing (no checkpoint_failed)", "recovered"]


class _Starts:
    """A fleet that notes who is started. It gives what has `ended` once."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[tuple[str, int, bool]] = []

    def start(self, node: str) -> None:
        self.started.append(node)

    def take_ended(self) -> list[tuple[str, int, bool]]:
        found, self.ended = self.ended, []
        return found

    def last_output_line(self, node: str) -> str:
        return "the run folder is away"


def test_no_agent_is_started_while_a_fault_holds_the_run_folder(said: _Said) -> None:
    fleet: Any = _Starts()
    driver, said.it._environment.fleet = said.it._driver, fleet
    fleet.ended = [("a", -9, True)]
    driver.tick()
    away = FaultAction("the run folder", list, 0.2, holds_starts=True)
    driver.expect_repair(away)
    fleet.ended = [("a", 2, False), ("b", -9, True)]  # a had begun to start
    driver.tick()
    assert fleet.started == ["a"]
    driver.finish_repairs()
    driver.tick()
    assert fleet.started == ["a", "a", "b"]
    assert said.it.report.unexpected_ends == []
    fleet.ended = [("a", 2, False)]  # with nothing in its way
    with pytest.raises(RunStuckError, match="a ended with 2: the run folder is away"):
        driver.tick()


def test_an_agent_that_took_part_must_not_end_for_the_run_folder(said: _Said) -> None:
    fleet: Any = _Starts()
    driver, said.it._environment.fleet = said.it._driver, fleet
    fleet.ended = [("a", -9, True)]
    driver.tick()
    said.it.view.generation = 1
    driver.expect_repair(FaultAction("the run folder", list, 60.0, holds_starts=True))
    fleet.ended = [("a", 2, False)]
    with pytest.raises(RunStuckError, match="a ended with 2"):
        driver.tick()


def test_a_trace_that_ends_with_faults_missing_says_so(said: _Said) -> None:
    said.it._inject_faults(iter([PIPELINE]), 1, time.monotonic() + 60)
    assert said.it.report.cut == "nothing was left to draw"


def test_a_nan_is_named_where_the_journal_has_its_rank_and_step(
    said: _Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [
        NonFinite(2, "w", step=7),
        NonFinite(1, "w", step=8),
        WorkerLost(0, 44, "SIGKILL", "exit", step=9),
        WorkerLost(1, 45, "did not stop", "halt", step=9),
    ]
    seen = SimpleNamespace(records=[SimpleNamespace(event=event) for event in events])
    monkeypatch.setattr(said.it._driver.watcher, "read_new", lambda: seen)
    hits = {
        10: FaultHit(10, 1, 7, 2, 5, "a"),
        20: FaultHit(20, 1, 8, 2, 5, "a"),
        30: FaultHit(30, 1, 9, 0, 44, "a"),
        40: FaultHit(40, 1, 9, 1, 45, "a"),
    }
    monkeypatch.setattr(said.it._fault_orders, "read_hit", hits.get)
    names = ("gradient", "gradient", "kill", "hang", "agent")
    story = said.it.report
    story.faults += [FaultResult(n, name, "backward", 7, "", 1) for n, name in enumerate(names, 1)]
    said.it._check_attribution()
    assert [done.named for done in story.faults] == [True, False, True, False, None]


def test_the_fault_that_a_run_does_not_survive_is_told(
    said: _Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(*_: object) -> None:
        raise RunStuckError("no sign")

    done = FaultResult(1, "kill", "forward", 3, "rank 1", 1)
    said.it.view.start_step = 3
    monkeypatch.setattr(said.it._trigger, "inject", lambda *_: done)
    monkeypatch.setattr(said.it, "_wait_for_recovery", settle)
    with pytest.raises(RunStuckError):
        said.it._try_draw(1, KILL)
    assert [fault.outcome for fault in said.it.report.faults] == [NOT_RECOVERED]
    assert NOT_RECOVERED in said.lines[-1]


def test_a_node_that_does_not_come_back_is_told(
    said: _Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "NODE_RETURN_TIMEOUT_S", 0.1)
    said.it.view.nodes = ("a", "c", "d")
    said.it._await_nodes()
    assert said.it.report.notes[0].startswith("b had not come back")
    assert "b had not come back" in said.lines[-1]


def test_only_the_first_of_two_is_aimed(said: _Said, monkeypatch: pytest.MonkeyPatch) -> None:
    hit: list[str] = []

    def deed(scene: object, node: str) -> FaultAction:
        hit.append(node)
        return FaultAction(f"the agent of {node}", nodes_to_restart=(node,))

    monkeypatch.setattr(experiment, "FAULT_ACTIONS", {"agent": deed})
    draw = Draw(FAULTS["two-agents"], ("begin", "begin"), 1, target="b")
    done = FaultResult(1, "two-agents", "begin", 3, "", 1)
    for index, part in enumerate(draw.fault.parts):
        said.it._trigger.act_outside(part, draw, 10, index, done)
    assert hit[0] == "b"
    assert hit[1] in {"a", "c", "d"}


def test_a_deed_where_no_node_is_left_is_not_done(said: _Said) -> None:
    said.it.view.nodes = ()
    draw = Draw(FAULTS["agent"], ("begin",), 1)
    done = FaultResult(1, "agent", "begin", 3, "", 1)
    said.it._trigger.act_outside(draw.fault.parts[0], draw, 10, 0, done)
    assert done.outcome == "not done: no node is there"
