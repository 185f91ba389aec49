"""The cost of one layout on one cluster: seconds of a step, part by part, and bytes of each stage.

    problem = Problem(workload, cluster, devices)
    cost = Evaluator(problem).cost(choice)

Every second of a step has one part: `StepCost.parts` adds up to `step_s`. The pipeline's time is
that of its schedule's own table with the stages' durations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf

from holdfast.layout import pp_of_stage, stages_at
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.collectives import gather_s
from holdfast.plan.cost.group_links import GroupLinks, Ways, group_links
from holdfast.plan.cost.layer_times import LayerTimes, Part, ShapeTimes
from holdfast.plan.cost.pipeline_time import (
    PipelineTime,
    StageTimes,
    kept_microbatches,
    least_pipeline_seconds,
    least_pipeline_time,
    pipeline_time,
)
from holdfast.plan.cost.step_tail import step_tail
from holdfast.plan.cost.workload import Counts, Layer, PassTimes, Workload
from holdfast.plan.hardware.cluster import Cluster
from holdfast.plan.hardware.devices import DeviceType, device_named
from holdfast.plan.memory.stage_bytes import (
    ASSUMED_OVERHEAD,
    Held,
    MemoryOverhead,
    StageBytes,
    StageMemory,
    StageShape,
    late_at,
    layer_parameters,
    stage_bytes,
)


@dataclass(frozen=True)
class Problem:
    """What is trained, on which machines, and how. hides_gradients: sums of gradients travel while
    a stage's last backward computes; never those of the last bucket."""

    workload: Workload
    cluster: Cluster
    devices: Mapping[str, DeviceType]
    times: LayerTimes | None = None  # seconds of layers; None: from shapes
    memory_share: float = 0.95  # of a device's memory that a run may use
    overhead: MemoryOverhead = ASSUMED_OVERHEAD
    waits_for_sends: bool = False  # ranks compute nothing while they send to a stage or receive
    bucket_bytes: float = 0.0  # gradients that are summed in one message; 0: all of a stage
    hides_gradients: bool = True
    slow: Mapping[int, float] = field(default_factory=dict)  # by pp: times as long as usual


@dataclass(frozen=True)
class GroupCost:
    """Of one kind of replica."""

    pipeline: PipelineTime
    memory: tuple[StageMemory, ...]  # of each index on pp
    tail: Mapping[str, float]  # seconds after the passes, by part

    @property
    def step_s(self) -> float:
        return self.pipeline.seconds + sum(self.tail.values())


@dataclass(frozen=True)
class StepCost:
    """Of one layout."""

    step_s: float
    parts: Mapping[str, float]  # seconds by what they go to, of the slowest kind of replica
    groups: tuple[GroupCost, ...]  # by kind of replica
    short_of: float = 0.0  # bytes that the fullest device lacks; 0 where all fit

    @property
    def fits(self) -> bool:
        return self.short_of <= 0

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return max(stage.peak for group in self.groups for stage in group.memory)


@dataclass
class Evaluator:
    """Computes costs of layouts for one problem, and remembers the parts that layouts share."""

    problem: Problem
    _times: dict[object, PassTimes] = field(default_factory=dict)
    _stages: dict[object, StageTimes] = field(default_factory=dict)
    _bytes: dict[object, StageBytes] = field(default_factory=dict)
    _shapes: dict[object, StageShape] = field(default_factory=dict)
    _tails: dict[object, dict[str, float]] = field(default_factory=dict)
    _links: dict[object, tuple[_Place, ...]] = field(default_factory=dict)
    _devices: dict[str, DeviceType] = field(default_factory=dict)
    _places: dict[object, _Place] = field(default_factory=dict)
    _pipelines: dict[object, PipelineTime] = field(default_factory=dict)
    _counts: dict[object, tuple[Counts, ...]] = field(default_factory=dict)
    _chunks: dict[object, tuple[tuple[int, Counts], ...]] = field(default_factory=dict)
    _by_parts: dict[tuple[int, ...], Evaluator] = field(default_factory=dict)

    def cost(self, choice: Choice) -> StepCost:
        """Return the cost, with the timeline of the schedule executed."""
        return self._with_parts(choice)._cost(choice, pipeline_time)

    def least(self, choice: Choice) -> StepCost:
        """Return a cost without a timeline: the memory is exact, and no step is faster."""
        return self._with_parts(choice)._cost(choice, least_pipeline_time)

    def _with_parts(self, choice: Choice) -> Evaluator:
        """The evaluator of blocks whose parts have the degrees of a layout."""
        if not choice.part_tp or choice.part_tp == self.problem.workload.part_tp:
            return self
        if choice.part_tp not in self._by_parts:
            workload = self.problem.workload.with_part_tp(choice.part_tp)
            self._by_parts[choice.part_tp] = Evaluator(replace(self.problem, workload=workload))
        return self._by_parts[choice.part_tp]

    def room(self, pool: str) -> float:
        """Return the bytes of a device of this pool that a run may use."""
        return self.device(pool).found_bytes * self.problem.memory_share

    def device(self, pool: str) -> DeviceType:
        found = self._devices.get(pool)
        if found is None:
            name = self.problem.cluster.pool(pool).device
            found = self._devices[pool] = device_named(name, self.problem.devices)
        return found

    def memory(self, choice: Choice, group: ReplicaChoice) -> tuple[StageMemory, ...]:
        """Return the bytes of the fullest rank at each index on pp."""
        kept = kept_microbatches(choice.schedule, group.pp, choice.virtual, group.microbatches)
        return tuple(self.memory_at(choice, group, index, kept[index]) for index in range(group.pp))

    def least_group(self, choice: Choice, group: ReplicaChoice) -> float:
        """Return the least seconds of a step of one kind of replica, of those of `choice`."""
        stages = self.stage_times(choice, group)
        seconds = least_pipeline_seconds(choice.schedule, group.pp, group.microbatches, stages)
        return seconds + sum(self._tail(choice, group, stages).values())

    def least_seconds(self, choice: Choice) -> float:
        """Return the seconds of `least`, whether the layout fits or not."""
        return max(self.least_group(choice, group) for group in choice.replicas)

    def _cost(self, choice: Choice, timeline: Timer) -> StepCost:
        groups = tuple(self._group(choice, group, timeline) for group in choice.replicas)
        slowest = max(groups, key=lambda group: group.step_s)
        short_of = max(
            stage.peak - self.room(group.pool_at(index))
            for group, cost in zip(choice.replicas, groups, strict=True)
            for index, stage in enumerate(cost.memory)
        )
        parts = {**slowest.pipeline.parts, **slowest.tail}
        return StepCost(slowest.step_s, parts, groups, max(0.0, short_of))

    def _group(self, choice: Choice, group: ReplicaChoice, timeline: Timer) -> GroupCost:
        stages = self.stage_times(choice, group)
        key = (timeline, choice.schedule, choice.virtual, group.microbatches, *map(id, stages))
        pipeline = self._pipelines.get(key)
        if pipeline is None:
            pipeline = self._pipelines[key] = timeline(
                choice.schedule, group.pp, choice.virtual, group.microbatches, stages
            )
        return GroupCost(pipeline, self.memory(choice, group), self._tail(choice, group, stages))

    def _of_places(self, choice: Choice, group: ReplicaChoice) -> tuple[_Place, ...]:
        """The pool and the links of each index on pp."""
        number = choice.number_of_replicas
        key = (group.mesh_shape, group.pools, group.dp_replicate, number, choice.ep, choice.zero)
        if key not in self._links:
            found, cluster = [], self.problem.cluster
            ways = Ways.of(choice.zero, self.problem.workload.cp_method)
            known, part_tp = dict[Pair, _Place](), self.problem.workload.part_tp
            for index in range(group.pp):
                pools = group.pool_at(index), group.pool_at(min(index + 1, group.pp - 1))
                if pools not in known:
                    links = group_links(cluster, group, index, number, choice.ep, ways, part_tp)
                    place = _Place(pools[0], links)
                    known[pools] = self._places.setdefault((place.pool, links), place)
                found.append(known[pools])
            self._links[key] = tuple(found)
        return self._links[key]

    def memory_at(
        self, choice: Choice, group: ReplicaChoice, index: int, in_flight: float
    ) -> StageMemory:
        """Return the bytes of the fullest rank at `index` on pp."""
        counts = self.counts_of_ranks(choice, group)[index]
        late = late_at(choice, group, index)
        return self.bytes_of(choice, group, index, counts).at(in_flight, late)

    def counts_of_ranks(self, choice: Choice, group: ReplicaChoice) -> tuple[Counts, ...]:
        """Return the layers of the ranks at each index on pp."""
        key = (group.pp, group.stages, choice.is_folded)
        found = self._counts.get(key)
        if found is None:
            ranks = range(group.pp)
            found = tuple(self._counts_at(choice, group, index) for index in ranks)
            self._counts[key] = found
        return found

    def _counts_at(self, choice: Choice, group: ReplicaChoice, index: int) -> Counts:
        """Layers of the ranks at `index` on pp."""
        stages = len(group.stages)
        chunks = stages_at(index, group.pp, stages, choice.is_folded) if group.pp > 1 else (0,)
        first, *others = (_chunk_counts(self.problem.workload, group, each) for each in chunks)
        if not others:
            return first
        sums = dict(first)
        for kind, number in chain.from_iterable(others):
            sums[kind] = sums.get(kind, 0) + number
        return tuple(sorted(sums.items()))

    def bytes_of(
        self, choice: Choice, group: ReplicaChoice, index: int, held: Counts, word: str = ""
    ) -> StageBytes:
        """The same, if that rank holds these layers, for any number of microbatches in flight.
        word: of recompute; "": that of the group."""
        word = word or group.recompute_at(index)
        key = (
            choice.microbatch,
            choice.zero,
            choice.ep,
            choice.sequence_parallel,
            choice.host,
            group.mesh_shape[1:],
            word,
            choice.microbatches,
            choice.number_of_replicas,
            held,
            _position(group, index),
        )
        found = self._bytes.get(key)
        if found is None:
            problem, shape = self.problem, self._shape(choice, group, word, held)
            found = self._bytes[key] = stage_bytes(
                problem.workload, choice, group, index, shape, problem.overhead
            )
        return found

    def _shape(self, choice: Choice, group: ReplicaChoice, word: str, held: Counts) -> StageShape:
        key = (held, group.tp, choice.ep, choice.sequence_parallel, word)
        found = self._shapes.get(key)
        if found is None:
            layers = _layers(self.problem.workload, held)
            found = self._shapes[key] = StageShape.of(self.problem.workload, layers, *key[1:])
        return found

    def stage_times(self, choice: Choice, group: ReplicaChoice) -> list[StageTimes]:
        """Return the seconds of each pipeline stage of a kind of replica, for one microbatch."""
        places = self._of_places(choice, group)
        found, before = list[StageTimes](), tuple[object, ...]()
        common = (choice.microbatch, choice.zero, choice.ep, choice.sequence_parallel)
        shared, slow_of = (common, group.mesh_shape[1:]), self.problem.slow
        for index, counts in self._chunks_of(choice, group):
            place = places[index]
            own = (id(place), counts, group.recompute_at(index), slow_of.get(index, 1.0))
            if own == before:
                found.append(found[-1])
                continue
            before, stage = own, self._stages.get((shared, own))
            if stage is None:
                stage = _stage(self, choice, group, index, place, counts)
                self._stages[shared, own] = stage
            found.append(stage)
        return found

    def _chunks_of(self, choice: Choice, group: ReplicaChoice) -> tuple[tuple[int, Counts], ...]:
        """The index on pp and the layers of each stage."""
        key = (group.pp, group.stages, choice.is_folded)
        found = self._chunks.get(key)
        if found is None:
            chunks = range(max(1, len(group.stages)) if group.pp > 1 else 1)
            places = (pp_of_stage(chunk, group.pp, choice.is_folded) for chunk in chunks)
            counts = (_chunk_counts(self.problem.workload, group, chunk) for chunk in chunks)
            found = self._chunks[key] = tuple(zip(places, counts, strict=True))
        return found

    def layer_times(
        self, choice: Choice, group: ReplicaChoice, index: int, kind: int, word: str
    ) -> PassTimes:
        """Return the times of a kind of layer, by its index in the workload, at `index` on pp."""
        return self._layer(choice, group, word, kind, self._of_places(choice, group)[index])

    def _layer(
        self, choice: Choice, group: ReplicaChoice, word: str, kind: int, place: _Place
    ) -> PassTimes:
        workload, pool = self.problem.workload, place.pool
        layer = workload.kinds[kind]
        part = (
            choice.microbatch * workload.sequence / group.token_shares,
            workload.sequence,
            group.tp,
            group.cp,
            choice.ep,
            choice.sequence_parallel,
            word if layer.kind == "block" else "none",
        )
        key = (kind, part, id(place), choice.zero, group.dp_shard)
        found = self._times.get(key)
        if found is None:
            device = self.device(pool)
            times = self.problem.times or ShapeTimes.of_workload(workload)
            own, links = times.of(layer, Part(*part), device, place.links), place.links
            found = _with_shards(workload, own, choice, group, layer, links, device)
            self._times[key] = found
        return found

    def _tail(
        self, choice: Choice, group: ReplicaChoice, stages: Sequence[StageTimes]
    ) -> dict[str, float]:
        """Seconds of the stage that takes longest after the passes."""
        shared = (choice.zero, choice.ep, group.mesh_shape[1:], group.microbatches, choice.host)
        number, tails = choice.number_of_replicas, list[dict[str, float]]()
        places = self._of_places(choice, group)
        before = tuple[object, ...]()
        for place, counts, stage in zip(
            places, self.counts_of_ranks(choice, group), stages, strict=False
        ):
            own = (id(place), counts, id(stage))
            if own == before:
                continue
            before = own
            hides = self.device(place.pool).hides if self.problem.hides_gradients else 0.0
            hidden = hides * stage.backward
            key = (shared, id(place), counts, hidden, number)
            tail = self._tails.get(key)
            if tail is None:
                tail = self._tails[key] = _tail_of(self, choice, group, place, counts, hidden)
            tails.append(tail)
        return max(tails, key=lambda tail: sum(tail.values())) if len(tails) > 1 else tails[0]

    def least_tail(self, choice: Choice, group: ReplicaChoice, index: int, counts: Counts) -> float:
        """Return the seconds after the passes of a rank with these layers, if its backward hides
        all sums of gradients."""
        place = self._of_places(choice, group)[index]
        shared = (choice.zero, choice.ep, group.mesh_shape[1:], group.microbatches, choice.host)
        key = (shared, id(place), counts)
        if key not in self._tails:
            self._tails[key] = _tail_of(self, choice, group, place, counts, inf)
        return sum(self._tails[key].values())


@dataclass(frozen=True, eq=False)
class _Place:
    """The pool of an index on pp, and its links. One object for all that are equal."""

    pool: str
    links: GroupLinks


Pair = tuple[str, str]
"""The pool of an index on pp, and that of the next one."""

Timer = Callable[[str, int, int, int, Sequence[StageTimes]], PipelineTime]
"""`pipeline_time`, or one with its parameters."""


def _stage(
    evaluator: Evaluator,
    choice: Choice,
    group: ReplicaChoice,
    index: int,
    place: _Place,
    counts: Counts,
) -> StageTimes:
    workload = evaluator.problem.workload
    tokens = choice.microbatch * workload.sequence / group.token_shares
    times = [
        (evaluator._layer(choice, group, group.recompute_at(index), kind, place), number)
        for kind, number in counts
    ]
    cut = group.tp if choice.sequence_parallel else 1
    size = tokens * workload.layers[0].width * workload.item / cut
    send = place.links.pp.message_s(size)
    fixed = evaluator.device(place.pool).steps.microbatch_s
    stage = StageTimes.of(times, send, evaluator.problem.waits_for_sends, fixed)
    return stage.slowed(evaluator.problem.slow.get(index, 1.0))


def _tail_of(
    evaluator: Evaluator,
    choice: Choice,
    group: ReplicaChoice,
    place: _Place,
    counts: Counts,
    hidden: float,
) -> dict[str, float]:
    """Seconds of a step after its passes."""
    problem = evaluator.problem
    return step_tail(
        problem.workload,
        choice,
        group,
        evaluator.device(place.pool),
        place.links,
        _layers(problem.workload, counts),
        hidden=hidden,
        bucket_bytes=problem.bucket_bytes,
        update=_measured_update(evaluator, choice, group, place, counts),
    )


def _with_shards(
    workload: Workload,
    times: PassTimes,
    choice: Choice,
    group: ReplicaChoice,
    layer: Layer,
    links: GroupLinks,
    device: DeviceType,
) -> PassTimes:
    """With the time that the gradients of a microbatch take to be added to the step's. With ZeRO 3
    the next layer's parameters travel while this one computes."""
    own, state = layer_parameters(layer, group.tp, choice.ep), workload.state
    if choice.zero == 3 and group.is_sharded:
        gathers = gather_s(links.shards, own * state.weights, group.dp_shard)
        scatters = gather_s(links.shards, own * state.gradients, group.dp_shard)
        times = times.with_collectives(gathers, gathers + scatters, device.hides)
    if not device.steps.gradient_moves:
        return times
    own /= group.dp_shard if choice.zero > 1 else 1
    touched_a_second = device.touched_a_second(workload.precision)
    seconds = device.steps.gradient_moves * own * state.gradients / touched_a_second
    return replace(times, weights=times.weights + seconds)


def _measured_update(
    evaluator: Evaluator, choice: Choice, group: ReplicaChoice, place: _Place, counts: Counts
) -> float | None:
    """Seconds of the update of these layers, if a profile has them."""
    total = 0.0
    if evaluator.problem.times is None:
        return None
    for kind, number in counts:
        update = evaluator._layer(choice, group, group.recompute_at(0), kind, place).update
        if update is None:
            return None
        total += number * update
    return total


def _position(group: ReplicaChoice, index: int) -> object:
    """What the memory of a stage depends on of its place in the pipeline."""
    if group.pp == 1:
        return None
    return index > 0 or len(group.stages) > group.pp, len(group.stages) // group.pp


def _layers(workload: Workload, counts: Counts) -> Held:
    return [(workload.kinds[kind], number) for kind, number in counts]


def _chunk_counts(workload: Workload, group: ReplicaChoice, chunk: int) -> Counts:
    """Kinds of layers of one stage, with their number."""
    if group.pp == 1:
        return workload.counts_of(0, len(workload.blocks), True, True)
    first, last = group.bounds[chunk], group.bounds[chunk + 1]
    return workload.counts_of(first, last, chunk == 0, chunk == len(group.stages) - 1)
