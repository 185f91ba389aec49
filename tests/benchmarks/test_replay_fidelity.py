"""The times from which nodes of a real run count as usable in its simulation."""

from __future__ import annotations

import pytest
from benchmarks.lab.replay_fidelity import (
    Constants,
    compare,
    simulated_tokens,
    with_recorded_times,
    with_start_time,
)

from holdfast_lab.score.record import Commit, ReferenceTable, RunRecord
from holdfast_lab.score.scenarios import LEVEL_1, ScenarioRun, draw_scenario
from holdfast_lab.traces.events import TraceEvent

CONSTANTS = Constants({1: 2.0, 2: 1.0, 3: 0.7, 4: 0.5}, 0.0, 0.0, 4.0, 0.0)


def scenario(*events: TraceEvent) -> ScenarioRun:
    first = [TraceEvent(0.0, "join", name, value=1.0) for name in ("n1", "n2")]
    return ScenarioRun("F3", 5, 2, 20.0, 1.0, (*first, *events), 20.0)


def record(*commits: tuple[float, int, int]) -> RunRecord:
    made = tuple(Commit(at, step, 24.0, workers) for at, step, workers in commits)
    return RunRecord("F3", 5, 20.0, ((0.0, 2),), (), made, 1.0, 20.0)


def returns(events: tuple[TraceEvent, ...]) -> dict[str, float]:
    return {e.node: e.t_s for e in events if e.t_s > 0 and e.kind in ("join", "recover")}


def test_a_node_is_usable_from_the_begin_of_its_first_step() -> None:
    run = scenario(
        TraceEvent(2.5, "preempt", "n2"),
        TraceEvent(4.0, "join", "n3", value=1.0),
        TraceEvent(5.0, "join", "n4", value=1.0),
    )
    told = record((1, 1, 2), (2, 2, 2), (5, 3, 1), (7, 4, 1), (8, 5, 2), (9, 6, 2))
    assert returns(with_recorded_times(run, told, CONSTANTS)) == {"n3": 7}, "n4 is in no step"
    assert returns(with_start_time(run, CONSTANTS)) == {"n3": 8.0, "n4": 9.0}


def test_a_node_that_takes_the_place_of_a_lost_one_is_seen() -> None:
    run = scenario(TraceEvent(1.5, "join", "n3", value=1.0), TraceEvent(4.2, "preempt", "n1"))
    told = record((1, 1, 2), (4, 2, 2), (6, 3, 2))
    assert returns(with_recorded_times(run, told, CONSTANTS)) == {"n3": 4}


def test_after_the_loss_of_all_nodes_a_step_begins_by_its_own_time() -> None:
    run = scenario(
        TraceEvent(3.0, "preempt", "n1"),
        TraceEvent(3.0, "preempt", "n2"),
        TraceEvent(3.5, "join", "n3", value=1.0),
    )
    told = record((1, 1, 2), (2, 2, 2), (12, 2, 1))
    assert returns(with_recorded_times(run, told, CONSTANTS)) == {"n3": 10.0}


def test_a_node_that_goes_while_it_starts_is_never_usable() -> None:
    run = scenario(TraceEvent(2.0, "join", "n3", value=1.0), TraceEvent(4.0, "preempt", "n3"))
    told = record(*((float(n), n, 2) for n in range(1, 20)))
    for events in (with_recorded_times(run, told, CONSTANTS), with_start_time(run, CONSTANTS)):
        assert {e.node for e in events} == {"n1", "n2"}
        assert simulated_tokens(run, CONSTANTS, events) == pytest.approx(20 * 24, rel=0.01)


def test_an_error_is_relative_to_the_real_run() -> None:
    run = draw_scenario("F1", 5, LEVEL_1).compressed(40.0)
    (lost,) = [e.t_s for e in run.events if e.kind == "fail"]
    commits, at, step = [], 0.0, 0
    while at < run.seconds:
        workers = 4 if at < lost else 3
        at, step = at + CONSTANTS.step_s[workers], step + 1
        commits.append(Commit(at, step, 24.0, workers))
    kept = tuple(c for c in commits if c.t_s <= run.seconds)
    told = RunRecord("F1", 5, run.seconds, ((0.0, 4), (lost, 3)), (lost,), kept, 0.5, 30.0)
    table = ReferenceTable({n: 24 / seconds for n, seconds in CONSTANTS.step_s.items()})
    (pair,) = compare([told], 40.0, CONSTANTS, table)
    assert abs(pair.error(True)) < 0.03
    assert pair.error(False) > 0.03, "with the constant the node returns, and there it never did"
