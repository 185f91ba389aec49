"""The predicted cost of a placed topology, by the model of `plan/cost`.

Nodes with as many places and the same speed are one pool. A slow node's devices are slower by its
speed. A replica counts as one of the pool of its slowest node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from holdfast.config.run import RunConfig
from holdfast.config.sections.memory import DEVICE, MOVABLE
from holdfast.layout import MeshShape, Replica, Stages, Topology
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import DeviceType, device_named
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.planner import dealer_of
from holdfast.plan.search.splits import even_split
from holdfast.plan.step_microbatches import microbatches

_Kind = tuple[MeshShape, Stages, str, int]  # mesh, stages, pool, microbatches of a step


@dataclass(frozen=True)
class Fleet:
    """What a run's nodes are made of."""

    devices: Mapping[str, DeviceType]  # the table
    node: NodePool  # the device and the links of every node; its numbers do not count
    whole: Cluster | None = None  # of plan.cluster, whose links and losses place replicas

    def cluster(self, nodes: Sequence[NodePlaces]) -> Cluster:
        """The pools of these nodes, the largest first."""
        found = Counter((node.places, round(node.speed, 2)) for node in nodes)
        pools = [
            replace(
                self.node,
                name=f"{places} at {speed:.2f}",
                nodes=number,
                devices=places,
                device=_slower_name(self.node.device, speed),
            )
            for (places, speed), number in found.items()
        ]
        return Cluster(tuple(sorted(pools, key=lambda pool: -pool.size)))

    def devices_of(self, nodes: Sequence[NodePlaces]) -> Mapping[str, DeviceType]:
        """The table, with a type for each speed of these nodes."""
        device, found = device_named(self.node.device, self.devices), dict(self.devices)
        for speed in {round(node.speed, 2) for node in nodes} - {1.0}:
            name = _slower_name(device.name, speed)
            flops = {precision: speed * peak for precision, peak in device.flops.items()}
            bandwidth = speed * device.bandwidth
            found[name] = replace(device, name=name, flops=flops, bandwidth=bandwidth)
        return found


class TopologyCost:
    """Costs of topologies of one run on these nodes."""

    def __init__(self, config: RunConfig, fleet: Fleet, nodes: Sequence[NodePlaces]):
        self._config, self._fleet = config, fleet
        self._nodes = {node.name: node for node in nodes}
        workload = workload_of(config)
        self.problem = Problem(
            workload,
            fleet.cluster(nodes),
            fleet.devices_of(nodes),
            memory_share=config.plan.memory_share,
            bucket_bytes=1e6 * config.layout.bucket_mb,
        )
        self._evaluator = Evaluator(self.problem)

    def cost(self, topology: Topology) -> StepCost:
        return self.of(self.choice(topology))

    def choice(self, topology: Topology) -> Choice:
        """The topology as the cost model takes it, with the microbatches that are dealt."""
        config, number = self._config, max(microbatches(self._config).items())[1]
        shares = dealer_of(topology, config.layout.schedule)(number, len(topology.replicas))
        return placed_choice(config, topology, shares, partial(self._pool_of, topology))

    def equal_replicas(self, mesh: MeshShape, workers: int) -> Choice | None:
        """As many replicas of this mesh as the workers allow, with equal stages; None if a replica
        has none. For a first ranking of meshes."""
        config, pp, count = self._config, mesh[0], workers // prod(mesh)
        number, stages = max(microbatches(config).items())[1], pp * config.layout.stages_a_worker
        if not count or number < count * pp or (pp > 1 and config.model.layers < stages):
            return None
        split = even_split(config.model.layers, stages) if pp > 1 else ()
        pool = self.problem.cluster.pools[0].name
        return _choice(config, {(mesh, split, pool, -(-number // count)): count})

    def of(self, choice: Choice) -> StepCost:
        return self._evaluator.cost(choice)

    def _pool_of(self, topology: Topology, replica: Replica) -> str:
        names = {topology.nodes[rank] for rank in replica.ranks}
        slowest = min((self._nodes[name] for name in names), key=lambda n: (n.speed, n.places))
        return f"{slowest.places} at {slowest.speed:.2f}"


def placed_choice(
    config: RunConfig,
    topology: Topology,
    shares: Sequence[Sequence[int]],
    pool_of: Callable[[Replica], str],
) -> Choice:
    """Return a topology as the cost model takes it. shares: the microbatches of each replica."""
    return _choice(
        config,
        Counter(
            (*replica.kind, pool_of(replica), len(share))
            for replica, share in zip(topology.replicas, shares, strict=True)
            if share
        ),
    )


def _choice(config: RunConfig, counts: Mapping[_Kind, int]) -> Choice:
    """Return the layout with so many replicas of each kind."""
    groups = list[ReplicaChoice]()
    for (mesh, stages, pool, share), count in counts.items():
        words = tuple(config.train.recompute_of(stage, mesh[0]) for stage in range(mesh[0]))
        words = words if len(set(words)) > 1 else words[:1]
        groups.append(ReplicaChoice(count, *mesh, stages, (pool,), share, words))
    layout, memory = config.layout, config.train.memory
    is_cut = any(group.pp > 1 for group in groups)
    return Choice(
        tuple(groups),
        config.train.microbatch_size or 1,
        layout.schedule if is_cut else "1f1b",
        layout.stages_a_worker if is_cut else 1,
        layout.zero_in_memory,
        layout.ep,
        layout.sequence_parallel,
        frozenset(key for key in (*MOVABLE, "activations") if getattr(memory, key) != DEVICE),
    )


def _slower_name(device: str, speed: float) -> str:
    return device if speed == 1 else f"{device} at {speed:.2f}"
