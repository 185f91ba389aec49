"""The coordinator of one term: the state of `policy.membership.transitions` behind HTTP.

Agents send requests, and the coordinator answers. `/join` identifies an agent. `/beat` reports the
agent's generation and what its workers do there. It stays open until the agent has something else
to do, or the next heartbeat is due. So one request serves as report, heartbeat and channel for
commands. A lost command is repeated in the next answer.

Reports that arrive in the same turn of the event loop are processed together. Only agents that a
change concerns are woken, so its cost grows linearly with the number of agents.

This module uses neither run store nor planner: `Make` makes the next generation's object and
returns what its nodes begin from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Protocol

from holdfast.elastic.coordinator.hang_detector import Comparing
from holdfast.elastic.coordinator.liveness_probe import dead
from holdfast.elastic.coordinator.stragglers import Pacing
from holdfast.elastic.protocol.coordinator_messages import (
    HANG,
    JOIN_FIRST,
    REPLACED,
    Heartbeat,
    JoinRequest,
    Known,
)
from holdfast.elastic.protocol.hung_worker import Blame
from holdfast.elastic.protocol.start_state import StartState
from holdfast.elastic.run_result import EndedError
from holdfast.errors import FencedError, HoldfastError
from holdfast.policy.detection.stragglers import Change
from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import (
    OVER,
    Directive,
    Node,
    Order,
    Phase,
    Reign,
    Report,
    Rules,
    directive,
)
from holdfast.wire.waiting import wait_event

LONGEST_WAIT = 20.0
SOON = 0.3
"""Seconds within which agents react to an event and report it."""
UNSETTLED = (Phase.STARTING, Phase.HALTING)
LOOK_SECONDS = 0.2
"""Seconds between two probes for ended agents; a live machine answers a probe at once."""
RETRY_SECONDS = 1.0
"""Seconds until an unreachable run store is tried again."""


class TakenError(HoldfastError):
    """A generation's object exists already; term and generation are the newest in the run store."""

    def __init__(self, term: int, generation: int) -> None:
        self.term, self.generation = term, generation
        super().__init__(f"term {term} and generation {generation} are in the run store already")


class ChangedError(HoldfastError):
    """The nodes or states for a generation changed while it was planned: plan it again."""


@dataclass(frozen=True)
class Made:
    """A generation whose object has been made. taken: places that it uses, by node; None for all
    places of its nodes."""

    start: StartState
    taken: Mapping[str, int] | None


class Make(Protocol):
    async def __call__(
        self, reign: Reign, generation: int, names: frozenset[str], known: Mapping[str, Known]
    ) -> Made:
        """Make the object of a generation of these nodes.

        Raises:
            TakenError: Another agent has made the object, or a newer term exists.
            EndedError: The run is to have no further generation.
            HoldfastError: The run store is unreachable; the coordinator tries again.
        """
        ...


class Coordinator:
    """The coordinator of one term. Lives in one event loop; `run` ends with the term."""

    def __init__(
        self, reign: Reign, rules: Rules, make: Make,
        changed: Callable[[Reign, Reign], None] = lambda old, new: None,
        complain: Callable[[str], None] = lambda sentence: None,
    ) -> None:  # fmt: skip
        """changed: receives the old and the new state at every change of phase, generation or
        membership. complain: receives one line each time the run store becomes unreachable."""
        self.reign = reign
        self.known: dict[str, Known] = {}
        self.kind = ""  # why the run ended, one of `run_result.Over`
        self.sent_away: set[str] = set()  # nodes to leave once the rest works without them
        self._rules, self._make, self._changed, self._complain = rules, make, changed, complain
        self._loop = asyncio.get_running_loop()
        self._ticked = self._loop.time()
        self._begin: StartState | None = None  # the nodes' start state; see `_answer`
        self._complained = ""  # the last complaint why no generation can be made
        self._inbox: list[Report] = []
        self._waiting: dict[str, tuple[asyncio.Future[None], Directive, bool]] = {}
        self._news = asyncio.Event()
        self._seeking: asyncio.Task[None] | None = None  # for agents that may have ended
        self._dismissed: set[str] = set()  # nodes that know that the run is over
        self._comparing = Comparing()
        self._blamed: dict[str, list[Blame]] = {}
        self._misses: dict[str, frozenset[str]] = {}  # by node: nodes that it does not reach
        self._looking: asyncio.Task[None] | None = None
        self.pacing = Pacing()
        self.paced: Callable[[Sequence[Change]], None] = lambda changes: None
        """Called when the verdict on a worker's pace changes: slow, well, to be left out."""

    # --- decisions of other parts ---------------------------------------------------------------
    def halt(self, reason: str, *, gentle: bool = False) -> None:
        self._set(transitions.halt(self.reign, reason, self._now, gentle=gentle))

    def warned(self, name: str, seconds: float) -> None:
        """Note that a node will be lost in so many seconds."""
        now = self._now
        self._set(transitions.warned(self.reign, name, now + seconds, now, self._rules))

    def doubt(self, address: str) -> None:
        """Suspect the node of the previous coordinator, which listened there and fell silent."""
        for name, known in self.known.items():
            if address and known.told.get("address") == address:
                self._set(transitions.doubted(self.reign, name, self._now, self._rules))

    def done(self, verdict: str = "", kind: str = "") -> None:
        self.kind = self.kind or kind
        self._set(transitions.done(self.reign, verdict, self._now))

    def look(self) -> None:
        """Apply the rules again, because a fact that they depend on has changed."""
        self._tick()
        self._news.set()

    def fence(self) -> None:
        """End this term, because a newer one exists."""
        self._set(transitions.fenced(self.reign, self._now))

    # --- requests -------------------------------------------------------------------------------
    async def join(self, _: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle a JoinRequest. Of two agents with one name, the later one counts.

        Raises ValueError or KeyError for a malformed request."""
        asked = JoinRequest.from_json(body)
        name, now = asked.name, self._now
        if not name:
            raise ValueError("a node without a name")
        new = Node(
            name, asked.mark, asked.places, now, now, asked.at, asked.stage, ready=asked.ready
        )  # fmt: skip
        self.known[name] = Known(asked.told, asked.held, new.at)
        for one, missed in self._misses.items():  # reports may concern an earlier process
            self._misses[one] = missed - {name} if one != name else frozenset()
        self._set(transitions.came(self.reign, new, now, self._rules))
        self._news.set()  # the new node has its own settling time
        return self._answer(name)

    async def beat(self, _: int, body: dict[str, Any]) -> dict[str, Any]:
        """Handle a Heartbeat. The answer comes when the agent has something else to do, or after
        the wait that the heartbeat names."""
        said = Heartbeat.from_json(body)
        name, mark = said.name, said.mark
        if said.term > self.reign.term:
            self.fence()
        report = Report(name, mark, said.at, said.stage, said.ready)
        wait = min(max(0.0, said.wait), LONGEST_WAIT)
        known = self.known.get(name)
        if known is not None and said.held is not None:
            known.held, known.at = said.held, said.at
        if said.leaving:
            self.warned(name, said.leaving)
        self._miss(name, mark, said.misses)
        self._let_go(name)
        if self._compare(said):
            wait = 0.0
        woken = self._loop.create_future()
        self._waiting[name] = woken, said.doing, bool(said.leaving)
        self._hear(report)
        timer = self._loop.call_later(wait, _wake, woken)
        try:
            await woken
        finally:
            timer.cancel()
            if self._waiting.get(name, (None,))[0] is woken:
                del self._waiting[name]
        answer = self._answer(name, mark)
        if blamed := self._blamed.pop(name, None):
            answer["blamed"] = [report.at, [one.to_json() for one in blamed]]
        return answer

    @property
    def _idle(self) -> bool:
        """True if no node works, and several nodes are present that may continue."""
        return self.reign.phase is Phase.GATHERING and len(self.reign.nodes) > 1

    def _answer(self, name: str, mark: str | None = None) -> dict[str, Any]:
        node, term = self.reign.node(name), self.reign.term
        over = self.reign.phase in OVER
        if not over and (node is None or (mark is not None and node.mark != mark)):
            return {"term": term, "order": JOIN_FIRST if node is None else REPLACED}
        due = directive(self.reign, name)
        answer: dict[str, Any] = {
            "term": term, "order": due.order.value, "generation": due.generation,
            "outside": name not in self.reign.members and self.reign.phase is Phase.TRAINING,
            "go": name in self.sent_away, "free": self._idle,
        }  # fmt: skip
        if due.order is Order.START and self._begin is None:
            # The coordinator that made the generation was lost before all nodes had begun. The
            # start state was lost with it.
            self.halt("coordinator_lost")
            return {"term": term, "order": Order.WAIT.value, "generation": 0}
        if due.order is Order.START and self._begin is not None:
            answer["begin"] = self._begin.to_json()
        elif due.order in (Order.HALT, Order.PAUSE):
            answer["reason"] = self.reign.reason
        elif due.order is Order.LEAVE:
            answer |= {"verdict": self.reign.verdict, "kind": self.kind}
            self._dismissed.add(name)
            self._news.set()
        return answer

    # --- processing reports ---------------------------------------------------------------------
    @property
    def _now(self) -> float:
        return self._loop.time()

    def _hear(self, report: Report) -> None:
        self._inbox.append(report)
        if len(self._inbox) == 1:
            self._loop.call_soon(self._take_in)

    def _take_in(self) -> None:
        reports, self._inbox = self._inbox, []
        nodes = [(self.reign.node(report.name), report) for report in reports]
        if any(node is not None and node.ready != report.ready for node, report in nodes):
            self._news.set()  # deadlines may have changed
        self._set(transitions.heard(self.reign, reports, self._now, self._rules))
        for report in reports:
            self._look(report.name)

    def _set(self, reign: Reign) -> None:
        old, self.reign = self.reign, reign
        if _outline(old) == _outline(reign):
            return
        self._changed(old, reign)
        self._news.set()
        for name in list(self._waiting):
            self._look(name)

    def _look(self, name: str) -> None:
        """Answer a waiting node if it has something else to do."""
        waiting = self._waiting.get(name)
        if waiting is None:
            return
        woken, doing, leaving = waiting
        node = self.reign.node(name)
        if node is None and self.reign.phase not in OVER:
            _wake(woken)
            return
        due = directive(self.reign, name)
        # Do not wake a node just to repeat WAIT or WORK, unless it is leaving. A leaving node must
        # learn that the remaining nodes work without it.
        if due != doing and (leaving or due.order not in (Order.WAIT, Order.WORK)):
            _wake(woken)

    async def _look_for_dead(self) -> None:
        """Probe silent nodes while a generation stops or begins: their agents may have ended."""
        while self.reign.phase in UNSETTLED:
            await asyncio.sleep(LOOK_SECONDS)
            silent = {
                name: str(self.known[name].told.get("address", ""))
                for name in transitions.awaited(self.reign)
                if name in self.known
            }
            for name in await dead(silent):
                if name in transitions.awaited(self.reign):
                    cause = "its agent has ended"
                    now = self._now
                    self._set(transitions.gone(self.reign, name, cause, now, self._rules))

    def _let_go(self, name: str) -> None:
        """Answer a node's older request: its agent sends a new one and reads only that answer."""
        if name in self._waiting:
            _wake(self._waiting.pop(name)[0])

    # --- slow nodes -----------------------------------------------------------------------------
    def rest(self, name: str) -> bool:
        """Leave out a slow node if the remaining nodes suffice; return True if they do."""
        others = [node for node in self.reign.nodes if node.name != name and not node.banned]
        if not self._rules.fits(others):
            return False
        self._set(transitions.ban(self.reign, name, "slow_worker", self._now, self._rules))
        return True

    def admit(self, name: str) -> None:
        """Admit a node again that was left out because it was slow."""
        node = self.reign.node(name)
        if node is not None:
            self.reign = self.reign.put(replace(node, banned=False))
            self.look()

    # --- unreachable pairs ----------------------------------------------------------------------
    def _miss(self, name: str, mark: str, others: Iterable[str]) -> None:
        """Take a node's report of the nodes that it does not reach.

        If the coordinator then hears an unreachable node, that node is alive, so the pair is kept
        in separate generations. A dead node is not heard again."""
        node = self.reign.node(name)
        if node is None or node.mark != mark:
            return
        self._misses[name] = frozenset(others)
        for other in [one for one, missed in self._misses.items() if name in missed]:
            now = self._now
            self._set(transitions.parted(self.reign, name, other, now, self._rules))

    # --- hung workers ---------------------------------------------------------------------------
    def _compare(self, said: Heartbeat) -> bool:
        """Take a node's report on workers without progress; return True if it must kill one."""
        name, at, still = said.name, said.at, said.still
        if not self.reign.at_work or at != self.reign.generation or name not in self.reign.members:
            return False
        going = self.reign.phase is not Phase.HALTING  # if so, wait for the next generation
        if going and said.paces and (changes := self.pacing.hear(name, at, said.paces)):
            self.paced(changes)
        nodes = [node for one in self.reign.members - {name} if (node := self.reign.node(one))]
        heard = min((-inf if node.expected else node.heard for node in nodes), default=inf)
        if blamed := self._comparing.hear(name, at, still, self._now, heard):
            self._blamed[name] = blamed
        if still and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look_for_silent())
        if still and self._comparing.stuck(self._now, self.reign.members):
            self.halt(HANG)
        elif still and (found := self._comparing.hung(self._now, self.reign.members)):
            self._blamed[found[0]] = [found[1]]
            self._ask([found[0]])
        return name in self._blamed

    async def _look_for_silent(self) -> None:
        """While workers wait, probe every node that reported nothing.

        Declare such a node lost if it stays silent for longer than a worker may stall: all of the
        node may be suspended."""
        if not await self._sleep(SOON):
            return
        since, limit = self._comparing.waiting(0.0), self._comparing.limit
        if since is None or limit is None:
            return
        generation = self.reign.generation
        silent = self._silent(since)
        asked = self._now
        self._ask(silent)
        if not silent or not await self._sleep(max(SOON, since + limit - asked)):
            return
        silent, checked = self._silent(asked), self._now
        self._ask(self.reign.members)
        if not await self._sleep(SOON):
            return
        self._ask(self._comparing.names)  # compare again now that all nodes have reported
        if not silent:
            return
        now, waiting = self._now, self._comparing.waiting(checked)
        going = self.reign.at_work and self.reign.phase is not Phase.STARTING
        same = going and self.reign.generation == generation
        if not same or waiting is None or now - waiting <= limit:
            return
        for name in silent & self._silent(asked):
            cause = f"not heard while other nodes waited for it for {now - waiting:.1f} s"
            self._set(transitions.gone(self.reign, name, cause, now, self._rules))

    def _silent(self, since: float) -> frozenset[str]:
        nodes = (self.reign.node(name) for name in self.reign.members)
        return frozenset(node.name for node in nodes if node is not None and node.heard < since)

    def _ask(self, names: Iterable[str]) -> None:
        """Answer the nodes' open requests, so that they send new ones with their present state."""
        for name in names:
            if name in self._waiting:
                _wake(self._waiting[name][0])

    async def _sleep(self, seconds: float) -> bool:
        """Sleep; return False if this process woke late.

        Other nodes may be late too then, and must not be judged."""
        due = self._now + seconds
        await asyncio.sleep(seconds)
        return self._now - due < SOON

    # --- time -----------------------------------------------------------------------------------
    async def run(self) -> Reign:
        """Coordinate until a newer term exists or the run is over; return the last state."""
        while self.reign.phase not in OVER:
            self._news.clear()
            self._tick()
            idle = self._seeking is None or self._seeking.done()
            if self.reign.phase in UNSETTLED and idle:
                self._seeking = asyncio.create_task(self._look_for_dead())
            if self.reign.opening is not None:
                await self._open(*self.reign.opening)
                self._ticked = self._now
                continue
            if not self._news.is_set():
                due = transitions.deadline(self.reign, self._rules, self._now)
                wait = max(0.01, min(due - self._now + 0.001, self._rules.lost_after / 6))
                await wait_event(self._news, wait)
        return self.reign

    def _tick(self) -> None:
        """Apply the rules to the time passed; allow for a suspension of this process itself."""
        now = self._now
        if now - self._ticked > self._rules.lost_after / 3:
            self._set(transitions.overslept(self.reign, now, self._rules))
        self._ticked = now
        self._set(transitions.tick(self.reign, now, self._rules))

    async def all_told(self, but: str) -> None:
        """Wait until every node except `but` knows that the run is over."""
        while {node.name for node in self.reign.nodes} - self._dismissed - {but}:
            self._news.clear()
            await self._news.wait()

    async def _open(self, generation: int, names: frozenset[str]) -> None:
        try:
            made = await self._make(self.reign, generation, names, self.known)
        except TakenError as error:
            self._set(transitions.taken(self.reign, error.term, error.generation, self._now))
        except ChangedError:
            return
        except FencedError:
            self.fence()
        except EndedError as error:
            self.done(str(error), error.kind)
        except HoldfastError as error:
            if self._complained != (complaint := str(error)):  # it fails again each second
                self._complained = complaint
                self._complain(f"generation {generation} cannot be made yet: {error}")
            await wait_event(self._news, RETRY_SECONDS)
        else:
            self._complained = ""
            taken, self._begin = made.taken, made.start
            for one in self.known.values():
                one.held = None  # it described the generation before
            used = names if taken is None else frozenset(taken)
            self._set(
                transitions.opened(self.reign, generation, used, self._now, self._rules, taken)
            )


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _outline(reign: Reign) -> tuple[Phase, int, frozenset[str], bool, frozenset[str]]:
    return reign.phase, reign.generation, reign.members, reign.gentle, reign.wanted
