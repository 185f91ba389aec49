"""The coordinator is killed right at a transition of membership: the table, one row each.

A row begins from worlds in which the transition can come next, and from those right after it,
before anybody has heard (up to 40 of them, of all that a start or one fault leads to). There the
coordinator dies, and its machine says so, or nothing does. Then every interleaving is looked at:
the run goes on wherever enough nodes are left, and never in two places.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest

from holdfast.policy.membership.transitions import PHASE_TRANSITIONS, Phase
from tests.support.membership_model.agent import Carried
from tests.support.membership_model.model import Model
from tests.support.membership_model.state_search import Found, stuck
from tests.support.membership_model.world import Agent, World

Edge = tuple[Phase, Phase]
EDGES: list[Edge] = [
    (old, new) for old, after in PHASE_TRANSITIONS.items() for new in sorted(after)
]
MOST = 40


@cache
def _met() -> tuple[Model, dict[Edge, list[tuple[World, int]]]]:
    """A model, and for each transition worlds before and after it, and whose it is. Two nodes are
    needed, so a coordinator gathers too."""
    model = Model(Carried(least=2), eager=True, ends=False, kinds=("suspects", "crash", "error"))
    found = Found(model, [model.training(faults=1), model.cold(faults=0)])
    at: dict[Phase, list[tuple[World, int]]] = defaultdict(list)
    after: dict[Edge, list[tuple[World, int]]] = defaultdict(list)
    for world, ahead in zip(found.worlds, found.ahead, strict=True):
        for i in range(3):
            agent: Agent = model.agents.values[world.agents[i]]
            if agent.reign is not None:
                at[agent.reign.phase].append((world, i))
            for new in map(found.worlds.__getitem__, ahead):
                edge = _edge(model, world.agents[i], new.agents[i])
                if edge is not None:
                    after[edge].append((new, i))
    return model, {edge: _some(at[edge[0]]) + _some(after[edge]) for edge in EDGES}


def _some(cases: list[tuple[World, int]]) -> list[tuple[World, int]]:
    return cases[:: max(1, len(cases) // (MOST // 2))]


def _edge(model: Model, before: int, after: int) -> Edge | None:
    old: Agent = model.agents.values[before]
    new: Agent = model.agents.values[after]
    if old.reign is None or not new.up:
        return None
    phase = Phase.FENCED if new.reign is None else new.reign.phase
    return (old.reign.phase, phase) if phase is not old.reign.phase else None


def _killed(model: Model, world: World, i: int) -> list[World]:
    """With this agent gone: its machine says so, or nothing does."""
    world = world._replace(faults=1)
    kinds, model.kinds = model.kinds, ("crash", "vanish")
    gone = [
        step.world for step in model.steps(world) if step.label in (("crash", i), ("vanish", i))
    ]
    model.kinds = kinds
    return gone


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge[0]} to {edge[1]}")
def test_the_coordinator_is_killed_at(edge: Edge) -> None:
    model, met = _met()
    starts = {killed: None for world, i in met[edge] for killed in _killed(model, world, i)}
    assert starts
    found = Found(model, list(starts))
    for number in stuck(found):  # who is left is not enough
        up = [model.agents.values[agent].up for agent in found.worlds[number].agents]
        assert sum(up) < model.runs.least, found.way(number)
