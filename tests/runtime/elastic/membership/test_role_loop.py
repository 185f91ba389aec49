"""Several agents and their coordinator over real HTTP: joining, losing, succession, fencing."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.elastic.membership.pre_candidate import MIN_PREVOTE_ROUND_S
from holdfast.elastic.protocol.coordinator_messages import Heartbeat, HeartbeatReply
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_generation, newest_term
from tests.support import agents as fleet
from tests.support.agents import BEAT, FleetAgent, in_scene, scene_of, until, working


async def _fleet(store: FolderStore, names: str, least: int = 1) -> list[FleetAgent]:
    agents = [FleetAgent(name, store, least, len(names)) for name in names]
    await until(lambda: working(agents), f"{names} to work together")
    return agents


@in_scene
async def test_a_node_that_is_lost_is_done_without_and_comes_back(store: FolderStore) -> None:
    agents = await _fleet(store, "abcd", least=2)
    gone = next(agent for agent in agents if not agent.reigns)
    rest = [agent for agent in agents if agent is not gone]
    await gone.kill()
    await until(lambda: working(rest) and rest[0].work.generation == 2, "the others to go on")
    again = FleetAgent(gone.name, store, 2, 4)
    await until(lambda: working([*rest, again]), "it to be taken in again")
    for agent in rest:
        assert ("held", 2) in agent.work.history


@in_scene
async def test_an_agent_that_has_ended_is_not_waited_for(store: FolderStore) -> None:
    """Its silence would mean something after two minutes; its machine says so at once."""
    agents = [FleetAgent(name, store, 2, 3, lost_after=120.0) for name in "abc"]
    await until(lambda: working(agents), "abc to work together")
    gone = next(agent for agent in agents if not agent.reigns)
    rest = [agent for agent in agents if agent is not gone]
    before = rest[0].work.generation
    await gone.kill()
    rest[0].work.breaks()  # as its workers do, when they lose those of the other node
    await until(lambda: working(rest) and rest[0].work.generation > before, "the others to go on")


@in_scene
async def test_a_fault_on_one_node_halts_all_and_they_go_on(store: FolderStore) -> None:
    agents = await _fleet(store, "abc", least=3)
    agents[1].work.breaks()
    await until(lambda: working(agents) and agents[0].work.generation == 2, "generation 2")
    for agent in agents:
        assert ("held", 1) in agent.work.history


@in_scene
async def test_who_leads_asks_itself_no_more_often_than_others_do(store: FolderStore) -> None:
    agents = await _fleet(store, "ab", least=2)
    (coordinator,) = [a.follower.coordinator for a in agents if a.follower.coordinator]
    asked = {agent.name: 0 for agent in agents}
    beat = coordinator.handle_heartbeat

    async def counted(generation: int, said: Heartbeat) -> HeartbeatReply:
        asked[said.name] += 1
        return await beat(generation, said)

    coordinator.handle_heartbeat = counted  # type: ignore[method-assign]
    await asyncio.sleep(2.0)
    assert 1 <= asked[next(a.name for a in agents if a.reigns)] <= 5 * 2.0 / BEAT


def test_a_term_that_ends_by_a_fault_of_our_own_is_not_followed_by_the_next_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> dict[str, Any]:
        raise ValueError("a bug")

    async def scene(store: FolderStore) -> None:
        monkeypatch.setattr(fleet, "plan", broken)
        agent = FleetAgent("a", store, 1, 1)
        await until(lambda: bool(agent.said), "the fault to be said")
        begun, term = time.monotonic(), newest_term(store)[0]
        await until(lambda: newest_term(store)[0] == term + 1, "the next term")
        assert time.monotonic() - begun > 1.5

    scene_of(scene, tmp_path)


@pytest.mark.parametrize("names", ["ab", "abc", "abcde"])
@in_scene
async def test_the_coordinator_is_lost_and_another_opens_the_next_term(
    store: FolderStore, names: str
) -> None:
    agents = await _fleet(store, names)
    first = next(agent for agent in agents if agent.reigns)
    term, at = first.follower.state.term, first.work.generation
    rest = [agent for agent in agents if agent is not first]
    await first.kill()
    await until(
        lambda: (
            working(rest)
            and sum(a.reigns for a in rest) == 1
            and all(a.follower.state.term > term and a.work.generation > at for a in rest)
        ),
        "another to lead, and the rest to work",
    )
    again = FleetAgent(first.name, store, 1, len(names))
    await until(lambda: working([*rest, again]), "the first to follow")
    assert not again.reigns


@pytest.mark.parametrize("frozen", [1, 2])
@in_scene
async def test_a_coordinator_that_is_silent_is_replaced(store: FolderStore, frozen: int) -> None:
    """And one that has fallen silent with it costs the search nothing more."""
    agents = await _fleet(store, "abcde")
    first = next(agent for agent in agents if agent.reigns)
    gone = [first, *(agent for agent in agents if agent is not first)][:frozen]
    rest = [agent for agent in agents if agent not in gone]
    at = first.work.generation
    for agent in gone:
        agent.freeze()
    # Five times three heartbeats of 0.2 s, a round of a second, and what is left to the first.
    await until(
        lambda: working(rest) and rest[0].work.generation > at and sum(a.reigns for a in rest) == 1,
        "another to lead, and the rest to work",
        seconds=5 * (1.0 + MIN_PREVOTE_ROUND_S + 0.4),
    )


@in_scene
async def test_everybody_leaves_when_the_work_is_done(store: FolderStore) -> None:
    agents = await _fleet(store, "abc", least=3)
    for agent in agents:
        agent.work.ends()
    done = await asyncio.wait_for(asyncio.gather(*(a.running for a in agents)), 30)
    assert done == ["", "", ""]
    assert newest_generation(store) == 1
