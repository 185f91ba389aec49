"""Replay of a run over carbon intensities or prices: hours, energy, grams or dollars. Pure.

Each signal holds from one event to the next, as it does in the file. The policy decides at each
change of a signal, and every hour. Energy times intensity is integrated exactly. Failures are left
out, so that they do not hide the effect of a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast_lab.engine.clock import Process, run_process
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.shifting import PAUSED, Action, Moment, ShiftRules, decide
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
    """What became of a run. Its ledger has grams of CO2, or dollars if the signal is a price."""

    ledger: Ledger = field(default_factory=Ledger)
    pauses: int = 0
    moves: int = 0

    @property
    def seconds(self) -> float:
        return self.ledger.wall_s

    @property
    def kwh(self) -> float:
        return self.ledger.kwh

    @property
    def cost(self) -> float:
        """Grams of CO2, or dollars."""
        return self.ledger.grams_co2 + self.ledger.usd

    @property
    def is_done(self) -> bool:
        return self.ledger.finished


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


@dataclass
class EnergyStudy(Process[Mapping[str, float]]):
    """A run over the signals of `hours`, from `hours[start]` on until its work is done or the
    signal ends. It pays for a change of action with time, before it works again."""

    hours: Sequence[Hour]
    start: int
    setup: EnergyRun
    rules: ShiftRules
    home: str
    choice: Choice = decide
    now: float = 0.0
    _action: Action = PAUSED
    _signal: Mapping[str, float] = field(default_factory=dict)
    _index: int = 0
    _left_s: float = 0.0  # work that is left
    _debt_s: float = 0.0  # seconds of changes that are not spent yet
    _out: EnergyOutcome = field(default_factory=EnergyOutcome)

    def run(self) -> EnergyOutcome:
        self.now, self._index, self._left_s = (
            self.hours[self.start][0],
            self.start,
            self.setup.work_s,
        )
        self._action = Action(self.home, 1.0)
        run_process(self, self.hours[self.start :], self.hours[-1][0])
        return self._out

    def take(self, news: Mapping[str, float]) -> None:
        """Decide at a new signal."""
        allowed = self.setup.longest * self.setup.work_s - (self.now - self.hours[self.start][0])
        past = _last_day(self.hours, self._index)
        before, out = self._action, self._out
        chosen = self.choice(
            Moment(self._left_s, allowed, news, past, before, self.home), self.rules
        )
        changing_s = self.rules.changing_s(before, chosen)
        self._debt_s = 0.0 if chosen == PAUSED else self._debt_s + changing_s
        out.pauses += chosen == PAUSED and before != PAUSED
        out.moves += bool(chosen.zone and before.zone and chosen.zone != before.zone)
        self._action, self._signal = chosen, news
        self._index += 1

    def elapse(self, until: float) -> bool:
        """Spend time: first what the last change costs, then work."""
        action, power, ledger = self._action, self.rules.power, self._out.ledger
        seconds = until - self.now
        waits, rate = min(self._debt_s, seconds), self.rules.rate(action)
        trains = min(seconds - waits, self._left_s / rate) if rate else 0.0
        paused = seconds - waits if action == PAUSED else 0.0
        for label, spent in (("recovery", waits), ("productive", trains), ("stopped", paused)):
            ledger.seconds[label] += spent
        self._pay(waits, trains, paused, power.watts(action.clock) if rate else 0.0)
        self._debt_s -= waits
        self._left_s -= trains * rate
        ledger.finished = self._left_s <= 0
        self.now = until
        return ledger.finished

    def _pay(self, waits: float, trains: float, paused: float, watts: float) -> None:
        """Book energy and its price. watts: of a node that trains."""
        setup, rules, ledger = self.setup, self.rules, self._out.ledger
        power, spent = rules.power, waits + trains + paused
        at_pause = power.off_w if rules.powers_down else power.waiting_w
        idle = power.off_w if setup.idle_off else power.waiting_w
        joules = waits * power.waiting_w + paused * at_pause + trains * watts
        total = setup.nodes * joules + setup.idle_nodes * idle * spent
        signal = self._signal[self._action.zone or self.home]
        ledger.joules += total
        if rules.priced:
            idle_s = setup.idle_nodes * (0.0 if setup.idle_off else spent)
            ledger.usd += (idle_s + setup.nodes * (waits + trains)) * signal / 3600
        else:
            ledger.grams_co2 += total / _JOULES_PER_KWH * signal


def _last_day(hours: Sequence[Hour], index: int) -> list[Mapping[str, float]]:
    """Hourly samples of the day before."""
    found: list[Mapping[str, float]] = []
    at, place = hours[index][0] - _DAY_S, index
    while place > 0 and hours[place - 1][0] >= at:
        place -= 1
    step = max(1, (index - place) // 24)
    found.extend(hours[each][1] for each in range(place, index, step))
    return found
