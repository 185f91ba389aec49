"""Which nodes a new replica gets, if it is known where the nodes stand.

Two wishes pull apart. A replica is fast if its nodes stand near each other, and replicas exchange
gradients faster if they do, too. But a rack, a power domain, a spot
pool or a zone may be lost at once. If a complete replica is left elsewhere, the run continues from
memory. Both are one sum here, in seconds lost for each second of training:

    communication   (bytes inside a replica / bandwidth at its widest level + what the backward
                     does not hide of: bytes of gradients / bandwidth between replicas) / step
    failures        sum over domains of rate * (cost of a recovery from memory,
                     or of a start from a checkpoint if every replica has a node in the domain)

A new replica takes the domain with the least sum, after the replicas that are placed already.
Tensor groups stay inside a node in any case (`PlacePool`). Nodes whose place is not
known have no domains, so nothing is chosen, and the packing alone decides.

Links and losses are those of the run's cluster file. Without one the tables below are assumed.
The table of links is for one accelerator of a usual node with eight. It ranks layouts, and times
none. Sources of its rows: Calculon (Isaev et al., SC'23) for links in a node and between nodes of a
rack. Sailor (SOSP'25) for zones and regions of one cloud. Racks share half of their nodes'
bandwidth (an assumption: fat trees with 2:1 are usual).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from holdfast.config.run import RunConfig
from holdfast.core.sharding.run_table import run_block_costs
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.link import Link
from holdfast.policy.placement import FAILURE_DOMAINS, Machine

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


def named_links(cluster: Cluster) -> dict[str, Link]:
    """Return a cluster's slowest link at each level for which it names one."""
    pools = cluster.pools
    there = {
        "node": [pool.inside for pool in pools],
        "rack": [pool.outside for pool in pools],
        "zone": [pool.across_racks or pool.outside for pool in pools],
    }
    for zones, link in cluster.between.items():
        level = "region" if len({region_of(zone) for zone in zones}) == 1 else "world"
        there.setdefault(level, []).append(link)
    return {level: min(links, key=lambda link: link.bandwidth) for level, links in there.items()}


def links_of(cluster: Cluster) -> dict[str, Link]:
    """Return `named_links`. A level that has none gets the assumed link, but none faster than that
    of the level before."""
    named, links = named_links(cluster), dict[str, Link]()
    near = Link(0.0, inf)
    for level, assumed in ASSUMED_LINKS.items():
        latency_s = max(assumed.latency_s, near.latency_s)
        slowed = Link(latency_s, min(assumed.bandwidth, near.bandwidth), near.ramp)
        near = links[level] = named.get(level, slowed)
    return links


def failures_of(cluster: Cluster) -> dict[str, float]:
    """Return the losses a day of a domain of each kind, as the cluster file gives them."""
    lost = sum(pool.nodes * pool.losses_per_day for pool in cluster.pools)
    node = lost / sum(pool.nodes for pool in cluster.pools)
    return {**FAILURES_PER_DAY, "node": node, **cluster.domain_losses_per_day}


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


_DAY_S = 86_400.0

FAILURES_PER_DAY: Mapping[str, float] = {
    "node": 3.8e-3,
    "rack": 2e-3,
    "power": 5e-4,
    "pool": 2.0,
    "zone": 1e-3,
}
"""Losses of one complete domain a day. node: Llama 3 (419 interruptions of 2,048 nodes in 54 days).
pool: bursts of spot nodes, from days with 2 to 11 in the traces of Bamboo and of "Can't Be Late".
The rest is assumed. A cluster file may replace them."""


@dataclass(frozen=True)
class PlacementCosts:
    """What the sum is made of. restart_s: lost if a domain takes all replicas: the start, and half
    of the interval between checkpoints."""

    step_s: float = 1.0
    inner_bytes: float = 1e8  # sent by a rank inside its replica in a step, over its slowest link
    gradient_bytes: float = 1e8  # of a rank, exchanged between replicas
    recovery_s: float = 5.0  # lost if a domain takes some replicas
    restart_s: float = 600.0
    links: Mapping[str, Link] = field(default_factory=lambda: ASSUMED_LINKS)
    failures_per_day: Mapping[str, float] = field(default_factory=lambda: FAILURES_PER_DAY)


_ASSUMED_FLOPS = {"cpu": 5e10}
_ASSUMED_ACCELERATOR_FLOPS = 4e14
"""FLOP/s that a device reaches: 40 % of an H100's peak, a core's for a CPU."""
_HIDDEN_SHARE = 0.5
"""Of a step: gradients travel while the backward computes, which takes about so much of it."""
_FLOPS_PER_PARAMETER = 6
_BYTES_PER_GRADIENT = 4
_BYTES_PER_ACTIVATION = 2


def placement_costs(config: RunConfig, cluster: Cluster | None = None) -> PlacementCosts:
    """Return the costs of a run, from its model and degrees. cluster: whose links and losses count
    in place of the assumed ones. They are good enough to compare
    domains: an estimate of a step's time is not among them (`plan/memory/estimate.py`)."""
    layout, train = config.layout, config.train
    blocks = run_block_costs(config)
    parameters = sum(blocks.parameters) + blocks.first[1] + blocks.last[1]
    tokens = train.batch_size * config.data.sequence_length
    pp, shards, cp, tp = layout.mesh_shape
    workers = max(layout.workers, layout.ranks)
    replicas = workers // layout.ranks
    flops = _ASSUMED_FLOPS.get(config.device, _ASSUMED_ACCELERATOR_FLOPS)
    own = parameters / (pp * tp) * _BYTES_PER_GRADIENT
    inner = 3 * own if shards > 1 or cp > 1 else 0.0
    if pp > 1:
        inner += 2 * tokens / replicas * config.model.dim * _BYTES_PER_ACTIVATION
    return PlacementCosts(
        step_s=_FLOPS_PER_PARAMETER * parameters * tokens / workers / flops,
        inner_bytes=inner,
        gradient_bytes=own / shards,
        links=links_of(cluster) if cluster else ASSUMED_LINKS,
        failures_per_day=failures_of(cluster) if cluster else FAILURES_PER_DAY,
    )


def placement_cost(replicas: Sequence[Sequence[Machine]], costs: PlacementCosts) -> float:
    """Return the seconds lost for each second of training. replicas: the machines of each."""
    inner = max((_widest(machines) for machines in replicas), key=_width, default="node")
    between = _widest([machine for machines in replicas for machine in machines])
    lost = costs.links[inner].message_s(costs.inner_bytes)
    if len(replicas) > 1:
        exchange = costs.links[between].message_s(2 * costs.gradient_bytes)
        lost += max(0.0, exchange - _HIDDEN_SHARE * costs.step_s)
    total = 0.0
    for kind in FAILURE_DOMAINS:
        hit: dict[str, int] = {}
        for machines in replicas:
            for name in {machine.domain(kind) for machine in machines}:
                hit[name] = hit.get(name, 0) + 1
        hit.pop("", None)  # unknown
        rate = costs.failures_per_day[kind] / _DAY_S
        total += sum(
            rate * (costs.restart_s if number == len(replicas) else costs.recovery_s)
            for number in hit.values()
        )
    return lost / costs.step_s + total


def _width(level: str) -> int:
    return LEVELS.index(level)


def _widest(machines: Sequence[Machine]) -> str:
    """The level at which the two machines meet that are farthest from each other. Domains are
    nested, so it is enough to compare all with the first."""
    first = machines[0]
    return max((meeting_level(first, other) for other in machines), key=_width, default="node")


class DomainChooser:
    """Chooses the nodes that each new replica may use. Lives for one plan."""

    def __init__(
        self, machines: Sequence[Machine | None], costs: PlacementCosts | None = None
    ) -> None:
        """machines: the place of each node, by its index; None: not known."""
        self._machines = machines
        self._costs = costs or PlacementCosts()
        self._placed: list[list[Machine]] = []
        known = [machine for machine in machines if machine is not None]
        self.is_of_use = len(known) == len(machines) and any(
            machine.domain(kind) for machine in known for kind in FAILURE_DOMAINS if kind != "node"
        )
        self._scopes = list(self._make_scopes()) if self.is_of_use else []

    def place(self, nodes: Iterable[int]) -> None:
        """Take note that a replica is on these nodes."""
        found = [self._machines[node] for node in sorted(set(nodes))]
        self._placed.append([machine for machine in found if machine is not None])

    def choose(self, size: int, free: Sequence[int]) -> frozenset[int] | None:
        """Return the nodes among which a replica of so many workers is best packed; None: any.
        free: free places of each node."""
        best: tuple[float, int, int] | None = None
        for number, scope in enumerate(self._scopes):
            room = sum(free[node] for node in scope)
            if room < size:
                continue
            likely = [self._machines[node] for node in self._likely(scope, size, free)]
            replicas = [*self._placed, [machine for machine in likely if machine is not None]]
            key = (placement_cost(replicas, self._costs), room, number)
            best = key if best is None or key < best else best
        return None if best is None else self._scopes[best[2]]

    def near(self, nodes: Iterable[int], size: int, free: Sequence[int]) -> frozenset[int] | None:
        """Return the fewest nodes around those of a replica that have room for so many workers
        more; None: any."""
        own = set(nodes)
        fit = (s for s in self._scopes if own & s and sum(free[node] for node in s) >= size)
        return min(fit, key=lambda s: (-len(own & s), len(s), sorted(s)), default=None)

    def in_order(self, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (node, places) so that nodes of a rack follow each other: stages that send to each
        other are neighbours. Unlike parts stay in the order in which they were taken."""
        if not self.is_of_use or len({places for _, places in parts}) > 1:
            return list(parts)
        where = {n: (m.zone, m.power, m.rack, m.name) for n, m in enumerate(self._machines) if m}
        return sorted(parts, key=lambda part: where.get(part[0], ()))

    def _likely(self, scope: frozenset[int], size: int, free: Sequence[int]) -> list[int]:
        """The nodes that packing would take: the smallest that is enough, or the emptiest."""
        inside = sorted((node for node in scope if free[node]), key=lambda i: (free[i], i))
        enough = next((node for node in inside if free[node] >= size), None)
        if enough is not None:
            return [enough]
        taken: list[int] = []
        for node in reversed(inside):
            if size <= 0:
                break
            taken.append(node)
            size -= free[node]
        return taken

    def _make_scopes(self) -> Iterator[frozenset[int]]:
        """Every set of nodes that share a rack, a power domain, a pool or a zone, and all nodes."""
        seen: set[frozenset[int]] = set()
        everywhere = frozenset(range(len(self._machines)))
        for kind in FAILURE_DOMAINS:
            domains: dict[str, set[int]] = {}
            for node, machine in enumerate(self._machines):
                if machine is not None and kind != "node" and machine.domain(kind):
                    domains.setdefault(machine.domain(kind), set()).add(node)
            for name in sorted(domains):
                scope = frozenset(domains[name])
                if scope not in seen:
                    seen.add(scope)
                    yield scope
        if everywhere not in seen:
            yield everywhere
