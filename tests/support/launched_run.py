"""A run that `holdfast launch` has started on a Slurm of this machine, watched in its folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.elastic.protocol.fault_orders import FaultOrders
from holdfast.events import StepDone
from tests.support.checkpoints import newest_tensors
from tests.support.commands import Outcome, apart, within
from tests.support.nodes import Nodes
from tests.support.ranks import DEADLINE_S, wait_until
from tests.support.slurm_cluster import SlurmCluster

COMMAND_DEADLINE_S = 180.0
PACE_S = 0.3
"""Seconds for a step until `open_to_end`."""
QUICK = (
    "cluster.places=1",
    "cluster.beat_seconds=0.5",
    "cluster.settle_seconds=0.5",
    "cluster.alone_seconds=3",
    "cluster.threads_per_worker=1",
    "cluster.compare=false",  # a gate holds ranks up
    "train.evaluate.every=0",
)


def undisturbed_tensors(run_file: Path, steps: int) -> dict[str, bytes]:
    """Return what a run of one worker without a fault ends with."""
    folder = run_file.parent / "alone"
    settings = (f"train.steps={steps}", "train.evaluate.every=0", "cluster.threads_per_worker=1")
    apart("train", run_file, f"folder={folder}", *settings, "layout.workers=1").succeeds()
    return newest_tensors(folder, steps)


class LaunchedRun(Nodes):
    """gate: holds all ranks before a step until it is opened for it; see `wait_until`."""

    def __init__(self, cluster: SlurmCluster, run_file: Path, folder: Path, steps: int) -> None:
        super().__init__(run_file, folder)
        self.cluster, self.steps, self.is_paced = cluster, steps, True
        self.gate = FaultOrders(folder.with_name(f"{folder.name}.gate"))

    @property
    def alive(self) -> list[str]:
        """Agents are Slurm's, and may all be away for a while."""
        return ["slurm"]

    def command(self, *arguments: str | Path) -> Outcome:
        """Run `holdfast` as a user of this Slurm."""
        command = [sys.executable, "-m", "holdfast.cli.main", *map(str, arguments)]
        environment = self.cluster.environment | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def launch(self, nodes: int, *settings: str) -> None:
        given = [*QUICK, f"folder={self.folder}", f"train.steps={self.steps}"]
        self.gate.prepare(self.last_step + 1)
        given.append(f"cluster.faults={self.gate.folder}")
        options = ("--on", "slurm", "--nodes", str(nodes))
        done = self.command("launch", self.run_file, *options, *given, *settings)
        assert done.code == 0, f"{done.err}\n{self.story()}"

    def log_of(self, node: str) -> str:
        path = self.folder / "launch" / f"{node}.log"
        return path.read_text() if path.exists() else ""

    def status(self) -> str:
        return self.command("status", self.folder).out

    def wait_until(self, due: Callable[[], object], otherwise: str) -> None:
        """Meanwhile the run does a step now and then: agents that leave need one."""

        def is_due() -> bool:
            if not due():
                self.gate.open_gate(self.last_step + 1 if self.is_paced else self.steps)
                return False
            return True

        wait_until(is_due, DEADLINE_S, lambda: f"{otherwise}\n{self.story()}", PACE_S)

    @property
    def last_step(self) -> int:
        return max((e.step for e in self.events(StepDone)), default=0)

    def do_step(self, nodes: set[str]) -> None:
        """Wait until these nodes have done one step more."""
        self.wait_step(self.last_step + 1, nodes=nodes)

    def first_step_of(self, generation: int) -> float:
        """Return the moment of the first step that a generation has done."""
        records = [r for r in self.records() if isinstance(r.event, StepDone)]
        return min(r.time for r in records if r.generation == generation)

    def wait_restarted(self) -> None:
        """Wait until Slurm has started a job of the run again."""
        self.wait_until(
            lambda: any(
                "Restarts=1 " in each and "JobState=RUNNING" in each
                for each in self.cluster.run("scontrol", "show", "job").split("\n\n")
            ),
            "a job is started again",
        )

    def open_to_end(self) -> None:
        self.is_paced = False
        self.wait_step(self.steps)
        self.wait_until(lambda: not self.cluster.run("squeue", "-h"), "jobs end")

    def ends_as(self, tensors: dict[str, bytes]) -> None:
        """The parameters and moments are those bytes, and the ledger is exact."""
        assert newest_tensors(self.folder, self.steps) == tensors, self.story()
        audit = within("data", "audit", self.folder).succeeds()
        assert "none missing, none twice" in audit.out

    def story(self) -> str:
        logs = sorted((self.folder / "launch").glob("*.log"))
        said = "".join(f"--- {path.name}\n{path.read_text()[-2500:]}" for path in logs)
        return "\n".join([super().story(), said, self.cluster.story()])
