"""Searches every world that a `Model` reaches, and checks safety and liveness.

Safety is checked in each world and each step. Liveness has two parts. First, from every world there
is a way to a world that trains, without any further fault and without the end of one. Second, the
worlds that do not train contain no fair cycle. A cycle is fair if each step of an agent that stays
possible is taken, or continues within the cycle.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

from holdfast.policy.membership.transitions import STOPPED_STAGES, NodeStage, Phase
from tests.support.membership_model.model import Model
from tests.support.membership_model.world import Agent, Store, ViolationError, World

MOST_TERMS, MOST_GENERATIONS = 6, 12
"""Limits for all worlds of a search. A lasting fault costs a term and three generations at most.
Two faults that end cost at most twice that. A world beyond these limits never settles."""


class TooManyError(AssertionError):
    """There are more worlds than were to be looked at: nothing is known of the rest."""


class Found:
    """Every world that a model reaches from some, and its steps without a fault.

    Safety is checked in each world. Worlds go by their numbers.
    """

    def __init__(self, model: Model, starts: list[World], most: int = 10_000_000) -> None:
        """Raises ViolationError, with the way to it, and TooManyError beyond `most` worlds."""
        self.model = model
        self.worlds: list[World] = []
        self.steps = 0
        self.ahead: list[array[int]] = []  # without faults and the ends of faults
        self._numbers: dict[World, int] = {}
        self._back = array("l")
        for world in starts:
            self._add(world, -1)
        while len(self.ahead) < len(self.worlds):
            self._look(len(self.ahead))
            if len(self.worlds) > most:
                raise TooManyError(f"more than {most} worlds; one of them after\n{self.way(-1)}")

    def _look(self, number: int) -> None:
        world, ahead = self.worlds[number], array("l")
        try:
            safe(self.model, world)
            steps = self.model.steps(world)
        except (ViolationError, ValueError) as error:
            raise ViolationError(f"{error}, after\n{self.way(number)}") from error
        self.steps += len(steps)
        for step in steps:
            to = self._add(step.world, number)
            if not step.outside:
                ahead.append(to)
        self.ahead.append(ahead)

    def labels(self, number: int) -> list[tuple[Any, ...]]:
        """Return the labels of the steps ahead."""
        return [step.label for step in self.model.steps(self.worlds[number]) if not step.outside]

    def _add(self, world: World, back: int) -> int:
        number = self._numbers.get(world)
        if number is None:
            number = self._numbers[world] = len(self.worlds)
            self.worlds.append(world)
            self._back.append(back)
        return number

    def way(self, number: int) -> str:
        """Return the steps to a world."""
        chain = []
        number = number % len(self.worlds)
        while number >= 0:
            chain.append(self.worlds[number])
            number = self._back[number]
        return "\n".join(
            next(str(s.label) for s in self.model.steps(world) if new == s.world)
            for world, new in pairwise(reversed(chain))
        )


def safe(model: Model, world: World) -> None:
    """A state that no world may show."""
    store: Store = model.stores.values[world.store]
    agents: list[Agent] = [model.agents.values[number] for number in world.agents]
    terms = [agent.reign.term for agent in agents if agent.reign is not None]
    if len(set(terms)) < len(terms):
        raise ViolationError("two hold one term")
    for agent in agents:
        reign = agent.reign
        if reign is not None and reign.term == store.term and store.holder != agent.address:
            raise ViolationError(f"{agent.seat.name} reigns in the term of {store.holder}")
        if reign is not None and reign.phase in (Phase.STARTING, Phase.TRAINING):
            _same(store, reign.generation, set(reign.members), agent.seat.name)
        if agent.up and agent.seat.generation:
            _same(store, agent.seat.generation, set(agent.seat.members), agent.seat.name)
            if (
                agent.stage in (NodeStage.BUILDING, NodeStage.WORKING)
                and agent.address not in (store.generations[agent.seat.generation - 1])
            ):
                raise ViolationError(f"{agent.seat.name} works where it does not belong")
    _settles(store)
    _lets_go(store, agents)
    working = [g for g in range(1, len(store.generations) + 1) if model.commits(world, g)]
    sides = [store.generations[g - 1] for g in working]
    if len(frozenset().union(*sides)) < sum(map(len, sides)):
        raise ViolationError(f"one agent commits steps in two of the generations {working}")


def _settles(store: Store) -> None:
    if store.term > MOST_TERMS or len(store.generations) > MOST_GENERATIONS:
        raise ViolationError(
            f"over and over: term {store.term}, generation {len(store.generations)}"
        )


def _lets_go(store: Store, agents: list[Agent]) -> None:
    """Check that every member of a generation has left the one before."""
    newest = len(store.generations)
    for agent in agents:
        inside = newest and agent.up and agent.address in store.generations[-1]
        if inside and agent.seat.generation < newest and agent.stage not in STOPPED_STAGES:
            raise ViolationError(
                f"{agent.seat.name} is of generation {newest} and works in {agent.seat.generation}"
            )


def _same(store: Store, generation: int, members: set[str], who: str) -> None:
    there = {address[0] for address in store.generations[generation - 1]}
    if there != members:
        raise ViolationError(f"generation {generation} is {there}, for {who} {members}")


# --- liveness -----------------------------------------------------------------------------------
def stuck(found: Found) -> list[int]:
    """Worlds from which no way leads to training, without another fault or the end of one."""
    before: list[list[int]] = [[] for _ in found.worlds]
    for number, ahead in enumerate(found.ahead):
        for to in ahead:
            before[to].append(number)
    good = [found.model.trains(world) for world in found.worlds]
    front = [number for number, trains in enumerate(good) if trains]
    while front:
        for number in before[front.pop()]:
            if not good[number]:
                good[number] = True
                front.append(number)
    return [n for n, w in enumerate(found.worlds) if not good[n] and anybody(found.model, w)]


def fair_cycles(found: Found) -> list[int]:
    """One world of each fair cycle among those that do not train."""
    bad = {
        number
        for number, world in enumerate(found.worlds)
        if not found.model.trains(world) and anybody(found.model, world)
    }
    return [part[0] for part in _parts(found, bad) if _fair(found, part)]


def _fair(found: Found, part: list[int]) -> bool:
    """Whether no step that is always possible here always leads away."""
    inside = set(part)
    if len(part) == 1 and part[0] not in found.ahead[part[0]]:
        return not found.ahead[part[0]]  # it ends here
    labels = {number: found.labels(number) for number in part}
    always = set.intersection(*map(set, labels.values()))
    stays = {
        label
        for number in part
        for label, to in zip(labels[number], found.ahead[number], strict=True)
        if to in inside
    }
    return not always - stays


def anybody(model: Model, world: World) -> bool:
    """Return True if some agent is up and not suspended."""
    return any(
        model.agents.values[number].up and not world.asleep >> i & 1
        for i, number in enumerate(world.agents)
    )


def _parts(found: Found, among: set[int]) -> list[list[int]]:
    """Strongly connected parts, without recursion (Tarjan)."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on: set[int] = set()
    parts: list[list[int]] = []
    for root in among:
        if root in number:
            continue
        number[root] = low[root] = len(number)
        stack.append(root)
        on.add(root)
        work = [(root, iter(found.ahead[root]))]
        while work:
            world, steps = work[-1]
            for to in steps:
                if to not in among:
                    continue
                if to not in number:
                    number[to] = low[to] = len(number)
                    stack.append(to)
                    on.add(to)
                    work.append((to, iter(found.ahead[to])))
                    break
                if to in on:
                    low[world] = min(low[world], number[to])
            else:
                work.pop()
                if work:
                    above = work[-1][0]
                    low[above] = min(low[above], low[world])
                if low[world] == number[world]:
                    part = []
                    while True:
                        part.append(stack.pop())
                        on.discard(part[-1])
                        if part[-1] == world:
                            break
                    parts.append(part)
    return parts
