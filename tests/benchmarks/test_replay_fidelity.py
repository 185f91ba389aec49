"""The times from which nodes of a real run count as usable in its simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import pytest
from benchmarks.lab.predicting_policy import Oracle, PredictingPolicy, Predictor
from benchmarks.lab.replay_fidelity import (
    Constants,
    compare,
    simulated_tokens,
    with_recorded_times,
    with_start_time,
)

from holdfast.policy.prediction.history import NodeChange
from holdfast.policy.prediction.response import ResponsePolicy
from holdfast_lab.engine.holdfast import HoldfastRules, holdfast
from holdfast_lab.engine.interfaces import CostModel, Costs, OperatingPoint
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.table_cost import TableCost
from holdfast_lab.prediction.samples import changes_of
from holdfast_lab.score.record import Commit, ReferenceTable, RunRecord
from holdfast_lab.score.scenarios import LEVEL_1, ScenarioRun, draw_scenario
from holdfast_lab.traces.events import TraceEvent
from holdfast_lab.traces.generators import make_trace

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


# --- a predictor in a replay ----------------------------------------------------------------------
HORIZON_S = 600.0
TRACE = make_trace("spot", 3, 0.5, {})
RULES = HoldfastRules(peers=False)


@dataclass(frozen=True)
class Alarmist:
    """Says always the same."""

    chance: float

    def update_all(self, changes: Sequence[NodeChange]) -> Self:
        return self

    def probability(self, node: str, horizon_s: float, now_s: float) -> float:
        return self.chance


def cost(pause_s: float) -> TableCost:
    """4 to 8 nodes, each with a part of the state that no other node has."""
    costs = Costs(state_bytes=50e9, store_bandwidth=4e9, save_pause_s=pause_s)
    points = [OperatingPoint(f"{n} nodes", n, 1000.0 * n, 5.0) for n in range(4, 9)]
    return TableCost(points, costs)


def run(cost_model: CostModel, predictor: Predictor | None = None) -> tuple[Ledger, str]:
    inner = holdfast(cost_model, RULES)
    limits = Limits(TRACE.seconds)
    if predictor is None:
        return Simulation(cost_model, inner, limits).run(TRACE.events), ""
    made = PredictingPolicy(inner, predictor, ResponsePolicy(HORIZON_S, 0.3))
    found = Simulation(cost_model, made, limits).run(TRACE.events)
    return found, str(dict(made.actions))


def test_an_oracle_keeps_more_of_the_work() -> None:
    losses: dict[str, list[float]] = {}
    for change in changes_of(TRACE):
        if change.kind == "lost":
            losses.setdefault(change.node, []).append(change.t_s)
    model = cost(2.0)
    plain, _ = run(model)
    told, actions = run(model, Oracle(losses))
    assert told.tokens > 1.01 * plain.tokens, actions
    assert told.lost_s.total < plain.lost_s.total
    assert abs(sum(told.seconds.values()) - told.wall_s) < 1e-6 * told.wall_s


def test_false_alarms_end_by_themselves_and_cost_little() -> None:
    """Nodes of this trace are lost, but not one in each horizon: most alarms are false."""
    model = cost(20.0)
    plain, _ = run(model)
    alarmed, _ = run(model, Alarmist(0.9))
    assert alarmed.tokens > 0.97 * plain.tokens
    quiet, actions = run(model, Alarmist(0.2))
    assert actions == "{}"
    assert quiet.tokens == pytest.approx(plain.tokens, rel=0.01)


def test_the_policy_of_a_run_does_not_depend_on_another_run() -> None:
    make = partial(run, cost(2.0), Alarmist(0.5))
    assert make()[0].tokens == make()[0].tokens
