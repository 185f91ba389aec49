"""The coordinator of one term: the state of `policy.membership.transitions` behind HTTP.

Agents send requests, and the coordinator answers. `/join` identifies an agent. `/beat` reports the
agent's generation and what its workers do there. It stays open until the agent has something else
to do, or the next heartbeat is due. So one request serves as report, heartbeat and channel for
commands. A lost command is repeated in the next answer.

Reports that arrive in the same turn of the event loop are processed together. Only agents that a
change concerns are woken, so its cost grows linearly with the number of agents.

This module uses neither run store nor planner: `CreateGeneration` makes the next generation's
object and returns what its nodes begin from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast.elastic.coordinator.hang_watch import HangWatch, OpenHeartbeats
from holdfast.elastic.coordinator.liveness_probe import EndedAgentsProbe
from holdfast.elastic.coordinator.stragglers import StragglerTracker
from holdfast.elastic.protocol.coordinator_messages import (
    JOIN_FIRST_COMMAND,
    REFUSED_COMMAND,
    REPLACED_COMMAND,
    Heartbeat,
    HeartbeatReply,
    JoinRequest,
    NodeReport,
    NodeSituation,
    RunEnd,
    StartState,
)
from holdfast.elastic.protocol.exit_codes import USER_ERROR
from holdfast.elastic.protocol.hung_worker import HungWorkers
from holdfast.elastic.run_result import RunEndedError
from holdfast.errors import FencedError, HoldfastError
from holdfast.policy.detection.stragglers import PaceChange
from holdfast.policy.membership import transitions
from holdfast.policy.membership.queries import has_replacement
from holdfast.policy.membership.transitions import (
    TERMINAL_PHASES,
    CoordinatorState,
    MembershipRules,
    NodeCommand,
    NodeRecord,
    Phase,
    StageReport,
    directive_for,
)
from holdfast.wire.waiting import wait_event

MAX_HEARTBEAT_WAIT_S = 20.0
CREATION_RETRY_INTERVAL_S = 1.0
"""Seconds until an unreachable run store is tried again."""


class CreationRejectedError(HoldfastError):
    """A generation's object exists already; term and generation are the newest in the run store."""

    def __init__(self, term: int, generation: int) -> None:
        self.term, self.generation = term, generation
        super().__init__(f"term {term} and generation {generation} are in the run store already")


class PlanOutdatedError(HoldfastError):
    """The nodes or states for a generation changed while it was planned: plan it again."""


@dataclass(frozen=True)
class Made:
    """A generation whose object has been made. taken: places that it uses, by node; None for all
    places of its nodes."""

    start: StartState
    taken: Mapping[str, int] | None


class CreateGeneration(Protocol):
    async def __call__(
        self,
        state: CoordinatorState,
        generation: int,
        node_names: frozenset[str],
        node_reports: Mapping[str, NodeReport],
    ) -> Made:
        """Make the object of a generation of these nodes.

        Raises:
            CreationRejectedError: Another agent has made the object, or a newer term exists.
            RunEndedError: The run is to have no further generation.
            HoldfastError: The run store is unreachable; the coordinator tries again.
        """
        ...


def _ignore_change(old: CoordinatorState, new: CoordinatorState) -> None:
    """Do nothing: the default listener."""


class CreationComplaints:
    """Complaints that no generation can be made, each of which is made once in a row."""

    def __init__(self, complain: Callable[[str], None]) -> None:
        self._complain, self._last = complain, ""

    def add(self, generation: int, error: HoldfastError) -> None:
        if self._last != (complaint := str(error)):  # it fails again each second
            self._last = complaint
            self._complain(f"the workers cannot begin again yet (generation {generation}): {error}")

    def clear(self) -> None:
        """Note that a generation was made."""
        self._last = ""


class UnreachableNodes:
    """The nodes' reports of which nodes each of them does not reach.

    If the coordinator then hears an unreachable node, that node is alive, so the pair is kept in
    separate generations. A dead node is not heard again."""

    def __init__(self) -> None:
        self._by_node: dict[str, frozenset[str]] = {}

    def forget(self, name: str) -> None:
        """Forget what a node reported, and what was reported about it."""
        self._by_node.pop(name, None)
        for one, missed in self._by_node.items():
            self._by_node[one] = missed - {name}

    def record(self, name: str, unreachable: Iterable[str]) -> list[str]:
        """Note a node's report; return the nodes that do not reach this one."""
        # a node that reaches every node has no entry, so that a heartbeat costs the same in any run
        self._by_node.pop(name, None)
        if missing := frozenset(unreachable):
            self._by_node[name] = missing
        return [one for one, missed in self._by_node.items() if name in missed]


class Coordinator:
    """The coordinator of one term. Lives in one event loop; `run` ends with the term."""

    def __init__(
        self,
        state: CoordinatorState,
        rules: MembershipRules,
        create_generation: CreateGeneration,
        on_state_change: Callable[[CoordinatorState, CoordinatorState], None] = _ignore_change,
        complain: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """on_state_change: receives the old and the new state at every change of phase, generation
        or membership. complain: receives one line each time the run store becomes unreachable.
        `refuse_joiner` may be set: it returns why an agent may not join, "" if it may."""
        self.state = state
        self.node_reports: dict[str, NodeReport] = {}
        self.end_reason = ""  # why the run ended, one of `run_result.EndReason`
        self.nodes_to_leave = (replies := ReplyWriter()).nodes_to_leave
        self._rules, self._create_generation, self._replies = rules, create_generation, replies
        self._on_state_change, self._complaints = on_state_change, CreationComplaints(complain)
        self._loop = asyncio.get_running_loop()
        self._last_tick_at = self._loop.time()
        self._inbox: list[StageReport] = []
        self._open_heartbeats = OpenHeartbeats()
        self._wakeup = asyncio.Event()
        self._ended_agents_probe = EndedAgentsProbe(self, self._open_heartbeats.silent_s)
        self._hang_watch = HangWatch(self, self._open_heartbeats)
        self._unreachable = UnreachableNodes()
        self.stragglers = StragglerTracker()
        self.refuse_joiner: Callable[[JoinRequest], str] = lambda asked: ""
        self.on_pace_change: Callable[[Sequence[PaceChange]], None] = lambda changes: None
        self.on_outsider_failed: Callable[[str, str], None] = lambda name, sentence: None
        """Receives a node that takes no part and reports a fault of its own, with its sentence."""

    # --- decisions of other parts ---------------------------------------------------------------
    def halt(self, reason: str, *, at_step_end: bool = False) -> None:
        self._set_state(transitions.halt(self.state, reason, self._now, at_step_end=at_step_end))

    def mark_leaving(self, name: str, leave_within_s: float) -> None:
        """Note that a node will be lost in so many seconds."""
        now = self._now
        self._set_state(
            transitions.node_leaving(self.state, name, now + leave_within_s, now, self._rules)
        )

    def declare_lost(self, name: str, cause: str) -> None:
        """Count a node as lost."""
        self._set_state(transitions.node_lost(self.state, name, cause, self._now, self._rules))

    def leave_out(self, name: str, why: str) -> None:
        """End a node's part in the run. Its agent receives `why`; a later process may join."""
        if (node := self.state.node(name)) is not None:
            self._replies.refusals[name, node.incarnation] = f"{name} is {why}"
            self.node_reports[name].node_outcome = None
            self.declare_lost(name, why)

    def suspect(self, address: str) -> None:
        """Suspect the node of the previous coordinator, which listened there and fell silent."""
        for name, known in self.node_reports.items():
            if address and known.facts.address == address:
                self._set_state(
                    transitions.node_suspected(self.state, name, self._now, self._rules)
                )

    def finish(self, end_message: str = "", end_reason: str = "") -> None:
        self.end_reason = self.end_reason or end_reason
        self._set_state(transitions.finish(self.state, end_message, self._now))

    def reevaluate(self) -> None:
        """Apply the rules again, because a fact that they depend on has changed."""
        self._tick()
        self._wakeup.set()

    def fence(self) -> None:
        """End this term, because a newer one exists."""
        self._set_state(transitions.term_superseded(self.state, self._now))

    # --- requests -------------------------------------------------------------------------------
    async def handle_join(self, _: int, asked: JoinRequest) -> HeartbeatReply:
        """Admit an agent. Of two agents with one name, the later one counts.

        Raises ValueError for an agent without a name."""
        name, now = asked.name, self._now
        if not name:
            raise ValueError("a node without a name")
        if refusal := self.refuse_joiner(asked):
            return HeartbeatReply(self.state.term, REFUSED_COMMAND, reason=refusal)
        new = NodeRecord(
            asked.name,
            asked.mark,
            asked.places,
            now,
            now,
            asked.at,
            asked.stage,
            ready_workers=asked.ready,
        )
        self.node_reports[name] = NodeReport(asked.facts, asked.held, new.generation)
        self._unreachable.forget(name)  # reports may concern an earlier process
        self._set_state(transitions.node_joined(self.state, new, now, self._rules))
        self._wakeup.set()  # the new node has its own settling time
        self._check_outsider(name)
        return self._make_reply(name)

    async def handle_heartbeat(self, _: int, said: Heartbeat) -> HeartbeatReply:
        """Take a heartbeat. The answer comes when the agent has something else to do, or after the
        wait that the heartbeat names."""
        name, mark = said.name, said.mark
        if said.term > self.state.term:
            self.fence()
        report = StageReport(name, mark, said.at, said.stage, said.ready)
        wait = min(max(0.0, said.wait), MAX_HEARTBEAT_WAIT_S)
        known = self.node_reports.get(name)
        if known is not None and said.held is not None:
            known.node_outcome, known.generation = said.held, said.at
            self._check_outsider(name)
        if said.leaving:
            self.mark_leaving(name, said.leaving)
        self._record_unreachable(name, mark, said.misses)
        self._open_heartbeats.close(name)
        if self._check_for_hangs(said):
            wait = 0.0
        woken = self._open_heartbeats.add(name, said.doing, bool(said.leaving))
        self._inbox.append(report)
        if len(self._inbox) == 1:
            self._loop.call_soon(self._process_reports)
        await self._open_heartbeats.wait(name, woken, wait)
        answer = self._make_reply(name, mark)
        if blamed := self._hang_watch.take_hung_workers(name):
            return replace(answer, hung=HungWorkers(report.generation, tuple(blamed)))
        return answer

    def _check_outsider(self, name: str) -> None:
        """Pass a failure on if no generation uses the node; otherwise the next plan sees it."""
        failure = self.node_reports[name].failure
        is_outside = self.state.phase is Phase.TRAINING and name not in self.state.members
        if is_outside and failure is not None and failure.exit_code == USER_ERROR:
            self.on_outsider_failed(name, failure.sentence)

    def _make_reply(self, name: str, incarnation: str | None = None) -> HeartbeatReply:
        answer = self._replies.write(self.state, name, incarnation, self.end_reason)
        if answer is None:
            # The coordinator that made the generation was lost before all nodes had begun. The
            # start state was lost with it.
            self.halt("coordinator_lost")
            return HeartbeatReply(self.state.term, NodeCommand.WAIT.value, 0)
        if answer.order == NodeCommand.LEAVE.value:
            self._wakeup.set()
        return answer

    # --- processing reports ---------------------------------------------------------------------
    @property
    def _now(self) -> float:
        return self._loop.time()

    def _process_reports(self) -> None:
        reports, self._inbox = self._inbox, []
        if _has_changed_workers(self.state, reports):
            self._wakeup.set()  # deadlines may have changed
        self._set_state(transitions.reports_received(self.state, reports, self._now, self._rules))
        self._open_heartbeats.answer_changed(self.state, [report.name for report in reports])

    def _set_state(self, state: CoordinatorState) -> None:
        old, self.state = self.state, state
        if _summarize(old) == _summarize(state):
            return
        self._on_state_change(old, state)
        self._wakeup.set()
        self._open_heartbeats.answer_changed(self.state)

    # --- slow nodes -----------------------------------------------------------------------------
    def exclude_slow(self, name: str) -> bool:
        """Leave out a slow node if the remaining nodes suffice; return True if they do."""
        others = [node for node in self.state.nodes if node.name != name and not node.is_banned]
        if not self._rules.select_nodes(others):
            return False
        self._set_state(
            transitions.ban_node(self.state, name, "slow_worker", self._now, self._rules)
        )
        return True

    def readmit(self, name: str) -> None:
        """Admit a node again that was left out because it was slow."""
        node = self.state.node(name)
        if node is not None:
            self.state = self.state.with_node(replace(node, is_banned=False))
            self.reevaluate()

    # --- unreachable pairs ----------------------------------------------------------------------
    def _record_unreachable(self, name: str, incarnation: str, unreachable: Iterable[str]) -> None:
        """Take a node's report of the nodes that it does not reach; keep those apart from it."""
        node = self.state.node(name)
        if node is None or node.incarnation != incarnation:
            return
        for other in self._unreachable.record(name, unreachable):
            now = self._now
            self._set_state(transitions.link_failed(self.state, name, other, now, self._rules))

    # --- hung workers ---------------------------------------------------------------------------
    def _check_for_hangs(self, said: Heartbeat) -> bool:
        """Take a node's report on workers without progress; return True if it must kill one."""
        name, at = said.name, said.at
        if (
            not self.state.are_workers_computing
            or at != self.state.generation
            or name not in self.state.members
        ):
            return False
        going = self.state.phase is not Phase.HALTING  # if so, wait for the next generation
        if going and said.paces and (changes := self.stragglers.observe(name, at, said.paces)):
            self.on_pace_change(changes)
        return self._hang_watch.observe(said)

    # --- time -----------------------------------------------------------------------------------
    async def run(self) -> CoordinatorState:
        """Coordinate until a newer term exists or the run is over; return the last state."""
        while self.state.phase not in TERMINAL_PHASES:
            self._wakeup.clear()
            self._tick()
            self._ended_agents_probe.start()
            if self.state.pending_generation is not None:
                await self._open_generation(*self.state.pending_generation)
                self._last_tick_at = self._now
                continue
            if not self._wakeup.is_set():
                due = transitions.next_deadline(self.state, self._rules, self._now)
                wait = max(0.01, min(due - self._now + 0.001, self._rules.node_timeout_s / 6))
                await wait_event(self._wakeup, wait)
        return self.state

    def _tick(self) -> None:
        """Apply the rules to the time passed; allow for a suspension of this process itself."""
        now = self._now
        if now - self._last_tick_at > self._rules.node_timeout_s / 3:
            self._set_state(transitions.clock_jumped(self.state, now, self._rules))
        self._last_tick_at = now
        self._set_state(transitions.tick(self.state, now, self._rules))

    async def wait_until_all_dismissed(self, except_node: str) -> None:
        """Wait until every node except `except_node` knows that the run is over."""
        known = self._replies.dismissed_nodes
        while {node.name for node in self.state.nodes} - known - {except_node}:
            self._wakeup.clear()
            await self._wakeup.wait()

    async def _open_generation(self, generation: int, node_names: frozenset[str]) -> None:
        is_last = transitions.are_all_leaving(self.state, node_names)
        try:
            made = await self._create_generation(
                self.state, generation, node_names, self.node_reports
            )
        except CreationRejectedError as error:
            self._set_state(
                transitions.creation_rejected(self.state, error.term, error.generation, self._now)
            )
        except PlanOutdatedError:
            return
        except FencedError:
            self.fence()
        except RunEndedError as error:
            self.finish(str(error), error.reason)
        except HoldfastError as error:
            self._complaints.add(generation, error)
            await wait_event(self._wakeup, CREATION_RETRY_INTERVAL_S)
        else:
            self._complaints.clear()
            taken, self._replies.start_state = made.taken, made.start
            for one in self.node_reports.values():
                one.node_outcome = None  # it described the generation before
            used = node_names if taken is None else frozenset(taken)
            self._set_state(
                transitions.generation_created(
                    self.state,
                    generation,
                    used,
                    self._now,
                    self._rules,
                    taken,
                    is_saving_last=is_last,
                )
            )


def _summarize(state: CoordinatorState) -> tuple[Phase, int, frozenset[str], bool, frozenset[str]]:
    return state.phase, state.generation, state.members, state.at_step_end, state.pending_nodes


def _has_changed_workers(state: CoordinatorState, reports: Sequence[StageReport]) -> bool:
    """Return True if a report tells of a process that came or went."""
    nodes = [(state.node(report.name), report) for report in reports]
    return any(
        node is not None and node.ready_workers != report.ready_workers for node, report in nodes
    )


class ReplyWriter:
    """Writes the answers of one term's coordinator."""

    def __init__(self) -> None:
        self.start_state: StartState | None = None
        """What the nodes of the newest generation begin from; None if another coordinator made it.
        """
        self.nodes_to_leave: set[str] = set()
        """Nodes to leave once the rest works without them."""
        self.refusals: dict[tuple[str, str], str] = {}
        """Why nodes were left out, by name and incarnation."""
        self.dismissed_nodes: set[str] = set()
        """Nodes that know that the run is over."""

    def write(
        self, state: CoordinatorState, name: str, incarnation: str | None, end_reason: str
    ) -> HeartbeatReply | None:
        """Return the answer to a node; None if it is to begin, and the start state is not here.

        incarnation: the agent's process; None if it joins. end_reason: why the run ended."""
        node, term = state.node(name), state.term
        if refusal := self.refusals.get((name, incarnation or "")):
            return HeartbeatReply(term, REFUSED_COMMAND, reason=refusal)
        over = state.phase in TERMINAL_PHASES
        if not over and (
            node is None or (incarnation is not None and node.incarnation != incarnation)
        ):
            return HeartbeatReply(term, JOIN_FIRST_COMMAND if node is None else REPLACED_COMMAND)
        due = directive_for(state, name)
        situation = self._situation(state, name)
        reply = HeartbeatReply(term, due.command.value, due.generation, situation)
        if due.command is NodeCommand.START:
            return None if self.start_state is None else replace(reply, start=self.start_state)
        if due.command in (NodeCommand.HALT, NodeCommand.PAUSE):
            return replace(reply, reason=state.reason)
        if due.command is NodeCommand.LEAVE:
            self.dismissed_nodes.add(name)
            return replace(reply, run_end=RunEnd(state.end_reason, end_reason))
        return reply

    def _situation(self, state: CoordinatorState, name: str) -> NodeSituation:
        return NodeSituation(
            is_outside=name not in state.members and state.phase is Phase.TRAINING,
            may_leave=name in self.nodes_to_leave,
            # no node works, and several nodes are present that may continue
            is_idle=state.phase is Phase.GATHERING and len(state.nodes) > 1,
            has_replacement=state.phase is Phase.TRAINING and has_replacement(state, name),
        )
