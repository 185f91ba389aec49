"""The recovery ladder: what a loss costs, and where the state comes from. Pure.

The coordinator, the planner and the simulator call it. No other module decides a rung.

    0  some replicas lost no rank: they continue at once
    1  no process is lost
    2  new processes on the same nodes take the lost ranks
    3  processes of another node take the lost ranks
    4  another layout on what is left
    5  more workers than before
    6  neither a process nor the memory of a node has the state: it comes from the run store

A plan costs thousands of layouts. In place of drawn losses it takes the chances of these outcomes,
if nodes are lost at random (`class_chances`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, lgamma

from holdfast.core.sharding.state_table import StateTable
from holdfast.layout import Replica, Topology, coordinates_of
from holdfast.policy.recovery.rank_assignment import assign_ranks
from holdfast.policy.recovery.state_parts import StateSizes, bytes_to_move
from holdfast.policy.recovery.survivors import first_missing_tensor

CONTINUES, FROM_MEMORY, FROM_STORE = range(3)
"""Classes of a loss, as `policy/saving/failure_classes.py` numbers them. The remaining processes
have the state, the memory of nodes has it, or only the run store does."""
LOSS_CLASSES = {CONTINUES: "continues", FROM_MEMORY: "from_memory", FROM_STORE: "from_store"}

Holders = Mapping[str, Collection[str]]
"""By node: the nodes whose memory has the snapshots of its ranks."""


@dataclass(frozen=True)
class Loss:
    """What a generation lost, and what is left of its state."""

    topology: Topology  # that lays out the state
    lost_ranks: frozenset[int]  # no process has their state any more
    lost_nodes: frozenset[str]  # their memory is lost, too
    tiers: Mapping[int, Holders | None]  # by tier, the cheapest first; None: a store, for all nodes
    table: StateTable = ()  # of the run; (): ranks at one place of like replicas have like state


@dataclass(frozen=True)
class Recovery:
    """How the run continues after a loss."""

    rung: int
    tier: int | None  # that has the state; None: the processes that are left
    nbytes: float  # that the ranks of the next topology receive
    loss_class: int  # CONTINUES, FROM_MEMORY or FROM_STORE


_AT_ONCE = Recovery(0, None, 0.0, CONTINUES)


@dataclass(frozen=True)
class Successor:
    """The generation after a loss, and what the coordinator knows of it."""

    topology: Topology
    came_from: Sequence[int | None] | None = None  # old rank of each rank; None: of `loss`
    newcomers: int | None = None  # ranks that a new process takes; None: those that were lost
    workers_before: int | None = None  # of the generation that is over; None: of the loss


def loss_of_nodes(
    topology: Topology, nodes: Collection[str], tiers: Mapping[int, Holders | None]
) -> Loss:
    """Return the loss of complete nodes."""
    lost = frozenset(nodes)
    ranks = frozenset([rank for rank, node in enumerate(topology.nodes) if node in lost])
    return Loss(topology, ranks, lost, tiers)


def intact_replicas(topology: Topology, lost_ranks: Collection[int]) -> list[Replica]:
    """Return the replicas that continue alone; [] if all of them lost a rank, or none did."""
    lost = frozenset(lost_ranks)
    intact = [each for each in topology.replicas if lost.isdisjoint(each.ranks)]
    return intact if len(intact) < len(topology.replicas) else []


def recover(loss: Loss, after: Successor | None, sizes: StateSizes | None = None) -> Recovery:
    """Return the cheapest rung that works.

    Args:
        loss: what was lost.
        after: the generation that follows. None: the intact replicas alone, or nothing yet.
        sizes: of the state; None: bytes do not matter.
    """
    if after is None:
        if intact_replicas(loss.topology, loss.lost_ranks):
            return _AT_ONCE
        return Recovery(6, _first_store(loss), 0.0, FROM_STORE)
    came_from = after.came_from
    if came_from is None:
        came_from = came_from_left(loss.topology, after.topology, loss.lost_ranks)
    if _has_only_intact_replicas(loss, after, came_from):
        return _AT_ONCE
    tier, loss_class = find_source(loss, came_from)
    rung = _rung(loss, after, loss_class)
    if sizes is None:
        return Recovery(rung, tier, 0.0, loss_class)
    if loss_class == FROM_MEMORY:  # the memory of a node that is left keeps its part
        nodes = enumerate(loss.topology.nodes)
        lost = [rank for rank, node in nodes if node in loss.lost_nodes]
        came_from = came_from_left(loss.topology, after.topology, lost)
    elif loss_class == FROM_STORE:
        came_from = (None,) * after.topology.world_size
    moved = bytes_to_move(sizes, loss.topology, after.topology, came_from)
    return Recovery(rung, tier, moved, loss_class)


def came_from_left(
    before: Topology, after: Topology, lost_ranks: Collection[int]
) -> tuple[int | None, ...]:
    """Return the old rank of each rank whose process is left."""
    lost = set(lost_ranks)
    left = {rank: rank for rank in range(before.world_size) if rank not in lost}
    return assign_ranks(before, after, left, left).came_from


def _rung(loss: Loss, after: Successor, loss_class: int) -> int:
    if loss_class == FROM_STORE:
        return 6
    before, now = after.workers_before or loss.topology.world_size, after.topology.world_size
    if now > before:
        return 5
    if now < before:
        return 4
    newcomers = len(loss.lost_ranks) if after.newcomers is None else after.newcomers
    if not newcomers:
        return 1
    return 2 if set(after.topology.nodes) <= set(loss.topology.nodes) else 3


def _has_only_intact_replicas(
    loss: Loss, after: Successor, came_from: Sequence[int | None]
) -> bool:
    """Return True if each replica existed before, with all its ranks in their places."""
    old, new = loss.topology, after.topology
    if new.world_size >= (after.workers_before or old.world_size):
        return False
    replicas = {(each.kind, each.ranks) for each in old.replicas}
    return all(
        (each.kind, tuple([came_from[rank] for rank in each.ranks])) in replicas
        for each in new.replicas
    )


def find_source(
    loss: Loss, came_from: Sequence[int | None] | None = None
) -> tuple[int | None, int]:
    """Return the tier that has the state, and the class of the loss.

    came_from: old rank of each rank that follows; None: each process that is left gets a rank.
    """
    lost = loss.lost_ranks
    if came_from is not None:
        lost = frozenset(range(loss.topology.world_size)).difference(came_from)
    if _have_processes_all(loss, lost):
        return None, CONTINUES
    needed: list[int] = []
    for node in {loss.topology.nodes[rank] for rank in lost}:
        copies = (tier for tier, holders in loss.tiers.items() if _has_copy(node, holders, loss))
        tier = next(copies, None)
        if tier is None:
            return _first_store(loss), FROM_STORE
        needed.append(tier)
    return max(needed), FROM_MEMORY


def _has_copy(node: str, holders: Holders | None, loss: Loss) -> bool:
    return holders is not None and not loss.lost_nodes.issuperset(holders.get(node, ()))


def _first_store(loss: Loss) -> int | None:
    return next((tier for tier, holders in loss.tiers.items() if holders is None), None)


def _have_processes_all(loss: Loss, lost: frozenset[int]) -> bool:
    """Return True if the processes of all ranks but `lost` have the complete state."""
    topology = loss.topology
    are_alike = not any(spec.of_learners for spec in loss.table)  # the replicas
    if not lost or (
        are_alike and any(lost.isdisjoint(replica.ranks) for replica in topology.replicas)
    ):
        return True
    left = set(range(topology.world_size)) - lost
    if not left:
        return False
    if loss.table:
        return first_missing_tensor(topology, loss.table, left) is None
    return any(_is_covered(topology, kind, lost) for kind in topology.kinds)


def _is_covered(topology: Topology, kind: object, lost: Collection[int]) -> bool:
    """Return True if replicas of one kind have a rank left at each place. Ranks that differ along
    cp alone have the same state."""
    replicas = [each for each in topology.replicas if each.kind == kind]
    places: dict[tuple[int, int, int], bool] = {}
    for replica in replicas:
        for mesh_rank, rank in enumerate(replica.ranks):
            pp, dp_shard, _, tp = coordinates_of(mesh_rank, replica.mesh_shape)
            key = pp, dp_shard, tp
            places[key] = places.get(key, False) or rank not in lost
    return all(places.values())


def class_chances(
    replicas: Sequence[tuple[int, int]] | None, nodes: int, lost: int
) -> tuple[float, float, float]:
    """Return the chances of CONTINUES, FROM_MEMORY and FROM_STORE.

    Args:
        replicas: (groups of replicas that share no node, nodes of each), by kind of replica. None:
            a replica lies elsewhere.
        nodes: that may be lost.
        lost: how many of them are, each set of them with the same chance.
    """
    broken = 1.0 if replicas is not None else 0.0  # chance that no replica stays complete
    for groups, size in replicas or ():
        hit = 1 - chance_of_none(nodes, min(size, nodes), lost)
        broken *= 0.0 if lost < groups else hit**groups
    memory = _copies_survive(nodes, lost)
    return 1 - broken, broken * memory, broken * (1 - memory)


def _copies_survive(nodes: int, lost: int) -> float:
    """Return the chance that each lost node's copy lies on a node that is left. Each has one copy,
    on another node."""
    if lost >= nodes:
        return 0.0
    return (1 - (lost - 1) / (nodes - 1)) ** lost if nodes > 1 else 0.0


def chance_of_none(nodes: int, marked: int, drawn: int) -> float:
    """Return the chance that none of the marked nodes is drawn."""
    if drawn > nodes - marked:
        return 0.0
    return exp(_log_ways(nodes - marked, drawn) - _log_ways(nodes, drawn))


def _log_ways(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)
