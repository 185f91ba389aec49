"""The machines that a plan may use: pools of like nodes, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.plan.hardware.link import Link

ACROSS_ZONES = Link(500e-6, 2.5e9 / 8)
"""Of one device, if a cluster names no link between two zones. A virtual machine of one cloud has
2.5 GB/s to another zone (Sailor, SOSP'25). Eight devices share it."""


@dataclass(frozen=True)
class NodePool:
    """Like nodes in one place.

    devices: of one node. device: a name of `devices.csv`. inside: between two devices of a node.
    outside: of one device to a device of another node, while all devices of the node send.
    nodes_per_rack: 0 where racks are not known. usd_per_hour: of one node. losses_per_day: of one
    node; several may go at once, see `burst`: the nodes that an interruption takes on average.
    """

    name: str
    nodes: int
    devices: int
    device: str
    inside: Link
    outside: Link
    zone: str = ""
    nodes_per_rack: int = 0
    across_racks: Link | None = None
    is_spot: bool = False
    usd_per_hour: float = 0.0
    losses_per_day: float = 0.0
    burst: float = 1.0
    grams_co2_per_kwh: float = 0.0

    @property
    def size(self) -> int:
        """Devices of the pool."""
        return self.nodes * self.devices


@dataclass(frozen=True)
class Cluster:
    """pools, and links between zones by (one zone, other zone) in either order."""

    pools: tuple[NodePool, ...]
    between: Mapping[tuple[str, str], Link] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Devices of all pools."""
        return sum(pool.size for pool in self.pools)

    def pool(self, name: str) -> NodePool:
        return next(pool for pool in self.pools if pool.name == name)

    def link_between(self, one: NodePool, other: NodePool) -> Link:
        """Of one device to a device of another pool."""
        if one.zone == other.zone:
            return min(one.outside, other.outside, key=lambda link: link.bandwidth)
        pair = (one.zone, other.zone)
        return self.between.get(pair) or self.between.get(pair[::-1]) or ACROSS_ZONES
