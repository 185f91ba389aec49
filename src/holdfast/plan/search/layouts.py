"""Complete layouts of given degrees: ZeRO stages, splits of the blocks, recompute that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice, product
from math import inf, prod

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.layout import pp_of_stage, stages_at
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator
from holdfast.plan.cost.pipeline_time import StageTimes, kept_microbatches, least_pipeline_seconds
from holdfast.plan.memory.stage_bytes import late_at
from holdfast.plan.search.limits import Limits
from holdfast.plan.search.room import Room
from holdfast.plan.search.space import Shape
from holdfast.plan.search.splits import (
    BALANCED,
    StageCost,
    Stages,
    balanced_split,
    can_try_all,
    even_split,
    every_split,
    fitting_split,
    most_costly,
)

_ALL_WORDS = 32  # words of recompute of all ranks up to which each choice of them is tried


@dataclass(frozen=True)
class Variant:
    """What all replicas of a layout have in common."""

    microbatch: int
    schedule: str
    virtual: int
    zero: int
    ep: int
    sequence_parallel: bool = True
    host: frozenset[str] = frozenset()


@dataclass
class _Splits:
    """Splits of the blocks that are tried. least: seconds of a microbatch on the busiest rank that
    no split beats; 0: not known."""

    splits: tuple[Stages, ...]
    least: float = 0.0
    seconds: StageCost | None = None  # of a stage for a microbatch
    times: dict[Stages, Sequence[StageTimes]] = field(default_factory=dict)  # of a split's stages


def _always(_: float) -> bool:
    return True


@dataclass
class Layouts:
    """Makes layouts, and remembers splits."""

    evaluator: Evaluator
    limits: Limits
    room: Room
    _splits: dict[object, _Splits] = field(default_factory=dict)

    def variants(self, shape: Shape, schedule: str, virtual: int) -> Iterator[Variant]:
        """ZeRO stages, by the rules of a run file."""
        is_split = SCHEDULE_KINDS[schedule].splits_backward or virtual > 1
        is_piped = is_split and shape.pp > 1 and shape.is_sharded
        stages = [zero for zero in self.limits.zero if shape.ep == 1 or zero > 1]
        stages = [zero for zero in stages if zero == 1 or not is_piped]
        for zero in stages if shape.is_sharded else stages[:1]:
            ways = self.limits.sequence_parallel, self.limits.offloads[0]
            yield Variant(shape.microbatch, schedule, virtual, zero, shape.ep, *ways)

    def groups(
        self,
        variant: Variant,
        shape: Shape,
        count: int,
        microbatches: int,
        can_win: Callable[[float], bool] = _always,
    ) -> Iterator[ReplicaChoice]:
        """Every way to split and to recompute that fits; nothing if none does.

        Args:
            count: replicas of this shape, each with so many microbatches.
            can_win: False if no step of at least so many seconds is of interest.
        """
        number = shape.pp * variant.virtual

        def with_stages(split: Stages) -> ReplicaChoice:
            return ReplicaChoice(count, *shape.mesh, split, shape.pools, microbatches)

        group = with_stages(())
        if shape.pp == 1:
            fitting = self._recomputed(variant, group, shape)
            if fitting is not None:
                yield fitting
            return
        kind = SCHEDULE_KINDS[variant.schedule]
        if microbatches < kind.least_microbatches(shape.pp):
            return
        known = self._splits_for(variant, group, shape)
        if known.least and not can_win(microbatches * known.least):
            return
        found, slow = False, list[Stages]()
        for split in known.splits:
            times = self._times_of(known, variant, group, split)
            least = least_pipeline_seconds(variant.schedule, shape.pp, microbatches, times)
            if not can_win(least):
                slow.append(split)
                continue
            fitting = self._recomputed(variant, with_stages(split), shape)
            if fitting is not None:
                found = True
                yield fitting
        if found or can_try_all(self._blocks, number):
            return
        last = self.room.words(shape)[-1:]
        if any(self._recomputed(variant, with_stages(split), shape, last) for split in slow):
            return
        split = self._by_memory(known, variant, group, shape, can_win)
        fitting = self._recomputed(variant, with_stages(split), shape) if split else None
        if fitting is not None:
            yield fitting

    def with_more_recompute(self, group: ReplicaChoice, shape: Shape) -> Iterator[ReplicaChoice]:
        """Layouts of a short pipeline that recompute more than memory needs.

        A stage that takes longer delays its transfers. Other transfers may then use a link earlier,
        so the step may be shorter."""
        words = self.room.words(shape)
        options = [words[words.index(group.recompute_at(n)) :] for n in range(group.pp)]
        if 1 < prod(map(len, options)) <= _ALL_WORDS and group.pp > 1:
            for found in islice(product(*options), 1, None):
                yield replace(group, recompute=found[:1] if len(set(found)) == 1 else found)

    @property
    def _blocks(self) -> int:
        return len(self.evaluator.problem.workload.layers) - 2

    def _recomputed(
        self, variant: Variant, group: ReplicaChoice, shape: Shape, words: Sequence[str] = ()
    ) -> ReplicaChoice | None:
        """With the least recompute of each stage that fits. It is the fastest: no stage's word
        changes the memory of another. The room for blocks tells most words that do not fit.
        words: that are tried; (): all."""
        choice, pp = choice_of(variant, (group,)), group.pp
        kept = kept_microbatches(variant.schedule, pp, variant.virtual, group.microbatches)
        held, words = self.evaluator.counts_of_ranks(choice, group), words or self.room.words(shape)
        needs = [
            self.room.block_bytes(shape, variant.zero, word, group.microbatches) for word in words
        ]
        kind, chosen, local = SCHEDULE_KINDS[variant.schedule], list[int](), shape.cut.local
        for index, blocks in enumerate(_blocks_of_ranks(group, self._blocks, kind.is_folded)):
            pool, counts, in_flight = group.pool_at(index), held[index], kept[index]
            room, most = self.room.room(pool), len(words)
            is_like = index > 1 and counts == held[index - 1] and pool == group.pool_at(index - 1)
            if is_like and in_flight <= kept[index - 1] and not kind.splits_backward:
                most = chosen[-1]  # it keeps no more than the rank before
            for place, word in enumerate(words[:most]):
                if blocks > needs[place].blocks(room, in_flight * local):
                    continue
                held_bytes = self.evaluator.bytes_of(choice, group, index, counts, word)
                if held_bytes.peak(in_flight, late_at(choice, group, index)) <= room:
                    chosen.append(place)
                    break
            else:
                if most == len(words):
                    return None
                chosen.append(most)
        found = tuple(words[place] for place in chosen)
        return replace(group, recompute=found[:1] if len(set(found)) == 1 else found)

    def _splits_for(self, variant: Variant, group: ReplicaChoice, shape: Shape) -> _Splits:
        zero = variant.zero if variant.zero == 3 or self._sums_each else 1
        key = (
            shape.cut.local,
            shape.mesh,
            shape.ep,
            shape.site.pools,
            shape.slots,
            variant.virtual,
            SCHEDULE_KINDS[variant.schedule].is_folded,
            zero,
        )
        found = self._splits.get(key)
        if found is None:
            found = self._splits[key] = self._splits_of(variant, group, shape.pp * variant.virtual)
        return found

    @cached_property
    def _sums_each(self) -> bool:
        """A pass takes longer if a rank adds up more gradients, so it depends on the ZeRO stage."""
        pools = self.evaluator.problem.cluster.pools
        return any(self.evaluator.device(pool.name).steps.gradient_moves for pool in pools)

    def _times_of(
        self, known: _Splits, variant: Variant, group: ReplicaChoice, split: Stages
    ) -> Sequence[StageTimes]:
        """Of the stages, if nothing is computed again."""
        found = known.times.get(split)
        if found is None:
            own = replace(group, stages=split)
            found = self.evaluator.stage_times(choice_of(variant, (own,)), own)
            known.times[split] = found
        return found

    def _splits_of(self, variant: Variant, group: ReplicaChoice, number: int) -> _Splits:
        blocks = self._blocks
        if can_try_all(blocks, number):
            return _Splits(tuple(every_split(blocks, number)))
        even = even_split(blocks, number)
        if number > group.pp:
            return _Splits((even,))
        seconds = self._seconds(variant, group, number)
        fastest = balanced_split(blocks, number, seconds)
        least = most_costly(fastest, seconds) * (1 - 2 * BALANCED)
        return _Splits(tuple(dict.fromkeys((even, even[::-1], fastest))), least, seconds)

    def _seconds(self, variant: Variant, group: ReplicaChoice, number: int) -> StageCost:
        """What a stage takes for a microbatch."""
        workload, sums = self.evaluator.problem.workload, dict[int, tuple[list[float], float]]()
        own = workload.kinds_of_blocks
        choice, index_of = choice_of(variant, (group,)), _indices(variant, group.pp, number)

        def times(index: int, kind: int) -> float:
            found = self.evaluator.layer_times(choice, group, index, kind, "none")
            return found.forward + found.backward

        of_pool = dict[str, list[float]]()
        for index in range(group.pp):
            pool = group.pool_at(index)
            if pool not in of_pool:
                each = {kind: times(index, kind) for kind in set(own)}
                of_pool[pool] = list(accumulate((each[kind] for kind in own), initial=0.0))
            ends = times(index, 0) if index == index_of[0] else 0.0
            sums[index] = of_pool[pool], ends
        head = times(index_of[-1], len(workload.kinds) - 1)

        def seconds(stage: int, start: int, stop: int) -> float:
            before, first = sums[index_of[stage]]
            ends = (first if stage == 0 else 0.0) + (head if stage == number - 1 else 0.0)
            return before[stop] - before[start] + ends

        return seconds

    def _by_memory(
        self,
        known: _Splits,
        variant: Variant,
        group: ReplicaChoice,
        shape: Shape,
        can_win: Callable[[float], bool],
    ) -> Stages:
        """The fastest split that fits with some recompute and can win; () if none does."""
        workload, pp = self.evaluator.problem.workload, group.pp
        number, last = pp * variant.virtual, self.limits.recompute[-1]
        kept = kept_microbatches(variant.schedule, pp, variant.virtual, group.microbatches)
        needs = self.room.block_bytes(shape, variant.zero, last, group.microbatches)
        trial = replace(group, recompute=self.limits.recompute[-1:])
        choice = choice_of(variant, (trial,))
        rooms = [self.room.room(group.pool_at(index)) for index in range(pp)]
        index_of = _indices(variant, pp, number)
        if known.seconds is None:
            known.seconds = self._seconds(variant, group, number)
        seconds, most = known.seconds, dict[object, bool]()

        def cost(stage: int, start: int, stop: int) -> float:
            index, own = index_of[stage], seconds(stage, start, stop)
            if not can_win(group.microbatches * own):
                return inf
            in_flight = kept[index] * shape.cut.local
            if number == pp and stop - start > needs.blocks(rooms[index], in_flight):
                return inf
            counts = workload.counts_of(start, stop, stage == 0, stage == number - 1)
            key = (index, counts)
            if key not in most:
                late, found = late_at(choice, trial, index), self.evaluator
                peak = found.bytes_of(choice, trial, index, counts).peak(kept[index], late)
                most[key] = peak * number / pp <= rooms[index]
            return own if most[key] else inf

        split = fitting_split(self._blocks, number, cost)
        return balanced_split(self._blocks, number, cost, split) if split else ()


def _blocks_of_ranks(group: ReplicaChoice, blocks: int, is_folded: bool) -> list[int]:
    """How many blocks the ranks at each index on pp hold. blocks: of the model."""
    stages, pp = group.stages, group.pp
    if pp == 1:
        return [blocks]
    if len(stages) == pp:
        return list(stages)
    places = (stages_at(index, pp, len(stages), is_folded) for index in range(pp))
    return [sum(stages[stage] for stage in own) for own in places]


def _indices(variant: Variant, pp: int, number: int) -> list[int]:
    """The index on pp of each stage."""
    is_folded = SCHEDULE_KINDS[variant.schedule].is_folded
    return [pp_of_stage(stage, pp, is_folded) for stage in range(number)]


def choice_of(variant: Variant, groups: tuple[ReplicaChoice, ...]) -> Choice:
    return Choice(
        groups,
        variant.microbatch,
        variant.schedule,
        variant.virtual,
        variant.zero,
        variant.ep,
        variant.sequence_parallel,
        variant.host,
    )
