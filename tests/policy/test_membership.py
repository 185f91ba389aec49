"""A planned change lets everybody end the step; a fault in the meantime does not wait for it."""

from __future__ import annotations

from holdfast.policy import membership
from holdfast.policy.membership import Node, Order, Reign, Report, Rules, Stage, directive

RULES = Rules(lambda nodes: tuple(node.name for node in nodes))
NAMES = ("a", "b", "c")


def _training() -> Reign:
    reign = membership.begin(1, 0.0)
    for name in NAMES:
        reign = membership.came(reign, Node(name, "m", 1, 0.0, 0.0), 0.0, RULES)
    reign = membership.tick(reign, 10.0, Rules(RULES.fits, lost_after=100.0))
    reign = membership.opened(reign, 1, frozenset(NAMES), 10.0, RULES)
    return _say(reign, *((name, Stage.WORKING) for name in NAMES))


def _say(reign: Reign, *said: tuple[str, Stage]) -> Reign:
    reports = [Report(name, "m", 1, stage) for name, stage in said]
    return membership.heard(reign, reports, 11.0, RULES)


def _orders(reign: Reign) -> list[Order]:
    return [directive(reign, name).order for name in NAMES]


def test_who_has_ended_its_step_hurries_nobody() -> None:
    reign = membership.warned(_training(), "a", 60.0, 11.0, RULES)
    assert _orders(reign) == [Order.PAUSE] * 3
    reign = _say(reign, ("b", Stage.HELD))
    assert _orders(reign) == [Order.PAUSE] * 3


def test_a_fault_while_others_end_their_step_halts_all() -> None:
    reign = membership.warned(_training(), "a", 60.0, 11.0, RULES)
    reign = _say(reign, ("b", Stage.HELD), ("c", Stage.BROKEN))
    assert _orders(reign) == [Order.HALT] * 3


def test_a_node_that_holds_without_an_order_of_ours_was_told_by_somebody_else() -> None:
    reign = _say(_training(), ("b", Stage.HELD))
    assert _orders(reign) == [Order.HALT] * 3
