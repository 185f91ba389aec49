"""Runs of ours that faults hit, over and over: by rung of the recovery ladder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.runtime.children import ROOT, environment
from benchmarks.runtime.recovering.lines import Found, Line, Lines
from benchmarks.runtime.recovering.worker import LINES, MICROBATCH
from holdfast.events import GenerationStarted
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from holdfast_lab.chaos.sample_run import SAMPLE_HEAD, write_texts

MICROBATCHES, FEWER = 12, 4
RUN_FILE = (
    SAMPLE_HEAD % ("recovery", 512, 32)
    + """\
model: {{preset: tiny}}
train: {{steps: 100000, batch_size: 24, microbatch_size: 2, evaluate: {{every: 0}}}}
checkpoint: {{every_steps: 1000000, memory_every_steps: 1}}
cluster: {{threads_per_worker: 1, settle_seconds: 0.5, gather_seconds: 30}}
"""
)


class Agents(dict[str, subprocess.Popen[str]]):
    """By node. start: as it was started first."""

    def __init__(self, start: Callable[[str], subprocess.Popen[str]]) -> None:
        super().__init__()
        self._start = start

    def start(self, name: str) -> None:
        self[name] = self._start(name)


Deed = Callable[[list[Line], Agents], None]
"""The fault, given the lines of the newest generation and the agents."""


@dataclass(frozen=True)
class Case:
    """One case. nodes: workers of each. shards: of a replica. back: True if there are as many
    workers as before afterwards. spare: one more node, without a worker. away: how many workers are
    lost first, with node n1. Then the stall is measured when that node comes back."""

    name: str
    nodes: Sequence[int]
    shards: int
    deed: Deed
    rounds: int
    back: bool = True
    settings: Sequence[str] = ()
    spare: bool = False
    away: int = 0

    @property
    def workers(self) -> int:
        return sum(self.nodes)

    @property
    def leaves(self) -> int:
        """Microbatches of a step; fewer where the ranks of a replica talk in each."""
        return MICROBATCHES if self.shards == 1 else FEWER

    def options(self) -> list[str]:
        """A rank has a sample of a microbatch at least."""
        each = max(2, self.shards)
        return [
            f"layout.workers={self.workers}",
            f"layout.dp_shard={self.shards}",
            f"train.batch_size={each * self.leaves}",
            f"train.microbatch_size={each}",
            "cluster.min_nodes=1",
            *self.settings,
        ]


def prepare(folder: Path, text: str = RUN_FILE) -> Path:
    """The run file, of a text that has {root} for its folder; its dataset is made."""
    write_texts(folder / "texts", 40, 300)
    path = folder / "run.yaml"
    path.write_text(text.format(root=folder))
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "data", "prepare", str(path)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return path


def measured(
    case: Case, run_file: Path, step: float, seconds: float, rounds: int
) -> Iterator[Found]:
    """Run a case. If the workers come back, the fault hits again in the same run; otherwise each
    round is a run of its own. step: seconds of a step of all workers. rounds: 0 for the case's own.
    Raises SilentError."""
    rounds = rounds or case.rounds
    if case.back:
        yield from measure(replace(case, rounds=rounds), run_file, step, seconds)
        return
    for number in range(rounds):
        yield from measure(replace(case, rounds=1), run_file, step, seconds, number)


def measure(
    case: Case, run_file: Path, step: float, seconds: float, number: int = 0
) -> list[Found]:
    """One run, the `number`th of the case. Raises as `measured` does."""
    folder = run_file.parent / f"{case.name.replace(' ', '-').replace(',', '')}-{number}"
    replicas = case.workers // case.shards
    environ = environment(
        **{MICROBATCH: str(step * replicas / case.leaves), LINES: str(folder.with_suffix(".lines"))}
    )
    options = [
        f"folder={folder}",
        *case.options(),
        f"cluster.settle_seconds={max(0.5, 4 * step)}",  # some steps with fewer are timed
    ]
    places = {f"n{number}": places for number, places in enumerate(case.nodes)}

    def start(name: str) -> subprocess.Popen[str]:
        with folder.with_suffix(f".{name}").open("a") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.runtime.recovering.worker",
                    str(run_file),
                    *options,
                    f"cluster.node={name}",
                    f"cluster.places={places.get(name, 1)}",
                ],
                stdout=log,
                stderr=log,
                text=True,
                env=environ,
                cwd=ROOT,
                start_new_session=True,
            )

    agents = Agents(start)
    lines = Lines(folder.with_suffix(".lines"), lambda: _last_words(agents), seconds)
    chosen = random.Random(3 + number)
    try:
        for name in places:
            agents.start(name)
        found = list(_befallen(case, lines, agents, folder, lambda: chosen.uniform(0, step)))
    finally:
        for agent in agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    rungs = {
        record.generation: record.event.rung
        for record in read_journal(FolderStore(folder))
        if isinstance(record.event, GenerationStarted)
    }
    return [replace(each, rung=rungs.get(each.generation, -1)) for each in found]


def _befallen(
    case: Case, lines: Lines, agents: Agents, folder: Path, moment: Callable[[], float]
) -> Iterator[Found]:
    """Each fault of a run."""
    after = 0
    for _ in range(case.rounds):
        known = lines.steady(case.workers, 8, after)
        if case.spare:
            agents.start("spare")
            lines.until(lambda _: _is_taken_in(folder, "spare"), "the spare node")
        if case.away:
            kill_node(known, agents)
            after = max(line.generation for line in known)
            known = lines.steady(case.workers - case.away, 8, after)
        after = max(line.generation for line in known)
        time.sleep(moment())  # anywhere in a step
        yield lines.befall(lambda here: case.deed(here, agents), still=bool(case.away))


def _is_taken_in(folder: Path, node: str) -> bool:
    """Return True if the node has joined: its standby is prepared once the other nodes are known to
    work."""
    return (folder / "logs" / f"standby1.{node}.log").exists()


def _last_words(agents: Agents) -> str:
    return "".join(
        f"{name} ended with {a.returncode}; "
        for name, a in agents.items()
        if a.poll() not in (None, 0, -signal.SIGKILL)
    )


# --- what befalls -------------------------------------------------------------------------------
def kill_worker(here: list[Line], agents: Agents | None = None) -> None:
    rank = max(line.rank for line in here)
    os.kill(next(line.pid for line in here if line.rank == rank), signal.SIGKILL)


def raise_in_worker(here: list[Line], agents: Agents) -> None:
    os.kill(next(line.pid for line in here if line.rank == 1), signal.SIGUSR1)


def kill_node(here: list[Line], agents: Agents) -> None:
    os.killpg(agents["n1"].pid, signal.SIGKILL)


def start_node(here: list[Line], agents: Agents) -> None:
    agents.start("n1")


def tell_node_to_go(here: list[Line], agents: Agents) -> None:
    os.kill(agents["n1"].pid, signal.SIGTERM)


def kill_all_and_start_again(here: list[Line], agents: Agents) -> None:
    for agent in agents.values():
        os.killpg(agent.pid, signal.SIGKILL)
    for name, agent in list(agents.items()):
        agent.wait()
        agents.start(name)


SAVED = ("checkpoint.every_steps=5", "cluster.min_nodes=2")
"""As often as torchrun's loop does; and they begin when all are there again."""
CASES = (
    Case("replica lost", (4,), 1, kill_worker, 12),
    Case("error, nobody lost", (4,), 1, raise_in_worker, 12),
    Case("worker lost, standby", (4,), 4, kill_worker, 6),
    Case("node lost, spare", (1, 1), 2, kill_node, 3, back=False, spare=True),
    Case("node lost, fewer", (1, 1), 2, kill_node, 4, back=False),
    Case("node back", (2, 2), 1, start_node, 3, away=2),
    Case("all lost, started again", (2, 2), 1, kill_all_and_start_again, 3, settings=SAVED),
    Case("planned move", (2, 2), 1, tell_node_to_go, 4, back=False),
)
