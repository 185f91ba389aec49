"""The gate: whether a trainer's results are right at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.score.record import RunRecord, history_of, samples_once
from holdfast_lab.score.score import GateCheck

LOSS_TOLERANCE = 1e-4
"""Relative. In float32 another number of ranks changes rounding, which training amplifies."""


def gate_checks(records: Sequence[RunRecord]) -> tuple[GateCheck, ...]:
    """The three conditions, from the records of one trainer at level 1."""
    return same_losses(records), each_sample_once(records), corruption_found(records)


def same_losses(records: Sequence[RunRecord]) -> GateCheck:
    """The loss of each kept step equals that of the same step without a fault."""
    name = "same loss as without a fault"
    calm = {c.step: c.loss for r in records if r.scenario == "F0" for c in history_of(r).kept}
    if not calm:
        return GateCheck(name, None, "F0 was not run")
    compared = equal = 0
    for record in records:
        if record.scenario in ("F0", "F10"):
            continue
        for commit in history_of(record).kept:
            expected = calm.get(commit.step)
            if expected is None or commit.loss is None:
                continue
            compared += 1
            equal += commit.loss == expected
            if not _is_near(commit.loss, expected):
                told = f"step {commit.step} of {record.scenario}: {commit.loss:.6g}"
                return GateCheck(name, False, f"{told} instead of {expected:.6g}")
    if not compared:
        return GateCheck(name, None, "no step could be compared")
    return GateCheck(name, True, f"{compared} steps, {equal} of them bit-equal")


def each_sample_once(records: Sequence[RunRecord]) -> GateCheck:
    """No kept step repeats a sample or leaves one out."""
    name = "each sample once"
    for record in records:
        if problem := samples_once(record):
            return GateCheck(name, False, f"{record.scenario}: {problem}")
    return GateCheck(name, True if records else None, f"{len(records)} runs")


def corruption_found(records: Sequence[RunRecord]) -> GateCheck:
    """A damaged checkpoint is not used: afterwards losses are those without a fault."""
    name = "damaged checkpoint not used"
    calm = {c.step: c.loss for r in records if r.scenario == "F0" for c in history_of(r).kept}
    tried = [r for r in records if r.scenario == "F10"]
    if not tried or not calm:
        return GateCheck(name, None, "F0 and F10 were not both run")
    if all(r.corrupted == 0 for r in tried):
        return GateCheck(name, None, "there was no checkpoint to damage")
    for record in tried:
        after = [c for c in record.commits if record.faults and c.t_s > record.faults[0]]
        known = [(c, calm[c.step]) for c in after if c.step in calm]
        if not known:
            return GateCheck(name, False, "the run did not continue")
        for commit, expected in known:
            is_near = commit.loss is not None and expected is not None
            if not is_near or not _is_near(commit.loss or 0.0, expected or 0.0):
                told = f"step {commit.step}: {commit.loss} instead of {expected}"
                return GateCheck(name, False, told)
    return GateCheck(name, True, f"{len(tried)} runs")


def _is_near(value: float, expected: float) -> bool:
    return abs(value - expected) <= LOSS_TOLERANCE * max(abs(expected), 1e-12)
