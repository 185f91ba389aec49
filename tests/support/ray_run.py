"""A tiny run on a real Ray cluster (`ray_cluster.py`), launched by the real command."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.events import GenerationStarted, StepDone
from tests.support.checkpoints import newest_tensors
from tests.support.commands import Outcome, apart
from tests.support.nodes import Nodes, prepared

DEADLINE = 240.0
LOOK_INTERVAL_S = 20.0
"""Seconds between two looks whether any node is left that could bring what a test waits for."""
SETTINGS = (
    "train.batch_size=8",
    "train.schedule.steps=100000",
    "train.evaluate.every=0",
    "checkpoint.every_steps=50",
    "cluster.places=1",
    "cluster.min_nodes=1",
    "cluster.gather_seconds=60",
    "cluster.beat_seconds=0.5",
    "cluster.settle_seconds=0.5",
    "cluster.alone_seconds=3",
    "cluster.threads_per_worker=1",
    "cluster.notices_every_seconds=0.2",
)
ENDLESS = "train.steps=100000"


class Cluster(Protocol):
    @property
    def address(self) -> str: ...


class RayRun:
    """The run, and what its journal and Ray say about it."""

    def __init__(self, root: Path, cluster: Cluster, workers: int = 4) -> None:
        self.run_file, self.folder = prepared(root), root / "run"
        self.settings = (
            *SETTINGS,
            f"layout.workers={workers}",
            f"launch.ray.address={cluster.address}",
        )
        self.journal = Nodes(self.run_file, self.folder)

    def launch(self, nodes: int, *settings: str) -> None:
        apart(
            *("launch", self.run_file, "--on", "ray", "--nodes", str(nodes)),
            *(*self.settings, f"folder={self.folder}", *settings),
            deadline=DEADLINE,
        ).succeeds()

    def command(self, name: str, *arguments: str) -> Outcome:
        return apart(name, self.folder, *arguments, deadline=DEADLINE)

    def states(self) -> dict[str, tuple[str, str]]:
        """Node -> its state and its machine, as Ray sees it."""
        found = self.command("status", "--json")
        return {
            n["node"]: (n["state"], n["detail"].partition(",")[0])
            for n in json.loads(found.out)["nodes"]
        }

    def node_at(self, host: str) -> str:
        return next(node for node, (_, at) in self.states().items() if at == host)

    def wait(self, due: Callable[[], object], otherwise: str, looks: bool = True) -> None:
        """looks: fail early if no node waits or runs any more."""
        deadline, look = time.monotonic() + DEADLINE, time.monotonic() + LOOK_INTERVAL_S
        while not due():
            if looks and time.monotonic() > look:
                look = time.monotonic() + LOOK_INTERVAL_S
                is_at_work = self.command("status").code == 0
                deadline = deadline if is_at_work or due() else 0.0
            if time.monotonic() > deadline:
                logs = self.command("logs")
                raise AssertionError(f"{otherwise}\n{self.states()}\n{logs.out[-6000:]}")
            time.sleep(0.05)

    def wait_state(self, state: str) -> None:
        self.wait(lambda: {s for s, _ in self.states().values()} == {state}, f"not all {state}")

    @property
    def generation(self) -> int:
        """The newest one."""
        started = (r for r in self.journal.records() if isinstance(r.event, GenerationStarted))
        return max((record.generation for record in started), default=0)

    @property
    def step(self) -> int:
        return max(self.journal.losses(), default=0)

    def first_step(self, after: int, nodes: set[str]) -> float:
        """Wait for a step in a generation later than `after`, of these nodes; return its time."""
        return self._first_step(after, lambda ranks: set(ranks) == nodes, f"{sorted(nodes)}")

    def first_step_of_workers(self, after: int, least: int) -> float:
        """The same, of any nodes with at least so many workers."""
        return self._first_step(after, lambda ranks: len(ranks) >= least, f"{least} workers")

    def _first_step(self, after: int, fits: Callable[[list[str]], bool], what: str) -> float:
        def due() -> list[float]:
            fitting = {
                record.generation
                for record in self.journal.records()
                if isinstance(record.event, GenerationStarted)
                and record.generation > after
                and fits(record.event.topology["nodes"])
            }
            return [
                record.time
                for record in self.journal.records()
                if isinstance(record.event, StepDone) and record.generation in fitting
            ]

        self.wait(due, f"no step of {what}")
        return min(due())

    def wait_more_steps(self, number: int = 20) -> None:
        wanted = self.step + number
        self.wait(lambda: self.step >= wanted, f"no step {wanted}")

    def undisturbed(self) -> Path:
        """The folder of the same run, with as many steps, as one process of this machine."""
        folder = self.run_file.parent / "alone"
        mine = [s for s in SETTINGS if not s.startswith("cluster.") or "threads" in s]
        apart(
            *("train", self.run_file, f"folder={folder}", *mine),
            *("layout.workers=1", f"train.steps={self.step}"),
            deadline=DEADLINE,
        ).succeeds()
        return folder

    def check_end(self, steps: int) -> None:
        """Wait for the end: each sample was used once, and each bit is that of one process."""
        self.wait_state("finished")
        assert self.step == steps
        apart("data", "audit", self.folder).succeeds()
        assert newest_tensors(self.folder, steps) == newest_tensors(self.undisturbed(), steps)
