"""One trial of a search: a run folder, a record, and the command that trains it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from holdfast.core.data.lineage import split_effective
from holdfast.errors import RunFolderError
from holdfast.events import Evaluated, NonFinite, RunFailed, RunStarted
from holdfast.launch.run.runs import read_resolved
from holdfast.wire.child_command import module_command
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_location import store_of_run
from holdfast_platform.pipeline.stages import LEFT_CODE
from holdfast_platform.pipeline.state import KeptRecord
from holdfast_platform.search.file import Search, overrides_of

HOLDFAST = "holdfast.cli.main"


class State(StrEnum):
    RUNNING = "running"  # or its process was killed
    COMPLETE = "complete"
    PRUNED = "pruned"  # its checkpoint is kept
    FAILED = "failed"  # the run itself has failed, as by a loss that is not finite


@dataclass(frozen=True)
class Trial(KeptRecord):
    """`trial.json`."""

    file, made_by = "trial.json", "holdfast search"

    number: int
    parameters: Mapping[str, Any]
    state: State = State.RUNNING
    value: float | None = None  # at the last step; of a pruned one at the step where it ended
    starts: int = 0  # of its process
    by_step: Mapping[int, float] = field(default_factory=dict)  # evaluations that count

    @property
    def is_complete(self) -> bool:
        return self.state is State.COMPLETE

    @property
    def is_over(self) -> bool:
        return self.state is not State.RUNNING


def evaluations(run: Path, metric: str) -> dict[int, float]:
    """Return the values of a metric by step. A step that was computed again counts once. Raises
    RunFolderError for a metric that no evaluation has."""
    if read_resolved(run) is None:
        return {}
    out = {}
    effective, _ = split_effective(read_journal(store_of_run(run)))
    for record in effective:
        event = record.event
        if isinstance(event, Evaluated):
            known = {"loss": event.loss, "bits_per_byte": event.bits_per_byte, **event.metrics}
            if (value := known.get(metric)) is None:
                raise RunFolderError(
                    f"evaluations of this run have no {metric}",
                    where=str(run),
                    remedy=f"use one of {', '.join(k for k, v in known.items() if v is not None)}",
                )
            out[event.step] = value
    return {step: value for step, value in out.items() if math.isfinite(value)}


def failure_of(run: Path) -> str:
    """Return why the run has failed, if numbers that are not finite ended it; "" otherwise. Such a
    run fails at each start. What a machine did to a run does not count."""
    if read_resolved(run) is None:
        return ""
    events = [record.event for record in read_journal(store_of_run(run))]
    last = next((e for e in reversed(events) if isinstance(e, RunStarted | RunFailed)), None)
    is_numeric = any(isinstance(event, NonFinite) for event in events)
    return last.reason if isinstance(last, RunFailed) and is_numeric else ""


def train_words(search: Search, run: Path, values: Mapping[str, Any]) -> list[str]:
    """Return the command that trains a run with these values of keys."""
    own = {**search.set, **values, "folder": str(run), "cluster.left_exit_code": LEFT_CODE}
    if search.has_datasets:
        own["data.folder"] = str(run.with_name("dataset"))
    return module_command(HOLDFAST, "train", search.run, *overrides_of(own))


def common_words(search: Search, trunk: Path) -> dict[str, list[str]]:
    """Return what the commands do that all trials have in common, with their words."""
    out = {}
    if not search.config.has_own_data and not search.has_datasets:
        words = ("data", "prepare", search.run, *overrides_of(search.set))
        out["preparing the dataset of all trials"] = module_command(HOLDFAST, *words)
    if at := search.branch_at:
        length = {"train.steps": at, "train.schedule.steps": search.config.train.schedule_steps}
        words_of_trunk = train_words(search, trunk, length)
        out[f"training the {at} steps that all trials have in common"] = words_of_trunk
    return out


def words_of(search: Search, trunk: Path, run: Path, values: Mapping[str, Any]) -> list[str]:
    """Return the next command of a trial: it trains, or makes the run folder of a branch."""
    if not search.branch_at:
        return train_words(search, run, values)
    if run.exists():
        own = overrides_of({"cluster.left_exit_code": LEFT_CODE})
        return module_command(HOLDFAST, "train", str(run / "run.yaml"), *own)
    keys = overrides_of({**values, "train.steps": search.steps})
    at = ("--at", str(search.branch_at), "--to", str(run))
    return module_command(HOLDFAST, "branch", str(trunk), *at, *keys)
