"""A leader's link that keeps failing, against one that fails once."""

from __future__ import annotations

import pytest

from holdfast.policy.membership.link_health import FLAP_WINDOW_S, LinkHealth, link_observed

LOOK_S = 2.0


def _seen(looks: str) -> LinkHealth:
    """One look each two seconds: + is up, - is down."""
    link = LinkHealth()
    for number, look in enumerate(looks):
        link = link_observed(link, look == "+", number * LOOK_S)
    return link


@pytest.mark.parametrize(
    ("looks", "is_flapping"),
    [
        ("+++++", False),
        ("+-+-+", False),
        ("+-+-+-+", True),
        ("+--+---+-+", True),
        ("+-+-+-", False),  # it is away: the term cannot be closed
        ("-" * 60 + "+", False),  # one long outage
        ("+-+" + "+" * 30 + "-+-+", False),  # the first outage is older than a minute
    ],
)
def test_three_outages_within_a_minute_that_ended(looks: str, is_flapping: bool) -> None:
    assert _seen(looks).is_flapping is is_flapping


def test_outages_are_forgotten_after_the_window() -> None:
    link = _seen("+-+-+-+")
    assert not link_observed(link, True, 6 * LOOK_S + FLAP_WINDOW_S).is_flapping
