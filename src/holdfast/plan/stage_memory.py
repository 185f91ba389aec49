"""The peak memory of each worker of a pipeline, for any numbers of blocks on its stages.

The parts of an estimate (`estimate.py`) are computed for a short pipeline. It has the stage in
question at its place: first, between, or last. That stage has 1, 2 or 3 blocks there. Each further
block adds what the third one adds, because all blocks are alike. The schedule's table says how many
microbatches a worker keeps of each of its stages, at each of its actions.

Nothing here depends on the number of replicas that are left after a loss, so a loss moves no
block of those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.config.pipeline_schedules import SCHEDULE_KINDS
from holdfast.config.recompute import Recompute
from holdfast.config.run import RunConfig
from holdfast.core.schedule.named import build_schedule
from holdfast.core.schedule.table import ActionKind, Schedule, actions_of
from holdfast.errors import LayoutError
from holdfast.layout import Layout, MeshShape, Stages, place_replicas
from holdfast.plan.activations import device_kind, has_formula
from holdfast.plan.estimate import Pass, RankParts, rank_parts
from holdfast.plan.step_microbatches import microbatches

_MOST_REPLICAS = 8
"""Replicas that the estimate has. More of them add next to nothing to a rank's buffers."""

_MANY = 1000
"""Microbatches in flight that show what one keeps: the peak is then where most are in flight."""

_BLOCKS = 3
"""Numbers of blocks that are computed; further blocks add what the last of these adds."""


PassKind = tuple[bool, bool, bool]
"""(is a forward pass, waits, stays), as in `estimate.Pass`."""

_KINDS: tuple[PassKind, ...] = (
    (True, False, False),
    (True, True, False),
    (False, False, False),
    (False, False, True),
    (False, True, False),
    (False, True, True),
)


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage. idle: its state. each: what a microbatch in flight keeps. passing: what a
    pass of each kind adds to both at its fullest moment, in the order of `_KINDS`."""

    idle: float
    each: float
    passing: tuple[float, ...]


@dataclass(frozen=True)
class _Moment:
    """A moment of a worker. stage, kind: of the pass that runs. kept: microbatches of each
    stage."""

    stage: int
    kind: PassKind
    kept: tuple[tuple[int, int], ...]


def check_memory_formula(config: RunConfig) -> None:
    """Raises LayoutError for a run whose stages have no estimate of memory."""
    layout = config.layout.model_copy(update={"schedule": "1f1b", "virtual_stages": 0})
    if config.model.experts is None and has_formula(config.model_copy(update={"layout": layout})):
        return
    raise LayoutError(
        "memory has no formula for the activations of this run (experts, windows, masks of "
        "documents, norms, precision, layout.quantized, or cp with train.recompute_keep attention)",
        where="layout.balance",
        remedy="use layout.balance time",
    )


class PipelineMemory:
    """Peaks of the workers of one pipeline."""

    def __init__(self, config: RunConfig, mesh_shape: MeshShape):
        check_memory_formula(config)
        self._config, self._mesh_shape = config, mesh_shape
        self._pp = mesh_shape[0]
        self.schedule = _schedule_of(config, self._pp, self._share)
        self._known: dict[tuple[int, Recompute, int], StageBytes] = {}
        self._short: dict[tuple[int, Recompute, int], RankParts] = {}

    def peak(self, worker: int, blocks: Mapping[int, int]) -> float:
        """The most bytes on a worker. blocks: stage -> blocks, for each of its stages."""
        held = {stage: self.stage_bytes(stage, number) for stage, number in blocks.items()}
        state = sum(each.idle for each in held.values())
        most = 0.0
        for moment in self._moments[worker]:
            running = held[moment.stage]
            passing = sum(number * held[stage].each for stage, number in moment.kept)
            most = max(most, passing + running.passing[_KINDS.index(moment.kind)])
        return state + most

    def stage_bytes(self, stage: int, blocks: int) -> StageBytes:
        """The bytes of one stage with so many blocks."""
        last = self.schedule.stages - 1
        place = 0 if stage == 0 else 2 if stage == last else 1
        word = self._config.train.recompute_of(self.schedule.rank_of[stage], self._pp)
        key = place, word, blocks
        if key not in self._known:
            self._known[key] = _bytes_of(self._parts(place, word, blocks))
        return self._known[key]

    # --- parts ------------------------------------------------------------------------------
    @property
    def _replicas(self) -> int:
        """Replicas of the run file, whatever is left of them."""
        layout, size = self._config.layout, 1
        for degree in self._mesh_shape:
            size *= degree
        return max(1, len(layout.replicas) or layout.workers // size)

    @property
    def _share(self) -> int:
        """The most microbatches of a replica in a step."""
        return max(1, -(-max(microbatches(self._config).values()) // self._replicas))

    @cached_property
    def _moments(self) -> tuple[tuple[_Moment, ...], ...]:
        one = self._parts(0, "none", 1)
        return tuple(tuple(_moments(self.schedule, rank, one.staying)) for rank in range(self._pp))

    def _parts(self, place: int, word: Recompute, blocks: int) -> RankParts:
        """What the estimate is made of, for the stage at a place of a short pipeline."""
        if blocks > _BLOCKS:
            now, before = (self._parts(place, word, n) for n in (_BLOCKS, _BLOCKS - 1))
            return _grown(now, before, blocks - _BLOCKS)
        key = place, word, blocks
        if key not in self._short:
            stages = ((blocks, 1), (1, blocks, 1), (1, blocks))[place]
            self._short[key] = self._short_pipeline(stages, min(place, 1), word)
        return self._short[key]

    def _short_pipeline(self, stages: Stages, at: int, word: Recompute) -> RankParts:
        _, dp_shard, cp, tp = self._mesh_shape
        replicas = min(self._replicas, _MOST_REPLICAS)
        config = _shortened(self._config, self._share * replicas, stages, dp_shard, word)
        one = Layout(pp=len(stages), dp_shard=dp_shard, cp=cp, tp=tp, stages=stages)
        nodes = ("node",) * (replicas * one.replica_size)
        topology = place_replicas([one] * replicas, 1, nodes)
        place = topology.coordinate(topology.replicas[0].rank_at(pp=at))
        return rank_parts(config, topology, place, device_kind(config))


def _grown(now: RankParts, before: RankParts, more: int) -> RankParts:
    """The parts of a stage with more blocks than `now`, which has one more than `before`."""

    def grow(of: int, one_less: int) -> int:
        return of + more * (of - one_less)

    kept = grow(now.kept.per_microbatch, before.kept.per_microbatch)
    return replace(
        now,
        stage=replace(now.stage, blocks=now.stage.blocks + more),
        kept=replace(now.kept, per_microbatch=kept),
        parameters=grow(now.parameters, before.parameters),
        sums=grow(now.sums, before.sums),
        moments=grow(now.moments, before.moments),
        messages=grow(now.messages, before.messages),
        waiting=grow(now.waiting, before.waiting),
        staging=grow(now.staging, before.staging),
    )


def _bytes_of(parts: RankParts) -> StageBytes:
    def peak(kind: PassKind, in_flight: int = 1) -> int:
        return parts.estimate([Pass(kind[0], in_flight, *kind[1:])]).peak

    each = (peak(_KINDS[0], 1 + _MANY) - peak(_KINDS[0])) / _MANY
    passing = tuple(peak(kind) - parts.state - each for kind in _KINDS)
    return StageBytes(parts.state, each, passing)


def _schedule_of(config: RunConfig, ranks: int, share: int) -> Schedule:
    """The table of a step's training. More microbatches than four for each rank keep no more in
    flight, but under gpipe."""
    name = config.layout.schedule
    kind = SCHEDULE_KINDS[name]
    if share < kind.least_microbatches(ranks):
        name = "gpipe"  # as validation of few samples; a step of training is refused
    number = share if name == "gpipe" else min(share, 4 * ranks)
    return build_schedule(name, ranks, number, config.layout.stages_a_worker)


def _moments(schedule: Schedule, rank: int, staying: frozenset[int]) -> Iterator[_Moment]:
    """The moments of a rank, each once. A microbatch is kept until W if its backward is split.
    staying: microbatches whose gradients wait for those of the next one."""
    kept = dict.fromkeys(schedule.stages_of(rank), 0)
    waits = dict.fromkeys(kept, False)
    found: dict[_Moment, None] = {}
    for cell in schedule.actions[rank]:
        actions = actions_of(cell)
        for action in actions:
            kept[action.stage] += action.kind is ActionKind.FORWARD
        for action in actions:
            is_forward = action.kind is ActionKind.FORWARD
            stays = not is_forward and action.microbatch in staying
            kind = is_forward, waits[action.stage], stays
            found[_Moment(action.stage, kind, tuple(kept.items()))] = None
        for action in actions:
            if action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                kept[action.stage] -= 1
                waits[action.stage] = action.microbatch in staying
    yield from found


def _shortened(
    config: RunConfig, number: int, stages: Sequence[int], dp_shard: int, word: Recompute
) -> RunConfig:
    """The run with so many microbatches a step, on a short pipeline of alike stages."""
    size = max(config.train.microbatch_size, dp_shard)
    train = config.train.model_copy(
        update={
            "recompute": word,
            "microbatch_size": size,
            "batch_size": number * size,
            "batch_warmup": (),
        }
    )
    update = {"schedule": "1f1b", "virtual_stages": 0, "replicas": (), "stages": ()}
    model = config.model.model_copy(update={"layers": sum(stages)})
    layout = config.layout.model_copy(update=update | {"pp": len(stages)})
    return config.model_copy(update={"train": train, "model": model, "layout": layout})
