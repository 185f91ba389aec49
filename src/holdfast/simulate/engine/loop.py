"""The engine: a run over the events of a trace, in closed form between two changes.

Something changes only at an event, at the end of a pause, or when a policy asked to be called.
Between two such times everything follows from formulas (`progress.py`, `meter.py`). Events may come
from a generator. The engine keeps totals and the nodes that are there: its memory does not grow
with the time that is simulated. It draws no random number. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from holdfast.simulate.engine.fleet import Fleet, instants, seats
from holdfast.simulate.engine.interfaces import (
    NOTHING,
    SAVE,
    STEP,
    Change,
    CostModel,
    Node,
    OperatingPoint,
    Policy,
    SavePlan,
    Transition,
)
from holdfast.simulate.engine.ledger import Ledger
from holdfast.simulate.engine.meter import Meter
from holdfast.simulate.engine.progress import LostWork, Progress
from holdfast.simulate.traces.events import TraceEvent

_NO_WORK = LostWork(0.0, 0.0, 0.0, 0.0, 0.0)
_TINY = 1e-9
MIN_REVIEW_S = 0.1
"""A policy is asked again no sooner than after so many seconds."""


class Observer(Protocol):
    """Hears of a run while it is simulated, to write it down."""

    def trained(self, simulation: Simulation, seconds: float) -> None:
        """The run trained, saves included, for so many seconds that end now."""

    def lost(self, simulation: Simulation, nodes: Sequence[Node], reason: str) -> None:
        """Nodes in use went."""

    def noticed(self, simulation: Simulation, nodes: Sequence[str], seconds: float) -> None:
        """Nodes have a notice."""

    def changed(self, simulation: Simulation, transition: Transition, lost: LostWork) -> None:
        """The run takes another layout."""

    def planned(self, simulation: Simulation, plan: SavePlan) -> None:
        """How often the run saves from now on."""

    def ended(self, simulation: Simulation) -> None:
        """The run is over."""


@dataclass(frozen=True)
class Limits:
    """When a simulation ends. seconds: of the trace. tokens: kept; the run is done with so many."""

    seconds: float
    tokens: float = inf


@dataclass
class Simulation:
    """One run; `run` may be called once. It is the policy's View."""

    cost: CostModel
    policy: Policy
    limits: Limits
    observer: Observer | None = None
    now: float = 0.0
    fleet: Fleet = field(default_factory=Fleet)
    used: list[str] = field(default_factory=list)
    point: OperatingPoint | None = None
    ledger: Ledger = field(default_factory=Ledger)
    progress: Progress = field(init=False)
    meter: Meter = field(init=False)
    _places: dict[str, int] = field(default_factory=dict)
    _pauses: list[tuple[str, float]] = field(default_factory=list)
    _planned: Transition | None = None
    _planned_at: float = inf
    _review_at: float = inf
    _saves_at: float = inf
    _fault_at: float | None = None
    _commit_at: float = inf
    _is_starting: bool = False
    _ideal: float = 0.0
    _full: float = 0.0
    _watts: float = 0.0
    _dirty: bool = True

    def __post_init__(self) -> None:
        best = self.cost.point(self.cost.wanted)
        step = best.tokens_per_s * best.step_s if best else 0.0
        self.progress = Progress(step)
        self.meter = Meter(self.cost.costs)
        self._full = best.tokens_per_s if best else 0.0

    # --- the policy's view ----------------------------------------------------------------------
    @property
    def nodes(self) -> Mapping[str, Node]:
        return self.fleet.nodes

    @property
    def pause_left(self) -> float:
        return sum(seconds for _, seconds in self._pauses)

    @property
    def tokens(self) -> float:
        return self.progress.tokens

    @property
    def unsaved_s(self) -> float:
        return self.progress.unsaved_s

    # --- the run --------------------------------------------------------------------------------
    def run(self, events: Iterable[TraceEvent]) -> Ledger:
        """Simulate the run until its end, or that of the time."""
        for at, group in instants(events):
            if at >= self.limits.seconds or self._advance_to(at):
                break
            self._take(group)
        self._advance_to(self.limits.seconds)
        return self._close()

    def _close(self) -> Ledger:
        self._settle()
        ledger, progress = self.ledger, self.progress
        ledger.tokens = progress.tokens
        ledger.seconds["productive"] = progress.productive
        ledger.seconds["checkpoint"] = progress.blocked
        ledger.saves, ledger.saved_bytes = progress.saves, progress.bytes
        ledger.ended = "finished" if ledger.finished else "time"
        if self.observer:
            self.observer.ended(self)
        return ledger

    # --- time passes ----------------------------------------------------------------------------
    def _advance_to(self, end: float) -> bool:
        """Return True if the run is done by then."""
        if self.ledger.finished:
            return True
        while self.now < end:
            until = min(end, self._review_at)
            training = self.point is not None and not self._pauses
            if self._pauses:
                until = min(until, self.now + self._pauses[0][1])
            elif training:
                until = min(until, self._saves_at, self._planned_at)
            if self._pass(max(0.0, until - self.now), training):
                return True
            self.now = max(self.now, until)
            if self._pauses and self._pauses[0][1] <= _TINY:
                self._pauses.pop(0)
                if not self._pauses:
                    self._resume()
            if self.now >= self._planned_at and self._planned is not None:
                self._carry_out(self._planned)
            elif self.now >= self._review_at:
                self._review_at = inf
                self._decide(Change(review=True))
            elif training and self.now >= self._saves_at:
                self._ask_saves()
        return False

    def _pass(self, seconds: float, training: bool) -> bool:
        """Time passes in which nothing changes. Returns True if the run is done."""
        if seconds <= 0:
            return False
        if self._dirty:
            self._recount()
        if training and self.progress.rate > 0 and self.limits.tokens < inf:
            needed = self.progress.seconds_for(self.limits.tokens)
            if needed <= seconds:
                seconds, self.ledger.finished = max(0.0, needed), True
        point = self.point
        used = len(self.used) if point else 0
        idle = used * self.cost.costs.idle_watts
        self.meter.run(self.ledger, seconds, used, self._watts if training else idle)
        self.ledger.ideal_tokens += self._ideal * seconds
        self.ledger.full_tokens += self._full * seconds
        if training:
            self.progress.advance(self.now, seconds)
            if self.observer:
                self.now += seconds
                self.observer.trained(self, seconds)
                self.now -= seconds
        elif self._pauses:
            label, left = self._pauses[0]
            self.ledger.seconds[label] += min(seconds, left)
            self._pauses[0] = label, left - seconds
        else:
            self.ledger.seconds["stopped"] += seconds
        if self.ledger.finished:
            self.now += seconds
        return self.ledger.finished

    def _recount(self) -> None:
        self._dirty = False
        number = len(self.nodes)
        self.meter.count(self.nodes.values(), number)
        best = self.cost.point(min(number, self.cost.wanted))
        self._ideal = best.tokens_per_s if best else 0.0

    # --- events ---------------------------------------------------------------------------------
    def _take(self, group: Sequence[TraceEvent]) -> None:
        """Take in all events of one instant, and let the policy decide once."""
        taken = self.fleet.take(group, self._places)
        self._dirty = self._dirty or taken.is_new
        for event in taken.levels:
            self.meter.observe(event)
        change = taken.change()
        if change is None:
            return
        if self.observer and taken.departed:
            self.observer.lost(self, taken.departed, "lost")
        if self.observer and taken.noticed:
            left = min(self.nodes[name].leaves_s for name in taken.noticed) - self.now
            self.observer.noticed(self, taken.noticed, left)
        self._decide(change)

    # --- decisions ------------------------------------------------------------------------------
    def _decide(self, change: Change) -> None:
        self._settle()
        if change.lost:
            self.ledger.interruptions += 1
            self._fault_at = self.now if self._fault_at is None else self._fault_at
        decision = self.policy.decide(self, change)
        self._review_at = self.now + max(MIN_REVIEW_S, decision.review_s)
        if decision.transition is not None:
            self._plan(decision.transition, bool(change.lost))
        elif change.lost:
            raise RuntimeError(f"{self.policy.name} has no answer to a loss of nodes in use")
        elif change.slowed and self.point is not None and not self._pauses:
            self._set_rate()

    def _plan(self, transition: Transition, is_loss: bool) -> None:
        """A transition that loses nothing waits for the end of the step."""
        training = self.point is not None and not self._pauses
        left = self.progress.until_step_end() if training else 0.0
        if transition.loses != NOTHING or left <= _TINY:
            self._change(transition, is_loss)
        else:
            self._planned, self._planned_at = transition, self.now + left

    def _carry_out(self, planned: Transition) -> None:
        """The step has ended; a node that was to join may be lost by now."""
        self._planned, self._planned_at = None, inf
        if all(name in self.nodes for name in planned.used or ()):
            self._change(planned, False)
        else:
            self._decide(Change(review=True))

    def _change(self, transition: Transition, is_loss: bool) -> None:
        self._planned, self._planned_at = None, inf
        lost = _NO_WORK
        if transition.loses == SAVE:
            lost = self.progress.return_to_save(self.now, transition.tiers)
        elif transition.loses == STEP:
            lost = self.progress.lose_step()
        elif transition.loses != NOTHING:
            raise ValueError(f"a transition cannot lose {transition.loses!r}")
        ledger = self.ledger
        ledger.seconds["recovery"] += lost.partial_s
        ledger.seconds["rework"] += lost.productive - lost.partial_s + lost.blocked
        ledger.tokens_lost += lost.tokens
        if is_loss:
            step = self.progress.step_tokens
            ledger.lost_s.add(lost.productive)
            ledger.lost_steps.add(lost.tokens / step if step else 0.0)
        if transition.reason:
            ledger.by_reason[transition.reason] = ledger.by_reason.get(transition.reason, 0) + 1
        for tier, amount in transition.read.items():
            ledger.read_bytes[tier] = ledger.read_bytes.get(tier, 0.0) + amount
        before, commit_at = self.point, self._commit_at
        self.point, self._commit_at = transition.point, inf
        ledger.changes += before != transition.point
        self._seat(transition)
        # As in the report of a real run: it has not started until a step is done.
        is_first = bool(transition.pauses) and transition.pauses[0][0] == "startup"
        self._is_starting = is_first or (self._is_starting and self.now < commit_at)
        self._pauses = [
            ("startup" if self._is_starting else label, seconds)
            for label, seconds in transition.pauses
            if seconds > 0
        ]
        if self.observer:
            self.observer.changed(self, transition, lost)
        if self.point is not None and not self._pauses:
            self._resume()

    def _seat(self, transition: Transition) -> None:
        """Give the layout its nodes: a lost one's place goes to the oldest that has none."""
        point = transition.point
        if point is None:
            self.used = []  # nothing is lost any more
        elif transition.used is not None:
            self.used = list(transition.used)
        else:
            self.used = seats(self.used, self.nodes, point.nodes)
        self._places = {name: place for place, name in enumerate(self.used)}

    def _resume(self) -> None:
        if self.point is None:
            return
        self._set_rate()
        self._commit_at = self.now + self.point.step_s
        self._ask_saves()

    def _set_rate(self) -> None:
        assert self.point is not None
        self._watts = self.point.watts
        self.progress.set_rate(self.point.tokens_per_s / max(1.0, self.policy.slowdown(self)))

    def _ask_saves(self) -> None:
        plan = self.policy.saves(self)
        self._saves_at = self.now + max(MIN_REVIEW_S, plan.review_s)
        self.progress.set_plan(plan)
        if self.observer:
            self.observer.planned(self, plan)

    def _settle(self) -> None:
        """The first step after a fault has ended, if it has."""
        if self._fault_at is not None and self._commit_at <= self.now:
            self.ledger.rto_s.add(self._commit_at - self._fault_at)
            self._fault_at = None
