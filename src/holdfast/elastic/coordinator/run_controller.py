"""The leader's duties for one run, apart from the coordinator itself.

plan, begin   Plan each generation and start it (`elastic/coordinator/generation_planner.py`).
              End the run if it failed, must stop, or has no state to begin from.
gathering     Report that there are too few nodes, and wait as the run file says.
ledger        Add entries that lost workers never sent (`elastic/coordinator/ledger_repair.py`).
end           Write the run's result into the journal (`elastic/run_result.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.config.sections.cluster import ClusterConfig
from holdfast.elastic.coordinator.agent_hooks import AgentHooks
from holdfast.elastic.coordinator.coordinator import Coordinator, PlanOutdatedError
from holdfast.elastic.coordinator.generation_planner import GenerationPlanner, PlannerContext
from holdfast.elastic.coordinator.generation_store import start_term
from holdfast.elastic.coordinator.ledger_repair import LedgerCoverage, LedgerRepair
from holdfast.elastic.coordinator.node_faults import NodeFaults
from holdfast.elastic.coordinator.node_shortage import NodeShortage
from holdfast.elastic.coordinator.stragglers import worker_of
from holdfast.elastic.event_log import EventLog, Say
from holdfast.elastic.node.mover_supervisor import MoverSupervisor
from holdfast.elastic.protocol.coordinator_messages import JoinRequest, NodeReport, StartState
from holdfast.elastic.protocol.generation_outcome import LostOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord, read_record
from holdfast.elastic.run_context import RunContext
from holdfast.elastic.run_result import (
    EndReason,
    ResultReporter,
    RunEndedError,
    RunResult,
    run_result,
    saved_sentence,
)
from holdfast.errors import CheckpointError, CorruptError, HoldfastError, RunFolderError, UserError
from holdfast.events import CheckpointRejected, Event, GenerationStarted, RunStarted, WorkerPaced
from holdfast.layout import Topology
from holdfast.plan.placing.interface import Planner
from holdfast.policy.detection.stragglers import Pace, PaceChange
from holdfast.policy.membership import transitions
from holdfast.policy.membership.node_identity import LikeProcessors, NodeIdentity, judge_joiner
from holdfast.policy.membership.queries import is_staying
from holdfast.policy.membership.restart_budget import RestartHistory, why_give_up
from holdfast.policy.membership.state import node_timeout_s
from holdfast.policy.membership.transitions import (
    CoordinatorState,
    MembershipRules,
    NodeRecord,
    Phase,
    SelectNodes,
)
from holdfast.wire.journal import JournalTail as JournalFollower
from holdfast.wire.store.run_store import MissingKeyError, RunStore
from holdfast.wire.term import Term, newest_generation

UNREACHABLE_PAIR_RETRY_HEARTBEATS = 30
"""Heartbeats until two nodes that did not reach each other are tried together again."""
LAST_LEDGER_REPAIR_TIMEOUT_S = 30.0
"""Seconds that an agent whose run is over waits for a repair of the ledger."""
ALL_NODES_LEAVING_REASON = "all nodes were told to go"
BAD_STEP_REASONS = ("non_finite", "loss_jump")
"""Reasons that `policy.detection.bad_steps` limits, not the restart budget."""


def _emit_with_plan(
    log: EventLog,
    predict: Callable[[Topology, Mapping[str, str]], Event | None],
    planner: Callable[[], GenerationPlanner | None],
    say: Say,
    event: Event,
) -> None:
    """Emit an event. After the start of a generation, emit what its plan predicts."""
    log.emit("agent", event)
    if not isinstance(event, GenerationStarted):
        return
    try:
        lead = planner()
        cores = {} if lead is None else lead.cores_by_node
        predicted = predict(Topology.from_json(event.topology), cores)
    except (UserError, ArithmeticError, LookupError, ValueError) as error:
        # A run does not end because its plan has a mistake.
        say(f"these workers have no predicted speed: {error!r}")
        return
    if predicted is not None:
        log.emit("agent", replace(predicted, step=event.step))


class LossCounter:
    """Counts losses of workers and movers, one for each generation, against the restart budget."""

    def __init__(self, limit: int, has_stepped: Callable[[], bool]) -> None:
        """limit: how many restarts in a row may pass without progress. has_stepped: whether a step
        was done in this session, so that a loss says nothing about the run's first step."""
        self._restarts, self._last_counted, self._limit = RestartHistory(), 0, limit
        self._has_stepped = has_stepped

    def count_next_again(self) -> None:
        """Count the next loss even if it is of a generation that was counted."""
        self._last_counted = 0

    def count(self, generation: int, reached_step: int, cause: str) -> str | None:
        """Count one more loss of a worker; return a sentence if the run must give up."""
        if generation > self._last_counted:  # retries of an unreachable run store count once
            self._last_counted = generation
            self._restarts = self._restarts.with_loss(
                reached_step, "" if self._has_stepped() else cause
            )
        return why_give_up(self._restarts, self._limit, cause or "not known")


class LastSave:
    """One more generation of a run that cannot continue: its workers save what they still hold."""

    def __init__(self, committed_step: Callable[[], int]) -> None:
        """committed_step: returns the newest step that has a checkpoint."""
        self.ending: RunEndedError | None = None
        """Why the run ends, once that generation is planned."""
        self._committed_step, self._generation = committed_step, 0

    def check(self, generation: int) -> None:
        """Raise the error with which the run ends if that generation failed as well."""
        if self.ending is not None and generation > self._generation:
            raise self.ending

    def plan(
        self, ending: RunEndedError, record: GenerationRecord, reached_step: int
    ) -> GenerationRecord:
        """Return the record of a generation that only saves.

        Raises `ending` if the newest state is saved already, or if no workers hold it."""
        saved = self._committed_step()
        if 0 < reached_step <= saved:
            raise RunEndedError(f"{ending}; {saved_sentence(saved)}", ending.reason)
        if record.came_from is None or record.topology is None or not reached_step:
            raise ending
        self.ending, self._generation = ending, record.topology.generation
        return replace(record, stopping=str(ending), end_reason=ending.reason)


class SessionStart:
    """The event that a session of the run begins, which is in the journal once."""

    def __init__(self, context: RunContext, event_log: EventLog) -> None:
        self.is_resumed = False
        """True if the run has had a generation before."""
        self.is_logged = False
        """True if this agent has made a generation in this session."""
        self._context, self._event_log = context, event_log

    def on_generation_created(self, begins: bool) -> None:
        """Note that this agent made a generation. begins: a session begins with it."""
        if not self.is_logged and begins:
            it = self._context
            self._event_log.emit(
                "agent",
                RunStarted(
                    it.config.name,
                    it.config_hash,
                    it.dataset_version,
                    self.is_resumed,
                    it.plan,
                    dict(it.config.tags),
                ),
            )
        self.is_logged = self.is_resumed = True


class GenerationFloor:
    """The generation that the run's next one must exceed, which is looked up once in a session."""

    def __init__(self, context: RunContext, hooks: AgentHooks) -> None:
        self._context, self._hooks = context, hooks
        self._known: int | None = None

    async def find(self) -> int:
        """Return the floor; 0 for an agent that took part, which knows the run's generations.

        Raises RunEndedError."""
        if self._hooks.newest_generation():
            return 0
        if self._known is None:
            try:
                self._known = await asyncio.to_thread(self._context.generation_floor)
            except UserError as error:
                raise RunEndedError(str(error), EndReason.USER_ERROR) from error
        return self._known


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
        self.result_reporter = ResultReporter(event_log, say, context.resume_command)
        self._context, self._hooks = context, hooks
        self._layout_planner, self._mover = planner, mover
        cluster = context.config.cluster
        self._event_log, self._say, self._ledger_coverage = event_log, say, ledger_coverage
        self._ledger_repair = LedgerRepair(
            ledger_coverage, event_log, say, cluster.heartbeat_seconds
        )
        self._journal_tail = JournalFollower(context.store)
        self._generation_planner: GenerationPlanner | None = None
        self._last_save = LastSave(hooks.committed_step)
        self._loss_counter = LossCounter(cluster.max_restarts_without_progress, hooks.has_stepped)
        self._session_start = SessionStart(context, event_log)
        self._generation_floor = GenerationFloor(context, hooks)
        self._leaving_reason = ALL_NODES_LEAVING_REASON
        self._node_shortage = NodeShortage(
            cluster, hooks, say, context.single_node_term is not None, self.select_nodes
        )
        self._join_gate = JoinGate(context.node, cluster.like_processors, hooks.identity, say)
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

    async def wait_for_ledger_repair(self) -> None:
        """Wait a while for a repair that is under way: the run is over, and no other follows."""
        if (task := self._tasks.get("told")) is not None:
            await asyncio.wait({task}, timeout=LAST_LEDGER_REPAIR_TIMEOUT_S)

    # --- a term begins --------------------------------------------------------------------------
    async def lead_term(self, term: Term) -> Coordinator:
        it, cluster = self._context, self._context.config.cluster
        self.term, alone = term, self._context.single_node_term is not None
        newest = await asyncio.to_thread(newest_generation, it.store)
        above = await self._generation_floor.find()
        lead = self._generation_planner = GenerationPlanner(
            PlannerContext(
                it.config,
                self._layout_planner,
                self._mover,
                self._hooks.rendezvous_address,
                partial(
                    _emit_with_plan,
                    self._event_log,
                    it.predict,
                    lambda: self._generation_planner,
                    self._say,
                ),
                self._on_generation_created,
                partial(_newest_durable_step, it.store),
                alone,
                self._exclude_slow,
                partial(self._event_log.emit_in_generation, f"term{term.number}"),
            )
        )
        self._session_start.is_resumed = newest > 0
        if newest:
            with suppress(MissingKeyError, CorruptError):  # a store that is away is asked again
                lead.load_record(await read_record(it.store, newest), alone)
        self._ledger_coverage.skips = lead.bad_steps.skips
        if newest and not alone:
            with suppress(HoldfastError):  # a store that is away is asked again
                durable = await asyncio.to_thread(_newest_durable_step, it.store)
                self._hooks.on_restored(max(durable, self._hooks.committed_step()))
            self._say(f"{it.node} coordinates the run (term {term.number})")
        self.coordinator = await start_term(
            term,
            it.store,
            _membership_rules(cluster, self.select_nodes, lead),
            self._plan_generation,
            self._make_start_state,
            on_state_change=self._on_state_change,
            complain=self._say,
            generation_floor=above,
            wait_for_members=not alone,
            on_creation_refused=self._on_creation_refused,
        )
        faults = NodeFaults(
            it.node,
            term,
            self.coordinator,
            self.select_nodes,
            self._node_shortage,
            self._hooks.give_up_lead,
            self._say,
        )
        self._node_shortage.coordinator = self.coordinator
        self._node_shortage.leave_out_failed = faults.leave_out_failed
        self.coordinator.on_outsider_failed = faults.leave_out
        self.coordinator.refuse_joiner = self._join_gate.refuse
        self.coordinator.on_pace_change = partial(
            apply_pace_changes, self.coordinator, lead, self._event_log
        )
        if self.coordinator.state.phase is Phase.GATHERING:
            self._start_task("wait", self._node_shortage.wait_for_nodes(cluster.gather_seconds))
        return self.coordinator

    def _on_creation_refused(self, error: UserError) -> None:
        """End a run of one node that cannot begin; one that has begun waits for its store."""
        if self._context.single_node_term is not None and not self._session_start.is_logged:
            raise RunEndedError(str(error), EndReason.USER_ERROR) from error

    def _on_generation_created(self, generation: int) -> None:
        """Note a generation whose object this agent made, and emit the start of a session.

        If this agent took part before it led, or other nodes did, an earlier session continues."""
        begins = (
            self._generation_planner is not None
            and self._generation_planner.is_session_start
            and self._hooks.newest_generation() == 0
        )
        self._hooks.on_generation_created(generation)
        self._session_start.on_generation_created(begins)

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
        self._last_save.check(generation)
        ending: RunEndedError | None = None
        try:
            if await self._node_shortage.leave_out_failed():
                raise PlanOutdatedError("a node that cannot work is left out")
        except RunEndedError as error:
            ending = error
        ended = [outcome.lost for outcome in self._generation_planner.last_outcomes(node_reports)]
        losses = [loss for loss in ended if loss is not None]
        cause = self._generation_planner.cause = describe_cause(losses, state)
        why = self._hooks.stop_reason()
        shortage = self._node_shortage
        is_last = transitions.are_all_leaving(state, node_names)
        if is_last and not shortage.closing_reason and not any(map(is_staying, state.nodes)):
            shortage.closing_reason = await self._find_leaving_reason()
        closing = shortage.closing_reason
        if is_last and not closing:
            closing = await self._find_leaving_reason()
        if cause and why and not closing:
            raise RunEndedError(f"{why}; lost while saving: {cause}", EndReason.STOPPED)
        if closing and ending is not None:
            raise ending
        await self._ensure_mover(generation)
        tried = set(self._generation_planner.rejected_checkpoints)
        rotten = self._generation_planner.reject_corrupt_checkpoint(node_reports)
        reason = next((loss.reason for loss in losses if loss.reason), state.reason)
        lost = state.reason in ("worker_lost", "halted")
        try:
            record = await self._generation_planner.plan_generation(
                state, generation, node_names, node_reports
            )
        except UserError as error:
            raise error if ending is None else ending from None
        if rotten is not None:  # each corrupt state is dropped once, so this ends
            for key, why in self._generation_planner.rejected_checkpoints.items():
                if key not in tried:  # an earlier attempt reported the rest
                    event = CheckpointRejected(key, why, step=step_of(key))
                    self._event_log.emit("agent", event)
                    self._say(f"{rotten}; the run falls back to another state")
        elif (
            ending is None
            and lost
            and reason not in BAD_STEP_REASONS
            and (sentence := self._loss_counter.count(generation, self._reached_step, cause))
        ):
            ending = RunEndedError(sentence)
        record = replace(record, stopping=closing)
        if ending is not None:
            record = self._last_save.plan(ending, record, self._reached_step)
        return replace(record, reason=reason if lost else state.reason)

    @property
    def _reached_step(self) -> int:
        """The newest step that counts as progress of the run."""
        assert self._generation_planner is not None
        return max(self._generation_planner.reached_step, self._hooks.committed_step())

    async def _ensure_mover(self, generation: int) -> None:
        """Start the mover if needed; a failed start is retried as often as any other loss."""
        try:
            await self._hooks.ensure_mover()
        except RunFolderError as error:  # a missing folder does not count as a lost mover
            self._on_creation_refused(error)
            raise
        except HoldfastError as error:
            self._loss_counter.count_next_again()
            if sentence := self._loss_counter.count(generation, self._reached_step, str(error)):
                raise RunEndedError(sentence) from error
            raise

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
            self._hooks.on_restored(begun.step)
        await self._event_log.flush(at_once=True)
        return begun

    def _exclude_slow(self, node_name: str) -> bool:
        """Leave a node out if the remaining nodes suffice; return True if they do."""
        return self.coordinator is not None and self.coordinator.exclude_slow(node_name)

    # --- changes of the coordinator's state -----------------------------------------------------
    def _on_state_change(self, old: CoordinatorState, new: CoordinatorState) -> None:
        if self._is_closed:
            return
        if self._generation_planner is not None:
            self._generation_planner.report_lost_ranks(new)
        if new.phase is Phase.ENDED and self._hooks.newest_generation():
            self.result_reporter.write_event(self.build_result(new.end_reason).event)
        if old.phase is Phase.STARTING and new.phase in (Phase.TRAINING, Phase.ENDED):
            self._start_task("told", self._repair_ledger())
        if new.phase is Phase.GATHERING and old.phase is not Phase.GATHERING:
            self._start_task("wait", self._node_shortage.wait_for_nodes())
        elif new.phase is not Phase.GATHERING and "wait" in self._tasks:
            self._tasks.pop("wait").cancel()

    def _start_task(self, name: str, coroutine: Any) -> None:
        if name in self._tasks:
            self._tasks[name].cancel()
        self._tasks[name] = asyncio.create_task(coroutine)

    async def _repair_ledger(self) -> None:
        """Repair the ledger once every worker of the generation has sent its entries."""
        if self._context.single_node_term is not None:
            await self._ledger_repair.repair()
        else:
            await self._ledger_repair.repair_from_journal(self._journal_tail)

    async def _find_leaving_reason(self) -> str:
        """Return why all nodes leave."""
        cause = await asyncio.to_thread(self._context.stop_cause)
        self._leaving_reason = cause or ALL_NODES_LEAVING_REASON
        return self._leaving_reason

    def build_result(self, end_message: str) -> RunResult:
        """Return the run's result from all nodes' reports; this node may have had no part."""
        coordinator = self.coordinator
        known = () if coordinator is None else coordinator.node_reports.values()
        told = [one.node_outcome.done for one in known if one.node_outcome is not None]
        ends = [done for done in told if done is not None]
        kind = "" if coordinator is None else coordinator.end_reason
        why = self._node_shortage.closing_reason or self._hooks.stop_reason()
        if not why and coordinator is not None and coordinator.state.is_saving_last:
            why = self._leaving_reason
        why = why or "the workers left"
        if (last_save := self._last_save.ending) is not None:
            why, kind = str(last_save), last_save.reason
        committed = self._hooks.committed_step()
        return run_result(end_message, kind, ends, why, committed, kind if last_save else "")

    # --- too few nodes --------------------------------------------------------------------------
    def select_nodes(self, nodes: Sequence[NodeRecord]) -> tuple[str, ...]:
        """Return the nodes that a generation would use; () if none is possible."""
        assert self._generation_planner is not None
        if len(nodes) < self._node_shortage.least_nodes:
            return ()
        return self._generation_planner.select_nodes(nodes)

    def stop_waiting(self, reason: str) -> None:
        """Stop the run if no node works; see `NodeShortage.stop_waiting`."""
        self._node_shortage.stop_waiting(reason)


def describe_cause(losses: Sequence[LostOutcome], state: CoordinatorState) -> str:
    """Return what ended the last generation, for people; "" if nothing was lost."""
    lost = [f"node {name} was lost ({said})" for name, said in state.lost_members if said]
    caused = [loss for loss in losses if loss.cause]
    own = [loss.cause for loss in caused if loss.reason != "peer_lost"]  # no mere consequence
    known = [*own, " and ".join(lost), *(loss.cause for loss in caused)]
    return next((cause for cause in known if cause), "")


def apply_pace_changes(
    coordinator: Coordinator,
    planner: GenerationPlanner,
    event_log: EventLog,
    changes: Sequence[PaceChange],
) -> None:
    """Give a slow worker fewer microbatches from the next generation on, or none at all."""
    for change in changes:
        node, pid = worker_of(change)
        event_log.emit(
            "agent",
            WorkerPaced(
                node,
                pid,
                change.after,
                round(change.slowdown, 2),
                change.reason,
                change.parts.waited_share,
                change.parts.work_ratio,
                step=planner.reached_step,
            ),
        )
        if change.after is Pace.TRIAL:
            coordinator.readmit(node)
        elif coordinator.stragglers.is_node_excluded(node):
            coordinator.exclude_slow(node)
    before = planner.relative_speeds
    planner.relative_speeds = coordinator.stragglers.relative_speeds
    if before != planner.relative_speeds:
        coordinator.halt("slow_worker", at_step_end=True)


def _membership_rules(
    cluster: ClusterConfig, select_nodes: SelectNodes, planner: GenerationPlanner
) -> MembershipRules:
    return MembershipRules(
        select_nodes,
        node_timeout_s(cluster.beat_seconds),
        cluster.gather_seconds,
        cluster.settle_seconds,
        retry_pair_after_s=UNREACHABLE_PAIR_RETRY_HEARTBEATS * cluster.beat_seconds,
        is_full=planner.is_full,
        can_add_workers=planner.can_add_workers,
    )


def _newest_durable_step(store: RunStore) -> int:
    keys = list_commits(store)
    return step_of(keys[0]) if keys else 0


class JoinGate:
    """Judges the nodes that ask one agent's coordinators to join."""

    def __init__(
        self,
        node: str,
        like_processors: LikeProcessors,
        own_identity: Callable[[], NodeIdentity | None],
        say: Say,
    ) -> None:
        """own_identity: returns the identity of `node`, the coordinator's; None: not known."""
        self._node, self._like_processors = node, like_processors
        self._own_identity, self._say = own_identity, say
        self._said: set[str] = set()  # a node that is started again asks again

    def refuse(self, asked: JoinRequest) -> str:
        """Return why an agent may not join, "" if it may; tell the user what differs."""
        ours, theirs = self._own_identity(), asked.facts.identity
        if asked.name == self._node or ours is None or theirs is None:
            return ""
        verdict = judge_joiner(ours, theirs, self._node, asked.name, self._like_processors)
        sentence = verdict.warning or (
            f"{asked.name} may not join: {verdict.refusal}" if verdict.refusal else ""
        )
        if sentence and sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)
        return verdict.refusal
