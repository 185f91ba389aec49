"""Compares a disturbed run with the undisturbed one: same curve, ledger equal, tensors equal."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.checkpoint.restore.inspect import read_as_float64
from holdfast.checkpoint.restore.reader import Checkpoint
from holdfast.config.run import RunConfig
from holdfast.core.data.lineage import split_effective
from holdfast.data.order.audit import audit_records
from holdfast.events import StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_location import read_run_file, store_of_run


@dataclass(frozen=True)
class RunComparison:
    """Each is "" if it holds, or a sentence. worst: the largest relative difference of a loss or a
    tensor."""

    curve: str
    ledger: str
    tensors: str
    worst: float

    @property
    def is_equal(self) -> bool:
        return not (self.curve or self.ledger or self.tensors)


def compare_runs(folder: Path, undisturbed: Path, steps: int, tolerance: float) -> RunComparison:
    """tolerance: relative; 0: to the bit."""
    curve, worst = _compare_curves(read_losses(folder), read_losses(undisturbed), steps, tolerance)
    ledger = _check_ledger(folder, steps)
    tensors, off = _compare_tensors(folder, undisturbed, steps, tolerance)
    return RunComparison(curve, ledger, tensors, max(worst, off))


def read_losses(folder: Path) -> dict[int, float]:
    """By step, of what counts."""
    effective, _ = split_effective(read_journal(store_of_run(folder)))
    return {r.event.step: r.event.loss for r in effective if isinstance(r.event, StepDone)}


def _compare_curves(
    ours: dict[int, float], theirs: dict[int, float], steps: int, tolerance: float
) -> tuple[str, float]:
    if len(theirs) < steps:
        return "the undisturbed run has not all steps", 0.0
    due = set(range(1, steps + 1))
    if untold := sorted(due - set(ours)):
        return f"{len(untold)} of {steps} steps have no line, the first is {untold[0]}", 0.0
    if beyond := sorted(set(ours) - due):
        return f"step {beyond[0]} is none of the run's {steps}", 0.0
    worst = 0.0
    for step, loss in sorted(ours.items()):
        off = _relative_error(abs(loss - theirs[step]), abs(theirs[step]))
        worst = max(worst, off)
        if off > tolerance:
            return f"the loss of step {step} is {loss!r}, not {theirs[step]!r}", worst
    return "", worst


def _relative_error(difference: float, size: float) -> float:
    """Relative; what is no number is as far off as can be."""
    off = difference / max(size, 1e-300)
    return math.inf if math.isnan(off) else off


def _check_ledger(folder: Path, steps: int) -> str:
    stored = json.loads(read_run_file(folder, "resolved.json") or "{}")
    config = RunConfig.model_validate(stored["config"])
    from holdfast.tasks.choose import open_audited

    batches, _ = open_audited(config, stored["dataset"]["folder"])
    result = audit_records(read_journal(store_of_run(folder)), batches)
    if not result.ok:
        return result.describe()
    if result.last_step != steps:
        return f"the ledger ends with step {result.last_step}"
    return ""


def _compare_tensors(
    folder: Path, undisturbed: Path, steps: int, tolerance: float
) -> tuple[str, float]:
    ours, theirs = read_newest_state(folder), read_newest_state(undisturbed)
    for which, (step, _) in (("its", ours), ("the undisturbed run's", theirs)):
        if step != steps:
            return f"{which} last checkpoint is of step {step}", 0.0
    worst = 0.0
    if odd := sorted(set(ours[1]) ^ set(theirs[1])):
        return f"{odd[0]} is in one of the two alone", worst
    for name, right in theirs[1].items():
        found = ours[1][name]
        off = _relative_error(float(np.linalg.norm(found - right)), float(np.linalg.norm(right)))
        worst = max(worst, off)
        if (not np.array_equal(found, right)) if tolerance == 0.0 else off > tolerance:
            return f"{name} differs by {off:.2g}", worst
    return "", worst


def read_newest_state(folder: Path) -> tuple[int, dict[str, NDArray[np.float64]]]:
    """Step and tensors of the newest checkpoint."""
    store = store_of_run(folder)
    found = list_commits(store)
    if not found:
        return 0, {}
    checkpoint = Checkpoint.open(store, found[0])
    return checkpoint.step, {
        spec.name: read_as_float64(checkpoint, spec) for spec in checkpoint.tensors
    }
