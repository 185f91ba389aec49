"""An agent and its mover on one of several nodes: it dies while training goes on, and another one
takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.checkpoint.mover import client as mover_client
from holdfast.checkpoint.mover.client import MoverClient, MoverGoneError
from holdfast.checkpoint.mover.messages import RestorePoint
from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.config.run import RunConfig
from holdfast.elastic.agent.node_processes import MoverRestarter
from holdfast.elastic.node import mover_supervisor
from holdfast.elastic.node.mover_supervisor import Announcement, MoverSupervisor, StateLocations
from holdfast.errors import FencedError, HoldfastError
from holdfast.events import (
    CheckpointCommitted,
    Event,
    SnapshotComplete,
    SnapshotDropped,
    SnapshotKept,
)
from holdfast.layout import Layout, place_layout
from holdfast.wire import lifeline
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import create_generation
from tests.support.processes import stop
from tests.support.ranks import DEADLINE_S

SECRET = Secret(bytes(range(32)))


def config() -> RunConfig:
    model = {
        "preset": None,
        "layers": 1,
        "dim": 16,
        "heads": 2,
        "kv_heads": 1,
        "ffn_dim": 16,
        "vocab_size": 32,
    }
    return RunConfig.model_validate({"name": "test", "model": model})


def test_a_mover_that_dies_is_replaced_in_the_running_generation(tmp_path: Path) -> None:
    asyncio.run(_replaced(tmp_path))


async def _replaced(folder: Path) -> None:
    store = FolderStore(folder)
    events: list[Event] = []
    end, keep = lifeline.open_lifeline()
    gone = asyncio.Event()
    settings = MoverSettings("test", "c", "d")
    links = {
        name: MoverSupervisor(config(), folder, SECRET, settings, events.append, name)
        for name in "ab"
    }
    try:
        await asyncio.gather(*(link.ensure_running(end, gone.set) for link in links.values()))
        peers = [link.peer for link in links.values() if link.peer is not None]
        assert [peer.name for peer in peers] == ["a", "b"]
        create_generation(store, 1, {})
        topology = place_layout(Layout(dp_shard=2), 1, ("a", "b"))
        newest = await links["b"].choose_restore_point(1, {}, peers)
        assert newest.key is None
        told = RestorePoint.from_json(newest.to_json())
        for link in links.values():
            await link.expect_generation(Announcement(topology, told.step, told, peers))
        before = links["a"].pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await asyncio.wait_for(gone.wait(), DEADLINE_S)
        # Whoever replaces it and an opening that comes just then both ask: one is started.
        await asyncio.gather(
            links["a"].restart(end, gone.set), links["a"].ensure_running(end, gone.set)
        )
        assert links["a"].pid not in (None, before)
        assert links["a"].peer in peers, "it listens where the others know it"
        client = MoverClient(links["a"].socket_path, SECRET, 1)
        status = await asyncio.to_thread(client.status)
        assert status["generation"] == 1
    finally:
        for link in links.values():
            await link.stop()
        os.close(keep)
        os.close(end)


def test_a_mover_that_stands_still_when_a_generation_begins_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell it of the generation; it is listened to all the same, and so found out."""
    monkeypatch.setattr(mover_supervisor, "MOVER_REPLY_TIMEOUT_S", 1.0)
    monkeypatch.setattr(mover_supervisor, "MOVER_EVENT_POLL_WAIT_S", 0.1)
    monkeypatch.setattr(mover_supervisor, "MOVER_POLL_RETRY_S", 0.1)
    monkeypatch.setattr(mover_client, "MOVER_ANSWER_TIMEOUT_S", 0.5)
    asyncio.run(_ended(tmp_path))


ALONE = Announcement(place_layout(Layout(), 1, ("",)), 0)


async def _ended(folder: Path) -> None:
    create_generation(FolderStore(folder), 1, {})
    end, keep = lifeline.open_lifeline()
    gone = asyncio.Event()
    link = MoverSupervisor(
        config(), folder, SECRET, MoverSettings("test", "c", "d"), lambda event: None
    )
    try:
        await link.ensure_running(end, gone.set)
        before = link.pid
        assert before is not None
        stop(before)
        async with asyncio.timeout(DEADLINE_S):
            while not gone.is_set():  # told again and again, which never leaves it in peace
                with suppress(MoverGoneError):
                    await link.expect_generation(ALONE)
                await asyncio.sleep(0.1)
        await link.restart(end, gone.set)
        assert link.pid not in (None, before)
        status = await asyncio.to_thread(MoverClient(link.socket_path, SECRET, 1).status)
        assert status["generation"] == 1
    finally:
        await link.stop()
        os.close(keep)
        os.close(end)


@pytest.mark.slow
def test_a_mover_that_dies_again_and_again_is_replaced_in_the_end(tmp_path: Path) -> None:
    """Killed at any moment of its start: as soon as its process is there, while it is told of the
    generation, when it has been. Whichever is the last, the next one serves."""
    asyncio.run(_dies_again(tmp_path))


async def _dies_again(folder: Path) -> None:
    create_generation(FolderStore(folder), 1, {})
    end, keep = lifeline.open_lifeline()
    said: list[str] = []
    link = MoverSupervisor(
        config(), folder, SECRET, MoverSettings("test", "c", "d"), lambda event: None
    )
    reviving = MoverRestarter(
        lambda: link.restart(end, reviving.start),
        lambda: link.is_alive,
        said.append,
        delays_s=(0.01, 0.05),
    )
    try:
        await link.ensure_running(end, reviving.start)
        await link.expect_generation(ALONE)
        for wait in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.05):
            pid = await _serving(link)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                while link.pid in (None, pid):
                    await asyncio.sleep(0.0005)
            await asyncio.sleep(wait)
            if link.pid is not None:
                os.kill(link.pid, signal.SIGKILL)
        await _serving(link)
        assert sum("a new one is started" in line for line in said) <= 2 * 7
    finally:
        await reviving.stop()
        await link.stop()
        os.close(keep)
        os.close(end)


async def _serving(link: MoverSupervisor) -> int:
    """The process that answers for generation 1."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            pid = link.pid
            with suppress(HoldfastError):
                client = MoverClient(link.socket_path, SECRET, 1)
                status = await asyncio.to_thread(client.status)
                if pid is not None and link.pid == pid and status["generation"] == 1:
                    return pid
            await asyncio.sleep(0.01)


def test_what_protects_a_run_whose_memory_is_gone_is_said() -> None:
    safe = StateLocations()
    assert safe.drop_memory() == []
    safe.observe(SnapshotComplete(1, 0.1, step=7))
    (dropped,) = safe.drop_memory()
    assert isinstance(dropped, SnapshotDropped)
    assert "nothing else holds a state" in dropped.reason
    assert dropped.step == 7
    assert safe.drop_memory() == [], "said once"
    safe.observe(CheckpointCommitted("k", 1, 0.1, step=5))
    safe.observe(SnapshotComplete(1, 0.1, step=8))
    assert "newest checkpoint is of step 5" in _reason(safe)
    safe.observe(SnapshotKept("stage", 1, 0.1, step=8))
    safe.observe(SnapshotComplete(1, 0.1, step=9))
    assert "stage keeps a copy of the state after step 8" in _reason(safe)


def _reason(safe: StateLocations) -> str:
    (dropped,) = safe.drop_memory()
    assert isinstance(dropped, SnapshotDropped)
    return dropped.reason


PAUSES = (0.001, 0.002)


class Mover:
    """What becomes of each attempt, one after the other: an error, or whether one is alive then."""

    def __init__(self, *fates: Exception | bool) -> None:
        self.fates, self.alive, self.said = list(fates), False, list[str]()
        self.back = 0
        self.reviving = MoverRestarter(
            self.revive, lambda: self.alive, self.said.append, self.is_back, PAUSES
        )

    def is_back(self) -> None:
        self.back += 1

    async def revive(self) -> None:
        await asyncio.sleep(0)
        fate = self.fates.pop(0)
        self.reviving.start()  # the end of an attempt's process is told like any other
        if isinstance(fate, Exception):
            raise fate
        self.alive = fate


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.001)


def played(*fates: Exception | bool) -> Mover:
    async def play() -> Mover:
        mover = Mover(*fates)
        mover.reviving.start()
        await _until(lambda: not mover.fates and mover.alive)
        await asyncio.sleep(0.01)
        await mover.reviving.stop()
        return mover

    return asyncio.run(play())


def test_one_that_ends_as_soon_as_it_was_started_is_started_again() -> None:
    mover = played(False, False, True)
    assert mover.back == 1
    assert sum("a new one is started" in line for line in mover.said) == 1


def test_what_keeps_it_from_starting_is_said_once_and_our_own_bug_too() -> None:
    mover = played(
        HoldfastError("the folder is away"),
        HoldfastError("the folder is away"),
        KeyError("peers"),
        FencedError("2 rules"),
        True,
    )
    assert [line for line in mover.said if "the folder is away" in line] == [
        "there is no new mover yet, and no checkpoint: the folder is away"
    ]
    assert any("KeyError: 'peers'" in line for line in mover.said)
    assert mover.back == 1


def test_none_is_started_once_the_agent_ends() -> None:
    async def play() -> Mover:
        mover = Mover(*[HoldfastError("away")] * 1000)
        mover.reviving.start()
        await _until(lambda: len(mover.fates) < 990)
        await mover.reviving.stop()
        left = len(mover.fates)
        await asyncio.sleep(0.05)
        assert len(mover.fates) == left
        return mover

    assert not asyncio.run(play()).back
