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

from holdfast.checkpoint.restore.catalog import listing, step_of
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.coordinator.generation_planner import Lead, Leading
from holdfast.elastic.coordinator.generation_store import reign_over
from holdfast.elastic.coordinator.ledger_repair import StandIn, Told
from holdfast.elastic.coordinator.stragglers import worker_of
from holdfast.elastic.event_log import Board, Say
from holdfast.elastic.node.mover_supervisor import MoverLink
from holdfast.elastic.protocol import exit_codes
from holdfast.elastic.protocol.coordinator_messages import Known
from holdfast.elastic.protocol.generation_outcome import Failed
from holdfast.elastic.protocol.generation_record import GenerationRecord, read_record
from holdfast.elastic.protocol.start_state import StartState
from holdfast.elastic.run_context import Joining
from holdfast.elastic.run_result import End, EndedError, Last, Over, end_of
from holdfast.errors import (
    CheckpointError,
    CorruptError,
    HoldfastError,
    RunFolderError,
    UserError,
)
from holdfast.events import CheckpointRejected, RunStarted, WorkerPaced
from holdfast.plan.interface import Planner
from holdfast.policy.detection.stragglers import Change, Pace
from holdfast.policy.membership import transitions
from holdfast.policy.membership.restart_budget import Restarts, give_up
from holdfast.policy.membership.transitions import Node, Phase, Reign, Rules
from holdfast.wire.journal import Follower as JournalFollower
from holdfast.wire.store.run_store import MissingKeyError
from holdfast.wire.term import Term, newest_generation

MISSED_BEATS = 3
APART_BEATS = 30
"""Heartbeats until two nodes that did not reach each other are tried together again."""
LEAVE_ALL = "all nodes were told to go"
BAD_STEPS = ("non_finite", "loss_jump")
"""Reasons that `policy.detection.bad_steps` limits, not the restart budget."""


@dataclass(frozen=True)
class Desk:
    """Functions of the agent that the run controller uses.

    meet: the rendezvous address of a generation's workers. prepare: makes sure that a mover runs,
    which chooses the restore point. made: receives the number of each generation whose object was
    made. opened: returns the newest generation known here. why: returns why all of the run must
    stop, "" while it continues. committed: returns the newest committed step."""

    meet: str
    prepare: Callable[[], Awaitable[None]]
    made: Callable[[int], None]
    opened: Callable[[], int]
    why: Callable[[], str]
    committed: Callable[[], int]


class Office:
    """The run controller of one agent. Lives in one event loop."""

    def __init__(
        self, joining: Joining, desk: Desk, planner: Planner, mover: MoverLink, board: Board,
        say: Say, told: Told,
    ) -> None:  # fmt: skip
        """told: observes all events of the event log if the run has one node only."""
        self.coordinator: Coordinator | None = None
        self.term: Term | None = None
        self.restored = 0
        """The step of the newest checkpoint that a generation has begun from."""
        self.last = Last(board, say, joining.resume)
        self._it, self._desk, self._planner, self._mover = joining, desk, planner, mover
        self._board, self._say, self._told = board, say, told
        self._stand_in = StandIn(told, board, say, joining.config.cluster.heartbeat_seconds)
        self._journal = JournalFollower(joining.store)
        self._lead: Lead | None = None
        self._restarts, self._counted = Restarts(), 0
        self._resumed = False
        self._above_all: int | None = None
        self._begun = False  # this session's start is in the journal
        self._closing = ""  # why the next generation is the last
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def owing(self) -> bool:
        """True if the ledger may lack entries: no snapshot is announced before them."""
        return self._it.alone is not None and self._stand_in.owing

    def close(self) -> None:
        """Stop, because the agent ends; ignore what its coordinator still observes."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()

    # --- a term begins --------------------------------------------------------------------------
    async def reign(self, term: Term) -> Coordinator:
        it, cluster = self._it, self._it.config.cluster
        self.term, alone = term, self._it.alone is not None
        newest = await asyncio.to_thread(newest_generation, it.store)
        above = await self._above()
        lead = self._lead = Lead(
            Leading(it.config, self._planner, self._mover, self._desk.meet,
                    lambda event: self._board.emit("agent", event), self._made, self._durable,
                    alone, self._rest, partial(self._board.late, f"term{term.number}"))
        )  # fmt: skip
        self._resumed = newest > 0
        if newest:
            with suppress(MissingKeyError, CorruptError):  # a store that is away is asked again
                lead.found(await read_record(it.store, newest), alone)
        self._told.skips = lead.doubting.skips
        if newest and not alone:
            self._say(f"{it.node} coordinates the run (term {term.number})")
        rules = Rules(
            self.fits, MISSED_BEATS * cluster.beat_seconds, cluster.gather_seconds,
            cluster.settle_seconds, apart=APART_BEATS * cluster.beat_seconds, full=lead.full,
            more=lead.more,
        )  # fmt: skip
        self.coordinator = await reign_over(
            term, it.store, rules, self._plan, self._begin, changed=self._changed,
            complain=self._say, above=above, expects=not alone, refused=self._refused,
        )  # fmt: skip
        self.coordinator.paced = self._paced
        if self.coordinator.reign.phase is Phase.GATHERING and not alone:
            self._start("wait", self._too_few(cluster.gather_seconds))
        return self.coordinator

    async def _above(self) -> int:
        """Return the generation that the next one must exceed. Raises EndedError.

        It is looked up once in a session: an agent that took part knows the run's generations."""
        if self._desk.opened():
            return 0
        if self._above_all is None:
            try:
                self._above_all = await asyncio.to_thread(self._it.begin)
            except UserError as error:
                raise EndedError(str(error), Over.MEND) from error
        return self._above_all

    def _refused(self, error: UserError) -> None:
        """End a run of one node that cannot begin; one that has begun waits for its store."""
        if self._it.alone is not None and not self._begun:
            raise EndedError(str(error), Over.MEND) from error

    def _durable(self) -> int:
        keys = listing(self._it.store)
        return step_of(keys[0]) if keys else 0

    def _made(self, generation: int) -> None:
        """Note a generation whose object this agent made, and emit the start of a session.

        If this agent took part before it led, or other nodes did, an earlier session continues."""
        begins = self._lead is not None and self._lead.begins and self._desk.opened() == 0
        self._desk.made(generation)
        if not self._begun and begins:
            it = self._it
            self._board.emit("agent", RunStarted(
                it.config.name, it.config_hash, it.dataset_version, self._resumed))  # fmt: skip
        self._begun = self._resumed = True

    # --- a generation ---------------------------------------------------------------------------
    async def _plan(
        self, reign: Reign, generation: int, names: frozenset[str], known: Mapping[str, Known]
    ) -> GenerationRecord:
        """Return the record of the next generation. Raises EndedError if there must be none."""
        assert self._lead is not None
        _failed(known.values())
        ended = [outcome.lost for outcome in self._lead.outcomes(known)]
        losses = [loss for loss in ended if loss is not None]
        cause = next((loss.cause for loss in losses if loss.cause), "")
        why = self._desk.why()
        if not self._closing and transitions.leaving_all(reign, names):
            self._closing = LEAVE_ALL
        if cause and why and not self._closing:
            raise EndedError(f"{why}; lost while saving: {cause}", Over.STOPPED)
        await self._prepare(generation)
        tried = set(self._lead.tried)
        rotten = self._lead.rotten(known)
        reason = next((loss.reason for loss in losses if loss.reason), reign.reason)
        lost = reign.reason in ("worker_lost", "halted")
        record = await self._lead.plan(reign, generation, names, known)
        if rotten is not None:  # each corrupt state is dropped once, so this ends
            for key in self._lead.tried.keys() - tried:  # an earlier attempt reported the rest
                why = self._lead.tried[key]
                self._board.emit("agent", CheckpointRejected(key, why, step=step_of(key)))
                self._say(f"{rotten}; the run falls back to another state")
        elif lost and reason not in BAD_STEPS and (sentence := self._hopeless(generation, cause)):
            raise EndedError(sentence)
        return replace(record, reason=reason if lost else reign.reason, stopping=self._closing)

    async def _prepare(self, generation: int) -> None:
        """Start the mover if needed; a failed start is retried as often as any other loss."""
        try:
            await self._desk.prepare()
        except RunFolderError as error:  # a missing folder does not count as a lost mover
            self._refused(error)
            raise
        except HoldfastError as error:
            self._counted = 0
            if sentence := self._hopeless(generation, str(error)):
                raise EndedError(sentence) from error
            raise

    def _hopeless(self, generation: int, cause: str) -> str | None:
        """Count one more loss of a worker; return a sentence if the run must give up."""
        assert self._lead is not None
        if generation > self._counted:  # retries of an unreachable run store count once
            self._counted = generation
            reached = max(self._lead.reached, self._desk.committed())
            self._restarts = self._restarts.after_loss(reached)
        limit = self._it.config.cluster.max_restarts_without_progress
        return give_up(self._restarts, limit, cause or "not known")

    async def _begin(self, generation: int, record: GenerationRecord) -> StartState:
        assert self._lead is not None
        self._stand_in.owing = record.came_from is not None
        self._told.skips = self._lead.doubting.skips
        try:
            begun = await self._lead.begin(generation, record)
        except CheckpointError as error:
            raise EndedError(str(error), Over.STATELESS) from error
        except UserError as error:
            if self._it.alone is None:
                raise
            raise EndedError(str(error), Over.MEND) from error
        newest = begun.restore_point
        if newest is not None and newest.durable:
            self.restored = begun.step
        await self._board.flush()
        return begun

    def _rest(self, node: str) -> bool:
        """Leave a node out if the remaining nodes suffice; return True if they do."""
        return self.coordinator is not None and self.coordinator.rest(node)

    # --- slow workers ---------------------------------------------------------------------------
    def _paced(self, changes: Sequence[Change]) -> None:
        """Give a slow worker fewer microbatches from the next generation on, or none at all."""
        coordinator, lead = self.coordinator, self._lead
        assert coordinator is not None
        assert lead is not None
        for change in changes:
            node, pid = worker_of(change)
            self._board.emit("agent", WorkerPaced(
                node, pid, change.after, round(change.slower, 2), change.why, step=lead.reached,
            ))  # fmt: skip
            if change.after is Pace.TRIAL:
                coordinator.admit(node)
            elif coordinator.pacing.resting(node):
                coordinator.rest(node)
        before, lead.speeds = lead.speeds, coordinator.pacing.speeds
        if before != lead.speeds:
            coordinator.halt("slow_worker", gentle=True)

    # --- changes of the coordinator's state -----------------------------------------------------
    def _changed(self, old: Reign, new: Reign) -> None:
        if self._closed:
            return
        if self._lead is not None:
            self._lead.tell_lost(new)
        if new.phase is Phase.ENDED and self._desk.opened():
            self.last.write(self.end(new.verdict).event)
        if new.phase is Phase.TRAINING and old.phase is not Phase.TRAINING:
            self._start("told", self._make_whole())
        if new.phase is Phase.GATHERING and old.phase is not Phase.GATHERING:
            self._start("wait", self._too_few())
        elif new.phase is not Phase.GATHERING and "wait" in self._tasks:
            self._tasks.pop("wait").cancel()

    def _start(self, name: str, what: Any) -> None:
        if name in self._tasks:
            self._tasks[name].cancel()
        self._tasks[name] = asyncio.create_task(what)

    async def _make_whole(self) -> None:
        """Repair the ledger once every worker of the generation has sent its entries.

        Entries that are still missing up to the start step belonged to lost workers."""
        if self._it.alone is not None:
            await self._stand_in.make()
            return
        await self._board.flush()
        try:
            for record in await asyncio.to_thread(self._journal.new):
                self._told.observe(record.event)
            missing = self._told.missing()
            for event in await asyncio.to_thread(self._told.made, missing) if missing else ():
                self._board.emit("agent", event)
        except HoldfastError as error:
            self._say(f"the ledger entries of a lost node cannot be rebuilt: {error}")
        self._told.settled()

    def end(self, verdict: str) -> End:
        """Return the run's result from all nodes' reports; this node may have had no part."""
        coordinator = self.coordinator
        known = () if coordinator is None else coordinator.known.values()
        told = [one.held.done for one in known if one.held is not None]
        ends = [done for done in told if done is not None]
        kind = "" if coordinator is None else coordinator.kind
        why = self._closing or self._desk.why() or "the workers left"
        return end_of(verdict, kind, ends, why, self._desk.committed())

    # --- too few nodes --------------------------------------------------------------------------
    def fits(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        """Return the nodes that a generation would use; () if none is possible."""
        assert self._lead is not None
        least = 1 if self._closing or self._it.alone else self._it.config.cluster.min_nodes
        return self._lead.fits(nodes) if len(nodes) >= least else ()

    async def _too_few(self, seconds: float = 0.0) -> None:
        """Report after `seconds` what is lacking; then wait for it, or stop the run."""
        await asyncio.sleep(seconds)
        coordinator, cluster = self.coordinator, self._it.config.cluster
        assert coordinator is not None, "nodes gather only once a coordinator exists"
        try:
            _failed(coordinator.known.values())
        except EndedError as error:
            coordinator.done(str(error), error.kind)
            return
        if (why := self._desk.why()) or cluster.below_minimum == "leave":
            patience = 0.0 if why else cluster.below_minimum_seconds
            if not why:
                self._say(f"{self._lacking()}; leaving in {patience:g} s if no node joins")
            await asyncio.sleep(patience)
            self.stop(why or f"{self._lacking()}, for {patience:g} s")
        else:
            self._say(f"{self._lacking()}; waiting for more")

    def _lacking(self) -> str:
        assert self.coordinator is not None
        nodes, least = self.coordinator.reign.nodes, self._it.config.cluster.min_nodes
        if len(nodes) < least:
            return f"{len(nodes)} of at least {least} nodes (cluster.min_nodes) are here"
        return f"no layout fits the {sum(n.places for n in nodes)} places that are here"

    def stop(self, why: str) -> None:
        """Stop the run if no node works: wait for no further node.

        One last generation of the present nodes saves their state. If none is possible, the run is
        over."""
        coordinator = self.coordinator
        if coordinator is None or coordinator.reign.phase is not Phase.GATHERING:
            return
        self._closing = why
        if self._desk.opened():  # before that, no node holds any state
            coordinator.look()
        if coordinator.reign.phase is Phase.GATHERING:
            kind = Over.STOPPED if self._desk.why() else Over.TOO_FEW
            coordinator.done(why, kind)


def _failed(known: Iterable[Known]) -> None:
    """Raises EndedError if a node's workers failed in a way that a restart would not fix."""
    for one in known:
        ending = None if one.held is None else one.held.ending
        if isinstance(ending, Failed) and ending.sentence:
            kinds = {exit_codes.USER: Over.MEND, exit_codes.FENCED: Over.FENCED}
            raise EndedError(ending.sentence, kinds.get(ending.exit_code, Over.FAILED))
