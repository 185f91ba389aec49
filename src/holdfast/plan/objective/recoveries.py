"""The recovery of a planned layout from the loss of given nodes, by the recovery ladder.

Ranks fill the devices of a pool in order, replica after replica. A node that is left keeps its
place where that is possible, and a spare takes the place of a lost one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.layout import Replica, Topology
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Problem
from holdfast.plan.cost.workload import Workload
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.objective.occupancy import nodes_used
from holdfast.policy.recovery.ladder import (
    Holders,
    Recovery,
    Successor,
    came_from_left,
    intact_replicas,
    loss_of_nodes,
    recover,
)
from holdfast.policy.recovery.rank_assignment import fill_places
from holdfast.policy.recovery.state_parts import StateSizes, bytes_to_move
from holdfast.policy.saving.tiers import DISK, MEMORY, PEERS

NodesByPool = Mapping[str, Sequence[str]]
"""Names of the nodes of each pool, in order; the layout takes the first ones."""


def state_sizes(workload: Workload) -> StateSizes:
    """Return the bytes of a workload's state by layer."""
    each = workload.state.optimizer
    head = workload.layers[-1]
    first, *blocks = (each * layer.parameters for layer in workload.layers[:-1])
    last = each * (head.whole_parameters if workload.is_tied else head.parameters)
    return StateSizes(first, tuple(blocks), last)


def topology_of(cluster: Cluster, choice: Choice, nodes: NodesByPool) -> Topology:
    """Place a layout on nodes."""
    is_folded = SCHEDULE_KINDS[choice.schedule].is_folded
    taken = dict.fromkeys(nodes, 0)  # devices
    replicas: list[Replica] = []
    names: list[str] = []
    for group in choice.replicas:
        stage = group.replica_size // group.pp
        stages = group.stages if group.pp > 1 else ()
        for _ in range(group.dp_replicate):
            ranks = tuple(range(len(names), len(names) + group.replica_size))
            shape = group.mesh_shape
            replicas.append(Replica(len(replicas), ranks, shape, stages, is_folded=is_folded))
            for index in range(group.replica_size):
                pool = group.pool_at(index // stage)
                names.append(nodes[pool][taken[pool] // cluster.pool(pool).devices])
                taken[pool] += 1
    return Topology(0, tuple(replicas), tuple(names))


def ring(nodes: Sequence[str]) -> Holders:
    """Return the holders if each node's copy lies on the next one. Of nodes next to each other
    that are lost, one has no copy left, so this is the worst place."""
    if len(nodes) < 2:
        return {}
    return dict(zip(nodes, ((name,) for name in (*nodes[1:], nodes[0])), strict=True))


def recovery_of(
    problem: Problem,
    choice: Choice,
    layout: Choice | None,
    nodes: NodesByPool,
    lost: Collection[str],
    holders: Holders | None = None,
) -> tuple[Recovery, float]:
    """Return the recovery, and the bytes that the devices of the next layout receive.

    Args:
        problem: with the cluster and the state.
        choice: the layout that ran.
        layout: the one that follows; None: nothing fits, and the run waits.
        nodes: that were there, spares included.
        lost: those that are lost.
        holders: of copies in memory; None: the worst place.
    """
    cluster, sizes = problem.cluster, state_sizes(problem.workload)
    used = {name: list(nodes[name][:n]) for name, n in nodes_used(cluster, choice).items()}
    every = [name for names in used.values() for name in names]
    copies = ring(every) if holders is None else holders
    before = topology_of(cluster, choice, nodes)
    here = {name: (name,) for name in every} if copies else {}
    loss = loss_of_nodes(before, lost, {MEMORY: here, PEERS: copies, DISK: None})
    intact = intact_replicas(before, loss.lost_ranks)
    if layout is None:
        return recover(loss, None), 0.0
    left = _nodes_left(nodes, used, lost, nodes_used(cluster, layout))
    after = topology_of(cluster, layout, left)
    if intact:
        came_from = came_from_left(before, after, loss.lost_ranks)
        moved = bytes_to_move(sizes, before, after, came_from)
        return recover(loss, None), moved
    found = recover(loss, Successor(after), sizes)
    return found, found.nbytes


def _nodes_left(
    nodes: NodesByPool,
    used: Mapping[str, Sequence[str]],
    lost: Collection[str],
    numbers: Mapping[str, int],
) -> dict[str, list[str]]:
    """Return the nodes of the next layout by pool, in the order of ranks."""
    left = {}
    for pool, number in numbers.items():
        before = used.get(pool, ())
        free = [name for name in nodes[pool] if name not in lost and name not in before]
        left[pool] = fill_places(before, set(before).difference(lost), free, number)
    return left
