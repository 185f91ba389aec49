"""Two nodes that do not reach each other, to the machine that keeps them apart."""

from __future__ import annotations

from holdfast.policy.membership.transitions import (
    Node,
    Phase,
    Reign,
    Report,
    Rules,
    Stage,
    begin,
    halt,
    heard,
    opened,
    parted,
    tick,
)

RULES = Rules(lambda nodes: [node.name for node in nodes], lost_after=6.0, settle=2.0, apart=60.0)


def _training() -> Reign:
    reign = begin(1, 0.0, 1, [Node(name, name, 1, 0.0, 0.0) for name in "abc"])
    return _said(reign, 0.0, Stage.WORKING, 1)


def _said(reign: Reign, now: float, stage: Stage, at: int, names: str = "abc") -> Reign:
    return heard(reign, [Report(name, name, at, stage, 1) for name in names], now, RULES)


def _without(reign: Reign, now: float) -> Reign:
    """All hold; the generation of those that are left works."""
    reign = _said(reign, now, Stage.HELD, reign.generation)
    assert reign.phase is Phase.OPENING
    names = reign.wanted
    reign = opened(reign, reign.generation + 1, names, now, RULES)
    return _said(reign, now, Stage.WORKING, reign.generation, "".join(sorted(names)))


def test_one_of_two_is_left_out_and_tried_again_later() -> None:
    reign = parted(_training(), "c", "b", 10.0, RULES)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "link_cut")
    reign = _without(reign, 11.0)
    assert reign.members == {"a", "b"}
    reign = _beats(reign, 11.0, 69.0)
    assert reign.phase is Phase.TRAINING
    reign = _beats(reign, 69.0, 75.0)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "node_joined")


def _beats(reign: Reign, now: float, until: float) -> Reign:
    """All are heard, as they were."""
    while now < until and reign.phase is Phase.TRAINING:
        now += 1.0
        reports = [
            Report(node.name, node.name, node.at, node.stage, node.ready) for node in reign.nodes
        ]
        reign = tick(heard(reign, reports, now, RULES), now, RULES)
    return reign


def test_what_is_said_again_in_time_is_not_tried() -> None:
    """Each trial that fails is twice as long; said in between, it changes nothing."""
    reign = _without(parted(_training(), "c", "b", 10.0, RULES), 11.0)
    reign = _beats(reign, 11.0, 60.0)
    assert parted(reign, "b", "c", 60.0, RULES) == reign
    reign = _beats(reign, 60.0, 68.0)
    reign = parted(reign, "b", "c", 68.0, RULES)
    assert [(pair.until, pair.wait) for pair in reign.apart] == [(128.0, 60.0)]
    assert _beats(reign, 68.0, 127.0).phase is Phase.TRAINING
    reign = _beats(reign, 127.0, 200.0)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "node_joined")
    reign = parted(_without(reign, 140.0), "b", "c", 145.0, RULES)
    assert [(pair.until, pair.wait) for pair in reign.apart] == [(265.0, 120.0)]


def test_what_is_known_too_late_for_a_generation_ends_it() -> None:
    """While it is made, and when it has been made of both."""
    reign = _said(halt(_training(), "hang", 10.0), 11.0, Stage.HELD, 1)
    assert reign.wanted == {"a", "b", "c"}
    late = parted(reign, "b", "c", 11.5, RULES)
    assert (late.phase, late.wanted) == (Phase.OPENING, {"a", "b"})
    late = opened(late, 2, frozenset("abc"), 12.0, RULES)
    assert (late.phase, late.generation, late.wanted) == (Phase.OPENING, 2, {"a", "b"})
    made = opened(reign, 2, frozenset("abc"), 11.2, RULES)
    assert parted(made, "b", "c", 11.5, RULES).phase is Phase.HALTING


def test_another_reason_stays() -> None:
    reign = parted(halt(_training(), "worker_lost", 10.0), "b", "c", 10.5, RULES)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "worker_lost")


def test_a_generation_that_ends_because_all_wait_ends_for_the_link() -> None:
    reign = halt(_training(), "hang", 10.0)
    reign = parted(reign, "a", "b", 10.5, RULES)
    assert (reign.phase, reign.reason) == (Phase.HALTING, "link_cut")
    assert _without(reign, 11.0).members == {"a", "c"}
    assert parted(reign, "a", "x", 10.5, RULES) == parted(reign, "a", "a", 10.5, RULES) == reign
