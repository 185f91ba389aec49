"""A leader whose link to the run store, or to its peers, comes and goes gives up the lead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.elastic.agent.term_monitor import TermMonitor
from holdfast.errors import RunFolderError
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import newest_term
from tests.support.agents import FleetAgent, scene_of, until, working

NAMES = ("a", "b", "c")


class Link:
    """One agent's way to the run store, which can be cut."""

    def __init__(self, store: FolderStore) -> None:
        self._store, self.is_cut = store, False

    def __getattr__(self, name: str) -> Any:
        if self.is_cut:
            raise RunFolderError("the run folder failed")
        return getattr(self._store, name)


class Scene:
    """Three agents at work; the leader among them, and its term monitor."""

    def __init__(self, store: FolderStore) -> None:
        self.links = {name: Link(store) for name in NAMES}
        self.agents = [FleetAgent(name, self.links[name]) for name in NAMES]  # type: ignore[arg-type]

    async def begin(self) -> None:
        await until(lambda: working(self.agents) and self.leaders, "all to work")
        (self.leader,) = self.leaders
        self.link = self.links[self.leader.name]
        self.monitor = TermMonitor(
            self.leader.name,
            self.leader.follower,
            lambda: self.leader.term,
            None,
            self.leader.said.append,
        )
        await self.monitor.check()

    @property
    def leaders(self) -> list[FleetAgent]:
        return [agent for agent in self.agents if agent.reigns]

    @property
    def is_complete(self) -> bool:
        """Whether all agents follow one leader and work."""
        leaders = [agent.follower.coordinator for agent in self.leaders]
        known = [len(leader.state.nodes) for leader in leaders if leader is not None]
        return known == [len(NAMES)] and working(self.agents)

    async def cut_store(self, looks: int = 1) -> None:
        self.link.is_cut = True
        for _ in range(looks):
            await self.monitor.check()
        self.link.is_cut = False
        await self.monitor.check()


def test_a_link_to_the_run_store_that_flaps_costs_the_lead_and_no_work(tmp_path: Path) -> None:
    async def scene(store: FolderStore) -> None:
        fleet = Scene(store)
        await fleet.begin()
        generation, first = fleet.leader.work.generation, fleet.leader
        for _ in range(2):
            await fleet.cut_store()
        assert first.reigns
        await fleet.cut_store()
        await until(lambda: fleet.leaders and fleet.leaders != [first], "another one to lead")
        assert newest_term(store)[0] == 2
        assert "lost the run store 3 times within a minute" in "".join(first.said)
        await until(lambda: fleet.is_complete, "all to follow")
        assert fleet.leader.work.generation == generation

    scene_of(scene, tmp_path)


@pytest.mark.parametrize("outages", [1, 2])
def test_a_run_store_that_is_away_for_long_costs_nothing(tmp_path: Path, outages: int) -> None:
    async def scene(store: FolderStore) -> None:
        fleet = Scene(store)
        await fleet.begin()
        for _ in range(outages):
            await fleet.cut_store(looks=20)
        assert fleet.leader.reigns
        assert newest_term(store)[0] == 1

    scene_of(scene, tmp_path)


def test_a_link_to_the_peers_that_flaps_costs_the_lead(tmp_path: Path) -> None:
    async def scene(store: FolderStore) -> None:
        fleet = Scene(store)
        await fleet.begin()
        first = fleet.leader
        others = [agent for agent in fleet.agents if agent is not first]
        for _ in range(3):
            coordinator = first.follower.coordinator
            assert coordinator is not None
            for agent in others:
                coordinator.declare_lost(agent.name, "not heard for 6.0 s")
            assert len(coordinator.state.nodes) == 1
            await until(lambda: fleet.is_complete, "all to be back")
            await fleet.monitor.check()
        await until(lambda: fleet.leaders and fleet.leaders != [first], "another one to lead")
        assert "lost the other nodes 3 times within a minute" in "".join(first.said)
        await until(lambda: fleet.is_complete, "all to follow")

    scene_of(scene, tmp_path)
