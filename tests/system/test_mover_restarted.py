"""A mover is killed while the run folder is out of reach, so that no new one can be started. A new
one starts when the folder is back. It saves for the generation that has continued meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.core.format.manifest import parse_commit_key
from holdfast.events import GenerationStarted
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import start, within, write_run_file
from tests.support.processes import children_of
from tests.support.ranks import DEADLINE_S, wait_until

SETTINGS = (
    "train.steps=1000000",
    "checkpoint.every_steps=50",
    "checkpoint.memory_every_steps=1",
    "train.evaluate.every=0",
    "cluster.threads_per_worker=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_mover_that_cannot_be_started_at_once_is_started_later(
    workers: int, tmp_path: Path
) -> None:
    path = write_run_file(tmp_path)
    assert within("data", "prepare", path).code == 0
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    _point(link, real.name)
    process = start("train", path, f"folder={link}", *SETTINGS, f"layout.workers={workers}")
    said: list[str] = []
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        threading.Thread(target=said.extend, args=(stream,), daemon=True).start()
    try:
        wait_until(lambda: _newest(real) > 0)
        _point(link, link.name)  # to itself: it cannot be opened
        _movers(process.pid)[0].kill()
        wait_until(lambda: not _movers(process.pid))
        wait_until(lambda: any("there is no new mover yet" in line for line in said))
        before = _newest(real)
        _point(link, real.name)
        wait_until(lambda: _newest(real) > before + 50)
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
    finally:
        process.kill()
    begun = [r for r in read_journal(FolderStore(real)) if isinstance(r.event, GenerationStarted)]
    assert len(begun) == 1, "the workers went on"


def _point(link: Path, target: str) -> None:
    new = link.with_name("new")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    os.replace(new, link)


def _newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0 for none."""
    positions = [parse_commit_key(key) for key in list_commits(FolderStore(folder))]
    return max((found[0] for found in positions if found is not None), default=0)


def _movers(agent: int) -> list[psutil.Process]:
    return children_of(agent, "holdfast.checkpoint.mover.main")
