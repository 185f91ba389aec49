"""How long a run on a real Ray takes to continue after a loss, next to Ray Train.

    python -m benchmarks.runtime.ray [--rounds 2] [--spares 1] [--without-peer]

Five raylets of one CPU on this machine, four workers, gloo. Needs ray[default,train] of pip. Prints
one JSON object a loss. Seconds count from the SIGKILL, or from the announcement of a drain:

    error_s   until another worker's collective raised (the floor; Ray Train's workers note it)
    fewer_s   until the remaining workers did a step
    all_s     until all four workers did a step again. Without a spare, Ray starts a node on the
              fifth machine. A spare (`launch.spares`) is a node that waits there

The first line is the time of `import torch` in a new process, which every new worker pays unless it
is forked. Ray itself notices a lost machine after some seconds (`tests/support/ray_cluster.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.ray_cluster import RayCluster, ray_cluster
from tests.support.ray_run import ENDLESS, RayRun

from holdfast.events import WorkerLost, WorkerStarted

MACHINES = ("a", "b", "c", "d", "e")
WORKERS = 4
DRAIN_S = 60.0


def import_seconds() -> float:
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - started


def kill_worker(run: RayRun) -> float:
    """Kill one worker process; its node stays. Return when."""
    lost = {event.pid for event in run.journal.events(WorkerLost)}
    victim = [e.pid for e in run.journal.events(WorkerStarted) if e.pid not in lost][-1]
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    return killed


def joins(run: RayRun, node: str) -> int:
    """How often a node has said that it takes part."""
    return (run.folder / "launch" / f"{node}.log").read_text().count("has joined the run")


def take_machine(run: RayRun, cluster: RayCluster, victim: str, *, drains: bool) -> float:
    """Take the machine of a node away; return when."""
    machine = cluster.machine_at(run.states()[victim][1])
    started = time.time()
    if drains:
        cluster.drain(machine, DRAIN_S)
    else:
        cluster.lose(machine)
    return started


def measure(run: RayRun, cluster: RayCluster, what: str) -> dict[str, float | str]:
    run.wait_more_steps()
    before = run.generation
    victim = max(run.journal.nodes(before))
    joined = joins(run, victim)
    if what == "worker":
        started = kill_worker(run)
    else:
        started = take_machine(run, cluster, victim, drains=what == "drain")
    fewer = run.first_step_of_workers(before, 1)
    again = run.first_step_of_workers(before, WORKERS)
    if what != "worker":
        cluster.add(f"more-{int(started)}")
        run.wait(lambda: joins(run, victim) > joined, "the lost node does not return")
    return {
        "system": "holdfast",
        "lost": what,
        "fewer_s": round(fewer - started, 2),
        "all_s": round(again - started, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--spares", type=int, choices=(0, 1), default=0)
    parser.add_argument("--without-peer", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps({"import_torch_s": round(import_seconds(), 2)}), flush=True)
    with tempfile.TemporaryDirectory() as folder, ray_cluster(*MACHINES) as cluster:
        run = RayRun(Path(folder), cluster)
        run.launch(WORKERS, ENDLESS, f"launch.spares={arguments.spares}")
        run.first_step_of_workers(0, WORKERS)
        for what in ("worker", "machine", "drain"):
            for _ in range(arguments.rounds):
                print(json.dumps(measure(run, cluster, what)), flush=True)
        run.command("down")
    if not arguments.without_peer:
        command = [
            sys.executable,
            "-m",
            "benchmarks.runtime.ray_train",
            "--rounds",
            str(arguments.rounds),
        ]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
