"""Layouts whose replicas differ: each pool has replicas of its own shape.

All replicas of a layout share a microbatch, a schedule and a ZeRO stage. Shares of
microbatches follow speed. Pools that are alike have the same options. Small fleets are searched
completely. In a large one, each pool offers a few shapes, those with the shortest steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice, ReplicaChoice
from holdfast.plan.cost.collectives import allreduce_s
from holdfast.plan.cost.evaluate import Evaluator
from holdfast.plan.cost.pipeline_time import kept_microbatches
from holdfast.plan.hardware.cluster import NodePool
from holdfast.plan.hardware.link import Link
from holdfast.plan.memory.stage_bytes import layer_parameters
from holdfast.plan.search.bounds import Bounds
from holdfast.plan.search.layouts import Layouts, Variant, choice_of
from holdfast.plan.search.limits import Limits
from holdfast.plan.search.room import Room
from holdfast.plan.search.shares import dealt, with_best_shares
from holdfast.plan.search.space import Shape, Site, cuts, shapes, slots_of, virtual_stages
from holdfast.plan.search.splits import every_split

SMALL = 4
"""Pools with at most so many devices are searched completely."""
_OFFERED = 3  # shapes that a pool of a large fleet offers


@dataclass(frozen=True, slots=True)
class Family:
    """Layouts of several pools with the same variant."""

    variant: Variant
    pools: tuple[NodePool, ...]
    offers: tuple[tuple[Shape, ...], ...] = ()  # shapes of each pool; empty at first

    @property
    def work(self) -> float:
        """Groups of the search that cost as much to open."""
        return 25.0 if self.offers else 0.2


@dataclass(frozen=True, slots=True)
class _Offer:
    """A shape with its seconds."""

    step: float  # of a step with an even share
    seconds: float  # of a microbatch on all replicas
    tail: float  # after the passes
    shape: Shape


@dataclass
class Fleets:
    """Finds layouts of several pools for one search."""

    evaluator: Evaluator
    limits: Limits
    bounds: Bounds
    layouts: Layouts
    room: Room
    _of_pool: dict[object, list[tuple[float, Shape]]] = field(default_factory=dict)
    _offers: dict[object, list[_Offer]] = field(default_factory=dict)
    _parameters: dict[tuple[int, int], float] = field(default_factory=dict)

    @property
    def _pools(self) -> tuple[NodePool, ...]:
        return self.evaluator.problem.cluster.pools

    @cached_property
    def is_small(self) -> bool:
        return all(pool.size <= SMALL for pool in self._pools)

    def families(self) -> Iterator[tuple[float, Family]]:
        """Groups of layouts with the least seconds of each."""
        workload, sets = self.evaluator.problem.workload, list(self._sets())
        for variant in self._variants() if sets else ():
            total = workload.batch // variant.microbatch
            for pools in sets:
                if total < len(pools):
                    continue
                fastest = [self._ranked(pool, variant) for pool in pools]
                if all(fastest):
                    rate = sum(1 / own[0][0] for own in fastest)
                    yield total / rate, Family(variant, pools)

    def with_offers(self, family: Family) -> tuple[float, Family] | None:
        """The family with shapes that may fit, and its least seconds; None if a pool has none."""
        total = self.evaluator.problem.workload.batch // family.variant.microbatch
        rate, tail, one, offers = 0.0, inf, 0.0, list[tuple[Shape, ...]]()
        for pool in family.pools:
            found = self._fitting(pool, family, total)
            if not found:
                return None
            rate += max(1 / each.seconds for each in found)
            tail = min(tail, min(each.tail for each in found))
            one = max(one, min(each.seconds * each.shape.most for each in found))
            offers.append(tuple(each.shape.in_pool(pool.name) for each in found))
        is_piped = any(shape.pp > 1 for own in offers for shape in own)
        if not is_piped and family.variant.schedule != self.limits.schedules[0]:
            return None  # the same as under the first schedule
        return max(total / rate, one) + tail, replace(family, offers=tuple(offers))

    def _sets(self) -> Iterator[tuple[NodePool, ...]]:
        """Two pools or more. Of pools that are alike, the first ones."""
        kinds: dict[object, list[NodePool]] = {}
        for pool in self._pools:
            kinds.setdefault(_likeness(self.evaluator, pool), []).append(pool)
        for numbers in product(*(range(len(pools) + 1) for pools in kinds.values())):
            if sum(numbers) > 1:
                pairs = zip(kinds.values(), numbers, strict=True)
                yield tuple(pool for pools, number in pairs for pool in pools[:number])

    def _variants(self) -> Iterator[Variant]:
        workload = self.evaluator.problem.workload
        blocks, seen = len(workload.layers) - 2, set[Variant]()
        for microbatch in range(1, workload.batch + 1):
            if workload.batch % microbatch or self.limits.microbatch not in (0, microbatch):
                continue
            experts = self.limits.ep or 1
            for schedule in self.limits.schedules:
                longest = self.limits.pp or 2
                for virtual in virtual_stages(schedule, self.limits, blocks, longest) or [1]:
                    for zero in self.limits.zero:
                        ways = self.limits.sequence_parallel, self.limits.offloads[0]
                        one = Variant(microbatch, schedule, virtual, zero, experts, *ways)
                        if one not in seen:
                            seen.add(one)
                            yield one

    def _ranked(self, pool: NodePool, variant: Variant) -> list[tuple[float, Shape]]:
        """Shapes with seconds of a microbatch on all replicas of the pool, the fastest first."""
        key = (_likeness(self.evaluator, pool), variant.microbatch, variant.ep)
        if key in self._of_pool:
            return self._of_pool[key]
        problem, found = self.evaluator.problem, list[tuple[float, Shape]]()
        limits = replace(self.limits, microbatch=variant.microbatch, ep=variant.ep)
        for cut in cuts(problem, limits, Site((pool.name,), (pool.size,), pool.devices)):
            for slots in slots_of(problem, limits, cut):
                busy = self.bounds.least_seconds(cut, slots, "gpipe", 2, 1)
                found += [
                    (busy / shape.most, shape) for shape in shapes(problem, limits, cut, slots)
                ]
        found.sort(key=lambda each: each[0])
        self._of_pool[key] = found
        return found

    def _fitting(self, pool: NodePool, family: Family, total: int) -> list[_Offer]:
        """Shapes that may fit: all of a small fleet, or those with the shortest steps if each pool
        has the same share."""
        # The slowest link of a pool to another of the family.
        cluster = self.evaluator.problem.cluster
        links = [cluster.link_between(pool, other) for other in family.pools if other is not pool]
        variant, link = family.variant, min(links, key=lambda link: link.bandwidth)
        like = _likeness(self.evaluator, pool)
        key = (like, variant, len(family.pools), link)
        if key in self._offers:
            return self._offers[key]
        found, kind = list[_Offer](), SCHEDULE_KINDS[variant.schedule]
        for busy, shape in self._ranked(pool, variant):
            share = max(1, total // len(family.pools))
            if not self.is_small and len(found) >= _OFFERED and busy * share > found[-1].step:
                break
            pp, virtual = shape.pp, variant.virtual if shape.pp > 1 else 1
            if not self._is_allowed(shape, variant):
                continue
            fewest = kind.least_microbatches(pp)
            each = max(-(-share // shape.most), fewest)
            seconds = self.bounds.least_seconds(
                shape.cut, shape.slots, variant.schedule, virtual, each
            )
            is_full = not self.is_small and len(found) >= _OFFERED
            if is_full and seconds >= found[-1].step:
                continue
            kept = kept_microbatches(variant.schedule, pp, virtual, fewest)
            if self.room.can_fit(shape, variant.zero, kept, fewest):
                tail = 0.0 if self.is_small else self._tail(pool, shape, link)
                offer = _Offer(seconds + tail, seconds / each / shape.most, tail, shape)
                found.append(offer)
                found.sort(key=lambda one: one.step)
                if not self.is_small:
                    del found[_OFFERED:]
        self._offers[key] = found
        return found

    def _is_allowed(self, shape: Shape, variant: Variant) -> bool:
        """Return False for what rules of a run file refuse."""
        if shape.pp == 1:
            return True
        blocks = len(self.evaluator.problem.workload.layers) - 2
        allowed = virtual_stages(variant.schedule, self.limits, blocks, shape.pp)
        if variant.virtual not in allowed or shape.pp * variant.virtual > blocks:
            return False
        is_split = SCHEDULE_KINDS[variant.schedule].splits_backward or variant.virtual > 1
        return not (is_split and shape.is_sharded and variant.zero > 1)

    def _tail(self, pool: NodePool, shape: Shape, link: Link) -> float:
        """Seconds, roughly, in which gradients go to other pools and no backward hides them."""
        workload, cut = self.evaluator.problem.workload, (shape.tp, shape.ep)
        one = self.bounds.pass_of(shape.cut, pool.name)
        own = self._parameters.get(cut)
        if own is None:
            own = sum(layer_parameters(layer, *cut) for layer in workload.layers)
            self._parameters[cut] = own
        size = own / shape.pp / shape.dp_shard * workload.state.gradients
        hidden = one.total * (1 - one.forward) / shape.pp
        return max(0.0, allreduce_s(link, size, 2 * shape.most) - hidden)

    def layouts_of(self, family: Family) -> Iterator[Choice]:
        """Complete layouts, with microbatches dealt to the pools."""
        total = self.evaluator.problem.workload.batch // family.variant.microbatch
        if self.is_small:
            yield from self._every_layout(family, total)
            return
        options = [
            [group for shape in offers for group in self._groups(family.variant, shape, total)]
            for offers in family.offers
        ]
        if not all(options):
            return
        chosen = [own[0] for own in options]
        yield from self._shared(family.variant, chosen, total)
        for place, own in _changes(family, options):
            yield from self._shared(
                family.variant, [*chosen[:place], own, *chosen[place + 1 :]], total
            )

    def _groups(self, variant: Variant, shape: Shape, total: int) -> list[ReplicaChoice]:
        fewest = SCHEDULE_KINDS[variant.schedule].least_microbatches(shape.pp)
        each = max(1, fewest, total // (shape.most + 1))
        own = variant if shape.pp > 1 else replace(variant, virtual=1)
        return list(self.layouts.groups(own, shape, min(shape.most, total), each))[:1]

    def _shared(
        self, variant: Variant, groups: list[ReplicaChoice], total: int
    ) -> Iterator[Choice]:
        choice = with_best_shares(self.evaluator, choice_of(variant, tuple(groups)), total)
        if choice is not None:
            yield choice

    def _every_layout(self, family: Family, total: int) -> Iterator[Choice]:
        """Every number of replicas, every share of the microbatches, every split."""
        options = [
            [(number, shape) for shape in offers for number in range(1, shape.most + 1)]
            for offers in family.offers
        ]
        for chosen in product(*options):
            for shared in every_split(total, len(chosen)):  # microbatches of each pool
                found = [
                    self._dealt_groups(family.variant, shape, number, own)
                    for (number, shape), own in zip(chosen, shared, strict=True)
                ]
                for groups in product(*found):
                    yield choice_of(family.variant, tuple(g for own in groups for g in own))

    def _dealt_groups(
        self, variant: Variant, shape: Shape, number: int, microbatches: int
    ) -> list[tuple[ReplicaChoice, ...]]:
        each, more = divmod(microbatches, number)
        if each < max(1, SCHEDULE_KINDS[variant.schedule].least_microbatches(shape.pp)):
            return []
        own = variant if shape.pp > 1 else replace(variant, virtual=1)
        groups = self.layouts.groups(own, shape, number, each + (more > 0))
        return [tuple(dealt(group, number, each, more)) for group in groups]


def _changes(
    family: Family, options: list[list[ReplicaChoice]]
) -> Iterator[tuple[int, ReplicaChoice]]:
    """Other options of one pool; of pools that are alike, of the first."""
    seen = set[object]()
    for place, pool in enumerate(family.pools):
        like = (pool.device, pool.size, pool.zone if len(options) < 3 else "")
        if like not in seen:
            seen.add(like)
            yield from ((place, own) for own in options[place][1:])


def first_of_each(evaluator: Evaluator) -> list[NodePool]:
    """Pools of which none is like one before."""
    kinds: dict[object, NodePool] = {}
    for pool in evaluator.problem.cluster.pools:
        kinds.setdefault(_likeness(evaluator, pool), pool)
    return list(kinds.values())


def _likeness(evaluator: Evaluator, pool: NodePool) -> object:
    """What pools have in common that can change places: all but their names and zones."""
    cluster = evaluator.problem.cluster
    links = sorted(
        (link.latency_s, link.bandwidth)
        for other in cluster.pools
        if other is not pool
        for link in [cluster.link_between(pool, other)]
    )
    is_even = len(set(links)) <= 1
    return replace(pool, name="", zone="" if is_even else pool.zone), tuple(links)
