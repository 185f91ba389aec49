"""Two nodes that do not reach each other, to the machine that keeps them apart."""

from __future__ import annotations

from holdfast.policy.membership.transitions import (
    CoordinatorState,
    MembershipRules,
    NodeRecord,
    NodeStage,
    Phase,
    StageReport,
    begin_term,
    generation_created,
    halt,
    link_failed,
    reports_received,
    tick,
)

RULES = MembershipRules(
    lambda nodes: [node.name for node in nodes],
    node_timeout_s=6.0,
    settle_time_s=2.0,
    retry_pair_after_s=60.0,
)


def _training() -> CoordinatorState:
    reign = begin_term(1, 0.0, 1, [NodeRecord(name, name, 1, 0.0, 0.0) for name in "abc"])
    return _said(reign, 0.0, NodeStage.WORKING, 1)


def _said(
    reign: CoordinatorState, now: float, stage: NodeStage, at: int, names: str = "abc"
) -> CoordinatorState:
    return reports_received(
        reign, [StageReport(name, name, at, stage, 1) for name in names], now, RULES
    )


def _without(reign: CoordinatorState, now: float) -> CoordinatorState:
    """All hold; the generation of those that are left works."""
    reign = _said(reign, now, NodeStage.HELD, reign.generation)
    assert reign.phase is Phase.OPENING
    names = reign.pending_nodes
    reign = generation_created(reign, reign.generation + 1, names, now, RULES)
    return _said(reign, now, NodeStage.WORKING, reign.generation, "".join(sorted(names)))


def test_one_of_two_is_left_out_and_tried_again_later() -> None:
    reign = link_failed(_training(), "c", "b", 10.0, RULES)
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
        reign = tick(reports_received(reign, reports, now, RULES), now, RULES)
    return reign


def test_what_is_said_again_in_time_is_not_tried() -> None:
    """Each trial that fails is twice as long; said in between, it changes nothing."""
    reign = _without(link_failed(_training(), "c", "b", 10.0, RULES), 11.0)
    reign = _beats(reign, 11.0, 60.0)
    assert link_failed(reign, "b", "c", 60.0, RULES) == reign
    reign = _beats(reign, 60.0, 68.0)
    reign = link_failed(reign, "b", "c", 68.0, RULES)
    assert [(pair.retry_at, pair.wait) for pair in reign.unreachable_pairs] == [(128.0, 60.0)]
    assert _beats(reign, 68.0, 127.0).phase is Phase.TRAINING
    reign = _beats(reign, 127.0, 200.0)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "node_joined")
    reign = link_failed(_without(reign, 140.0), "b", "c", 145.0, RULES)
    assert [(pair.retry_at, pair.wait) for pair in reign.unreachable_pairs] == [(265.0, 120.0)]


def test_what_is_known_too_late_for_a_generation_ends_it() -> None:
    """While it is made, and when it has been made of both."""
    reign = _said(halt(_training(), "hang", 10.0), 11.0, NodeStage.HELD, 1)
    assert reign.pending_nodes == {"a", "b", "c"}
    late = link_failed(reign, "b", "c", 11.5, RULES)
    assert (late.phase, late.pending_nodes) == (Phase.OPENING, {"a", "b"})
    late = generation_created(late, 2, frozenset("abc"), 12.0, RULES)
    assert (late.phase, late.generation, late.pending_nodes) == (Phase.OPENING, 2, {"a", "b"})
    made = generation_created(reign, 2, frozenset("abc"), 11.2, RULES)
    assert link_failed(made, "b", "c", 11.5, RULES).phase is Phase.HALTING


def test_another_reason_stays() -> None:
    reign = link_failed(halt(_training(), "worker_lost", 10.0), "b", "c", 10.5, RULES)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "worker_lost")


def test_a_generation_that_ends_because_all_wait_ends_for_the_link() -> None:
    reign = halt(_training(), "hang", 10.0)
    reign = link_failed(reign, "a", "b", 10.5, RULES)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "link_cut")
    assert _without(reign, 11.0).members == {"a", "c"}
    assert (
        link_failed(reign, "a", "x", 10.5, RULES)
        == link_failed(reign, "a", "a", 10.5, RULES)
        == reign
    )
