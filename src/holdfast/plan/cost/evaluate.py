"""The cost of one layout on one cluster: seconds of a step, part by part, and bytes of each stage.

    problem = Problem(workload, cluster, devices)
    cost = Evaluator(problem).cost(choice)

Every second of a step has one part: `StepCost.parts` adds up to `step_s`. The pipeline's time is
that of its schedule's own table with the stages' durations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.config.pipeline_schedules import SCHEDULE_KINDS
from holdfast.layout import Replica
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.collectives import allreduce_s, gather_s, scatter_s
from holdfast.plan.cost.group_links import GroupLinks, group_links
from holdfast.plan.cost.layer_times import LayerTimes, Part, ShapeTimes
from holdfast.plan.cost.pipeline_time import PipelineTime, StageTimes, in_flight, pipeline_time
from holdfast.plan.cost.sharded_passes import with_collectives
from holdfast.plan.cost.stage_memory import (
    ASSUMED_OVERHEAD,
    Held,
    MemoryOverhead,
    StageMemory,
    expert_parameters,
    layer_parameters,
    rank_parameters,
    stage_memory,
)
from holdfast.plan.cost.workload import Layer, PassTimes, Workload
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.devices import DeviceType, device_named


@dataclass(frozen=True)
class Problem:
    """times: seconds of layers; None: from shapes. memory_share: of a device's memory that a run
    may use. waits_for_sends: ranks compute nothing while they send to another stage or receive.
    hides_gradients: sums of gradients travel while a stage's last backward computes. slow: by
    index on pp, how many times as long a rank's computing takes."""

    workload: Workload
    cluster: Cluster
    devices: Mapping[str, DeviceType]
    times: LayerTimes | None = None
    memory_share: float = 0.95
    overhead: MemoryOverhead = ASSUMED_OVERHEAD
    waits_for_sends: bool = False
    hides_gradients: bool = True
    slow: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupCost:
    """Of one kind of replica: seconds of its pipeline, and the memory of each index on pp."""

    pipeline: PipelineTime
    memory: tuple[StageMemory, ...]
    tail: Mapping[str, float]

    @property
    def step_s(self) -> float:
        return self.pipeline.seconds + sum(self.tail.values())


@dataclass(frozen=True)
class StepCost:
    """parts: seconds by what they go to, of the slowest kind of replica. groups: by kind of
    replica. short_of: bytes that the fullest device lacks; 0 where all fit."""

    step_s: float
    parts: Mapping[str, float]
    groups: tuple[GroupCost, ...]
    short_of: float = 0.0

    @property
    def fits(self) -> bool:
        return self.short_of <= 0

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return max(stage.peak for group in self.groups for stage in group.memory)


@dataclass
class Evaluator:
    """Computes costs of layouts for one problem, and remembers the times of layers."""

    problem: Problem
    _times: dict[object, PassTimes] = field(default_factory=dict)

    def cost(self, choice: Choice) -> StepCost:
        groups = tuple(self._group(choice, group) for group in choice.replicas)
        slowest = max(groups, key=lambda group: group.step_s)
        short_of = max(
            stage.peak - self._room(group.pool_at(index))
            for group, cost in zip(choice.replicas, groups, strict=True)
            for index, stage in enumerate(cost.memory)
        )
        parts = {**slowest.pipeline.parts, **slowest.tail}
        return StepCost(slowest.step_s, parts, groups, max(0.0, short_of))

    def _room(self, pool: str) -> float:
        device = device_named(self.problem.cluster.pool(pool).device, self.problem.devices)
        return device.memory_bytes * self.problem.memory_share

    def _group(self, choice: Choice, group: ReplicaChoice) -> GroupCost:
        number = choice.number_of_replicas
        links = [
            group_links(self.problem.cluster, group, index, number, choice.ep)
            for index in range(group.pp)
        ]
        layers = [self._held(choice, group, index) for index in range(group.pp)]
        stages = self._stage_times(choice, group, links)
        pipeline = pipeline_time(
            choice.schedule, group.pp, choice.virtual, group.microbatches, stages
        )
        kept = in_flight(choice.schedule, group.pp, choice.virtual, group.microbatches)
        memory = tuple(
            stage_memory(
                self.problem.workload, choice, group, i, layers[i], kept[i], self.problem.overhead
            )
            for i in range(group.pp)
        )
        tails = [self._tail(choice, group, i, layers[i], links[i], stages) for i in range(group.pp)]
        return GroupCost(pipeline, memory, max(tails, key=lambda tail: sum(tail.values())))

    def _held(self, choice: Choice, group: ReplicaChoice, index: int) -> Held:
        """Layers of the ranks at `index` on pp."""
        kinds, counts = self.problem.workload.kinds, dict[int, int]()
        for chunk in _chunks_of(choice, group, index):
            for kind, number in self._chunk(group, chunk).items():
                counts[kind] = counts.get(kind, 0) + number
        return [(kinds[kind], counts[kind]) for kind in sorted(counts)]

    def _chunk(self, group: ReplicaChoice, chunk: int) -> dict[int, int]:
        """Kinds of layers of one stage, with their number."""
        workload = self.problem.workload
        first = sum(group.stages[:chunk])
        last = first + group.stages[chunk] if group.pp > 1 else len(workload.blocks)
        found = workload.counts(first, last)
        if chunk == 0:
            found[0] = 1
        if group.pp == 1 or chunk == len(group.stages) - 1:
            found[len(workload.kinds) - 1] = 1
        return found

    def _stage_times(
        self, choice: Choice, group: ReplicaChoice, links: list[GroupLinks]
    ) -> list[StageTimes]:
        folded = SCHEDULE_KINDS[choice.schedule].is_folded
        places = Replica(
            0, tuple(range(group.size)), group.mesh_shape, group.stages, 1, folded and group.pp > 1
        )
        workload, found = self.problem.workload, []
        tokens = choice.microbatch * workload.sequence / group.dp_shard / group.cp
        for chunk in range(max(1, len(group.stages)) if group.pp > 1 else 1):
            index = places.pp_of(chunk)
            times = [
                (self._layer(choice, group, index, kind, links[index]), number)
                for kind, number in self._chunk(group, chunk).items()
            ]
            cut = group.tp if choice.sequence_parallel else 1
            size = tokens * workload.layers[0].width * workload.item / cut
            send = links[index].pp.message_s(size)
            stage = StageTimes.of(times, send, self.problem.waits_for_sends)
            found.append(stage.slowed(self.problem.slow.get(index, 1.0)))
        return found

    def _layer(
        self, choice: Choice, group: ReplicaChoice, index: int, kind: int, links: GroupLinks
    ) -> PassTimes:
        workload, pool = self.problem.workload, group.pool_at(index)
        layer = workload.kinds[kind]
        part = Part(
            choice.microbatch * workload.sequence / group.dp_shard / group.cp,
            workload.sequence,
            group.tp,
            group.cp,
            choice.ep,
            choice.sequence_parallel,
            group.recompute_at(index) if layer.kind == "block" else "none",
        )
        key = (kind, part, pool, links, choice.zero, group.dp_shard)
        if key not in self._times:
            device = device_named(self.problem.cluster.pool(pool).device, self.problem.devices)
            times = self.problem.times or ShapeTimes.of_workload(workload)
            self._times[key] = self._with_gathers(
                times.of(layer, part, device, links), choice, group, layer, links
            )
        return self._times[key]

    def _with_gathers(
        self,
        times: PassTimes,
        choice: Choice,
        group: ReplicaChoice,
        layer: Layer,
        links: GroupLinks,
    ) -> PassTimes:
        """With ZeRO 3 the next layer's parameters travel while this one computes. What is longer
        than the computing is added to it."""
        if choice.zero < 3 or group.dp_shard == 1:
            return times
        state = self.problem.workload.state
        own = layer_parameters(layer, group.tp, choice.ep)
        gathers = gather_s(links.shards, own * state.weights, group.dp_shard)
        scatters = scatter_s(links.shards, own * state.gradients, group.dp_shard)
        return with_collectives(times, gathers, gathers + scatters)

    def _tail(
        self,
        choice: Choice,
        group: ReplicaChoice,
        index: int,
        layers: Held,
        links: GroupLinks,
        stages: list[StageTimes],
    ) -> dict[str, float]:
        """Seconds of a step after its passes: sums of gradients that no backward hides, and the
        update."""
        state = self.problem.workload.state
        shards, number = group.dp_shard, choice.number_of_replicas
        experts, copies = expert_parameters(layers, group.tp, choice.ep), 1
        if experts:
            copies = max(1, shards * group.cp // choice.ep)
        dense = rank_parameters(layers, group.tp, choice.ep) - experts
        own = dense / shards + experts / copies
        hidden = stages[index].backward if self.problem.hides_gradients else 0.0
        sums, gathers = allreduce_s(links.replicas, own * state.gradients, number), 0.0
        if choice.zero < 3:
            sums += scatter_s(links.shards, dense * state.gradients, shards)
            sums += scatter_s(links.copies, experts * state.gradients, copies)
            gathers = gather_s(links.shards, dense * state.weights, shards)
            gathers += gather_s(links.copies, experts * state.weights, copies)
        device = device_named(
            self.problem.cluster.pool(group.pool_at(index)).device, self.problem.devices
        )
        update = self._measured_update(choice, group, index, links)
        if update is None:
            reached = device.bandwidth * device.reached(self.problem.workload.precision).memory
            update = own * state.updated * shards / reached
        return {
            "gradients": max(0.0, sums - hidden),
            "parameters": gathers,
            "update": update / shards,
        }

    def _measured_update(
        self, choice: Choice, group: ReplicaChoice, index: int, links: GroupLinks
    ) -> float | None:
        """Seconds of the update of all layers at `index` on pp, if a profile has them."""
        kinds, total = self.problem.workload.kinds, 0.0
        if self.problem.times is None:
            return None
        for layer, number in self._held(choice, group, index):
            update = self._layer(choice, group, index, kinds.index(layer), links).update
            if update is None:
                return None
            total += number * update
        return total


def _chunks_of(choice: Choice, group: ReplicaChoice, index: int) -> list[int]:
    """The stages of the ranks at `index` on pp."""
    if group.pp == 1:
        return [0]
    if SCHEDULE_KINDS[choice.schedule].is_folded:
        return [index, 2 * group.pp - 1 - index]
    return list(range(index, len(group.stages), group.pp))
