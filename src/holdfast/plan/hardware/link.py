"""The time of messages and of collectives on one kind of link (alpha-beta model; Hockney, 1994).

A ring of n ranks sends 2(n-1) messages of S/n bytes one after the other for an all-reduce
(Patarasuk and Yuan, 2009). A ring is as slow as its slowest link. So the share of the peak that an
all-reduce reaches follows from latency, size and ranks, and no table is needed.

Fast links cut a message into chunks, and fill a chain of buffers with them. With the best size of
chunk the chain costs time in proportion to the root of latency x transfer (`ramp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path

from holdfast.core.json_parsing import JsonMessage
from holdfast.errors import DataError, unknown_name
from holdfast.plan.hardware.tables import read_rows

LINKS_FILE = Path(__file__).with_name("links.csv")
WIDE = "wide"
"""Kind of a link between zones or regions: its bandwidth is that of a machine, not of a device."""


@dataclass(frozen=True)
class Link(JsonMessage):
    """What messages of one rank see, one way."""

    latency_s: float  # of an empty message
    bandwidth: float  # bytes a second, as large messages reach it
    ramp: float = 0.0  # weight of the root term: 0 for none, 2 for one more buffer

    def message_s(self, size: float) -> float:
        """Seconds of one message of `size` bytes."""
        moving = size / self.bandwidth
        return self.latency_s + moving + self.ramp * sqrt(self.latency_s * moving)

    def allreduce_s(self, size: float, ranks: int) -> float:
        """Seconds of a ring's all-reduce of `size` bytes over so many ranks."""
        return 2 * (ranks - 1) * self.message_s(size / ranks)

    def reached(self, size: float, ranks: int, peak: float) -> float:
        """Share of a peak bus bandwidth that an all-reduce reaches, as nccl-tests counts it."""
        return 2 * (ranks - 1) / ranks * size / self.allreduce_s(size, ranks) / peak

    def shared_by(self, groups: float) -> Link:
        """The link as one of several groups sees it that use it at once."""
        return replace(self, bandwidth=self.bandwidth / max(1.0, groups))


@dataclass(frozen=True)
class LinkType:
    """One row of `links.csv`, which names its source."""

    name: str
    kind: str  # scale-up, scale-out, host or wide
    peak: float  # bytes a second of one device, one way, as its maker states it
    link: Link  # what collectives reach
    assumed: tuple[str, ...]  # columns without a source
    source: str


def load_links(path: Path = LINKS_FILE) -> dict[str, LinkType]:
    """Types of links by name."""
    found = {}
    for row in read_rows(path):
        peak = float(row["bandwidth_gb_s"]) * 1e9
        latency_s, reached = float(row["latency_us"]) * 1e-6, peak * float(row["reach"])
        link = Link(latency_s, reached, float(row["ramp"]))
        columns = tuple(row["assumed"].split())
        found[row["name"]] = LinkType(row["name"], row["kind"], peak, link, columns, row["source"])
    return found


def link_named(name: str, links: Mapping[str, LinkType], where: str = "cluster") -> LinkType:
    """Raises DataError, with the nearest name, for a link that the table does not have."""
    if name in links:
        return links[name]
    raise unknown_name(DataError, "link", name, links, where)
