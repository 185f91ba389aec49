"""Watches what the run uses up: journals which nodes are there, and keeps the run's budget.

Only the agent that leads does so. It knows all nodes, and what each told of its price when it
joined. What the run used up before comes from the journal.
"""

from __future__ import annotations

import asyncio
import shlex
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from holdfast.elastic.event_log import Say
from holdfast.elastic.run_context import RunContext
from holdfast.errors import HoldfastError, OverBudgetError
from holdfast.events import (
    BudgetReached,
    CheckpointCommitted,
    Event,
    GenerationStarted,
    NodesPresent,
    Record,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
)
from holdfast.policy.budget import (
    STEPS_AHEAD,
    BudgetUse,
    budget_use,
    effective_limits,
    why_over_budget,
)
from holdfast.policy.spending import NodePrice, SpendMeter, in_order
from holdfast.wire.journal import read_journal
from holdfast.wire.raised_budget import read_raises

_COUNTED = (RunStarted, NodesPresent, RunStopped, RunFinished, RunFailed)
_STORE_TIMEOUT_S = 5.0
"""Seconds that a stop waits for a run store that may have a raise of the budget."""
_KEPT_STEPS = 8
ASSUMED_SAVE_S = 2.0
"""Seconds of a save, until one was measured."""
LEAVE_S = 0.5
"""Seconds of the processes' end after the last save. A run of two workers on a CPU took 0.3."""


class SpendingWatch:
    """One agent's watch. Lives in one event loop."""

    def __init__(self, context: RunContext, emit: Callable[[Event], None], say: Say) -> None:
        self._context, self._emit, self._say = context, emit, say
        self.present: Callable[[], Mapping[str, NodePrice | None] | None] = lambda: None
        """Returns the nodes and the price that each told; None if this agent does not lead."""
        self.newest_step: Callable[[], int] = lambda: 0
        self.stop: Callable[[str, int], None] = lambda reason, exit_code: None
        """Makes all of the run save and stop, with a reason and an exit code."""
        self._meter = SpendMeter()
        self._own: list[Record] = []  # records of this agent that the meter counts
        self._leads = False
        self._written: NodesPresent | None = None
        self._limits = effective_limits(context.config.budget, {})
        self._said: set[tuple[str, str, float]] = set()  # (action, limit, value)
        self._step, self._step_at, self._save_s = 0, 0.0, ASSUMED_SAVE_S
        self._step_s: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._stopping: asyncio.Task[None] | None = None

    # --- what happened ----------------------------------------------------------------------------
    def load(self, records: Iterable[Record]) -> None:
        """Count what earlier sessions, and other agents of this one, have written."""
        known = {r.order: r for r in (*records, *self._own)}
        self._meter = SpendMeter()
        for record in in_order(known.values()):
            self._meter.observe(record)

    def observe(self, record: Record) -> None:
        event = record.event
        if isinstance(event, _COUNTED):
            self._own.append(record)
        self._meter.observe(record)
        if isinstance(event, GenerationStarted):
            asyncio.get_running_loop().call_soon(self._write_present, True)
        elif isinstance(event, CheckpointCommitted):
            self._save_s = event.seconds
        elif isinstance(event, StepDone):
            self._judge(record.time, event.step)

    async def check_forever(self, interval_s: float, clock: Callable[[], float]) -> None:
        """Check every `interval_s` seconds; never ends. clock: of the journal's records."""
        while True:
            await asyncio.sleep(interval_s)
            if self.present() is None:
                self._leads = False
                continue
            if not self._leads and self._context.single_node_term is None:
                with suppress(HoldfastError):  # a store that is away: what this agent wrote counts
                    self.load(await asyncio.to_thread(read_journal, self._context.store))
            self._leads = True
            self._write_present()
            if self._context.config.budget.is_set:
                await self._read_limits()
                self._judge(clock())

    def _write_present(self, is_new_generation: bool = False) -> None:
        present = self.present()
        if present is None:
            return
        # A new coordinator knows nodes of the old one, and has not heard their prices yet.
        prices = {
            name: price or self._meter.price_of(name) or NodePrice()
            for name, price in sorted(present.items())
        }
        event = NodesPresent(
            {name: price.to_json() for name, price in prices.items()}, step=self.newest_step()
        )
        if is_new_generation or self._written is None or event.nodes != self._written.nodes:
            self._written = event
            self._emit(event)

    # --- the budget -------------------------------------------------------------------------------
    async def _read_limits(self) -> None:
        """Take raises into account. A store that is away has none."""
        with suppress(HoldfastError, TimeoutError):
            raises = await asyncio.wait_for(
                asyncio.to_thread(read_raises, self._context.store), _STORE_TIMEOUT_S
            )
            before = self._limits
            self._limits = effective_limits(self._context.config.budget, raises)
            for name, most in self._limits.items():
                if most > before[name]:
                    self._tell("raised", BudgetUse(name, 0.0, 0.0, most))

    def _judge(self, now: float, reported_step: int = 0) -> None:
        step = max(reported_step, self.newest_step())
        if step > self._step:
            if self._step_at:
                self._step_s.append((now - self._step_at) / (step - self._step))
            self._step, self._step_at = step, now
        budget = self._context.config.budget
        if not self._limits or self.present() is None:
            return
        stop_s = STEPS_AHEAD * max(self._step_s, default=0.0) + self._save_s + LEAVE_S
        use = budget_use(self._meter.spent(now), self._meter.rate, stop_s, self._limits)
        if use is None:
            return
        if budget.on_exceed == "warn":
            if use.share > 1:
                self._tell("passed", use)
            elif use.share >= budget.warn_at:
                self._tell("near", use)
            return
        if use.is_over:
            if self._stopping is None or self._stopping.done():
                self._stopping = asyncio.get_running_loop().create_task(self._stop(use))
        elif use.share >= budget.warn_at:
            self._tell("near", use)

    async def _stop(self, use: BudgetUse) -> None:
        """Stop the run, unless the limit was raised since."""
        await self._read_limits()
        if use.ahead <= self._limits[use.limit]:
            return
        self._tell("stopped", use)
        self.stop(why_over_budget(use), OverBudgetError.exit_code)

    def _tell(self, action: str, use: BudgetUse) -> None:
        mark = (action, use.limit, use.most)
        if mark in self._said:
            return
        self._said.add(mark)
        asks = action == "near" and self._context.config.budget.on_exceed == "ask"
        command = ""
        if asks:
            option = f"--{use.limit.replace('_', '-')}"
            command = shlex.join(["holdfast", "runs", "budget", str(self._context.folder), option])
        event = BudgetReached(
            action, use.limit, use.used, use.most, command, step=self.newest_step()
        )
        self._emit(event)
