"""The processes of a case: a mover, and one worker per rank."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.runtime.children import ROOT, Ranks, environment
from benchmarks.runtime.saving.task import Task
from holdfast.checkpoint.mover.main import MoverSpec
from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.wire.secret import Secret

DEADLINE = 600.0


class Mover:
    """A real one, which keeps the newest checkpoint only."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.secret = Secret(secrets.token_bytes(32))
        self._private = tempfile.mkdtemp(prefix="hf-")
        self.socket = f"{self._private}/mover.sock"
        settings = MoverSettings("bench", "", "", keep_last=1)
        boot = MoverSpec(str(folder), self.socket, settings, self.secret.hex())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.checkpoint.mover.main"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(boot.to_json_line())
        self._process.stdin.close()
        assert json.loads(self._process.stdout.readline())["ready"]

    def task(self, world: int, folder: Path, **more: Any) -> Task:
        """A task of ranks that hand their state to this mover."""
        meeting = str(folder / "meeting")
        return Task(world, meeting, str(folder), self.socket, self.secret.hex(), **more)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._private, ignore_errors=True)


def ranks_of(task: Task, python: str) -> Ranks:
    """The ranks of a task, which are ready when this returns. Raises RankError."""
    about = json.dumps(asdict(task))
    module = "benchmarks.runtime.saving.worker"
    commands = [(module, str(rank), about) for rank in range(task.world)]
    logs = Path(f"{task.meeting}-logs")
    logs.mkdir()
    made = Ranks("a rank ended", commands, logs, DEADLINE, python)
    made.answers()
    return made
