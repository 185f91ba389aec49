"""A predictor in a replay: an oracle saves time, and one that is always wrong is switched off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import pytest
from benchmarks.lab.predicting_policy import Oracle, PredictingPolicy, Predictor

from holdfast.policy.prediction.history import NodeChange
from holdfast.policy.prediction.response import ResponsePolicy
from holdfast_lab.engine.holdfast import HoldfastRules, holdfast
from holdfast_lab.engine.interfaces import CostModel, Costs, OperatingPoint
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.table_cost import TableCost
from holdfast_lab.prediction.samples import changes_of
from holdfast_lab.traces.generators import make_trace

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
