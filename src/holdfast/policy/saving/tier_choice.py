"""Decides which tiers a run saves into and how often, so that it loses the least time.

Tier k survives the failures of class k and below, and a save in it is a save in all lower ones. Let
r_k be the rate of the failures that need tier k and no higher one. A save into tier k is durable
after D_k seconds, and a restore from it takes L_k seconds. Then the lost share is

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

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import inf
from operator import attrgetter

from holdfast.policy.saving.failure_rate import format_duration
from holdfast.policy.saving.interval import (
    MIN_INTERVAL_CHANGE_SHARE,
    IntervalBounds,
    IntervalDecision,
    TierCost,
    expected_waste,
    reason_of_tier,
    seconds_between,
)

MIN_TIER_SET_GAIN_SHARE = 0.02
"""Share of the lost time that another choice of tiers must spare before it is taken."""

_TIER = attrgetter("tier")


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

    rates, evidence, current: as of `TierChoices.decide`. The rest: as of `TierChoices.among`.
    """
    choices = TierChoices.among(costs, bounds, fixed_intervals or {}, required)
    return choices.decide(rates, current or {}, evidence)


@dataclass(frozen=True, slots=True)
class _Subset:
    """Tiers that may be saved into together, lowest first."""

    costs: tuple[TierCost, ...]
    bounds: tuple[IntervalBounds, ...]
    fixed_s: tuple[float | None, ...]
    highest_of: tuple[int, ...]  # by class of failures: place of the tier that survives it
    decided: frozenset[int]  # tiers whose intervals are not fixed

    def handed(self, rates: Mapping[int, float]) -> list[float]:
        """The rate that each tier has to deal with: that of all classes up to its own."""
        out, places = [0.0] * len(self.costs), self.highest_of
        for tier, rate in rates.items():
            if rate > 0:
                out[places[tier]] += rate
        return out

    def waste(self, rates: Mapping[int, float]) -> float:
        """Share of the time that is lost with these tiers."""
        total = 0.0
        for values in zip(self.costs, self.handed(rates), self.bounds, self.fixed_s, strict=True):
            total += expected_waste(*values)
        return total


@dataclass(frozen=True, slots=True)
class TierChoices:
    """All choices of tiers of a run whose costs are known. Begin with `TierChoices.among`."""

    costs: tuple[TierCost, ...]
    subsets: tuple[_Subset, ...]

    @staticmethod
    def among(
        costs: Sequence[TierCost],
        bounds: IntervalBounds | Mapping[int, IntervalBounds],
        fixed_intervals: Mapping[int, float],
        required: Collection[int] = (),
    ) -> TierChoices:
        """
        Args:
            costs: Of each tier.
            bounds: Of the intervals: of all tiers, or by tier.
            fixed_intervals: Seconds of the tiers that the run file decides (0 where they are not
                known yet): there is no decision of these.
            required: Tiers that a higher one is fed from: never left out.

        Raises:
            ValueError: There is no cost, or two of one tier.
        """
        ordered = tuple(sorted(costs, key=_TIER))
        if not ordered or len({c.tier for c in ordered}) < len(ordered):
            raise ValueError("each tier has one cost, and there is at least one tier")
        limits = (
            dict.fromkeys((cost.tier for cost in ordered), bounds)
            if isinstance(bounds, IntervalBounds)
            else bounds
        )
        *lower, top = ordered
        free = [c for c in lower if c.tier not in required and c.tier not in fixed_intervals]
        always = [c for c in lower if c not in free] + [top]
        subsets = []
        for size in range(len(free) + 1):
            for picked in combinations(free, size):
                chosen = tuple(sorted([*picked, *always], key=_TIER))
                tiers = [cost.tier for cost in chosen]
                subsets.append(
                    _Subset(
                        chosen,
                        tuple(limits[tier] for tier in tiers),
                        tuple(fixed_intervals.get(tier) for tier in tiers),
                        tuple(sum(t < level for t in tiers) for level in range(top.tier + 1)),
                        frozenset(tiers).difference(fixed_intervals),
                    )
                )
        return TierChoices(ordered, tuple(subsets))

    def decide(
        self,
        rates: Mapping[int, float],
        current: Mapping[int, IntervalDecision],
        evidence: Callable[[], str] | None = None,
    ) -> tuple[IntervalDecision, ...]:
        """One decision for each tier whose interval is not fixed, lowest first; `inf`: it is not
        worth having. A higher tier's interval is a multiple of the next lower one's.

        Args:
            rates: By tier, failures a second that this tier survives and no lower one.
            current: What holds so far; each stands while it is as good.
            evidence: Says where the rates come from.

        Raises:
            ValueError: The highest tier does not survive all failures.
        """
        top = self.costs[-1].tier
        for tier, rate in rates.items():
            if tier > top and rate > 0:
                raise ValueError(f"failures are given that tier {top} does not survive")
        chosen = self._choose(rates, current)
        used: dict[int, IntervalDecision] = {}
        below, below_s = 0, 0.0
        for cost, rate, limits, fixed in zip(
            chosen.costs, chosen.handed(rates), chosen.bounds, chosen.fixed_s, strict=True
        ):
            tier = cost.tier
            if fixed is not None:
                below, below_s = tier, fixed
                continue
            best = seconds = seconds_between(cost, rate, limits)
            times = 0
            if 0 < below_s < inf and best < inf:
                times = round(best / below_s) or 1
                seconds = times * below_s
            made = current.get(tier)
            if made is None or not _is_as_good(made.seconds, seconds):
                explain = partial(reason_of_tier, cost, rate, limits, best, evidence)
                if times:
                    explain = partial(_reason_of_multiple, explain, times, below)
                made = IntervalDecision(tier, seconds, explain)
            used[tier] = made
            below, below_s = tier, seconds
        every = self.subsets[-1].decided
        return tuple(
            [
                used.get(cost.tier) or _unused(cost, chosen.costs, current.get(cost.tier))
                for cost in self.costs
                if cost.tier in every
            ]
        )

    def _choose(
        self, rates: Mapping[int, float], current: Mapping[int, IntervalDecision]
    ) -> _Subset:
        """Return the subset that loses least; of equals the smallest. The one in force stays as
        long as it loses little more, so the choice does not alternate."""
        wastes = [subset.waste(rates) for subset in self.subsets]
        least = min(wastes)
        best = self.subsets[wastes.index(least)]
        if not current:
            return best
        in_force = {tier for tier, made in current.items() if made.seconds < inf}
        if best.decided == in_force:
            return best
        for subset, waste in zip(self.subsets, wastes, strict=True):
            if subset.decided == in_force:
                return subset if waste <= (1 + MIN_TIER_SET_GAIN_SHARE) * least else best
        return best


def _reason_of_multiple(explain: Callable[[], str], times: int, below: int) -> str:
    return f"{explain()}; that is with every {_ordinal(times)} save of tier {below}"


def _is_as_good(seconds: float, best: float) -> bool:
    """Return True if an interval may stay."""
    if seconds == inf or best == inf:
        return seconds == best
    return abs(best - seconds) <= MIN_INTERVAL_CHANGE_SHARE * seconds


def _unused(
    cost: TierCost, used: Sequence[TierCost], current: IntervalDecision | None
) -> IntervalDecision:
    """A tier that is not worth having."""
    if current is not None and current.seconds == inf:
        return current
    above = next(c.tier for c in used if c.tier > cost.tier)

    def explain() -> str:
        saves = f"its saves ({format_duration(cost.cost_s)}) cost more than they spare"
        return f"tier {cost.tier} is not saved into for itself: {saves} with those of tier {above}"

    return IntervalDecision(cost.tier, inf, explain)


def _ordinal(number: int) -> str:
    if number == 1:
        return "single"
    endings = {1: "st", 2: "nd", 3: "rd"}
    ending = "th" if number % 100 in (11, 12, 13) else endings.get(number % 10, "th")
    return f"{number}{ending}"
