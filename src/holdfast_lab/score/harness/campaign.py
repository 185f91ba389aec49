"""All runs of a score at level 1. What was run before is read, so it can be done in parts."""

from __future__ import annotations

import inspect
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from holdfast.report.formatting import format_duration
from holdfast_lab.score.harness.harness import RunFailedError, RunOptions, run_scenario
from holdfast_lab.score.harness.trainer import Trainer, trainer_named
from holdfast_lab.score.record import (
    ReferenceTable,
    RunRecord,
    format_record,
    format_reference,
    parse_record,
    parse_reference,
)
from holdfast_lab.score.scenarios import LEVEL_1, ScenarioRun, draw_scenario
from holdfast_lab.traces.events import TraceEvent

_CALM_STEPS = 7  # steps on each number of nodes, of which the first two are left out


@dataclass(frozen=True)
class RealCampaign:
    """reference: a table that is given; None: it is measured.
    say: gets a line for each run."""

    trainer: Trainer
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
        runs = _runs(scenarios, seeds)
        if kept := self.made(scenarios, seeds):
            self.say(f"{kept} of {len(runs)} runs are kept from before, in {self.folder / 'runs'}")
        left_s = sum(run.seconds for run, on in runs if not self._file(run, on).exists())
        if left_s:
            self.say(
                f"{len(runs) - kept} runs of real processes take "
                f"{format_duration(left_s / self.options.k)}, and their starts and stops"
            )
        found: dict[tuple[str, int], RunRecord] = {}
        for drawn, is_resilient in runs:
            record = self._record(drawn, is_resilient)
            key = drawn.scenario, drawn.seed
            if record is not None and is_resilient:
                found[key] = record
            elif record is not None and key in found:
                # Tokens a second, from the first commit to the last.
                first, last = record.commits[0], record.commits[-1]
                tokens = sum(commit.tokens for commit in record.commits[1:])
                found[key] = replace(found[key], off_rate=(tokens / (last.t_s - first.t_s)))
        return list(found.values())

    def made(self, scenarios: Sequence[str], seeds: Sequence[int]) -> int:
        """How many runs of these are complete."""
        return sum(self._file(*run).exists() for run in _runs(scenarios, seeds))

    def wanted(self, scenarios: Sequence[str], seeds: Sequence[int]) -> int:
        """How many runs these are."""
        return len(_runs(scenarios, seeds))

    def _file(self, drawn: ScenarioRun, is_resilient: bool) -> Path:
        title = f"{self.trainer.name}{self._variant()}-k{self.options.k:g}-{drawn.scenario}"
        title += f"-{drawn.seed}{'' if is_resilient else '-off'}"
        return self.folder / "runs" / f"{title}.json"

    def _variant(self) -> str:
        """Tells runs of a user's own trainer, or of a second interpreter, from earlier ones."""
        parts = []
        if not type(self.trainer).__module__.startswith(("holdfast.", "holdfast_lab.")):
            parts.append(Path(inspect.getfile(type(self.trainer).open)).read_bytes())
        if self.options.python != sys.executable:
            parts.append(self.options.python.encode())
        return f"-{sha256(b' '.join(parts)).hexdigest()[:8]}" if parts else ""

    def _record(self, drawn: ScenarioRun, is_resilient: bool) -> RunRecord | None:
        file = self._file(drawn, is_resilient)
        if file.exists():
            return parse_record(file.read_text(), str(file))
        try:
            record = run_scenario(
                self.trainer,
                drawn,
                self.folder / "work" / file.stem,
                self.options,
                is_resilient=is_resilient,
            )
        except RunFailedError as error:
            self.say(f"{file.stem}: {error}")
            return None
        _write(file, format_record(record))
        told = f"{len(record.commits)} commits, {len(record.faults)} interruptions"
        self.say(f"{file.stem}: {told}")
        return record


def _runs(scenarios: Sequence[str], seeds: Sequence[int]) -> list[tuple[ScenarioRun, bool]]:
    """All runs, each with whether the trainer is resilient. F0 has one half as long without."""
    found = []
    for name, seed in itertools.product(scenarios, seeds):
        drawn = draw_scenario(name, seed, LEVEL_1)
        found.append((drawn, True))
        if name == "F0":
            found.append((replace(drawn, seconds=drawn.seconds / 2), False))
    return found


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
