"""What saving at some interval would have cost a job, on the failures of a trace.

A job on n nodes runs on as many of them as are there, and stands idle where there are none. When a
node that it uses goes (several at one instant: one failure), the work since the last save is redone
after a recovery. So a trace becomes a list of spells, and every policy is judged on the same one:

    idle | recovering, work, save, work, save, work | failure

What is lost: the time of the saves, the work that is redone, and the recoveries, which no interval
changes. A failure in the middle of a save finds only the one before. How the job would be spread
over its nodes, and how much faster it is on more of them, is left out. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import floor

from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.policy.saving.interval import IntervalBounds, TierCost, seconds_between
from holdfast_lab.engine.clock import Process, run_process
from holdfast_lab.traces.node_changes import NodeChange, Trace, sort_changes


@dataclass(frozen=True)
class RunSpell:
    """A job between two changes of its nodes."""

    seconds: float  # for which it ran
    failed: bool  # a node that it used was lost at the end; otherwise the end is not known
    nodes: float = 1.0  # that it used, the mean
    idle: float = 0.0  # seconds before, without any node
    level: int = 0  # of the failure, if tiers differ


@dataclass(frozen=True)
class LostTime:
    """Seconds of a replay, by what they were spent on."""

    saving: float = 0.0
    redone: float = 0.0
    recovering: float = 0.0
    running: float = 0.0  # all, idle time apart
    saves: int = 0

    @property
    def by_policy(self) -> float:
        """Share of the running time that the choice of interval cost."""
        return (self.saving + self.redone) / self.running if self.running else 0.0

    @property
    def total(self) -> float:
        """The same with the recoveries."""
        return self.by_policy + (self.recovering / self.running if self.running else 0.0)

    def __add__(self, other: LostTime) -> LostTime:
        return LostTime(
            self.saving + other.saving,
            self.redone + other.redone,
            self.recovering + other.recovering,
            self.running + other.running,
            self.saves + other.saves,
        )


# --- from a trace to spells ---------------------------------------------------------------------
def job_spells(trace: Trace, nodes: int, seed: int = 0) -> tuple[RunSpell, ...]:
    """What a job that wants `nodes` nodes lives through. Which of them it uses is drawn at random.

    A sampled trace shows a departure at the end of the step in which it came. The moment is drawn
    from that step, one for all that go together. Without that, all spells would be multiples of
    the step, and an interval that divides it would look far better than it is.
    """
    draw = random.Random(f"{seed}/spells")
    free: list[str] = []
    used: list[str] = []
    out: list[RunSpell] = []
    at, began, idle, held = 0.0, 0.0, 0.0, 0.0  # held: node-seconds of the spell so far

    def close(now: float, failed: bool) -> None:
        nonlocal began, held, idle
        if now > began:
            out.append(RunSpell(now - began, failed, held / (now - began), idle))
            idle = 0.0
        began, held = now, 0.0

    for when, gone, joined in trace.instants():
        now = max(at, when - draw.random() * trace.step) if gone else max(at, when)
        if used:
            held += (now - at) * len(used)
        else:
            idle += now - at
            began = now
        at = now
        hit = set(gone) & set(used)
        if hit:
            close(now, True)
            used = [name for name in used if name not in hit]
        left = set(gone)
        free = [name for name in free if name not in left] + joined
        while len(used) < nodes and free:
            index = draw.randrange(len(free))
            free[index], free[-1] = free[-1], free[index]
            used.append(free.pop())
    if used:
        end = max(at, trace.seconds)
        held += (end - at) * len(used)
        close(end, False)
    return tuple(out)


def rotate_spells(spells: Sequence[RunSpell], share: float) -> tuple[RunSpell, ...]:
    """Return the same history begun later, by that share of its running time, and closed to a
    ring: a job that started at another moment. Nothing fails where the ends meet."""
    cut = share * sum(spell.seconds for spell in spells)
    for index, spell in enumerate(spells):
        if cut < spell.seconds:
            first = replace(spell, seconds=spell.seconds - cut, idle=0.0)
            last = replace(spell, seconds=cut, failed=False)
            middle = (*spells[index + 1 :], *spells[:index])
            return (first, *middle, last) if cut > 0 else (first, *middle)
        cut -= spell.seconds
    return tuple(spells)


def failure_rate(spells: Sequence[RunSpell]) -> float:
    """Failures a second of running time: a number that is unknown beforehand."""
    return sum(spell.failed for spell in spells) / sum(spell.seconds for spell in spells)


# --- one tier -----------------------------------------------------------------------------------
def lost_by_fixed(
    spells: Iterable[RunSpell], seconds: float, cost: float, recovery: float
) -> LostTime:
    """Saved every `seconds`, which a save of `cost` follows; a failure costs `recovery` as well."""
    saving = redone = recovering = running = 0.0
    saves, broken = 0, False
    for spell in spells:
        start = min(recovery, spell.seconds) if broken else 0.0
        recovering, running = recovering + start, running + spell.seconds
        spent, lost, made = _whole_intervals(spell.seconds - start, seconds, cost)
        saving, saves = saving + spent, saves + made
        if spell.failed:
            redone += lost
        broken = spell.failed
    return LostTime(saving, redone, recovering, running, saves)


def _whole_intervals(left: float, seconds: float, cost: float) -> tuple[float, float, int]:
    """(seconds in saves, work that no save holds, saves) of `left` seconds of work and saves."""
    rounds = floor(left / (seconds + cost))
    rest = left - rounds * (seconds + cost)
    return rounds * cost + max(0.0, rest - seconds), min(rest, seconds), rounds


BeliefPath = tuple[tuple[tuple[float, float], ...], ...]
"""Per spell: (seconds since its begin, rate from then on), rising."""


def belief_path(spells: Sequence[RunSpell], hazard: FailureRate, grain: float = 0.1) -> BeliefPath:
    """What the policy believes as it lives through the spells. It does not depend on the cost of a
    save, so one path serves all. The belief is looked at again after a share `grain` of the time
    since it was last surprised; a run looks at every step."""
    path = []
    for spell in spells:
        at, points = 0.0, list[tuple[float, float]]()
        while at < spell.seconds:
            points.append((at, hazard.failures_per_second(spell.nodes)))
            ahead = min(max(grain / points[-1][1] / 4, grain * at), spell.seconds - at)
            hazard = hazard.with_observation(ahead, spell.nodes)
            at = at + ahead if ahead > 1e-9 else spell.seconds
        if spell.failed:
            hazard = hazard.with_observation(0.0, spell.nodes, failures=1)
        path.append(tuple(points))
    return tuple(path)


def lost_by_adaptive(
    spells: Sequence[RunSpell],
    path: BeliefPath,
    cost: float,
    recovery: float,
    bounds: IntervalBounds,
) -> LostTime:
    """Saved as the policy says, which decides by its belief at each moment."""
    study = _Adaptive(cost, recovery, bounds)
    for spell, points in zip(spells, path, strict=True):
        study.begin(spell)
        run_process(study, points, spell.seconds)
    return study.lost


@dataclass
class _Adaptive(Process[float]):
    """The saves of one spell. Its clock counts seconds of the spell; the news is the rate of
    failures that the policy believes."""

    cost: float
    recovery: float
    bounds: IntervalBounds
    now: float = 0.0
    lost: LostTime = field(default_factory=LostTime)
    _spell: RunSpell = RunSpell(0.0, False)
    _since_s: float = 0.0  # work that is not saved
    _rate: float = 0.0
    _interval_s: float | None = None

    def begin(self, spell: RunSpell) -> None:
        self.now = min(self.recovery, spell.seconds) if self._spell.failed else 0.0
        self._since_s, self._spell = 0.0, spell
        self.lost += LostTime(recovering=self.now, running=spell.seconds)

    def take(self, rate: float) -> None:
        self._rate = rate

    def elapse(self, until: float) -> bool:
        """Work at one interval until `until`, or a little longer if a save is being made."""
        price = TierCost(0, self.cost)
        self._interval_s = seconds_between(price, self._rate, self.bounds, self._interval_s)
        self.now, self._since_s, lost = _piece(
            self.now, self._since_s, until, self._spell, self._interval_s, self.cost
        )
        self.lost += lost
        return self.now >= self._spell.seconds


def _piece(
    now: float, since: float, until: float, spell: RunSpell, seconds: float, cost: float
) -> tuple[float, float, LostTime]:
    """Continue at one interval until `until`, or a little longer if a save is being made."""
    first = max(0.0, seconds - since)
    whole = max(seconds, since)  # work that the first save holds
    if until >= spell.seconds:  # to the end of the spell
        return spell.seconds, 0.0, _last(spell.seconds - now, first, whole, seconds, cost, spell)
    if now + first >= until:
        return until, since + until - now, LostTime()
    if now + first + cost > spell.seconds:
        return spell.seconds, 0.0, _last(spell.seconds - now, first, whole, seconds, cost, spell)
    rounds = floor(max(0.0, until - now - first - cost) / (seconds + cost))
    end = now + first + cost + rounds * (seconds + cost)
    made = LostTime(saving=(rounds + 1) * cost, saves=rounds + 1)
    if end >= until:
        return end, 0.0, made
    rest = until - end
    if rest <= seconds:
        return until, rest, made
    if end + seconds + cost > spell.seconds:  # the next save is torn by the failure
        torn = spell.seconds - end - seconds
        lost = seconds if spell.failed else 0.0
        return spell.seconds, 0.0, made + LostTime(torn, lost)
    return end + seconds + cost, 0.0, made + LostTime(saving=cost, saves=1)


def _last(
    left: float, first: float, whole: float, seconds: float, cost: float, spell: RunSpell
) -> LostTime:
    """To the end of the spell. first: work until the next save, which then holds `whole`."""
    if left < first + cost:
        torn = max(0.0, left - first)
        return LostTime(torn, whole - first + min(left, first) if spell.failed else 0.0)
    spent, lost, made = _whole_intervals(left - first - cost, seconds, cost)
    return LostTime(cost + spent, lost if spell.failed else 0.0, saves=1 + made)


# --- several tiers ------------------------------------------------------------------------------
def lost_by_two_tiers(
    spells: Iterable[RunSpell],
    seconds: float,
    every: int,
    costs: tuple[float, float],
    recovery: float,
) -> LostTime:
    """Two tiers: the lower is saved every `seconds`, each `every`-th time the upper as well. A
    failure of level 0 goes back to the newest save, one of level 1 to the newest of the upper."""
    study = _TwoTiers(seconds, every, costs)
    lost, has_failed = LostTime(), False
    for spell in spells:
        start = min(recovery, spell.seconds) if has_failed else 0.0
        study.begin(start)
        run_process(study, end=spell.seconds)
        redone = study.fail(spell.level) if spell.failed else 0.0
        lost += LostTime(redone=redone, recovering=start, running=spell.seconds)
        has_failed = spell.failed
    return lost + LostTime(saving=study.saving_s)


@dataclass
class _TwoTiers(Process[None]):
    """Work and saves of one spell at a time. Its clock counts seconds of the spell."""

    interval_s: float
    every: int  # saves into the lower tier for each one into the upper
    costs: tuple[float, float]  # seconds of a save, by tier
    now: float = 0.0
    saving_s: float = 0.0
    _until: float = 0.0  # end of the work or save that is under way
    _is_saving: bool = False
    _unsaved_s: float = 0.0  # work since the last save
    _lower_s: float = 0.0  # work that the lower tier alone holds
    _turn: int = 0

    def begin(self, start: float) -> None:
        self.now, self._until = start, start + self.interval_s
        self._is_saving, self._unsaved_s = False, 0.0

    def next_change(self, end: float) -> float:
        return min(end, self._until)

    def elapse(self, until: float) -> bool:
        if self._is_saving:
            self.saving_s += until - self.now
        else:
            self._unsaved_s += until - self.now
        self.now = until
        return False

    def act(self) -> None:
        if self.now < self._until:
            return  # the spell ends
        is_upper = self._turn + 1 == self.every
        if self._is_saving:
            self._lower_s = 0.0 if is_upper else self._lower_s + self._unsaved_s
            self._turn, self._unsaved_s = 0 if is_upper else self._turn + 1, 0.0
        self._is_saving = not self._is_saving
        pause_s = self.costs[0] + (self.costs[1] if is_upper else 0.0)
        self._until += pause_s if self._is_saving else self.interval_s

    def fail(self, level: int) -> float:
        """Return the seconds of work that a failure of this level takes back."""
        lost_s = self._unsaved_s + (self._lower_s if level else 0.0)
        if level:
            self._turn, self._lower_s = 0, 0.0
        return lost_s


def poisson(seed: int, *, mtbf: float, failures: int, nodes: int = 4) -> Trace:
    """A fleet of `nodes` that loses one of them every `mtbf` seconds at random, and has it back at
    once: what the formulas assume."""
    draw = random.Random(f"{seed}/poisson")
    changes = [NodeChange(0.0, "join", f"n{number}.0") for number in range(nodes)]
    at, stays = 0.0, [0] * nodes
    for _ in range(failures):
        at += draw.expovariate(1 / mtbf)
        number = draw.randrange(nodes)
        changes.append(NodeChange(at, "go", f"n{number}.{stays[number]}"))
        stays[number] += 1
        changes.append(NodeChange(at, "join", f"n{number}.{stays[number]}"))
    return Trace(
        f"synthetic Poisson failures, seed {seed}", "poisson", sort_changes(changes), at, 0.0
    )
