"""Proof from the journal that each sample was used exactly once.

Three things are shown for every step up to the last committed one:

1. its ledger entries cover the positions [position(N), position(N+1)) once, without gap;
2. the hash in each entry is the one that (dataset version, seed, N) gives. The worker takes it of
   the tokens that it really hands to the model. A microbatch that was dropped, fed twice or
   exchanged has other tokens than its place requires. An entry that a lost worker never
   delivered is reconstructed from the data (`core.data.data_ledger.LedgerEntry.is_stand_in`). For
   such entries the proof shows that the state was taken to hold them, and gives their number;
3. the samples that those positions lead to, counted one by one, occur once in each epoch.

A skipped microbatch is shown with its reason, and nothing of it may have been fed.

Only the effective lineage counts: what a lost generation fed beyond the step from which the
next one began was undone with it (`core/data/lineage.py`).

A branch is shown from its own first step on. Its positions begin where the parent's end, so the
proof for the parent up to that step completes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.core.data import data_ledger, lineage
from holdfast.core.data.data_ledger import LedgerEntry
from holdfast.core.data.group_order import GroupAudit
from holdfast.core.data.sample_order import BatchSchedule, SampleOrder
from holdfast.events import (
    BatchFed,
    CheckpointCommitted,
    GenerationStarted,
    Record,
    RunBranched,
    RunFinished,
    RunStarted,
)

LOOKUP_POSITIONS = 1 << 16  # positions looked up at a time
IMPORTED_KEY_END = "-0000000000.json"
"""Of a commit object of generation 0: an import writes it before the first generation."""
NEIGHBOUR_STEPS = 2  # steps before and after in which wrong tokens are looked for


@dataclass(frozen=True)
class AuditProblem:
    """One violation. kind: missing, repeated, swapped, wrong, outside or dataset. step 0: all of
    the run."""

    kind: str
    step: int
    microbatch: int
    message: str


@dataclass(frozen=True)
class EpochUse:
    """Uses of the samples of one epoch of one source."""

    source: str
    epoch: int  # from 0
    samples: int  # that the source has
    used: int  # different ones that were used
    repeated: int  # used more than once


@dataclass
class AuditResult:
    """Result of the audit; `ok` if every sample up to `last_step` was used exactly once."""

    last_step: int
    first_step: int = 1  # a branch's first step: its parent dealt the samples before it
    imported_step: int = 0  # of a checkpoint that another trainer wrote: nothing tells what it fed
    samples: int = 0  # positions of the steps audited
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> samples
    retold: int = 0  # samples whose entry stands in for that of a worker that was lost
    superseded: int = 0  # ledger records of work that was lost and done again
    unreadable: int = 0  # lines of the journal that cannot be read
    groups: GroupAudit | None = None  # of a run that generates its data
    problems: list[AuditProblem] = field(default_factory=list)
    epochs: list[EpochUse] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def first_problem(self) -> AuditProblem | None:
        """The earliest problem."""
        return min(self.problems, key=lambda p: (p.step, p.microbatch), default=None)

    def describe(self) -> str:
        if self.first_problem is not None:
            return f"{len(self.problems)} problems; the first: {self.first_problem.message}"
        if self.last_step < self.first_step:
            if self.last_step:
                return f"no step of its own is committed up to step {self.last_step:,}"
            return "nothing is committed yet, so there is nothing to audit"
        left_out = "".join(f", {n:,} skipped ({why})" for why, n in sorted(self.skipped.items()))
        where = f" ({self.first_step:,} to {self.last_step:,})" if self.first_step > 1 else ""
        number = self.last_step - self.first_step + 1
        return (
            f"{self.samples:,} samples in {number:,} steps{where}: none missing, none twice"
            f"{left_out}, {self._describe_source()}"
            f"{f'; {self.retold:,} by entries made for lost workers' if self.retold else ''}"
            f"{self._describe_import()}"
        )

    def _describe_source(self) -> str:
        if self.groups is None:
            return "each fed as the dataset and the seed say"
        found = self.groups
        return (
            f"each completion of the policy and the prompt that the step has: {found.trained:,} "
            f"trained, {found.filtered:,} filtered"
        )

    def _describe_import(self) -> str:
        if not self.imported_step:
            return ""
        return f"; the steps up to {self.imported_step:,} were imported, and are not checked"


class AuditedData(Protocol):
    """The names of the data that a run was fed."""

    @property
    def version(self) -> str: ...

    @property
    def source_names(self) -> tuple[str, ...]: ...
    def is_version(self, version: str) -> bool: ...


class AuditedBatches(Protocol):
    """Every batch of a run; `data.batch.Batches` is one."""

    microbatch_size: int
    schedule: BatchSchedule

    @property
    def order(self) -> SampleOrder: ...
    @property
    def dataset(self) -> AuditedData: ...
    def hash_of(self, start: int, stop: int) -> str:
        """The hash that feeding positions [start, stop) must give; "" if only the run makes it."""
        ...

    def blank_hash(self, samples: int) -> str: ...


def audit_records(
    records: Iterable[Record],
    batches: AuditedBatches,
    last_step: int | None = None,
    *,
    first_step: int = 1,
) -> AuditResult:
    """Audit a run's journal against the dataset and the settings in `batches`.

    `last_step` is the last step to audit; None: the last that a checkpoint committed, or that
    the run finished with. The audit of a branch begins after the step that it continues, and none
    begins before `first_step`.
    """
    effective, superseded = lineage.split_effective(records)
    parent, imported = branch_event(effective), _imported_step(effective)
    if last_step is None:
        done = (CheckpointCommitted, RunFinished, RunBranched)
        last_step = max((r.event.step for r in effective if isinstance(r.event, done)), default=0)
    own = parent.step + 1 if parent else imported + 1
    result = AuditResult(last_step, max(own, first_step))
    result.imported_step = imported
    result.groups = getattr(batches, "group_audit", None)
    result.superseded = sum(isinstance(r.event, BatchFed) for r in superseded)
    result.problems += _dataset_problems(effective, batches.dataset)
    steps: dict[int, list[LedgerEntry]] = {}
    for record in effective:
        event = record.event
        if isinstance(event, BatchFed) and result.first_step <= event.step <= last_step:
            for entry in (LedgerEntry.from_json(event.step, event.rank, v) for v in event.entries):
                steps.setdefault(event.step, []).append(entry)
    steps = {step: data_ledger.drop_redundant_stand_ins(entries) for step, entries in steps.items()}
    fed: dict[int, list[LedgerEntry]] = {}  # by first position
    for entry in (entry for entries in steps.values() for entry in entries):
        fed.setdefault(entry.start, []).append(entry)
    for step in range(result.first_step, last_step + 1):
        _audit_step(step, steps.get(step, []), fed, batches, result)
    if last_step >= result.first_step:
        position = batches.schedule.position
        result.samples = position(last_step + 1) - position(result.first_step)
    bounds = {n: (batches.schedule.position(n), batches.schedule.position(n + 1)) for n in steps}
    inside = [
        e
        for n, found in steps.items()
        for e in found
        if bounds[n][0] <= e.start < e.stop <= bounds[n][1] and not e.skip_reason
    ]
    result.retold = sum(entry.stop - entry.start for entry in inside if entry.is_stand_in)
    result.epochs = _epoch_uses(inside, batches)
    for use in result.epochs:
        if use.repeated and result.ok:
            result.problems.append(
                AuditProblem(
                    "repeated",
                    0,
                    0,
                    f"{use.repeated} samples of {use.source!r} were used "
                    f"more than once in epoch {use.epoch}",
                )
            )
    return result


def branch_event(records: Iterable[Record]) -> RunBranched | None:
    """Return the event of a run that continues another one; None for any other run."""
    return next((r.event for r in records if isinstance(r.event, RunBranched)), None)


def _imported_step(records: Iterable[Record]) -> int:
    """Return the step of the imported checkpoint that a run began from; 0 for any other run."""
    first = next((r.event for r in records if isinstance(r.event, GenerationStarted)), None)
    is_imported = first is not None and (first.restored_from or "").endswith(IMPORTED_KEY_END)
    return first.step if first is not None and is_imported else 0


def _dataset_problems(records: Sequence[Record], dataset: AuditedData) -> list[AuditProblem]:
    used = {r.event.dataset_version for r in records if isinstance(r.event, RunStarted)}
    return [
        AuditProblem("dataset", 0, 0, f"the run used dataset {other}, this is {dataset.version}")
        for other in sorted(used)
        if not dataset.is_version(other)
    ]


def _audit_step(
    step: int,
    entries: list[LedgerEntry],
    fed: dict[int, list[LedgerEntry]],
    batches: AuditedBatches,
    result: AuditResult,
) -> None:
    start, stop = batches.schedule.position(step), batches.schedule.position(step + 1)
    size = batches.microbatch_size
    ranges = [e.range for e in entries]

    def note(kind: str, position: int, message: str) -> None:
        microbatch = (position - start) // size
        text = f"step {step}, microbatch {microbatch}: {message}"
        result.problems.append(AuditProblem(kind, step, microbatch, text))

    for low, high in data_ledger.uncovered_ranges(ranges, start, stop):
        for at in range(low, high, size):
            edge = min(high, start + ((at - start) // size + 1) * size)
            note("missing", at, f"positions {at} to {edge - 1} were never fed")
    for low, high in data_ledger.repeated_ranges(ranges):
        ranks = sorted({e.rank for e in data_ledger.entries_touching(entries, (low, high))})
        note(
            "repeated",
            low,
            f"positions {low} to {high - 1} were fed more than once (ranks "
            f"{', '.join(map(str, ranks))})",
        )
    for entry in sorted(entries, key=lambda e: (e.start, e.rank)):
        if not start <= entry.start < entry.stop <= stop:
            text = f"step {step}, microbatch {entry.microbatch} (rank {entry.rank}): "
            text += f"positions {entry.start} to {entry.stop - 1} are not of this step"
            result.problems.append(AuditProblem("outside", step, entry.microbatch, text))
        elif entry.skip_reason:
            _audit_skipped(entry, start, batches, result)
        else:
            _audit_tokens(entry, fed, batches, result)


def _audit_skipped(
    entry: LedgerEntry, first: int, batches: AuditedBatches, result: AuditResult
) -> None:
    """Was nothing learned from what is called skipped?"""
    held = result.skipped.get(entry.skip_reason, 0)
    result.skipped[entry.skip_reason] = held + entry.stop - entry.start
    if entry.hash and entry.hash != batches.blank_hash(entry.stop - entry.start):
        where = (entry.start - first) // batches.microbatch_size
        text = f"step {entry.step}, microbatch {where} (rank {entry.rank}): the ledger calls it "
        text += f"skipped ({entry.skip_reason}), but tokens were fed"
        result.problems.append(AuditProblem("wrong", entry.step, where, text))


def _audit_tokens(
    entry: LedgerEntry,
    fed: dict[int, list[LedgerEntry]],
    batches: AuditedBatches,
    result: AuditResult,
) -> None:
    """Were the tokens of an entry those of its positions? If not, whose were they?"""
    begin = batches.schedule.position(entry.step)
    where = (entry.start - begin) // batches.microbatch_size
    label = f"step {entry.step}, microbatch {where} (rank {entry.rank})"
    if entry.microbatch != where:
        text = f"{label}: the ledger calls its positions microbatch {entry.microbatch}"
        result.problems.append(AuditProblem("wrong", entry.step, where, text))
    if result.groups is not None and not entry.is_stand_in:
        place = entry.step, entry.start, entry.stop
        for problem in result.groups.find_problems(*place, entry.groups):
            text = f"{label}: {problem}"
            result.problems.append(AuditProblem("wrong", entry.step, where, text))
    if batches.hash_of(entry.start, entry.stop) in ("", entry.hash):
        return
    owner = _find_real_range(entry, batches)
    if owner is None:
        kind, text = "wrong", f"{label}: the tokens fed are those of no microbatch nearby"
    else:
        step, microbatch, start = owner
        right = batches.hash_of(entry.start, entry.stop)
        exchanged = any(e.hash == right for e in fed.get(start, []))
        kind = "swapped" if exchanged else "repeated"
        verb = "exchanged with" if exchanged else "fed the tokens of"
        text = f"{label}: {verb} microbatch {microbatch} of step {step}"
        text += "" if exchanged else "; its own were never fed"
    result.problems.append(AuditProblem(kind, entry.step, where, text))


def _find_real_range(entry: LedgerEntry, batches: AuditedBatches) -> tuple[int, int, int] | None:
    """(step, microbatch, start) of the range nearby, cut alike, whose tokens have this hash."""
    length = entry.stop - entry.start
    nearest = sorted(range(-NEIGHBOUR_STEPS, NEIGHBOUR_STEPS + 1), key=abs)
    for step in (entry.step + away for away in nearest if entry.step + away >= 1):
        begin, end = batches.schedule.position(step), batches.schedule.position(step + 1)
        for start in range(begin, end - length + 1, length):
            if batches.hash_of(start, start + length) == entry.hash:
                return step, (start - begin) // batches.microbatch_size, start
    return None


def _epoch_uses(entries: Sequence[LedgerEntry], batches: AuditedBatches) -> list[EpochUse]:
    """Count every sample that the positions fed lead to, entry by entry."""
    used: dict[tuple[int, int], NDArray[np.uint8]] = {}
    ranges = sorted(e.range for e in entries)
    for low, high in (
        ranges if data_ledger.repeated_ranges(ranges) else data_ledger.merge_ranges(ranges)
    ):
        for at in range(low, high, LOOKUP_POSITIONS):
            source, epoch, sample = batches.order.places(at, min(at + LOOKUP_POSITIONS, high))
            for pair in set(zip(source.tolist(), epoch.tolist(), strict=True)):
                size = batches.order.sizes[pair[0]]
                count = used.setdefault(pair, np.zeros(size, dtype=np.uint8))
                hit, times = np.unique(
                    sample[(source == pair[0]) & (epoch == pair[1])], return_counts=True
                )
                count[hit] = np.minimum(count[hit] + times, 255)
    return [
        EpochUse(batches.dataset.source_names[s], e, len(c), int((c > 0).sum()), int((c > 1).sum()))
        for (s, e), c in sorted(used.items())
    ]
