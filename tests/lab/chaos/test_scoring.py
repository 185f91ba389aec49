"""The harness of level 1, with a trainer of its own that is one small process a node."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from holdfast.events import BatchFed, GenerationStarted, Record, StepDone
from holdfast_lab.score.harness.campaign import RealCampaign, step_seconds
from holdfast_lab.score.harness.harness import RunFailedError, RunOptions, run_scenario
from holdfast_lab.score.harness.holdfast_trainer import commits_of_journal
from holdfast_lab.score.harness.node_processes import LineReader, NodeProcesses
from holdfast_lab.score.harness.torchrun_trainer import flip_tensor_bytes
from holdfast_lab.score.harness.trainer import TrainerRun, Workplace, trainer_named
from holdfast_lab.score.record import (
    Commit,
    ReferenceTable,
    RunRecord,
    format_record,
    history_of,
    samples_once,
)
from holdfast_lab.score.scenarios import LEVEL_1, ScenarioRun, draw_scenario
from holdfast_lab.traces.events import TraceEvent

LOOP = """\
import json, os, sys, time
from pathlib import Path
place = Path(sys.argv[1])
while True:
    time.sleep(0.02)
    step = len((place / "lines").read_text().splitlines()) + 1 if (place / "lines").exists() else 1
    row = {"t": time.time(), "step": step, "generation": 1, "rank": 0, "workers": 1,
           "samples": [[step - 1, step]], "loss": 1.0}
    with (place / "lines").open("a") as out:
        out.write(json.dumps(row) + "\\n")
"""


class _OneProcess:
    """Only node n1 trains."""

    def __init__(self, at: Workplace) -> None:
        self._at = at
        self.processes = NodeProcesses(at.folder / "nodes", at.environment())
        self.warned: list[str] = []

    def start(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self.processes.start(node, [sys.executable, "-c", LOOP, str(self._at.folder)])

    def kill(self, node: str) -> None:
        self.processes.kill(node)

    def warn(self, node: str, seconds: float) -> None:
        self.warned.append(node)

    def worker_pids(self, node: str) -> list[int]:
        return self.processes.tree(node)

    def commits(self) -> list[Commit]:
        return LineReader(self._at.folder / "lines").commits()

    def corrupt_checkpoint(self) -> bool:
        return False

    def stop(self) -> None:
        self.processes.stop()


class _Trainer:
    name = "own"

    def __init__(self) -> None:
        self.runs: list[_OneProcess] = []

    def why_unavailable(self, python: str) -> str:
        return ""

    def open(self, workplace: Workplace) -> TrainerRun:
        self.runs.append(_OneProcess(workplace))
        return self.runs[-1]


def scenario(*events: TraceEvent, seconds: float = 40.0) -> ScenarioRun:
    first = TraceEvent(0.0, "join", "n1", value=1.0)
    return ScenarioRun("F1", 5, 1, seconds, 1.0, (first, *events), seconds)


def test_a_killed_node_commits_nothing_until_it_is_back(tmp_path: Path) -> None:
    fail = TraceEvent(10.0, "fail", "n1", value=15.0)
    back = TraceEvent(25.0, "recover", "n1", value=1.0)
    trainer = _Trainer()
    record = run_scenario(trainer, scenario(fail, back), tmp_path / "w", RunOptions(40.0))
    assert [count for _, count in record.capacity] == [1, 0, 1]
    (fault,) = record.faults
    assert fault == pytest.approx(0.25, abs=0.2)
    away = [c for c in record.commits if fault + 0.05 < c.t_s < record.capacity[2][0]]
    assert not away
    assert record.commits[-1].t_s > record.capacity[2][0]
    assert trainer.runs[0].processes.alive == [], "everything was ended"
    assert not (tmp_path / "w").exists()


class _ParkedProcess(_OneProcess):
    """Only node n1 trains, and its processes wait at the gate until it joins."""

    def __init__(self, at: Workplace) -> None:
        super().__init__(at)
        self.parked_pids: list[list[int]] = []

    def _command(self) -> list[str]:
        gate = "from holdfast_lab.score.trainers.gate import wait_at_gate\nwait_at_gate()\n"
        return [sys.executable, "-c", gate + LOOP, str(self._at.folder)]

    def park(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self.processes.park(node, self._command())

    def ready_nodes(self) -> int:
        return self.processes.ready

    def start(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self.processes.start(node, self._command())
            self.parked_pids.append(self.processes.tree(node))


class _ParkingTrainer(_Trainer):
    def open(self, workplace: Workplace) -> TrainerRun:
        self.runs.append(_ParkedProcess(workplace))
        return self.runs[-1]


def test_the_processes_of_a_node_start_before_the_clock_and_train_once_it_joins(
    tmp_path: Path,
) -> None:
    fail = TraceEvent(10.0, "fail", "n1", value=15.0)
    back = TraceEvent(25.0, "recover", "n1", value=1.0)
    trainer = _ParkingTrainer()
    record = run_scenario(trainer, scenario(fail, back), tmp_path / "w", RunOptions(40.0))
    assert record.is_parked
    assert [count for _, count in record.capacity] == [1, 0, 1]
    (fault,), there = record.faults, record.capacity[2][0]
    assert not [c for c in record.commits if fault + 0.05 < c.t_s < there]
    assert record.commits[-1].t_s > there
    (run,) = trainer.runs
    assert isinstance(run, _ParkedProcess)
    first, second = run.parked_pids
    assert len(second) == 1
    assert second != first, "a second process took the place of the one that was killed"
    assert run.processes.ready == 0
    assert run.processes.alive == []


def test_a_node_that_is_never_ready_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast_lab.score.harness.harness.START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(_ParkedProcess, "_command", lambda run: [sys.executable, "-c", ""])
    with pytest.raises(RunFailedError, match="0 of 1 nodes were ready"):
        run_scenario(_ParkingTrainer(), scenario(), tmp_path / "w", RunOptions(40.0))


def test_a_node_that_cannot_be_parked_starts_when_it_joins(tmp_path: Path) -> None:
    record = run_scenario(_Trainer(), scenario(seconds=4.0), tmp_path / "w", RunOptions(40.0))
    assert not record.is_parked


def test_the_interval_of_saves_shrinks_with_k(tmp_path: Path) -> None:
    def interval(k: float) -> float:
        return Workplace(tmp_path, 4, 0.1, 600.0 / k, k, True, sys.executable).save_interval_s

    assert interval(20.0) == pytest.approx(2 * interval(40.0))


def test_only_tensors_of_a_dcp_file_are_damaged(tmp_path: Path) -> None:
    head = b"PK\x03\x04" + bytes(22) + (14).to_bytes(2, "little") + (5).to_bytes(2, "little")
    tensor = bytes(200)
    before = b"pickle" * 50 + head + b"archive/data/0" + b"extra"
    after = b"PK\x07\x08" + b"sizes" * 50 + b"archive/data/0 once more"
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(before + tensor + after)
    assert flip_tensor_bytes([file])
    found = file.read_bytes()
    assert found.startswith(before)
    assert found.endswith(after)
    assert [place for place, byte in enumerate(found[len(before) :][:200]) if byte] == [0, 97, 194]
    assert not flip_tensor_bytes([])


def test_a_stopped_node_is_slower_and_runs_on_afterwards(tmp_path: Path) -> None:
    slow = TraceEvent(0.1, "slow", "n1", value=2.5)
    record = run_scenario(_Trainer(), scenario(slow), tmp_path / "w", RunOptions(40.0))
    calm = run_scenario(_Trainer(), scenario(), tmp_path / "w", RunOptions(40.0))
    assert len(record.commits) < 0.8 * len(calm.commits)


def test_a_campaign_does_not_repeat_what_it_has_made(tmp_path: Path) -> None:
    said: list[str] = []
    table = ReferenceTable({1: 1.0})
    folder = tmp_path / "out"
    (folder / "runs").mkdir(parents=True)
    drawn = draw_scenario("F1", 5, LEVEL_1)
    record = run_scenario(_Trainer(), scenario(), tmp_path / "w", RunOptions(40.0))
    # A user's trainer is known by its source: once it is edited, its runs are made again.
    source = sha256(Path(__file__).read_bytes()).hexdigest()[:8]
    file = folder / "runs" / f"own-{source}-k40-F1-{drawn.seed}.json"
    file.write_text(format_record(record))
    campaign = RealCampaign(_Trainer(), folder, RunOptions(40.0), said.append, table)
    assert campaign.records(["F1"], [5]) == [record]
    assert said == [f"1 of 1 runs are kept from before, in {folder / 'runs'}"]
    assert campaign.reference_table() is table


def test_a_run_that_never_trains_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast_lab.score.harness.harness.START_TIMEOUT_S", 0.2)
    two = replace(
        scenario(), events=tuple(TraceEvent(0.0, "join", f"n{n}", value=1.0) for n in (1, 2))
    )
    with pytest.raises(RunFailedError, match="no step of 2 nodes"):
        run_scenario(_Trainer(), two, tmp_path / "w", RunOptions(40.0))


def test_a_journal_gives_steps_with_their_samples() -> None:
    def at(when: float, generation: int, event: object) -> Record:
        return Record(generation, "a", 0, when, event)  # type: ignore[arg-type]

    def done(step: int) -> StepDone:
        return StepDone(
            step=step, loss=0.5, tokens=2, grad_norm=1, learning_rate=1, seconds=1, samples=2
        )

    def fed(step: int) -> BatchFed:
        entry = {"microbatch": 0, "start": 2 * step - 2, "stop": 2 * step}
        return BatchFed(step=step, rank=0, entries=[entry])

    def started(nodes: int) -> GenerationStarted:
        return GenerationStarted(topology={"nodes": ["x"] * nodes}, reason="start")

    journal = [
        at(0, 1, started(2)),
        at(1, 1, fed(1)),
        at(1.1, 1, done(1)),
        at(2, 1, fed(2)),
        at(2.1, 1, done(2)),
        at(3, 2, started(1)),
        at(4, 2, fed(2)),
        at(4.1, 2, done(2)),
    ]
    found = commits_of_journal(journal)
    assert [(c.t_s, c.step, c.workers, c.tokens) for c in found] == [
        (1.1, 1, 2, 2.0),
        (2.1, 2, 2, 2.0),
        (4.1, 2, 1, 2.0),
    ]
    record = run_record(found)
    assert [c.workers for c in history_of(record).kept] == [2, 1]
    assert samples_once(record) == ""


def run_record(found: list[Commit]) -> RunRecord:
    return RunRecord("F1", 5, 5.0, ((0.0, 2),), (3.0,), tuple(found), 1.0, 5.0)


def test_step_times_leave_out_the_step_next_to_a_change() -> None:
    times = [(0.0, 2), (1.0, 2), (2.0, 2), (3.0, 2), (8.0, 1), (10.0, 1), (12.0, 1)]
    found = [Commit(at, n, 1.0, workers) for n, (at, workers) in enumerate(times, 1)]
    assert step_seconds(run_record(found)) == {1: 2.0, 2: 1.0}


def test_each_trainer_that_is_named_can_be_made() -> None:
    for name in ("holdfast", "torchrun-dcp", "torchft"):
        assert trainer_named(name).name == name


@pytest.mark.slow
def test_holdfast_keeps_each_sample_when_a_node_is_killed(tmp_path: Path) -> None:
    began = time.time()
    drawn = draw_scenario("F1", 5, LEVEL_1)
    record = run_scenario(trainer_named("holdfast"), drawn, tmp_path / "w", RunOptions(40.0))
    assert time.time() - began < 400
    assert record.is_parked
    assert samples_once(record) == ""
    assert history_of(record).lost == ()
