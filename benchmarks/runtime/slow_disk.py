"""How long a recovery takes on a disk whose fsync takes seconds, and which fsyncs it waits for.

    unshare -Urm python -m benchmarks.runtime.slow_disk [--seconds 2] [--rounds 3] [--nodes 1]

Kills one worker of a run in each round. Prints the seconds until a step of the next generation is
done. Then it lists the fsyncs in between: begin, end, process, path. Only the run folder is on the
slow disk (`tests.support.faulty_disk`).
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from tests.support.commands import apart, write_run_file
from tests.support.faulty_disk import FaultyDisk
from tests.support.watched_run import WatchedRun

SETTINGS = (
    "train.steps=1000000",
    "train.evaluate.every=0",
    "train.batch_size=6",
    "checkpoint.every_steps=0",
    "layout.workers=3",
)
SEVERAL = ("cluster.places=1", "cluster.settle_seconds=0.5", "cluster.gather_seconds=60")


def lose_worker(run: WatchedRun) -> tuple[float, float]:
    """Kill a worker; return when, and when the next generation had done a step."""
    before, victim = run.newest_generation, run.workers()[-1]
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    run.wait(lambda: run.newest_generation > before, "the next generation")
    return killed, run.done_at[run.newest_generation]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=1, choices=(1, 3))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run_file = write_run_file(root)
        prepared = apart("data", "prepare", run_file)
        assert prepared.code == 0, prepared.err
        (root / "disk").mkdir()
        (root / "run").mkdir()
        disk = FaultyDisk(root / "disk", root / "run")
        is_alone = arguments.nodes == 1
        settings = SETTINGS if is_alone else (*SETTINGS, *SEVERAL)
        run = WatchedRun(run_file, settings, () if is_alone else ("a", "b", "c"))
        taken = []
        try:
            run.wait_steps(40)
            disk.order(f"slow {arguments.seconds:g}")
            for _ in range(arguments.rounds):
                run.wait_steps(40)
                time.sleep(3 * arguments.seconds)  # until what was begun is written
                killed, done = lose_worker(run)
                taken.append(done - killed)
                print(f"{done - killed:6.2f} s from the kill to the next generation's first step")
                time.sleep(3 * arguments.seconds)
                for sync in disk.syncs:
                    if sync["end"] > killed and sync["begin"] < done:
                        begin, end = sync["begin"] - killed, sync["end"] - killed
                        asked = f"{sync['process']}: {sync['path']}"
                        print(f"    {begin:6.2f} {end:6.2f} {asked}")
        finally:
            disk.order("well")
            run.close()
            disk.close()
        print(f"median {statistics.median(taken):.2f} s, fsync {arguments.seconds:g} s")


if __name__ == "__main__":
    main()
