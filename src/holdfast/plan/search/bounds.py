"""Least times of a step before stages, memory and schedules are looked at.

They count what each rank must compute and send in its layers with the links of the site. What a
pipeline adds follows from its length: see `least_seconds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.evaluate import Evaluator
from holdfast.plan.search.layouts import Variant
from holdfast.plan.search.space import Cut, Shape
from holdfast.plan.search.splits import can_try_all

_HALVINGS = 7
_LINEAR = 0.5  # A tail has latencies that blocks share, so that of many blocks is less than the sum


@dataclass(frozen=True, slots=True)
class Pass:
    """Seconds of one microbatch on one device that has all layers."""

    total: float  # forward and backward of all layers
    forward: float  # the least share of a layer that is forward
    block: float  # the fastest block


@dataclass
class Bounds:
    """Remembers passes by the degrees that they depend on."""

    evaluator: Evaluator
    recompute: tuple[str, ...]
    _passes: dict[object, Pass] = field(default_factory=dict)
    _tails: dict[object, float] = field(default_factory=dict)

    def pass_of(self, cut: Cut, pool: str, word: str = "none") -> Pass:
        """Return the times of one microbatch, nothing gathered. word: of recompute."""
        key = (cut.local, cut.cp, cut.tp, cut.ep, pool, word)
        found = self._passes.get(key)
        if found is not None:
            return found
        workload = self.evaluator.problem.workload
        group = ReplicaChoice(1, 1, 1, cut.cp, cut.tp, (), (pool,), 1)
        choice = Choice((group,), cut.local, ep=cut.ep)
        total, share, least = 0.0, 1.0, inf
        counts = workload.counts_of(0, len(workload.blocks), True, True)
        for kind, number in counts:
            times = self.evaluator.layer_times(choice, group, 0, kind, word)
            each = times.forward + times.backward
            total += number * each
            if each:
                share = min(share, times.forward / each)
            if workload.kinds[kind].kind == "block":
                least = min(least, each)
        found = self._passes[key] = Pass(total, share, least)
        return found

    def least_of_cut(self, cut: Cut) -> float:
        """Return seconds that no pipeline and no number of replicas beats."""
        rates = 0.0
        for name, size in zip(cut.site.pools, cut.site.sizes, strict=True):
            rates += size // (cut.tp * cut.cp) / self.pass_of(cut, name).total
        return self.evaluator.problem.workload.batch / cut.local / rates if rates else inf

    def least_seconds(
        self, cut: Cut, slots: tuple[int, ...], schedule: str, virtual: int, microbatches: int
    ) -> float:
        """Return seconds that no split of the blocks beats.

        A stage can begin when the first microbatch has passed those before it. So in a step of S
        seconds it takes at most (S - what comes before it) / m for each of m microbatches. Then p
        stages take at most S (1 - (1 - 1/m)^p), and all layers must fit into that.
        """
        if len(slots) > 1:  # on the busiest rank, if all pools are as busy
            pairs = zip(cut.site.pools, slots, strict=True)
            rates = (number / self.pass_of(cut, name).total for name, number in pairs)
            return microbatches * (1 / sum(rates))
        one, pp = self.pass_of(cut, cut.site.pools[0]), slots[0]
        if pp == 1:
            return microbatches * one.total
        blocks = self._blocks
        busy = microbatches * max(one.total / pp, -(-blocks // pp) * one.block)
        share = one.forward if SCHEDULE_KINDS[schedule].splits_backward else 1.0
        if virtual == 1:
            return max(busy, share * one.total / (1 - (1 - share / microbatches) ** pp))
        least = 1 if can_try_all(blocks, pp * virtual) else blocks // (pp * virtual)
        return max(busy, ((pp - 1) * share + microbatches * virtual) * least * one.block)

    @property
    def _blocks(self) -> int:
        return len(self.evaluator.problem.workload.layers) - 2

    def least_recomputed(
        self,
        shape: Shape,
        variant: Variant,
        microbatches: int,
        most: Sequence[Sequence[float]],
        seconds: float,
    ) -> float:
        """Return least seconds of the passes with the recompute that ranks need.

        Args:
            most: for each word of recompute, the most blocks of each index on pp. If there is room
                for all blocks under the first word, the first is enough.
            seconds: see `least_seconds`.
        """
        if sum(map(int, most[0])) >= self._blocks or len(shape.site.pools) > 1:
            return seconds
        # seconds in which the ranks can compute all blocks, as many each as a word allows
        name, blocks, low = shape.site.pools[0], self._blocks, seconds
        words = shape.words(self.recompute)
        times = [self.pass_of(shape.cut, name, word).block * microbatches for word in words]
        way = times[0] / microbatches
        kind = SCHEDULE_KINDS[variant.schedule]
        if kind.splits_backward:
            way *= self.pass_of(shape.cut, name).forward
        number = shape.pp * variant.virtual
        way *= 1 if can_try_all(blocks, number) else max(1, blocks // number * (number > shape.pp))
        options = list(zip(times, most, strict=True))
        high, every = low * 2, range(shape.pp)
        for _ in range(_HALVINGS):
            if high - low <= 0.005 * high:
                break
            middle, found = (low + high) / 2, 0.0
            left = middle
            for index in every:
                most_here = 0.0
                for time, own in options:
                    here, slow = own[index], left / time
                    if slow < here:
                        here = slow
                    if here > most_here:
                        most_here = here
                found += most_here
                if found >= blocks:
                    break
                left -= way
            if found >= blocks:
                high = middle
            else:
                low = middle
        return low

    def least_tail(self, shape: Shape, variant: Variant) -> float:
        """Return the seconds after the passes, of a rank with no more than its share of the
        blocks."""
        workload, pool = self.evaluator.problem.workload, shape.site.pools[0]
        if len(shape.site.pools) > 1:
            return 0.0
        key = (shape.mesh[1:], shape.ep, variant.zero, pool)
        each = self._tails.get(key)
        if each is None:
            group = ReplicaChoice(1, 1, *shape.mesh[1:], (), (pool,), 1)
            choice = Choice(
                (group,), variant.microbatch, zero=variant.zero, ep=shape.ep, host=variant.host
            )
            kinds = [i for i, layer in enumerate(workload.kinds) if layer.kind == "block"]
            each = self._tails[key] = min(
                self.evaluator.least_tail(choice, group, 0, ((kind, 1),)) for kind in kinds
            )
        fixed = self.evaluator.device(pool).steps.step_s
        return fixed + (each - fixed) * (self._blocks / shape.pp) * _LINEAR
