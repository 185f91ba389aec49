"""An agent's requests to its coordinator, and the directives that it carries out.

A request joins the coordinator's run or is a heartbeat. Each answer has a directive for this node.
A coordinator in this process gets the same requests, without a connection.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from holdfast.checkpoint.peers.config import Peer
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.membership.reachability import ReachabilityProbe
from holdfast.elastic.membership.run_membership import RunMembership, Workload
from holdfast.elastic.protocol.coordinator_messages import (
    HANG_REASON,
    HEARTBEAT_PATH,
    JOIN_FIRST_COMMAND,
    JOIN_PATH,
    REFUSED_COMMAND,
    REPLACED_COMMAND,
    AgentFacts,
    Heartbeat,
    HeartbeatReply,
    JoinRequest,
    NodeSituation,
    RunEnd,
    StartState,
)
from holdfast.elastic.protocol.generation_outcome import FailedOutcome, NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord
from holdfast.elastic.run_result import EndReason, ReplacedError, RunEndedError
from holdfast.errors import HoldfastError
from holdfast.policy.membership import election
from holdfast.policy.membership.election import AgentState, ElectionTimeouts, Role
from holdfast.policy.membership.node_identity import NodeIdentity
from holdfast.policy.membership.transitions import Directive, NodeCommand, NodeStage
from holdfast.wire.http.async_client import AgentEndedError, AsyncClient
from holdfast.wire.secret import Secret

REQUEST_RETRY_PAUSE_S = 0.1
"""Seconds between a follower's request that got no answer and its next one."""


class CoordinatorSession:
    """One agent's session with the coordinator of its term: requests out, directives in.

    Lives in one event loop.
    """

    def __init__(
        self,
        membership: RunMembership,
        places: int,
        facts: AgentFacts,
        secret: Secret,
        read_generation: Callable[[int], Awaitable[GenerationRecord]],
    ) -> None:
        self.requests = OpenRequests()
        """The open heartbeats; the sender of one registers it."""
        self._membership, self._workload = membership, membership.workload
        self._read_generation = read_generation
        self._secret = secret
        self._client: AsyncClient | None = None
        self._reachability_probe = ReachabilityProbe()
        self._probed_generation = 0  # the generation after which the reachability probe ran last
        self._current_command = Directive(NodeCommand.WAIT, 0)
        self._node_status = NodeStatus(
            membership.state.name,
            secrets.token_hex(8),
            places,
            facts,
            self._workload,
            self._reachability_probe,
        )

    def join(self) -> Coroutine[Any, Any, None]:
        """Ask the coordinator to admit this agent. The request says what the node does now, not
        when the coroutine begins."""
        return self._ask_coordinator(JOIN_PATH, self._node_status.make_join_request())

    def send_heartbeat(self, max_wait_s: float) -> Coroutine[Any, Any, None]:
        """Send a heartbeat whose answer is due within `max_wait_s` seconds. It says what the node
        does now, as `join` does."""
        membership = self._membership
        aside_s = max(0.0, membership.aside_until - membership.now)
        leaving_s = membership.leave_within_s or aside_s
        heartbeat = self._node_status.make_heartbeat(
            membership.state.term, self._current_command, leaving_s, max_wait_s
        )
        return self._ask_coordinator(HEARTBEAT_PATH, heartbeat)

    def publish_mover(self, peer: Peer | None) -> None:
        """Let the next request to join carry the mover's address."""
        self._node_status.facts = replace(self._node_status.facts, peer=peer)

    @property
    def identity(self) -> NodeIdentity | None:
        """What of this node decides the bits that it computes; None if it is not known."""
        return self._node_status.facts.identity

    def publish_identity(self, identity: NodeIdentity) -> None:
        """Let the next request to join carry the node's identity."""
        self._node_status.facts = replace(self._node_status.facts, identity=identity)

    def retry_unreachable(self) -> None:
        """Probe the agents again that this node does not reach."""
        self._reachability_probe.retry(self._membership.agent_addresses)

    def close(self) -> None:
        self._reachability_probe.close()
        if self._client is not None:
            self._client.close()

    async def _ask_coordinator(self, path: str, request: JoinRequest | Heartbeat) -> None:
        """Send a request to the coordinator; apply its answer, or note that none came."""
        membership = self._membership
        state, timeouts = membership.state, membership.timeouts
        try:
            if membership.coordinator is not None:
                reply = await membership.ask_local_coordinator(request)
            else:
                if not state.leader_address:
                    raise AgentEndedError("no agent holds the term")
                # The client of the coordinator at `address`; what is open elsewhere is cut.
                if self._client is None or self._client.address != state.leader_address:
                    if self._client is not None:
                        self._client.close()
                    self._client = AsyncClient(state.leader_address, self._secret)
                client = self._client
                timeout_s = reply_timeout(state, timeouts, request.wait, membership.now)
                answer = await client.post(path, request.to_json(), timeout_s)
                reply = HeartbeatReply.from_json(answer)
        except HoldfastError as error:
            dead = isinstance(error, AgentEndedError)
            membership.set_state(
                election.leader_unanswered(membership.state, dead, membership.now, timeouts)
            )
            if membership.state.role is Role.FOLLOWER:
                await membership.sleep_until_change(REQUEST_RETRY_PAUSE_S)
            else:
                # another request may be open that gets no answer now
                self._workload.state_changed.set()
            return
        await self._apply_reply(reply)

    async def _apply_reply(self, reply: HeartbeatReply) -> None:
        membership = self._membership
        state, now = membership.state, membership.now
        term, order = reply.term, reply.order
        if term < state.term or order == NodeCommand.REFUSE.value:
            membership.set_state(election.leader_refused(state, now))
            return
        if order == REPLACED_COMMAND:
            raise ReplacedError(state.name)
        if order == REFUSED_COMMAND:
            raise RunEndedError(reply.reason or "", EndReason.USER_ERROR)
        membership.set_state(election.leader_answered(state, term, now))
        if order == JOIN_FIRST_COMMAND:
            await self.join()
            return
        node = reply.situation or NodeSituation()
        membership.has_replacement = node.has_replacement
        leaves = membership.leave_within_s or node.may_leave
        if leaves and (node.is_outside or node.is_idle):
            membership.leave_run()  # the other nodes work without this one, or no node works
            return
        if node.is_outside:
            self._workload.on_outside_generation()
        if reply.hung is not None:
            self._workload.handle_hung_workers(reply.hung.generation, reply.hung.workers)
        if reply.generation is None:
            raise ValueError(f"the order {order} names no generation")
        self._current_command = Directive(NodeCommand(order), reply.generation)
        await self._carry_out(self._current_command, term, reply)

    async def _carry_out(self, directive: Directive, term: int, reply: HeartbeatReply) -> None:
        """Carry out a directive of the coordinator of `term`; `reply` has what it needs."""
        generation = directive.generation
        match directive.command:
            case NodeCommand.START if generation > self._workload.generation:
                if reply.start is None:
                    raise ValueError(f"the order to start generation {generation} has no state")
                await self._start_generation(generation, term, reply.start)
            case NodeCommand.HALT | NodeCommand.PAUSE as halt if (
                generation == self._workload.generation
            ):
                reason = reply.reason or ""
                self._workload.halt_generation(
                    generation, reason, at_step_end=halt is NodeCommand.PAUSE
                )
                if reason == HANG_REASON and self._probed_generation < generation:
                    self._probed_generation = generation
                    self._reachability_probe.probe_all(
                        self._membership.state.name,
                        self._membership.agent_addresses,
                        self._workload.state_changed.set,
                    )
            case NodeCommand.LEAVE:
                end = reply.run_end or RunEnd()
                self._membership.run_end = end.verdict, end.kind
                self._workload.on_run_ended(end.verdict)
                if self._membership.coordinator is None:
                    self._membership.leave_run()
                else:
                    await self._wait_until_all_dismissed(self._membership.coordinator)

    async def _start_generation(self, generation: int, term: int, start_state: StartState) -> None:
        membership = self._membership
        record = await self._read_generation(generation)
        if generation <= self._workload.generation or term < membership.state.term:
            return  # overtaken by a newer order meanwhile
        membership.agent_addresses = record.addresses
        membership.set_state(
            election.generation_joined(
                membership.state, term, generation, tuple(membership.agent_addresses)
            )
        )
        self._workload.start_generation(generation, record, start_state)
        # the order after a start
        self._current_command = Directive(NodeCommand.WORK, generation)

    async def _wait_until_all_dismissed(self, coordinator: Coordinator) -> None:
        """Leave once the other nodes know that the run is over, or after the silence limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._membership.timeouts.leader_timeout_s):
                await coordinator.wait_until_all_dismissed(self._membership.state.name)
        self._membership.leave_run()


class NodeStatus:
    """The status of one node, as requests to the coordinator."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        places: int,
        facts: AgentFacts,
        workload: Workload,
        reachability_probe: ReachabilityProbe,
    ) -> None:
        """incarnation: this agent's process."""
        self._name, self._incarnation, self._places = name, incarnation, places
        self._workload = workload
        self.facts = facts
        """About this agent. A change counts from the next request to join."""
        self._reachability_probe = reachability_probe

    def make_join_request(self) -> JoinRequest:
        stage, held = self._stage_and_outcome()
        return JoinRequest(
            self._name,
            self._incarnation,
            self._places,
            self.facts,
            self._workload.generation,
            stage,
            held,
            self._workload.ready_workers,
        )

    def make_heartbeat(
        self, term: int, doing: Directive, leave_within_s: float, max_wait_s: float
    ) -> Heartbeat:
        """Return a heartbeat for the coordinator of `term`.

        doing: what this node does now. leave_within_s: 0 if it stays. max_wait_s: seconds within
        which the answer is due."""
        stage, held = self._stage_and_outcome()
        work = self._workload
        return Heartbeat(
            self._name,
            self._incarnation,
            term,
            doing,
            work.generation,
            stage,
            leave_within_s,
            held,
            work.ready_workers,
            tuple(self._reachability_probe.unreachable),
            work.stalled_workers,
            work.worker_paces,
            max_wait_s,
        )

    def _stage_and_outcome(self) -> tuple[NodeStage, NodeOutcome | None]:
        stage = self._workload.stage
        if stage is NodeStage.HELD and self._reachability_probe.is_probing:
            stage = NodeStage.WORKING  # the next generation has only nodes that reach each other
        outcome = self._workload.node_outcome
        is_over = stage in (NodeStage.HELD, NodeStage.DONE)
        return stage, outcome if is_over or isinstance(outcome.ending, FailedOutcome) else None


class OpenRequests:
    """The requests to the coordinator that are open: the newest, and those that it superseded."""

    def __init__(self) -> None:
        self.newest: asyncio.Task[None] | None = None
        self._superseded: set[asyncio.Task[None]] = set()

    def add_superseded(self, request: asyncio.Task[None]) -> None:
        """Keep a request that stays open though a newer one follows."""
        self._superseded.add(request)
        request.add_done_callback(self._superseded.discard)

    def cancel(self) -> None:
        """Cancel the requests that are open."""
        for task in (self.newest, *self._superseded):
            if task is not None:
                task.cancel()
        self.newest = None


def reply_timeout(
    state: AgentState, timeouts: ElectionTimeouts, max_wait_s: float, now: float
) -> float:
    """Return the timeout of a request whose answer is due within `max_wait_s` seconds.

    A follower's timeout leaves time for one more request on a new connection before the
    coordinator counts as silent."""
    silence = timeouts.leader_timeout_s
    if state.role is not Role.FOLLOWER:
        return max_wait_s + silence / 2
    left = state.role_since + silence - now
    return max(silence / 6, min(max_wait_s + silence / 3, left))
