"""The nodes of a cluster as a scheduler sees them: zones, racks, and the link that a group crosses.

Built from the planner's cluster, so that a cluster file serves the planner and the study alike.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.link import Link, load_links


@dataclass(frozen=True)
class Node:
    """zone, rack: numbers, each rack in one zone. pool: its place in the cluster's pools."""

    number: int
    zone: int
    rack: int
    pool: int
    devices: int


@dataclass(frozen=True)
class Fabric:
    """All nodes, in the order of zones and racks."""

    cluster: Cluster

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        zones = sorted({pool.zone for pool in self.cluster.pools})
        found: list[Node] = []
        first_rack = 0
        for place, pool in enumerate(self.cluster.pools):
            size = pool.nodes_per_rack or pool.nodes
            zone = zones.index(pool.zone)
            found += [
                Node(len(found) + k, zone, first_rack + k // size, place, pool.devices)
                for k in range(pool.nodes)
            ]
            first_rack += (pool.nodes + size - 1) // size
        return tuple(found)

    @cached_property
    def devices(self) -> int:
        """Devices of all nodes."""
        return sum(node.devices for node in self.nodes)

    @cached_property
    def racks(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each rack's nodes."""
        return _grouped((node.rack, node.number) for node in self.nodes)

    @cached_property
    def zones(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each zone's racks."""
        return _grouped({(node.zone, node.rack): None for node in self.nodes})

    def racks_of(self, nodes: Iterable[int]) -> frozenset[int]:
        return frozenset(self.nodes[number].rack for number in nodes)

    def zones_of(self, nodes: Iterable[int]) -> frozenset[int]:
        return frozenset(self.nodes[number].zone for number in nodes)

    def ring_link(self, nodes: Sequence[int]) -> Link:
        """The slowest link of a ring through nodes, which stand in the order of zones and racks.
        So the ring leaves each rack once."""
        pools = {self.nodes[number].pool for number in nodes}
        links = [self._leaving(pools)] if len(pools) > 1 else []
        pool = self.cluster.pools[min(pools)]
        is_one_rack = len(self.racks_of(nodes)) == 1
        links.append(pool.outside if is_one_rack else pool.across_racks or pool.outside)
        return min(links, key=lambda link: link.bandwidth)

    def best_link(self, pods: int, devices: int) -> Link:
        """The link of so many pods if the cluster were empty: of one rack, if that has room."""
        of_zones = [[n for rack in zone for n in self.racks[rack]] for zone in self.zones]
        for racks in (self.racks, of_zones):
            for nodes in racks:
                fitting = [n for n in nodes for _ in range(self.nodes[n].devices // devices)]
                if len(fitting) >= pods:
                    return self.ring_link(fitting[:pods])
        return self.ring_link([node.number for node in self.nodes])

    def _leaving(self, pools: Iterable[int]) -> Link:
        held = [self.cluster.pools[place] for place in sorted(pools)]
        return min(
            (self.cluster.link_between(a, b) for a in held for b in held if a is not b),
            key=lambda link: link.bandwidth,
        )


def example_cluster(
    zones: int = 1, racks: int = 8, nodes: int = 8, link: str = "roce-100", oversubscribed: int = 4
) -> Cluster:
    """Nodes of 8 A100-80 with a network card for each device. `racks` and `nodes` are those of one
    zone and of one rack. The racks' uplinks have a part of the bandwidth of their nodes
    (`oversubscribed` to one). All but the links is assumed: a middle-sized cluster."""
    links = load_links()
    inside, outside = links["nvlink3"].link, links[link].link
    return Cluster(
        tuple(
            NodePool(
                name=f"zone{number}",
                nodes=racks * nodes,
                devices=8,
                device="A100-80",
                inside=inside,
                outside=outside,
                zone=f"zone{number}",
                nodes_per_rack=nodes,
                across_racks=outside.shared_by(oversubscribed),
            )
            for number in range(zones)
        )
    )


def _grouped(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    found: dict[int, list[int]] = {}
    for group, number in pairs:
        found.setdefault(group, []).append(number)
    return tuple(tuple(found[group]) for group in sorted(found))
