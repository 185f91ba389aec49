"""One fault, from its orders to the moment at which it happens."""

from __future__ import annotations

import time
from contextlib import suppress

from holdfast.elastic.protocol.fault_orders import RECOVERY_POINTS, FaultOrder, FaultOrders
from holdfast.events import FaultInjected
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_location import store_of_run
from holdfast_lab.chaos.actions import FAULT_ACTIONS, ChaosEnvironment, NotPossibleNowError
from holdfast_lab.chaos.catalog import FaultPart
from holdfast_lab.chaos.results import DisturbedRunReport, FaultResult
from holdfast_lab.chaos.run_driver import POLL_S, RunDriver, RunStuckError
from holdfast_lab.chaos.schedule import Draw

HIT_TIMEOUT_S = 20.0
"""Seconds within which the chosen worker has to reach its point."""
ORDERS_PER_FAULT = 10
"""Numbers of a fault's orders."""


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
