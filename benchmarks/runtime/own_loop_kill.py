"""Seconds from the SIGKILL of a worker of an own loop to the next committed step.

Four workers train 0.79 M parameters with AdamW by `holdfast run`, as the peers of
`benchmarks.runtime.recovery` do in their own loops. The step mostly waits: each of 12 microbatches
does so for a third of `--step`. After a loss three workers compute four each, where four computed
three. Once all four are back, the next worker is killed, somewhere in a step.

    python -m benchmarks.runtime.own_loop_kill [--peers-python PYTHON] [--step 0.2] [--rounds 8]

The columns are those of `benchmarks.runtime.recovery`, whose loops the peers run here, too. Our
times are those of the journal: when the agent has heard of the step. Below the rows are the floors
of the same run: SIGKILL to the error in a bare gloo group, a new group of three, `import torch`.
The median beyond one step is a multiple of the first two. It is below 0 if the kept part of the
step outweighs the recovery. The last lines compare the median to the next step with each peer's.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.runtime.children import environment
from benchmarks.runtime.recovering import others, ours
from benchmarks.runtime.recovering.lines import Found, Line, Lines, SilentError
from benchmarks.runtime.recovery import FOOT, HEAD, floors, row
from holdfast.events import GenerationStarted, Record, StepDone, WorkerStarted
from holdfast.layout import Topology
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore

WORLD, MICROBATCHES = 4, 12
SCRIPT = Path(__file__).parent / "own_loop" / "waiting_loop.py"
SETTINGS = (
    "device=cpu",
    "cluster.threads_per_worker=1",
    "checkpoint.every_steps=1000000",
    "checkpoint.memory_every_steps=1",
)
PEERS = ("torchft", "ray")


class JournalLines(Lines):
    """The steps of a run by its journal, as if each rank had written them."""

    def read(self) -> list[Line]:
        return lines_of(list(read_journal(FolderStore(self._path.parent / "run"))))


def lines_of(records: list[Record]) -> list[Line]:
    """A line of each rank for each step that is done."""
    pids: dict[int, dict[int, int]] = {}  # by generation and rank
    out: list[Line] = []
    for record in records:
        event, number = record.event, record.generation
        if isinstance(event, GenerationStarted):
            newest = pids[max(pids)] if pids else {}
            places = range(Topology.from_json(event.topology).world_size)
            came_from = event.came_from or [None for _ in places]
            pids[number] = {
                rank: newest.get(-1 if old is None else old, 0)
                for rank, old in enumerate(came_from)
            }
        elif isinstance(event, WorkerStarted):
            pids[number][event.rank] = event.pid
        elif isinstance(event, StepDone):
            own = pids[number]
            out += [
                Line(record.time, event.step, number, rank, pid, len(own))
                for rank, pid in own.items()
            ]
    return out


def measure(folder: Path, step: float, rounds: int, seconds: float) -> list[Found]:
    """Raises SilentError."""
    folder.mkdir()
    command = [sys.executable, "-m", "holdfast.cli.main", "run", str(SCRIPT)]
    command += ["--folder", str(folder / "run"), "--workers", str(WORLD)]
    given = (*SETTINGS, f"cluster.settle_seconds={max(0.5, 4 * step)}")
    command += [word for one in given for word in ("--set", one)]
    chosen, found, after = random.Random(3), list[Found](), 0
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--", str(step * WORLD / MICROBATCHES)],
            stdout=log,
            stderr=log,
            env=environment(),
        )
    lines = JournalLines(
        folder / "lines", lambda: "" if process.poll() is None else "it ended", seconds
    )
    try:
        for _ in range(rounds):
            known = lines.steady(WORLD, 8, after)
            after = max(line.generation for line in known)
            time.sleep(chosen.uniform(0, step))
            found.append(lines.befall(ours.kill_worker))
    finally:
        process.terminate()
        process.wait()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a step waits")
    parser.add_argument("--rounds", type=int, default=8, help="kills of each system")
    parser.add_argument("--seconds", type=float, default=300.0, help="deadline of each wait")
    parser.add_argument(
        "--peers-python", default="", help="interpreter of the peers; none: no peer"
    )
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with it
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as root:
        rows = {"own loop": measure(Path(root, "ours"), told.step, told.rounds, told.seconds)}
        print(row("own loop", rows["own loop"]), flush=True)
        for peer in others.PEERS if told.peers_python else ():
            if peer.loop not in PEERS:
                continue
            where = Path(root, peer.loop), told.step, told.rounds, told.seconds
            try:
                rows[peer.name] = others.measure(peer, told.peers_python, *where)
            except SilentError as error:
                print(f"{peer.name:<24} no result: {error}", flush=True)
                continue
            print(row(peer.name, rows[peer.name]), flush=True)
    floor = floors()
    own = rows.pop("own loop")
    beyond = statistics.median(each.beyond for each in own) / (floor["error"] + floor["regroup"])
    seconds = statistics.median(each.seconds for each in own)
    print(FOOT)
    print(f"own loop, beyond a step: {beyond:.1f} times the floors' sum")
    for name, theirs in rows.items():
        share = seconds / statistics.median(each.seconds for each in theirs)
        print(f"own loop, to the next step: {share:.3f} of {name}'s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
