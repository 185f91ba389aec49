"""Searches every world that a `Model` reaches, and checks safety and liveness.

Safety is checked in each world and each step. Liveness has two parts. First, from every world there
is a way to a world that trains, without any further fault and without the end of one. Second, the
worlds that do not train contain no fair cycle. A cycle is fair if each step of an agent that stays
possible is taken, or continues within the cycle.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from holdfast.policy.membership.transitions import STOPPED_STAGES, NodeStage, Phase
from tests.support.membership_model.model import Model
from tests.support.membership_model.world import Agent, Step, Store, ViolationError, World

MOST_TERMS, MOST_GENERATIONS = 6, 12
"""Limits for all worlds of a search. A lasting fault costs a term and three generations at most.
Two faults that end cost at most twice that. A world beyond these limits never settles."""


class TooManyError(AssertionError):
    """There are more worlds than were to be looked at: nothing is known of the rest."""


@dataclass
class Found:
    """The result of a search: each world's way back, and its steps without a fault."""

    model: Model
    back: dict[World, tuple[World, Step] | None]
    ahead: dict[World, list[Step]]
    steps: int

    def way(self, world: World) -> str:
        """How it came to this."""
        said = []
        while (before := self.back[world]) is not None:
            said.append(str(before[1].label))
            world = before[0]
        return "\n".join(reversed(said))


def search(model: Model, starts: list[World], most: int = 10_000_000) -> Found:
    """Raises ViolationError, with the way to it, and TooManyError beyond `most` worlds."""
    found = Found(model, dict.fromkeys(starts), {}, 0)
    front = starts
    while front:
        after = []
        for world in front:
            try:
                safe(model, world)
                steps = model.steps(world)
            except (ViolationError, ValueError) as error:
                raise ViolationError(f"{error}, after\n{found.way(world)}") from error
            found.ahead[world] = [step for step in steps if not step.outside]
            found.steps += len(steps)
            for step in steps:
                if step.world not in found.back:
                    found.back[step.world] = world, step
                    after.append(step.world)
        if len(found.back) > most:
            raise TooManyError(
                f"more than {most} worlds; one of them after\n{found.way(after[-1])}"
            )
        front = after
    return found


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
def stuck(found: Found) -> list[World]:
    """Worlds from which no way leads to training."""
    before: dict[World, list[World]] = defaultdict(list)
    for world, steps in found.ahead.items():
        for step in steps:
            before[step.world].append(world)
    good = {world for world in found.ahead if found.model.trains(world)}
    front = list(good)
    while front:
        for world in before[front.pop()]:
            if world not in good:
                good.add(world)
                front.append(world)
    return [world for world in found.ahead if world not in good and anybody(found.model, world)]


def fair_cycles(found: Found) -> list[World]:
    """One world of each fair cycle among those that do not train."""
    bad = {w for w in found.ahead if not found.model.trains(w) and anybody(found.model, w)}
    return [part[0] for part in _parts(found, bad) if _fair(found, part)]


def _fair(found: Found, part: list[World]) -> bool:
    """Whether no step that is always possible here always leads away."""
    inside = set(part)
    if len(part) == 1 and all(step.world != part[0] for step in found.ahead[part[0]]):
        return not found.ahead[part[0]]  # it ends here
    always = set.intersection(*({step.label for step in found.ahead[w]} for w in part))
    stays = {s.label for w in part for s in found.ahead[w] if s.world in inside}
    return not always - stays


def anybody(model: Model, world: World) -> bool:
    """Return True if some agent is up and not suspended."""
    return any(
        model.agents.values[number].up and not world.asleep >> i & 1
        for i, number in enumerate(world.agents)
    )


def _parts(found: Found, among: set[World]) -> list[list[World]]:
    """Strongly connected parts, without recursion (Tarjan)."""
    number: dict[World, int] = {}
    low: dict[World, int] = {}
    stack: list[World] = []
    on: set[World] = set()
    parts: list[list[World]] = []
    for root in among:
        if root in number:
            continue
        number[root] = low[root] = len(number)
        stack.append(root)
        on.add(root)
        work = [(root, iter(found.ahead[root]))]
        while work:
            world, steps = work[-1]
            for step in steps:
                to = step.world
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
