"""Holdfast's own policy, with caps on the nodes' clocks and idle nodes powered down. Pure.

`shifting.py` chooses a clock each hour, from the carbon intensity of now and of the last day. Its
work is always the day ahead, so that the end of the run need not be known. Time that the run does
not train, such as a recovery, uses up no slack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from holdfast.errors import ConfigError
from holdfast_lab.engine.clocks import NodePower, clocks
from holdfast_lab.engine.interfaces import (
    Change,
    CostModel,
    Decision,
    Policy,
    PolicyMaker,
    SavePlan,
    View,
)
from holdfast_lab.engine.shifting import Action, Moment, ShiftRules, decide

LONGEST = 1.09
"""Time that training may take, of that at full clock; below 1.1 as a day ahead is planned."""
AHEAD_S = 86_400.0
_HOME = "home"
Clock = Callable[[Moment, ShiftRules], float]


def full_clock(moment: Moment, rules: ShiftRules) -> float:
    return 1.0


def steady_clock(moment: Moment, rules: ShiftRules) -> float:
    """Return the lowest clock that is fast enough all the time, whatever the signal."""
    return next(each for each in clocks(True) if rules.power.rate(each) >= 1 / LONGEST)


def following_clock(moment: Moment, rules: ShiftRules) -> float:
    return decide(moment, rules).clock


@dataclass
class CappedPolicy:
    """Implements `PowerPolicy`. inner: decides all else."""

    name: str
    inner: Policy
    rules: ShiftRules
    choose: Clock
    is_idle_off: bool = True
    clock: float = 1.0
    _now: float = 0.0
    _elapsed_s: float = 0.0  # of training
    _done_s: float = 0.0  # the same work at full clock
    _past: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=24))
    _hour_at: float = 0.0  # when the next clock is chosen
    _inner_at: float = inf  # when the inner policy asked to be called

    def decide(self, view: View, change: Change) -> Decision:
        self._pass_time(view)
        if view.now >= self._hour_at:
            self._choose(view)
        is_review = not (change.lost or change.joined or change.noticed or change.slowed)
        if is_review and view.now < self._inner_at:
            wait = min(self._inner_at, self._hour_at) - view.now
            return Decision(review_s=wait)
        found = self.inner.decide(view, change)
        self._inner_at = view.now + found.review_s
        return Decision(found.transition, min(self._inner_at, self._hour_at) - view.now)

    def saves(self, view: View) -> SavePlan:
        self._pass_time(view)
        return self.inner.saves(view)

    def slowdown(self, view: View) -> float:
        return self.inner.slowdown(view) / self.rules.power.rate(self.clock)

    def watts(self, view: View) -> float:
        """Return the power of the nodes in use while they train under the cap."""
        point, power = view.point, self.rules.power
        if point is None:
            return 0.0
        waiting = point.nodes * power.waiting_w
        return waiting + max(0.0, point.watts - waiting) * self.clock**3

    def _pass_time(self, view: View) -> None:
        if view.point is not None and view.pause_left <= 0:
            self._elapsed_s += view.now - self._now
            self._done_s += (view.now - self._now) * self.rules.power.rate(self.clock)
        self._now = view.now

    def _choose(self, view: View) -> None:
        signal = {_HOME: max(view.intensity, 1e-9)}
        left_s = LONGEST * (self._done_s + AHEAD_S) - self._elapsed_s
        held = Action(_HOME, self.clock)
        moment = Moment(AHEAD_S, left_s, signal, [*self._past], held, _HOME)
        self.clock = self.choose(moment, self.rules)
        self._past.append(signal)
        self._hour_at = view.now + self.rules.decide_s


CLOCKS: Mapping[str, Clock] = {
    "powered-down": full_clock,
    "steady-cap": steady_clock,
    "carbon-cap": following_clock,
}
"""By the name of the policy."""


def capped(name: str, inner: PolicyMaker) -> PolicyMaker:
    """Return what makes the policy of this name around another one."""

    def make(cost: CostModel) -> Policy:
        costs = cost.costs
        if costs.busy_watts <= 0:
            raise ConfigError(
                f"the power of these devices is not known, and {name} needs it",
                where="--policy",
                remedy="use a device that holdfast plan knows, or another policy",
            )
        power = NodePower(0.0, min(costs.idle_watts, costs.busy_watts), costs.busy_watts)
        rules = ShiftRules(power, can_cap=True, powers_down=True)
        return CappedPolicy(name, inner(cost), rules, CLOCKS[name])

    return make
