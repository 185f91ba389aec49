"""The leader's duties for one run, apart from the coordinator itself.

plan, begin   Plan each generation and start it (`elastic/coordinator/generation_planner.py`).
              End the run if it failed, must stop, or has no state to begin from.
gathering     Report that there are too few nodes, and wait as the run file says.
ledger        Add entries that lost workers never sent (`elastic/coordinator/ledger_repair.py`).
end           Write the run's result into the journal (`elastic/run_result.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.generation_planner import GenerationPlanner, PlannerContext
from holdfast.elastic.coordinator.generation_store import start_term
from holdfast.elastic.coordinator.ledger_repair import LedgerCoverage, LedgerRepair
from holdfast.elastic.coordinator.stragglers import worker_of
from holdfast.elastic.event_log import EventLog, Say
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.coordinator_messages import NodeReport
from holdfast.elastic.protocol.generation_outcome import FailedOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord, read_record
from holdfast.elastic.protocol.start_state import StartState
from holdfast.elastic.run_context import RunContext
from holdfast.elastic.run_result import (
    EndReason,
    ResultReporter,
    RunEndedError,
    RunResult,
    run_result,
)
from holdfast.errors import (
    CheckpointError,
    CorruptError,
    HoldfastError,
    RunFolderError,
    UserError,
)
from holdfast.events import CheckpointRejected, RunStarted, WorkerPaced
from holdfast.plan.interface import Planner
from holdfast.policy.detection.stragglers import Pace, PaceChange
from holdfast.policy.membership import transitions
from holdfast.policy.membership.restart_budget import RestartHistory, why_give_up
from holdfast.policy.membership.transitions import (
    CoordinatorState,
    MembershipRules,
    NodeRecord,
    Phase,
)
from holdfast.wire.journal import JournalTail as JournalFollower
from holdfast.wire.store.run_store import MissingKeyError
from holdfast.wire.term import Term, newest_generation

MISSED_HEARTBEATS_UNTIL_LOST = 3
UNREACHABLE_PAIR_RETRY_HEARTBEATS = 30
"""Heartbeats until two nodes that did not reach each other are tried together again."""
ALL_NODES_LEAVING_REASON = "all nodes were told to go"
BAD_STEP_REASONS = ("non_finite", "loss_jump")
"""Reasons that `policy.detection.bad_steps` limits, not the restart budget."""


@dataclass(frozen=True)
class AgentHooks:
    """Functions of the agent that the run controller uses.

    rendezvous_address: the rendezvous address of a generation's workers. ensure_mover: makes sure
    that a mover runs, which chooses the restore point. on_generation_created: receives the number
    of each generation whose object was made. newest_generation: returns the newest generation known
    here. stop_reason: returns why all of the run must stop, "" while it continues. committed_step:
    returns the newest committed step."""

    rendezvous_address: str
    ensure_mover: Callable[[], Awaitable[None]]
    on_generation_created: Callable[[int], None]
    newest_generation: Callable[[], int]
    stop_reason: Callable[[], str]
    committed_step: Callable[[], int]


class RunController:
    """The run controller of one agent. Lives in one event loop."""

    def __init__(
        self,
        context: RunContext,
        hooks: AgentHooks,
        planner: Planner,
        mover: MoverSupervisor,
        event_log: EventLog,
        say: Say,
        ledger_coverage: LedgerCoverage,
    ) -> None:
        """ledger_coverage: observes all events of the event log if the run has one node only."""
        self.coordinator: Coordinator | None = None
        self.term: Term | None = None
        self.restored_step = 0
        """The step of the newest checkpoint that a generation has begun from."""
        self.result_reporter = ResultReporter(event_log, say, context.resume_command)
        self._context, self._hooks, self._layout_planner, self._mover = (
            context,
            hooks,
            planner,
            mover,
        )
        self._event_log, self._say, self._ledger_coverage = event_log, say, ledger_coverage
        self._ledger_repair = LedgerRepair(
            ledger_coverage, event_log, say, context.config.cluster.heartbeat_seconds
        )
        self._journal_tail = JournalFollower(context.store)
        self._generation_planner: GenerationPlanner | None = None
        self._restarts, self._last_counted_loss = RestartHistory(), 0
        self._is_resumed = False
        self._known_generation_floor: int | None = None
        self._has_logged_start = False  # this session's start is in the journal
        self._closing_reason = ""  # why the next generation is the last
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    @property
    def is_ledger_repair_pending(self) -> bool:
        """True if the ledger may lack entries: no snapshot is announced before them."""
        return self._context.single_node_term is not None and self._ledger_repair.is_pending

    def close(self) -> None:
        """Stop, because the agent ends; ignore what its coordinator still observes."""
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()

    # --- a term begins --------------------------------------------------------------------------
    async def lead_term(self, term: Term) -> Coordinator:
        it, cluster = self._context, self._context.config.cluster
        self.term, alone = term, self._context.single_node_term is not None
        newest = await asyncio.to_thread(newest_generation, it.store)
        above = await self._generation_floor()
        lead = self._generation_planner = GenerationPlanner(
            PlannerContext(
                it.config,
                self._layout_planner,
                self._mover,
                self._hooks.rendezvous_address,
                lambda event: self._event_log.emit("agent", event),
                self._on_generation_created,
                self._newest_durable_step,
                alone,
                self._exclude_slow,
                partial(self._event_log.emit_in_generation, f"term{term.number}"),
            )
        )
        self._is_resumed = newest > 0
        if newest:
            with suppress(MissingKeyError, CorruptError):  # a store that is away is asked again
                lead.load_record(await read_record(it.store, newest), alone)
        self._ledger_coverage.skips = lead.bad_steps.skips
        if newest and not alone:
            self._say(f"{it.node} coordinates the run (term {term.number})")
        rules = MembershipRules(
            self.select_nodes,
            MISSED_HEARTBEATS_UNTIL_LOST * cluster.beat_seconds,
            cluster.gather_seconds,
            cluster.settle_seconds,
            retry_pair_after_s=UNREACHABLE_PAIR_RETRY_HEARTBEATS * cluster.beat_seconds,
            is_full=lead.is_full,
            can_add_workers=lead.can_add_workers,
        )
        self.coordinator = await start_term(
            term,
            it.store,
            rules,
            self._plan_generation,
            self._make_start_state,
            on_state_change=self._on_state_change,
            complain=self._say,
            generation_floor=above,
            wait_for_members=not alone,
            on_creation_refused=self._on_creation_refused,
        )
        self.coordinator.on_pace_change = self._on_pace_change
        if self.coordinator.state.phase is Phase.GATHERING and not alone:
            self._start_task("wait", self._wait_for_nodes(cluster.gather_seconds))
        return self.coordinator

    async def _generation_floor(self) -> int:
        """Return the generation that the next one must exceed. Raises RunEndedError.

        It is looked up once in a session: an agent that took part knows the run's generations."""
        if self._hooks.newest_generation():
            return 0
        if self._known_generation_floor is None:
            try:
                self._known_generation_floor = await asyncio.to_thread(
                    self._context.generation_floor
                )
            except UserError as error:
                raise RunEndedError(str(error), EndReason.USER_ERROR) from error
        return self._known_generation_floor

    def _on_creation_refused(self, error: UserError) -> None:
        """End a run of one node that cannot begin; one that has begun waits for its store."""
        if self._context.single_node_term is not None and not self._has_logged_start:
            raise RunEndedError(str(error), EndReason.USER_ERROR) from error

    def _newest_durable_step(self) -> int:
        keys = list_commits(self._context.store)
        return step_of(keys[0]) if keys else 0

    def _on_generation_created(self, generation: int) -> None:
        """Note a generation whose object this agent made, and emit the start of a session.

        If this agent took part before it led, or other nodes did, an earlier session continues."""
        begins = (
            self._generation_planner is not None
            and self._generation_planner.is_session_start
            and self._hooks.newest_generation() == 0
        )
        self._hooks.on_generation_created(generation)
        if not self._has_logged_start and begins:
            it = self._context
            self._event_log.emit(
                "agent",
                RunStarted(it.config.name, it.config_hash, it.dataset_version, self._is_resumed),
            )
        self._has_logged_start = self._is_resumed = True

    # --- a generation ---------------------------------------------------------------------------
    async def _plan_generation(
        self,
        state: CoordinatorState,
        generation: int,
        node_names: frozenset[str],
        node_reports: Mapping[str, NodeReport],
    ) -> GenerationRecord:
        """Return the record of the next generation. Raises RunEndedError if there must be none."""
        assert self._generation_planner is not None
        raise_if_failed(node_reports.values())
        ended = [outcome.lost for outcome in self._generation_planner.last_outcomes(node_reports)]
        losses = [loss for loss in ended if loss is not None]
        cause = next((loss.cause for loss in losses if loss.cause), "")
        why = self._hooks.stop_reason()
        if not self._closing_reason and transitions.are_all_leaving(state, node_names):
            self._closing_reason = ALL_NODES_LEAVING_REASON
        if cause and why and not self._closing_reason:
            raise RunEndedError(f"{why}; lost while saving: {cause}", EndReason.STOPPED)
        await self._ensure_mover(generation)
        tried = set(self._generation_planner.rejected_checkpoints)
        rotten = self._generation_planner.reject_corrupt_checkpoint(node_reports)
        reason = next((loss.reason for loss in losses if loss.reason), state.reason)
        lost = state.reason in ("worker_lost", "halted")
        record = await self._generation_planner.plan_generation(
            state, generation, node_names, node_reports
        )
        if rotten is not None:  # each corrupt state is dropped once, so this ends
            for key in (
                self._generation_planner.rejected_checkpoints.keys() - tried
            ):  # an earlier attempt reported the rest
                why = self._generation_planner.rejected_checkpoints[key]
                self._event_log.emit("agent", CheckpointRejected(key, why, step=step_of(key)))
                self._say(f"{rotten}; the run falls back to another state")
        elif (
            lost
            and reason not in BAD_STEP_REASONS
            and (sentence := self._count_loss(generation, cause))
        ):
            raise RunEndedError(sentence)
        return replace(
            record, reason=reason if lost else state.reason, stopping=self._closing_reason
        )

    async def _ensure_mover(self, generation: int) -> None:
        """Start the mover if needed; a failed start is retried as often as any other loss."""
        try:
            await self._hooks.ensure_mover()
        except RunFolderError as error:  # a missing folder does not count as a lost mover
            self._on_creation_refused(error)
            raise
        except HoldfastError as error:
            self._last_counted_loss = 0
            if sentence := self._count_loss(generation, str(error)):
                raise RunEndedError(sentence) from error
            raise

    def _count_loss(self, generation: int, cause: str) -> str | None:
        """Count one more loss of a worker; return a sentence if the run must give up."""
        assert self._generation_planner is not None
        if generation > self._last_counted_loss:  # retries of an unreachable run store count once
            self._last_counted_loss = generation
            reached = max(self._generation_planner.reached_step, self._hooks.committed_step())
            self._restarts = self._restarts.with_loss(reached)
        limit = self._context.config.cluster.max_restarts_without_progress
        return why_give_up(self._restarts, limit, cause or "not known")

    async def _make_start_state(self, generation: int, record: GenerationRecord) -> StartState:
        assert self._generation_planner is not None
        self._ledger_repair.is_pending = record.came_from is not None
        self._ledger_coverage.skips = self._generation_planner.bad_steps.skips
        try:
            begun = await self._generation_planner.make_start_state(generation, record)
        except CheckpointError as error:
            raise RunEndedError(str(error), EndReason.NO_USABLE_STATE) from error
        except UserError as error:
            if self._context.single_node_term is None:
                raise
            raise RunEndedError(str(error), EndReason.USER_ERROR) from error
        newest = begun.restore_point
        if newest is not None and newest.durable:
            self.restored_step = begun.step
        await self._event_log.flush()
        return begun

    def _exclude_slow(self, node_name: str) -> bool:
        """Leave a node out if the remaining nodes suffice; return True if they do."""
        return self.coordinator is not None and self.coordinator.exclude_slow(node_name)

    # --- slow workers ---------------------------------------------------------------------------
    def _on_pace_change(self, changes: Sequence[PaceChange]) -> None:
        """Give a slow worker fewer microbatches from the next generation on, or none at all."""
        coordinator, lead = self.coordinator, self._generation_planner
        assert coordinator is not None
        assert lead is not None
        for change in changes:
            node, pid = worker_of(change)
            self._event_log.emit(
                "agent",
                WorkerPaced(
                    node,
                    pid,
                    change.after,
                    round(change.slowdown, 2),
                    change.reason,
                    step=lead.reached_step,
                ),
            )
            if change.after is Pace.TRIAL:
                coordinator.readmit(node)
            elif coordinator.stragglers.is_node_excluded(node):
                coordinator.exclude_slow(node)
        before, lead.relative_speeds = lead.relative_speeds, coordinator.stragglers.relative_speeds
        if before != lead.relative_speeds:
            coordinator.halt("slow_worker", at_step_end=True)

    # --- changes of the coordinator's state -----------------------------------------------------
    def _on_state_change(self, old: CoordinatorState, new: CoordinatorState) -> None:
        if self._is_closed:
            return
        if self._generation_planner is not None:
            self._generation_planner.report_lost_ranks(new)
        if new.phase is Phase.ENDED and self._hooks.newest_generation():
            self.result_reporter.write_event(self.build_result(new.end_reason).event)
        if new.phase is Phase.TRAINING and old.phase is not Phase.TRAINING:
            self._start_task("told", self._repair_ledger())
        if new.phase is Phase.GATHERING and old.phase is not Phase.GATHERING:
            self._start_task("wait", self._wait_for_nodes())
        elif new.phase is not Phase.GATHERING and "wait" in self._tasks:
            self._tasks.pop("wait").cancel()

    def _start_task(self, name: str, coroutine: Any) -> None:
        if name in self._tasks:
            self._tasks[name].cancel()
        self._tasks[name] = asyncio.create_task(coroutine)

    async def _repair_ledger(self) -> None:
        """Repair the ledger once every worker of the generation has sent its entries.

        Entries that are still missing up to the start step belonged to lost workers."""
        if self._context.single_node_term is not None:
            await self._ledger_repair.repair()
            return
        await self._event_log.flush()
        try:
            for record in await asyncio.to_thread(self._journal_tail.read_new):
                self._ledger_coverage.observe(record.event)
            missing = self._ledger_coverage.find_missing()
            for event in (
                await asyncio.to_thread(self._ledger_coverage.make_entries, missing)
                if missing
                else ()
            ):
                self._event_log.emit("agent", event)
        except HoldfastError as error:
            self._say(f"the ledger entries of a lost node cannot be rebuilt: {error}")
        self._ledger_coverage.mark_complete()

    def build_result(self, end_message: str) -> RunResult:
        """Return the run's result from all nodes' reports; this node may have had no part."""
        coordinator = self.coordinator
        known = () if coordinator is None else coordinator.node_reports.values()
        told = [one.node_outcome.done for one in known if one.node_outcome is not None]
        ends = [done for done in told if done is not None]
        kind = "" if coordinator is None else coordinator.end_reason
        why = self._closing_reason or self._hooks.stop_reason() or "the workers left"
        return run_result(end_message, kind, ends, why, self._hooks.committed_step())

    # --- too few nodes --------------------------------------------------------------------------
    def select_nodes(self, nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
        """Return the nodes that a generation would use; () if none is possible."""
        assert self._generation_planner is not None
        least = (
            1
            if self._closing_reason or self._context.single_node_term
            else self._context.config.cluster.min_nodes
        )
        return self._generation_planner.select_nodes(nodes) if len(nodes) >= least else ()

    async def _wait_for_nodes(self, notice_delay_s: float = 0.0) -> None:
        """Report after `notice_delay_s` what is lacking; then wait for it, or stop the run."""
        await asyncio.sleep(notice_delay_s)
        coordinator, cluster = self.coordinator, self._context.config.cluster
        assert coordinator is not None, "nodes gather only once a coordinator exists"
        try:
            raise_if_failed(coordinator.node_reports.values())
        except RunEndedError as error:
            coordinator.finish(str(error), error.reason)
            return
        if (why := self._hooks.stop_reason()) or cluster.below_minimum == "leave":
            patience = 0.0 if why else cluster.below_minimum_seconds
            if not why:
                self._say(
                    f"{self._describe_shortage()}; leaving in {patience:g} s if no node joins"
                )
            await asyncio.sleep(patience)
            self.stop_waiting(why or f"{self._describe_shortage()}, for {patience:g} s")
        else:
            self._say(f"{self._describe_shortage()}; waiting for more")

    def _describe_shortage(self) -> str:
        assert self.coordinator is not None
        nodes, least = self.coordinator.state.nodes, self._context.config.cluster.min_nodes
        if len(nodes) < least:
            return f"{len(nodes)} of at least {least} nodes (cluster.min_nodes) are here"
        return f"no layout fits the {sum(n.places for n in nodes)} places that are here"

    def stop_waiting(self, reason: str) -> None:
        """Stop the run if no node works: wait for no further node.

        One last generation of the present nodes saves their state. If none is possible, the run is
        over."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.state.phase is not Phase.GATHERING:
            return
        self._closing_reason = reason
        if self._hooks.newest_generation():  # before that, no node holds any state
            coordinator.reevaluate()
        if coordinator.state.phase is Phase.GATHERING:
            kind = EndReason.STOPPED if self._hooks.stop_reason() else EndReason.TOO_FEW
            coordinator.finish(reason, kind)


def raise_if_failed(known: Iterable[NodeReport]) -> None:
    """Raises RunEndedError if a node's workers failed in a way that a restart would not fix."""
    for one in known:
        ending = None if one.node_outcome is None else one.node_outcome.ending
        if isinstance(ending, FailedOutcome) and ending.sentence:
            kinds = {
                exit_codes.USER_ERROR: EndReason.USER_ERROR,
                exit_codes.FENCED: EndReason.FENCED,
            }
            raise RunEndedError(ending.sentence, kinds.get(ending.exit_code, EndReason.FAILED))
