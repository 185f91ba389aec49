"""What the live page shows of one run: fed with the journal's new records, read as JSON.

`RunView.observe` costs microseconds a record. The cost of `to_json` does not grow with the journal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast.events import Evaluated, GenerationStarted, Record, StepDone
from holdfast.policy.spending import SpendMeter
from holdfast.report.history.progress import RunProgress
from holdfast.report.ledger.incidents import Incident
from holdfast.report.ledger.ordering import order_records
from holdfast.report.ledger.rankledger import RANK_CLASSES
from holdfast.wire.journal import JournalTail
from holdfast.wire.store.run_store import RunStore

PRICE_MISSING = "no node knew its price: plan.cluster needs a cluster file with usd_per_hour"
MAX_INCIDENTS = 100  # newest ones that the page lists
MAX_GHOST_POINTS = 2000  # of lost pieces of the curve; the oldest pieces are dropped
MAX_MARKS = 500  # generations whose beginning the curve shows


@dataclass(frozen=True)
class RunSource:
    """A run that the page follows."""

    name: str  # in the table of runs, and in the page's address
    place: str  # folder or address, for people
    store: RunStore
    total_steps: int
    is_trainer_gone: Callable[[], bool]  # of a run whose end is in no record
    first_weights: str = "initial weights"


@dataclass
class RunView:
    """The state of a run for the page. Not thread-safe: `Dashboard` holds a lock around it."""

    source: RunSource
    version: int = 0  # rises with each batch that changed something
    is_read: bool = False  # the journal was read once
    problem: str = ""  # why the newest look at the journal failed; "" if it did not
    is_interrupted: bool = False  # no trainer is at work, and no record says why
    tokens: float = 0.0  # of all steps, those done again included
    tokens_again: float = 0.0  # of steps that were done before
    meter: SpendMeter = field(default_factory=SpendMeter)
    epoch: int = 0  # rises when points of the curve change, and not only grow
    ghosts: list[list[tuple[int, float]]] = field(default_factory=list)  # lost pieces of the curve
    marks: list[tuple[int, int, int, str]] = field(default_factory=list)
    """(step, generation, nodes, reason) of each membership."""
    validations: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    _highest: int = 0  # newest step ever done

    def __post_init__(self) -> None:
        self.progress = RunProgress(
            self.source.total_steps, first_weights=self.source.first_weights
        )
        self._tail = JournalTail(self.source.store)

    @property
    def state(self) -> str:
        """The state in one word or a few."""
        if self.problem or not self.is_read:
            return "unreadable" if self.problem else "reading"
        return "interrupted" if self.is_interrupted else self.progress.state

    @property
    def is_over(self) -> bool:
        return self.progress.is_over or self.is_interrupted

    def read_new(self) -> list[Record]:
        """Return the journal's new records in the order in which they happened. Raises what the
        run store raises."""
        return order_records(self._tail.read_new())

    def observe(self, records: Iterable[Record]) -> None:
        """Take new records, in the order of `read_new`."""
        for record in records:
            self._take(record)
        self.version += 1
        self.is_interrupted = False

    def _take(self, record: Record) -> None:
        event, progress = record.event, self.progress
        if isinstance(event, GenerationStarted):
            self._cut(record.generation, event)
        points = len(progress.curve)
        progress.observe(record)
        if len(progress.curve) < points:  # every other point was dropped
            self.epoch += 1
        self.meter.observe(record)
        if isinstance(event, StepDone):
            self.tokens += event.tokens
            if event.step <= self._highest:
                self.tokens_again += event.tokens
            self._highest = max(self._highest, event.step)
        elif isinstance(event, Evaluated):
            self.validations = [p for p in self.validations if p[0] != event.step]
            self.validations.append((event.step, event.loss))

    def _cut(self, generation: int, event: GenerationStarted) -> None:
        """Keep what a new membership does again as a ghost, and mark its beginning."""
        lost = [point for point in self.progress.curve if point[0] > event.step]
        if lost:
            self.epoch += 1
            self.ghosts.append(lost)
            self.validations = [p for p in self.validations if p[0] <= event.step]
            while sum(map(len, self.ghosts)) > MAX_GHOST_POINTS and len(self.ghosts) > 1:
                del self.ghosts[0]
        nodes = len(set(event.topology.get("nodes", ())))
        self.marks.append((event.step, generation, nodes, event.reason))
        del self.marks[:-MAX_MARKS]

    def row(self) -> dict[str, Any]:
        """Return the run's line of the table of runs."""
        progress = self.progress
        return {
            "name": self.source.name,
            "state": self.state,
            "problem": self.problem,
            "step": progress.step,
            "total_steps": progress.total_steps,
            "loss": _number(progress.loss),
            "tokens_per_second": progress.tokens_per_second,
            "unit": progress.unit,
            "goodput": progress.ledger.goodput_running,
            "nodes": sum(progress.nodes.values()),
            "incidents": sum(not each.is_planned for each in progress.book.incidents),
            "eta_s": None if self.is_over else progress.eta_s,
            **self._cost(),
        }

    def to_json(self) -> dict[str, Any]:
        """Return everything but the curve's points; no value is NaN or infinite."""
        progress, ledger = self.progress, self.progress.ledger
        fleet = {k: v for k, v in progress.ranks.times().fleet_totals().items() if v > 0}
        incidents = progress.book.incidents
        return self.row() | {
            "run": progress.run or self.source.name,
            "place": self.source.place,
            "generation": progress.generation,
            "workers": len(progress.workers),
            "wall_s": ledger.wall,
            "running_s": ledger.running,
            "fleet_s": sum(fleet.values()),
            "classes": [(name, seconds, RANK_CLASSES[name]) for name, seconds in fleet.items()],
            "node_list": self._node_list(),
            "incident_list": [_incident(each) for each in incidents[: -MAX_INCIDENTS - 1 : -1]],
            "lines": [(line.at, line.text, line.mood) for line in reversed(progress.lines)],
            "marks": self.marks,
            "validations": [(step, _number(loss)) for step, loss in self.validations],
            "checkpoint": progress.checkpoint and progress.checkpoint[0].step,
        }

    def curve(self, epoch: int, count: int) -> dict[str, Any]:
        """Return the points that a page lacks which has `count` points of `epoch`."""
        is_new = epoch != self.epoch
        points = self.progress.curve[0 if is_new else count :]
        found: dict[str, Any] = {"points": [(step, _number(loss)) for step, loss in points]}
        if is_new:
            ghosts = [[(step, _number(loss)) for step, loss in ghost] for ghost in self.ghosts]
            found |= {"reset": True, "ghosts": ghosts}
        return found

    def _node_list(self) -> list[tuple[str, str]]:
        """Return each node that ever took part, and its state: in, spare, lost or out."""
        progress = self.progress
        return [
            (name, "in" if there else "spare" if name in progress.spares else self._absence(name))
            for name, there in progress.nodes.items()
        ]

    def _absence(self, name: str) -> str:
        loss = self.progress.losses.get(name)
        return f"lost: {loss[1].partition(chr(10))[0]}" if loss else "out"

    def _cost(self) -> dict[str, Any]:
        spent = self.meter.spent()
        has_price = spent.unpriced_hours < spent.node_hours
        return {
            "tokens": self.tokens - self.tokens_again,
            "tokens_again": self.tokens_again,
            "node_hours": spent.node_hours,
            "unpriced_hours": spent.unpriced_hours,
            "usd": spent.usd if has_price else None,
            "price_missing": "" if has_price else PRICE_MISSING,
        }


def _incident(one: Incident) -> dict[str, Any]:
    return {
        "at_s": one.began,
        "title": one.title,
        "planned": one.is_planned,
        "seconds": one.seconds,
        "stood_still_s": one.stood_still_s,
        "steps_lost": one.steps_lost,
        "step": one.reached,
        "phases": list(one.phases.items()),
    }


def _number(value: float) -> float | None:
    """Return a number that JSON has; None for NaN and infinities."""
    return value if math.isfinite(value) else None
