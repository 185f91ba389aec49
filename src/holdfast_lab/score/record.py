"""What a run did, told without its own summary, and what follows from it. Pure.

A record holds three histories on one clock. They are the nodes that were there, the steps that were
committed, and the moments at which the scenario took something away. Every number of the score is
computed from them, alike for all trainers and for both levels.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf
from typing import Any

from holdfast.borders import Border
from holdfast.core.json_parsing import parse_json
from holdfast.errors import DataError

FULL_SPEED_SHARE = 0.9  # share of the ideal throughput from which a run counts as recovered (RTO)


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed step. tokens: of its global batch. workers: that computed it. samples: the
    positions [start, stop) of the global order that it trained on; empty if not known."""

    t_s: float
    step: int
    tokens: float
    workers: int = 0
    loss: float | None = None
    samples: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RunRecord:
    """One run of one scenario.

    Attributes:
        scenario, seed: which one.
        seconds: length of the judged time.
        capacity: (t_s, nodes that are there from then on), the first at 0.
        faults: when something was taken away; losses at one instant are one.
        commits: in order of time, from 0 to `seconds`. A step that was lost is there twice if it
            was computed again.
        step_s: seconds of a step without a fault on all nodes.
        between_s: T_b, the scenario's mean time between interruptions.
        start_step: committed before time 0.
        off_rate: tokens a second of the same run without a fault and with resilience off; 0 if it
            was not measured.
        corrupted: of F10: 1 if a checkpoint was damaged, 0 if there was none; -1: not tried.
        is_parked: the processes of all nodes were started before time 0, and waited.
    """

    scenario: str
    seed: int
    seconds: float
    capacity: tuple[tuple[float, int], ...]
    faults: tuple[float, ...]
    commits: tuple[Commit, ...]
    step_s: float
    between_s: float
    start_step: int = 0
    off_rate: float = 0.0
    corrupted: int = -1
    is_parked: bool = False


@dataclass(frozen=True)
class ReferenceTable:
    """W*: the best throughput in tokens a second that was measured without faults, by nodes."""

    rates: Mapping[int, float]

    def rate(self, nodes: int) -> float:
        """Tokens a second on so many nodes; of the most nodes that are in the table beyond it."""
        known = [count for count in self.rates if count <= nodes]
        return max((self.rates[count] for count in known), default=0.0)

    def tokens(self, capacity: Sequence[tuple[float, int]], start: float, stop: float) -> float:
        """The integral of W*(A(t)) from `start` to `stop`."""
        times = [at for at, _ in capacity]
        index = max(0, bisect_right(times, start) - 1)
        total, now = 0.0, start
        while now < stop and index < len(capacity):
            until = min(stop, times[index + 1]) if index + 1 < len(times) else stop
            total += self.rate(capacity[index][1]) * max(0.0, until - now)
            now, index = max(now, until), index + 1
        return total


@dataclass(frozen=True)
class History:
    """kept: steps that stand at the end, by rising step. lost: (time at which they were known to be
    lost, steps) of each return to an earlier step."""

    kept: tuple[Commit, ...]
    lost: tuple[tuple[float, int], ...]


def history_of(record: RunRecord) -> History:
    """Which committed steps stand, and which were lost. A commit of step n after one of a later
    step takes back step n and all that follow it."""
    kept: list[Commit] = []
    lost: list[tuple[float, int]] = []
    for commit in record.commits:
        taken_back = 0
        while kept and kept[-1].step >= commit.step:
            kept.pop()
            taken_back += 1
        before = kept[-1].step if kept else record.start_step
        taken_back += max(0, before - commit.step + 1) if not kept else 0
        if taken_back:
            lost.append((commit.t_s, taken_back))
        kept.append(commit)
    return History(tuple(kept), tuple(lost))


def goodput(record: RunRecord, reference: ReferenceTable, *, counts_flight: bool = False) -> float:
    """G: kept tokens over what the reference makes on the nodes that were there; not clamped.
    counts_flight: the step in flight at the end counts by its share (`flight_tokens`)."""
    ideal = reference.tokens(record.capacity, 0.0, record.seconds)
    tokens = sum(c.tokens for c in history_of(record).kept if c.t_s <= record.seconds)
    tokens += flight_tokens(record) if counts_flight else 0.0
    return tokens / ideal if ideal > 0 else 0.0


def flight_tokens(record: RunRecord) -> float:
    """The share of the step in flight at the end. It is taken to last as long as the one before."""
    kept = history_of(record).kept
    if len(kept) < 2:
        return 0.0
    last = kept[-1].t_s - kept[-2].t_s
    return min(1.0, (record.seconds - kept[-1].t_s) / last) * kept[-1].tokens


def mean_lost_seconds(record: RunRecord) -> float:
    """x: lost steps of an interruption, in seconds of steps without a fault; the mean."""
    if not record.faults:
        return 0.0
    steps = sum(count for _, count in history_of(record).lost)
    return steps * record.step_s / len(record.faults)


def recovery_times(record: RunRecord, reference: ReferenceTable) -> list[float]:
    """For each fault, seconds until the end of the first new step at 90 % of the ideal. A fault
    after which none comes counts until the end of the record."""
    found = []
    for fault in record.faults:
        reached = max((c.step for c in record.commits if c.t_s <= fault), default=record.start_step)
        end = record.seconds
        for before, commit in itertools.pairwise(record.commits):
            if commit.t_s <= fault or commit.step <= reached:
                continue
            # of the step in flight at the fault, the time after the fault counts
            ideal = reference.tokens(record.capacity, max(before.t_s, fault), commit.t_s)
            if commit.tokens >= FULL_SPEED_SHARE * ideal:
                end = commit.t_s
                break
        found.append(min(end, record.seconds) - fault)
    return found


def first_new_step_times(record: RunRecord) -> list[float]:
    """For each fault, seconds until the first new committed step: the RTO of
    docs/internals/elastic.md."""
    found = []
    for fault in record.faults:
        reached = max((c.step for c in record.commits if c.t_s <= fault), default=record.start_step)
        later = [c.t_s for c in record.commits if c.t_s > fault and c.step > reached]
        found.append((later[0] if later else record.seconds) - fault)
    return found


def unrecovered_faults(record: RunRecord) -> int:
    """Interruptions after which no step came. What they cost in lost work is not known."""
    last = record.commits[-1].t_s if record.commits else 0.0
    return sum(fault >= last for fault in record.faults)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed; 0 of no value."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def samples_once(record: RunRecord) -> str:
    """What is wrong if the kept steps did not train on consecutive samples, each once. An empty
    text: nothing. Steps whose samples are not known are passed over."""
    kept = [c for c in history_of(record).kept if c.samples]
    if not kept:
        return "the trainer does not say which samples it used"
    ranges = sorted(itertools.chain.from_iterable(c.samples for c in kept))
    for (start, stop), (next_start, _) in itertools.pairwise(ranges):
        if next_start < stop:
            return f"samples {next_start} to {stop - 1} were used again (after {start})"
        if next_start > stop:
            return f"samples {stop} to {next_start - 1} were left out"
    return ""


# --- files ----------------------------------------------------------------------------------------
def format_record(record: RunRecord) -> str:
    return json.dumps(asdict(record))


def parse_record(text: str, source: str) -> RunRecord:
    """Raises DataError."""
    try:
        row: Any = parse_json(text)
        commits = tuple(
            Commit(**{**c, "samples": tuple((a, b) for a, b in c["samples"])})
            for c in row["commits"]
        )
        pairs = tuple((float(at), int(count)) for at, count in row["capacity"])
        lists = {"commits": commits, "capacity": pairs, "faults": tuple(row["faults"])}
        return RunRecord(**{**row, **lists})
    except (ValueError, KeyError, TypeError):
        raise DataError(
            "this is no record of a run", where=source, remedy="remove it, and run the score again"
        ) from None


def format_reference(table: ReferenceTable) -> str:
    return json.dumps({"tokens_per_s": {str(n): rate for n, rate in table.rates.items()}}, indent=1)


REFERENCE = Border("a table of throughputs", frozenset({"tokens_per_s"}))


def parse_reference(text: str, source: str) -> ReferenceTable:
    """A table {"tokens_per_s": {"1": 12.0, ...}}. Raises DataError."""
    try:
        row: Any = parse_json(text)
        REFERENCE.check(row, source, DataError, "give tokens of a second alone, by nodes")
        rates = {int(n): float(rate) for n, rate in row["tokens_per_s"].items()}
        if not rates or min(rates) < 1 or not all(0 < rate < inf for rate in rates.values()):
            raise ValueError(rates)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            "this is no table of throughputs",
            where=source,
            remedy='write {"tokens_per_s": {"1": 12.0, "2": 24.0}}, by nodes',
        ) from None
    return ReferenceTable(rates)
