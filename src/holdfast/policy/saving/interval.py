"""Computes the interval between saves that loses the least time, per tier, with its reason.

One tier. A save costs C seconds, a failure throws away the work since the last one, and failures
come at the rate r. To first order the lost share of time is C / t + r t / 2. It is least at t =
sqrt(2 C / r) (Young, CACM 17(9), 1974). If C is not small against 1 / r, the higher-order terms
count: Daly's perturbation solution (Future Generation Computer Systems 22(3), 2006).

Several tiers. Tier k survives the failures of class k and below, and a save in it is a save in all
lower ones. Let r_k be the rate of the failures that need tier k and no higher one. Then the lost
share is the sum over k of C_k / t_k + r_k t_k / 2. So each tier has its own optimum t_k = sqrt(2
C_k / r_k), and all tiers together lose the sum of sqrt(2 C_k r_k). (Benoit, Cavelan, Le Fevre,
Robert and Sun, IEEE Transactions on Computers 66(7), 2017.) A tier that is left out hands its
failures to the next one above. The paper finds the tiers worth having by a dynamic program; this
module tries all subsets, of at most eight tiers. A tier whose interval the run file fixes is in all
of them.

t counts from the end of a save to the beginning of the next. The time until a save is durable does
not change the optimum: every failure loses that much more for any t. But no tier is asked to save
again before its last save is durable. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import expm1, inf, sqrt
from statistics import median

from holdfast.policy.saving.failure_rate import duration

KEEP = 0.1
"""A decision stands until the best interval has moved by this share. An interval that is off by 10
% costs half a per cent of the lost time, and the journal is not flooded."""
STAY = 0.02
"""Share of the lost time that another choice of tiers must spare before it is taken."""

_SAVES = 9  # saves over which a cost is taken: the median of so few follows a disk that fills up
_STEPS = 15  # ordinary steps over which the usual step is taken
LEAST_COST = 1e-4
"""Seconds that a save costs at least: a snapshot of a few tensors and its announcement."""


def young(cost: float, rate: float) -> float:
    """Seconds between saves, to first order."""
    return sqrt(2 * cost / rate) if rate > 0 else inf


def daly(cost: float, rate: float) -> float:
    """Return the seconds between saves, for any cost; `inf` if nothing ever fails."""
    if rate <= 0:
        return inf
    ratio = cost * rate / 2
    if ratio >= 1:
        return 1 / rate
    return young(cost, rate) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost


def lost(seconds: float, cost: float, rate: float) -> float:
    """Return the share of the useful time that is lost, with failures at random. This is Daly's
    complete cost function (2006) without the restart, which no interval changes."""
    if rate <= 0:
        return cost / seconds
    return expm1(min(rate * (seconds + cost), 500.0)) / (rate * seconds) - 1


@dataclass(frozen=True)
class Bounds:
    """The bounds of the run file, in seconds."""

    least: float
    most: float

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most:
            raise ValueError(f"bounds of an interval: 0 < {self.least:g} <= {self.most:g} is wrong")


@dataclass(frozen=True)
class TierCost:
    """The cost of a save into a tier for training, and the time until it is durable."""

    tier: int
    seconds: float
    durable: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Save into `tier` every `seconds`; `inf`: never on its own account."""

    tier: int
    seconds: float
    reason: str


def seconds_between(
    cost: TierCost, rate: float, bounds: Bounds, kept: float | None = None
) -> tuple[float, str]:
    """Return the interval, and the name of the limit that it came up against, if any. kept: the
    interval in force; it stays as long as it is as good."""
    seconds, limit = daly(max(cost.seconds, LEAST_COST), rate), ""
    if cost.durable > seconds:
        seconds, limit = cost.durable, f"a save is durable after {duration(cost.durable)} only"
    if seconds < bounds.least:
        seconds, limit = bounds.least, f"checkpoint.min_seconds={bounds.least:g}"
    elif seconds > bounds.most:
        seconds, limit = bounds.most, f"checkpoint.max_seconds={bounds.most:g}"
    if kept is not None and abs(seconds - kept) <= KEEP * kept:
        return kept, limit
    return seconds, limit


def decide(
    cost: TierCost, rate: float, bounds: Bounds, *, evidence: str = "", kept: Decision | None = None
) -> Decision:
    """The interval of one tier. kept: what holds so far; it is returned as long as it is as good.

    rate: failures a second that need this tier. evidence: where the rate comes from.
    """
    seconds, limit = seconds_between(cost, rate, bounds, None if kept is None else kept.seconds)
    if kept is not None and seconds == kept.seconds:
        return kept
    spent = max(cost.seconds, LEAST_COST)
    if rate > 0:
        expected = f"one failure is expected in {duration(1 / rate)}"
        lose = f"; {lost(seconds, spent, rate):.2%} of the time is then lost"
    else:
        expected, lose = "no failure is expected", ""
    best = f"; the best interval would be {duration(daly(spent, rate))}, but {limit}"
    return Decision(
        cost.tier, seconds,
        f"tier {cost.tier} is saved every {duration(seconds)}: a save costs {duration(spent)} and "
        f"{expected}{f' ({evidence})' if evidence else ''}{best if limit else ''}{lose}",
    )  # fmt: skip


def decide_tiers(
    costs: Sequence[TierCost],
    rates: Mapping[int, float],
    bounds: Bounds | Mapping[int, Bounds],
    *,
    evidence: str = "",
    kept: Mapping[int, Decision] | None = None,
    fixed: Mapping[int, float] | None = None,
    needed: Collection[int] = (),
) -> tuple[Decision, ...]:
    """One decision a tier, lowest tier first; one that is not worth having has `inf`.

    rates: by tier, failures a second that this tier survives and no lower one; the highest tier
    has to survive all. A higher tier's interval is a multiple of the next lower one's. evidence:
    where the rates come from. kept: what holds so far; each stands as long as it is as good.
    fixed: seconds of the tiers that the run file decides (0 where they are not known yet): there
    is no decision of these. needed: tiers that a higher one is fed from: never left out.
    """
    ordered = sorted(costs, key=lambda cost: cost.tier)
    fixed, kept = fixed or {}, kept or {}
    if not ordered or len({c.tier for c in ordered}) < len(ordered):
        raise ValueError("each tier has one cost, and there is at least one tier")
    if any(tier > ordered[-1].tier and rate > 0 for tier, rate in rates.items()):
        raise ValueError(f"failures are given that tier {ordered[-1].tier} does not survive")
    chosen = _worth_having(ordered, rates, {*fixed, *needed}, fixed, kept)
    handed = _handed_up(chosen, rates)
    used: dict[int, Decision] = {}
    below: tuple[int, float] | None = None
    for cost in chosen:
        if cost.tier in fixed:
            below = cost.tier, fixed[cost.tier]
            continue
        limits = bounds if isinstance(bounds, Bounds) else bounds[cost.tier]
        made = decide(cost, handed[cost.tier], limits, evidence=evidence)
        if below is not None and 0 < below[1] < inf and made.seconds < inf:
            times = max(1, round(made.seconds / below[1]))
            reason = f"{made.reason}; that is with every {_nth(times)} save of tier {below[0]}"
            made = replace(made, seconds=times * below[1], reason=reason)
        used[cost.tier] = made
        below = cost.tier, made.seconds
    out = (
        used.get(cost.tier) or _left_out(cost, ordered, chosen)
        for cost in ordered if cost.tier not in fixed
    )  # fmt: skip
    return tuple(_unless_as_good(kept.get(made.tier), made) for made in out)


def _unless_as_good(kept: Decision | None, made: Decision) -> Decision:
    """Return the present interval if it is as good as the new one."""
    if kept is None or (kept.seconds == inf) != (made.seconds == inf):
        return made
    same = made.seconds == inf or abs(made.seconds - kept.seconds) <= KEEP * kept.seconds
    return kept if same else made


def _left_out(cost: TierCost, ordered: Sequence[TierCost], used: Sequence[TierCost]) -> Decision:
    above = next(c.tier for c in ordered if c.tier > cost.tier and c in used)
    return Decision(
        cost.tier, inf,
        f"tier {cost.tier} is not saved into for itself: its saves ({duration(cost.seconds)}) cost "
        f"more than they spare beside those of tier {above}",
    )  # fmt: skip


def _handed_up(chosen: Sequence[TierCost], rates: Mapping[int, float]) -> dict[int, float]:
    """The rate that each chosen tier has to deal with: that of all classes up to its own."""
    handed: dict[int, float] = {}
    floor = -1
    for cost in chosen:
        handed[cost.tier] = sum(r for tier, r in rates.items() if floor < tier <= cost.tier)
        floor = cost.tier
    return handed


def _worth_having(
    ordered: Sequence[TierCost], rates: Mapping[int, float], given: Collection[int],
    fixed: Mapping[int, float], kept: Mapping[int, Decision],
) -> list[TierCost]:  # fmt: skip
    """Return the subset that loses least, with the highest tier and those given; of equals the
    smallest. The one in force stays as long as it loses little more, so the choice does not
    alternate."""
    *lower, top = ordered
    free = [cost for cost in lower if cost.tier not in given]
    always = [cost for cost in lower if cost.tier in given] + [top]
    subsets = [
        sorted([*picked, *always], key=lambda cost: cost.tier)
        for size in range(len(free) + 1) for picked in combinations(free, size)
    ]  # fmt: skip

    def loss(subset: list[TierCost]) -> float:
        handed = _handed_up(subset, rates)
        return sum(
            sqrt(2 * max(c.seconds, LEAST_COST) * handed[c.tier])
            for c in subset if c.tier not in fixed
        )  # fmt: skip

    best = min(subsets, key=loss)
    in_force = {tier for tier, decision in kept.items() if decision.seconds < inf}
    now = next((s for s in subsets if {c.tier for c in s} - set(fixed) == in_force), best)
    return now if kept and loss(now) <= (1 + STAY) * loss(best) else best


def _nth(number: int) -> str:
    if number == 1:
        return "single"
    endings = {1: "st", 2: "nd", 3: "rd"}
    ending = "th" if number % 100 in (11, 12, 13) else endings.get(number % 10, "th")
    return f"{number}{ending}"


@dataclass(frozen=True)
class SaveCost:
    """Cost of a save for training, measured from the outside. It is the extra time of the step with
    the save and of the step after it, compared with usual steps. It is never less than the stall.

    prior: seconds that are assumed before a save was seen. Begin with SaveCost(prior).
    """

    prior: float = 0.2
    usual: tuple[float, ...] = ()
    excesses: tuple[float, ...] = ()
    blocked: tuple[float, ...] = ()
    pending: float | None = None

    @property
    def standing(self) -> float:
        """Seconds that training stalled for a save, in the mean."""
        return sum(self.blocked) / len(self.blocked) if self.blocked else 0.0

    @property
    def seconds(self) -> float:
        return self.beside(0.0)

    def beside(self, standing: float) -> float:
        """Return the cost of a save into this tier in addition to one that stalls training for
        `standing` seconds anyway."""
        if not self.blocked:
            return self.prior
        interfered = median(self.excesses) if self.excesses else 0.0
        return max(self.standing - standing, interfered, LEAST_COST)

    def interrupted(self) -> SaveCost:
        """A save into another tier has begun: what was still open of the last one is closed."""
        if self.pending is None:
            return self
        return replace(self, excesses=(*self.excesses, self.pending)[-_SAVES:], pending=None)

    def after(self, step: float, blocked: float | None = None) -> SaveCost:
        """Take a step of `step` seconds. blocked: seconds that training stalled in it for a save;
        None: nothing was saved in it."""
        typical = median(self.usual) if self.usual else None
        now = self
        if self.pending is not None and typical is not None:
            follows = step - typical if blocked is None else 0.0
            found = (*self.excesses, self.pending + follows)[-_SAVES:]
            now = replace(now, excesses=found, pending=None)
        elif blocked is None:
            now = replace(now, usual=(*self.usual, step)[-_STEPS:], pending=None)
        if blocked is not None:
            late = None if typical is None else step - typical
            now = replace(now, blocked=(*self.blocked, blocked)[-_SAVES:], pending=late)
        return now
