"""F9 at level 1: nodes in namespaces of their own, and a line that a scenario degrades."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from benchmarks.lab.links import HOLDFAST_WAITS, link_seconds

from holdfast_lab.chaos.network import why_unavailable
from holdfast_lab.score.harness.harness import RunOptions, run_scenario
from holdfast_lab.score.harness.node_processes import LineReader, NodeProcesses
from holdfast_lab.score.harness.trainer import TrainerRun, Workplace, trainer_named
from holdfast_lab.score.record import Commit, samples_once
from holdfast_lab.score.scenarios import LEVEL_1, ScenarioRun, draw_scenario

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

K = 400.0
"""The scenario takes 3 s. A round trip takes 0.4 ms then, so the test asks for longer ones."""

ECHO = """\
import socket, sys
listening = socket.create_server((sys.argv[1], 7000))
while True:
    taken, _ = listening.accept()
    while data := taken.recv(64):
        taken.sendall(data)
"""
# Each round trip to the helper is a step. The devices are part of what it says.
LOOP = """\
import json, os, socket, sys, time
address, lines = sys.argv[1:]
while True:
    try:
        line = socket.create_connection((address, 7000), timeout=5)
        break
    except OSError:
        time.sleep(0.02)
for step in range(1, 10**9):
    time.sleep(0.02)
    began = time.time()
    line.sendall(b"x")
    line.recv(1)
    row = {"t": time.time(), "step": step, "generation": 1, "rank": 0, "workers": 4,
           "samples": [[step - 1, step]], "loss": time.time() - began}
    with open(lines, "a") as out:
        out.write(json.dumps(row) + "\\n")
    if step == 1:
        with open(lines + "-devices", "w") as out:
            json.dump([name for _, name in socket.if_nameindex()], out)
"""


class _Asking:
    """Node n1, in the far region, asks a helper; the other nodes only wait."""

    def __init__(self, at: Workplace) -> None:
        self._at = at
        self.processes = NodeProcesses(at.folder / "nodes", at.environment(), at.network)
        self.processes.start_helper("echo", [sys.executable, "-c", ECHO, at.helper_address])

    def start(self, nodes: Sequence[str]) -> None:
        lines = str(self._at.folder / "lines")
        for node in nodes:
            words = ["-c", LOOP, self._at.helper_address, lines] if node == "n1" else ["-c", ""]
            self.processes.start(node, [sys.executable, *words])

    def kill(self, node: str) -> None:
        self.processes.kill(node)

    def warn(self, node: str, seconds: float) -> None: ...

    def worker_pids(self, node: str) -> list[int]:
        return []

    def commits(self) -> list[Commit]:
        return LineReader(self._at.folder / "lines").commits()

    def corrupt_checkpoint(self) -> bool:
        return False

    def stop(self) -> None:
        self.processes.stop()


class _Trainer:
    name = "own"
    obeys_network = True

    def __init__(self) -> None:
        self.addresses: set[str] = set()

    def why_unavailable(self, python: str) -> str:
        return ""

    def open(self, workplace: Workplace) -> TrainerRun:
        self.addresses = {workplace.address(f"n{n}") for n in range(1, 5)}
        self.addresses.add(workplace.helper_address)
        return _Asking(workplace)


def slower(run: ScenarioRun, factor: float) -> ScenarioRun:
    """The same with longer round trips."""
    extra = {"rtt_ms": factor * 153.0}
    events = (replace(e, extra=extra) if e.kind == "net" else e for e in run.events)
    return replace(run, events=tuple(events))


def test_nodes_reach_a_helper_over_a_line_that_becomes_slow(tmp_path: Path) -> None:
    run = slower(draw_scenario("F9", 5, LEVEL_1), 40.0)
    trainer = _Trainer()
    record = run_scenario(trainer, run, tmp_path / "w", RunOptions(K, keeps_folder=True))
    at = 0.2 * record.seconds
    calm = [c.loss for c in record.commits if c.t_s < at and c.loss is not None]
    degraded = [c.loss for c in record.commits if c.t_s > at + 0.1 and c.loss is not None]
    assert median(calm) < 0.0153
    assert min(degraded) >= 0.0153
    assert record.faults == (), "a slow line takes nothing away"
    assert sorted(json.loads((tmp_path / "w" / "lines-devices").read_text())) == ["eth0", "lo"]
    assert len(trainer.addresses) == 5


@pytest.mark.slow
def test_steps_of_holdfast_wait_for_the_slow_line(tmp_path: Path) -> None:
    run = slower(draw_scenario("F9", 5, LEVEL_1), 20.0)
    record = run_scenario(trainer_named("holdfast"), run, tmp_path / "w", RunOptions(20.0))
    (event, _) = (e for e in run.compressed(20.0).events if e.kind == "net")
    gaps = [(b.t_s, b.t_s - a.t_s) for a, b in pairwise(record.commits)]
    calm = median(gap for at, gap in gaps if at < event.t_s)
    degraded = median(gap for at, gap in gaps if at - gap > event.t_s)
    expected = link_seconds(event, HOLDFAST_WAITS, 4 * 577.0)
    assert expected == pytest.approx(0.306)
    assert degraded - calm >= 0.8 * expected
    assert samples_once(record) == ""
