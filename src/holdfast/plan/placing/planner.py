"""The simple planner: as many workers as can be used, with as little change as possible.

1. `plan/placing/replica_counts.py` decides how many replicas of which shape there are. It keeps
   the run file's replicas and makes smaller ones of the remaining workers. So no machine is idle
   because a number does not divide.
2. Complete replicas stay where they are. Then those that lost a worker are mended. Their remaining
   workers keep their places. The gaps are filled, first from their own nodes, then with workers
   that hold just the missing state.
3. What is new is packed on as few nodes as possible: the loss of a node is to touch few replicas.
   Within a node every place in the mesh goes to the worker that holds most of what it needs.

A replica's weight, its share of the microbatches, is its workers times the speed of its slowest
node. Everything is arithmetic without a clock: the same input gives the same plan everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import gcd

from holdfast.config.run import RunConfig
from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.core.sharding.reduction_tree import Shares, deal
from holdfast.errors import LayoutError
from holdfast.layout import Replica, Topology
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.placing.assignment import PresentReplicas, ReplicaPlacer
from holdfast.plan.placing.interface import LayoutPlan, NodePlaces, PresentPlacement
from holdfast.plan.placing.replica_counts import choose_replicas
from holdfast.plan.placing.replica_shapes import AllowedShapes
from holdfast.plan.step_microbatches import microbatches

_SPEED_RESOLUTION = 100  # steps in which speeds are told apart


def plan_layout(
    config: RunConfig,
    nodes: Sequence[NodePlaces],
    generation: int,
    /,
    present: PresentPlacement | None = None,
    *,
    memory: int | None = None,
    cluster: Cluster | None = None,
) -> LayoutPlan:
    """A Planner. memory: bytes that a worker may hold, see `plan.placing.replica_shapes`. cluster:
    whose links and losses decide where replicas stand; None: the assumed ones."""
    shapes = AllowedShapes(config, memory)
    there = sum(node.places for node in nodes)
    workers = min(there, _max_workers(config) or there)
    if workers < 1:
        raise LayoutError(
            "there is no place for a worker", where="layout.workers", remedy="wait for a node"
        )
    number = min(microbatches(config).values())
    old = PresentReplicas(shapes, nodes, present)
    smaller = [shape for _, shape in old.smaller_replicas]
    chosen = choose_replicas(
        shapes, workers, number, Counter(s for _, s in old.whole_replicas), smaller
    )
    if not chosen.workers:
        raise _no_replica_error(shapes, workers, number)
    making = ReplicaPlacer(config, nodes, old, chosen, cluster)
    built = making.place()
    idle = there - chosen.workers
    weights = _weights(
        [each.shape.replica_size for each in built],
        [min(nodes[seat.node].speed for seat in each.slots) for each in built],
    )
    replicas: list[Replica] = []
    first = 0
    for index, (each, weight) in enumerate(zip(built, weights, strict=True)):
        replicas.append(each.shape.replica(index, first, weight))
        first += each.shape.replica_size
    names = tuple(nodes[seat.node].name for each in built for seat in each.slots)
    return LayoutPlan(
        Topology(generation, tuple(replicas), names),
        tuple(seat.old_rank for each in built for seat in each.slots),
        sum(each.is_unchanged for each in built),
        sum(making.missing_bytes(each) for each in built),
        idle,
        _idle_reason(config, idle, there - workers, number) if idle else "",
    )


def dealer_of(topology: Topology, schedule: str) -> Callable[[int, int], Shares]:
    """Return the function that deals microbatches in this topology. It deals by weight, with at
    least one for a replica, and as many as its schedule needs to fill the pipeline. `schedule` is
    the run file's."""
    replicas = topology.replicas
    least = tuple(SCHEDULE_KINDS[schedule].least_microbatches(r.degree("pp")) for r in replicas)
    weights = tuple(r.weight for r in replicas)

    def dealer(leaves: int, number: int) -> Shares:
        if number != len(replicas):
            raise ValueError(f"{number} replicas, but weights for {len(replicas)}")
        return deal(leaves, number, weights, least)

    return dealer


def reweight(topology: Topology, speeds: Mapping[int, float]) -> Topology:
    """The same topology with new weights. speeds: by rank, 1 where none is given; the slowest
    rank of a replica counts."""
    pace = [min(speeds.get(rank, 1.0) for rank in r.ranks) for r in topology.replicas]
    weights = _weights([len(r.ranks) for r in topology.replicas], pace)
    changed = zip(topology.replicas, weights, strict=True)
    return replace(topology, replicas=tuple(replace(r, weight=w) for r, w in changed))


def _weights(sizes: Sequence[int], speeds: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to size times speed, as small as they can be."""
    fastest = max(speeds)
    exact = [
        size * max(1, round(_SPEED_RESOLUTION * speed / fastest))
        for size, speed in zip(sizes, speeds, strict=True)
    ]
    common = reduce(gcd, exact)
    return [weight // common for weight in exact]


def _max_workers(config: RunConfig) -> int:
    """Workers that the run file allows; 0: as many as there are places."""
    layout = config.layout
    return layout.least_workers if layout.replicas else layout.workers


def _no_replica_error(shapes: AllowedShapes, workers: int, number: int) -> LayoutError:
    smallest = min(shapes.smaller_shapes, key=lambda s: s.replica_size)
    if smallest.replica_size > workers:
        bound = "" if shapes.memory is None else f" within {shapes.memory:,} bytes a worker"
        return LayoutError(
            f"the smallest replica{bound} needs {smallest.replica_size} workers, there are places "
            f"for {workers}",
            where="layout",
            remedy=f"wait for {smallest.replica_size - workers} more, or allow more memory",
        )
    return LayoutError(
        f"a step has {number} microbatches, and a pipeline under "
        f"{shapes.config.layout.schedule} needs more",
        where="layout.pp",
        remedy="use layout.schedule=gpipe",
    )


def _idle_reason(config: RunConfig, idle: int, over: int, number: int) -> str:
    if idle == over:
        key = "layout.replicas" if config.layout.replicas else "layout.workers"
        return f"{key} asks for {_max_workers(config)} workers"
    most = f"a step has {number} microbatches, and every replica needs "
    each = SCHEDULE_KINDS[config.layout.schedule].least_a_rank
    most += {0: "one", 1: "one for each stage"}.get(each, f"{each} for each worker along pp")
    return f"no replica of {idle - over} workers or fewer can be added: {most}"
