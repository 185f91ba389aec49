"""The best layout of a run on a cluster.

The search keeps a heap of layouts and of groups of layouts, by the least score that any of them can
have. It opens the first of the heap. Degrees become numbers of replicas and schedules, and these
become complete layouts. Of a complete layout the schedule's timeline is executed. Once the first of
the heap cannot beat the best layout so far, no layout can. So the answer is that of an exhaustive
search, and few timelines are executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import gcd, inf

from holdfast.config.sections.pipeline_schedules import SCHEDULE_KINDS
from holdfast.plan.cost.choice import Choice
from holdfast.plan.cost.evaluate import Evaluator, Problem
from holdfast.plan.search.bounds import Bounds
from holdfast.plan.search.candidates import Candidates, Scores
from holdfast.plan.search.fleets import Family, Fleets, first_of_each
from holdfast.plan.search.groups import Fitting, Group, Groups, Piped, Scheduled, replicas_of
from holdfast.plan.search.layouts import Layouts, choice_of
from holdfast.plan.search.limits import Found, Limits, Objective, Phase, SearchResult, step_seconds
from holdfast.plan.search.nearest import nothing_fits_error
from holdfast.plan.search.room import Room
from holdfast.plan.search.shares import dealt
from holdfast.plan.search.space import (
    Cut,
    Shape,
    Site,
    computes_own,
    cuts,
    part_degrees,
    replica_numbers,
    shapes,
    slots_of,
    virtual_stages,
)

__all__ = ["Found", "Limits", "Objective", "SearchResult", "search", "step_seconds"]

_PACE = 50  # groups that are opened before a layout is executed out of turn
_MOST_CHAINED = 4  # pools up to which a pipeline may go through two of them
_COMPLETE = 16  # devices up to which a search continues until it has the best of all layouts
_EFFORT = 250  # groups of a large problem that are opened without a better layout
_SMALL_GAP = 0.15
_SAME_GAP = 1.01
_PATIENCE = 8  # times as many groups are opened while the gap is not small
_DESPERATE = 10  # times as many groups a short search opens if nothing fits so far
_SHORT = 40  # groups that a short search opens: any layout will do
_LAST = 16  # layouts that are executed at the end of a search that could not open all groups


def _allows_all(_: Choice) -> bool:
    return True


def search(
    problem: Problem,
    limits: Limits | None = None,
    objective: Objective = step_seconds,
    first: Sequence[Choice] = (),
    allows: Callable[[Choice], bool] = _allows_all,
    earlier: Sequence[Phase] = (),
) -> SearchResult:
    """Return the best layout.

    Args:
        first: layouts of this problem that are likely to be good, the best one first.
        earlier: phases of the search that found them. This one has to open as many groups, unless
            it is as close to its bounds. A first layout is seldom beaten, so a search for a large
            cluster would end too early.
        allows: False for layouts that rules of a run file refuse.

    Raises LayoutError if nothing fits, with the nearest that would.
    """
    limits, phases, best = limits or Limits(), tuple(earlier), None
    tries = [
        Search(problem, replace(limits, offloads=(host,)), objective, allows, earlier=phases)
        for host in limits.offloads
    ]
    for one in tries:
        if best is None or problem.cluster.size <= _COMPLETE:
            best = one.run(first, best)
    for tp, pair in part_degrees(problem, limits) if objective is step_seconds else ():
        best = _with_parts(problem, replace(limits, tp=tp), objective, allows, pair, best)
    if best is None:
        raise nothing_fits_error(problem, tries[0].limits, tries[0].find_any)
    return best


def _with_parts(
    problem: Problem,
    limits: Limits,
    objective: Objective,
    allows: Callable[[Choice], bool],
    pair: tuple[int, int],
    best: SearchResult | None,
) -> SearchResult | None:
    """The best layout so far, or a better one whose blocks have these degrees of attention and
    feed-forward."""
    workload = problem.workload.with_part_tp(pair)

    def allowed(choice: Choice) -> bool:
        return computes_own(choice, workload) and allows(replace(choice, part_tp=pair))

    other = Search(replace(problem, workload=workload), limits, objective, allowed)
    found = other.run((), best)
    if found is None or found is best or (best and found.best.score >= best.best.score):
        return best

    def tagged(one: Found) -> Found:
        return one if best and one is best.best else replace(one, choice=tag(one.choice))

    def tag(choice: Choice) -> Choice:
        return choice if choice.part_tp else replace(choice, part_tp=pair)

    return replace(found, best=tagged(found.best), runners_up=tuple(map(tagged, found.runners_up)))


@dataclass
class Search:
    """One search."""

    problem: Problem
    limits: Limits
    objective: Objective
    allows: Callable[[Choice], bool] = _allows_all
    evaluator: Evaluator = field(init=False)
    is_short: bool = False
    earlier: tuple[Phase, ...] = ()
    _phases: list[Phase] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.problem)
        self._scores = Scores(self.problem, self.objective)
        self._bounds = Bounds(self.evaluator, self.limits.recompute)
        self._room = Room(self.evaluator, self.limits)
        self._layouts = Layouts(self.evaluator, self.limits, self._room)
        self._fleets = Fleets(self.evaluator, self.limits, self._bounds, self._layouts, self._room)
        self._candidates = Candidates(self.evaluator, self._scores, self._is_wanted)
        self._fitting = Fitting(self.problem, self._scores, self._bounds, self._room)
        self._groups = Groups(self._fitting.fitted)
        self._pushed, self._least_alike = 0, inf

    def run(self, first: Sequence[Choice], other: SearchResult | None) -> SearchResult | None:
        """Return the best layout with its runners-up; None if none fits. other: of a search with
        other limits, which is returned if it has the best layout."""
        self._candidates.ceiling = other.best.score if other else inf
        known = [each for each in first if self._is_wanted(each)]
        known = [each for each in known if self.evaluator.least(each).fits]
        for choice in known[:1]:
            self._candidates.execute(choice)
        best, gap = self.find(), self._gap()
        if best is None:
            return other
        for choice in known[1:]:  # a good first layout leaves few runners-up
            self._candidates.push(choice, even_if_worse=True)
        others, tried = self._candidates.execute_runners_up(), len(self._candidates.executed)
        bounded = self._pushed + self._candidates.pushed
        if other:
            others = tuple(sorted((other.best, *others), key=lambda each: each.score))
            tried, bounded = tried + other.tried, bounded + other.bounded
        return SearchResult(best, others, tried, bounded, gap, phases=tuple(self._phases))

    def find(self) -> Found | None:
        """The best layout; None if none fits. Replicas that are alike come first."""
        for site in self.sites():
            for cut in cuts(self.problem, self.limits, site):
                seconds = self._bounds.least_of_cut(cut)
                self._push(self._scores.of_pools(seconds, site.pools), seconds, cut)
        self._search(_PATIENCE)
        least_alike, self._groups = self._groups.least, Groups(self._fitting.fitted)
        for seconds, family in self._fleets.families():
            names = tuple(pool.name for pool in family.pools)
            self._push(self._scores.of_pools(seconds, names), seconds, family)
        self._search(1)
        self._least_alike = least_alike
        return self._candidates.best

    def find_any(self, problem: Problem, limits: Limits) -> Choice | None:
        """A layout that fits another problem or other limits, after a short search."""
        other = Search(problem, replace(limits, effort=_SHORT), self.objective, self.allows)
        other.is_short = True
        found = other.find()
        return found.choice if found else None

    def _is_wanted(self, choice: Choice) -> bool:
        is_here = choice.host == self.limits.offloads[0]
        return is_here and self.limits.devices in (0, choice.devices) and self.allows(choice)

    def _search(self, patience: float) -> None:
        """Open groups, the most promising first. Layouts are executed when they are the most
        promising, or after some groups: a good layout makes the heaps shorter."""
        idle, since, work = 0.0, 0.0, 0.0
        earlier = next(iter(self.earlier[len(self._phases) :]), None)
        waiting = self._candidates
        while (least := self._groups.least) < waiting.best_score:
            if waiting.least <= least or (since >= _PACE and waiting):
                before = waiting.best_score
                waiting.execute_next()
                since, idle = 0.0, idle if waiting.best_score == before else 0.0
                continue
            if self.is_short and (waiting.best or idle >= _DESPERATE * self._effort):
                break
            if waiting.best and self._is_enough(idle, work, patience, earlier):
                break
            node = self._groups.pop()
            own = node.work if isinstance(node, Family) else 1.0
            match node:
                case Cut():
                    self._open_cut(node)
                case Piped():
                    self._open_piped(node)
                case Family():
                    self._open_family(node)
                case Scheduled():
                    self._open_scheduled(node)
            idle, since, work = idle + own, since + own, work + own
        else:
            self._groups.clear()
        self._phases.append(Phase(work, self._gap()))
        for _ in range(_LAST if self._groups.least < inf else len(waiting)):
            if not waiting.execute_next():
                break

    def _is_enough(self, idle: float, work: float, patience: float, earlier: Phase | None) -> bool:
        """Return True if no more groups are opened. idle: those without a better layout. work: all
        of this phase."""
        if idle < self._effort:
            return False
        gap = self._gap()
        if gap < _SMALL_GAP or (earlier is not None and gap <= earlier.gap * _SAME_GAP):
            return True
        return idle >= patience * self._effort and (earlier is None or work >= earlier.work)

    @property
    def _effort(self) -> float:
        if self.limits.effort:
            return self.limits.effort
        return inf if self.problem.cluster.size <= _COMPLETE else _EFFORT

    def _gap(self) -> float:
        """The share by which a layout that was not looked at may be better, at most."""
        least = min(self._groups.least, self._least_alike, self._candidates.least)
        best = self._candidates.best_score
        return 0.0 if least >= best or best == inf else 1 - max(0.0, least) / best

    def _push(self, score: float, seconds: float, node: Group) -> None:
        self._pushed += 1
        if score < self._candidates.best_score:
            self._groups.push(score, seconds, node)

    def sites(self) -> list[Site]:
        """Pools that may hold all replicas."""
        pools = first_of_each(self.evaluator)
        found = [Site((pool.name,), (pool.size,), pool.devices) for pool in pools]
        if 1 < len(pools) <= _MOST_CHAINED:
            for one, other in permutations(pools, 2):
                node = gcd(one.devices, other.devices)
                found.append(Site((one.name, other.name), (one.size, other.size), node))
        return found

    def _open_family(self, family: Family) -> None:
        if family.offers:
            for choice in self._fleets.layouts_of(family):
                self._candidates.push(choice)
            return
        offered = self._fleets.with_offers(family)
        if offered is not None:
            seconds, names = offered[0], tuple(pool.name for pool in family.pools)
            self._push(self._scores.of_pools(seconds, names), seconds, offered[1])

    def _open_cut(self, cut: Cut) -> None:
        """Lengths of the pipeline and schedules."""
        blocks, inner = len(self.problem.workload.layers) - 2, cut.tp * cut.cp
        for slots in slots_of(self.problem, self.limits, cut):
            pairs = zip(cut.site.sizes, slots, strict=True)
            wide = min(size // (inner * number) for size, number in pairs)
            each = -(-self.problem.workload.batch // (cut.local * wide))
            pp = sum(slots)
            widest = next(shapes(self.problem, self.limits, cut, slots), None)
            if widest is None or not self._may_fit(widest, each):
                continue
            for schedule in self.limits.schedules if pp > 1 else self.limits.schedules[:1]:
                for virtual in virtual_stages(schedule, self.limits, blocks, pp):
                    least = max(each, SCHEDULE_KINDS[schedule].least_microbatches(pp))
                    seconds = self._bounds.least_seconds(cut, slots, schedule, virtual, least)
                    score = self._scores.of_pools(seconds, cut.site.pools)
                    self._push(score, seconds, Piped(cut, slots, schedule, virtual))

    def _may_fit(self, shape: Shape, microbatches: int) -> bool:
        """microbatches: of a replica, or fewer."""
        room, stages = self._room, self.limits.zero
        if len(shape.slots) > 1:
            half = [0.5] * shape.pp
            return any(room.can_fit(shape, zero, half, microbatches) for zero in stages)
        return any(room.shortest(shape, zero, microbatches) <= shape.pp for zero in stages)

    def _open_piped(self, node: Piped) -> None:
        for shape in shapes(self.problem, self.limits, node.cut, node.slots):
            numbers = replica_numbers(self.problem, self.limits, shape)
            if self._scores.is_time:
                # with fewer replicas a step takes longer: they wait until the first is opened
                self._push_scheduled(shape, node.schedule, node.virtual, numbers)
            else:
                for number in numbers:
                    self._push_scheduled(shape, node.schedule, node.virtual, [number])

    def _push_scheduled(
        self, shape: Shape, schedule: str, virtual: int, numbers: list[int]
    ) -> None:
        """The first number of replicas with which the schedule runs."""
        total = self.problem.workload.batch // shape.microbatch
        for place, number in enumerate(numbers):
            if total // number < SCHEDULE_KINDS[schedule].least_microbatches(shape.pp):
                continue
            if self.limits.devices not in (0, number * shape.size):
                continue
            if variants := tuple(self._layouts.variants(shape, schedule, virtual)):
                group = Scheduled(shape, variants, number, numbers[place + 1 :])
                self._push(*self._fitting.scored(group))
            return  # fewer replicas wait until this group is opened

    def _open_scheduled(self, node: Scheduled) -> None:
        shape, one = node.shape, node.variants[0]
        if node.fewer:
            self._push_scheduled(shape, one.schedule, one.virtual, node.fewer)
        each, more = divmod(self.problem.workload.batch // one.microbatch, node.number)
        most = each + (more > 0)
        is_complete = self.problem.cluster.size <= _COMPLETE
        for variant in node.variants:
            alike = replicas_of(shape, variant, node.number, most)
            tail = self._bounds.least_tail(shape, variant)

            def can_win(seconds: float, alike: Choice = alike, tail: float = tail) -> bool:
                least = self._scores.of_replicas(seconds + tail, alike)
                return least < self._candidates.best_score

            for fitting in self._layouts.groups(variant, shape, node.number, most, can_win):
                slower = self._layouts.with_more_recompute(fitting, shape) if is_complete else ()
                for group in (fitting, *slower):
                    groups = tuple(dealt(group, node.number, each, more))
                    self._candidates.push(choice_of(variant, groups))
