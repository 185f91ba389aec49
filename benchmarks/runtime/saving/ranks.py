"""The processes of a case: a mover, and one worker per rank."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.runtime.saving.task import Task
from benchmarks.runtime.turns import ROOT
from holdfast.checkpoint.mover.main import MoverSpec
from holdfast.checkpoint.mover.service import MoverSettings
from holdfast.wire.secret import Secret

DEADLINE = 600.0


def _environment() -> dict[str, str]:
    path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


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
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(boot.to_json_line())
        self._process.stdin.close()
        assert json.loads(self._process.stdout.readline())["ready"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._private, ignore_errors=True)


class Ranks:
    """Ended with the `with` block."""

    def __init__(self, task: Task, python: str) -> None:
        self._logs = [Path(f"{task.meeting}.{rank}.log") for rank in range(task.world)]
        self._workers = [
            subprocess.Popen(
                [
                    python,
                    "-m",
                    "benchmarks.runtime.saving.worker",
                    str(rank),
                    json.dumps(asdict(task)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
                cwd=ROOT,
                env=_environment(),
                start_new_session=True,
            )
            for rank, log in enumerate(self._logs)
        ]

    def __enter__(self) -> Ranks:
        self._answers()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:  # and what they started: a process of DCP's own
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()

    def ask(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """One answer of each rank. Exits with the last words of one that ended."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(order) + "\n")
            worker.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        timer = threading.Timer(DEADLINE, lambda: self.__exit__(None, None, None))
        timer.start()
        try:
            lines = [worker.stdout.readline() for worker in self._workers if worker.stdout]
        finally:
            timer.cancel()
        for line, log in zip(lines, self._logs, strict=True):
            if not line:
                said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise SystemExit(f"a rank ended: {said[-1][:300]}")
        return [json.loads(line) for line in lines]
