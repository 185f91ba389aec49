"""Complete layouts of given degrees: ZeRO stages, splits of the blocks, recompute that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

from holdfast.config.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator
from holdfast.plan.cost.least_pipeline_time import kept_microbatches
from holdfast.plan.search.limits import Limits
from holdfast.plan.search.space import Shape
from holdfast.plan.search.splits import (
    StageCost,
    Stages,
    balanced_split,
    can_try_all,
    even_split,
    every_split,
    fitting_split,
)


@dataclass(frozen=True)
class Shares:
    """Replicas of one shape. number: of them, each with so many microbatches."""

    shape: Shape
    number: int
    microbatches: int


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
class Layouts:
    """Makes layouts, and remembers splits."""

    evaluator: Evaluator
    limits: Limits
    _splits: dict[object, tuple[Stages, ...]] = field(default_factory=dict)

    def variants(self, shapes: Sequence[Shape], schedule: str, virtual: int) -> Iterator[Variant]:
        """ZeRO stages, by the rules of a run file."""
        ep = shapes[0].ep
        is_cut = any(shape.dp_shard > 1 for shape in shapes)
        is_split = SCHEDULE_KINDS[schedule].splits_backward or virtual > 1
        is_piped = is_split and any(shape.pp > 1 and shape.dp_shard > 1 for shape in shapes)
        stages = [zero for zero in self.limits.zero if ep == 1 or zero > 1]
        stages = [zero for zero in stages if zero == 1 or not is_piped]
        for zero in stages if is_cut else stages[:1]:
            one = Variant(shapes[0].microbatch, schedule, virtual, zero, ep)
            host = self.limits.offloads[0]
            yield replace(one, sequence_parallel=self.limits.sequence_parallel, host=host)

    def groups(self, variant: Variant, shares: Shares, replicas: int) -> Iterator[ReplicaChoice]:
        """Every way to split and to recompute that fits; nothing if none does. replicas: of the
        layout."""
        shape, virtual = shares.shape, variant.virtual
        group = ReplicaChoice(shares.number, *shape.mesh, (), shape.pools, shares.microbatches)
        if shape.pp == 1:
            fitting = self._recomputed(variant, group)
            if fitting is not None:
                yield fitting
            return
        kind = SCHEDULE_KINDS[variant.schedule]
        if shares.microbatches < kind.least_microbatches(shape.pp):
            return
        found = False
        for stages in self._stages(variant, group, shape, virtual):
            fitting = self._recomputed(variant, replace(group, stages=stages))
            if fitting is not None:
                found = True
                yield fitting
        if not found and not can_try_all(self._blocks, shape.pp * virtual):
            split = self._by_memory(variant, group, shape.pp * virtual)
            fitting = self._recomputed(variant, replace(group, stages=split)) if split else None
            if fitting is not None:
                yield fitting

    @property
    def _blocks(self) -> int:
        return len(self.evaluator.problem.workload.layers) - 2

    def _recomputed(self, variant: Variant, group: ReplicaChoice) -> ReplicaChoice | None:
        """With the least recompute of each stage that fits. It is the fastest: no stage's word
        changes the memory of another."""
        choice = choice_of(variant, (group,))
        kept = kept_microbatches(variant.schedule, group.pp, variant.virtual, group.microbatches)
        words, held = list[str](), self.evaluator.counts_of_ranks(choice, group)
        allowed = [word for word in self.limits.recompute if variant.ep == 1 or word != "selective"]
        tries = [replace(group, recompute=(word,)) for word in allowed]
        is_even = not SCHEDULE_KINDS[variant.schedule].splits_backward
        for index in range(group.pp):
            if is_even and index > 1 and words[-1] == allowed[0] and kept[index] <= kept[index - 1]:
                before = held[index - 1], group.pool_at(index - 1)
                if (held[index], group.pool_at(index)) == before:
                    words.append(allowed[0])  # it keeps no more than the rank before
                    continue
            room = self.evaluator.room(group.pool_at(index))
            for word, tried in zip(allowed, tries, strict=True):
                memory = self.evaluator.memory_of(choice, tried, index, kept[index], held[index])
                if memory.peak <= room:
                    words.append(word)
                    break
            else:
                return None
        one = words[0] if all(word == words[0] for word in words) else ""
        return tries[allowed.index(one)] if one else replace(group, recompute=tuple(words))

    def _stages(
        self, variant: Variant, group: ReplicaChoice, shape: Shape, virtual: int
    ) -> tuple[Stages, ...]:
        key = (
            variant.microbatch // shape.dp_shard,
            shape.mesh,
            shape.ep,
            shape.site.pools,
            shape.slots,
            virtual,
            SCHEDULE_KINDS[variant.schedule].is_folded,
            variant.zero == 3,
        )
        if key not in self._splits:
            self._splits[key] = self._splits_of(variant, group, shape.pp * virtual)
        return self._splits[key]

    def _splits_of(self, variant: Variant, group: ReplicaChoice, number: int) -> tuple[Stages, ...]:
        blocks = self._blocks
        if can_try_all(blocks, number):
            return tuple(every_split(blocks, number))
        even = even_split(blocks, number)
        if number > group.pp:
            return (even,)
        fastest = balanced_split(blocks, number, self._seconds(variant, group, number))
        return tuple(dict.fromkeys((even, even[::-1], fastest)))

    def _seconds(self, variant: Variant, group: ReplicaChoice, number: int) -> StageCost:
        """What a stage takes for a microbatch."""
        workload, sums = self.evaluator.problem.workload, dict[int, tuple[list[float], float]]()
        kinds = {layer: kind for kind, layer in enumerate(workload.kinds)}
        own = [kinds[block] for block in workload.blocks]
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

    def _by_memory(self, variant: Variant, group: ReplicaChoice, number: int) -> Stages:
        """The fastest split that fits with some recompute; () if none does."""
        workload, pp = self.evaluator.problem.workload, group.pp
        kept = kept_microbatches(variant.schedule, pp, variant.virtual, group.microbatches)
        trial = replace(group, recompute=self.limits.recompute[-1:])
        choice = choice_of(variant, (trial,))
        rooms = [self.evaluator.room(group.pool_at(index)) for index in range(pp)]
        index_of = _indices(variant, pp, number)
        seconds, most = self._seconds(variant, group, number), dict[object, bool]()

        def cost(stage: int, start: int, stop: int) -> float:
            index = index_of[stage]
            counts = workload.counts_of(start, stop, stage == 0, stage == number - 1)
            key = (index, counts)
            if key not in most:
                memory = self.evaluator.memory_of(choice, trial, index, kept[index], counts)
                most[key] = memory.peak * number / pp <= rooms[index]
            return seconds(stage, start, stop) if most[key] else inf

        split = fitting_split(self._blocks, number, cost)
        return balanced_split(self._blocks, number, cost, split) if split else ()


def _indices(variant: Variant, pp: int, number: int) -> list[int]:
    """The index on pp of each stage."""
    folded = SCHEDULE_KINDS[variant.schedule].is_folded
    return [2 * pp - 1 - n if folded and n >= pp else n % pp for n in range(number)]


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
