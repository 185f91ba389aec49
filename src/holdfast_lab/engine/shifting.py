"""When, where and how fast a run trains, to emit or pay least and still end in time. Pure.

A run has work W and H hours left. At full speed it needs less, so it has slack. It spends the slack
at hours in which work costs most. There it takes a lower clock, pauses, or moves to another zone.
The Lagrangian of "least cost, and W done in H" splits by hours. With the right value v of a second
of work, each hour takes the action with the most

    v x rate - cost per second.

The future is not known. So v is the one under which the hours of the last day would have done
W / H of the work. Each decision finds v again. A run that falls behind gets a higher v, so no
forecast is needed. v is never so low that these hours would gain less than nothing in the mean: an
early end costs nothing. Two rules come on top:

    hysteresis         A pause, a start and a move cost seconds of work. Their price is spread
                       over `dwell_s`, the time that an action usually holds.
    the last moment    Once the rest needs all hours that are left, the run trains at full clock
                       where it is. ("Can't Be Late", Wu et al., NSDI 2024.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holdfast_lab.engine.clocks import NodePower, clocks

_JOULES_PER_KWH = 3.6e6
_HALVINGS = 25


@dataclass(frozen=True)
class Action:
    """What the run does until the next decision. zone: "" while it is paused; clock: 0 then."""

    zone: str
    clock: float


PAUSED = Action("", 0.0)


@dataclass(frozen=True)
class ShiftRules:
    """What a policy may do.

    power: of a node. can_cap, can_pause, can_move: which actions it has. powers_down: a paused node
    is off; otherwise it waits. priced: the signal is US dollars a node-hour, which a paused run
    does not pay; otherwise it is gCO2/kWh. change_s, move_s: seconds of work that a start after a
    pause, and a move to another zone, cost. dwell_s: for which an action usually holds. decide_s:
    until the next decision. slack_kept: share of the slack that is not planned with.
    """

    power: NodePower
    can_cap: bool = False
    can_pause: bool = False
    can_move: bool = False
    powers_down: bool = False
    priced: bool = False
    change_s: float = 300.0
    move_s: float = 1800.0
    dwell_s: float = 4 * 3600.0
    decide_s: float = 3600.0
    slack_kept: float = 0.1

    def cost_per_s(self, action: Action, signal: float) -> float:
        """Grams, or dollars, a second of one node at this signal."""
        if self.priced:
            return 0.0 if action == PAUSED else signal / 3600
        paused = self.power.off_w if self.powers_down else self.power.waiting_w
        watts = paused if action == PAUSED else self.power.watts(action.clock)
        return watts * signal / _JOULES_PER_KWH

    def rate(self, action: Action) -> float:
        """Seconds of work at full clock that a second does."""
        return 0.0 if action == PAUSED else self.power.rate(action.clock)

    def changing_s(self, old: Action, new: Action) -> float:
        """Seconds of work that the change costs."""
        if new == PAUSED or new.zone == old.zone:
            return 0.0
        return self.change_s if old == PAUSED else self.move_s


@dataclass(frozen=True)
class Moment:
    """What is known when a decision is due.

    work_s: seconds of work left, at full clock. left_s: until the deadline. now: the signal by
    zone. past: the signals of the last day, each of equal length, the newest last. action: in
    force. home: the zone of a run that may not move.
    """

    work_s: float
    left_s: float
    now: Mapping[str, float]
    past: Sequence[Mapping[str, float]]
    action: Action
    home: str


def decide(moment: Moment, rules: ShiftRules) -> Action:
    """Return the action until the signal changes."""
    zones = sorted(moment.now) if rules.can_move else [moment.home]
    cheapest = min(zones, key=lambda each: (moment.now[each], each))
    last = moment.action.zone if moment.action.zone in zones else cheapest
    reserve = rules.decide_s + max(rules.change_s, rules.move_s if rules.can_move else 0.0)
    slack = moment.left_s - moment.work_s
    if slack <= reserve:
        return Action(last, 1.0)
    needed = min(1.0, moment.work_s / (moment.left_s - rules.slack_kept * slack))
    signals = np.array([min(each[zone] for zone in zones) for each in [*moment.past, moment.now]])
    actions = [Action(last, clock) for clock in clocks(rules.can_cap)]
    actions += [PAUSED] if rules.can_pause else []
    rates = np.array([rules.rate(each) for each in actions])
    costs = np.outer(signals, [rules.cost_per_s(each, 1.0) for each in actions])
    low, high = 0.0, 100 * float(costs.max())
    for _ in range(_HALVINGS):
        value = (low + high) / 2
        gains = value * rates - costs
        is_late = float(rates[gains.argmax(axis=1)].mean()) < needed
        is_worse_than_an_early_end = float(gains.max(axis=1).mean()) < 0
        low, high = (value, high) if is_late or is_worse_than_an_early_end else (low, value)
    return _best(high, moment.now, zones, rules, moment.action)


def _best(
    value: float, signal: Mapping[str, float], zones: Sequence[str], rules: ShiftRules, held: Action
) -> Action:
    """The zone first, then the action with the most value for its cost. held: in force. A move
    costs, and so does a pause, because a start follows it."""
    zone = min(zones, key=lambda each: (signal[each], each))
    full = {each: rules.cost_per_s(Action(each, 1.0), signal[each]) for each in zones}
    # A lost second of work costs at least what it costs to do it later.
    worth = max(value, full[zone]) / rules.dwell_s
    if held.zone in zones and full[held.zone] - full[zone] <= worth * rules.move_s:
        zone = held.zone
    actions = [Action(zone, clock) for clock in clocks(rules.can_cap)]
    if rules.can_pause:
        actions.append(PAUSED)

    def gain(action: Action) -> float:
        earned = value * rules.rate(action) - rules.cost_per_s(action, signal[zone])
        is_new_pause = action == PAUSED and held != PAUSED
        return earned - (worth * rules.change_s if is_new_pause else 0.0)

    return max(actions, key=gain)
