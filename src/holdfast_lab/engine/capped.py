"""Holdfast's own policy, with caps on the nodes' clocks, pauses, and idle nodes powered down. Pure.

`shifting.py` chooses a clock or a pause each hour, from the carbon intensity of now and of the last
day. Its work is always the day ahead, so that the end of the run need not be known. Time that the
run does not train, such as a recovery, uses up no slack; a pause does. Before a pause the run saves
into its run store, and after it a run begins from there, on nodes that were powered down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from holdfast.errors import ConfigError
from holdfast_lab.engine.clocks import NodePower, clocks
from holdfast_lab.engine.interfaces import (
    NOTHING,
    Change,
    CostModel,
    Costs,
    Decision,
    Policy,
    PolicyMaker,
    SavePlan,
    Transition,
    View,
)
from holdfast_lab.engine.shifting import PAUSED, Action, Moment, ShiftRules, decide

STRETCH = 1.09
"""Time that training may take, of that at full clock; below 1.1 as a day ahead is planned."""
AHEAD_S = 86_400.0
_HOME = "home"
_FULL = Action(_HOME, 1.0)
Choose = Callable[[Moment, ShiftRules, float], Action]


def full_clock(moment: Moment, rules: ShiftRules, stretch: float) -> Action:
    return _FULL


def steady_clock(moment: Moment, rules: ShiftRules, stretch: float) -> Action:
    """Return the lowest clock that is fast enough all the time, whatever the signal."""
    fast = (each for each in clocks(True) if rules.power.rate(each) >= 1 / stretch)
    return Action(_HOME, next(fast))


def by_carbon(moment: Moment, rules: ShiftRules, stretch: float) -> Action:
    return decide(moment, rules)


@dataclass
class CappedPolicy:
    """Implements `PowerPolicy`. inner: decides all else."""

    name: str
    inner: Policy
    costs: Costs
    rules: ShiftRules
    choose: Choose
    stretch: float = STRETCH  # time that training may take, of that at full clock
    is_idle_off: bool = True
    action: Action = _FULL
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
        if self.action == PAUSED and not change.lost:
            return self._pause(view)
        is_review = not (change.lost or change.joined or change.noticed or change.slowed)
        if is_review and view.point is not None and view.now < self._inner_at:
            return Decision(review_s=min(self._inner_at, self._hour_at) - view.now)
        found = self.inner.decide(view, change)
        self._inner_at = view.now + found.review_s
        return Decision(found.transition, min(self._inner_at, self._hour_at) - view.now)

    def saves(self, view: View) -> SavePlan:
        self._pass_time(view)
        return self.inner.saves(view)

    def slowdown(self, view: View) -> float:
        return self.inner.slowdown(view) / self.rules.power.rate(self.action.clock or 1.0)

    def watts(self, view: View) -> float:
        """Return the power of the nodes in use while they train under the cap."""
        point, power = view.point, self.rules.power
        if point is None:
            return 0.0
        waiting = point.nodes * power.waiting_w
        return waiting + max(0.0, point.watts - waiting) * self.action.clock**3

    def _pause(self, view: View) -> Decision:
        """Save and stop, once; then wait for the next hour."""
        wait_s = self._hour_at - view.now
        if view.point is None or view.pause_left > 0:
            return Decision(review_s=min(wait_s, view.pause_left or inf))
        saving = ("checkpoint", self.costs.store_s(view.point.nodes))
        return Decision(Transition(None, (saving,), NOTHING, reason="pause"), wait_s)

    def _pass_time(self, view: View) -> None:
        passed_s, rate = view.now - self._now, self.rules.power.rate
        if self.action == PAUSED:
            self._elapsed_s += passed_s
        elif view.point is not None and view.pause_left <= 0:
            self._elapsed_s += passed_s
            self._done_s += passed_s * rate(self.action.clock)
        self._now = view.now

    def _choose(self, view: View) -> None:
        signal = {_HOME: max(view.intensity, 1e-9)}
        left_s = self.stretch * (self._done_s + AHEAD_S) - self._elapsed_s
        moment = Moment(AHEAD_S, left_s, signal, [*self._past], self.action, _HOME)
        self.action = self.choose(moment, self.rules, self.stretch)
        self._past.append(signal)
        self._hour_at = view.now + self.rules.decide_s


CLOCKS: Mapping[str, tuple[Choose, bool, bool]] = {
    "powered-down": (full_clock, False, False),
    "steady-cap": (steady_clock, True, False),
    "carbon-cap": (by_carbon, True, False),
    "carbon-pause": (by_carbon, False, True),
    "carbon-cap-pause": (by_carbon, True, True),
}
"""By the name of the policy: what it does, whether it may cap, and whether it may pause."""


def capped(name: str, inner: PolicyMaker, stretch: float = STRETCH) -> PolicyMaker:
    """Return what makes the policy of this name around another one.

    stretch: time that training may take, of that at full clock.
    """

    def make(cost: CostModel) -> Policy:
        costs = cost.costs
        if costs.busy_watts <= 0:
            raise ConfigError(
                f"the power of these devices is not known, and {name} needs it",
                where="--policy",
                remedy="use a device that holdfast plan knows, or another policy",
            )
        power = NodePower(0.0, min(costs.idle_watts, costs.busy_watts), costs.busy_watts)
        choose, can_cap, can_pause = CLOCKS[name]
        rules = ShiftRules(power, can_cap, can_pause, powers_down=True)
        return CappedPolicy(name, inner(cost), costs, rules, choose, stretch)

    return make
