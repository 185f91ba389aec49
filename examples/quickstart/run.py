"""The quickstart, as a list of commands, and one thing that no command does: in the middle of
training it kills a worker with SIGKILL, as a vanishing machine would.

    python examples/quickstart/run.py [--size small|standard]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.config.load import load
from holdfast.data.dataset import Dataset
from holdfast.events import CheckpointCommitted, Evaluated, Record, StepDone, WorkerStarted
from holdfast.wire.journal import follow, read
from holdfast.wire.runstore import FolderStore

HERE = Path(__file__).parent
RUN_FILES = {"small": HERE / "run.yaml", "standard": HERE / "standard.yaml"}
SMALL_LIMIT = 2.3  # bits per byte of validation text at the end; standard: below the bigram's
PROMPT = "def read_lines(path):\n"


def holdfast(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start `holdfast ARGUMENTS`, shown as a person would type it."""
    words = [str(argument) for argument in arguments]
    shown = [word if word.isprintable() and " " not in word else repr(word) for word in words]
    print(f"\n$ holdfast {' '.join(shown)}", flush=True)
    return subprocess.Popen([sys.executable, "-m", "holdfast.cli.main", *words])


def demand(process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    if code:
        sys.exit(code)


class Killer(threading.Thread):
    """Follows the journal, and kills one worker when a little over half of the steps are done.

    What an earlier start wrote is passed over: its processes have ended, and their numbers may be
    somebody else's by now.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()  # training has ended: nobody is left to kill
        self.said = ""
        self._store = FolderStore(folder)
        self._before = len(read(self._store)) if folder.exists() else 0
        self._middle = steps * 11 // 20  # not at a checkpoint: some steps are to be lost

    def run(self) -> None:
        workers: dict[int, Record] = {}  # rank -> how it started, in the newest generation
        saved = False
        for record in self._news():
            event = record.event
            saved = saved or isinstance(event, CheckpointCommitted)
            if isinstance(event, WorkerStarted):
                workers[event.rank] = record
            if isinstance(event, StepDone) and event.step > self._middle:
                return  # this part was done in an earlier start
            if isinstance(event, StepDone) and event.step == self._middle and saved:
                self._kill(workers[max(workers)], event.step)
                return

    def _news(self) -> Iterator[Record]:
        for records in follow(self._store, stop=self.done):
            old, self._before = self._before, max(0, self._before - len(records))
            yield from records[old:]

    def _kill(self, record: Record, step: int) -> None:
        worker = record.event
        assert isinstance(worker, WorkerStarted)
        os.kill(worker.pid, signal.SIGKILL)
        self.said = f"after step {step}, worker {worker.rank} (process {worker.pid}) got SIGKILL"


def main() -> int:
    parser = argparse.ArgumentParser(description="Train, lose a worker, resume, report, sample.")
    parser.add_argument("--size", choices=RUN_FILES, default="small")
    size = parser.parse_args().size
    began = time.monotonic()
    run_file = RUN_FILES[size]
    config = load(run_file).config
    folder = Path(config.run_folder)

    demand(holdfast("data", "prepare", run_file))
    killer = Killer(folder, config.train.steps)
    training = holdfast("train", run_file)
    killer.start()
    try:
        demand(training)
    finally:
        killer.done.set()
    if killer.said:
        print(f"\n{killer.said}; the run went on from its last checkpoint by itself")
    demand(holdfast("data", "audit", folder))
    demand(holdfast("report", folder, "--sample", PROMPT))
    demand(holdfast("generate", folder, PROMPT, "--temperature", "0.6"))
    baselines = Dataset.open(config.data.folder).baselines
    limit = baselines["bigram"] if size == "standard" and baselines else SMALL_LIMIT
    return verdict(folder, limit, time.monotonic() - began)


def verdict(folder: Path, limit: float, seconds: float) -> int:
    """Print how it ended; 1 when the model did not learn what it should."""
    found = [r.event for r in read(FolderStore(folder)) if isinstance(r.event, Evaluated)]
    bits = found[-1].bits_per_byte
    print(f"\n{bits:.2f} bits per byte of validation text (at most {limit:.2f} was asked for), "
          f"{seconds / 60:.1f} minutes; the report: {folder / 'report.html'}")  # fmt: skip
    return 0 if bits <= limit else 1


if __name__ == "__main__":
    sys.exit(main())
