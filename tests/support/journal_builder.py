"""Journals as an agent would write them, with a clock that the test moves."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.config.loading.load import resolve_config
from holdfast.events import (
    CheckpointCaptured,
    CheckpointCommitted,
    CheckpointRestored,
    Evaluated,
    Event,
    GenerationStarted,
    NodesPresent,
    Record,
    RunFinished,
    RunStarted,
    RunStopped,
    StepDone,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
    to_json,
)
from holdfast.layout import Layout, place_layout
from holdfast.wire.journal import segment_key


@dataclass
class Scribe:
    """Plays the agent: `at` is its clock, with which it stamps its own and the workers' events."""

    at: float = 1_000_000.0
    generation: int = 0
    workers: int = 2
    price: dict[str, Any] | None = None  # that each node tells; None: none tells any
    records: list[Record] = field(default_factory=list)
    sequences: Counter[str] = field(default_factory=Counter)

    def write(self, event: Event, after: float = 0.0) -> Record:
        self.at += after
        writer = "rank0" if isinstance(event, StepDone | Evaluated | WorkerReady) else "agent"
        record = Record(self.generation, writer, self.sequences[writer], self.at, event)
        self.records.append(record)
        self.sequences[writer] += 1
        return record

    def open_generation(self) -> None:
        self.generation += 1
        self.sequences.clear()

    def start(self, *, resumed: bool = False, pause: float = 0.0) -> None:
        self.at += pause
        self.open_generation()
        self.write(RunStarted("demo", "cafe", "d1", resumed))

    def generate(self, step: int = 0, reason: str = "start", key: str | None = None) -> None:
        topology = place_layout(
            Layout(self.workers), self.generation, ("a",) * self.workers
        ).to_json()
        self.write(GenerationStarted(topology, reason, key, step=step), after=0.25)
        if self.price is not None:
            self.write(NodesPresent({"a": self.price}, step=step))
        for rank in range(self.workers):
            self.write(WorkerStarted(rank, 100 + rank, "a", step=step))
        for rank in range(self.workers):
            if key:
                self.write(CheckpointRestored(rank, key, 1000, 0.1, step=step), after=0.25)
            self.write(WorkerReady(rank, 0.5, step=step), after=0.25)

    def among(self, *nodes: str, step: int = 0, reason: str = "start", rung: int = -1) -> None:
        """Write a generation of one worker a node; the workers continue with the state that they
        hold."""
        self.workers = len(nodes)
        topology = place_layout(Layout(len(nodes)), self.generation, nodes).to_json()
        held = list(range(len(nodes))) if step else None
        self.write(GenerationStarted(topology, reason, None, rung, held, step=step), after=0.25)
        for rank in range(len(nodes)):
            self.write(WorkerReady(rank, 0.25, step=step), after=0.25)

    def steps(self, first: int, last: int, seconds: float = 1.0, **phases: float) -> None:
        share = phases or {"data": 0.125, "compute": 0.5, "reduce": 0.25, "apply": 0.125}
        for step in range(first, last + 1):
            self.write(step_done(step, seconds, share), after=seconds)

    def capture(self, step: int, blocked: float = 0.125) -> None:
        """Step `step`, one second of computing, and the copy of the state after it."""
        phases = {"compute": 1.0, "capture": blocked}
        for rank in range(self.workers):
            self.write(CheckpointCaptured(rank, blocked, 1000, step=step))
        self.write(step_done(step, 1.0 + blocked, phases), after=1.0 + blocked)

    def commit(self, step: int, seconds: float = 0.5, after: float = 0.0) -> str:
        key = f"commits/{step}-{self.generation}.json"
        self.write(CheckpointCommitted(key, 5000, seconds, step=step), after)
        return key

    def evaluate(self, step: int, seconds: float = 2.0) -> None:
        self.write(Evaluated(loss_at(step), loss_at(step) / 2.5, 500, seconds, step=step), seconds)

    def lose(self, rank: int, cause: str = "SIGKILL", after: float = 0.25) -> None:
        self.write(WorkerLost(rank, 100 + rank, cause, "exit"), after)

    def restart(self, step: int, reason: str = "worker_lost", key: str | None = None) -> None:
        self.open_generation()
        self.generate(step, reason, key)

    def finish(self, after: float = 0.0) -> None:
        self.write(RunFinished(step=self.last_step), after)

    def stop(self, reason: str = "SIGINT", after: float = 0.0) -> None:
        self.write(RunStopped(reason, step=self.last_step), after)

    @property
    def last_step(self) -> int:
        return max((r.event.step for r in self.records), default=0)


def loss_at(step: int) -> float:
    return 2.0 + 4.0 * math.exp(-step / 30)


def step_done(step: int, seconds: float, phases: dict[str, float]) -> StepDone:
    return StepDone(
        loss_at(step), 1024, 1.5, 1e-3, seconds, samples=4, phases=dict(phases), step=step
    )


def started_run(steps: int) -> Scribe:
    """Return a run that has done its first steps in generation 1."""
    run = Scribe()
    run.start()
    run.generate()
    run.steps(1, steps)
    return run


def lossy_run(**options: Any) -> Scribe:
    """Steps 1-10, committed at 5 and 10; 11-13 lost; 11-20 again; stopped; resumed to 30."""
    run = Scribe(**options)
    run.start()
    run.generate()
    run.steps(1, 4)
    run.capture(5)
    run.commit(5)
    run.steps(6, 9)
    run.capture(10)
    key = run.commit(10)
    run.evaluate(10)
    run.steps(11, 13)
    run.lose(1)
    run.restart(10, key=key)
    run.steps(11, 19)
    run.capture(20)
    key = run.commit(20, after=0.5)
    run.stop(after=1.0)
    run.start(resumed=True, pause=100.0)
    run.generate(20, "resume", key)
    run.steps(21, 29)
    run.capture(30)
    run.evaluate(30)
    run.commit(30, after=0.5)
    run.finish(after=0.5)
    return run


def store_run(folder: Path, records: Iterable[Record], steps: int, *settings: str) -> None:
    """Write records as the journal of a run folder that commands open. settings: key=value."""
    folder.mkdir(parents=True)
    append_records(folder, records)
    given = [f"train.steps={steps}", f"folder={folder}", *settings]
    resolved = resolve_config(None, "command line", given).to_json()
    (folder / "resolved.json").write_text(json.dumps(resolved))


def append_records(folder: Path, records: Iterable[Record]) -> None:
    """Append records to the segments of a run's journal."""
    for record in records:
        path = folder / segment_key(record.generation, record.writer)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as segment:
            segment.write(json.dumps(to_json(record)) + "\n")
