"""Decides whether a leader gives up the lead because one of its links keeps failing.

A link that fails and comes back again and again costs a change of membership each time. So a leader
that has lost a link `MAX_OUTAGES` times within `FLAP_WINDOW_S` gives up the lead, as soon as the
link is back. A link that stays away counts once. A run store that is away is away for the other
nodes too, and nodes that stay lost are no fault of the leader.
"""

from __future__ import annotations

from dataclasses import dataclass

FLAP_WINDOW_S = 60.0
MAX_OUTAGES = 3


@dataclass(frozen=True)
class LinkHealth:
    """One link of a leader. outages: when each outage of the last `FLAP_WINDOW_S` began."""

    is_up: bool = True
    outages: tuple[float, ...] = ()

    @property
    def is_flapping(self) -> bool:
        """Return True if the link is up now, and was lost too often before."""
        return self.is_up and len(self.outages) >= MAX_OUTAGES


def link_observed(link: LinkHealth, is_up: bool, now: float) -> LinkHealth:
    """Take one more look at a link, at the time `now` in seconds."""
    outages = tuple(began for began in link.outages if now - began <= FLAP_WINDOW_S)
    return LinkHealth(is_up, (*outages, now) if link.is_up and not is_up else outages)
