"""A real trainer in a process of its own, watched from outside: through its journal and `/proc`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from holdfast.events import Event, Record, WorkerStarted
from tests.support.journal_reader import Journal
from tests.support.processes import children_of, runs, stop
from tests.support.ranks import DEADLINE_S, ROOT, wait_until

E = TypeVar("E", bound=Event)


class Trainer:
    """One start of a trainer on a run folder."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        module: str = "tests.support.toy_trainer",
        environ: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
    ) -> None:
        """environ: variables that this process does not have. before: arguments before the
        folder."""
        self.folder = folder
        self._movers: list[psutil.Process] = []
        self._journal = Journal(folder)
        self.output = folder.parent / f"{folder.name}-{len(list(folder.parent.iterdir()))}.out"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", module, *before, str(folder)),
                    *("cluster.heartbeat_seconds=0.05", "cluster.recovery=restart"),
                    *overrides,
                ],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
            )

    @property
    def said(self) -> str:
        return self.output.read_text()

    def records(self) -> list[Record]:
        return self._journal.records()

    def events(self, kind: type[E], generation: int | None = None) -> list[E]:
        return [
            r.event
            for r in self.records()
            if isinstance(r.event, kind) and generation in (None, r.generation)
        ]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Until `condition` holds. Fails at once when the trainer ends before."""

        def due() -> object:
            return condition() or self.process.poll() is not None

        try:
            wait_until(due, DEADLINE_S, what)
        except TimeoutError as error:
            raise AssertionError(f"{error}; the trainer said:\n{self.said}{self.logs()}") from None
        assert condition(), f"ended before {what}; it said:\n{self.said}{self.logs()}"

    def wait_for_line(self, words: str) -> None:
        """Until it has said `words`. Fails at once when the trainer ends before."""
        self.wait(lambda: words in self.said, f"the line with {words!r}")

    def wait_step(self, step: int, generation: int) -> None:
        from holdfast.events import StepDone

        self.wait(
            lambda: any(e.step >= step for e in self.events(StepDone, generation)),
            f"step {step} of generation {generation}",
        )

    def workers(self, generation: int) -> dict[int, int]:
        """rank -> pid."""
        return {e.rank: e.pid for e in self.events(WorkerStarted, generation)}

    def end(self, seconds: float = DEADLINE_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end; it said:\n{self.said}{self.logs()}") from None

    def logs(self) -> str:
        paths = sorted((self.folder / "logs").rglob("*.log"))
        return "".join(f"--- {path.name}\n{path.read_text()}" for path in paths)

    def stop(self) -> None:
        """Stop the agent, and before it the mover, which would continue it."""
        self._movers = children_of(self.process.pid, "holdfast.checkpoint.mover.main")
        for mover in self._movers:
            mover.suspend()
        stop(self.process.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        for mover in self._movers:
            with suppress(psutil.NoSuchProcess):
                mover.resume()

    def family(self) -> set[int]:
        """Process ids of this trainer and everything that descends from it now."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    parents[int(entry.name)] = parent_of(int(entry.name))
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found


@contextmanager
def training(
    folder: Path, plan: dict[str, Any], *overrides: str, module: str = "tests.support.toy_trainer"
) -> Iterator[Trainer]:
    """Run a trainer that is ended afterwards, for any end of the test."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    trainer = Trainer(folder, *overrides, module=module)
    try:
        yield trainer
    finally:
        with suppress(ProcessLookupError):
            os.kill(trainer.process.pid, signal.SIGKILL)
        trainer.process.wait(120)


def parent_of(pid: int) -> int:
    """Return the parent of a process. Raises OSError if the process has exited."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def gone(pids: set[int]) -> bool:
    """Return True if none of the processes runs; a zombie that was not reaped does not run."""
    return not any(map(runs, pids))
