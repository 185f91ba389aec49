"""What an agent does when it loses its run folder, or when its links to the store or to its peers
fail again and again."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.elastic.agent import run_folder_monitor
from holdfast.elastic.agent.run_folder_monitor import (
    FOLDER_GONE_MESSAGE,
    FOLDER_LOST_MESSAGE,
    LostFolderError,
    RunFolder,
    RunFolderMonitor,
)
from holdfast.elastic.agent.term_monitor import TermMonitor
from holdfast.elastic.run_result import RunEndedError
from holdfast.errors import HoldfastError, RunFolderError
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_term, newest_term
from tests.support.agents import FleetAgent, in_scene, until, working


def _begun(folder: Path) -> RunFolder:
    """A run folder with a term, as an agent has it that has looked once."""
    store = FolderStore(folder)
    assert create_term(store, 1, "127.0.0.1:1", "a") is not None
    found = RunFolder(store)
    found.check()
    return found


def _is_lost(found: RunFolder) -> bool:
    try:
        found.check()
    except LostFolderError:
        return True
    return False


def test_a_folder_that_is_put_back_is_here_again(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    found = _begun(folder)
    folder.rename(other)
    assert _is_lost(found)
    folder.mkdir()
    assert _is_lost(found)
    folder.rmdir()
    other.rename(folder)
    assert not _is_lost(found)
    assert create_term(FolderStore(folder), 2, "127.0.0.1:2", "b") is not None
    assert not _is_lost(found)


def test_a_folder_that_was_emptied_is_lost_whoever_begins_in_it(tmp_path: Path) -> None:
    found = _begun(tmp_path)
    shutil.rmtree(tmp_path / "terms")
    assert _is_lost(found)
    assert create_term(FolderStore(tmp_path), 1, "127.0.0.1:2", "b") is not None
    assert _is_lost(found)


def test_a_folder_that_cannot_be_looked_at_is_not_lost(tmp_path: Path) -> None:
    folder, real = tmp_path / "run", tmp_path / "real"
    real.mkdir()
    folder.symlink_to(real.name)
    found = _begun(folder)
    folder.unlink()
    folder.symlink_to(folder.name)  # to itself
    with pytest.raises(HoldfastError) as caught:
        found.check()
    assert not isinstance(caught.value, LostFolderError)
    folder.unlink()
    folder.symlink_to(real.name)
    found.check()


def _mount(*arguments: str | Path) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("below", [".", "runs/one"])
def test_a_folder_that_is_mounted_again_is_here_again(tmp_path: Path, below: str) -> None:
    disk, point = tmp_path / "disk", tmp_path / "mounted"
    (disk / below).mkdir(parents=True)
    point.mkdir()
    if os.geteuid() or not _mount("--bind", disk, point):
        pytest.skip("nothing can be mounted here")
    try:
        found = _begun(point / below)
        subprocess.run(["umount", "--lazy", point], check=True)
        assert _is_lost(found)
        assert _mount("--bind", disk, point)
        assert not _is_lost(found)
    finally:
        subprocess.run(["umount", "--lazy", point], capture_output=True, check=False)


def _end(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[[], None],
    told: list[str],
    said: list[str],
) -> RunEndedError:
    """The error by which an agent ends. told: why it must leave."""
    monkeypatch.setattr(run_folder_monitor, "FOLDER_CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(run_folder_monitor, "DISK_REPLY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(run_folder_monitor, "FOLDER_RETURN_TIMEOUT_S", 0.5)

    async def scene() -> RunEndedError:
        monitor = RunFolderMonitor(folder, lambda: "".join(told), lambda: 1.5, said.append)
        ending = asyncio.create_task(monitor.wait_for_end())
        await asyncio.sleep(0.6)
        assert not ending.done()
        meanwhile()
        error = await asyncio.wait_for(ending, 20)
        assert not monitor.is_folder_responsive
        return error

    return asyncio.run(scene())


def test_an_agent_ends_with_a_sentence_if_its_folder_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    found = _begun(tmp_path / "run")
    error = _end(found, monkeypatch, lambda: shutil.rmtree(tmp_path / "run"), [], said)
    assert str(error) == FOLDER_GONE_MESSAGE
    assert said == [f"{FOLDER_LOST_MESSAGE}; waiting 0.5 s for it"]


def test_a_folder_that_is_emptied_is_lost_at_the_end_of_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    found = _begun(tmp_path / "run")

    async def scene() -> None:
        held = "a holds it"
        monitor = RunFolderMonitor(found, str, lambda: 0.0, said.append, lambda: held)
        assert await monitor.find_loss() is None
        shutil.rmtree(tmp_path / "run" / "terms")
        assert str(await monitor.find_loss()) == FOLDER_GONE_MESSAGE

    asyncio.run(scene())
    assert said == ["a holds it in memory, and it is lost with this agent"]


def test_a_folder_is_known_before_the_first_interval_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an agent does not notice a folder that goes in the first seconds of a run."""
    monkeypatch.setattr(run_folder_monitor, "FOLDER_CHECK_INTERVAL_S", 3600.0)
    found = RunFolder(FolderStore(tmp_path))

    async def scene() -> None:
        monitor = RunFolderMonitor(found, lambda: "", lambda: 0.0, print)
        ending = asyncio.create_task(monitor.wait_for_end())
        await asyncio.sleep(0.3)  # it has looked, and has seen no term
        assert create_term(FolderStore(tmp_path), 1, "127.0.0.1:1", "a") is not None
        async with asyncio.timeout(20):
            while not found.is_known:
                await asyncio.sleep(0.01)
        ending.cancel()

    asyncio.run(scene())


def test_a_disk_that_says_nothing_keeps_nobody_who_is_told_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But it ends nobody who is not, however long it is silent."""
    told: list[str] = []
    said: list[str] = []
    lasts = threading.Event()

    class Silent(RunFolder):
        def check(self) -> None:
            lasts.wait(120)

    def tell() -> None:
        told.append("SIGTERM")
        threading.Timer(3.0, lasts.set).start()  # its thread is waited for

    error = _end(Silent(FolderStore(tmp_path)), monkeypatch, tell, told, said)
    assert str(error).startswith("SIGTERM: the run folder is out of reach")
    assert said == []


def test_what_lies_at_the_path_of_a_lost_folder_is_not_asked(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    async def scene(found: RunFolder) -> None:
        monitor = RunFolderMonitor(found, lambda: "", lambda: 0.0, print)
        await monitor.require_folder()
        shutil.rmtree(folder)
        with pytest.raises(RunFolderError, match="moved, removed, replaced or unmounted"):
            await monitor.require_folder()
        folder.symlink_to(folder.name)  # to itself
        with pytest.raises(RunFolderError, match="out of reach"):
            await monitor.require_folder()

    asyncio.run(scene(_begun(folder)))


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


@in_scene
async def test_a_link_to_the_run_store_that_flaps_costs_the_lead_and_no_work(
    store: FolderStore,
) -> None:
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


@pytest.mark.parametrize("outages", [1, 2])
@in_scene
async def test_a_run_store_that_is_away_for_long_costs_nothing(
    store: FolderStore, outages: int
) -> None:
    fleet = Scene(store)
    await fleet.begin()
    for _ in range(outages):
        await fleet.cut_store(looks=20)
    assert fleet.leader.reigns
    assert newest_term(store)[0] == 1


@in_scene
async def test_a_link_to_the_peers_that_flaps_costs_the_lead(store: FolderStore) -> None:
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
