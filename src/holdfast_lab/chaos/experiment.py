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
from holdfast.elastic.protocol.fault_orders import RECOVERY_POINTS, FaultOrder, FaultOrders
from holdfast.events import FaultInjected, NonFinite, WorkerLost
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_location import bucket_of_run, store_of_run
from holdfast_lab.chaos.actions import FAULT_ACTIONS, ChaosEnvironment, NotPossibleNowError
from holdfast_lab.chaos.catalog import FAULTS, FaultPart
from holdfast_lab.chaos.layouts import ChaosLayout
from holdfast_lab.chaos.results import NOT_RECOVERED, DisturbedRunReport, FaultResult
from holdfast_lab.chaos.run_driver import (
    POLL_S,
    RECOVERY_TIMEOUT_S,
    STEPS_AFTER_LAST_FAULT,
    JournalView,
    RunDriver,
    RunStuckError,
)
from holdfast_lab.chaos.schedule import Draw, why_unfit

HIT_TIMEOUT_S = 20.0  # seconds within which the chosen worker has to reach its point
ORDERS_PER_FAULT = 10  # numbers of a fault's orders


class FaultTrigger:
    """Makes faults happen in a run, inside its workers by orders and outside them by actions, and
    sees to it that the journal names each."""

    def __init__(
        self,
        environment: ChaosEnvironment,
        fault_orders: FaultOrders,
        driver: RunDriver,
        report: DisturbedRunReport,
    ) -> None:
        self._environment, self._fault_orders = environment, fault_orders
        self._driver, self._report = driver, report
        self._writers: dict[int, JournalWriter] = {}

    def inject(self, number: int, draw: Draw, step: int) -> FaultResult | None:
        """None: its moment never came."""
        first, generation = number * ORDERS_PER_FAULT, self._driver.view.generation
        for index, (part, point) in enumerate(zip(draw.fault.parts, draw.points, strict=True)):
            late = point in RECOVERY_POINTS
            if index and part.is_outside and not late:
                continue  # done with the first
            self._fault_orders.arm(
                FaultOrder(
                    first + index,
                    draw.fault.name,
                    "wait" if part.is_outside else part.action,
                    point,
                    0 if late else step,
                    draw.pick_number + index,
                    generation if late or part.on_later_attempt else 0,
                )
            )
        self._driver.open_gate(step)
        hit = self._wait_for_hit(first, step)
        if hit is None:
            for index in range(len(draw.points)):
                self._fault_orders.disarm(first + index)
            self._report.reject(number, draw, f"no rank came to {draw.points[0]} in step {step}")
            return None
        done = FaultResult(number, draw.fault.name, draw.points[0], step, hit, generation)
        for index, (part, point) in enumerate(zip(draw.fault.parts, draw.points, strict=True)):
            later = first + index if point in RECOVERY_POINTS else first
            if part.is_outside and (later == first or self._is_hit_in_time(later)):
                self.act_outside(part, draw, later, index, done)
        return done

    def _is_hit_in_time(self, number: int) -> bool:
        with suppress(RunStuckError):
            self._driver.wait_until(
                lambda: self._fault_orders.read_hit(number) is not None, "it", HIT_TIMEOUT_S
            )
            return True
        return False

    def _wait_for_hit(self, number: int, step: int) -> str | None:
        """Return the process that was about to break, as the journal names it; None if there was
        none."""
        begun = time.monotonic()

        def due() -> bool:
            return self._fault_orders.read_hit(number) is not None or self._driver.view.step > step

        with suppress(RunStuckError):
            self._driver.wait_until(due, "the fault", HIT_TIMEOUT_S)
        hit = self._fault_orders.read_hit(number)
        if hit is None:
            return None
        if self._is_journaled(number, begun + 1.0):
            record = self._driver.view.injected[number]
            assert isinstance(record.event, FaultInjected)
            return record.event.target
        self._journal_fault(number, "", f"rank {hit.rank}", "", hit.step, hit.generation)
        return f"rank {hit.rank}"

    def _is_journaled(self, number: int, until: float) -> bool:
        """Return True if the worker's own record comes into the journal in time. Otherwise the copy
        written next to its order is put there."""
        while time.monotonic() < until:
            if number in self._driver.watcher.read_new().injected:
                return True
            time.sleep(POLL_S)
        return False

    def act_outside(
        self, part: FaultPart, draw: Draw, number: int, index: int, result: FaultResult
    ) -> None:
        hit = self._fault_orders.read_hit(number)
        alive = sorted(
            set(self._environment.fleet.alive_nodes)
            & set(self._driver.view.nodes) - self._driver.nodes_expected_back
        )
        aimed = "" if index else draw.target
        try:
            if not (aimed or alive):
                raise NotPossibleNowError("no node is there")
            node = aimed or alive[draw.pick_number % len(alive)]
            deed = FAULT_ACTIONS[part.action](self._environment, node)
        except (NotPossibleNowError, KeyError, OSError) as error:
            result.outcome = f"not done: {error}"
        else:
            self._driver.nodes_expected_back |= set(deed.nodes_to_restart)
            if deed.heal is not None:
                self._driver.expect_repair(deed)
            result.target = f"{result.target}, {deed.target}" if index else deed.target
            if hit is not None and not part.action.startswith("run-store"):
                point = (
                    result.point
                    if number == result.number * ORDERS_PER_FAULT
                    else draw.points[index]
                )
                self._journal_fault(
                    number, draw.fault.name, deed.target, point, hit.step, hit.generation
                )
        finally:
            self._fault_orders.mark_done(number)

    def _journal_fault(
        self, number: int, fault: str, target: str, point: str, step: int, generation: int
    ) -> None:
        """Into the journal, as a writer of our own."""
        writer = self._writers.get(generation)
        if writer is None:
            writer = JournalWriter(store_of_run(self._environment.real_folder), "chaos", generation)
            self._writers[generation] = writer
        writer.emit(FaultInjected(number, fault, target, point, step=step))
        writer.flush()


# --- the experiment -------------------------------------------------------------------------------
NODE_RETURN_TIMEOUT_S = 60.0
JOURNAL_EVIDENCE_TIMEOUT_S = 5.0
"""Seconds within which the journal shows a fault's result, once the run continues."""
MAX_REJECTED_IN_A_ROW = 1000  # draws rejected in a row, after which no more are made
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
            count = len(self.report.faults)
            self._say(
                f"{count:3d}  {done.fault:<17} {done.point:<10} step {done.step:<4} "
                f"{done.target:<22} {done.outcome} {done.seconds:.2f} s"
            )
        if draw.waits_for_nodes:
            self._await_nodes()
        return True

    def _step_for(self, draw: Draw) -> int:
        if draw.step:
            return draw.step
        step = max(self.view.step + draw.gap, self._driver.gate_step + 1)
        every = self._save_interval_steps if draw.fault.needs_save_step else 1
        return -(-step // every) * every

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
