"""Time from a kill in the midst of a large message to the next committed step.

gloo wakes no thread that waits for the rest of a message
(`src/holdfast/parallel/comm/abortable_wait.py`). The larger messages are, the likelier a loss
leaves one incomplete. Three workers of one node train a model whose gradients are as large as
`--dim` makes them. Again and again, a worker is killed while some connection of this machine holds
unread bytes:

    reduce   in a step of all three
    move     while the replacement of a lost one receives the state

The output has the seconds from SIGKILL to the next step in a later generation, and how much of it
is more than a step. It also has the number of workers that had to be killed because they did not
stop, and the floors of `benchmarks.runtime.recovery`.

    python -m benchmarks.runtime.midway [reduce move] [--rounds 6] [--dim 768]
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.nodes import Nodes, nodes_of, prepared

from benchmarks.runtime.recovery import floors
from holdfast.events import GenerationStarted, StepDone, WorkerLost, WorkerStarted

WORKERS = 3
HELD = 400_000
"""Bytes in a socket, by which a message is under way: more than any but the large ones have."""
DEADLINE = 60.0


def under_way() -> bool:
    """Return True if a connection of this machine holds that many bytes unread or unsent."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        if max(int(size, 16) for size in line.split()[4].split(":")) > HELD:
            return True
    return False


def wait(due: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while not due():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come within {DEADLINE:g} s")


def size(begun: GenerationStarted) -> int:
    return sum(len(replica["ranks"]) for replica in begun.topology["replicas"])


def newest(run: Nodes) -> GenerationStarted:
    return max(run.events(GenerationStarted), key=lambda e: int(e.topology["generation"]))


def at_work(run: Nodes, steps: int = 4) -> bool:
    """All workers have done some steps together."""
    if not run.events(GenerationStarted) or size(newest(run)) != WORKERS:
        return False
    number = newest(run).topology["generation"]
    done = [r for r in run.records() if r.generation == number and isinstance(r.event, StepDone)]
    return len(done) >= steps


def alive(run: Nodes) -> list[int]:
    """Workers, the longest there first."""
    pids = dict.fromkeys(event.pid for event in run.events(WorkerStarted))
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def in_a_step(run: Nodes, turn: int) -> int:
    return alive(run)[turn % WORKERS]


def in_a_move(run: Nodes, turn: int) -> int:
    """Another one is lost first; who is to be killed has been there all along."""
    before, was = newest(run), alive(run)
    os.kill(was[turn % WORKERS], signal.SIGKILL)
    generation = before.topology["generation"]

    def come() -> bool:
        now = newest(run)
        return now.topology["generation"] > generation and size(now) == WORKERS

    wait(come, "a newcomer")
    return next(pid for pid in alive(run) if pid in was)


def killed(run: Nodes, choose: Callable[[Nodes, int], int], turn: int) -> tuple[float, float, int]:
    """Seconds to the next step, of a step before, and workers that were killed after it."""
    run.wait_until(lambda: at_work(run), "not all are at work")
    times = [r.time for r in run.records() if isinstance(r.event, StepDone)][-4:]
    step = statistics.median(b - a for a, b in itertools.pairwise(times))
    pid = choose(run, turn)
    wait(under_way, "a large message")
    lost, generation, begun = len(run.events(WorkerLost)), run.newest, time.time()
    os.kill(pid, signal.SIGKILL)
    later = [0.0]

    def due() -> bool:
        later[:] = [
            r.time
            for r in run.records()
            if isinstance(r.event, StepDone) and r.time > begun and r.generation > generation
        ]
        return bool(later)

    run.wait_until(due, "no step after the loss")
    return min(later) - begun, step, len(run.events(WorkerLost)) - lost - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["reduce", "move"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dim", type=int, default=768)
    settings = parser.parse_args()
    moments = {"reduce": in_a_step, "move": in_a_move}
    model = (
        f"model.dim={settings.dim}",
        "model.layers=3",
        "model.heads=8",
        "model.kv_heads=8",
        f"model.ffn_dim={8 * settings.dim // 3 // 16 * 16}",
        "train.steps=1000000",
        "train.batch_size=6",
        "train.evaluate.every=0",
        "checkpoint.every_steps=1000000",
        f"layout.workers={WORKERS}",
        f"cluster.places={WORKERS}",
        "cluster.max_restarts_without_progress=100",
    )
    print(
        f"{'killed in a':<14}{'n':>4}{'step s':>9}{'to next s':>11}{'worst':>8}{'beyond':>8}"
        f"{'worst':>8}{'killed after it':>17}"
    )
    for name in settings.names:
        with tempfile.TemporaryDirectory() as folder:
            run_file = prepared(Path(folder) / "prepared")
            with nodes_of(run_file, Path(folder) / "run", *model) as run:
                run.start("a")
                rows = [killed(run, moments[name], turn) for turn in range(settings.rounds)]
        seconds, beyond = [r[0] for r in rows], [r[0] - r[1] for r in rows]
        print(
            f"{name:<14}{len(rows):4d}{statistics.median(r[1] for r in rows):9.3f}"
            f"{statistics.median(seconds):11.3f}{max(seconds):8.3f}"
            f"{statistics.median(beyond):8.3f}{max(beyond):8.3f}"
            f"{sum(r[2] for r in rows):17d}",
            flush=True,
        )
    floors()


if __name__ == "__main__":
    main()
