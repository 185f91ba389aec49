"""A planned change lets everybody end the step; a fault in the meantime does not wait for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import (
    PHASE_TRANSITIONS,
    CoordinatorState,
    MembershipRules,
    NodeCommand,
    NodeRecord,
    NodeStage,
    Phase,
    StageReport,
    begin_term,
    directive_for,
    generation_created,
    halt,
    link_failed,
    reports_received,
    tick,
)
from tests.support.membership_model.agent import Carried
from tests.support.membership_model.model import Model
from tests.support.membership_model.state_search import Found, stuck
from tests.support.membership_model.world import Agent, World

RULES = MembershipRules(lambda nodes: tuple(node.name for node in nodes))
NAMES = ("a", "b", "c")


def _training() -> CoordinatorState:
    reign = transitions.begin_term(1, 0.0)
    for name in NAMES:
        reign = transitions.node_joined(reign, NodeRecord(name, "m", 1, 0.0, 0.0), 0.0, RULES)
    reign = transitions.tick(reign, 10.0, MembershipRules(RULES.select_nodes, node_timeout_s=100.0))
    reign = transitions.generation_created(reign, 1, frozenset(NAMES), 10.0, RULES)
    return _say(reign, *((name, NodeStage.WORKING) for name in NAMES))


def _say(reign: CoordinatorState, *said: tuple[str, NodeStage]) -> CoordinatorState:
    reports = [StageReport(name, "m", 1, stage) for name, stage in said]
    return transitions.reports_received(reign, reports, 11.0, RULES)


def _orders(reign: CoordinatorState) -> list[NodeCommand]:
    return [directive_for(reign, name).command for name in NAMES]


def test_who_has_ended_its_step_hurries_nobody() -> None:
    reign = transitions.node_leaving(_training(), "a", 60.0, 11.0, RULES)
    assert _orders(reign) == [NodeCommand.PAUSE] * 3
    reign = _say(reign, ("b", NodeStage.HELD))
    assert _orders(reign) == [NodeCommand.PAUSE] * 3


def test_a_fault_while_others_end_their_step_halts_all() -> None:
    reign = transitions.node_leaving(_training(), "a", 60.0, 11.0, RULES)
    reign = _say(reign, ("b", NodeStage.HELD), ("c", NodeStage.BROKEN))
    assert _orders(reign) == [NodeCommand.HALT] * 3


@pytest.mark.parametrize("goes", ["abc", "cab", "acb", "abc late", "ab"])
def test_members_that_all_leave_save_before_a_spare_continues(goes: str) -> None:
    """c is a spare. It is told to go with the members, after they began to save, or not at all."""

    def use(nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
        names = [node.name for node in nodes]
        return tuple(name for name in names if name in "ab") or tuple(names)

    rules = MembershipRules(use)
    reign = replace(_training(), members=frozenset("ab"))
    reign = reign.with_node(NodeRecord("c", "m", 1, 11.0, 11.0))
    order, _, late = goes.partition(" ")
    for name in order[: 2 if late else 3]:
        reign = transitions.node_leaving(reign, name, 60.0, 11.0, rules)
    assert _orders(reign)[:2] == [NodeCommand.PAUSE] * 2
    held = [StageReport(name, "m", 1, NodeStage.HELD) for name in "ab"]
    reign = transitions.reports_received(reign, held, 11.0, rules)
    assert reign.pending_generation == (2, frozenset("ab"))
    reign = generation_created(reign, 2, frozenset("ab"), 11.0, rules, is_saving_last=True)
    for stage in (NodeStage.WORKING, NodeStage.DONE):
        reports = [StageReport(name, "m", 2, stage) for name in "ab"]
        reign = transitions.reports_received(reign, reports, 11.0, rules)
        if late and stage is NodeStage.WORKING:
            reign = transitions.node_leaving(reign, "c", 60.0, 11.0, rules)
    if goes == "ab":
        assert reign.pending_generation == (3, frozenset("c"))
        reign = transitions.node_leaving(reign, "c", 60.0, 11.0, rules)
    assert reign.phase is Phase.ENDED
    assert not reign.end_reason


def test_a_node_that_holds_without_an_order_of_ours_was_told_by_somebody_else() -> None:
    reign = _say(_training(), ("b", NodeStage.HELD))
    assert _orders(reign) == [NodeCommand.HALT] * 3


def test_those_who_were_all_given_up_and_speak_again_let_go_and_go_on() -> None:
    """As after a sleep of the coordinator's own, or a link of its that was cut."""
    reign = transitions.tick(_training(), 100.0, RULES)
    assert reign.nodes == ()
    for name in NAMES:
        back = NodeRecord(name, "m", 1, 100.0, 100.0, 1, NodeStage.WORKING)
        reign = transitions.node_joined(reign, back, 100.0, RULES)
    assert _orders(reign) == [NodeCommand.HALT] * 3
    reports = [StageReport(name, "m", 1, NodeStage.HELD) for name in NAMES]
    reign = transitions.reports_received(reign, reports, 100.5, RULES)
    reign = transitions.tick(
        reign,
        100.0 + RULES.gather_wait_s + 1.0,
        MembershipRules(RULES.select_nodes, node_timeout_s=100.0),
    )
    assert reign.pending_generation == (2, frozenset(NAMES))


def test_a_member_that_is_lost_ends_the_generation() -> None:
    reign = transitions.node_lost(_training(), "b", "its agent has ended", 11.0, RULES)
    assert _orders(reign) == [NodeCommand.HALT, NodeCommand.WAIT, NodeCommand.HALT]
    assert reign.lost_members == (("b", "its agent has ended"),)


def test_a_number_that_another_coordinator_has_given_away_is_not_tried_again() -> None:
    reign = transitions.reports_received(
        _training(), [StageReport("b", "m", 1, NodeStage.BROKEN)], 11.0, RULES
    )
    reign = _say(reign, *((name, NodeStage.HELD) for name in NAMES))
    assert reign.pending_generation == (2, frozenset(NAMES))
    assert transitions.creation_rejected(reign, 1, 2, 11.0).pending_generation == (
        3,
        frozenset(NAMES),
    )
    assert transitions.creation_rejected(reign, 2, 2, 11.0).phase is Phase.FENCED


# --- the coordinator is killed right at a transition of membership --------------------------------
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
    """Without this agent: its machine says so, or nothing does."""
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


# --- two nodes that do not reach each other, to the machine that keeps them apart -----------------
PAIR_RULES = MembershipRules(
    lambda nodes: [node.name for node in nodes],
    node_timeout_s=6.0,
    settle_time_s=2.0,
    retry_pair_after_s=60.0,
)


def _three_at_work() -> CoordinatorState:
    reign = begin_term(1, 0.0, 1, [NodeRecord(name, name, 1, 0.0, 0.0) for name in "abc"])
    return _said(reign, 0.0, NodeStage.WORKING, 1)


def _said(
    reign: CoordinatorState, now: float, stage: NodeStage, at: int, names: str = "abc"
) -> CoordinatorState:
    return reports_received(
        reign, [StageReport(name, name, at, stage, 1) for name in names], now, PAIR_RULES
    )


def _without(reign: CoordinatorState, now: float) -> CoordinatorState:
    """All hold; the generation of those that are left works."""
    reign = _said(reign, now, NodeStage.HELD, reign.generation)
    assert reign.phase is Phase.OPENING
    names = reign.pending_nodes
    reign = generation_created(reign, reign.generation + 1, names, now, PAIR_RULES)
    return _said(reign, now, NodeStage.WORKING, reign.generation, "".join(sorted(names)))


def test_one_of_two_is_left_out_and_tried_again_later() -> None:
    reign = link_failed(_three_at_work(), "c", "b", 10.0, PAIR_RULES)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "link_cut")
    reign = _without(reign, 11.0)
    assert reign.members == {"a", "b"}
    reign = _beats(reign, 11.0, 69.0)
    assert reign.phase is Phase.TRAINING
    reign = _beats(reign, 69.0, 75.0)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "node_joined")


def _beats(reign: CoordinatorState, now: float, until: float) -> CoordinatorState:
    """All are heard, as they were."""
    while now < until and reign.phase is Phase.TRAINING:
        now += 1.0
        reports = [
            StageReport(node.name, node.name, node.generation, node.stage, node.ready_workers)
            for node in reign.nodes
        ]
        reign = tick(reports_received(reign, reports, now, PAIR_RULES), now, PAIR_RULES)
    return reign


def test_what_is_said_again_in_time_is_not_tried() -> None:
    """Each trial that fails is twice as long; said in between, it changes nothing."""
    reign = _without(link_failed(_three_at_work(), "c", "b", 10.0, PAIR_RULES), 11.0)
    reign = _beats(reign, 11.0, 60.0)
    assert link_failed(reign, "b", "c", 60.0, PAIR_RULES) == reign
    reign = _beats(reign, 60.0, 68.0)
    reign = link_failed(reign, "b", "c", 68.0, PAIR_RULES)
    assert [(pair.retry_at, pair.wait) for pair in reign.unreachable_pairs] == [(128.0, 60.0)]
    assert _beats(reign, 68.0, 127.0).phase is Phase.TRAINING
    reign = _beats(reign, 127.0, 200.0)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "node_joined")
    reign = link_failed(_without(reign, 140.0), "b", "c", 145.0, PAIR_RULES)
    assert [(pair.retry_at, pair.wait) for pair in reign.unreachable_pairs] == [(265.0, 120.0)]


def test_what_is_known_too_late_for_a_generation_ends_it() -> None:
    """While it is made, and when it has been made of both."""
    reign = _said(halt(_three_at_work(), "hang", 10.0), 11.0, NodeStage.HELD, 1)
    assert reign.pending_nodes == {"a", "b", "c"}
    late = link_failed(reign, "b", "c", 11.5, PAIR_RULES)
    assert (late.phase, late.pending_nodes) == (Phase.OPENING, {"a", "b"})
    late = generation_created(late, 2, frozenset("abc"), 12.0, PAIR_RULES)
    assert (late.phase, late.generation, late.pending_nodes) == (Phase.OPENING, 2, {"a", "b"})
    made = generation_created(reign, 2, frozenset("abc"), 11.2, PAIR_RULES)
    assert link_failed(made, "b", "c", 11.5, PAIR_RULES).phase is Phase.HALTING


def test_another_reason_stays() -> None:
    reign = link_failed(halt(_three_at_work(), "worker_lost", 10.0), "b", "c", 10.5, PAIR_RULES)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "worker_lost")


def test_a_generation_that_ends_because_all_wait_ends_for_the_link() -> None:
    reign = halt(_three_at_work(), "hang", 10.0)
    reign = link_failed(reign, "a", "b", 10.5, PAIR_RULES)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "link_cut")
    assert _without(reign, 11.0).members == {"a", "c"}
    assert (
        link_failed(reign, "a", "x", 10.5, PAIR_RULES)
        == link_failed(reign, "a", "a", 10.5, PAIR_RULES)
        == reign
    )
