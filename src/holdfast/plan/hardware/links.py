"""Types of links by name, from `links.csv`; each row names its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import DataError, unknown_name
from holdfast.plan.hardware.link import Link
from holdfast.plan.hardware.tables import read_rows

LINKS_FILE = Path(__file__).with_name("links.csv")
WIDE = "wide"
"""Kind of a link between zones or regions: its bandwidth is that of a machine, not of a device."""


@dataclass(frozen=True)
class LinkType:
    """One row. kind: scale-up, scale-out, host or wide. peak: bytes a second of one device, one
    way, as its maker states it. link: what collectives reach. assumed: columns without a source."""

    name: str
    kind: str
    peak: float
    link: Link
    assumed: tuple[str, ...]
    source: str


def load_links(path: Path = LINKS_FILE) -> dict[str, LinkType]:
    """Types of links by name."""
    found = [_link_type(row) for row in read_rows(path)]
    return {each.name: each for each in found}


def link_named(name: str, links: Mapping[str, LinkType], where: str = "cluster") -> LinkType:
    """Raises DataError, with the nearest name, for a link that the table does not have."""
    if name in links:
        return links[name]
    raise unknown_name(DataError, "link", name, links, where)


def _link_type(row: dict[str, str]) -> LinkType:
    peak = float(row["bandwidth_gb_s"]) * 1e9
    return LinkType(
        row["name"],
        row["kind"],
        peak,
        Link(float(row["latency_us"]) * 1e-6, peak * float(row["reach"]), float(row["ramp"])),
        tuple(row["assumed"].split()),
        row["source"],
    )
