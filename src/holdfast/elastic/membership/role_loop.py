"""An agent's role in the run: follower of a coordinator, candidate, or coordinator itself.

The loop carries out `policy.membership.election`. It reads the newest term from the run store,
joins that term's coordinator and keeps one heartbeat open there. If the coordinator falls silent,
it asks the other agents and opens the next term. `workload` is the interface to the node's workers.

    seeking    Read the newest term from the run store, and ask its holder to admit this agent.
    following  One heartbeat is open at the coordinator; a change here sends another at once.
    silent     Ask the agents of the last generation whether they hear the coordinator
               (`elastic/membership/prevote.py`).
    claiming   Open the next term in the run store.
    reigning   Send the same heartbeats to the coordinator in this process.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.elastic.coordinator.coordinator import Coordinator
from holdfast.elastic.membership.coordinator_clients import (
    CoordinatorClients,
    OpenRequests,
    reply_timeout,
)
from holdfast.elastic.membership.node_status import NodeStatus
from holdfast.elastic.membership.prevote import PreVote
from holdfast.elastic.membership.reachability import ReachabilityProbe
from holdfast.elastic.membership.workload import Workload
from holdfast.elastic.protocol.coordinator_messages import (
    HANG_REASON,
    HEARTBEAT_PATH,
    JOIN_FIRST_COMMAND,
    JOIN_PATH,
    REPLACED_COMMAND,
    Heartbeat,
    JoinRequest,
)
from holdfast.elastic.protocol.generation_record import GenerationRecord, read_record
from holdfast.elastic.protocol.hung_worker import HungWorker
from holdfast.elastic.protocol.start_state import StartState
from holdfast.elastic.run_result import (
    EndReason,
    ReplacedError,
    RunEndedError,
    single_node_run_error,
)
from holdfast.errors import HoldfastError
from holdfast.policy.membership import election
from holdfast.policy.membership.election import AgentState, ElectionTimeouts, Role
from holdfast.policy.membership.transitions import Directive, NodeCommand, Phase
from holdfast.wire.http.async_client import AgentEndedError
from holdfast.wire.http.server import Handler
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import (
    TERM_PATH,
    Term,
    create_term,
    holder_probe,
    newest_term,
)
from holdfast.wire.waiting import wait_event

logger = logging.getLogger(__name__)

MIN_PREVOTE_ROUND_S = 1.0
"""Least seconds of a round in which a silent coordinator and the other agents may answer. A round
lasts a heartbeat if that is longer."""
ROLE_RETRY_PAUSE_S = 0.5
"""Seconds between two reads of the run store, and between two rounds."""
MAX_ELECTION_BACKOFF_S = 60.0
"""Most seconds before an agent whose terms ended by its own fault claims another one."""


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
        join_info: Mapping[str, Any] | None = None,
        timeouts: ElectionTimeouts | None = None,
        heartbeat_interval_s: float = 2.0,
        complain: Callable[[str], None] = lambda sentence: None,
        read_generation: Callable[[int], Awaitable[GenerationRecord]] | None = None,
        own_term: Term | None = None,
        check_run_folder: Callable[[], Awaitable[None]] = _no_check,
    ) -> None:
        """Make the loop; `run` runs it.

        Args:
            address: Where this agent's control listens.
            workload: This node's workers.
            start_coordinator: Makes the coordinator of a term that this agent has opened.
            join_info: Facts about this node for the coordinator.
            heartbeat_interval_s: Seconds between two heartbeats if nothing changes.
            read_generation: Reads a generation's object, instead of `read_record`.
            own_term: The term of a run of this node alone. The agent then follows no other
                coordinator, and leaves when that term is over.
            check_run_folder: Raises HoldfastError if the run store no longer belongs to this run.
        """
        self.state = AgentState(name)
        self.incarnation = secrets.token_hex(8)
        self.coordinator: Coordinator | None = None
        self.leave_within_s = 0.0
        """Seconds until this node leaves the run; 0: it stays."""
        self.agent_addresses: Mapping[str, str] = {}
        """Of the newest generation: name -> address."""
        self.join_info: dict[str, Any] = dict(join_info or {})
        self.run_end: tuple[str, str] | None = None
        """Verdict and kind, once the coordinator has said that the run is over."""
        self.coordinator_fault: BaseException | None = None
        """Our own bug that ended the coordinator of a run of one node."""
        self._fault_count = 0  # terms that ended by such a bug
        self._address, self._store, self._secret, self._workload = address, store, secret, workload
        self._start_coordinator, self._own_term = start_coordinator, own_term
        self._check_run_folder, self._timeouts = check_run_folder, timeouts or ElectionTimeouts()
        self._heartbeat_interval_s, self._complain = heartbeat_interval_s, complain
        self._read_generation = read_generation or partial(read_record, store)
        self._current_command = Directive(NodeCommand.WAIT, 0)
        self._coordinator_clients = CoordinatorClients(secret)
        self._requests = OpenRequests()
        self._coordinator_task: asyncio.Task[Any] | None = None
        self._pre_vote: PreVote | None = None  # while its coordinator is silent
        self._reachability_probe = ReachabilityProbe()
        self._node_status = NodeStatus(
            name, self.incarnation, places, self.join_info, workload, self._reachability_probe
        )
        self._probed_generation = 0  # the generation after which the reachability probe ran last
        self._last_complaint = ""

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of other agents' requests, which belong to no generation."""
        return {
            JOIN_PATH: self._handle_join,
            HEARTBEAT_PATH: self._handle_heartbeat,
            TERM_PATH: self.handle_term_query,
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
            self._set_state(
                election.newest_term_read(self.state, self._own_term.number, "", self._now)
            )
        try:
            while self.state.role is not Role.SHUTDOWN:
                logger.info("role %s", self.state.role.value)
                try:
                    await parts[self.state.role]()
                except RunEndedError:
                    raise
                except HoldfastError as error:
                    self._complain_once(str(error))
                    await self._sleep_until_change(ROLE_RETRY_PAUSE_S)
            return "" if self.run_end is None else self.run_end[0]
        finally:
            self._requests.cancel()
            self._close_pre_vote()
            self._reachability_probe.close()
            if self._coordinator_task is not None:
                self._coordinator_task.cancel()
            self._coordinator_clients.close()

    def leave_run(self) -> None:
        """Leave the run: follow no coordinator any more."""
        self.state = election.shut_down(self.state)
        self._workload.state_changed.set()

    # --- requests of other agents ---------------------------------------------------------------
    async def handle_term_query(self, _: int, body: dict[str, Any]) -> dict[str, Any]:
        """Return this agent's name, role and term, and whether it hears its coordinator."""
        return {
            "node": self.state.name,
            "term": self.state.term,
            "hears": election.hears_leader(self.state, self._now, self._timeouts),
            "standing": self.state.role.value,
        }

    async def _handle_join(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask_local_coordinator(JOIN_PATH, body)

    async def _handle_heartbeat(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask_local_coordinator(HEARTBEAT_PATH, body)

    async def _ask_local_coordinator(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        coordinator = self.coordinator
        if coordinator is None:
            return {"term": self.state.term, "order": NodeCommand.REFUSE.value}
        handler = coordinator.handle_join if path == JOIN_PATH else coordinator.handle_heartbeat
        return await handler(0, body)

    # --- seeking --------------------------------------------------------------------------------
    async def _run_discovering(self) -> None:
        self._close_pre_vote()
        await self._check_run_folder()
        term, holder = await asyncio.to_thread(newest_term, self._store)
        address = "" if holder is None else str(holder.get("address", ""))
        if address == self._address and self.coordinator is None:
            address = ""  # this agent held the term before a restart or a failure of the term
        elif holder is not None and holder.get("alone"):
            await self._reject_single_node_run(holder, address)
        self._set_state(election.newest_term_read(self.state, term, address, self._now))
        if self.state.role is Role.DISCOVERING:
            await self._ask_coordinator(JOIN_PATH, self._node_status.make_join_request())
            if self.state.role is Role.DISCOVERING:  # it refused: a newer term is to come
                await self._sleep_until_change(ROLE_RETRY_PAUSE_S)

    async def _reject_single_node_run(self, holder: Mapping[str, Any], leader_address: str) -> None:
        """Raises RunEndedError if a run of one node is at work: it would never admit this agent."""
        if await asyncio.to_thread(holder_probe(self._secret), leader_address):
            raise RunEndedError(
                str(single_node_run_error(holder, "cluster.node")), EndReason.USER_ERROR
            )

    # --- following ------------------------------------------------------------------------------
    async def _run_follower(self) -> None:
        """Wait for the heartbeat's answer or for a local change.

        On a change, return at once. The next heartbeat goes out on the second connection, and the
        coordinator then answers the older one."""
        self._close_pre_vote()
        self._workload.state_changed.clear()
        self._reachability_probe.retry(self.agent_addresses)
        if self._requests.newest is None:
            # If the last answer is older than a beat, the coordinator is to answer at once.
            late = (
                self.coordinator is None
                and self._now - self.state.role_since > self._heartbeat_interval_s
            )
            wait = 0.0 if late else self._heartbeat_interval_s
            self._requests.newest = asyncio.create_task(
                self._ask_coordinator(
                    HEARTBEAT_PATH,
                    self._node_status.make_heartbeat(
                        self.state.term, self._current_command, self.leave_within_s, wait
                    ),
                )
            )
        question = self._requests.newest
        change = asyncio.create_task(self._workload.state_changed.wait())
        try:
            await asyncio.wait({question, change}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        self._requests.newest = None
        if question.done():
            question.result()
            return
        self._requests.add_superseded(question)
        await asyncio.sleep(0)  # one heartbeat reports all changes of this turn

    async def _ask_coordinator(self, path: str, request: JoinRequest | Heartbeat) -> None:
        """Send a request to the coordinator; apply its answer, or note that none came."""
        body, max_wait_s = request.to_json(), request.wait
        try:
            if self.coordinator is not None:
                answer = await self._ask_local_coordinator(path, body)
            else:
                if not self.state.leader_address:
                    raise AgentEndedError("no agent holds the term")
                client = self._coordinator_clients.find_free(self.state.leader_address)
                timeout_s = reply_timeout(self.state, self._timeouts, max_wait_s, self._now)
                answer = await client.post(path, body, timeout_s)
        except HoldfastError as error:
            dead = isinstance(error, AgentEndedError)
            self._set_state(election.leader_unanswered(self.state, dead, self._now, self._timeouts))
            if self.state.role is Role.FOLLOWER:
                await self._sleep_until_change(ROLE_RETRY_PAUSE_S / 5)
            else:
                # another request may be open that gets no answer now
                self._workload.state_changed.set()
            return
        await self._apply_reply(answer)

    async def _apply_reply(self, answer: Mapping[str, Any]) -> None:
        term, order = int(answer["term"]), str(answer["order"])
        if term < self.state.term or order == NodeCommand.REFUSE.value:
            self._set_state(election.leader_refused(self.state, self._now))
            return
        if order == REPLACED_COMMAND:
            raise ReplacedError(self.state.name)
        self._set_state(election.leader_answered(self.state, term, self._now))
        if order == JOIN_FIRST_COMMAND:
            await self._ask_coordinator(JOIN_PATH, self._node_status.make_join_request())
            return
        outside = answer.get("outside", False)
        if (self.leave_within_s or answer.get("go")) and (outside or answer.get("free")):
            self.leave_run()  # the other nodes work without this one, or no node works
            return
        if outside:
            self._workload.on_outside_generation()
        if "blamed" in answer:
            at, rows = answer["blamed"]
            self._workload.handle_hung_workers(int(at), [HungWorker.from_json(row) for row in rows])
        generation = int(answer["generation"])
        self._current_command = Directive(NodeCommand(order), generation)
        await self._carry_out(self._current_command, term, answer)

    async def _carry_out(self, directive: Directive, term: int, answer: Mapping[str, Any]) -> None:
        """Carry out a directive of the coordinator of `term`; `answer` has what it needs."""
        generation = directive.generation
        match directive.command:
            case NodeCommand.START if generation > self._workload.generation:
                record = await self._read_generation(generation)
                if generation <= self._workload.generation or term < self.state.term:
                    return  # overtaken by a newer order meanwhile
                self.agent_addresses = record.addresses
                self._set_state(
                    election.generation_joined(
                        self.state, term, generation, tuple(self.agent_addresses)
                    )
                )
                self._workload.start_generation(
                    generation, record, StartState.from_json(answer["begin"])
                )
                self._current_command = Directive(
                    NodeCommand.WORK, generation
                )  # the order after a start
            case NodeCommand.HALT | NodeCommand.PAUSE as halt if (
                generation == self._workload.generation
            ):
                reason = str(answer.get("reason", ""))
                self._workload.halt_generation(
                    generation, reason, at_step_end=halt is NodeCommand.PAUSE
                )
                if reason == HANG_REASON and self._probed_generation < generation:
                    self._probed_generation = generation
                    self._reachability_probe.probe_all(
                        self.state.name, self.agent_addresses, self._workload.state_changed.set
                    )
            case NodeCommand.LEAVE:
                self.run_end = str(answer.get("verdict", "")), str(answer.get("kind", ""))
                self._workload.on_run_ended(self.run_end[0])
                if self.coordinator is None:
                    self.leave_run()
                else:
                    await self._wait_until_all_dismissed(self.coordinator)

    async def _wait_until_all_dismissed(self, coordinator: Coordinator) -> None:
        """Leave once the other nodes know that the run is over, or after the silence limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.leader_timeout_s):
                await coordinator.wait_until_all_dismissed(self.state.name)
        self.leave_run()

    # --- no answer ------------------------------------------------------------------------------
    async def _run_pre_candidate(self) -> None:
        """Run one round of the pre-vote."""
        self._workload.state_changed.clear()  # this round's requests report what has changed here
        begun = self._now
        if self._pre_vote is None:
            self._requests.cancel()  # to free a connection for the round
            self._pre_vote = PreVote(self._secret)
        search = self._pre_vote
        term, holder = await asyncio.to_thread(newest_term, self._store)
        if term > self.state.term:
            await self._check_run_folder()
            address = "" if holder is None else str(holder.get("address", ""))
            self._close_pre_vote()
            self._set_state(election.newest_term_read(self.state, term, address, self._now))
            return
        leads = "" if holder is None else str(holder.get("node", ""))
        if not search.journal_sizes:
            await asyncio.to_thread(search.observe_journals, self._store, self.state.name, leads)
        others = {
            name: addr for name, addr in self.agent_addresses.items() if name != self.state.name
        }
        peers = await search.ask_round(
            others,
            term,
            lambda: self._ask_coordinator(JOIN_PATH, self._node_status.make_join_request()),
            lambda: self._is_pre_candidate,
            max(MIN_PREVOTE_ROUND_S, self._heartbeat_interval_s),
        )
        if peers is not None and self._is_pre_candidate:
            newest = await asyncio.to_thread(
                search.observe_journals, self._store, self.state.name, leads
            )
            alive = search.has_leader_progress(max(MIN_PREVOTE_ROUND_S, self._heartbeat_interval_s))
            self._set_state(
                election.pre_vote_ended(
                    self.state,
                    peers,
                    newest,
                    self._now,
                    self._timeouts,
                    search.journal_sizes,
                    alive,
                )
            )
        if self._is_pre_candidate:
            pause = min(ROLE_RETRY_PAUSE_S, self._heartbeat_interval_s / 2)
            await self._sleep_until_change(max(0.0, pause - (self._now - begun)))
        if not self._is_pre_candidate:
            await search.finish(self.state.role is Role.FOLLOWER)
            self._close_pre_vote()

    @property
    def _is_pre_candidate(self) -> bool:
        return self.state.role is Role.PRE_CANDIDATE

    def _close_pre_vote(self) -> None:
        if self._pre_vote is not None:
            self._pre_vote.close()
            self._pre_vote = None

    # --- leading --------------------------------------------------------------------------------
    async def _run_candidate(self) -> None:
        term, number = self._own_term, self.state.term
        if self._fault_count:  # the same fault may end the next term, so let another agent claim it
            await asyncio.sleep(min(2.0**self._fault_count, MAX_ELECTION_BACKOFF_S))
        if term is None:
            await self._check_run_folder()
            number += 1
            term = await asyncio.to_thread(
                create_term, self._store, number, self._address, self.state.name
            )
        if term is None:
            self._set_state(election.candidacy_ended(self.state, number, False, self._now))
            return
        silent = self.state.leader_address
        self.coordinator = coordinator = await self._start_coordinator(term)
        coordinator.suspect(silent)
        self._set_state(election.candidacy_ended(self.state, number, True, self._now))
        self._coordinator_task = asyncio.create_task(coordinator.run())
        self._coordinator_task.add_done_callback(
            lambda task: self._on_coordinator_ended(task, coordinator)
        )
        await self._ask_coordinator(JOIN_PATH, self._node_status.make_join_request())

    def _on_coordinator_ended(self, task: asyncio.Task[Any], coordinator: Coordinator) -> None:
        if task.cancelled() or self.coordinator is not coordinator:
            return
        if self._own_term is not None and coordinator.state.phase is not Phase.ENDED:
            self.coordinator_fault = task.exception()
            self.leave_run()
            return
        if coordinator.state.phase is Phase.FENCED or task.exception() is not None:
            self.coordinator = None
            self._set_state(election.newer_term_found(self.state, self._now))
            self._workload.state_changed.set()
        if (error := task.exception()) is not None:
            self._fault_count += 1
            self._complain(f"the coordinator failed with an internal error: {error!r}")

    # --- the rest -------------------------------------------------------------------------------
    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _set_state(self, state: AgentState) -> None:
        if self.state.role is not Role.SHUTDOWN:
            self.state = state

    def _complain_once(self, sentence: str) -> None:
        if sentence != self._last_complaint:
            self._last_complaint = sentence
            self._complain(sentence)

    async def _sleep_until_change(self, seconds: float) -> None:
        await wait_event(self._workload.state_changed, seconds)
