"""A world of three agents, for `tests/runtime/policy/membership/test_model_check.py`: every state
that it can come to.

The machines of `policy.membership.transitions` and `policy.membership.election` run as they are,
carried by a runtime as in `elastic/membership/role_loop.py` and
`elastic/coordinator/coordinator.py`, cut into its smallest steps. Time is no number here. Every
clock shows 0, and a timeout is an event of its own. It is free if it has a cause (the other agent
is dead, cut off, or follows a third one). It is a fault if it has none. The longest waits (of a
minority, of a rendezvous) end freely only when nothing else can happen.

An agent and the run store are immutable values that are numbered once each. A world is a tuple of
such numbers. The effect of a step on an agent depends on one or two agents and the store. So it is
computed once for all worlds in which it happens.

Each fault uses one of the budget. An agent dies (its machine reports it, or is silent from then
on). Some links are cut, or the run store is unreachable. A timeout comes without a cause, a clock
jumps, or an agent is suspended. At any later time, or never, a dead agent may return, a cut may
heal, or the store may answer again. A suspended agent may continue as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.policy.membership.election import AgentState, PreVoteReply, Role
from holdfast.policy.membership.transitions import CoordinatorState, NodeRecord, NodeStage, Phase
from tests.support.membership_model.agent import LONG, TURNS, Carried
from tests.support.membership_model.world import (
    NAMES,
    PAIR,
    Agent,
    Numbered,
    Request,
    Step,
    Store,
    World,
    put,
)

STOPPED = (NodeStage.HELD, NodeStage.BROKEN, NodeStage.DONE, NodeStage.IDLE)
AT_ONCE = ("dead", "broke", "built", "look", "begin")


@dataclass
class Model:
    """runs: what an agent does. kinds: of faults; () all of them."""

    runs: Carried = field(default_factory=Carried)
    eager: bool = False  # what only one agent takes part in comes before everything else
    ends: bool = True  # faults may end: an agent returns, a cut heals
    kinds: tuple[str, ...] = ()  # of faults; all of them
    agents: Numbered = field(default_factory=Numbered)
    stores: Numbered = field(default_factory=Numbered)
    _done: dict[Any, Any] = field(default_factory=dict)

    # --- where it begins --------------------------------------------------------------------
    def cold(self, faults: int, lates: int = 0) -> World:
        """Nothing has ever been."""
        agents = [Agent(True, 0, AgentState(name)) for name in NAMES]
        return self._world(Store(), agents, faults, lates)

    def training(self, faults: int, lates: int = 0) -> World:
        """All train in generation 1, of term 1, whose coordinator is the first."""
        store = Store(1, "a0", (frozenset(f"{name}0" for name in NAMES),))
        nodes = tuple(NodeRecord(n, "0", 1, 0, 0, 1, NodeStage.WORKING) for n in NAMES)
        reign = CoordinatorState(1, Phase.TRAINING, 1, frozenset(NAMES), nodes, reason="")
        agents = [
            Agent(True, 0, seat, None, NodeStage.WORKING, True)
            for seat in (
                AgentState(n, Role.FOLLOWER, 1, "a0", 1, 0, NAMES, last_answered_term=1)
                for n in NAMES
            )
        ]
        seat = replace(agents[0].seat, role=Role.LEADER)
        agents[0] = agents[0]._replace(seat=seat, reign=reign)
        return self._world(store, agents, faults, lates)

    def _world(self, store: Store, agents: list[Agent], faults: int, lates: int) -> World:
        a, b, c = (self.agents(agent) for agent in agents)
        return World(self.stores(store), (a, b, c), faults=faults, lates=lates)

    # --- what can happen --------------------------------------------------------------------
    def steps(self, world: World) -> list[Step]:
        """Everything that can happen next and changes anything."""
        found = [step for step in self._prompt(world) if step.world != world]
        first = None
        if self.eager:
            first = next((step.label for step in found if step.label[0] in AT_ONCE), None)
        if first is not None:
            found = [step for step in found if step.label[:2] == first[:2]]
        if not found:
            found = [step for step in self._patient(world) if step.world != world]
        for step in self._outside(world):
            if step.world != world and (first is None or not self._can_wait(world, first, step)):
                found.append(step)
        return found

    def _can_wait(self, world: World, first: tuple[Any, ...], fault: Step) -> bool:
        """Return True if a fault has the same result before and after the immediate step. That
        holds if neither of the two reads what the other one changes. Then the fault is tried only
        after the step."""
        what, where = fault.label[0], fault.label[1:2]
        if world.faults == fault.world.faults or first[0] == "built":
            return False  # the end of a fault, or all agents take part
        i = first[1]
        alone = what in ("suspect", "suspects", "clock jumps", "impatient", "error")
        if alone or (what in ("crash", "vanish", "stop") and first[0] in ("look", "begin")):
            return where != (i,)
        if what == "cut":
            mine = sum(PAIR[i, k] for k in range(3) if k != i)
            return first[0] in ("look", "begin") or not fault.world.cuts & mine
        return what == "outage" and first[0] not in ("look", "begin")

    def _prompt(self, world: World) -> Iterator[Step]:
        for i in range(3):
            agent = self.agents.values[world.agents[i]]
            if not agent.up or world.asleep >> i & 1:
                continue
            if agent.answer is not None:
                yield self._one("answer", self.runs.deliver, world, i)
            yield from self._asks(world, i, agent)
            yield from self._works(world, i, agent)
            if not world.outage:
                yield from self._stores(world, i, agent)
            if agent.reign is not None:
                yield self._one("tick", self.runs.tick, world, i)
                for node in agent.reign.nodes:
                    k = NAMES.index(node.name)
                    if k != i and not self._beats(world, k, i, node.incarnation):
                        yield self._one("lost", self.runs.lost, world, i, node.name)
        if world.late is not None:
            yield self._arrives(world, world.late)
        if world.outage:
            yield Step(("store back",), world._replace(outage=False))

    def _asks(self, world: World, i: int, agent: Agent) -> Iterator[Step]:
        """It asks its coordinator; who does not answer is noticed."""
        seat = agent.seat
        if agent.reign is not None:
            return  # in the same process: at once, see `_changed`
        if seat.role in (Role.DISCOVERING, Role.FOLLOWER, Role.PRE_CANDIDATE):
            looks = seat.role is not Role.FOLLOWER and not world.outage
            if not seat.leader_address or (
                looks and self.stores.values[world.store].term > seat.term
            ):
                return  # the run store comes first
            k = NAMES.index(seat.leader_address[0])
            other = self.agents.values[world.agents[k]]
            if not self._linked(world, i, k):
                yield self._one("unanswered", self.runs.unanswered, world, i, False)
            elif not other.up or other.address != seat.leader_address or k == i:
                yield self._one("dead", self.runs.unanswered, world, i, True)
            else:
                yield self._two("ask", self.runs.ask, world, i, k)

    def _works(self, world: World, i: int, agent: Agent) -> Iterator[Step]:
        """Its workers. They need all of their generation, each with each."""
        if agent.stage not in (NodeStage.BUILDING, NodeStage.WORKING):
            return
        ready, broken, parted = True, False, list[str]()
        for name in agent.seat.members:
            k = NAMES.index(name)
            other: Agent = self.agents.values[world.agents[k]]
            ours = other.up and other.seat.generation == agent.seat.generation
            ready = ready and ours and other.stage is NodeStage.BUILDING
            ready = ready and all(
                self._linked(world, k, NAMES.index(n)) for n in agent.seat.members
            )
            if not self._linked(world, i, k):
                parted.append(name)
            broken = broken or not other.up or (ours and other.stage in STOPPED)
            broken = broken or other.seat.generation > agent.seat.generation
        if agent.stage is NodeStage.BUILDING and ready and not broken and not parted:
            for name in agent.seat.members:  # they all meet, or none does
                world = self._one("built", self.runs.build, world, NAMES.index(name)).world
            yield Step(("built", agent.seat.generation), world)
        for name in parted or [""] * broken:
            yield self._one("broke", self.runs.stage, world, i, NodeStage.BROKEN, name)

    def _stores(self, world: World, i: int, agent: Agent) -> Iterator[Step]:
        """What it reads of the run store, or creates there."""
        match agent.seat.role:
            case Role.DISCOVERING:
                yield self._stored("look", self.runs.look, world, i)
            case Role.PRE_CANDIDATE:
                yield self._stored("look", self.runs.look, world, i)
                yield self._ask_around(world, i, TURNS)
            case Role.CANDIDATE:
                yield self._stored("claim", self.runs.claim, world, i)
            case Role.LEADER if agent.reign is None:
                yield self._stored("begin", self.runs.begin, world, i)
            case Role.LEADER:
                yield self._stored("watch", self.runs.watch, world, i)
        if agent.pending is not None:
            yield self._stored("create", self.runs.create, world, i)
        elif agent.reign is not None and agent.reign.pending_generation is not None:
            yield self._stored("check", self.runs.check, world, i)

    def _ask_around(self, world: World, i: int, since: float) -> Step:
        """Ask the other agents, and read the run store for a newer generation and for signs of
        life."""
        agent: Agent = self.agents.values[world.agents[i]]
        said = []
        for name in agent.seat.members:
            k = NAMES.index(name)
            if k != i:
                other: Agent = self.agents.values[world.agents[k]]
                said.append((name, self._said(world, i, k, agent, other)))
        moving, alive = self._signs(world, i, agent.seat.leader_address)
        return self._stored(
            "ask around", self.runs.asked, world, i, tuple(said), since, moving, alive
        )

    def _signs(self, world: World, i: int, holder: str) -> tuple[bool, bool]:
        """Return whether the run store shows this agent that other agents continue, and its
        coordinator."""
        if not self.moving(world):
            return False, False
        store: Store = self.stores.values[world.store]
        others = {one for one in store.generations[-1] if one[0] != NAMES[i]}
        return bool(others), holder in others

    def _said(self, world: World, i: int, k: int, agent: Agent, other: Agent) -> PreVoteReply:
        if not self._linked(world, i, k):
            return PreVoteReply.UNKNOWN
        store: Store = self.stores.values[world.store]
        theirs = f"{NAMES[k]}{other.mark}"
        known = agent.seat.generation and theirs not in store.generations[agent.seat.generation - 1]
        if not other.up or known:  # the address of that time
            return PreVoteReply.DEAD
        if other.seat.term < agent.seat.term:
            return PreVoteReply.UNKNOWN
        hears = other.seat.role in (Role.FOLLOWER, Role.LEADER)
        return PreVoteReply.HEARS_LEADER if hears else PreVoteReply.MISSES_LEADER

    def _patient(self, world: World) -> Iterator[Step]:
        """Nothing else happens: the long waits end."""
        for i in range(3):
            agent: Agent = self.agents.values[world.agents[i]]
            if not agent.up or world.asleep >> i & 1:
                continue
            if agent.seat.role is Role.PRE_CANDIDATE and not world.outage:
                yield self._ask_around(world, i, LONG)
            if agent.reign is not None:
                for pair in agent.reign.unreachable_pairs:
                    if self._linked(world, NAMES.index(pair.one), NAMES.index(pair.other)):
                        yield self._one("try again", self.runs.try_again, world, i)
            if agent.stage is NodeStage.BUILDING:
                yield self._one("not built", self.runs.stage, world, i, NodeStage.BROKEN, "")

    # --- faults, and the ends of faults -----------------------------------------------------
    def _outside(self, world: World) -> Iterator[Step]:
        if world.cuts and self.ends:
            yield Step(("heal",), world._replace(cuts=0), True)
        if world.asleep and self.ends:
            yield Step(("wake",), world._replace(asleep=0), True)
        for i in range(3):
            agent: Agent = self.agents.values[world.agents[i]]
            if not agent.up and self.ends and agent.mark < 1:
                new = self.agents(Agent(True, agent.mark + 1, AgentState(NAMES[i])))
                mine = sum(PAIR[i, k] for k in range(3) if k != i)
                world_ = world._replace(cuts=world.cuts & ~mine)
                yield Step(("return", i), put(world_, i, new), True)
            if (
                agent.up
                and not world.asleep >> i & 1
                and world.lates
                and world.late is None
                and agent.seat.leader_address
            ):
                request = self.runs.request(agent)
                if request.to != i:
                    yield Step(
                        ("held up", i), world._replace(late=request, lates=world.lates - 1), True
                    )
        if world.faults:
            for step in self._faults(world._replace(faults=world.faults - 1)):
                if not self.kinds or step.label[0] in self.kinds:
                    yield step._replace(outside=True)

    def _faults(self, world: World) -> Iterator[Step]:
        if not world.outage:
            yield Step(("outage",), world._replace(outage=True))
        if not world.cuts:
            for cuts in range(1, 8):
                yield Step(("cut", cuts), world._replace(cuts=cuts))
        for i in range(3):
            agent: Agent = self.agents.values[world.agents[i]]
            if not agent.up:
                continue
            gone = self.agents(Agent(False, agent.mark, AgentState(NAMES[i])))
            late = world.late if world.late is None or world.late.name != NAMES[i] else None
            dead = put(world._replace(late=late, asleep=world.asleep & ~(1 << i)), i, gone)
            yield Step(("crash", i), dead)
            mine = sum(PAIR[i, k] for k in range(3) if k != i)
            yield Step(("vanish", i), dead._replace(cuts=dead.cuts | mine))
            if world.asleep >> i & 1:
                continue
            if not world.asleep:
                yield Step(("stop", i), world._replace(asleep=1 << i))
            if agent.reign is not None:
                for node in agent.reign.nodes:
                    if node.name != NAMES[i]:
                        yield self._one("suspect", self.runs.lost, world, i, node.name)
                yield self._one("clock jumps", self.runs.lost, world, i, "")
            elif agent.seat.role is Role.FOLLOWER:
                yield self._one("suspects", self.runs.unanswered, world, i, False)
            elif agent.seat.role is Role.PRE_CANDIDATE and not world.outage:
                yield self._ask_around(world, i, LONG)._replace(label=("impatient", i))
            if agent.stage is NodeStage.WORKING:
                yield self._one("error", self.runs.stage, world, i, NodeStage.BROKEN, "")

    # --- who reaches whom -------------------------------------------------------------------
    def _linked(self, world: World, i: int, k: int) -> bool:
        return i == k or not (world.cuts & PAIR[i, k] or world.asleep & (1 << i | 1 << k))

    def _beats(self, world: World, i: int, coordinator: int, mark: str) -> bool:
        """Return True if that coordinator will hear this agent."""
        agent: Agent = self.agents.values[world.agents[i]]
        other: Agent = self.agents.values[world.agents[coordinator]]
        asks = agent.seat.role in (Role.DISCOVERING, Role.FOLLOWER, Role.PRE_CANDIDATE)
        at = agent.seat.leader_address == other.address
        return (
            agent.up
            and str(agent.mark) == mark
            and asks
            and at
            and self._linked(world, i, coordinator)
        )

    def moving(self, world: World) -> bool:
        """Return True if the newest generation commits steps."""
        store: Store = self.stores.values[world.store]
        if not store.generations:
            return False
        return self.commits(world, len(store.generations))

    def commits(self, world: World, generation: int) -> bool:
        store: Store = self.stores.values[world.store]
        members = sorted(store.generations[generation - 1])
        inside = [NAMES.index(address[0]) for address in members]
        for i, address in zip(inside, members, strict=True):
            agent: Agent = self.agents.values[world.agents[i]]
            if not agent.up or agent.address != address or agent.stage is not NodeStage.WORKING:
                return False
            if agent.seat.generation != generation or not all(
                self._linked(world, i, k) for k in inside
            ):
                return False
        return True

    def trains(self, world: World) -> bool:
        """Whether all that are alive and reach each other train, and will be led on; of several
        parts, one."""
        store: Store = self.stores.values[world.store]
        if not self.moving(world):
            return False
        inside = {NAMES.index(address[0]) for address in store.generations[-1]}
        agents = [self.agents.values[number] for number in world.agents]
        for k in range(3):
            joined = all(self._linked(world, i, k) for i in inside)
            if k not in inside and agents[k].up and joined:
                return False
        return any(
            agent.reign is not None
            and (agent.reign.term, agent.reign.phase) == (store.term, Phase.TRAINING)
            and agent.reign.generation == len(store.generations)
            for agent in agents
        )

    # --- steps, each computed once ----------------------------------------------------------
    def _one(self, label: str, do: Any, world: World, i: int, *how: Any) -> Step:
        key = (label, do.__name__, world.agents[i], *how)
        new = self._done.get(key)
        if new is None:
            old = self.agents.values[world.agents[i]]
            new = self._done[key] = self.agents(self.runs.changed(old, do(old, *how)))
        return Step((label, i, *how), put(world, i, new))

    def _two(self, label: str, do: Any, world: World, i: int, k: int) -> Step:
        key = (label, world.agents[i], world.agents[k])
        new = self._done.get(key)
        if new is None:
            one, other = self.agents.values[world.agents[i]], self.agents.values[world.agents[k]]
            asks, serves = do(one, other)
            new = self._done[key] = (
                self.agents(self.runs.changed(one, asks)),
                self.agents(self.runs.changed(other, serves)),
            )
        return Step((label, i, k), put(put(world, k, new[1]), i, new[0]))

    def _stored(self, label: str, do: Any, world: World, i: int, *how: Any) -> Step:
        key = (label, world.agents[i], world.store, *how)
        new = self._done.get(key)
        if new is None:
            old = self.agents.values[world.agents[i]]
            agent, store = do(old, self.stores.values[world.store], *how)
            new = self._done[key] = self.agents(self.runs.changed(old, agent)), self.stores(store)
        return Step((label, i, *how), put(world._replace(store=new[1]), i, new[0]))

    def _arrives(self, world: World, late: Request) -> Step:
        """Deliver a delayed request, for whose answer no agent waits any more."""
        world = world._replace(late=None)
        other: Agent = self.agents.values[world.agents[late.to]]
        who = self.agents.values[world.agents[NAMES.index(late.name)]]
        if not other.up or who.mark != late.mark:
            return Step(("late",), world)
        return self._one("late", self.runs.take_late, world, late.to, late)
