"""An agent and its mover on one of several nodes: it dies while training goes on, and another one
takes its place."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.checkpoint.mover import client as mover_client
from holdfast.checkpoint.mover.client import MoverClient, MoverGoneError, Newest
from holdfast.checkpoint.mover.service import Settings
from holdfast.config.run import RunConfig
from holdfast.elastic.node import mover_supervisor
from holdfast.elastic.node.mover_supervisor import MoverLink, Safe
from holdfast.elastic.reviving import Reviving
from holdfast.errors import HoldfastError
from holdfast.events import (
    CheckpointCommitted,
    Event,
    SnapshotComplete,
    SnapshotDropped,
    SnapshotKept,
)
from holdfast.layout import Layout, place
from holdfast.wire import lifeline
from holdfast.wire.secret import Secret
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import open_generation
from tests.support.processes import stop

SECRET = Secret(bytes(range(32)))
DEADLINE = 60.0


def config() -> RunConfig:
    model = {"preset": None, "layers": 1, "dim": 16, "heads": 2, "kv_heads": 1, "ffn_dim": 16,
             "vocab_size": 32}  # fmt: skip
    return RunConfig.model_validate({"name": "test", "model": model})


def test_a_mover_that_dies_is_replaced_in_the_running_generation(tmp_path: Path) -> None:
    asyncio.run(_replaced(tmp_path))


async def _replaced(folder: Path) -> None:
    store = FolderStore(folder)
    events: list[Event] = []
    end, keep = lifeline.pipe()
    gone = asyncio.Event()
    settings = Settings("test", "c", "d")
    links = {
        name: MoverLink(config(), folder, SECRET, settings, events.append, name) for name in "ab"
    }
    try:
        await asyncio.gather(*(link.ensure(end, gone.set) for link in links.values()))
        peers = [link.peer for link in links.values() if link.peer is not None]
        assert [peer.name for peer in peers] == ["a", "b"]
        open_generation(store, 1, {})
        topology = place(Layout(dp_shard=2), 1, ("a", "b"))
        newest = await links["b"].choose(1, {}, peers)
        assert newest.key is None
        told = Newest.from_json(newest.to_json())
        for link in links.values():
            await link.expect(topology, told.step, told, peers)
        before = links["a"].pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await asyncio.wait_for(gone.wait(), DEADLINE)
        # Whoever replaces it and an opening that comes just then both ask: one is started.
        await asyncio.gather(links["a"].revive(end, gone.set), links["a"].ensure(end, gone.set))
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
    monkeypatch.setattr(mover_supervisor, "HUNG_SECONDS", 1.0)
    monkeypatch.setattr(mover_supervisor, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(mover_supervisor, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(mover_client, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(MoverClient._call, "__defaults__", (0.3,))
    asyncio.run(_ended(tmp_path))


async def _ended(folder: Path) -> None:
    open_generation(FolderStore(folder), 1, {})
    end, keep = lifeline.pipe()
    gone = asyncio.Event()
    link = MoverLink(config(), folder, SECRET, Settings("test", "c", "d"), lambda event: None)
    try:
        await link.ensure(end, gone.set)
        before = link.pid
        assert before is not None
        stop(before)
        async with asyncio.timeout(DEADLINE):
            while not gone.is_set():  # told again and again, which never leaves it in peace
                with suppress(MoverGoneError):
                    await link.expect(place(Layout(), 1, ("",)), 0)
                await asyncio.sleep(0.1)
        await link.revive(end, gone.set)
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
    open_generation(FolderStore(folder), 1, {})
    end, keep = lifeline.pipe()
    said: list[str] = []
    link = MoverLink(config(), folder, SECRET, Settings("test", "c", "d"), lambda event: None)
    reviving = Reviving(
        lambda: link.revive(end, reviving.begin), lambda: link.alive, said.append,
        pauses=(0.01, 0.05),
    )  # fmt: skip
    try:
        await link.ensure(end, reviving.begin)
        await link.expect(place(Layout(), 1, ("",)), 0)
        for wait in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.05):
            pid = await _serving(link)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE):
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


async def _serving(link: MoverLink) -> int:
    """The process that answers for generation 1."""
    async with asyncio.timeout(DEADLINE):
        while True:
            pid = link.pid
            with suppress(HoldfastError):
                client = MoverClient(link.socket_path, SECRET, 1)
                status = await asyncio.to_thread(client.status)
                if pid is not None and link.pid == pid and status["generation"] == 1:
                    return pid
            await asyncio.sleep(0.01)


def test_what_protects_a_run_whose_memory_is_gone_is_said() -> None:
    safe = Safe()
    assert safe.without_memory() == []
    safe.observe(SnapshotComplete(1, 0.1, step=7))
    (dropped,) = safe.without_memory()
    assert isinstance(dropped, SnapshotDropped)
    assert "nothing else holds a state" in dropped.reason
    assert dropped.step == 7
    assert safe.without_memory() == [], "said once"
    safe.observe(CheckpointCommitted("k", 1, 0.1, step=5))
    safe.observe(SnapshotComplete(1, 0.1, step=8))
    assert "newest checkpoint is of step 5" in _reason(safe)
    safe.observe(SnapshotKept("stage", 1, 0.1, step=8))
    safe.observe(SnapshotComplete(1, 0.1, step=9))
    assert "stage keeps a copy of the state after step 8" in _reason(safe)


def _reason(safe: Safe) -> str:
    (dropped,) = safe.without_memory()
    assert isinstance(dropped, SnapshotDropped)
    return dropped.reason
