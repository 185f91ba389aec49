"""Whether a run folder is here, away or gone, by what an agent sees of it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.elastic.agent import run_folder_monitor
from holdfast.elastic.agent.run_folder_monitor import FolderState, RunFolder, RunFolderMonitor
from holdfast.elastic.run_result import RunEndedError
from holdfast.errors import FencedError, RunFolderError
from holdfast.wire.store.run_store import FolderStore
from holdfast.wire.term import Term, create_term


@contextmanager
def _held(folder: Path) -> Iterator[RunFolder]:
    """A run folder with a term, as an agent has it that has looked once."""
    store = FolderStore(folder)
    found = RunFolder(folder, store)
    try:
        assert create_term(store, 1, "127.0.0.1:1", "a") is not None
        assert found.read_state() is FolderState.PRESENT
        yield found
    finally:
        found.close()


def test_a_folder_that_is_put_back_is_here_again(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    with _held(folder) as found:
        folder.rename(other)
        assert found.read_state() is FolderState.GONE
        folder.mkdir()
        assert found.read_state() is FolderState.GONE
        folder.rmdir()
        other.rename(folder)
        assert found.read_state() is FolderState.PRESENT
        assert create_term(FolderStore(folder), 2, "127.0.0.1:2", "b") is not None
        assert found.read_state() is FolderState.PRESENT


def test_a_folder_that_was_emptied_is_gone_whoever_begins_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _held(folder) as found:
        shutil.rmtree(folder / "terms")
        assert found.read_state() is FolderState.GONE
        assert create_term(FolderStore(folder), 1, "127.0.0.1:2", "b") is not None
        assert found.read_state() is FolderState.GONE


def test_a_folder_that_cannot_be_looked_at_is_away(tmp_path: Path) -> None:
    folder, real = tmp_path / "run", tmp_path / "real"
    real.mkdir()
    folder.symlink_to(real.name)
    with _held(folder) as found:
        folder.unlink()
        folder.symlink_to(folder.name)  # to itself
        assert found.read_state() is FolderState.UNREACHABLE
        folder.unlink()
        assert found.read_state() is FolderState.GONE
        folder.symlink_to(real.name)
        assert found.read_state() is FolderState.PRESENT


def _mount(*arguments: str | Path) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@contextmanager
def _bound(root: Path) -> Iterator[tuple[Path, Path]]:
    """A folder, and where it is mounted too."""
    disk, point = root / "disk", root / "mounted"
    disk.mkdir()
    point.mkdir()
    if os.geteuid() or not _mount("--bind", disk, point):
        pytest.skip("nothing can be mounted here")
    try:
        yield disk, point
    finally:
        subprocess.run(["umount", "--lazy", point], capture_output=True, check=False)


@pytest.mark.parametrize("below", [".", "runs/one"])
def test_a_file_system_that_is_not_mounted_is_away(tmp_path: Path, below: str) -> None:
    with _bound(tmp_path) as (disk, point), _held(point / below) as found:
        subprocess.run(["umount", "--lazy", point], check=True)
        assert found.read_state() is FolderState.UNREACHABLE
        assert _mount("--bind", disk, point)
        assert found.read_state() is FolderState.PRESENT
        shutil.rmtree(point / below / "terms")
        assert found.read_state() is FolderState.GONE


def test_a_disk_that_says_nothing_keeps_nobody_who_is_told_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder_monitor, "FOLDER_CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(run_folder_monitor, "DISK_REPLY_TIMEOUT_S", 0.2)
    told: list[str] = []
    lasts = threading.Event()

    class Silent(RunFolder):
        def read_state(self) -> FolderState:
            lasts.wait(60)
            return super().read_state()

    async def scene(folder: RunFolder) -> None:
        losing = RunFolderMonitor(folder, lambda: "".join(told), lambda: 1.5, _nobody, told.append)
        ending = asyncio.create_task(losing.wait_for_end())
        await asyncio.sleep(1.0)
        assert not ending.done()
        told.append("SIGTERM")
        error = await asyncio.wait_for(ending, 20)
        assert str(error).startswith("SIGTERM: the run folder is out of reach")
        lasts.set()

    folder = Silent(tmp_path / "run", FolderStore(tmp_path / "run"))
    asyncio.run(scene(folder))
    folder.close()


def _nobody(seconds: float) -> None:
    raise AssertionError("nobody has to do without it")


def test_what_lies_at_the_path_of_a_lost_folder_is_not_asked(tmp_path: Path) -> None:
    async def scene(found: RunFolder) -> None:
        losing = RunFolderMonitor(found, lambda: "", lambda: 0.0, _nobody, print)
        await losing.require_not_gone()
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(RunFolderError, match="moved, removed or replaced"):
            await losing.require_not_gone()

    with _held(tmp_path / "run") as found:
        asyncio.run(scene(found))


def test_logs_that_children_write_meanwhile_make_no_other_folder(tmp_path: Path) -> None:
    """A fork server that is started anew logs where the file system was mounted."""
    with _bound(tmp_path) as (_, point), _held(point) as found:
        subprocess.run(["umount", "--lazy", point], check=True)
        (point / "logs").mkdir()
        assert found.read_state() is FolderState.UNREACHABLE
        (point / "journal").mkdir()
        assert found.read_state() is FolderState.GONE


def test_a_term_is_over_only_by_what_its_own_folder_says(tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    store = FolderStore(folder)

    async def scene(found: RunFolder, term: Term) -> None:
        kept = RunFolderMonitor(found, lambda: "", lambda: 0.0, _nobody, print).guard_term(term)
        kept.check()
        folder.rename(moved)
        with pytest.raises(RunFolderError, match="moved, removed or replaced"):
            kept.check()
        folder.symlink_to(folder.name)  # to itself
        with pytest.raises(RunFolderError):
            kept.check()
        folder.unlink()
        moved.rename(folder)
        kept.check()
        assert create_term(store, 2, "127.0.0.1:2", "b") is not None
        with pytest.raises(FencedError, match="has taken over"):
            kept.check()

    found = RunFolder(folder, store)
    term = create_term(store, 1, "127.0.0.1:1", "a")
    assert term is not None
    assert found.read_state() is FolderState.PRESENT
    asyncio.run(scene(found, term))
    found.close()


def test_one_that_changes_within_a_glance_is_looked_at_again(tmp_path: Path) -> None:
    with _held(tmp_path / "run") as found:
        seen = iter([FolderState.GONE, FolderState.UNREACHABLE, FolderState.GONE, FolderState.GONE])
        found._read_state_once = lambda: next(seen)  # type: ignore[method-assign]
        assert found.read_state() is FolderState.UNREACHABLE
        assert found.read_state() is FolderState.GONE


def test_a_run_of_one_node_does_not_wait_for_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder_monitor, "FOLDER_CHECK_INTERVAL_S", 0.02)
    said: list[str] = []

    async def scene(found: RunFolder) -> RunEndedError:
        losing = RunFolderMonitor(
            found, lambda: "", lambda: 0.0, _nobody, said.append, is_single_node=True
        )
        before = losing.is_folder_responsive
        shutil.rmtree(tmp_path / "run")
        error = await asyncio.wait_for(losing.wait_for_end(), 20)
        assert (before, losing.is_folder_responsive) == (True, False)
        return error

    with _held(tmp_path / "run") as found:
        assert str(asyncio.run(scene(found))) == run_folder_monitor.FOLDER_GONE_MESSAGE
    assert said == []
