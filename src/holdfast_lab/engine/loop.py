"""The engine: a run over the events of a trace, in closed form between two changes.

Something changes only at an event, at the end of a pause, or when a policy asked to be called.
Between two such times everything follows from formulas (`progress.py`, `accounts.py`). Events may
come from a generator. The engine keeps totals and the nodes that are there: its memory does not
grow with the time that is simulated. It draws no random number. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from holdfast_lab.engine.accounts import Accounts
from holdfast_lab.engine.clock import Process, run_process
from holdfast_lab.engine.fleet import Fleet, instants, seats
from holdfast_lab.engine.interfaces import (
    NOTHING,
    SAVE,
    STEP,
    Change,
    CostModel,
    Node,
    OperatingPoint,
    Policy,
    PowerPolicy,
    Transition,
)
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.progress import LostWork, Progress
from holdfast_lab.traces.events import TraceEvent

if TYPE_CHECKING:
    from holdfast_lab.engine.run_journal import JournalObserver

_NO_WORK = LostWork(0.0, 0.0, 0.0, 0.0, 0.0)
_TINY = 1e-9
MIN_REVIEW_S = 0.1  # A policy is asked again no sooner than after so many seconds


@dataclass(frozen=True)
class Limits:
    """When a simulation ends. seconds: of the trace. tokens: kept; the run is done with so many."""

    seconds: float
    tokens: float = inf


@dataclass
class Simulation(Process[Sequence[TraceEvent]]):
    """One run; `run` may be called once. It is the policy's View."""

    cost: CostModel
    policy: Policy
    limits: Limits
    observer: JournalObserver | None = None
    now: float = 0.0
    fleet: Fleet = field(default_factory=Fleet)
    used: list[str] = field(default_factory=list)
    point: OperatingPoint | None = None
    nodes: Mapping[str, Node] = field(init=False)
    accounts: Accounts = field(init=False)
    progress: Progress = field(init=False)
    _places: dict[str, int] | None = None
    _pauses: list[tuple[str, float]] = field(default_factory=list)
    _planned: Transition | None = None
    _planned_at: float = inf
    _review_at: float = inf
    _saves_at: float = inf
    _is_starting: bool = False
    _is_training: bool = False
    _watts: float = 0.0
    _dirty: bool = True
    _power: PowerPolicy | None = None

    def __post_init__(self) -> None:
        best = self.cost.point(self.cost.wanted)
        self.nodes = self.fleet.nodes
        self.accounts = Accounts(self.cost)
        if isinstance(self.policy, PowerPolicy):
            self._power = self.policy
            self.accounts.meter.is_idle_off = self.policy.is_idle_off
        self.progress = Progress(best.tokens_per_s * best.step_s if best else 0.0)

    # --- the policy's view ----------------------------------------------------------------------
    @property
    def pause_left(self) -> float:
        return sum([seconds for _, seconds in self._pauses]) if self._pauses else 0.0

    @property
    def tokens(self) -> float:
        return self.progress.tokens

    @property
    def intensity(self) -> float:
        meter = self.accounts.meter
        meter.count(self.nodes.values(), len(self.nodes))  # a price may have come just now
        return meter.grams_per_joule * 3.6e6

    @property
    def unsaved_s(self) -> float:
        return self.progress.unsaved_s

    @property
    def ledger(self) -> Ledger:
        return self.accounts.ledger

    # --- the run --------------------------------------------------------------------------------
    def run(self, events: Iterable[TraceEvent]) -> Ledger:
        """Simulate the run until its end, or that of the time."""
        run_process(self, instants(events), self.limits.seconds)
        self.accounts.settle(self.now)
        ledger = self.accounts.close(self.progress)
        if self.observer:
            self.observer.ended(self)
        return ledger

    # --- time passes ----------------------------------------------------------------------------
    def next_change(self, end: float) -> float:
        # Comparisons stand here for min(): this runs for each change of a trace.
        pauses = self._pauses
        if self._review_at < end:
            end = self._review_at
        if pauses:
            self._is_training = False
            if self.now + pauses[0][1] < end:
                end = self.now + pauses[0][1]
        elif self.point is not None:
            self._is_training = True
            if self._saves_at < end:
                end = self._saves_at
            if self._planned_at < end:
                end = self._planned_at
        else:
            self._is_training = False
        return end

    def act(self) -> None:
        """End a pause, or carry out what was planned, or ask the policy."""
        pauses, now = self._pauses, self.now
        if pauses and pauses[0][1] <= _TINY:
            del pauses[0]
            if not pauses:
                self._resume()
        if now >= self._planned_at and self._planned is not None:
            self._carry_out(self._planned)
        elif now >= self._review_at:
            self._review_at = inf
            self._decide(Change(review=True))
        elif self._is_training and now >= self._saves_at:
            self._ask_saves()

    def elapse(self, until: float) -> bool:
        """Let time pass in which nothing changes. Return True if the run is done."""
        seconds, training = until - self.now, self._is_training
        if self._dirty:
            self._dirty = False
            self.accounts.count(self.nodes.values())
        is_done = False
        if training and self.limits.tokens < inf and self.progress.rate > 0:
            needed = self.progress.seconds_for(self.limits.tokens)
            if needed <= seconds:
                seconds, is_done = max(0.0, needed), True
        used = len(self.used) if self.point else 0
        watts = self._watts if training else used * self.cost.costs.idle_watts
        self.accounts.add_time(seconds, used, watts)
        if training:
            self.progress.advance(self.now, seconds)
            if self.observer:
                self.now += seconds
                self.observer.trained(self, seconds)
                self.now -= seconds
        elif self._pauses:
            label, left = self._pauses[0]
            self.accounts.ledger.seconds[label] += seconds if seconds < left else left
            self._pauses[0] = label, left - seconds
        else:
            self.accounts.ledger.seconds["stopped"] += seconds
        if is_done:
            self.accounts.ledger.finished = True
            self.now += seconds
        else:
            self.now = until
        return is_done

    # --- events ---------------------------------------------------------------------------------
    def take(self, group: Sequence[TraceEvent]) -> None:
        """Take in all events of one instant, and let the policy decide once."""
        taken = self.fleet.take(group, self._place_of)
        self._dirty = self._dirty or taken.is_new
        for event in taken.levels:
            self.accounts.meter.observe(event)
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
        if self.accounts.fault_at is not None:
            self.accounts.settle(self.now)
        if change.lost:
            self.accounts.add_fault(self.now)
        decision = self.policy.decide(self, change)
        wait = decision.review_s
        self._review_at = self.now + (wait if wait > MIN_REVIEW_S else MIN_REVIEW_S)
        if decision.transition is not None:
            self._plan(decision.transition, bool(change.lost))
        elif change.lost:
            raise RuntimeError(f"{self.policy.name} has no answer to a loss of nodes in use")
        elif (
            (change.slowed or self._power is not None)
            and self.point is not None
            and not self._pauses
        ):
            self._set_rate()

    def _plan(self, transition: Transition, is_loss: bool) -> None:
        """A transition that loses nothing waits for the end of the step."""
        if transition.loses == NOTHING and self.point is not None and not self._pauses:
            left = self.progress.until_step_end()
            if left > _TINY:
                self._planned, self._planned_at = transition, self.now + left
                return
        self._change(transition, is_loss)

    def _carry_out(self, planned: Transition) -> None:
        """The step has ended; nodes that were to join may be lost by now."""
        self._planned, self._planned_at = None, inf
        has_nodes = planned.point is None or planned.point.nodes <= len(self.nodes)
        if has_nodes and all(name in self.nodes for name in planned.used or ()):
            self._change(planned, False)
        else:
            self._decide(Change(review=True))

    def _change(self, transition: Transition, is_loss: bool) -> None:
        self._planned, self._planned_at = None, inf
        accounts = self.accounts
        lost = self._lose(transition)
        if is_loss:
            accounts.add_interruption(lost, self.progress.step_tokens)
        accounts.add_transition(transition)
        before, commit_at = self.point, accounts.commit_at
        self.point, accounts.commit_at = transition.point, inf
        accounts.ledger.changes += before is not transition.point and before != transition.point
        # Give the layout its nodes: a lost one's place goes to the oldest that has none.
        point = transition.point
        if point is None:
            self.used = []  # nothing is lost any more
        elif transition.used is not None:
            self.used = list(transition.used)
        else:
            self.used = seats(self.used, self.nodes, point.nodes)
        self._places = None
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
        if not self._pauses:
            self._resume()

    def _lose(self, transition: Transition) -> LostWork:
        if transition.loses == NOTHING:
            return _NO_WORK
        if transition.loses == SAVE:
            lost = self.progress.return_to_save(self.now, transition.tiers)
        elif transition.loses == STEP:
            lost = self.progress.lose_step()
        else:
            raise ValueError(f"a transition cannot lose {transition.loses!r}")
        self.accounts.add_lost(lost)
        return lost

    def _place_of(self, name: str) -> int | None:
        if self._places is None:
            self._places = dict(zip(self.used, count()))
        return self._places.get(name)

    def _resume(self) -> None:
        if self.point is None:
            return
        self._set_rate()
        self.accounts.commit_at = self.now + self.point.step_s
        self._ask_saves()

    def _set_rate(self) -> None:
        assert self.point is not None
        self._watts = self.point.watts if self._power is None else self._power.watts(self)
        self.progress.set_rate(self.point.tokens_per_s / max(1.0, self.policy.slowdown(self)))

    def _ask_saves(self) -> None:
        plan = self.policy.saves(self)
        wait = plan.review_s
        self._saves_at = self.now + (wait if wait > MIN_REVIEW_S else MIN_REVIEW_S)
        self.progress.set_plan(plan)
        if self.observer:
            self.observer.planned(self, plan)
