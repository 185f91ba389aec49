"""`holdfast.follow` of a run that another process has not begun yet."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

import holdfast
from holdfast.config.run import RunConfig
from holdfast.errors import RunFolderError
from holdfast.events import RunFinished
from holdfast.wire.journal import JournalWriter
from holdfast.wire.store.run_store import FolderStore


def begin_and_finish(folder: Path) -> None:
    journal = JournalWriter(FolderStore(folder), "rank0", 1)
    journal.emit(RunFinished(step=3))
    journal.flush()
    resolved = {"config": RunConfig().model_dump(mode="json")}
    (folder / "resolved.json").write_text(json.dumps(resolved))


def test_follow_waits_for_a_run_that_has_not_begun(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    records = holdfast.follow(folder, seconds=0.01, wait=60)
    starter = threading.Timer(0.1, begin_and_finish, [folder])
    starter.start()
    assert [(record["kind"], record["step"]) for record in records] == [("run_finished", 3)]


def test_follow_refuses_a_folder_in_which_no_run_begins(tmp_path: Path) -> None:
    for wait in (0.0, 0.05):
        with pytest.raises(RunFolderError, match="there is no run here"):
            next(holdfast.follow(tmp_path, seconds=0.01, wait=wait))


def test_follow_ends_if_it_is_stopped_while_it_waits(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert list(holdfast.follow(tmp_path, stop, wait=60)) == []
