"""Computes the interval between saves into one tier that loses the least time, with its reason.

A save costs C seconds, a failure throws away the work since the last one, and failures come at the
rate r. To first order the lost share of time is C / t + r t / 2. It is least at t = sqrt(2 C / r)
(Young, CACM 17(9), 1974). If C is not small against 1 / r, the higher-order terms count: Daly's
perturbation solution (Future Generation Computer Systems 22(3), 2006). `tier_choice.py` decides
several tiers together.

t counts from the end of a save to the beginning of the next. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import expm1, inf, sqrt
from statistics import median

from holdfast.policy.saving.failure_rate import format_duration

MIN_INTERVAL_CHANGE_SHARE = 0.1
"""A decision stands until the best interval has moved by this share. An interval that is off by 10
% costs half a per cent of the lost time, and the journal is not flooded."""

# saves over which a cost is taken: the median of so few follows a disk that fills up
_COST_WINDOW_SAVES = 9
_USUAL_STEP_WINDOW = 15  # ordinary steps over which the usual step is taken
MIN_SAVE_COST_S = 1e-4
"""Seconds that a save costs at least: a snapshot of a few tensors and its announcement."""


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
    """Return the share of the time that a tier loses, to first order; see `tier_choice.py`.

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
    """Save into `tier` every `seconds`; `inf`: never on its own account. explain: writes the
    reason. Most decisions repeat the one in force, so few reasons are read."""

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


def reason_of_tier(
    cost: TierCost,
    rate: float,
    bounds: IntervalBounds,
    seconds: float,
    evidence: Callable[[], str] | None,
) -> str:
    """One sentence with the numbers of an interval of `seconds_between`."""
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
    expected += f" ({evidence()})" if evidence else ""
    if limit:
        best = format_duration(daly_interval(spent, rate))
        expected += f"; the best interval would be {best}, but {limit}"
    return (
        f"tier {cost.tier} is saved every {format_duration(seconds)}: a save costs "
        f"{format_duration(spent)} and {expected}{lose}"
    )


@dataclass(frozen=True)
class SaveCost:
    """Cost of a save for training, measured from the outside. It is the extra time of the step with
    the save and of the step after it, compared with usual steps. It is never less than the stall.
    Begin with SaveCost(prior)."""

    prior: float = 0.2  # seconds that are assumed before a save was seen
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
