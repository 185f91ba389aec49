"""Remedies of messages of staging machines, of trackers, and of sources that change."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from re import Match
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.cli import stage
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.report.trackers import process
from holdfast.report.trackers.cursor import CURSOR_FILE, lock_tracker
from holdfast.report.trackers.process import TrackerSpec
from tests.runtime.cli.remedies.lab import Case, Lab, case, fetch_again
from tests.runtime.cli.remedies.of_nodes import quick_servers
from tests.runtime.cli.remedies.of_runs import RUN, attempt, begin_run, replace
from tests.support.corpus import data_config, text_folder, text_source


# --- staging machines -----------------------------------------------------------------------
def begin_stage(listen: str, memory: str) -> Callable[[Lab], None]:
    def begin(lab: Lab) -> None:
        lab.write("secret", "5e" * 32).chmod(0o600)
        words = ["--listen", listen, "--secret", lab.path("secret"), "--memory", memory]
        lab.settings["line"] = ["stage", *words]

    return begin


def stage_copies(lab: Lab) -> None:
    """Up to Ctrl-C, which comes at once."""
    with quick_servers(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "_watch", lambda *_: 0)
        attempt(lab)


# --- trackers and sources -------------------------------------------------------------------
def begin_tracked(lab: Lab) -> None:
    begin_run(lab)
    content = '{"v": 1, "key": "k", "positions": {}, "curve": {"a": 1}}'
    lab.settings["cursor"] = lab.write(f"{RUN}/trackers/csv/{CURSOR_FILE}", content)


def follow(lab: Lab) -> None:
    """What the process of a tracker does, with a run that is over."""
    over = threading.Event()
    over.set()
    spec = TrackerSpec("csv", "tiny", lab.path(RUN))
    call: Any = SimpleNamespace(call=lambda function, *arguments: function(*arguments))
    locks: list[int] = []

    def lock(folder: Path) -> int | None:
        locks.append(lock_tracker(folder) or 0)
        return locks[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "lock_tracker", lock)
        try:
            process.serve(spec, over, call)
        finally:
            os.close(locks[0])  # as the end of the process does


def begin_sources(lab: Lab) -> None:
    text_folder(lab.folder / "in", files=6, words=60)


def begin_growing(lab: Lab) -> None:
    begin_sources(lab)
    lab.settings["grows"] = True


def prepare(lab: Lab) -> None:
    """While it runs, another process writes into a file that was scanned."""

    def say(text: str) -> None:
        if lab.settings.pop("grows", False):
            path = lab.folder / "in/003.txt"
            path.write_text(path.read_text() + "and more.\n")

    prepare_dataset(data_config(lab.folder / "out", text_source(lab.folder / "in")), say=say)


def begin_bad_file(lab: Lab) -> None:
    begin_sources(lab)
    lab.spoil(lab.folder / "in/003.txt", b"one \xff two")


def write_utf8(lab: Lab, found: Match[str]) -> None:
    fetch_again(lab, found)


CASES: list[Case] = [
    case(
        "cli/stage.py: … is not an address",
        begin_stage("here", "0.01"),
        stage_copies,
        r"use host:port, such as 10\.0\.0\.7:7600",
        replace("here", "127.0.0.1:0"),
    ),
    case(
        "cli/stage.py: … GB keep nothing",
        begin_stage("127.0.0.1:0", "0"),
        stage_copies,
        r"use the size of two snapshots of every rank, or more",
        replace("0", "0.01"),
    ),
    case(
        "cli/stage.py: … GB are more than this machine has free",
        begin_stage("127.0.0.1:0", "1e9"),
        stage_copies,
        r"use ([\d.]+) or less",
        replace("1e9", "0.01"),
    ),
    case(
        "report/trackers/process.py: this is not the position of a tracker",
        begin_tracked,
        follow,
        r"remove the file; the tracker then gets the entire run again",
        lambda lab, found: Path(lab.settings["cursor"]).unlink(),
    ),
    case(
        "data/stages/unit_tasks.py: the source changed while it was being prepared",
        begin_growing,
        prepare,
        r"run the same command again",
        lambda lab, found: None,
    ),
    case(
        "data/stages/unit_tasks.py: (read_refused)",
        begin_bad_file,
        prepare,
        r".*",
        write_utf8,
    ),
]
