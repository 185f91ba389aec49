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
from holdfast.elastic.membership.prevote import Search
from holdfast.elastic.membership.reachability import Reaching
from holdfast.elastic.membership.workload import Work
from holdfast.elastic.protocol.coordinator_messages import (
    BEAT,
    HANG,
    JOIN,
    JOIN_FIRST,
    REPLACED,
    Heartbeat,
    JoinRequest,
)
from holdfast.elastic.protocol.generation_outcome import NodeOutcome
from holdfast.elastic.protocol.generation_record import GenerationRecord, read_record
from holdfast.elastic.protocol.hung_worker import Blame
from holdfast.elastic.protocol.start_state import StartState
from holdfast.elastic.run_result import EndedError, Over, trains_alone
from holdfast.errors import HoldfastError
from holdfast.policy.membership import election
from holdfast.policy.membership.election import Patience, Seat, Standing
from holdfast.policy.membership.transitions import Directive, Order, Phase, Stage
from holdfast.wire.http.async_client import DeadError, Talker
from holdfast.wire.http.server import Handler
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import (
    QUESTION,
    Term,
    asks,
    claim,
    newest_term,
)
from holdfast.wire.waiting import wait_event

logger = logging.getLogger(__name__)

ROUND_SECONDS = 1.0
"""Least seconds of a round in which a silent coordinator and the other agents may answer. A round
lasts a heartbeat if that is longer."""
PAUSE_SECONDS = 0.5
"""Seconds between two reads of the run store, and between two rounds."""
LONGEST_REST = 60.0
"""Most seconds before an agent whose terms ended by its own fault claims another one."""


class ReplacedError(EndedError):
    """Another agent has this agent's name, perhaps because this node was restarted."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"another agent has joined as {name}, and the run continues with that one. If both "
            "are to take part, give each its own name (cluster.node=NAME)",
            Over.REPLACED,
        )


async def _no_check() -> None:
    """Do nothing: the run store cannot be lost."""


class Follower:
    """The role loop of one agent. Lives in one event loop.

    `run` ends when the run is over, or raises.
    """

    def __init__(
        self, name: str, address: str, store: RunStore, secret: Secret, work: Work,
        reign: Callable[[Term], Awaitable[Coordinator]], *, places: int = 1,
        told: Mapping[str, Any] | None = None, patience: Patience | None = None, beat: float = 2.0,
        complain: Callable[[str], None] = lambda sentence: None,
        read: Callable[[int], Awaitable[GenerationRecord]] | None = None, own: Term | None = None,
        check: Callable[[], Awaitable[None]] = _no_check,
    ) -> None:  # fmt: skip
        """Make the loop; `run` runs it.

        Args:
            address: Where this agent's control listens.
            work: This node's workers.
            reign: Makes the coordinator of a term that this agent has opened.
            told: Facts about this node for the coordinator.
            beat: Seconds between two heartbeats if nothing changes.
            read: Reads a generation's object, instead of `read_record`.
            own: The term of a run of this node alone. The agent then follows no other coordinator,
                and leaves when that term is over.
            check: Raises HoldfastError if the run store no longer belongs to this run.
        """
        self.seat = Seat(name)
        self.mark = secrets.token_hex(8)
        self.coordinator: Coordinator | None = None
        self.leaving = 0.0
        """Seconds until this node leaves the run; 0: it stays."""
        self.agents: Mapping[str, str] = {}
        """Of the newest generation: name -> address."""
        self.told: dict[str, Any] = dict(told or {})
        self.over: tuple[str, str] | None = None
        """Verdict and kind, once the coordinator has said that the run is over."""
        self.fault: BaseException | None = None
        """Our own bug that ended the coordinator of a run of one node."""
        self._faults = 0  # terms that ended by such a bug
        self._address, self._store, self._secret, self._work = address, store, secret, work
        self._make_reign, self._places, self._own, self._check = reign, places, own, check
        self._patience, self._beat, self._complain = patience or Patience(), beat, complain
        self._read = read or partial(read_record, store)
        self._loop = asyncio.get_running_loop()
        self._doing = Directive(Order.WAIT, 0)
        self._talkers: dict[str, tuple[Talker, Talker]] = {}
        self._question: asyncio.Task[None] | None = None
        self._older: set[asyncio.Task[None]] = set()
        self._reigning: asyncio.Task[Any] | None = None
        self._search: Search | None = None  # while its coordinator is silent
        self._reaching = Reaching()
        self._looked = 0  # the generation after which the reachability probe ran last
        self._said = ""

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of other agents' requests, which belong to no generation."""
        return {JOIN: self._join, BEAT: self._heartbeat, QUESTION: self.who}

    async def run(self) -> str:
        """Follow or lead until the run is over or this node leaves it; return the run's verdict.

        Raises EndedError if the run cannot begin, or does not admit this agent."""
        parts = {
            Standing.SEEKING: self._seek, Standing.FOLLOWING: self._follow,
            Standing.SILENT: self._look_around, Standing.CLAIMING: self._claim,
            Standing.REIGNING: self._follow,
        }  # fmt: skip
        if self._own is not None:
            self._set(election.found(self.seat, self._own.number, "", self._now))
        try:
            while self.seat.standing is not Standing.LEFT:
                logger.info("role %s", self.seat.standing.value)
                try:
                    await parts[self.seat.standing]()
                except EndedError:
                    raise
                except HoldfastError as error:
                    self._say(str(error))
                    await self._pause(PAUSE_SECONDS)
            return "" if self.over is None else self.over[0]
        finally:
            self._ask_no_more()
            self._end_search()
            self._reaching.close()
            if self._reigning is not None:
                self._reigning.cancel()
            for pair in self._talkers.values():
                for talker in pair:
                    talker.close()

    def leave(self) -> None:
        """Leave the run: follow no coordinator any more."""
        self.seat = election.left(self.seat)
        self._work.changed.set()

    # --- requests of other agents ---------------------------------------------------------------
    async def who(self, _: int, body: dict[str, Any]) -> dict[str, Any]:
        """Return this agent's name, role and term, and whether it hears its coordinator."""
        return {
            "node": self.seat.name, "term": self.seat.term,
            "hears": election.hears(self.seat, self._now, self._patience),
            "standing": self.seat.standing.value,
        }  # fmt: skip

    async def _join(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask_own(JOIN, body)

    async def _heartbeat(self, generation: int, body: dict[str, Any]) -> dict[str, Any]:
        return await self._ask_own(BEAT, body)

    async def _ask_own(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        coordinator = self.coordinator
        if coordinator is None:
            return {"term": self.seat.term, "order": Order.REFUSE.value}
        handler = coordinator.join if path == JOIN else coordinator.beat
        return await handler(0, body)

    # --- seeking --------------------------------------------------------------------------------
    async def _seek(self) -> None:
        self._end_search()
        await self._check()
        term, holder = await asyncio.to_thread(newest_term, self._store)
        address = "" if holder is None else str(holder.get("address", ""))
        if address == self._address and self.coordinator is None:
            address = ""  # this agent held the term before a restart or a failure of the term
        elif holder is not None and holder.get("alone"):
            await self._refuse_alone(holder, address)
        self._set(election.found(self.seat, term, address, self._now))
        if self.seat.standing is Standing.SEEKING:
            await self._ask(JOIN, self._joining())
            if self.seat.standing is Standing.SEEKING:  # it refused: a newer term is to come
                await self._pause(PAUSE_SECONDS)

    async def _refuse_alone(self, holder: Mapping[str, Any], address: str) -> None:
        """Raises EndedError if a run of one node is at work: it would never admit this agent."""
        if await asyncio.to_thread(asks(self._secret), address):
            raise EndedError(str(trains_alone(holder, "cluster.node")), Over.MEND)

    def _joining(self) -> JoinRequest:
        stage, held = self._state()
        return JoinRequest(
            self.seat.name, self.mark, self._places, self.told, self._work.at, stage, held,
            self._work.ready,
        )  # fmt: skip

    def _state(self) -> tuple[Stage, NodeOutcome | None]:
        stage = self._work.stage
        if stage is Stage.HELD and self._reaching.looking:
            stage = Stage.WORKING  # the next generation has only nodes that reach each other
        return stage, self._work.held if stage in (Stage.HELD, Stage.DONE) else None

    # --- following ------------------------------------------------------------------------------
    async def _follow(self) -> None:
        """Wait for the heartbeat's answer or for a local change.

        On a change, return at once. The next heartbeat goes out on the second connection, and the
        coordinator then answers the older one."""
        self._end_search()
        self._work.changed.clear()
        self._reaching.again(self.agents)
        if self._question is None:
            # If the last answer is older than a beat, the coordinator is to answer at once.
            late = self.coordinator is None and self._now - self.seat.since > self._beat
            wait = 0.0 if late else self._beat
            self._question = asyncio.create_task(self._ask(BEAT, self._beating(wait)))
        question = self._question
        change = asyncio.create_task(self._work.changed.wait())
        try:
            await asyncio.wait({question, change}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
        self._question = None
        if question.done():
            question.result()
            return
        self._older.add(question)
        question.add_done_callback(self._older.discard)
        await asyncio.sleep(0)  # one heartbeat reports all changes of this turn

    def _beating(self, wait: float) -> Heartbeat:
        stage, held = self._state()
        work = self._work
        return Heartbeat(
            self.seat.name, self.mark, self.seat.term, self._doing, work.at, stage, self.leaving,
            held, work.ready, tuple(self._reaching.missed), work.still, work.paces, wait,
        )  # fmt: skip

    async def _ask(self, path: str, request: JoinRequest | Heartbeat) -> None:
        """Send a request to the coordinator; apply its answer, or note that none came."""
        body, wait = request.to_json(), request.wait
        try:
            if self.coordinator is not None:
                answer = await self._ask_own(path, body)
            else:
                pair = self._pair()
                if pair is None:
                    raise DeadError("no agent holds the term")
                free = next((talker for talker in pair if not talker.busy), pair[0])
                answer = await free.post(path, body, self._bearable(wait))
        except HoldfastError as error:
            dead = isinstance(error, DeadError)
            self._set(election.unanswered(self.seat, dead, self._now, self._patience))
            if self.seat.standing is Standing.FOLLOWING:
                await self._pause(PAUSE_SECONDS / 5)
            else:
                self._work.changed.set()  # another request may be open that gets no answer now
            return
        await self._obey(answer)

    def _bearable(self, wait: float) -> float:
        """Return the timeout of a request whose answer is due within `wait` seconds.

        A follower's timeout leaves time for one more request on a new connection before the
        coordinator counts as silent."""
        silence = self._patience.silence
        if self.seat.standing is not Standing.FOLLOWING:
            return wait + silence / 2
        left = self.seat.since + silence - self._now
        return max(silence / 6, min(wait + silence / 3, left))

    def _ask_no_more(self) -> None:
        """Cancel the requests that are open."""
        for task in (self._question, *self._older):
            if task is not None:
                task.cancel()
        self._question = None

    @property
    def _holder(self) -> str:
        return self.seat.holder

    def _pair(self) -> tuple[Talker, Talker] | None:
        """Return two connections to the coordinator."""
        if not self._holder or self.coordinator is not None:
            return None
        if self._holder not in self._talkers:
            for pair in self._talkers.values():
                for talker in pair:
                    talker.close()
            self._talkers = {
                self._holder: (
                    Talker(self._holder, self._secret), Talker(self._holder, self._secret)
                )
            }  # fmt: skip
        return self._talkers[self._holder]

    async def _obey(self, answer: Mapping[str, Any]) -> None:
        term, order = int(answer["term"]), str(answer["order"])
        if term < self.seat.term and order != Order.REFUSE.value:
            self._set(election.refused(self.seat, self._now))
            return
        if order == Order.REFUSE.value:
            self._set(election.refused(self.seat, self._now))
            return
        if order == REPLACED:
            raise ReplacedError(self.seat.name)
        self._set(election.answered(self.seat, term, self._now))
        if order == JOIN_FIRST:
            await self._ask(JOIN, self._joining())
            return
        outside = answer.get("outside", False)
        if (self.leaving or answer.get("go")) and (outside or answer.get("free")):
            self.leave()  # the other nodes work without this one, or no node works
            return
        if outside:
            self._work.outside()
        if "blamed" in answer:
            at, rows = answer["blamed"]
            self._work.blame(int(at), [Blame.from_json(row) for row in rows])
        generation = int(answer["generation"])
        self._doing = Directive(Order(order), generation)
        match self._doing.order:
            case Order.START if generation > self._work.at:
                record = await self._read(generation)
                if generation <= self._work.at or term < self.seat.term:
                    return  # overtaken by a newer order meanwhile
                self.agents = record.addresses
                self._set(election.took(self.seat, term, generation, tuple(self.agents)))
                self._work.start(generation, record, StartState.from_json(answer["begin"]))
                self._doing = Directive(Order.WORK, generation)  # the order after a start
            case Order.HALT | Order.PAUSE as halt if generation == self._work.at:
                reason = str(answer.get("reason", ""))
                self._work.halt(generation, reason, gentle=halt is Order.PAUSE)
                if reason == HANG and self._looked < generation:
                    self._looked = generation
                    self._reaching.look(self.seat.name, self.agents, self._work.changed.set)
            case Order.LEAVE:
                self.over = str(answer.get("verdict", "")), str(answer.get("kind", ""))
                self._work.leave(self.over[0])
                if self.coordinator is None:
                    self.leave()
                else:
                    await self._see_off(self.coordinator)

    async def _see_off(self, coordinator: Coordinator) -> None:
        """Leave once the other nodes know that the run is over, or after the silence limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience.silence):
                await coordinator.all_told(self.seat.name)
        self.leave()

    # --- no answer ------------------------------------------------------------------------------
    async def _look_around(self) -> None:
        """Run one round of the pre-vote."""
        self._work.changed.clear()  # this round's requests report what has changed here
        begun = self._now
        if self._search is None:
            self._ask_no_more()  # to free a connection for the round
            self._search = Search(self._secret)
        search = self._search
        term, holder = await asyncio.to_thread(newest_term, self._store)
        if term > self.seat.term:
            await self._check()
            address = "" if holder is None else str(holder.get("address", ""))
            self._end_search()
            self._set(election.found(self.seat, term, address, self._now))
            return
        leads = "" if holder is None else str(holder.get("node", ""))
        if not search.sign:
            await asyncio.to_thread(search.look, self._store, self.seat.name, leads)
        others = {name: addr for name, addr in self.agents.items() if name != self.seat.name}
        peers = await search.round(
            others, term, lambda: self._ask(JOIN, self._joining()), lambda: self._silent,
            max(ROUND_SECONDS, self._beat),
        )  # fmt: skip
        if peers is not None and self._silent:
            newest = await asyncio.to_thread(search.look, self._store, self.seat.name, leads)
            alive = search.leader_moves(max(ROUND_SECONDS, self._beat))
            self._set(
                election.asked(
                    self.seat, peers, newest, self._now, self._patience, search.sign, alive
                )
            )
        if self._silent:
            await self._pause(max(0.0, min(PAUSE_SECONDS, self._beat / 2) - (self._now - begun)))
        if not self._silent:
            await search.end(self.seat.standing is Standing.FOLLOWING)
            self._end_search()

    @property
    def _silent(self) -> bool:
        return self.seat.standing is Standing.SILENT

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.close()
            self._search = None

    # --- leading --------------------------------------------------------------------------------
    async def _claim(self) -> None:
        term, number = self._own, self.seat.term
        if self._faults:  # the same fault may end the next term, so let another agent claim it
            await asyncio.sleep(min(2.0**self._faults, LONGEST_REST))
        if term is None:
            await self._check()
            number += 1
            term = await asyncio.to_thread(
                claim, self._store, number, self._address, self.seat.name
            )
        if term is None:
            self._set(election.claimed(self.seat, number, False, self._now))
            return
        silent = self.seat.holder
        self.coordinator = coordinator = await self._make_reign(term)
        coordinator.doubt(silent)
        self._set(election.claimed(self.seat, number, True, self._now))
        self._reigning = asyncio.create_task(coordinator.run())
        self._reigning.add_done_callback(lambda task: self._reigned(task, coordinator))
        await self._ask(JOIN, self._joining())

    def _reigned(self, task: asyncio.Task[Any], coordinator: Coordinator) -> None:
        if task.cancelled() or self.coordinator is not coordinator:
            return
        if self._own is not None and coordinator.reign.phase is not Phase.ENDED:
            self.fault = task.exception()
            self.leave()
            return
        if coordinator.reign.phase is Phase.FENCED or task.exception() is not None:
            self.coordinator = None
            self._set(election.fenced(self.seat, self._now))
            self._work.changed.set()
        if (error := task.exception()) is not None:
            self._faults += 1
            self._complain(f"the coordinator failed with an internal error: {error!r}")

    # --- the rest -------------------------------------------------------------------------------
    @property
    def _now(self) -> float:
        return self._loop.time()

    def _set(self, seat: Seat) -> None:
        if self.seat.standing is not Standing.LEFT:
            self.seat = seat

    def _say(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            self._complain(sentence)

    async def _pause(self, seconds: float) -> None:
        await wait_event(self._work.changed, seconds)
