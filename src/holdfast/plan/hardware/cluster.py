"""The machines that a plan may use: pools of like nodes, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from holdfast.plan.hardware.devices import DeviceType, device_named
from holdfast.plan.hardware.link import Link

ACROSS_ZONES = Link(500e-6, 2.5e9 / 8)
"""Of one device, if a cluster names no link between two zones. A virtual machine of one cloud has
2.5 GB/s to another zone (Sailor, SOSP'25). Eight devices share it."""


@dataclass(frozen=True)
class NodePool:
    """Like nodes in one place. ways: what collectives of an axis see of `inside` by its name
    (`group_links.py`), if that was measured."""

    name: str
    nodes: int
    devices: int  # of one node
    device: str  # a name that `device_named` reads
    inside: Link  # between two devices of a node
    outside: Link  # of one device to another node, while all devices of the node send
    zone: str = ""
    nodes_per_rack: int = 0  # 0: racks are not known
    across_racks: Link | None = None
    is_spot: bool = False
    usd_per_hour: float | None = None  # of one node; None: not known
    losses_per_day: float = 0.0  # of one node
    burst: float = 1.0  # nodes that an interruption takes on average
    grams_co2_per_kwh: float | None = None  # None: not known
    nodes_per_power_domain: int = 0  # 0: not known
    priced: str = ""  # date of the price
    ways: tuple[tuple[str, Link], ...] = ()

    @property
    def size(self) -> int:
        """Devices of the pool."""
        return self.nodes * self.devices

    def device_type(self, devices: Mapping[str, DeviceType]) -> DeviceType:
        """Its devices, with their limits of power and memory."""
        return device_named(self.device, devices)


@dataclass(frozen=True)
class Cluster:
    """Pools, and what lies between zones by (one zone, other zone) in either order."""

    pools: tuple[NodePool, ...]
    between: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    usd_per_gb: Mapping[tuple[str, str], float] = field(default_factory=dict)  # of 1e9 bytes
    domain_losses_per_day: Mapping[str, float] = field(default_factory=dict)
    """Of one complete rack, power domain, pool or zone; one that is left out is not known."""

    @property
    def size(self) -> int:
        """Devices of all pools."""
        return sum(pool.size for pool in self.pools)

    def pool(self, name: str) -> NodePool:
        return next(pool for pool in self.pools if pool.name == name)

    def zones_without_link(self) -> list[tuple[str, str]]:
        """Pairs of zones for which `ACROSS_ZONES` is assumed."""
        zones = sorted({pool.zone for pool in self.pools})
        return [
            pair
            for pair in combinations(zones, 2)
            if pair not in self.between and pair[::-1] not in self.between
        ]

    def link_between(self, one: NodePool, other: NodePool) -> Link:
        """Of one device to a device of another pool."""
        if one.zone == other.zone:
            return min(one.outside, other.outside, key=lambda link: link.bandwidth)
        pair = (one.zone, other.zone)
        return self.between.get(pair) or self.between.get(pair[::-1]) or ACROSS_ZONES
