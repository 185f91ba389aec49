"""Processes of a benchmark: their environment, and ranks that take orders as JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]


def environment(**more: str) -> dict[str, str]:
    """This process's variables, with our packages and one thread for each process."""
    path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


class RankError(SystemExit):
    """A rank ended or did not answer in time. If nothing catches this, it ends the program."""


class Ranks:
    """A process for each rank, which answers every order by one line. Ended with the `with` block.

    Args:
        name: stands before what a rank said last.
        commands: of each rank, what follows `python -m`.
        folder: an existing one, for the ranks' logs.
        seconds: deadline of an answer.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        folder: Path,
        seconds: float,
        python: str = sys.executable,
    ) -> None:
        self.name, self._seconds = name, seconds
        self._logs = [folder / f"rank{rank}.log" for rank in range(len(commands))]
        self._workers = [
            subprocess.Popen(
                [python, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
                cwd=ROOT,
                env=environment(),
                start_new_session=True,
            )
            for command, log in zip(commands, self._logs, strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the ranks and all that they started."""
        for worker in self._workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()

    def ask(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Give all ranks an order; the answers. Raises RankError."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(order) + "\n")
            worker.stdin.flush()
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """One line of each rank. Raises RankError."""
        timer = threading.Timer(self._seconds, self.close)  # then the pipes end
        timer.start()
        try:
            lines = [worker.stdout.readline() for worker in self._workers if worker.stdout]
        finally:
            timer.cancel()
        if not all(lines):
            self.close()
            raise RankError(f"{self.name}: {self._last_words()}")
        return [json.loads(line) for line in lines]

    def _last_words(self) -> str:
        for log in self._logs:
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
            errors = [line for line in lines if "Error" in line or "error:" in line]
            if errors or lines:
                return (errors or lines)[-1][:300]
        return "it said nothing"


def train_with(entry: str) -> int:
    """`holdfast train` of this command line; entry: of its workers, as `module:function`."""
    from holdfast.cli.main import main
    from holdfast.launch import local

    local.train_locally.__kwdefaults__["entry"] = entry  # type: ignore[index]
    return main(["train", *sys.argv[1:]])
