"""An agent's role in the run: follower of a coordinator, candidate, or coordinator itself.

The loop carries out `policy.membership.election`. It reads the newest term from the run store,
joins that term's coordinator and keeps one heartbeat open there. If the coordinator falls silent,
it asks the other agents and opens the next term. `workload` is the interface to the node's workers.

    seeking    Read the newest term from the run store, and ask its holder to admit this agent.
    following  One heartbeat is open at the coordinator; a change here sends another at once.
    silent     Ask the agents of the last generation whether they hear the coordinator
               (`elastic/membership/pre_candidate.py`).
    claiming   Open the next term in the run store (`elastic/membership/candidate.py`).
    reigning   Send the same heartbeats to the coordinator in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from math import inf
from typing import Any

from holdfast.checkpoint.peers.config import Peer
from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.membership.candidate import Candidate
from holdfast.elastic.membership.coordinator_session import CoordinatorSession
from holdfast.elastic.membership.pre_candidate import PreCandidate
from holdfast.elastic.membership.run_membership import RunMembership, Workload
from holdfast.elastic.protocol.coordinator_messages import (
    HEARTBEAT_PATH,
    JOIN_PATH,
    AgentFacts,
    Heartbeat,
    HeartbeatReply,
    JoinRequest,
    TermReply,
)
from holdfast.elastic.protocol.generation_record import GenerationRecord, read_record
from holdfast.elastic.protocol.messages import handler_of
from holdfast.elastic.run_result import EndReason, RunEndedError, refuse_join
from holdfast.errors import HoldfastError, RunFolderError
from holdfast.machine.limits import shared_cores_id
from holdfast.policy.membership import election
from holdfast.policy.membership.election import AgentState, ElectionTimeouts, LackedMajority, Role
from holdfast.policy.membership.node_identity import NodeIdentity
from holdfast.policy.spending import NodePrice
from holdfast.wire.http.server import Handler
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import TERM_PATH, Term, newest_term

ROLE_RETRY_PAUSE_S = 0.5
"""Seconds between two reads of the run store."""
STAND_BACK_S = 20.0
"""Seconds that an agent which gave up the lead leaves the next term to other agents."""


async def _no_check() -> None:
    """Do nothing: the run store cannot be lost."""


class RoleLoop:
    """The role loop of one agent. Lives in one event loop.

    `run` ends when the run is over, or raises.
    """

    def __init__(
        self,
        name: str,
        address: str,
        store: RunStore,
        secret: Secret,
        workload: Workload,
        start_coordinator: Callable[[Term], Awaitable[Coordinator]],
        *,
        places: int = 1,
        timeouts: ElectionTimeouts | None = None,
        heartbeat_interval_s: float = 2.0,
        complain: Callable[[str], None] = lambda sentence: None,
        read_generation: Callable[[int], Awaitable[GenerationRecord]] | None = None,
        own_term: Term | None = None,
        check_run_folder: Callable[[], Awaitable[None]] = _no_check,
        price: NodePrice | None = None,
    ) -> None:
        """Make the loop; `run` runs it.

        Args:
            address: Where this agent's control listens.
            workload: This node's workers.
            start_coordinator: Makes the coordinator of a term that this agent has opened.
            heartbeat_interval_s: Seconds between two heartbeats if nothing changes.
            read_generation: Reads a generation's object, instead of `read_record`.
            own_term: The term of a run of this node alone. The agent then follows no other
                coordinator, and leaves when that term is over.
            check_run_folder: Raises HoldfastError if the run store no longer belongs to this run.
            price: Of an hour of this node.
        """
        self._membership = RunMembership(name, workload, timeouts or ElectionTimeouts())
        self._session = CoordinatorSession(
            self._membership,
            places,
            AgentFacts(
                address, cores="" if own_term is not None else shared_cores_id(), price=price
            ),
            secret,
            read_generation or partial(read_record, store),
        )
        self._pre_candidate = PreCandidate(
            self._membership, self._session, store, secret, heartbeat_interval_s, check_run_folder
        )
        self._candidate = Candidate(
            self._membership,
            address,
            secret.uses_tls,
            store,
            start_coordinator,
            complain,
            own_term,
            check_run_folder,
        )
        self._address, self._store, self._secret, self._workload = address, store, secret, workload
        self._own_term, self._check_run_folder = own_term, check_run_folder
        self._heartbeat_interval_s, self._complain = heartbeat_interval_s, complain
        self._last_complaint = ""
        self._stands_back_until = -inf

    @property
    def state(self) -> AgentState:
        return self._membership.state

    @property
    def coordinator(self) -> Coordinator | None:
        """Return the coordinator in this process, if this agent leads."""
        return self._membership.coordinator

    @property
    def lacked_majority(self) -> LackedMajority | None:
        """Return what this agent lacks to continue without its coordinator; None: nothing."""
        return self._membership.lacked_majority

    @property
    def agent_addresses(self) -> Mapping[str, str]:
        """Return the addresses of the newest generation's agents: name -> address."""
        return self._membership.agent_addresses

    @property
    def run_end(self) -> tuple[str, str] | None:
        """Return verdict and kind, once the coordinator has said that the run is over."""
        return self._membership.run_end

    @property
    def coordinator_fault(self) -> BaseException | None:
        """Return our own bug that ended the coordinator of a run of one node."""
        return self._candidate.coordinator_fault

    @property
    def leave_within_s(self) -> float:
        """Seconds until this node leaves the run; 0: it stays."""
        return self._membership.leave_within_s

    @leave_within_s.setter
    def leave_within_s(self, seconds: float) -> None:
        self._membership.leave_within_s = seconds

    @property
    def has_replacement(self) -> bool:
        """Return True if free places elsewhere can take this node's workers."""
        return self._membership.has_replacement

    def move_aside(self, seconds: float) -> None:
        """Let the run continue without this node's workers. The node stays, and joins again."""
        self._membership.aside_until = self._membership.now + seconds
        self._membership.workload.state_changed.set()

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of other agents' requests, which belong to no generation."""
        return {
            JOIN_PATH: handler_of(JoinRequest.from_json, self._handle_request),
            HEARTBEAT_PATH: handler_of(Heartbeat.from_json, self._handle_request),
            TERM_PATH: handler_of(lambda body: None, self.handle_term_query),
        }

    async def run(self) -> str:
        """Follow or lead until the run is over or this node leaves it; return the run's verdict.

        Raises RunEndedError if the run cannot begin, or does not admit this agent."""
        parts = {
            Role.DISCOVERING: self._run_discovering,
            Role.FOLLOWER: self._run_follower,
            Role.PRE_CANDIDATE: self._run_pre_candidate,
            Role.CANDIDATE: self._run_candidate,
            Role.LEADER: self._run_follower,
        }
        if self._own_term is not None:
            self._membership.set_state(
                election.newest_term_read(
                    self.state, self._own_term.number, "", self._membership.now
                )
            )
        try:
            while self.state.role is not Role.SHUTDOWN:
                try:
                    await parts[self.state.role]()
                except RunEndedError:
                    raise
                except HoldfastError as error:
                    self._complain_once(str(error))
                    await self._membership.sleep_until_change(ROLE_RETRY_PAUSE_S)
            return "" if self.run_end is None else self.run_end[0]
        finally:
            self._session.requests.cancel()
            self._pre_candidate.close()
            self._candidate.close()
            self._session.close()

    def leave_run(self) -> None:
        """Leave the run: follow no coordinator any more."""
        self._membership.leave_run()

    def give_up_lead(self) -> None:
        """End this agent's coordinator, whose term was closed; let another agent lead."""
        self._stands_back_until = self._membership.now + STAND_BACK_S
        if self.coordinator is not None:
            self.coordinator.fence()

    def publish_mover(self, peer: Peer | None) -> None:
        """Let the coordinator know this node's mover, from the next request to join on."""
        self._session.publish_mover(peer)

    @property
    def identity(self) -> NodeIdentity | None:
        """What of this node decides the bits that it computes; None if it is not known."""
        return self._session.identity

    def publish_identity(self, identity: NodeIdentity) -> None:
        """Let the coordinator know what this node computes with, from the next request to join."""
        self._session.publish_identity(identity)

    # --- requests of other agents ---------------------------------------------------------------
    async def handle_term_query(self, _: int, asked: None) -> TermReply:
        """Return this agent's name, role and term, and whether it hears its coordinator."""
        state, membership = self.state, self._membership
        hears = election.hears_leader(state, membership.now, membership.timeouts)
        return TermReply(state.name, state.term, hears, state.role.value)

    async def _handle_request(self, _: int, request: JoinRequest | Heartbeat) -> HeartbeatReply:
        return await self._membership.ask_local_coordinator(request)

    # --- seeking --------------------------------------------------------------------------------
    async def _run_discovering(self) -> None:
        self._pre_candidate.close()
        await self._check_run_folder()
        term, holder = await asyncio.to_thread(newest_term, self._store)
        address = "" if holder is None else str(holder.get("address", ""))
        if address == self._address and self.coordinator is None:
            address = ""  # this agent held the term before a restart or a failure of the term
        elif holder is not None:
            await self._refuse_join(holder)
        if not address and self._membership.now < self._stands_back_until:
            await self._membership.sleep_until_change(ROLE_RETRY_PAUSE_S)
            return
        self._membership.set_state(
            election.newest_term_read(self.state, term, address, self._membership.now)
        )
        if self.state.role is Role.DISCOVERING:
            await self._session.join()
            await self._note_join(holder)

    async def _note_join(self, holder: Mapping[str, Any] | None) -> None:
        """Tell the user that this node has joined; pause if the holder of the term refused."""
        if self.state.role is Role.DISCOVERING:  # it refused: a newer term is to come
            await self._membership.sleep_until_change(ROLE_RETRY_PAUSE_S)
        elif self.state.role is Role.FOLLOWER and holder is not None:
            name, leader = self.state.name, holder.get("node") or "another agent"
            self._complain_once(f"{name} has joined the run; {leader} coordinates it")

    async def _refuse_join(self, holder: Mapping[str, Any]) -> None:
        """Raises RunEndedError if the run at work would never admit this agent."""
        try:
            await asyncio.to_thread(refuse_join, holder, self._secret)
        except RunFolderError as error:
            raise RunEndedError(str(error), EndReason.USER_ERROR) from error

    # --- following ------------------------------------------------------------------------------
    async def _run_follower(self) -> None:
        """Wait for the heartbeat's answer or for a local change.

        On a change, return at once. The next heartbeat goes out on the second connection, and the
        coordinator then answers the older one."""
        self._pre_candidate.close()
        self._workload.state_changed.clear()
        self._session.retry_unreachable()
        requests = self._session.requests
        if requests.newest is None:
            # If the last answer is older than a beat, the coordinator is to answer at once.
            late = (
                self.coordinator is None
                and self._membership.now - self.state.role_since > self._heartbeat_interval_s
            )
            wait = 0.0 if late else self._heartbeat_interval_s
            requests.newest = asyncio.create_task(self._session.send_heartbeat(wait))
        question = requests.newest
        change = asyncio.create_task(self._workload.state_changed.wait())
        try:
            await asyncio.wait({question, change}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        requests.newest = None
        if question.done():
            question.result()
            return
        requests.add_superseded(question)
        await asyncio.sleep(0)  # one heartbeat reports all changes of this turn

    # --- no answer, and leading -----------------------------------------------------------------
    async def _run_pre_candidate(self) -> None:
        await self._pre_candidate.run_round()

    async def _run_candidate(self) -> None:
        if await self._candidate.open_term():
            await self._session.join()

    # --- the rest -------------------------------------------------------------------------------
    def _complain_once(self, sentence: str) -> None:
        if sentence != self._last_complaint:
            self._last_complaint = sentence
            self._complain(sentence)
