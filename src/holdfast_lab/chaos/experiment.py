"""One run that is disturbed, from the first step to the last.

    gate opens to the step that is due --> a worker reaches the named point, says so --> it happens
        ^                                                                                   |
        |                                                                                   v
        '---- steps in between, nodes come back <---- steps are done in a new generation <--'

Workers wait at a gate before each step (`elastic/worker/fault_injection.py`). So a fault finds the
step for which it was drawn, and runs need no more steps than faults require. A process that ends is
started again by the same command, as a scheduler would. Nothing else is done for the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.elastic.protocol.fault_orders import RECOVERY_POINTS, FaultOrders
from holdfast.events import NonFinite, WorkerLost
from holdfast.wire.store.run_location import bucket_of_run, store_of_run
from holdfast_lab.chaos.actions import ChaosEnvironment
from holdfast_lab.chaos.catalog import FAULTS
from holdfast_lab.chaos.injection import HIT_TIMEOUT_S, ORDERS_PER_FAULT, FaultTrigger
from holdfast_lab.chaos.layouts import ChaosLayout
from holdfast_lab.chaos.results import NOT_RECOVERED, DisturbedRunReport, FaultResult
from holdfast_lab.chaos.run_driver import (
    RECOVERY_TIMEOUT_S,
    STEPS_AFTER_LAST_FAULT,
    JournalView,
    RunDriver,
    RunStuckError,
)
from holdfast_lab.chaos.schedule import Draw, why_unfit

NODE_RETURN_TIMEOUT_S = 60.0
JOURNAL_EVIDENCE_TIMEOUT_S = 5.0
"""Seconds within which the journal shows a fault's result, once the run continues."""
MAX_REJECTED_IN_A_ROW = 1000
"""Draws rejected in a row, after which no more are made."""
_LETHAL_ACTIONS = ("kill", "exit", "stop", "hang", "hang inside", "hold the GIL")


class Experiment:
    """Drives one run. steps: of the run, saves_every: from one durable state to the next (0: by
    time); wanted: faults that are to count."""

    def __init__(
        self,
        environment: ChaosEnvironment,
        fault_orders: FaultOrders,
        layout: ChaosLayout,
        nodes: list[str],
        steps: int,
        say: Callable[[str], None],
        save_interval_steps: int = 0,
    ) -> None:
        self._environment, self._fault_orders, self._layout = environment, fault_orders, layout
        self._nodes, self._steps, self._say = nodes, steps, say
        self._save_interval_steps = max(1, save_interval_steps)
        self.report = report = DisturbedRunReport()
        self._driver = RunDriver(environment, fault_orders, steps, report.unexpected_ends)
        self._trigger = FaultTrigger(environment, fault_orders, self._driver, report)

    @property
    def view(self) -> JournalView:
        return self._driver.view

    # --- one run ----------------------------------------------------------------------------------
    def run(self, draws: Iterator[Draw], wanted_faults: int, deadline: float) -> DisturbedRunReport:
        """Disturb the run until it is over. Problems are noted in the story."""
        try:
            self._driver.open_gate(1)
            self._environment.fleet.start(*self._nodes)
            self._driver.wait_until(lambda: self.view.step >= 1, "the first step")
            self._inject_faults(draws, wanted_faults, deadline)
            self._await_nodes()
            self._driver.open_gate(self._steps)
            self._driver.wait_until(
                lambda: self._driver.is_over, "the end of the run", 2 * RECOVERY_TIMEOUT_S
            )
        except RunStuckError as error:
            self.report.problem = str(error)
        self._check_attribution()
        return self.report

    def _inject_faults(self, draws: Iterator[Draw], wanted_faults: int, deadline: float) -> None:
        """Fault after fault, as long as there is room."""
        story, vain = self.report, 0
        for number, draw in enumerate(draws, 1):
            if len(story.faults) >= wanted_faults:
                return
            rejected = len(story.rejected_draws)
            if time.monotonic() > deadline:
                story.cut = "its time was over"
            elif vain >= MAX_REJECTED_IN_A_ROW:
                story.cut = f"{vain} draws in a row were rejected"
            elif not self._try_draw(number, draw):
                story.cut = "its steps were used up"
            if story.cut:
                self._say(f"     no more faults: {story.cut}")
                return
            vain = vain + 1 if len(story.rejected_draws) > rejected else 0
        if len(story.faults) < wanted_faults:
            story.cut = "nothing was left to draw"

    def _check_attribution(self) -> None:
        """At the end: who lost a worker tells of it when it comes to that."""
        records = self._driver.watcher.read_new().records
        lost = {  # workers killed because they did not halt on request were not named
            r.event.pid
            for r in records
            if isinstance(r.event, WorkerLost) and r.event.noticed_by != "halt"
        }
        bad = {(r.event.step, r.event.rank) for r in records if isinstance(r.event, NonFinite)}
        for done in self.report.faults:
            hit = self._fault_orders.read_hit(done.number * ORDERS_PER_FAULT)
            deed = FAULTS[done.fault].parts[0].action
            if hit is not None and deed in _LETHAL_ACTIONS:
                done.named = hit.pid in lost
            elif hit is not None and deed == "not finite":
                done.named = (hit.step, hit.rank) in bad

    def _try_draw(self, number: int, draw: Draw) -> bool:
        """Whether there is room for another fault."""
        network = None if self._environment.network is not None else "the nodes have no network"
        in_bucket = bool(bucket_of_run(self._environment.real_folder))
        why = why_unfit(draw.fault, self._layout, network, in_bucket=in_bucket)
        if why := why or self._wait_until_possible(draw):
            self.report.reject(number, draw, why)
            return True
        step = self._step_for(draw)
        if step > self._steps - STEPS_AFTER_LAST_FAULT:
            return False
        if step <= max(self.view.step, self._driver.gate_step):
            self.report.reject(number, draw, "its step had begun")
            return True
        self._driver.open_gate(step - 1)
        self._driver.wait_until(lambda: self.view.step >= step - 1, f"step {step - 1}")
        done = self._trigger.inject(number, draw, step)
        if done is None:
            return True
        self.report.faults.append(done)
        try:
            self._wait_for_recovery(number, draw, done)
        except RunStuckError:
            done.outcome = NOT_RECOVERED
            raise
        finally:
            self._print_result(done)
        if draw.waits_for_nodes:
            self._await_nodes()
        return True

    def _step_for(self, draw: Draw) -> int:
        if draw.step:
            return draw.step
        step = max(self.view.step + draw.gap, self._driver.gate_step + 1)
        every = self._save_interval_steps if draw.fault.needs_save_step else 1
        return -(-step // every) * every

    def _print_result(self, result: FaultResult) -> None:
        count = len(self.report.faults)
        self._say(
            f"{count:3d}  {result.fault:<17} {result.point:<10} step {result.step:<4} "
            f"{result.target:<22} {result.outcome} {result.seconds:.2f} s"
        )

    def _wait_until_possible(self, draw: Draw) -> str | None:
        """Wait for returning nodes until the fault applies; return why it does not, or None."""
        end = time.monotonic() + HIT_TIMEOUT_S
        while (why := self._why_not_now(draw)) and time.monotonic() < end:
            self._driver.tick()
        return why

    def _why_not_now(self, draw: Draw) -> str | None:
        alive = [node for node in self._environment.fleet.alive_nodes if node in self.view.nodes]
        if len(alive) < draw.fault.nodes:
            return f"it needs {draw.fault.nodes} nodes, and {len(alive)} take part"
        if self.view.world < draw.fault.ranks:
            return f"it needs {draw.fault.ranks} ranks, and there are {self.view.world}"
        deeds = [part.action for part in draw.fault.parts]
        last = "everything" in deeds or (deeds.count("agent") > 1 and self._layout.has_shared_state)
        if last and not list_commits(store_of_run(self._environment.real_folder)):
            return "whoever holds a part may go with all of it, and there is no checkpoint yet"
        return None

    # --- what comes of it -------------------------------------------------------------------------
    def _wait_for_recovery(self, number: int, draw: Draw, result: FaultResult) -> None:
        if result.outcome:
            return
        view = self.view
        when = self._fault_orders.hit_time(number * ORDERS_PER_FAULT)

        def recovered() -> bool:
            reached = max(
                (step for g, step in view.reached_steps.items() if g > result.generation), default=0
            )
            if draw.fault.needs_new_generation:
                return view.generation > result.generation and (
                    reached >= result.step or (reached == 0 and view.start_step >= result.step)
                )
            return view.step >= result.step

        if not draw.fault.needs_new_generation:  # something is to be done while it lasts
            self._driver.open_gate(min(result.step + 2, self._steps - STEPS_AFTER_LAST_FAULT))
        self._driver.wait_until(
            recovered,
            f"recovery from fault {number}, {result.fault} at {result.point} of "
            f"step {result.step} ({result.target})",
        )
        result.seconds = round(time.time() - when, 3)
        last = draw.points[-1]
        second = len(draw.points) > 1 and (
            not draw.fault.parts[1].is_outside or last in RECOVERY_POINTS
        )
        if second and self._fault_orders.read_hit(number * ORDERS_PER_FAULT + 1) is None:
            self._fault_orders.disarm(number * ORDERS_PER_FAULT + 1)
            result.outcome = f"second part missed ({last})"
        elif draw.fault.expected_events and not self._has_evidence(
            number, draw.fault.expected_events
        ):
            result.outcome = f"came to nothing (no {' or '.join(draw.fault.expected_events)})"
        else:
            result.outcome = "recovered"
        self._driver.finish_repairs()

    def _has_evidence(self, number: int, kinds: Sequence[str]) -> bool:
        """Whether the journal comes to say what such a fault makes it say."""
        with suppress(RunStuckError):
            self._driver.wait_until(
                lambda: self.view.has_since(
                    number * ORDERS_PER_FAULT, lambda event: event.kind in kinds
                ),
                "it",
                JOURNAL_EVIDENCE_TIMEOUT_S,
            )
            return True
        return False

    def _await_nodes(self) -> None:
        end = time.monotonic() + NODE_RETURN_TIMEOUT_S
        while away := sorted(set(self._nodes) - set(self.view.nodes)):
            if time.monotonic() > end:
                note = (
                    f"{', '.join(away)} had not come back after {NODE_RETURN_TIMEOUT_S:.0f} s, "
                    f"at step "
                    f"{self.view.step}"
                )
                self.report.notes.append(note)
                self._say(f"     {note}")
                return
            self._driver.tick()
