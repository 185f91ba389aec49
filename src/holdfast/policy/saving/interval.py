"""Computes the interval between saves that loses the least time, per tier, with its reason.

One tier. A save costs C seconds, a failure throws away the work since the last one, and failures
come at the rate r. To first order the lost share of time is C / t + r t / 2. It is least at t =
sqrt(2 C / r) (Young, CACM 17(9), 1974). If C is not small against 1 / r, the higher-order terms
count: Daly's perturbation solution (Future Generation Computer Systems 22(3), 2006).

Several tiers. Tier k survives the failures of class k and below, and a save in it is a save in all
lower ones. Let r_k be the rate of the failures that need tier k and no higher one. A save into
tier k is durable after D_k seconds, and a restore from it takes L_k seconds. Then the lost share is

    sum over k of C_k / t_k + r_k (t_k / 2 + D_k + L_k)

The terms are the saves, the work since the last save, the work while that save was not durable,
and the restore. (Moody, Bronevetsky, Mohror and de Supinski, SC 2010; Di, Bouguerra,
Bautista-Gomez and Cappello, IPDPS 2014. Both count a restart cost for each level.) D_k and L_k do
not depend on t_k. So each tier has its own optimum t_k = sqrt(2 C_k / r_k). (Benoit, Cavelan,
Le Fevre, Robert and Sun, IEEE Transactions on Computers 66(7), 2017.) But no tier is asked to save
again before its last save is durable.

D_k and L_k decide which tiers are worth having. A tier that is left out hands its failures to the
next one above. Each of them then waits for the higher tier's D and L. The paper finds the tiers
by a dynamic program; this module tries all subsets, of at most eight tiers. A tier whose interval
the run file fixes is in all of them.

t counts from the end of a save to the beginning of the next. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from math import expm1, inf, sqrt
from operator import attrgetter
from statistics import median

from holdfast.policy.saving.failure_rate import format_duration

MIN_INTERVAL_CHANGE_SHARE = 0.1
"""A decision stands until the best interval has moved by this share. An interval that is off by 10
% costs half a per cent of the lost time, and the journal is not flooded."""
MIN_TIER_SET_GAIN_SHARE = 0.02
"""Share of the lost time that another choice of tiers must spare before it is taken."""

# saves over which a cost is taken: the median of so few follows a disk that fills up
_COST_WINDOW_SAVES = 9
_USUAL_STEP_WINDOW = 15  # ordinary steps over which the usual step is taken
MIN_SAVE_COST_S = 1e-4
"""Seconds that a save costs at least: a snapshot of a few tensors and its announcement."""


_TIER = attrgetter("tier")


def young_interval(cost: float, rate: float) -> float:
    """Seconds between saves, to first order."""
    return sqrt(2 * cost / rate) if rate > 0 else inf


def daly_interval(cost: float, rate: float) -> float:
    """Return the seconds between saves, for any cost; `inf` if nothing ever fails."""
    if rate <= 0:
        return inf
    ratio = cost * rate / 2
    if ratio >= 1:
        return 1 / rate
    return young_interval(cost, rate) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost


def lost_time_share(seconds: float, cost: float, rate: float) -> float:
    """Return the share of the useful time that is lost, with failures at random. This is Daly's
    complete cost function (2006) without the restart, which no interval changes."""
    if rate <= 0:
        return cost / seconds
    return expm1(min(rate * (seconds + cost), 500.0)) / (rate * seconds) - 1


@dataclass(frozen=True)
class IntervalBounds:
    """The bounds of the run file, in seconds."""

    min_seconds: float
    max_seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.min_seconds <= self.max_seconds:
            raise ValueError(
                f"bounds of an interval: 0 < {self.min_seconds:g} <= {self.max_seconds:g} is wrong"
            )


@dataclass(frozen=True)
class TierCost:
    """The cost of a save into a tier for training, the time until it is durable, and the time of a
    restore from it."""

    tier: int
    cost_s: float
    durable_after_s: float = 0.0
    restore_s: float = 0.0


def expected_waste(
    cost: TierCost, rate: float, bounds: IntervalBounds, fixed_s: float | None = None
) -> float:
    """Return the share of the time that a tier loses, to first order; see the module.

    rate: failures a second that are restored from this tier. fixed_s: seconds between its saves if
    the run file fixes them, 0 if they are not known; None: Young's interval within the bounds.
    """
    waits = rate * (cost.durable_after_s + cost.restore_s)
    if fixed_s is not None:
        # Saves of a fixed tier cost the same in every choice.
        return waits + rate * fixed_s / 2
    spent = max(cost.cost_s, MIN_SAVE_COST_S)
    seconds = _bounded(young_interval(spent, rate), cost, bounds)
    return spent / seconds + rate * seconds / 2 + waits


def _bounded(seconds: float, cost: TierCost, bounds: IntervalBounds) -> float:
    """A save waits until the one before is durable; the bounds come first."""
    if seconds < cost.durable_after_s:
        seconds = cost.durable_after_s
    if seconds < bounds.min_seconds:
        return bounds.min_seconds
    return min(seconds, bounds.max_seconds)


@dataclass(frozen=True, slots=True)
class IntervalDecision:
    """Save into `tier` every `seconds`; `inf`: never on its own account.

    explain: writes the reason. Most decisions repeat the one in force, so few reasons are read.
    """

    tier: int
    seconds: float
    explain: Callable[[], str] = field(repr=False, compare=False)

    @property
    def reason(self) -> str:
        """One sentence with the numbers of the decision."""
        return self.explain()


def seconds_between(
    cost: TierCost, rate: float, bounds: IntervalBounds, current: float | None = None
) -> float:
    """Return the interval. current: the interval in force; it stays as long as it is as good."""
    seconds = _bounded(daly_interval(max(cost.cost_s, MIN_SAVE_COST_S), rate), cost, bounds)
    if current is not None and abs(seconds - current) <= MIN_INTERVAL_CHANGE_SHARE * current:
        return current
    return seconds


def _name_limit(cost: TierCost, rate: float, bounds: IntervalBounds) -> str:
    """Name the limit that holds the interval of `seconds_between`; empty if none does."""
    best = daly_interval(max(cost.cost_s, MIN_SAVE_COST_S), rate)
    seconds = max(best, cost.durable_after_s)
    if seconds < bounds.min_seconds:
        return f"checkpoint.min_seconds={bounds.min_seconds:g}"
    if seconds > bounds.max_seconds:
        return f"checkpoint.max_seconds={bounds.max_seconds:g}"
    if seconds > best:
        return f"a save is durable after {format_duration(cost.durable_after_s)} only"
    return ""


def decide_tier(
    cost: TierCost,
    rate: float,
    bounds: IntervalBounds,
    *,
    evidence: Callable[[], str] | None = None,
    current: IntervalDecision | None = None,
) -> IntervalDecision:
    """The interval of one tier. current: what holds so far; it is returned as long as it is as
    good.

    rate: failures a second that need this tier. evidence: says where the rate comes from.
    """
    seconds = seconds_between(cost, rate, bounds, None if current is None else current.seconds)
    if current is not None and seconds == current.seconds:
        return current
    explain = partial(_reason_of_tier, cost, rate, bounds, seconds, evidence)
    return IntervalDecision(cost.tier, seconds, explain)


def _reason_of_tier(
    cost: TierCost,
    rate: float,
    bounds: IntervalBounds,
    seconds: float,
    evidence: Callable[[], str] | None,
) -> str:
    spent, limit = max(cost.cost_s, MIN_SAVE_COST_S), _name_limit(cost, rate, bounds)
    if rate > 0:
        expected = f"one failure is expected in {format_duration(1 / rate)}"
        waits = cost.durable_after_s + cost.restore_s
        share = lost_time_share(seconds, spent, rate) + rate * waits
        lose = f"; {share:.2%} of the time is then lost"
        if cost.restore_s:
            lose = f"; a restore takes {format_duration(cost.restore_s)}{lose}"
    else:
        expected, lose = "no failure is expected", ""
    best = (
        f"; the best interval would be {format_duration(daly_interval(spent, rate))}, but {limit}"
    )
    return (
        f"tier {cost.tier} is saved every {format_duration(seconds)}: a save costs "
        f"{format_duration(spent)} and "
        f"{expected}{f' ({evidence()})' if evidence else ''}{best if limit else ''}{lose}"
    )


def decide_tiers(
    costs: Sequence[TierCost],
    rates: Mapping[int, float],
    bounds: IntervalBounds | Mapping[int, IntervalBounds],
    *,
    evidence: Callable[[], str] | None = None,
    current: Mapping[int, IntervalDecision] | None = None,
    fixed_intervals: Mapping[int, float] | None = None,
    required: Collection[int] = (),
) -> tuple[IntervalDecision, ...]:
    """One decision a tier, lowest tier first; one that is not worth having has `inf`.

    rates: by tier, failures a second that this tier survives and no lower one; the highest tier
    has to survive all. A higher tier's interval is a multiple of the next lower one's. evidence:
    says where the rates come from. current: what holds so far; each stands while it is as good.
    fixed_intervals: seconds of the tiers that the run file decides (0 where they are not known
    yet): there is no decision of these. required: tiers that a higher one is fed from: never left
    out.
    """
    ordered = sorted(costs, key=_TIER)
    fixed_intervals, current = fixed_intervals or {}, current or {}
    if not ordered or len({c.tier for c in ordered}) < len(ordered):
        raise ValueError("each tier has one cost, and there is at least one tier")
    if any(tier > ordered[-1].tier and rate > 0 for tier, rate in rates.items()):
        raise ValueError(f"failures are given that tier {ordered[-1].tier} does not survive")
    limits = (
        {cost.tier: bounds for cost in ordered} if isinstance(bounds, IntervalBounds) else bounds
    )
    always = {*fixed_intervals, *required}
    chosen = _choose_tiers(ordered, rates, limits, always, fixed_intervals, current)
    handed = _accumulate_rates(chosen, rates)
    used: dict[int, IntervalDecision] = {}
    below: tuple[int, float] | None = None
    for cost in chosen:
        if cost.tier in fixed_intervals:
            below = cost.tier, fixed_intervals[cost.tier]
            continue
        made = decide_tier(cost, handed[cost.tier], limits[cost.tier], evidence=evidence)
        if below is not None and 0 < below[1] < inf and made.seconds < inf:
            times = max(1, round(made.seconds / below[1]))
            explain = partial(_reason_of_multiple, made.explain, times, below[0])
            made = IntervalDecision(cost.tier, times * below[1], explain)
        used[cost.tier] = made
        below = cost.tier, made.seconds
    out = []
    for cost in ordered:
        if cost.tier not in fixed_intervals:
            new = used.get(cost.tier) or _unused_tier_decision(cost, chosen)
            out.append(_keep_if_as_good(current.get(cost.tier), new))
    return tuple(out)


def _reason_of_multiple(explain: Callable[[], str], times: int, below: int) -> str:
    return f"{explain()}; that is with every {_ordinal(times)} save of tier {below}"


def _keep_if_as_good(current: IntervalDecision | None, made: IntervalDecision) -> IntervalDecision:
    """Return the present interval if it is as good as the new one."""
    if current is None or (current.seconds == inf) != (made.seconds == inf):
        return made
    same = (
        made.seconds == inf
        or abs(made.seconds - current.seconds) <= MIN_INTERVAL_CHANGE_SHARE * current.seconds
    )
    return current if same else made


def _unused_tier_decision(cost: TierCost, used: Sequence[TierCost]) -> IntervalDecision:
    above = next(c.tier for c in used if c.tier > cost.tier)
    return IntervalDecision(cost.tier, inf, partial(_reason_of_unused, cost, above))


def _reason_of_unused(cost: TierCost, above: int) -> str:
    return (
        f"tier {cost.tier} is not saved into for itself: its saves "
        f"({format_duration(cost.cost_s)}) cost "
        f"more than they spare beside those of tier {above}"
    )


def _accumulate_rates(chosen: Sequence[TierCost], rates: Mapping[int, float]) -> dict[int, float]:
    """The rate that each chosen tier has to deal with: that of all classes up to its own."""
    handed = {cost.tier: 0.0 for cost in chosen}
    for tier, rate in rates.items():
        for highest in handed:
            if tier <= highest:
                handed[highest] += rate
                break
    return handed


def _choose_tiers(
    ordered: Sequence[TierCost],
    rates: Mapping[int, float],
    limits: Mapping[int, IntervalBounds],
    required: Collection[int],
    fixed: Mapping[int, float],
    current: Mapping[int, IntervalDecision],
) -> list[TierCost]:
    """Return the subset that loses least, with the highest tier and those given; of equals the
    smallest. The one in force stays as long as it loses little more, so the choice does not
    alternate."""
    *lower, top = ordered
    free = [cost for cost in lower if cost.tier not in required]
    always = [cost for cost in lower if cost.tier in required] + [top]
    subsets = [
        sorted([*picked, *always], key=_TIER)
        for size in range(len(free) + 1)
        for picked in combinations(free, size)
    ]

    losses = [_loss_of(subset, rates, limits, fixed) for subset in subsets]
    least = min(losses)
    best = subsets[losses.index(least)]
    if not current:
        return best
    in_force = {tier for tier, decision in current.items() if decision.seconds < inf}
    for subset, loss in zip(subsets, losses, strict=True):
        if {cost.tier for cost in subset}.difference(fixed) == in_force:
            return subset if loss <= (1 + MIN_TIER_SET_GAIN_SHARE) * least else best
    return best


def _loss_of(
    subset: Sequence[TierCost],
    rates: Mapping[int, float],
    limits: Mapping[int, IntervalBounds],
    fixed: Mapping[int, float],
) -> float:
    handed, total = _accumulate_rates(subset, rates), 0.0
    for cost in subset:
        tier = cost.tier
        total += expected_waste(cost, handed[tier], limits[tier], fixed.get(tier))
    return total


def _ordinal(number: int) -> str:
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
    def mean_blocked_s(self) -> float:
        """Seconds that training stalled for a save, in the mean."""
        return sum(self.blocked) / len(self.blocked) if self.blocked else 0.0

    @property
    def cost_s(self) -> float:
        return self.marginal_cost_s(0.0)

    def marginal_cost_s(self, blocked_s: float) -> float:
        """Return the cost of a save into this tier in addition to one that stalls training for
        `blocked_s` seconds anyway."""
        if not self.blocked:
            return self.prior
        interfered = median(self.excesses) if self.excesses else 0.0
        return max(self.mean_blocked_s - blocked_s, interfered, MIN_SAVE_COST_S)

    def close_pending(self) -> SaveCost:
        """A save into another tier has begun: what was still open of the last one is closed."""
        if self.pending is None:
            return self
        return replace(
            self, excesses=(*self.excesses, self.pending)[-_COST_WINDOW_SAVES:], pending=None
        )

    def with_step(self, step: float, blocked: float | None = None) -> SaveCost:
        """Take a step of `step` seconds. blocked: seconds that training stalled in it for a save;
        None: nothing was saved in it."""
        typical = median(self.usual) if self.usual else None
        now = self
        if self.pending is not None and typical is not None:
            follows = step - typical if blocked is None else 0.0
            found = (*self.excesses, self.pending + follows)[-_COST_WINDOW_SAVES:]
            now = replace(now, excesses=found, pending=None)
        elif blocked is None:
            now = replace(now, usual=(*self.usual, step)[-_USUAL_STEP_WINDOW:], pending=None)
        if blocked is not None:
            late = None if typical is None else step - typical
            now = replace(now, blocked=(*self.blocked, blocked)[-_COST_WINDOW_SAVES:], pending=late)
        return now
