"""Seconds from the SIGKILL of a worker of an own loop to the next committed step.

Four workers train 0.79 M parameters by `holdfast run`, as the peers of `benchmarks.recovery` do.
Each computes one of four microbatches, which waits for `--step` seconds. After a loss one of the
three remaining workers computes two, so that a step lasts twice as long.

    python -m benchmarks.own_loop_kill [--step 0.25] [--rounds 5]

    to next s    from the kill to the next step in the journal
    beyond s     the part of it beyond one step of the remaining workers
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from holdfast.events import GenerationStarted, Record, StepDone, WorkerStarted
from holdfast.layout import Topology
from holdfast.wire.journal import follow_journal
from holdfast.wire.store.run_store import FolderStore

WORLD, STEADY = 4, 5
SCRIPT = Path(__file__).parent / "own_loop" / "waiting_loop.py"


class Watched:
    """The journal of a run: its steps, its processes by rank, and its number of workers."""

    def __init__(self, folder: Path) -> None:
        self._records = self._follow(folder)
        self.pids: dict[int, int] = {}
        self.workers = 0

    def next_step(self) -> Record:
        """Read up to the next step that is done."""
        for record in self._records:
            event = record.event
            if isinstance(event, GenerationStarted):
                came_from = event.came_from or []
                kept = {
                    rank: self.pids[was]
                    for rank, was in enumerate(came_from)
                    if was is not None and was in self.pids
                }
                self.pids = self.pids | kept if event.came_from is None else kept
                self.workers = Topology.from_json(event.topology).world_size
            if isinstance(event, WorkerStarted):
                self.pids[event.rank] = event.pid
            if isinstance(event, StepDone):
                return record
        raise RuntimeError("the run ended")

    def steady(self) -> float:
        """Read until all workers have done some steps; return the seconds of one."""
        seconds: list[float] = []
        while len(seconds) < STEADY:
            event = self.next_step().event
            assert isinstance(event, StepDone)
            seconds = [*seconds, event.seconds] if self.workers == WORLD else []
        return statistics.median(seconds)

    def _follow(self, folder: Path) -> Iterator[Record]:
        store = FolderStore(folder)
        for records in follow_journal(store, poll_interval_s=0.005, stop=threading.Event()):
            yield from records


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=5)
    told = parser.parse_args()
    chosen = random.Random(3)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "run"
        command = [sys.executable, "-m", "holdfast.cli.main", "run", str(SCRIPT)]
        settings = ["device=cpu", "cluster.threads_per_worker=1", "checkpoint.every_steps=1000"]
        options = [word for setting in settings for word in ("--set", setting)]
        place = ["--folder", str(folder), "--workers", str(WORLD)]
        process = subprocess.Popen(
            [*command, *place, *options, "--", str(told.step)], stderr=subprocess.DEVNULL
        )
        found: list[tuple[float, float, float]] = []
        try:
            watched = Watched(folder)
            for _ in range(told.rounds):
                usual = watched.steady()
                time.sleep(chosen.uniform(0, told.step))
                killed = time.time()
                os.kill(watched.pids[max(watched.pids)], signal.SIGKILL)
                while (record := watched.next_step()).time < killed or watched.workers == WORLD:
                    pass
                found.append((usual, record.time - killed, record.time - killed - 2 * told.step))
        finally:
            process.terminate()
            process.wait(60)
    print(f"{'n':>4}{'step s':>9}{'to next s':>11}{'worst':>8}{'beyond s':>10}{'worst':>8}")
    usual, seconds, beyond = (list(column) for column in zip(*found, strict=True))
    print(
        f"{len(found):4d}{statistics.median(usual):9.3f}{statistics.median(seconds):11.3f}"
        f"{max(seconds):8.3f}{statistics.median(beyond):10.3f}{max(beyond):8.3f}"
    )


if __name__ == "__main__":
    main()
