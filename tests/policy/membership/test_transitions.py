"""A planned change lets everybody end the step; a fault in the meantime does not wait for it."""

from __future__ import annotations

from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import (
    Node,
    Order,
    Phase,
    Reign,
    Report,
    Rules,
    Stage,
    directive,
)

RULES = Rules(lambda nodes: tuple(node.name for node in nodes))
NAMES = ("a", "b", "c")


def _training() -> Reign:
    reign = transitions.begin(1, 0.0)
    for name in NAMES:
        reign = transitions.came(reign, Node(name, "m", 1, 0.0, 0.0), 0.0, RULES)
    reign = transitions.tick(reign, 10.0, Rules(RULES.fits, lost_after=100.0))
    reign = transitions.opened(reign, 1, frozenset(NAMES), 10.0, RULES)
    return _say(reign, *((name, Stage.WORKING) for name in NAMES))


def _say(reign: Reign, *said: tuple[str, Stage]) -> Reign:
    reports = [Report(name, "m", 1, stage) for name, stage in said]
    return transitions.heard(reign, reports, 11.0, RULES)


def _orders(reign: Reign) -> list[Order]:
    return [directive(reign, name).order for name in NAMES]


def test_who_has_ended_its_step_hurries_nobody() -> None:
    reign = transitions.warned(_training(), "a", 60.0, 11.0, RULES)
    assert _orders(reign) == [Order.PAUSE] * 3
    reign = _say(reign, ("b", Stage.HELD))
    assert _orders(reign) == [Order.PAUSE] * 3


def test_a_fault_while_others_end_their_step_halts_all() -> None:
    reign = transitions.warned(_training(), "a", 60.0, 11.0, RULES)
    reign = _say(reign, ("b", Stage.HELD), ("c", Stage.BROKEN))
    assert _orders(reign) == [Order.HALT] * 3


def test_a_node_that_holds_without_an_order_of_ours_was_told_by_somebody_else() -> None:
    reign = _say(_training(), ("b", Stage.HELD))
    assert _orders(reign) == [Order.HALT] * 3


def test_those_who_were_all_given_up_and_speak_again_let_go_and_go_on() -> None:
    """As after a sleep of the coordinator's own, or a link of its that was cut."""
    reign = transitions.tick(_training(), 100.0, RULES)
    assert reign.nodes == ()
    for name in NAMES:
        back = Node(name, "m", 1, 100.0, 100.0, 1, Stage.WORKING)
        reign = transitions.came(reign, back, 100.0, RULES)
    assert _orders(reign) == [Order.HALT] * 3
    reports = [Report(name, "m", 1, Stage.HELD) for name in NAMES]
    reign = transitions.heard(reign, reports, 100.5, RULES)
    reign = transitions.tick(reign, 100.0 + RULES.gather + 1.0, Rules(RULES.fits, lost_after=100.0))
    assert reign.opening == (2, frozenset(NAMES))


def test_a_member_that_is_lost_ends_the_generation() -> None:
    reign = transitions.gone(_training(), "b", "its agent has ended", 11.0, RULES)
    assert _orders(reign) == [Order.HALT, Order.WAIT, Order.HALT]
    assert reign.lost == (("b", "its agent has ended"),)


def test_a_number_that_another_coordinator_has_given_away_is_not_tried_again() -> None:
    reign = transitions.heard(_training(), [Report("b", "m", 1, Stage.BROKEN)], 11.0, RULES)
    reign = _say(reign, *((name, Stage.HELD) for name in NAMES))
    assert reign.opening == (2, frozenset(NAMES))
    assert transitions.taken(reign, 1, 2, 11.0).opening == (3, frozenset(NAMES))
    assert transitions.taken(reign, 2, 2, 11.0).phase is Phase.FENCED
