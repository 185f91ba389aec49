"""How much dearer a distance is: the time of a message inside a node, in a rack, between racks.

The table is for one accelerator of a usual node with eight, and is assumed where nothing was
measured: it ranks layouts, and times none. Sources of its rows: Calculon (Isaev et al., SC'23) for
links in a node and between nodes of a rack. Sailor (SOSP'25) for zones and regions of one cloud.
Racks share half of their nodes' bandwidth (an assumption: fat trees with 2:1 are usual).
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.plan.hardware.link import Link
from holdfast.policy.placement import Machine

LEVELS = ("node", "rack", "zone", "region", "world")
"""The smallest domain that two ranks share, the nearest first. Ranks that share a zone and no rack
are in two racks of it; those that share only the world are in two regions."""


ASSUMED_LINKS: Mapping[str, Link] = {
    "node": Link(10e-6, 195e9),
    "rack": Link(20e-6, 22.5e9),
    "zone": Link(25e-6, 11.25e9),
    "region": Link(500e-6, 2.5e9 / 8),
    "world": Link(30e-3, 0.6e9 / 8),
}
"""By the level at which two ranks meet. Between zones 2.5 GB/s and between regions 0.6 GB/s are of
a virtual machine, whose 8 ranks share them."""


def meeting_level(one: Machine, other: Machine) -> str:
    """Return the smallest domain of LEVELS that two machines share.

    An unknown domain counts as shared: without a rack, all machines of a zone are taken for
    neighbours. (For copies it is the other way round, `policy/placement.py`: there the doubt is
    about a failure that they share.)"""
    if one.domain("node") == other.domain("node"):
        return "node"
    if one.zone and other.zone and one.zone != other.zone:
        return "region" if region_of(one.zone) == region_of(other.zone) else "world"
    return "zone" if one.rack and other.rack and one.rack != other.rack else "rack"


def region_of(zone: str) -> str:
    """Return the region of a zone as the clouds name them: us-east-1a, us-central1-b, eastus-2."""
    head, _, last = zone.rpartition("-")
    if head and len(last) == 1 and last.isalpha():  # us-central1-b
        return head
    if last[:-1].isdigit() and last[-1:].isalpha():  # us-east-1a
        return zone[:-1]
    return head if last.isdigit() and head and "-" not in head else zone  # eastus-2
