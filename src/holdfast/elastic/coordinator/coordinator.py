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
from math import inf
from typing import Any, Protocol

from holdfast.elastic.coordinator.hang_detector import HangDetector
from holdfast.elastic.coordinator.liveness_probe import ended_agents
from holdfast.elastic.coordinator.stragglers import StragglerTracker
from holdfast.elastic.protocol.coordinator_messages import (
    HANG_REASON,
    JOIN_FIRST_COMMAND,
    REPLACED_COMMAND,
    Heartbeat,
    JoinRequest,
    NodeReport,
)
from holdfast.elastic.protocol.hung_worker import HungWorker
from holdfast.elastic.protocol.start_state import StartState
from holdfast.elastic.run_result import RunEndedError
from holdfast.errors import FencedError, HoldfastError
from holdfast.policy.detection.stragglers import PaceChange
from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import (
    TERMINAL_PHASES,
    CoordinatorState,
    Directive,
    MembershipRules,
    NodeCommand,
    NodeRecord,
    Phase,
    StageReport,
    directive_for,
)
from holdfast.wire.waiting import wait_event

MAX_HEARTBEAT_WAIT_S = 20.0
NODE_REPLY_WINDOW_S = 0.3
"""Seconds within which agents react to an event and report it."""
UNSETTLED_PHASES = (Phase.STARTING, Phase.HALTING)
AGENT_PROBE_INTERVAL_S = 0.2
"""Seconds between two probes for ended agents; a live machine answers a probe at once."""
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


class Coordinator:
    """The coordinator of one term. Lives in one event loop; `run` ends with the term."""

    def __init__(
        self,
        state: CoordinatorState,
        rules: MembershipRules,
        create_generation: CreateGeneration,
        on_state_change: Callable[[CoordinatorState, CoordinatorState], None] = lambda old, new: (
            None
        ),
        complain: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """on_state_change: receives the old and the new state at every change of phase, generation
        or membership. complain: receives one line each time the run store becomes unreachable."""
        self.state = state
        self.node_reports: dict[str, NodeReport] = {}
        self.end_reason = ""  # why the run ended, one of `run_result.EndReason`
        self.nodes_to_leave: set[str] = set()  # nodes to leave once the rest works without them
        self._rules, self._create_generation, self._on_state_change, self._complain = (
            rules,
            create_generation,
            on_state_change,
            complain,
        )
        self._loop = asyncio.get_running_loop()
        self._last_tick_at = self._loop.time()
        self._start_state: StartState | None = None  # the nodes' start state; see `_answer`
        self._last_complaint = ""  # the last complaint why no generation can be made
        self._inbox: list[StageReport] = []
        self._open_heartbeats: dict[str, tuple[asyncio.Future[None], Directive, bool]] = {}
        self._wakeup = asyncio.Event()
        self._ended_agents_task: asyncio.Task[None] | None = None  # for agents that may have ended
        self._dismissed_nodes: set[str] = set()  # nodes that know that the run is over
        self._hang_detector = HangDetector()
        self._hung_workers: dict[str, list[HungWorker]] = {}
        self._unreachable_by_node: dict[
            str, frozenset[str]
        ] = {}  # by node: nodes that it does not reach
        self._silent_nodes_task: asyncio.Task[None] | None = None
        self.stragglers = StragglerTracker()
        self.on_pace_change: Callable[[Sequence[PaceChange]], None] = lambda changes: None
        """Called when the verdict on a worker's pace changes: slow, well, to be left out."""

    # --- decisions of other parts ---------------------------------------------------------------
    def halt(self, reason: str, *, at_step_end: bool = False) -> None:
        self._set_state(transitions.halt(self.state, reason, self._now, at_step_end=at_step_end))

    def mark_leaving(self, name: str, leave_within_s: float) -> None:
        """Note that a node will be lost in so many seconds."""
        now = self._now
        self._set_state(
            transitions.node_leaving(self.state, name, now + leave_within_s, now, self._rules)
        )

    def suspect(self, address: str) -> None:
        """Suspect the node of the previous coordinator, which listened there and fell silent."""
        for name, known in self.node_reports.items():
            if address and known.join_info.get("address") == address:
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
    async def handle_join(self, _: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle a JoinRequest. Of two agents with one name, the later one counts.

        Raises ValueError or KeyError for a malformed request."""
        asked = JoinRequest.from_json(body)
        name, now = asked.name, self._now
        if not name:
            raise ValueError("a node without a name")
        new = NodeRecord(
            name,
            asked.mark,
            asked.places,
            now,
            now,
            asked.at,
            asked.stage,
            ready_workers=asked.ready,
        )
        self.node_reports[name] = NodeReport(asked.told, asked.held, new.generation)
        for (
            one,
            missed,
        ) in self._unreachable_by_node.items():  # reports may concern an earlier process
            self._unreachable_by_node[one] = missed - {name} if one != name else frozenset()
        self._set_state(transitions.node_joined(self.state, new, now, self._rules))
        self._wakeup.set()  # the new node has its own settling time
        return self._make_reply(name)

    async def handle_heartbeat(self, _: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle a Heartbeat. The answer comes when the agent has something else to do, or after
        the wait that the heartbeat names."""
        said = Heartbeat.from_json(body)
        name, mark = said.name, said.mark
        if said.term > self.state.term:
            self.fence()
        report = StageReport(name, mark, said.at, said.stage, said.ready)
        wait = min(max(0.0, said.wait), MAX_HEARTBEAT_WAIT_S)
        known = self.node_reports.get(name)
        if known is not None and said.held is not None:
            known.node_outcome, known.generation = said.held, said.at
        if said.leaving:
            self.mark_leaving(name, said.leaving)
        self._record_unreachable(name, mark, said.misses)
        self._close_open_heartbeat(name)
        if self._check_for_hangs(said):
            wait = 0.0
        woken = self._loop.create_future()
        self._open_heartbeats[name] = woken, said.doing, bool(said.leaving)
        self._queue_report(report)
        timer = self._loop.call_later(wait, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()
            if self._open_heartbeats.get(name, (None,))[0] is woken:
                del self._open_heartbeats[name]
        answer = self._make_reply(name, mark)
        if blamed := self._hung_workers.pop(name, None):
            answer["blamed"] = [report.generation, [one.to_json() for one in blamed]]
        return answer

    @property
    def _is_idle(self) -> bool:
        """True if no node works, and several nodes are present that may continue."""
        return self.state.phase is Phase.GATHERING and len(self.state.nodes) > 1

    def _make_reply(self, name: str, incarnation: str | None = None) -> dict[str, Any]:
        node, term = self.state.node(name), self.state.term
        over = self.state.phase in TERMINAL_PHASES
        if not over and (
            node is None or (incarnation is not None and node.incarnation != incarnation)
        ):
            return {"term": term, "order": JOIN_FIRST_COMMAND if node is None else REPLACED_COMMAND}
        due = directive_for(self.state, name)
        answer: dict[str, Any] = {
            "term": term,
            "order": due.command.value,
            "generation": due.generation,
            "outside": name not in self.state.members and self.state.phase is Phase.TRAINING,
            "go": name in self.nodes_to_leave,
            "free": self._is_idle,
        }
        if due.command is NodeCommand.START and self._start_state is None:
            # The coordinator that made the generation was lost before all nodes had begun. The
            # start state was lost with it.
            self.halt("coordinator_lost")
            return {"term": term, "order": NodeCommand.WAIT.value, "generation": 0}
        if due.command is NodeCommand.START and self._start_state is not None:
            answer["begin"] = self._start_state.to_json()
        elif due.command in (NodeCommand.HALT, NodeCommand.PAUSE):
            answer["reason"] = self.state.reason
        elif due.command is NodeCommand.LEAVE:
            answer |= {"verdict": self.state.end_reason, "kind": self.end_reason}
            self._dismissed_nodes.add(name)
            self._wakeup.set()
        return answer

    # --- processing reports ---------------------------------------------------------------------
    @property
    def _now(self) -> float:
        return self._loop.time()

    def _queue_report(self, report: StageReport) -> None:
        self._inbox.append(report)
        if len(self._inbox) == 1:
            self._loop.call_soon(self._process_reports)

    def _process_reports(self) -> None:
        reports, self._inbox = self._inbox, []
        nodes = [(self.state.node(report.name), report) for report in reports]
        if any(
            node is not None and node.ready_workers != report.ready_workers
            for node, report in nodes
        ):
            self._wakeup.set()  # deadlines may have changed
        self._set_state(transitions.reports_received(self.state, reports, self._now, self._rules))
        for report in reports:
            self._wake_if_changed(report.name)

    def _set_state(self, state: CoordinatorState) -> None:
        old, self.state = self.state, state
        if _summarize(old) == _summarize(state):
            return
        self._on_state_change(old, state)
        self._wakeup.set()
        for name in list(self._open_heartbeats):
            self._wake_if_changed(name)

    def _wake_if_changed(self, name: str) -> None:
        """Answer a waiting node if it has something else to do."""
        waiting = self._open_heartbeats.get(name)
        if waiting is None:
            return
        woken, doing, leaving = waiting
        node = self.state.node(name)
        if node is None and self.state.phase not in TERMINAL_PHASES:
            _wake(woken)
            return
        due = directive_for(self.state, name)
        # Do not wake a node just to repeat WAIT or WORK, unless it is leaving. A leaving node must
        # learn that the remaining nodes work without it.
        if due != doing and (leaving or due.command not in (NodeCommand.WAIT, NodeCommand.WORK)):
            _wake(woken)

    async def _remove_ended_agents(self) -> None:
        """Probe silent nodes while a generation stops or begins: their agents may have ended."""
        while self.state.phase in UNSETTLED_PHASES:
            await asyncio.sleep(AGENT_PROBE_INTERVAL_S)
            silent = {
                name: str(self.node_reports[name].join_info.get("address", ""))
                for name in transitions.awaited_members(self.state)
                if name in self.node_reports
            }
            for name in await ended_agents(silent):
                if name in transitions.awaited_members(self.state):
                    cause = "its agent has ended"
                    now = self._now
                    self._set_state(
                        transitions.node_lost(self.state, name, cause, now, self._rules)
                    )

    def _close_open_heartbeat(self, name: str) -> None:
        """Answer a node's older request: its agent sends a new one and reads only that answer."""
        if name in self._open_heartbeats:
            _wake(self._open_heartbeats.pop(name)[0])

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
        """Take a node's report of the nodes that it does not reach.

        If the coordinator then hears an unreachable node, that node is alive, so the pair is kept
        in separate generations. A dead node is not heard again."""
        node = self.state.node(name)
        if node is None or node.incarnation != incarnation:
            return
        self._unreachable_by_node[name] = frozenset(unreachable)
        for other in [one for one, missed in self._unreachable_by_node.items() if name in missed]:
            now = self._now
            self._set_state(transitions.link_failed(self.state, name, other, now, self._rules))

    # --- hung workers ---------------------------------------------------------------------------
    def _check_for_hangs(self, said: Heartbeat) -> bool:
        """Take a node's report on workers without progress; return True if it must kill one."""
        name, at, still = said.name, said.at, said.still
        if (
            not self.state.are_workers_computing
            or at != self.state.generation
            or name not in self.state.members
        ):
            return False
        going = self.state.phase is not Phase.HALTING  # if so, wait for the next generation
        if going and said.paces and (changes := self.stragglers.observe(name, at, said.paces)):
            self.on_pace_change(changes)
        nodes = [node for one in self.state.members - {name} if (node := self.state.node(one))]
        heard = min((-inf if node.must_report else node.last_heard for node in nodes), default=inf)
        if blamed := self._hang_detector.observe(name, at, still, self._now, heard):
            self._hung_workers[name] = blamed
        if still and (self._silent_nodes_task is None or self._silent_nodes_task.done()):
            self._silent_nodes_task = asyncio.create_task(self._remove_silent_nodes())
        if still and self._hang_detector.find_deadlock(self._now, self.state.members):
            self.halt(HANG_REASON)
        elif still and (
            found := self._hang_detector.find_hung_worker(self._now, self.state.members)
        ):
            self._hung_workers[found[0]] = [found[1]]
            self._request_heartbeats([found[0]])
        return name in self._hung_workers

    async def _remove_silent_nodes(self) -> None:
        """While workers wait, probe every node that reported nothing.

        Declare such a node lost if it stays silent for longer than a worker may stall: all of the
        node may be suspended."""
        if not await self._sleep_on_time(NODE_REPLY_WINDOW_S):
            return
        since, limit = self._hang_detector.waiting_since(0.0), self._hang_detector.stall_limit_s
        if since is None or limit is None:
            return
        generation = self.state.generation
        silent = self._silent_nodes(since)
        asked = self._now
        self._request_heartbeats(silent)
        if not silent or not await self._sleep_on_time(
            max(NODE_REPLY_WINDOW_S, since + limit - asked)
        ):
            return
        silent, checked = self._silent_nodes(asked), self._now
        self._request_heartbeats(self.state.members)
        if not await self._sleep_on_time(NODE_REPLY_WINDOW_S):
            return
        self._request_heartbeats(
            self._hang_detector.node_names
        )  # compare again now that all nodes have reported
        if not silent:
            return
        now, waiting = self._now, self._hang_detector.waiting_since(checked)
        going = self.state.are_workers_computing and self.state.phase is not Phase.STARTING
        same = going and self.state.generation == generation
        if not same or waiting is None or now - waiting <= limit:
            return
        for name in silent & self._silent_nodes(asked):
            cause = f"not heard while other nodes waited for it for {now - waiting:.1f} s"
            self._set_state(transitions.node_lost(self.state, name, cause, now, self._rules))

    def _silent_nodes(self, since: float) -> frozenset[str]:
        nodes = (self.state.node(name) for name in self.state.members)
        return frozenset(
            node.name for node in nodes if node is not None and node.last_heard < since
        )

    def _request_heartbeats(self, names: Iterable[str]) -> None:
        """Answer the nodes' open requests, so that they send new ones with their present state."""
        for name in names:
            if name in self._open_heartbeats:
                _wake(self._open_heartbeats[name][0])

    async def _sleep_on_time(self, seconds: float) -> bool:
        """Sleep; return False if this process woke late.

        Other nodes may be late too then, and must not be judged."""
        due = self._now + seconds
        await asyncio.sleep(seconds)
        return self._now - due < NODE_REPLY_WINDOW_S

    # --- time -----------------------------------------------------------------------------------
    async def run(self) -> CoordinatorState:
        """Coordinate until a newer term exists or the run is over; return the last state."""
        while self.state.phase not in TERMINAL_PHASES:
            self._wakeup.clear()
            self._tick()
            idle = self._ended_agents_task is None or self._ended_agents_task.done()
            if self.state.phase in UNSETTLED_PHASES and idle:
                self._ended_agents_task = asyncio.create_task(self._remove_ended_agents())
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
        while {node.name for node in self.state.nodes} - self._dismissed_nodes - {except_node}:
            self._wakeup.clear()
            await self._wakeup.wait()

    async def _open_generation(self, generation: int, node_names: frozenset[str]) -> None:
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
            if self._last_complaint != (complaint := str(error)):  # it fails again each second
                self._last_complaint = complaint
                self._complain(f"generation {generation} cannot be made yet: {error}")
            await wait_event(self._wakeup, CREATION_RETRY_INTERVAL_S)
        else:
            self._last_complaint = ""
            taken, self._start_state = made.taken, made.start
            for one in self.node_reports.values():
                one.node_outcome = None  # it described the generation before
            used = node_names if taken is None else frozenset(taken)
            self._set_state(
                transitions.generation_created(
                    self.state, generation, used, self._now, self._rules, taken
                )
            )


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _summarize(state: CoordinatorState) -> tuple[Phase, int, frozenset[str], bool, frozenset[str]]:
    return state.phase, state.generation, state.members, state.at_step_end, state.pending_nodes
