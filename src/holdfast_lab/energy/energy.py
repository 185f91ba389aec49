"""Replay of a run over carbon intensities or prices: hours, energy, grams or dollars. Pure.

Each signal holds from one event to the next, as it does in the file. The policy decides at each
change of a signal, and every hour. Energy times intensity is integrated exactly. Failures are left
out, so that they do not hide the effect of a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast_lab.energy.shifting import PAUSED, Action, Moment, ShiftRules, decide
from holdfast_lab.traces.events import TraceEvent

_DAY_S = 86400.0
_HOUR_S = 3600.0
_JOULES_PER_KWH = 3.6e6

Hour = tuple[float, Mapping[str, float]]
"""(seconds from the start of the trace, signal by zone from then on)."""


@dataclass(frozen=True)
class EnergyRun:
    """work_s: seconds at full clock. nodes: that train. idle_nodes: held and not used, for example
    spares. idle_off: they are powered down. longest: makespan allowed, as a multiple of work_s."""

    work_s: float
    nodes: int = 1
    idle_nodes: int = 0
    idle_off: bool = False
    longest: float = 1.1


@dataclass
class EnergyOutcome:
    """cost: grams of CO2, or dollars."""

    seconds: float = 0.0
    kwh: float = 0.0
    cost: float = 0.0
    paused_s: float = 0.0
    pauses: int = 0
    moves: int = 0
    is_done: bool = False


def hours_of(events: Sequence[TraceEvent], kind: str) -> list[Hour]:
    """The signal by zone, at each change of one of them and every hour, once all are known."""
    found: list[Hour] = []
    now: dict[str, float] = {}
    chosen = sorted((event for event in events if event.kind == kind), key=lambda e: e.t_s)
    zones = {event.zone for event in chosen}
    for event in chosen:
        while found and event.t_s > found[-1][0] + _HOUR_S:
            found.append((found[-1][0] + _HOUR_S, now))
        now = {**now, event.zone: event.value}
        if len(now) < len(zones):
            continue
        if found and found[-1][0] == event.t_s:
            found.pop()
        found.append((event.t_s, now))
    return found


Choice = Callable[[Moment, ShiftRules], Action]


def replay_energy(
    hours: Sequence[Hour],
    start: int,
    run: EnergyRun,
    rules: ShiftRules,
    home: str,
    choice: Choice = decide,
) -> EnergyOutcome:
    """Train from `hours[start]` on until the work is done or the signal ends."""
    out, left = EnergyOutcome(), run.work_s
    began, action, debt = hours[start][0], Action(home, 1.0), 0.0
    for index in range(start, len(hours) - 1):
        (now, signal), then = hours[index], hours[index + 1][0]
        moment = Moment(
            left,
            run.longest * run.work_s - (now - began),
            signal,
            _last_day(hours, index),
            action,
            home,
        )
        chosen = choice(moment, rules)
        debt = 0.0 if chosen == PAUSED else debt + rules.changing_s(action, chosen)
        out.pauses += chosen == PAUSED and action != PAUSED
        out.moves += bool(chosen.zone and action.zone and chosen.zone != action.zone)
        place = chosen.zone or home
        seconds = then - now
        debt, left = _pass(out, seconds, debt, left, chosen, signal[place], run, rules)
        action = chosen
        if left <= 0:
            out.is_done = True
            break
    return out


def _pass(
    out: EnergyOutcome,
    seconds: float,
    debt: float,
    left: float,
    action: Action,
    signal: float,
    run: EnergyRun,
    rules: ShiftRules,
) -> tuple[float, float]:
    """Spend the time of one decision: first what the change costs, then work. Return what is left
    of both."""
    waits = min(debt, seconds)
    rate = rules.rate(action)
    trains = min(seconds - waits, left / rate) if rate else 0.0
    paused = seconds - waits if action == PAUSED else 0.0
    power = rules.power
    at_pause = power.off_w if rules.powers_down else power.waiting_w
    joules = waits * power.waiting_w + paused * at_pause + trains * power.watts(action.clock)
    idle = power.off_w if run.idle_off else power.waiting_w
    spent = waits + trains + paused
    total = run.nodes * joules + run.idle_nodes * idle * spent
    out.seconds, out.paused_s = out.seconds + spent, out.paused_s + paused
    out.kwh += total / _JOULES_PER_KWH
    held = run.idle_nodes * (0.0 if run.idle_off else spent) + run.nodes * (waits + trains)
    out.cost += held * signal / 3600 if rules.priced else total / _JOULES_PER_KWH * signal
    return debt - waits, left - trains * rate


def _last_day(hours: Sequence[Hour], index: int) -> list[Mapping[str, float]]:
    """Hourly samples of the day before."""
    found: list[Mapping[str, float]] = []
    at, place = hours[index][0] - _DAY_S, index
    while place > 0 and hours[place - 1][0] >= at:
        place -= 1
    step = max(1, (index - place) // 24)
    found.extend(hours[each][1] for each in range(place, index, step))
    return found
