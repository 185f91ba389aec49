"""The coordinator is killed in the very moment of a transition, or its process stood still, among
agents that speak real HTTP and share a real run store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.elastic.coordinator.coordinator import Coordinator, Made
from holdfast.policy.membership import transitions
from holdfast.policy.membership.transitions import (
    PHASE_TRANSITIONS,
    CoordinatorState,
    MembershipRules,
    NodeRecord,
    Phase,
)
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_generation, newest_term, read_generation
from tests.support.agents import FleetAgent, scene_of, until, working

Edge = tuple[Phase, Phase]
FIRST = {
    (Phase.GATHERING, Phase.OPENING),
    (Phase.OPENING, Phase.STARTING),
    (Phase.STARTING, Phase.TRAINING),
}
LATER = {(Phase.TRAINING, Phase.HALTING), (Phase.HALTING, Phase.OPENING)} | FIRST - {
    (Phase.GATHERING, Phase.OPENING)
}
TOO_FEW = {(Phase.HALTING, Phase.GATHERING)}
BY_CHANCE = {  # only where something else happens within the same moment
    (Phase.OPENING, Phase.GATHERING),
    (Phase.STARTING, Phase.HALTING),
}


def test_every_transition_has_a_row() -> None:
    """But the last one of a reign: whoever makes that leads no more."""
    table = {(old, new) for old, after in PHASE_TRANSITIONS.items() for new in after}
    last = {edge for edge in table if edge[1] in (Phase.FENCED, Phase.ENDED)}
    assert table - last == FIRST | LATER | TOO_FEW | BY_CHANCE


class Trap:
    """Kills the one who leads as soon as its reign makes a transition, once it is set."""

    def __init__(self, edge: Edge, store: FolderStore, least: int, names: str) -> None:
        self.edge, self.set = edge, False
        self.sprung: FleetAgent | None = None
        self._agents: list[FleetAgent] = []
        for name in names:
            self._agents.append(
                FleetAgent(name, store, least, len(names), changed=self._watch(name))
            )

    def _watch(self, name: str) -> Callable[[CoordinatorState, CoordinatorState], None]:
        def changed(old: CoordinatorState, new: CoordinatorState) -> None:
            if not self.set or self.sprung is not None or (old.phase, new.phase) != self.edge:
                return
            self.sprung = next(agent for agent in self._agents if agent.name == name)
            self.sprung.die()

        return changed

    @property
    def rest(self) -> list[FleetAgent]:
        return [agent for agent in self._agents if agent is not self.sprung]


def _led(agents: list[FleetAgent], store: FolderStore) -> bool:
    """By one of them, in the newest term; all work in the newest generation, which is theirs, and
    the one who leads has heard so: what breaks before ends no training."""
    leaders = [
        (a.follower.state.term, c.state.phase) for a in agents if (c := a.follower.coordinator)
    ]
    if leaders != [(newest_term(store)[0], Phase.TRAINING)]:
        return False
    newest = newest_generation(store)
    if not working(agents) or agents[0].work.generation != newest:
        return False
    return set(read_generation(store, newest)["agents"]) == {agent.name for agent in agents}


def _named(edges: set[Edge]) -> list[Edge]:
    return sorted(edges)


@pytest.mark.parametrize("edge", _named(FIRST), ids=lambda edge: f"{edge[0]} to {edge[1]}")
def test_killed_as_the_first_generation_begins(edge: Edge, tmp_path: Path) -> None:
    async def scene(store: FolderStore) -> None:
        trap = Trap(edge, store, 2, "abc")
        trap.set = True
        await until(lambda: trap.sprung, f"{edge}")
        await until(lambda: _led(trap.rest, store), "the rest to go on")

    scene_of(scene, tmp_path)


@pytest.mark.parametrize("edge", _named(LATER), ids=lambda edge: f"{edge[0]} to {edge[1]}")
def test_killed_as_a_generation_ends_or_the_next_begins(edge: Edge, tmp_path: Path) -> None:
    async def scene(store: FolderStore) -> None:
        trap = Trap(edge, store, 2, "abcd")
        await until(lambda: _led(trap.rest, store), "all to work")
        trap.set = True
        next(agent for agent in trap.rest if not agent.reigns).work.breaks()
        await until(lambda: trap.sprung, f"{edge}")
        await until(lambda: _led(trap.rest, store), "the rest to go on")

    scene_of(scene, tmp_path)


@pytest.mark.parametrize("edge", _named(TOO_FEW), ids=lambda edge: f"{edge[0]} to {edge[1]}")
def test_killed_as_too_few_are_left(edge: Edge, tmp_path: Path) -> None:
    async def scene(store: FolderStore) -> None:
        trap = Trap(edge, store, 4, "abcd")
        await until(lambda: _led(trap.rest, store), "all to work")
        trap.set = True
        lost = next(agent for agent in trap.rest if not agent.reigns)
        await lost.kill()
        await until(lambda: trap.sprung, f"{edge}")
        rest = [agent for agent in trap.rest if agent is not lost]
        back = [FleetAgent(agent.name, store, 4, 4) for agent in (lost, trap.sprung)]
        await until(lambda: _led([*rest, *back], store), "all to work again")

    scene_of(scene, tmp_path)


LOST_AFTER = 1.5


async def _no_generation(reign: Any, generation: int, names: Any, known: Any) -> Made:
    raise AssertionError("none is to be made")


async def _asleep() -> tuple[list[str], list[str]]:
    """Who is there when it wakes, and when those who are silent have had their time."""
    loop = asyncio.get_running_loop()
    rules = MembershipRules(lambda nodes: (), node_timeout_s=LOST_AFTER, gather_wait_s=1000.0)
    nodes = [NodeRecord(name, name, 1, 0.0, 0.0) for name in "ab"]
    reign = transitions.begin_term(1, loop.time(), 1, nodes)
    coordinator = Coordinator(reign, rules, _no_generation)
    running = asyncio.create_task(coordinator.run())
    await asyncio.sleep(0.05)
    time.sleep(1.5 * LOST_AFTER)  # nothing of this process runs: it was stopped
    await asyncio.sleep(0.05)
    then = [node.name for node in coordinator.state.nodes]
    async with asyncio.timeout(60):
        while coordinator.state.nodes:
            await asyncio.sleep(0.01)
    running.cancel()
    return then, [node.name for node in coordinator.state.nodes]


def test_who_was_not_heard_while_the_coordinator_slept_is_given_time() -> None:
    assert asyncio.run(_asleep()) == (["a", "b"], [])
