"""A world of three agents, for `test_model_check.py`: every state that it can come to.

The machines of `policy.membership` and `policy.succession` run as they are, carried by a runtime as
in `elastic/following.py` and `elastic/coordinator.py`, cut into its smallest steps. Time is no
number here: every clock shows 0, and a time that is up is an event of its own. It is free where it
has a cause (the other is dead, cut off, or follows somebody else) and a fault where it has none.
The longest waits (of a minority, of a rendezvous) end freely only when nothing else can happen.

An agent and the run store are immutable values that are numbered once each; a world is a tuple of
such numbers. What one step does to an agent depends on one or two agents and the store, so it is
computed once for all worlds in which it happens.

Faults, each one of the budget: an agent dies (its machine says so, or is silent from then on), some
links are cut, the run store is out of reach, a time is up without a cause, a clock jumps. A dead
agent may return, a cut heal, the store answer again at any later time, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from holdfast.policy import membership, succession
from holdfast.policy.membership import (
    LET_GO,
    STAGES,
    Node,
    Order,
    Phase,
    Reign,
    Report,
    Rules,
    Stage,
)
from holdfast.policy.succession import Patience, Peer, Seat, Standing

NAMES = ("a", "b", "c")
PAIRS = tuple(combinations(range(3), 2))
PAIR = {pair: 1 << n for n, pair in enumerate(PAIRS)} | {
    (k, i): 1 << n for n, (i, k) in enumerate(PAIRS)
}
PATIENCE = Patience()
TURNS, LONG = -10.0, -1000.0
"""Since when a silent agent waits: until its turn, or longer than anybody does."""
STOPPED = (Stage.HELD, Stage.BROKEN, Stage.DONE, Stage.IDLE)


AT_ONCE = ("dead", "broke", "built", "look", "begin")


class ViolationError(AssertionError):
    """A state that must not be."""


class Answer(NamedTuple):
    term: int
    order: str
    generation: int = 0
    members: tuple[str, ...] = ()


class Request(NamedTuple):
    to: int
    join: bool
    name: str
    mark: int
    term: int
    at: int
    stage: Stage
    parted: str = ""


class Agent(NamedTuple):
    """known: its coordinator has taken it in. answer: under way to it. pending: the object that it
    is about to create, having checked that it may. parted: the node that its workers could not
    reach in the generation that it holds."""

    up: bool
    mark: int
    seat: Seat
    reign: Reign | None = None
    stage: Stage = Stage.IDLE
    known: bool = False
    answer: Answer | None = None
    pending: tuple[int, frozenset[str]] | None = None
    parted: str = ""

    @property
    def address(self) -> str:
        return f"{self.seat.name}{self.mark}"


class Store(NamedTuple):
    """holder: address of the newest term's. generations: of each, address of every member."""

    term: int = 0
    holder: str = ""
    generations: tuple[frozenset[str], ...] = ()


class World(NamedTuple):
    """Numbers of values in `Model`; cuts: bits of PAIRS."""

    store: int
    agents: tuple[int, int, int]
    cuts: int = 0
    outage: bool = False
    late: Request | None = None
    faults: int = 0
    lates: int = 0


class Step(NamedTuple):
    label: tuple[Any, ...]
    world: World
    outside: bool = False  # the surroundings did it: a fault, or the end of one


class _Numbered:
    """Values of one kind, numbered."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


def all_of(least: int) -> Callable[[Any], tuple[str, ...]]:
    return lambda nodes: tuple(node.name for node in nodes) if len(nodes) >= least else ()


@dataclass
class Model:
    """member, succeed: the two machines, or broken ones in their place. least: nodes that a
    generation needs."""

    member: ModuleType | SimpleNamespace = membership
    succeed: ModuleType | SimpleNamespace = succession
    least: int = 1
    eager: bool = False  # what only one agent takes part in comes before everything else
    ends: bool = True  # faults may end: an agent returns, a cut heals
    kinds: tuple[str, ...] = ()  # of faults; all of them
    agents: _Numbered = field(default_factory=_Numbered)
    stores: _Numbered = field(default_factory=_Numbered)
    _done: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rules = Rules(all_of(self.least), settle=0.0, gather=0.0)

    # --- where it begins --------------------------------------------------------------------
    def cold(self, faults: int, lates: int = 0) -> World:
        """Nothing has ever been."""
        agents = [Agent(True, 0, Seat(name)) for name in NAMES]
        return self._world(Store(), agents, faults, lates)

    def training(self, faults: int, lates: int = 0) -> World:
        """All train in generation 1, of term 1, whose coordinator is the first."""
        store = Store(1, "a0", (frozenset(f"{name}0" for name in NAMES),))
        nodes = tuple(Node(n, "0", 1, 0, 0, 1, Stage.WORKING) for n in NAMES)
        reign = Reign(1, Phase.TRAINING, 1, frozenset(NAMES), nodes, reason="")
        agents = [
            Agent(True, 0, seat, None, Stage.WORKING, True)
            for seat in (Seat(n, Standing.FOLLOWING, 1, "a0", 1, 0, NAMES, led=1) for n in NAMES)
        ]
        seat = replace(agents[0].seat, standing=Standing.REIGNING)
        agents[0] = agents[0]._replace(seat=seat, reign=reign)
        return self._world(store, agents, faults, lates)

    def _world(self, store: Store, agents: list[Agent], faults: int, lates: int) -> World:
        a, b, c = (self.agents(agent) for agent in agents)
        return World(self.stores(store), (a, b, c), faults=faults, lates=lates)

    # --- what can happen --------------------------------------------------------------------
    def steps(self, world: World) -> list[Step]:
        """Everything that can happen next and changes anything."""
        found = [step for step in self._prompt(world) if step.world != world]
        if self.eager:
            found = next(([step] for step in found if step.label[0] in AT_ONCE), found)
        if not found:
            found = [step for step in self._patient(world) if step.world != world]
        found += (step for step in self._outside(world) if step.world != world)
        return found

    def _prompt(self, world: World) -> Iterator[Step]:
        for i in range(3):
            agent = self.agents.values[world.agents[i]]
            if not agent.up:
                continue
            if agent.answer is not None:
                yield self._one("answer", self._deliver, world, i)
            yield from self._asks(world, i, agent)
            yield from self._works(world, i, agent)
            if not world.outage:
                yield from self._stores(world, i, agent)
            if agent.reign is not None:
                for node in agent.reign.nodes:
                    k = NAMES.index(node.name)
                    if k != i and not self._beats(world, k, i, node.mark):
                        yield self._one("lost", self._lost, world, i, node.name)
        if world.late is not None:
            yield self._arrives(world, world.late)
        if world.outage:
            yield Step(("store back",), world._replace(outage=False))

    def _asks(self, world: World, i: int, agent: Agent) -> Iterator[Step]:
        """It asks its coordinator; who does not answer is noticed."""
        seat = agent.seat
        if agent.reign is not None:
            return  # in the same process: at once, see `_changed`
        if seat.standing in (Standing.SEEKING, Standing.FOLLOWING, Standing.SILENT):
            looks = seat.standing is not Standing.FOLLOWING and not world.outage
            if not seat.holder or (looks and self.stores.values[world.store].term > seat.term):
                return  # the run store comes first
            k = NAMES.index(seat.holder[0])
            other = self.agents.values[world.agents[k]]
            if not self._linked(world, i, k):
                yield self._one("unanswered", self._unanswered, world, i, False)
            elif not other.up or other.address != seat.holder or k == i:
                yield self._one("dead", self._unanswered, world, i, True)
            else:
                yield self._two("ask", self._ask, world, i, k)

    def _works(self, world: World, i: int, agent: Agent) -> Iterator[Step]:
        """Its workers. They need all of their generation, each with each."""
        if agent.stage not in (Stage.BUILDING, Stage.WORKING):
            return
        ready, broken, parted = True, False, ""
        for name in agent.seat.members:
            k = NAMES.index(name)
            other: Agent = self.agents.values[world.agents[k]]
            ours = other.up and other.seat.at == agent.seat.at
            ready = ready and ours and other.stage is Stage.BUILDING
            ready = ready and all(
                self._linked(world, k, NAMES.index(n)) for n in agent.seat.members
            )
            if not self._linked(world, i, k):
                broken, parted = True, name
            broken = broken or not other.up or (ours and other.stage in STOPPED)
            broken = broken or other.seat.at > agent.seat.at
        if agent.stage is Stage.BUILDING and ready and not broken:
            for name in agent.seat.members:  # they meet, or nobody does
                world = self._one("built", self._build, world, NAMES.index(name)).world
            yield Step(("built", agent.seat.at), world)
        if broken:
            yield self._one("broke", self._stage, world, i, Stage.BROKEN, parted)

    def _stores(self, world: World, i: int, agent: Agent) -> Iterator[Step]:
        """What it reads of the run store, or creates there."""
        match agent.seat.standing:
            case Standing.SEEKING:
                yield self._stored("look", self._look, world, i)
            case Standing.SILENT:
                yield self._stored("look", self._look, world, i)
                yield self._ask_around(world, i, TURNS)
            case Standing.CLAIMING:
                yield self._stored("claim", self._claim, world, i)
            case Standing.REIGNING if agent.reign is None:
                yield self._stored("begin", self._begin, world, i)
            case Standing.REIGNING:
                yield self._stored("watch", self._watch, world, i)
        if agent.pending is not None:
            yield self._stored("create", self._create, world, i)
        elif agent.reign is not None and agent.reign.opening is not None:
            yield self._stored("check", self._check, world, i)

    def _ask_around(self, world: World, i: int, since: float) -> Step:
        """The others are asked, and the run store for a newer generation and for signs of life."""
        agent: Agent = self.agents.values[world.agents[i]]
        said = []
        for name in agent.seat.members:
            k = NAMES.index(name)
            if k != i:
                other: Agent = self.agents.values[world.agents[k]]
                said.append((name, self._said(world, i, k, agent, other)))
        return self._stored(
            "ask around", self._asked, world, i, tuple(said), since, self.moving(world)
        )

    def _said(self, world: World, i: int, k: int, agent: Agent, other: Agent) -> Peer:
        if not self._linked(world, i, k):
            return Peer.UNKNOWN
        store: Store = self.stores.values[world.store]
        theirs = f"{NAMES[k]}{other.mark}"
        known = agent.seat.at and theirs not in store.generations[agent.seat.at - 1]
        if not other.up or known:  # the address of that time
            return Peer.DEAD
        if other.seat.term < agent.seat.term:
            return Peer.UNKNOWN
        hears = other.seat.standing in (Standing.FOLLOWING, Standing.REIGNING)
        return Peer.HEARS if hears else Peer.MISSES

    def _patient(self, world: World) -> Iterator[Step]:
        """Nothing else happens: the long waits end."""
        for i in range(3):
            agent: Agent = self.agents.values[world.agents[i]]
            if not agent.up:
                continue
            if agent.seat.standing is Standing.SILENT and not world.outage:
                yield self._ask_around(world, i, LONG)
            if agent.reign is not None:
                for pair in agent.reign.apart:
                    if self._linked(world, NAMES.index(pair.one), NAMES.index(pair.other)):
                        yield self._one("try again", self._try_again, world, i)
            if agent.stage is Stage.BUILDING:
                yield self._one("not built", self._stage, world, i, Stage.BROKEN, "")

    # --- faults, and the ends of faults -----------------------------------------------------
    def _outside(self, world: World) -> Iterator[Step]:
        if world.cuts and self.ends:
            yield Step(("heal",), world._replace(cuts=0), True)
        for i in range(3):
            agent: Agent = self.agents.values[world.agents[i]]
            if not agent.up and self.ends and agent.mark < 1:
                new = self.agents(Agent(True, agent.mark + 1, Seat(NAMES[i])))
                mine = sum(PAIR[i, k] for k in range(3) if k != i)
                world_ = world._replace(cuts=world.cuts & ~mine)
                yield Step(("return", i), _put(world_, i, new), True)
            if agent.up and world.lates and world.late is None and agent.seat.holder:
                request = self._request(agent)
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
            gone = self.agents(Agent(False, agent.mark, Seat(NAMES[i])))
            late = world.late if world.late is None or world.late.name != NAMES[i] else None
            dead = _put(world._replace(late=late), i, gone)
            yield Step(("crash", i), dead)
            mine = sum(PAIR[i, k] for k in range(3) if k != i)
            yield Step(("vanish", i), dead._replace(cuts=dead.cuts | mine))
            if agent.reign is not None:
                for node in agent.reign.nodes:
                    if node.name != NAMES[i]:
                        yield self._one("suspect", self._lost, world, i, node.name)
                yield self._one("clock jumps", self._lost, world, i, "")
            elif agent.seat.standing is Standing.FOLLOWING:
                yield self._one("suspects", self._unanswered, world, i, False)
            elif agent.seat.standing is Standing.SILENT and not world.outage:
                yield self._ask_around(world, i, LONG)._replace(label=("impatient", i))
            if agent.stage is Stage.WORKING:
                yield self._one("error", self._stage, world, i, Stage.BROKEN, "")

    # --- who reaches whom -------------------------------------------------------------------
    def _linked(self, world: World, i: int, k: int) -> bool:
        return i == k or not world.cuts & PAIR[i, k]

    def _beats(self, world: World, i: int, coordinator: int, mark: str) -> bool:
        """Whether this agent is going to be heard by that coordinator."""
        agent: Agent = self.agents.values[world.agents[i]]
        other: Agent = self.agents.values[world.agents[coordinator]]
        asks = agent.seat.standing in (Standing.SEEKING, Standing.FOLLOWING, Standing.SILENT)
        at = agent.seat.holder == other.address
        return (
            agent.up
            and str(agent.mark) == mark
            and asks
            and at
            and self._linked(world, i, coordinator)
        )

    def moving(self, world: World) -> bool:
        """Whether the newest generation commits steps."""
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
            if not agent.up or agent.address != address or agent.stage is not Stage.WORKING:
                return False
            if agent.seat.at != generation or not all(self._linked(world, i, k) for k in inside):
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
            new = self._done[key] = self.agents(self._changed(old, do(old, *how)))
        return Step((label, i, *how), _put(world, i, new))

    def _two(self, label: str, do: Any, world: World, i: int, k: int) -> Step:
        key = (label, world.agents[i], world.agents[k])
        new = self._done.get(key)
        if new is None:
            one, other = self.agents.values[world.agents[i]], self.agents.values[world.agents[k]]
            asks, serves = do(one, other)
            new = self._done[key] = (
                self.agents(self._changed(one, asks)), self.agents(self._changed(other, serves)),
            )  # fmt: skip
        return Step((label, i, k), _put(_put(world, k, new[1]), i, new[0]))

    def _stored(self, label: str, do: Any, world: World, i: int, *how: Any) -> Step:
        key = (label, world.agents[i], world.store, *how)
        new = self._done.get(key)
        if new is None:
            old = self.agents.values[world.agents[i]]
            agent, store = do(old, self.stores.values[world.store], *how)
            new = self._done[key] = self.agents(self._changed(old, agent)), self.stores(store)
        return Step((label, i, *how), _put(world._replace(store=new[1]), i, new[0]))

    def _changed(self, old: Agent, new: Agent) -> Agent:
        """What is true of every step of one agent. Without times, and what is only told."""
        if new.up and new.mark == old.mark:
            if new.seat.at < old.seat.at or new.seat.term < old.seat.term:
                raise ViolationError(f"{new.seat.name} went back: {old.seat} to {new.seat}")
            if new.stage is not old.stage and new.stage not in STAGES[old.stage]:
                raise ViolationError(f"{new.seat.name}: {old.stage} to {new.stage}")
        seat = new.seat
        seat = replace(
            seat, since=0.0, tries=0, seen=seat.seen if seat.seen > seat.at else 0,
            dead=seat.dead and seat.standing is Standing.SILENT,
            led=seat.led if seat.led == seat.term else 0,
        )  # fmt: skip
        reign = new.reign
        if reign is not None:
            opens = reign.phase is Phase.OPENING
            late = [opens and node.came > reign.since for node in reign.nodes]
            nodes = tuple(
                replace(node, heard=0.0, came=float(came)) if node.heard or node.came else node
                for node, came in zip(reign.nodes, late, strict=True)
            )
            apart = tuple(sorted(reign.apart, key=lambda pair: (pair.one, pair.other)))
            reign = replace(reign, since=0.0, reason="", lost=(), nodes=nodes, apart=apart)
            if reign.phase is Phase.FENCED:
                seat, reign = self.succeed.fenced(seat, 0.0), None
            else:
                return self._talks_to_itself(old, new._replace(seat=seat, reign=reign))
        return new._replace(seat=seat, reign=reign)

    def _talks_to_itself(self, old: Agent, agent: Agent) -> Agent:
        """A coordinator's own node is heard at once, and obeys at once."""
        served, answer = self._serve(agent, self._request(agent))
        done = self._obey(served, answer)
        return agent if done == agent else self._changed(agent, done)

    # --- asking and answering ---------------------------------------------------------------
    def _request(self, agent: Agent) -> Request:
        seat = agent.seat
        follows = seat.standing in (Standing.FOLLOWING, Standing.REIGNING)
        return Request(
            NAMES.index(seat.holder[0]), not (follows and agent.known), seat.name, agent.mark,
            seat.term, seat.at, agent.stage, agent.parted,
        )  # fmt: skip

    def _serve(self, agent: Agent, request: Request) -> tuple[Agent, Answer]:
        """As `Coordinator.join` and `beat` do it."""
        reign = agent.reign
        if reign is None:
            return agent, Answer(agent.seat.term, Order.REFUSE)
        name, mark = request.name, str(request.mark)
        if request.term > reign.term:
            reign = self.member.fenced(reign, 0.0)
        elif request.join:
            new = Node(name, mark, 1, 0.0, 0.0, request.at, request.stage)
            reign = self.member.came(reign, new, 0.5, self.rules)
        else:
            report = Report(name, mark, request.at, request.stage)
            reign = self.member.heard(reign, [report], 0.0, self.rules)
        if request.parted and request.at == reign.generation:
            reign = self.member.parted(reign, name, request.parted, 0.0, self.rules)
        agent = agent._replace(reign=reign)
        node = reign.node(name)
        if reign.phase is not Phase.FENCED and (node is None or node.mark != mark):
            return agent, Answer(reign.term, "join" if node is None else "replaced")
        due = self.member.directive(reign, name)
        members = tuple(sorted(reign.members)) if due.order is Order.START else ()
        return agent, Answer(reign.term, due.order, due.generation, members)

    def _ask(self, one: Agent, other: Agent) -> tuple[Agent, Agent]:
        """The answer is under way; one that would change nothing need not come."""
        other, answer = self._serve(other, self._request(one))
        idle = one._replace(answer=None)
        done = self._obey(idle, answer)
        if answer.order not in (Order.START, Order.HALT, Order.PAUSE):
            return done, other
        return idle._replace(answer=None if done == idle else answer), other

    def _deliver(self, agent: Agent) -> Agent:
        assert agent.answer is not None
        return self._obey(agent._replace(answer=None), agent.answer)

    def _arrives(self, world: World, late: Request) -> Step:
        """A request that was held up. Nobody waits for its answer any more."""
        world = world._replace(late=None)
        other: Agent = self.agents.values[world.agents[late.to]]
        who = self.agents.values[world.agents[NAMES.index(late.name)]]
        if not other.up or who.mark != late.mark:
            return Step(("late",), world)
        return self._one("late", self._take_late, world, late.to, late)

    def _take_late(self, agent: Agent, late: Request) -> Agent:
        return self._serve(agent, late)[0]

    def _obey(self, agent: Agent, answer: Answer) -> Agent:
        """As `Follower._obey` does it."""
        seat = agent.seat
        if answer.term < seat.term or answer.order == Order.REFUSE:
            return agent._replace(seat=self.succeed.refused(seat, 0.0))
        seat = self.succeed.answered(seat, answer.term, 0.0)
        agent = agent._replace(seat=seat, known=answer.order not in ("join", "replaced"))
        if answer.order == Order.START and answer.generation > seat.at:
            if agent.stage not in LET_GO:
                raise ViolationError(f"{seat.name} was started while it works: {agent.stage}")
            seat = self.succeed.took(seat, answer.term, answer.generation, answer.members)
            agent = agent._replace(seat=seat, stage=Stage.BUILDING, parted="")
        halts = answer.order in (Order.HALT, Order.PAUSE) and answer.generation == seat.at
        if halts and agent.stage not in LET_GO:
            agent = agent._replace(stage=Stage.HELD)
        return agent

    # --- one agent alone --------------------------------------------------------------------
    def _unanswered(self, agent: Agent, dead: bool) -> Agent:
        seat = replace(agent.seat, since=LONG)
        return agent._replace(seat=self.succeed.unanswered(seat, dead, 0.0, PATIENCE))

    def _lost(self, agent: Agent, name: str) -> Agent:
        """The time of a node is up, or of all others: a clock jumped."""
        reign = agent.reign
        assert reign is not None
        nodes = tuple(
            replace(n, heard=LONG)
            if n.name == name or (not name and n.name != agent.seat.name)
            else n
            for n in reign.nodes
        )
        return agent._replace(reign=self.member.tick(replace(reign, nodes=nodes), 0.0, self.rules))

    def _build(self, agent: Agent) -> Agent:
        return agent._replace(stage=Stage.WORKING)

    def _stage(self, agent: Agent, stage: Stage, parted: str) -> Agent:
        return agent._replace(stage=stage, parted=parted)

    def _try_again(self, agent: Agent) -> Agent:
        assert agent.reign is not None
        return agent._replace(
            reign=self.member.tick(replace(agent.reign, apart=()), 0.0, self.rules)
        )

    # --- with the run store -----------------------------------------------------------------
    def _look(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        if agent.seat.standing is Standing.SILENT and store.term <= agent.seat.term:
            return agent, store
        seat = self.succeed.found(agent.seat, store.term, store.holder, 0.0)
        known = agent.known and seat.term == agent.seat.term
        return agent._replace(seat=seat, known=known), store

    def _asked(
        self, agent: Agent, store: Store, said: tuple[tuple[str, Peer], ...], since: float,
        moving: bool,
    ) -> tuple[Agent, Store]:  # fmt: skip
        if store.term > agent.seat.term:
            return agent, store  # `look` comes first
        seat = replace(agent.seat, since=since)
        newest = len(store.generations)
        seat = self.succeed.asked(seat, dict(said), newest, 0.0, PATIENCE, "x" if moving else "")
        return agent._replace(seat=replace(seat, sign="")), store

    def _claim(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        number = agent.seat.term + 1
        made = number > store.term
        if made and number != store.term + 1:
            raise ViolationError(f"term {number} after {store.term}")
        seat = self.succeed.claimed(agent.seat, number, made, 0.0)
        if not made:
            if seat.standing is Standing.REIGNING:
                raise ViolationError(f"{seat.name} reigns in a term that it has not opened")
            return agent._replace(seat=seat), store
        return (
            agent._replace(seat=replace(seat, holder=agent.address), known=False),
            store._replace(term=number, holder=agent.address),
        )

    def _begin(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        newest = len(store.generations)
        members = store.generations[-1] if newest else frozenset()
        nodes = [Node(address[0], address[1:], 1, 0.0, 0.0) for address in sorted(members)]
        return agent._replace(reign=self.member.begin(agent.seat.term, 0.0, newest, nodes)), store

    def _watch(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        """A coordinator looks now and then whether there is a newer term."""
        if store.term > agent.seat.term:
            agent = agent._replace(reign=self.member.fenced(agent.reign, 0.0))
        return agent, store

    def _check(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        reign, newest = agent.reign, len(store.generations)
        assert reign is not None
        assert reign.opening is not None
        number, names = reign.opening
        if store.term > reign.term or newest >= number:
            return agent._replace(reign=self.member.taken(reign, store.term, newest, 0.0)), store
        marks = {node.name: node.mark for node in reign.nodes}
        members = frozenset(f"{name}{marks[name]}" for name in names)
        return agent._replace(pending=(number, members)), store

    def _create(self, agent: Agent, store: Store) -> tuple[Agent, Store]:
        assert agent.pending is not None
        (number, members), reign = agent.pending, agent.reign
        agent, newest = agent._replace(pending=None), len(store.generations)
        if newest < number:
            store = store._replace(generations=(*store.generations, members))
            if reign is not None:
                names = frozenset(address[0] for address in members)
                reign = self.member.opened(reign, number, names, 0.0, self.rules)
        elif reign is not None:
            reign = self.member.taken(reign, store.term, newest, 0.0)
        return agent._replace(reign=reign), store


def _put(world: World, i: int, agent: int) -> World:
    agents = list(world.agents)
    agents[i] = agent
    return world._replace(agents=(agents[0], agents[1], agents[2]))
