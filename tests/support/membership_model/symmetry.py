"""Worlds that differ by a renaming of the three agents alone: a folded search looks at one of each.

Two worlds that differ by a renaming of the agents alone come to the same, so one of the six is
looked at. One thing goes by names: of two nodes that do not reach each other, and are both members,
the later one is left out (`membership._select_nodes`). So while a coordinator keeps two nodes
apart, only those are the same that have these two in the same order.

This loses the labels from one world to the next, by which a fair cycle is recognised. So a search
that is not folded looks for fair cycles, in worlds with fewer faults.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from holdfast.policy.membership.transitions import CoordinatorState, UnreachablePair
from tests.support.membership_model.model import Model
from tests.support.membership_model.world import (
    NAMES,
    PAIR,
    PAIRS,
    Agent,
    Answer,
    Store,
    World,
)

RENAMINGS = tuple(permutations(range(3)))


class Names:
    """The images of worlds under every renaming, each agent's and store's worked out once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._agents: dict[tuple[int, int], int] = {}
        self._stores: dict[tuple[int, int], int] = {}
        self._cuts = [[_cuts(to, cuts) for cuts in range(8)] for to in RENAMINGS]

    def same(self, world: World) -> list[int]:
        """Renamings under which it comes to the same."""
        pairs = set()
        for number in world.agents:
            reign = self._model.agents.values[number].reign
            for pair in () if reign is None else reign.unreachable_pairs:
                pairs.add((NAMES.index(pair.one), NAMES.index(pair.other)))
        if world.late is not None:
            return [0]
        if not pairs:
            return list(range(len(RENAMINGS)))
        return [n for n, to in enumerate(RENAMINGS) if all(to[i] < to[k] for i, k in pairs)]

    def first(self, world: World) -> World:
        """Of all worlds that come to the same, one."""
        return min(self.image(n, world) for n in self.same(world))

    def after(self, world: World, new: World) -> list[World]:
        """Return the successors of the worlds that are the same as this one, if this one becomes
        `new`. Its own is first. There are further ones if `new` is the same as fewer worlds than
        this one was."""
        first, same = self.first(new), self.same(world)
        if set(same) <= set(self.same(new)):
            return [first]
        others = {self.first(self.image(n, new)) for n in same}
        return [first, *sorted(others - {first})]

    def image(self, n: int, world: World) -> World:
        agents, asleep = [0, 0, 0], 0
        for i, k in enumerate(RENAMINGS[n]):
            agents[k] = self._agent(n, world.agents[i])
            asleep |= (world.asleep >> i & 1) << k
        return World(
            self._store(n, world.store),
            (agents[0], agents[1], agents[2]),
            self._cuts[n][world.cuts],
            asleep,
            *world[4:],
        )

    def _agent(self, n: int, number: int) -> int:
        new = self._agents.get((n, number))
        if new is None:
            agent = _agent(RENAMINGS[n], self._model.agents.values[number])
            new = self._agents[n, number] = self._model.agents(agent)
        return new

    def _store(self, n: int, number: int) -> int:
        new = self._stores.get((n, number))
        if new is None:
            store = _store(RENAMINGS[n], self._model.stores.values[number])
            new = self._stores[n, number] = self._model.stores(store)
        return new


def _cuts(to: tuple[int, ...], cuts: int) -> int:
    return sum(PAIR[to[i], to[k]] for n, (i, k) in enumerate(PAIRS) if cuts >> n & 1)


def _name(to: tuple[int, ...], name: str) -> str:
    """Of a name or an address."""
    return NAMES[to[NAMES.index(name[0])]] + name[1:] if name else ""


def _store(to: tuple[int, ...], store: Store) -> Store:
    generations = tuple(frozenset(_name(to, one) for one in g) for g in store.generations)
    return Store(store.term, _name(to, store.holder), generations)


def _agent(to: tuple[int, ...], agent: Agent) -> Agent:
    seat = replace(
        agent.seat,
        name=_name(to, agent.seat.name),
        leader_address=_name(to, agent.seat.leader_address),
        members=tuple(sorted(_name(to, name) for name in agent.seat.members)),
    )
    answer, pending = agent.answer, agent.pending
    if answer is not None:
        members = tuple(sorted(_name(to, name) for name in answer.members))
        answer = Answer(answer.term, answer.order, answer.generation, members)
    if pending is not None:
        pending = pending[0], frozenset(_name(to, one) for one in pending[1])
    return agent._replace(
        seat=seat,
        reign=None if agent.reign is None else _reign(to, agent.reign),
        answer=answer,
        pending=pending,
        parted=_name(to, agent.parted),
    )


def _reign(to: tuple[int, ...], reign: CoordinatorState) -> CoordinatorState:
    nodes = tuple(
        sorted(
            (replace(node, name=_name(to, node.name)) for node in reign.nodes),
            key=lambda node: node.name,
        )
    )
    apart = []
    for pair in reign.unreachable_pairs:
        one, other = sorted((_name(to, pair.one), _name(to, pair.other)))
        apart.append(UnreachablePair(one, other, pair.retry_at, pair.wait))
    return replace(
        reign,
        nodes=nodes,
        node_names=(),
        members=frozenset(_name(to, n) for n in reign.members),
        pending_nodes=frozenset(_name(to, n) for n in reign.pending_nodes),
        unreachable_pairs=tuple(sorted(apart, key=lambda pair: (pair.one, pair.other))),
    )
