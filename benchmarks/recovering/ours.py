"""Runs of ours that something befalls, over and over: by rung of the recovery ladder."""

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

from benchmarks.recovering.lines import Found, Line, Lines
from benchmarks.recovering.worker import LINES, MICROBATCH
from benchmarks.texts import write_texts

ROOT = Path(__file__).resolve().parents[2]
MICROBATCHES, FEWER = 12, 4
"""Of a step; fewer where the ranks of a replica talk in each."""
RUN_FILE = """\
name: recovery
folder: {root}/run
device: cpu
data:
  folder: {root}/dataset
  sources:
    - {{kind: text, path: "{root}/texts"}}
  tokenizer: {{vocab_size: 512}}
  sequence_length: 32
  validation_fraction: 0.2
  processes: 1
model: {{preset: tiny}}
train: {{steps: 100000, batch_size: 24, microbatch_size: 2, evaluate: {{every: 0}}}}
checkpoint: {{every_steps: 1000000, memory_every_steps: 1}}
cluster: {{threads_per_worker: 1, settle_seconds: 0.5, gather_seconds: 30}}
"""


SHARDED = ("layout.dp_shard=2", f"train.batch_size={2 * FEWER}")


@dataclass(frozen=True)
class Case:
    """nodes: workers of each. deed: what befalls, given the lines of the newest generation and the
    agents. back: whether there are as many workers as before afterwards."""

    name: str
    nodes: Sequence[int]
    settings: Sequence[str]
    deed: Callable[[list[Line], dict[str, subprocess.Popen[str]]], None]
    rounds: int
    back: bool = True


def prepare(folder: Path, text: str = RUN_FILE) -> Path:
    """The run file, of a text that has {root} for its folder; its dataset is made."""
    write_texts(folder / "texts", 40, 300)
    path = folder / "run.yaml"
    path.write_text(text.format(root=folder))
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "data", "prepare", str(path)],
        capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return path


def environment(**more: str) -> dict[str, str]:
    path = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in path if p),
            "OMP_NUM_THREADS": "1", **more}  # fmt: skip


def measured(
    case: Case, run_file: Path, step: float, seconds: float, rounds: int
) -> Iterator[Found]:
    """What comes back is hit again in the same run; else each round is a run of its own. step:
    seconds of a step of all workers. rounds: 0 for the case's own. Raises SilentError."""
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
    workers = sum(case.nodes)
    replicas, microbatches = workers, MICROBATCHES
    if SHARDED[0] in case.settings:
        replicas, microbatches = workers // 2, FEWER
    environ = environment(**{
        MICROBATCH: str(step * replicas / microbatches), LINES: str(folder.with_suffix(".lines"))
    })  # fmt: skip
    agents: dict[str, subprocess.Popen[str]] = {}
    lines = Lines(folder.with_suffix(".lines"), lambda: _last_words(agents), seconds)
    chosen = random.Random(3 + number)
    found = []
    try:
        for number, places in enumerate(case.nodes):
            name = f"n{number}"
            log = folder.with_suffix(f".{name}").open("w")
            agents[name] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.recovering.worker", str(run_file),
                 f"folder={folder}", f"cluster.node={name}", f"cluster.places={places}",
                 f"layout.workers={workers}", "cluster.min_nodes=1",
                 f"cluster.settle_seconds={max(0.5, 4 * step)}",  # some steps with fewer are timed
                 *case.settings],
                stdout=log, stderr=log, text=True, env=environ, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        after = 0
        for _ in range(case.rounds):
            known = lines.steady(workers, 8, after)
            after = max(line.generation for line in known)
            time.sleep(chosen.uniform(0, step))  # anywhere in a step
            found.append(lines.befall(lambda here: case.deed(here, agents)))
    finally:
        for agent in agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    return found


def _last_words(agents: dict[str, subprocess.Popen[str]]) -> str:
    return "".join(f"{name} ended with {a.returncode}; " for name, a in agents.items()
                   if a.poll() not in (None, 0, -signal.SIGKILL))  # fmt: skip


# --- what befalls -------------------------------------------------------------------------------
def kill_worker(here: list[Line], agents: dict[str, subprocess.Popen[str]]) -> None:
    rank = max(line.rank for line in here)
    os.kill(next(line.pid for line in here if line.rank == rank), signal.SIGKILL)


def raise_in_worker(here: list[Line], agents: dict[str, subprocess.Popen[str]]) -> None:
    os.kill(next(line.pid for line in here if line.rank == 1), signal.SIGUSR1)


def kill_node(here: list[Line], agents: dict[str, subprocess.Popen[str]]) -> None:
    os.killpg(agents["n1"].pid, signal.SIGKILL)


def tell_node_to_go(here: list[Line], agents: dict[str, subprocess.Popen[str]]) -> None:
    os.kill(agents["n1"].pid, signal.SIGTERM)


CASES = (
    Case("replica lost", (4,), (), kill_worker, 12),
    Case("error, nobody lost", (4,), (), raise_in_worker, 12),
    Case("worker lost, standby", (2,), SHARDED, kill_worker, 6),
    Case("node lost, fewer", (1, 1), SHARDED, kill_node, 4, back=False),
    Case("planned move", (2, 2), (), tell_node_to_go, 4, back=False),
)
