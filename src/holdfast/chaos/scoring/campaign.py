"""All runs of a score at level 1. What was run before is read, so it can be done in parts."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.chaos.scoring.harness import RunFailedError, RunOptions, run_scenario
from holdfast.chaos.scoring.trainer import Trainer, trainer_named
from holdfast.simulate.score.record import ReferenceTable, RunRecord
from holdfast.simulate.score.record_file import (
    format_record,
    format_reference,
    parse_record,
    parse_reference,
)
from holdfast.simulate.score.scenarios import LEVEL_1, ScenarioRun, draw_scenario
from holdfast.simulate.traces.events import TraceEvent

_CALM_STEPS = 7
"""Steps on each number of nodes, of which the first two are left out."""


@dataclass(frozen=True)
class RealCampaign:
    """trainer: its name. reference: a table that is given; None: it is measured.
    say: gets a line for each run."""

    trainer: str
    folder: Path
    options: RunOptions
    say: Callable[[str], None]
    reference: ReferenceTable | None = None

    def reference_table(self) -> ReferenceTable:
        """W* by nodes: Holdfast's steps without faults and with resilience off."""
        if self.reference is not None:
            return self.reference
        file = self.folder / f"reference-k{self.options.k:g}.json"
        if file.exists():
            return parse_reference(file.read_text(), str(file))
        self.say("reference: throughput of 4, 3, 2 and 1 nodes without faults")
        record = run_scenario(
            trainer_named("holdfast"),
            calm_staircase(),
            self.folder / "reference",
            self.options,
            is_resilient=False,
        )
        table = ReferenceTable({n: 24 / s for n, s in step_seconds(record).items()})
        _write(file, format_reference(table))
        return table

    def records(self, scenarios: Sequence[str], seeds: Sequence[int]) -> list[RunRecord]:
        """The records of all pairs. A run that does not begin to train is left out, and said."""
        trainer = trainer_named(self.trainer)
        found = []
        for name, seed in itertools.product(scenarios, seeds):
            drawn = draw_scenario(name, seed, LEVEL_1)
            record = self._record(trainer, drawn, "on")
            if record is not None and name == "F0":
                calm = replace(drawn, seconds=drawn.seconds / 2)
                off = self._record(trainer, calm, "off")
                if off is not None:
                    record = replace(record, off_rate=_rate(off))
            if record is not None:
                found.append(record)
        return found

    def _record(self, trainer: Trainer, drawn: ScenarioRun, resilience: str) -> RunRecord | None:
        title = f"{trainer.name}-k{self.options.k:g}-{drawn.scenario}-{drawn.seed}"
        title += "" if resilience == "on" else "-off"
        file = self.folder / "runs" / f"{title}.json"
        if file.exists():
            return parse_record(file.read_text(), str(file))
        try:
            record = run_scenario(
                trainer,
                drawn,
                self.folder / "work" / title,
                self.options,
                is_resilient=resilience == "on",
            )
        except RunFailedError as error:
            self.say(f"{title}: {error}")
            return None
        _write(file, format_record(record))
        self.say(f"{title}: {len(record.commits)} commits, {len(record.faults)} interruptions")
        return record


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}")
    new.write_text(text + "\n")
    new.replace(file)


def calm_staircase() -> ScenarioRun:
    """4, 3, 2 and 1 nodes, some steps each: for step times, and for no score."""
    step, nodes = LEVEL_1.step_s, LEVEL_1.nodes
    events, at = [TraceEvent(0.0, "join", f"n{n}", value=1.0) for n in range(1, nodes + 1)], 0.0
    for left in range(nodes, 0, -1):
        at += _CALM_STEPS * step * nodes / left
        if left > 1:
            events.append(TraceEvent(at, "preempt", f"n{left}"))
    return ScenarioRun("F0", 0, nodes, at, step, tuple(events), at)


def step_seconds(record: RunRecord) -> dict[int, float]:
    """The median time of a step, by the number of workers; steps next to a change are left out."""
    gaps: dict[int, list[float]] = {}
    for one, two, three in zip(
        record.commits, record.commits[1:], record.commits[2:], strict=False
    ):
        if one.workers == two.workers == three.workers:
            gaps.setdefault(three.workers, []).append(three.t_s - two.t_s)
    return {n: statistics.median(values) for n, values in sorted(gaps.items())}


def _rate(record: RunRecord) -> float:
    """Tokens a second, from the first commit to the last."""
    first, last = record.commits[0], record.commits[-1]
    tokens = sum(commit.tokens for commit in record.commits[1:])
    return tokens / (last.t_s - first.t_s)
