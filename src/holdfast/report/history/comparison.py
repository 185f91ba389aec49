"""Two runs side by side, each real or simulated: totals, use of time, recoveries, decisions.

All of it derives from the two journals, by the same code for both. Dollars and energy are those of
a simulation, which knows prices and power; a real run's journal has neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from math import ceil
from typing import Any

from holdfast.report.history.history import History, StepPoint

INTERVAL_TOLERANCE = 0.01
"""Two intervals between saves that differ by a smaller share are the same decision."""


@dataclass(frozen=True)
class Spread:
    """A distribution: quantiles are values that occurred (nearest rank)."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    worst: float = 0.0

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if not values:
            return Spread()
        ordered = sorted(values)

        def quantile(share: float) -> float:
            return ordered[ceil(share * len(ordered)) - 1]

        mean = sum(ordered) / len(ordered)
        return Spread(len(ordered), mean, quantile(0.5), quantile(0.95), ordered[-1])


@dataclass(frozen=True)
class RunFacts:
    """One run of a comparison.

    place: its folder. seconds: of the wall time by label (`timeledger.CLASSES`). steps, tokens:
    that count. tokens_again: trained and lost. lost_steps: of all interruptions. lost_step_s: the
    time that these steps had taken. interruptions: what broke, with a recovery or without one.
    changes: planned. by_rung: interruptions by rung of the recovery ladder; -1: no recovery.
    rpo_steps, rpo_s: lost by an interruption. rto_s: from the loss to the first new step. Of a
    real run it begins when an agent notices the loss. stall_s: from the last step before to the
    first one after, which means the same in both kinds of run.
    intervals_s: between saves by tier, the last decision. node_hours: of nodes with work. usd,
    kwh, co2_kg: None where they are not known.
    """

    place: str
    run: str
    is_simulated: bool
    state: str
    wall_s: float
    seconds: Mapping[str, float]
    steps: int
    tokens: float
    tokens_again: float
    goodput: float
    goodput_running: float
    interruptions: int
    changes: int
    by_rung: Mapping[int, int]
    lost_steps: int
    rpo_steps: Spread
    rpo_s: Spread
    rto_s: Spread
    stall_s: Spread
    intervals_s: Mapping[int, float]
    node_hours: float
    usd: float | None = None
    kwh: float | None = None
    co2_kg: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Kept tokens a second of wall time."""
        return self.tokens / self.wall_s if self.wall_s else 0.0

    def numbers(self) -> dict[str, float | None]:
        """Every number by a dotted name, for differences."""
        plain = "wall_s steps tokens tokens_per_s tokens_again goodput goodput_running"
        plain += " interruptions changes lost_steps node_hours usd kwh co2_kg"
        found: dict[str, float | None] = {name: getattr(self, name) for name in plain.split()}
        for name in ("rpo_steps", "rpo_s", "rto_s", "stall_s"):
            spread: Spread = getattr(self, name)
            found |= {f"{name}.{key}": value for key, value in asdict(spread).items()}
        found |= {f"seconds.{label}": value for label, value in self.seconds.items()}
        found |= {f"by_rung.{rung}": number for rung, number in self.by_rung.items()}
        found |= {f"intervals_s.{tier}": value for tier, value in self.intervals_s.items()}
        return found


@dataclass(frozen=True)
class Decision:
    """A generation, as the run decided it. elapsed: seconds of the run. nodes: that it has. rung:
    of the recovery ladder, -1 without one. lost_steps: done before, and to be done again."""

    elapsed: float
    generation: int
    step: int
    reason: str
    nodes: int
    rung: int
    lost_steps: int

    @property
    def choice(self) -> tuple[int, int, int]:
        """What two runs are compared by. Times, names of nodes and words are left out."""
        return self.rung, self.nodes, self.lost_steps


@dataclass(frozen=True)
class FirstDifference:
    """index: of the decision, from 1. one, other: None where a run has no such decision."""

    index: int
    one: Decision | None
    other: Decision | None


@dataclass(frozen=True)
class RunComparison:
    """first: None if all decisions agree. decisions: how many each run has. tiers: whose last
    interval between saves differs, or is missing in one of them."""

    one: RunFacts
    other: RunFacts
    first: FirstDifference | None
    decisions: tuple[int, int]
    tiers: tuple[int, ...] = field(default=())

    def differences(self) -> dict[str, float]:
        """The second run's numbers less the first's, where both are known. A rung or a label that
        one of them lacks is 0 there."""
        one, other = self.one.numbers(), self.other.numbers()
        found = {}
        for name in (*one, *(name for name in other if name not in one)):
            counts = name.startswith(("by_rung.", "seconds."))
            a, b = one.get(name, 0 if counts else None), other.get(name, 0 if counts else None)
            if a is not None and b is not None:
                found[name] = b - a
        return found

    def to_json(self) -> dict[str, Any]:
        runs = [asdict(run) | {"tokens_per_s": run.tokens_per_s} for run in (self.one, self.other)]
        return {
            "runs": runs,
            "differences": self.differences(),
            "decisions": list(self.decisions),
            "first_differing_decision": asdict(self.first) if self.first else None,
            "tiers_with_other_intervals": list(self.tiers),
        }


def compare_runs(one: RunFacts, other: RunFacts, a: History, b: History) -> RunComparison:
    """Compare two runs by their facts and histories."""
    mine, theirs = decisions_of(a), decisions_of(b)

    def differs(tier: int) -> bool:
        a, b = one.intervals_s.get(tier), other.intervals_s.get(tier)
        return a is None or b is None or abs(a - b) > INTERVAL_TOLERANCE * max(a, b)

    return RunComparison(
        one,
        other,
        first_difference(mine, theirs),
        (len(mine), len(theirs)),
        tuple(tier for tier in sorted({*one.intervals_s, *other.intervals_s}) if differs(tier)),
    )


def facts_of(history: History, place: str, simulated: Mapping[str, Any] | None) -> RunFacts:
    """simulated: the ledger of a simulated run, which may be empty; None: the run is real."""
    ledger = simulated or {}
    broke = history.breaks
    ends = [each.elapsed for each in history.generations[1:]] + [history.wall]
    node_hours = 0.0  # of each generation's nodes, until the next one or its session's end
    for each, end in zip(history.generations, ends, strict=True):
        end = min([s.until for s in history.sessions if s.until > each.elapsed] + [end])
        node_hours += len(each.nodes) * (end - each.elapsed) / 3600
    return RunFacts(
        place,
        history.run,
        simulated is not None,
        history.state,
        history.wall,
        history.time,
        history.last_step,
        history.tokens,
        history.recomputed_tokens,
        history.goodput,
        history.goodput_running,
        len(broke),
        len(history.changes),
        dict(sorted(Counter(i.rung for i in broke).items())),
        sum(i.steps_lost for i in broke),
        Spread.of([float(i.steps_lost) for i in broke]),
        Spread.of(_lost_seconds(history)),
        Spread.of([i.seconds for i in broke if i.seconds is not None]),
        Spread.of([s for s in (i.stood_still_s for i in broke) if s is not None]),
        {each.tier: each.seconds for each in history.cadence},
        node_hours,
        ledger.get("usd") or None,
        ledger.get("kwh") or None,
        ledger.get("co2_kg") or None,
    )


def decisions_of(history: History) -> list[Decision]:
    """The generations of a run in their order."""
    found, reached = list[Decision](), 0
    for each in history.generations:
        lost = max(0, reached - each.start_step)
        reached = max(each.last, each.start_step)
        rung, nodes = history.rungs.get(each.number, -1), len(each.nodes)
        found.append(
            Decision(each.elapsed, each.number, each.start_step, each.reason, nodes, rung, lost)
        )
    return found


def first_difference(one: Sequence[Decision], other: Sequence[Decision]) -> FirstDifference | None:
    """The first place at which the decisions differ, or at which one run has no more."""
    for index, (a, b) in enumerate(zip_longest(one, other), start=1):
        if a is None or b is None or a.choice != b.choice:
            return FirstDifference(index, a, b)
    return None


def _lost_seconds(history: History) -> list[float]:
    """Seconds that the lost steps of each interruption had taken."""
    left = [point for piece in history.rework for point in piece]
    found = []
    for each in history.breaks:
        first, mine, rest = each.reached - each.steps_lost, list[StepPoint](), list[StepPoint]()
        for point in left:
            is_mine = point.generation <= each.generation and point.step > first
            (mine if is_mine else rest).append(point)
        left = rest
        found.append(sum(point.seconds for point in mine))
    return found
