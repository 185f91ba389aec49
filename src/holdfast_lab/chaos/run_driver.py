"""The run while it is disturbed: how far it may go, what is made good, and who is started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.errors import HoldfastError
from holdfast.events import (
    Event,
    FaultInjected,
    GenerationStarted,
    Record,
    RunFailed,
    RunFinished,
    StepDone,
)
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_location import store_of_run
from holdfast.wire.store.run_store import RunStore
from holdfast_lab.chaos.actions import ChaosEnvironment, FaultAction


@dataclass
class JournalView:
    """Kept up to date by `look`. generation: the newest that was started; nodes: who takes part in
    it; world: its ranks. reached_steps: by generation, the newest step that was done in it."""

    generation: int = 0
    nodes: tuple[str, ...] = ()
    world: int = 0
    start_step: int = 0
    reached_steps: dict[int, int] = field(default_factory=dict)
    is_finished: bool = False
    failure_reason: str | None = None
    injected: dict[int, Record] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    def apply_record(self, record: Record) -> None:
        self.records.append(record)
        match record.event:
            case GenerationStarted() as event if record.generation > self.generation:
                self.generation, self.start_step = record.generation, event.step
                named = tuple(str(node) for node in event.topology.get("nodes", ()))
                self.nodes, self.world = tuple(dict.fromkeys(named)), len(named)
            case StepDone(step=step):
                now = self.reached_steps.get(record.generation, 0)
                self.reached_steps[record.generation] = max(now, step)
            case RunFinished():
                self.is_finished = True
            case RunFailed(reason=reason):
                self.failure_reason = reason
            case FaultInjected(number=number):
                self.injected.setdefault(number, record)
            case _:
                pass

    @property
    def step(self) -> int:
        """The newest step of the newest generation."""
        return max(self.start_step, self.reached_steps.get(self.generation, 0))

    def has_since(self, number: int, matches: Callable[[Event], bool]) -> bool:
        """Whether, after a fault was injected, something appeared in the journal."""
        record = self.injected.get(number)
        if record is None:
            return False
        begin = self.records.index(record)
        return any(matches(later.event) for later in self.records[begin:])


class JournalWatcher:
    """Reads what is new in a run's journal into a `View`."""

    def __init__(self, store: RunStore) -> None:
        self._journal_tail = JournalTail(store)
        self.view = JournalView()

    def read_new(self) -> JournalView:
        for record in self._journal_tail.read_new():
            self.view.apply_record(record)
        return self.view


# --- the run --------------------------------------------------------------------------------------
POLL_S = 0.02
RECOVERY_TIMEOUT_S = 90.0  # without a step or a generation: the run is stuck
MAX_TIMEOUT_FACTOR = 6
"""Times as long that the run may continue without reaching what is waited for."""
OUTAGE_SECONDS_PER_STEP = 5.0
"""Seconds after which the run may do one more step, while something stays bad for long."""
STEPS_AFTER_LAST_FAULT = 4  # steps after the last fault
_USER_ERROR_EXIT_CODE = 2  # the exit code of what a person has to mend
_RUN_END_GRACE_S = 5.0  # seconds that an agent may end before the run's end is in the journal
_MAX_UNEXPECTED_ENDS = 20  # agents that ended although no fault touched them


class RunStuckError(HoldfastError):
    """The run does not get further."""


class _Start(NamedTuple):
    """An agent that was started again. generation: the newest one then."""

    began_at: float
    generation: int


@dataclass
class _PendingRepair:
    """Something that is to be made good. gate_step: up to which step the run could go when it
    began."""

    action: FaultAction
    began_at: float
    gate_step: int


class RunDriver:
    """Lets a run continue step by step, and repairs what a fault left during each wait.

    unexpected_ends: receives agents that ended although no fault touched them: node, exit code.
    gate_step: up to which step the run may go. nodes_expected_back: those that are to come back.
    """

    def __init__(
        self,
        environment: ChaosEnvironment,
        fault_orders: FaultOrders,
        steps: int,
        unexpected_ends: list[list[Any]],
    ) -> None:
        self._environment, self._fault_orders, self._steps = environment, fault_orders, steps
        self._unexpected_ends = unexpected_ends
        self.watcher = JournalWatcher(store_of_run(environment.real_folder))
        self.nodes_expected_back: set[str] = set()
        self.gate_step = 0
        self._pending_repairs: list[_PendingRepair] = []
        self._finished_agents: list[tuple[str, float]] = []  # who has ended well, and when
        self._held_nodes: list[str] = []  # to be started once no fault holds starts
        self._starts: dict[str, _Start] = {}  # the newest of each node that was started again
        self._starts_held_until = 0.0  # when the last fault that holds starts was made good

    @property
    def view(self) -> JournalView:
        return self.watcher.view

    @property
    def is_over(self) -> bool:
        """The run has finished, and every agent has ended."""
        return self.view.is_finished and not self._environment.fleet.alive_nodes

    def open_gate(self, step: int) -> None:
        if step > self.gate_step:
            self.gate_step = step
            self._fault_orders.open_gate(step)

    def expect_repair(self, action: FaultAction) -> None:
        """Make good, in time, what an action did."""
        self._pending_repairs.append(_PendingRepair(action, time.monotonic(), self.gate_step))

    def finish_repairs(self) -> None:
        """Wait until all is made good."""
        while self._pending_repairs:
            self.tick()

    def wait_until(
        self, condition: Callable[[], bool], what: str, timeout_s: float = RECOVERY_TIMEOUT_S
    ) -> None:
        """Wait until `condition`. Raises RunStuckError if the run makes no step for so many
        seconds, or continues for `ENDLESS` times as many without reaching it. A fault in force
        meanwhile may hide its steps."""
        timeout_s += max((bad.action.seconds for bad in self._pending_repairs), default=0.0)
        begun = since = time.monotonic()
        at = (self.view.generation, self.view.step)
        while not condition():
            self.tick()
            now = time.monotonic()
            if at != (self.view.generation, self.view.step):
                at, since = (self.view.generation, self.view.step), now
            if now - since > timeout_s or now - begun > MAX_TIMEOUT_FACTOR * timeout_s:
                raise RunStuckError(
                    f"no sign of {what} within {now - begun:.0f} s, in generation "
                    f"{at[0]} after step {at[1]}"
                )

    def tick(self) -> None:
        time.sleep(POLL_S)
        self.watcher.read_new()
        if self.view.failure_reason is not None and not self.view.is_finished:
            raise RunStuckError(f"the run has failed: {self.view.failure_reason}")
        self._run_repairs()
        self._restart_ended()

    def _run_repairs(self) -> None:
        for bad in list(self._pending_repairs):
            since = time.monotonic() - bad.began_at
            if since >= bad.action.seconds:
                self._pending_repairs.remove(bad)
                assert bad.action.heal is not None
                bad.action.heal()
                if bad.action.holds_starts:
                    self._starts_held_until = time.monotonic()
                continue
            if bad.action.on_tick is not None:
                bad.action.on_tick(since)
            self.open_gate(
                min(
                    bad.gate_step + int(since / OUTAGE_SECONDS_PER_STEP),
                    self._steps - STEPS_AFTER_LAST_FAULT,
                )
            )

    def _restart_ended(self) -> None:
        """While the run is not over, start ended nodes again by the same command."""
        for node, code, expected in self._environment.fleet.take_ended():
            if self.view.is_finished:
                continue
            if code == _USER_ERROR_EXIT_CODE and self._could_not_start(node):
                self._restart_agent(node)
                continue
            if code == 0 and not expected and self.gate_step >= self._steps:
                # its end may be known before the run's
                self._finished_agents.append((node, time.monotonic()))
                continue
            if not expected:
                self._unexpected_ends.append([node, code])
                if (
                    code == _USER_ERROR_EXIT_CODE
                    or len(self._unexpected_ends) > _MAX_UNEXPECTED_ENDS
                ):
                    raise RunStuckError(
                        f"{node} ended with {code}: "
                        f"{self._environment.fleet.last_output_line(node)}"
                    )
            self._restart_agent(node)
        for node, when in list(self._finished_agents):
            if time.monotonic() - when > _RUN_END_GRACE_S and not self.view.is_finished:
                self._finished_agents.remove((node, when))
                self._unexpected_ends.append([node, 0])
                self._restart_agent(node)

        if self._held_nodes and not self._holds_starts():
            held, self._held_nodes = self._held_nodes, []
            for node in held:
                self._restart_agent(node)

    def _holds_starts(self) -> bool:
        """Return True while a fault of ours would end an agent that starts."""
        return any(bad.action.holds_starts for bad in self._pending_repairs)

    def _could_not_start(self, node: str) -> bool:
        """Return True if such a fault began or lasted while the node's agent started."""
        start = self._starts.get(node)
        if start is None:
            return False
        if self.view.generation > start.generation and node in self.view.nodes:
            return False  # it took part
        return self._holds_starts() or self._starts_held_until > start.began_at

    def _restart_agent(self, node: str) -> None:
        if self._holds_starts():
            self._held_nodes.append(node)
            return
        self._starts[node] = _Start(time.monotonic(), self.view.generation)
        (self._environment.notices_folder / node).unlink(missing_ok=True)
        self.nodes_expected_back.discard(node)
        self._environment.fleet.start(node)
