"""The cheapest mix of spot and on-demand nodes that meets a deadline in most replays. Pure.

`holdfast_platform/clouds/mix.py` chooses from what one moment shows. This searches over plans that
are fixed beforehand. A plan has zones for spot nodes, a number of on-demand nodes, and the moment
at which on-demand nodes replace missing spot nodes. Each plan runs through the same replays, each
with another beginning in the recorded availability and prices. The answer is the cheapest plan that
ends in time in the wanted share of them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from statistics import fmean

from holdfast.errors import ConfigError
from holdfast_lab.engine.clock import Process, run_process
from holdfast_lab.traces.events import EventStream


@dataclass(frozen=True)
class ZoneOffer:
    """What a zone sells over the recorded time.

    counts: spot nodes that it has, at each tick. spot, on_demand: dollars an hour of a node, at
    each tick. region: zones of one region train together at full speed.
    """

    name: str
    region: str
    counts: Sequence[int]
    spot: Sequence[float]
    on_demand: Sequence[float]


@dataclass(frozen=True)
class Work:
    """What has to be done.

    node_hours: of one node at full speed. nodes: at most, at a time. deadline_h: hours from the
    begin. tick_h: hours between two decisions. change_h: hours that the run stands when its nodes
    change, and that a lost node costs with its lost work. move_usd: of a move to another region.
    """

    node_hours: float
    nodes: int
    deadline_h: float
    tick_h: float = 0.25
    change_h: float = 0.02
    move_usd: float = 0.0

    @property
    def fastest_h(self) -> float:
        """Hours on nodes that are always there."""
        return self.node_hours / self.nodes + self.change_h


@dataclass(frozen=True)
class MixPlan:
    """zones: whose spot nodes the run takes, in one region at a time. on_demand: nodes that it
    holds from the begin. slack_h: it fills up with on-demand nodes so many hours before the last
    moment. hold_h: hours for which it keeps them after that, and a region, before it changes again.
    At the last moment it takes on-demand nodes alone, whatever the plan: they still end in time."""

    zones: tuple[str, ...]
    on_demand: int
    slack_h: float
    hold_h: float

    @property
    def words(self) -> str:
        spot = f"spot of {', '.join(self.zones)}" if self.zones else "no spot"
        more = f" + {self.on_demand} on demand" if self.on_demand else ""
        late = f", {self.slack_h:g} h of slack, held {self.hold_h:g} h" if self.zones else ""
        return f"{spot}{more}{late}"


@dataclass(frozen=True)
class MixOutcome:
    """Of one replay. hours: until the work is done. moves: to another region."""

    hours: float
    usd: float
    in_time: bool
    changes: int = 0
    moves: int = 0
    spot_share: float = 0.0


@dataclass(frozen=True)
class MixResult:
    """Of one plan over all replays."""

    plan: MixPlan
    outcomes: tuple[MixOutcome, ...]

    @cached_property
    def in_time(self) -> float:
        return fmean(each.in_time for each in self.outcomes)

    @cached_property
    def usd(self) -> float:
        return fmean(each.usd for each in self.outcomes)

    @cached_property
    def hours(self) -> float:
        return fmean(each.hours for each in self.outcomes)


@dataclass
class _Replay(Process[int]):
    """One run from one beginning. Its clock counts hours; the news of a tick is its place in the
    record."""

    zones: Sequence[ZoneOffer]
    work: Work
    plan: MixPlan
    start: int
    now: float = 0.0
    left: float = 0.0
    usd: float = 0.0
    spot: int = 0
    demand: int = 0
    region: str = ""
    changes: int = 0
    moves: int = 0
    _held_until: float = 0.0
    _place: int = 0
    _lost: float = 0.0
    _filled: bool = False
    _is_last: bool = False
    _spot_hours: float = 0.0
    _hours: float = 0.0

    def run(self) -> MixOutcome:
        work, record = self.work, len(self.zones[0].counts)
        self.left = work.node_hours
        limit = ceil(4 * work.deadline_h / work.tick_h)
        ticks = ((tick * work.tick_h, (self.start + tick) % record) for tick in range(limit))
        run_process(self, ticks, limit * work.tick_h)
        in_time = self.left <= 1e-9 and self.now <= work.deadline_h + 1e-9
        share = self._spot_hours / self._hours if self._hours else 0.0
        return MixOutcome(self.now, self.usd, in_time, self.changes, self.moves, share)

    def take(self, place: int) -> None:
        self._place, self._lost = place, self._decide(self.now, place)

    def elapse(self, until: float) -> bool:
        """Return True if the work is done by then."""
        # Hours of the tick until the work is done, or all of it.
        work, nodes = self.work, self.spot + self.demand
        done = work.tick_h
        if nodes:
            needed = self._lost + self.left / nodes
            done = min(done, needed)
            self.left = max(0.0, self.left - nodes * max(0.0, done - self._lost))
        self.usd += done * self._price(self._place)
        self._hours += done * nodes
        self._spot_hours += done * self.spot
        is_done = done < self.work.tick_h or self.left <= 1e-9
        self.now = self.now + done if is_done else until
        return is_done

    def _offered(self, region: str, place: int) -> int:
        chosen = self.plan.zones
        return sum(
            zone.counts[place]
            for zone in self.zones
            if zone.region == region and zone.name in chosen
        )

    def _decide(self, at: float, place: int) -> float:
        """Take nodes for the next tick; return the hours that the change costs."""
        work, plan = self.work, self.plan
        before = self.spot, self.demand, self.region
        regions = list(dict.fromkeys(z.region for z in self.zones if z.name in plan.zones))
        if not regions:
            self.region, self.demand, self.spot = self.zones[0].region, work.nodes, 0
            return self._cost_of_change(before)
        last = self.left / work.nodes + 2 * work.change_h + work.tick_h
        if self._is_last or work.deadline_h - at <= last:
            self._is_last, self.region = True, self.region or regions[0]
            self.spot, self.demand = 0, work.nodes
            return self._cost_of_change(before)
        best = max(regions, key=lambda region: min(work.nodes, self._offered(region, place)))
        here = self._offered(self.region, place) if self.region else -1
        wants_more = self._offered(best, place) > here and here < work.nodes - self.demand
        if not self.region or (wants_more and at >= self._held_until):
            self.region = best
            self._held_until = at + plan.hold_h
        if work.deadline_h - at <= last + plan.slack_h:
            self._filled = True
            self._held_until = max(self._held_until, at + plan.hold_h)
        elif self._filled and at >= self._held_until:
            self._filled = False
        base = work.nodes if self._filled else plan.on_demand
        offered = min(self._offered(self.region, place), work.nodes)
        self.spot = min(offered, work.nodes - plan.on_demand)
        self.demand = min(max(plan.on_demand, base - self.spot), work.nodes)
        return self._cost_of_change(before)

    def _cost_of_change(self, before: tuple[int, int, str]) -> float:
        after = self.spot, self.demand, self.region
        if after == before or not self.spot + self.demand:
            return 0.0
        self.changes += 1
        if before[2] and before[2] != self.region:
            self.moves += 1
            self.usd += self.work.move_usd
        return self.work.change_h

    def _price(self, place: int) -> float:
        """Dollars an hour; spot nodes come from the cheapest zones first."""
        here = [zone for zone in self.zones if zone.region == self.region]
        total, left = 0.0, self.spot
        chosen = [zone for zone in here if zone.name in self.plan.zones]
        for zone in sorted(chosen, key=lambda zone: zone.spot[place]):
            taken = min(left, zone.counts[place])
            total += taken * zone.spot[place]
            left -= taken
        return total + self.demand * min(zone.on_demand[place] for zone in here)


def try_mix(
    zones: Sequence[ZoneOffer], work: Work, plan: MixPlan, starts: Sequence[int]
) -> MixResult:
    """The outcome of a plan from every beginning. starts: ticks; the record repeats after its
    end."""
    return MixResult(plan, tuple(_Replay(zones, work, plan, start).run() for start in starts))


def all_plans(zones: Sequence[ZoneOffer], work: Work, steps: int = 4) -> list[MixPlan]:
    """Every set of zones, with shares of on-demand nodes, slack and patience on a grid."""
    names = [zone.name for zone in zones]
    spare = max(0.0, work.deadline_h - work.fastest_h)
    shares = sorted({round(work.nodes * k / steps) for k in range(steps)})
    plans = [MixPlan((), work.nodes, 0.0, 0.0)]
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            for number, slack, hold in itertools.product(
                shares, (0.0, 0.1 * spare, 0.3 * spare, spare), (0.0, 1.0, 4.0)
            ):
                plans.append(MixPlan(chosen, number, slack, hold))
    return plans


@dataclass(frozen=True)
class MixSearch:
    """The best plan, that of on-demand nodes alone, and the best of each set of zones. in_time:
    share of replays that the best one was asked for; None: no plan reaches it."""

    best: MixResult | None
    on_demand: MixResult
    by_zones: tuple[MixResult, ...]
    tried: int


def search_mix(
    zones: Sequence[ZoneOffer],
    work: Work,
    starts: Sequence[int],
    in_time: float = 0.95,
    plans: Sequence[MixPlan] | None = None,
) -> MixSearch:
    """Replay all plans. Few replays sort out most of them first."""
    if work.fastest_h > work.deadline_h:
        raise ConfigError(
            f"{work.nodes} nodes that are always there need {work.fastest_h:.2f} h",
            where="--deadline",
            remedy=f"give {work.fastest_h + work.tick_h:.1f} hours or more",
        )
    plans = plans or all_plans(zones, work)
    few = starts[:: max(1, len(starts) // 20)]
    alone = try_mix(zones, work, next(p for p in plans if not p.zones), starts)
    found: list[MixResult] = [alone]
    by_zones: dict[tuple[str, ...], list[MixResult]] = {}
    for plan in plans:
        if not plan.zones:
            continue
        first = try_mix(zones, work, plan, few)
        if first.in_time >= in_time - 0.1 and first.usd <= 1.1 * alone.usd:
            by_zones.setdefault(plan.zones, []).append(first)
    best_of = []
    for candidates in by_zones.values():
        candidates.sort(key=lambda result: result.usd)
        for candidate in candidates[:8]:
            complete = try_mix(zones, work, candidate.plan, starts)
            if complete.in_time >= in_time:
                found.append(complete)
                best_of.append(complete)
                break
    good = [result for result in found if result.in_time >= in_time]
    best = min(good, key=lambda result: result.usd, default=None)
    return MixSearch(best, alone, tuple(best_of), len(plans))


# --- from traces --------------------------------------------------------------------------------
def node_counts(stream: EventStream, tick_h: float, ticks: int) -> list[int]:
    """Nodes that are there at each tick."""
    changes: list[tuple[float, float]] = [(0.0, 0.0)]
    number = 0
    for event in stream.events:
        if event.kind in ("join", "recover"):
            number += 1
        elif event.kind in ("preempt", "fail"):
            number -= 1
        else:
            continue
        changes.append((event.t_s, number))
    return [int(count) for count in _sampled(changes, tick_h, ticks)]


def prices_of(
    stream: EventStream, zone: str, gpu: str, tick_h: float, ticks: int, from_s: float = 0.0
) -> tuple[list[float], list[float]]:
    """(spot, on-demand) dollars an hour of a node at each tick, of a machine type in a zone.

    from_s: seconds of the price file at which the first tick is.

    Raises ConfigError if the file has no price of it.
    """
    events = [
        event
        for event in stream.events
        if event.kind == "price" and event.zone == zone and event.gpu == gpu
    ]
    if not events:
        known = sorted({e.zone for e in stream.events if e.kind == "price" and e.gpu == gpu})
        raise ConfigError(
            f"there is no price of {gpu!r} in {zone!r}",
            where=stream.header.source,
            remedy=f"use a zone of {', '.join(known) or 'another machine type'}",
        )
    spot = [(event.t_s - from_s, event.value) for event in events]
    demand = [
        (event.t_s - from_s, float(event.extra["on_demand"]))
        for event in events
        if "on_demand" in event.extra
    ]
    return _sampled(spot, tick_h, ticks), _sampled(demand or spot, tick_h, ticks)


def _sampled(changes: Sequence[tuple[float, float]], tick_h: float, ticks: int) -> list[float]:
    """The value at each tick; the first one holds before its time."""
    times = [at for at, _ in changes]
    values = [value for _, value in changes]
    out = []
    for tick in range(ticks):
        place = bisect_right(times, tick * tick_h * 3600 + 1e-6)
        out.append(values[max(0, place - 1)])
    return out
