"""The commands of docs/guide/nodes.md, typed as they stand, on three machines.

Each machine is a network namespace with a host name of its own, and the run folder is the disk that
they share. No key names an address.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from holdfast.events import GenerationStarted, StepDone, WorkerReady
from holdfast_lab.chaos.network import Network, why_unavailable
from tests.support.journal_reader import Journal
from tests.support.nodes import prepared
from tests.support.ranks import DEADLINE_S, ROOT, wait_until

WHY_NOT = why_unavailable()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

LOG_TIME = re.compile(r"\d{4}-\d\d-\d\dT\S+Z ")
LINE = re.compile(r"^    machine (\w+)\s+(holdfast .+)$", re.MULTILINE)
DOCUMENTED = dict(LINE.findall((ROOT / "docs" / "guide" / "nodes.md").read_text()))


class Machines:
    """Three machines with a shared folder, in which the commands are typed."""

    def __init__(self, folder: Path, network: Network) -> None:
        self._folder, self._network = folder, network
        self._journal = Journal(folder / "runs" / "my-run")
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def type(self, name: str) -> None:
        """Type the documented command at a machine."""
        command = shlex.split(DOCUMENTED[name])
        with (self._folder / f"{name}.out").open("ab") as output:
            self.agents[name] = subprocess.Popen(
                [
                    *self._network.command(name),
                    *("unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"),
                    *command,
                ],
                cwd=self._folder,
                stdout=output,
                stderr=output,
                env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            )

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.out").read_text()

    def terms(self) -> list[str]:
        return sorted(
            path.name
            for path in (self._folder / "runs" / "my-run" / "terms").glob("*.json")
            if path.stem.isdigit()
        )

    def moments(self, name: str, generation: int) -> list[tuple[str, float]]:
        """When a machine came to each part of its start, up to the first step of a generation."""
        (log,) = (self._folder / "runs" / "my-run" / "logs").rglob(f"agent.{name}.log")
        lines = [line for line in log.read_text().splitlines() if LOG_TIME.match(line)]
        joined = next(line for line in lines if "has joined the run" in line)
        found = [("its agent is up", lines[0]), ("it has joined", joined)]
        moments = [
            (what, datetime.fromisoformat(line.split()[0]).timestamp()) for what, line in found
        ]
        records = [r for r in self._journal.records() if r.generation == generation]
        for kind in (GenerationStarted, WorkerReady, StepDone):
            times = [record.time for record in records if isinstance(record.event, kind)]
            moments.append((kind.__name__, max(times) if kind is WorkerReady else min(times)))
        return sorted(moments, key=lambda moment: moment[1])

    def wait_step_of(self, names: set[str], after: int = 0) -> int:
        """Wait for a step of these machines together; return its generation."""
        found: list[int] = []

        def due() -> bool:
            records = self._journal.records()
            placed = {
                record.generation: set(record.event.topology["nodes"])
                for record in records
                if isinstance(record.event, GenerationStarted)
            }
            found[:] = [
                record.generation
                for record in records
                if isinstance(record.event, StepDone)
                and record.generation > after
                and placed.get(record.generation) == names
            ]
            return bool(found)

        wait_until(due)
        return found[-1]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    text = prepared(tmp_path).read_text()
    text = text.replace(f"folder: {tmp_path}/run\n", "folder: runs/my-run\n")
    text = text.replace("steps: 6", "steps: 1000000").replace("batch_size: 4", "batch_size: 6")
    text = text.replace("{workers: 2}", "{workers: 3}").replace("every_steps: 3", "every_steps: 50")
    (tmp_path / "run.yaml").write_text(text)
    with Network() as network:
        network.up(list(DOCUMENTED))
        machines = Machines(tmp_path, network)
        try:
            yield machines
        finally:
            for agent in machines.agents.values():
                agent.kill()
                agent.wait()


def test_three_machines_train_together_by_the_documented_commands(machines: Machines) -> None:
    names = set(DOCUMENTED)
    assert names == {"one", "two", "three"}
    machines.type("one")
    wait_until(lambda: "node one listens on" in machines.said("one"))
    machines.type("two")
    machines.type("three")
    began = time.time()
    first = machines.wait_step_of(names)
    for what, at in machines.moments("three", first):
        print(f"{at - began:6.2f} s after the third's start: {what}")
    assert len(machines.terms()) == 1, machines.said("one")
    for name in names:
        assert re.search(
            rf"node {name} listens on 10\.77\.0\.\d \(device eth0\)", machines.said(name)
        )

    machines.agents["three"].kill()
    second = machines.wait_step_of({"one", "two"}, after=first)
    machines.type("three")
    machines.wait_step_of(names, after=second)
    assert len(machines.terms()) == 1, machines.said("one")
    for agent in machines.agents.values():
        agent.send_signal(signal.SIGTERM)
    assert {agent.wait(DEADLINE_S) for agent in machines.agents.values()} == {0}
