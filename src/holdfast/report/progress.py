"""The state of a run for a live view; fed with records, free of any drawing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.events import (
    CheckpointCommitted,
    Evaluated,
    Event,
    GenerationStarted,
    Record,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    SaveInterval,
    StepDone,
    WorkerHeld,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
)
from holdfast.report.formatting import duration, plural, size
from holdfast.report.history import notice
from holdfast.report.incidents import RUNGS, Incident, IncidentBook, Loss
from holdfast.report.timeledger import TimeLedger

_POINTS = 4096  # of the curve; beyond it every other one is dropped
_WINDOW = 64  # steps over which the pace is measured


@dataclass(frozen=True)
class Happening:
    """A line for people: when, in seconds of running time, and what; `mood` is good, bad, plain."""

    at: float
    text: str
    mood: str = "plain"


@dataclass
class Progress:
    """`observe` costs microseconds. Read the fields; nothing here draws or prints."""

    total_steps: int
    run: str = ""
    state: str = "starting"  # starting, training, recovering, finished, stopped, failed
    generation: int = 0
    step: int = 0
    loss: float = float("nan")
    learning_rate: float = float("nan")
    tokens_per_second: float = 0.0
    workers: dict[int, str] = field(default_factory=dict)  # rank -> starting, training, lost, held
    nodes: dict[str, bool] = field(default_factory=dict)  # all that ever took part -> does it now
    rung: int = -1  # of the recovery ladder that the generation took
    validation: Evaluated | None = None
    checkpoint: tuple[CheckpointCommitted, float] | None = None  # and when, in running time
    happenings: deque[Happening] = field(default_factory=lambda: deque(maxlen=50))
    curve: list[tuple[int, float]] = field(default_factory=list)  # (step, loss) that count
    ledger: TimeLedger = field(default_factory=TimeLedger)
    book: IncidentBook = field(default_factory=IncidentBook)
    _stride: int = 1
    _pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "stopped", "failed")

    @property
    def eta(self) -> float | None:
        """Seconds to the last step at the present pace, validations included; None if unknown."""
        if len(self._pace) < 2:
            return None
        (begun, first), (now, last) = self._pace[0], self._pace[-1]
        if last <= first or now <= begun:
            return None
        return (self.total_steps - self.step) * (now - begun) / (last - first)

    def observe(self, record: Record) -> list[Happening]:
        """Take one record; return what to report to the user."""
        self.ledger.observe(record)
        elapsed = self.ledger.running
        ended = self.book.observe(record, self.ledger.wall)
        told = [] if ended is None else [Happening(elapsed, _over(ended), "good")]
        if isinstance(record.event, StepDone):
            self._step(record.event, record.time)
        elif (found := self._take(record, record.event, elapsed)) is not None:
            told.append(found)
        self.happenings.extend(told)
        return told

    def _step(self, event: StepDone, at: float) -> None:
        if self.book.current is None and not self.ended:  # not a late report of a lost generation
            self.state = "training"
            self.workers = dict.fromkeys(self.workers, "training")
        self.step, self.loss, self.learning_rate = event.step, event.loss, event.learning_rate
        self._pace.append((at, event.step))
        if event.seconds > 0:
            rate = event.tokens / event.seconds
            old = self.tokens_per_second
            self.tokens_per_second = rate if old == 0 else 0.9 * old + 0.1 * rate
        if event.step % self._stride == 0:
            self.curve.append((event.step, event.loss))
        if len(self.curve) > _POINTS:
            self._stride *= 2
            self.curve = [point for point in self.curve if point[0] % self._stride == 0]

    def _take(self, record: Record, event: Event, elapsed: float) -> Happening | None:
        match event:
            case RunStarted():
                self.run, self.state = event.run, "starting"
            case GenerationStarted():
                return self._generation(record.generation, event, elapsed)
            case WorkerStarted():
                self.workers[event.rank] = "starting"
            case WorkerReady():
                self.workers[event.rank] = "ready"
            case WorkerLost():
                if self.ended or record.generation < 1:
                    return None  # a new session found no worker of the last one
                if record.generation >= self.generation:
                    self.workers[event.rank] = "lost"
                    self.state = "recovering"
                loss = Loss(event.rank, event.cause, event.noticed_by, event.node)
                return Happening(elapsed, f"{loss.words}: {event.cause}", "bad")
            case WorkerHeld():
                if record.generation == self.generation and event.rank in self.workers:
                    self.workers[event.rank] = "held"
            case Evaluated():
                self.validation = event
                bits = f"{event.bits_per_byte:.3f} bits per byte"
                return Happening(elapsed, f"validation after step {event.step}: {bits}")
            case CheckpointCommitted():
                self.checkpoint = (event, elapsed)
                text = f"checkpoint of step {event.step} committed ({size(event.bytes)})"
                return Happening(elapsed, text)
            case SaveInterval():
                return Happening(elapsed, event.reason)
            case RunFinished():
                self.state = "finished"
                return Happening(elapsed, f"finished after step {event.step}", "good")
            case RunStopped():
                self.state = "stopped"
                return Happening(elapsed, f"stopped after step {event.step} ({event.reason})")
            case _:
                if isinstance(event, RunFailed):
                    self.state = "failed"
                text = notice(event)
                return Happening(elapsed, text, "bad") if text else None
        return None

    def _generation(self, number: int, event: GenerationStarted, elapsed: float) -> Happening:
        again = self.generation > 0
        self.generation, self.step = number, event.step
        ranks = event.topology.get("nodes", ())
        self.workers = dict.fromkeys(range(len(ranks)), "starting")
        before = {name for name, there in self.nodes.items() if there}
        self.nodes |= dict.fromkeys(self.nodes, False) | dict.fromkeys(ranks, True)
        self.rung = event.rung
        self.curve = [point for point in self.curve if point[0] <= event.step]
        self._pace.clear()
        self.state = "recovering" if self.book.current is not None else "starting"
        origin = f"from the state after step {event.step}" if event.step else "from initial weights"
        text = f"generation {number}, {plural(len(self.workers), 'worker')}, {origin}"
        text += _changes(before, set(ranks)) if before else _together(ranks)
        return Happening(elapsed, text, "plain" if again or not event.step else "good")


def _over(ended: Incident) -> str:
    """Return the cost of an incident."""
    seconds, still = ended.seconds or 0.0, ended.stood_still
    lost = plural(ended.steps_lost, "step")
    cost = duration(seconds if still is None else still)
    if ended.rung < 0:
        return f"recovered in {duration(seconds)}, {lost} done again"
    if ended.planned:
        return f"{ended.title}: training stood still for {cost}"
    how = f"rung {ended.rung} ({RUNGS[ended.rung]})"
    return f"recovered by {how}, stood still for {cost}, {lost} done again"


def _together(ranks: Iterable[str]) -> str:
    """On which nodes a run begins, where it has several."""
    names = list(dict.fromkeys(ranks))
    return f", on {', '.join(names)}" if len(names) > 1 else ""


def _changes(before: set[str], now: set[str]) -> str:
    """Return the nodes that came and went."""
    came, gone = ", ".join(sorted(now - before)), ", ".join(sorted(before - now))
    return (f"; {gone} left out" if gone else "") + (f"; {came} taken in" if came else "")
