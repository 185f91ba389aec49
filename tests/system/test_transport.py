"""Runs of the real command whose device's backend uses a slow transport (a stand-in)."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.events import WorkerReady
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.runtime.plan.test_links import TOOL, write
from tests.support.commands import Outcome
from tests.support.faulty_trainer import DEEDS
from tests.support.ranks import ROOT

SHARED = {"ranks_per_device": 0, "transport": "SHM/direct/direct"}


def train(*arguments: str | Path) -> Outcome:
    command = [sys.executable, "-m", "tests.support.faulty_trainer", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
def test_a_run_beside_nvlink_is_refused_and_accepted_by_the_run_file(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    write(tmp_path, **{tool.name: TOOL})
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv(DEEDS, json.dumps({"on a device": SHARED, "system": str(tmp_path)}))
    folder = tmp_path / "run"
    command = (run_file, f"folder={folder}", "layout.workers=2")
    train(*command).refuses_last(
        "layout.allow_tcp: data between the cards 0 and 1 goes through shared memory, though "
        "NVLink NV18 joins them",
        "unset NCCL_P2P_DISABLE=1, or use layout.allow_tcp=true",
    )
    accepted = train(*command, "layout.allow_tcp=true")
    assert accepted.code == 0, accepted.err
    events = [record.event for record in read_journal(FolderStore(folder))]
    ready = {event.rank: event.device for event in events if isinstance(event, WorkerReady)}
    assert ready == dict.fromkeys((0, 1), "cpu, fakenccl, shared memory")
