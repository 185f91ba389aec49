"""Hang detection: time until a hung worker is named and excluded, and false alarms without one.

    stops         one worker of four is stopped (SIGSTOP), again and again; each time all four are
                  back before the next. Seconds from the signal to the line that names it, and to
                  the generation without its process; both against the bar, three normal steps and a
                  second. Agents are stopped, too, each with its worker.
    undisturbed   2,000 steps, in the second half of which two loops keep both cores busy. Each
                  named worker is counted.

Four nodes of one worker each, and one node of four: real agents on this machine.

    python -m benchmarks.runtime.noticing stops [--nodes 4|1] [--rounds 10] [--agents]
    python -m benchmarks.runtime.noticing undisturbed [--nodes 4|1] [--steps 2000]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.commands import apart, write_run_file
from tests.support.nodes import Nodes, nodes_of

from holdfast.events import (
    Event,
    GenerationStarted,
    StepDone,
    WorkerLost,
    WorkerPaced,
    WorkerStarted,
)

SETTINGS = (
    "train.batch_size=8",
    "train.evaluate.every=100",
    "checkpoint.every_steps=100",
    "layout.workers=4",
    "cluster.max_restarts_without_progress=100",
)


@contextmanager
def running(nodes: int, steps: int) -> Iterator[Nodes]:
    """A run of four workers that has done 50 steps."""
    with tempfile.TemporaryDirectory() as folder:
        run_file = write_run_file(Path(folder))
        prepared = apart("data", "prepare", run_file)
        if prepared.code:
            raise SystemExit(prepared.err)
        settings = [*SETTINGS, f"train.steps={steps}"]
        with nodes_of(run_file, Path(folder) / "run", *settings) as run:
            run.start(*names(nodes), settings=[f"cluster.places={4 // nodes}"])
            run.wait_step(50, nodes=set(names(nodes)))
            yield run


def names(nodes: int) -> str:
    return "abcd"[:nodes]


def workers(run: Nodes, among: set[int]) -> dict[int, tuple[int, str]]:
    """By process: rank and node, of the newest that joined as it."""
    found = {e.pid: (e.rank, e.node) for e in run.events(WorkerStarted)}
    return {pid: place for pid, place in found.items() if pid in among}


def alive(run: Nodes) -> set[int]:
    pids = {e.pid for e in run.events(WorkerStarted)}
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def normal(run: Nodes) -> float:
    """Seconds of a step, lately."""
    times = [r.time for r in run.records() if isinstance(r.event, StepDone)][-40:]
    return (times[-1] - times[0]) / (len(times) - 1)


def one_stop(run: Nodes, nodes: int, agent: bool, turn: int) -> tuple[float, float, float, bool]:
    """Seconds to the name, to the next generation, the bar, and whether the right one was named."""
    found = workers(run, alive(run))
    others = {pid: place for pid, place in found.items() if not agent or place[1] != run.leader}
    pid = sorted(others)[turn % len(others)]
    node = found[pid][1]
    bar, before = 3 * normal(run) + 1.0, run.newest
    seen = len(run.events(WorkerLost))
    begun = time.time()
    if agent:
        run.signal(node, signal.SIGSTOP)
    os.kill(pid, signal.SIGSTOP)
    run.wait_step(1, after=before)
    later = [r for r in run.records() if r.time >= begun]
    lost = [r for r in later if isinstance(r.event, WorkerLost)]
    started = min(r.time for r in later if isinstance(r.event, GenerationStarted))
    told = [r.event for r in lost if isinstance(r.event, WorkerLost)]
    right = len(run.events(WorkerLost)) == seen + 1 and (
        told[0].node == node if agent else told[0].pid == pid
    )
    if agent:
        run.signal(node, signal.SIGCONT)
        os.kill(pid, signal.SIGCONT)
    run.wait_step(1, after=before, nodes=set(names(nodes)))
    _all_back(run)
    return lost[0].time - begun, started - begun, bar, right


def _all_back(run: Nodes) -> None:
    """Until four workers have done thirty steps together."""
    newest = 0
    while True:
        generations = run.events(GenerationStarted)
        if len(generations[-1].topology["nodes"]) == 4:
            newest = max(newest, generations[-1].step)
            number = int(generations[-1].topology["generation"])
            run.wait_step(newest + 30, after=number - 1)
            return
        time.sleep(0.1)


def stops(nodes: int, rounds: int, agent: bool) -> None:
    what = "agent and worker" if agent else "worker"
    print(f"{rounds} times SIGSTOP of one {what} of 4, {nodes} node(s)")
    with running(nodes, 1_000_000) as run:
        rows = [one_stop(run, nodes, agent, turn) for turn in range(rounds)]
    print("named s  excluded s  bar s  the right one")
    for named, excluded, bar, right in rows:
        print(f"{named:7.2f}  {excluded:10.2f}  {bar:5.2f}  {'yes' if right else 'NO'}")
    worst = max(excluded - bar for _, excluded, bar, _ in rows)
    print(
        f"median {statistics.median(r[0] for r in rows):.2f} s to the name, "
        f"{statistics.median(r[1] for r in rows):.2f} s to the next generation; "
        f"at worst {abs(worst):.2f} s {'over' if worst > 0 else 'under'} the bar"
    )


def undisturbed(nodes: int, steps: int) -> None:
    with running(nodes, steps) as run:
        run.wait_step(steps // 2)
        half = time.time()
        load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        try:
            while run.alive and not run.losses().get(steps):
                time.sleep(1.0)
        finally:
            for loop in load:
                loop.kill()
        run.end()
        named: list[Event] = [*run.events(WorkerLost), *run.events(WorkerPaced)]
        generations = len(run.events(GenerationStarted))
        done = [r for r in run.records() if isinstance(r.event, StepDone)]
        first = [r.time for r in done if r.time < half]
        rest = [r.time for r in done if r.time >= half]
    print(
        f"{len(done)} steps on {nodes} node(s): {1000 * _pace(first):.0f} ms a step alone, "
        f"{1000 * _pace(rest):.0f} ms under load; {len(named)} named, "
        f"{generations} generation(s)"
    )
    for event in named:
        print(event)


def _pace(times: list[float]) -> float:
    return (times[-1] - times[0]) / max(1, len(times) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("stops", "undisturbed"))
    parser.add_argument("--nodes", type=int, choices=(1, 4), default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--agents", action="store_true", help="stop agents, too")
    parser.add_argument("--steps", type=int, default=2000)
    settings = parser.parse_args()
    if settings.what == "stops":
        stops(settings.nodes, settings.rounds, settings.agents)
    else:
        undisturbed(settings.nodes, settings.steps)


if __name__ == "__main__":
    main()
