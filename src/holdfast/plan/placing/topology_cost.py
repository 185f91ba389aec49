"""The predicted cost of a placed topology, by the model of `plan/cost`.

Nodes with as many places and the same speed are one pool. A slow node's devices are slower by its
speed. A replica counts as one of the pool of its slowest node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.config.run import RunConfig
from holdfast.layout import MeshShape, Replica, Stages, Topology
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator, Problem, StepCost
from holdfast.plan.cost.run_workload import workload_of
from holdfast.plan.hardware.cluster import Cluster, NodePool
from holdfast.plan.hardware.devices import DeviceType, device_named
from holdfast.plan.placing.interface import NodePlaces
from holdfast.plan.placing.planner import dealer_of
from holdfast.plan.step_microbatches import microbatches

_Kind = tuple[MeshShape, Stages, str, int]  # mesh, stages, pool, microbatches of a step


@dataclass(frozen=True)
class Fleet:
    """What a run's nodes are made of. devices: the table. node: the device and the links of every
    node; its numbers of nodes and devices do not count."""

    devices: Mapping[str, DeviceType]
    node: NodePool

    def pool_name(self, node: NodePlaces) -> str:
        return f"{node.places} at {node.speed:.2f}"

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
        device = device_named(self.node.device, self.devices)
        slow = {round(node.speed, 2) for node in nodes} - {1.0}
        return {**self.devices, **{_slower_name(device.name, s): _slower(device, s) for s in slow}}


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
        config = self._config
        number = max(microbatches(config).items())[1]
        shares = dealer_of(topology, config.layout.schedule)(number, len(topology.replicas))
        kinds = Counter(
            (*replica.kind, self._pool_of(replica, topology), len(share))
            for replica, share in zip(topology.replicas, shares, strict=True)
            if share
        )
        has_stages = any(mesh[0] > 1 for mesh, *_ in kinds)
        return Choice(
            tuple(self._group(kind, count) for kind, count in kinds.items()),
            config.train.microbatch_size or 1,
            config.layout.schedule,
            config.layout.stages_a_worker if has_stages else 1,
            config.layout.zero,
            config.layout.ep,
            config.layout.sequence_parallel,
        )

    def equal_replicas(self, mesh: MeshShape, workers: int) -> Choice | None:
        """As many replicas of this mesh as the workers allow, with equal stages; None if a replica
        has none. For a first ranking of meshes."""
        count, (pp, *_) = workers // mesh[0] // mesh[1] // mesh[2] // mesh[3], mesh
        number = max(microbatches(self._config).items())[1]
        stages = pp * self._config.layout.stages_a_worker if pp > 1 else 0
        blocks = self._config.model.layers
        if not count or number < count * pp or blocks < stages:
            return None
        each = tuple(blocks // stages + (i >= stages - blocks % stages) for i in range(stages))
        pool = self.problem.cluster.pools[0].name
        group = self._group((mesh, each, pool, -(-number // count)), count)
        layout = self._config.layout
        size, virtual = self._config.train.microbatch_size or 1, layout.stages_a_worker
        return Choice(
            (group,), size, layout.schedule, virtual if pp > 1 else 1, layout.zero, layout.ep
        )

    def of(self, choice: Choice) -> StepCost:
        return self._evaluator.cost(choice)

    def _group(self, kind: _Kind, count: int) -> ReplicaChoice:
        (pp, dp_shard, cp, tp), stages, pool, number = kind
        words = self._config.train.recompute_words
        if len(words) not in (1, pp):
            words = ("full",) if "full" in words else ("selective",)
        return ReplicaChoice(count, pp, dp_shard, cp, tp, stages, (pool,), number, words)

    def _pool_of(self, replica: Replica, topology: Topology) -> str:
        names = {topology.nodes[rank] for rank in replica.ranks}
        slowest = min((self._nodes[name] for name in names), key=lambda n: (n.speed, n.places))
        return self._fleet.pool_name(slowest)


def _slower_name(device: str, speed: float) -> str:
    return device if speed == 1 else f"{device} at {speed:.2f}"


def _slower(device: DeviceType, speed: float) -> DeviceType:
    flops = {precision: speed * peak for precision, peak in device.flops.items()}
    name = _slower_name(device.name, speed)
    return replace(device, name=name, flops=flops, bandwidth=speed * device.bandwidth)
