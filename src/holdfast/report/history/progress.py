"""The state of a run for a live view; fed with records, free of any drawing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.events import (
    AttentionChosen,
    AttentionKernel,
    BatchFed,
    CheckpointCaptured,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSkipped,
    Evaluated,
    Event,
    GenerationStarted,
    MajorityLacked,
    MemoryUsed,
    PauseBegun,
    Record,
    RoleExited,
    RoleMissing,
    RunBranched,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    SaveInterval,
    SettingIgnored,
    ShardAwaited,
    SparesChanged,
    StepDone,
    StepTraced,
    WeightsDigest,
    WorkerHeld,
    WorkerLost,
    WorkerReady,
    WorkerStarted,
)
from holdfast.report.formatting import (
    format_bytes,
    format_duration,
    format_plural,
    format_validation,
)
from holdfast.report.ledger.incidents import Incident, IncidentBook, WorkerLoss, describe_rung
from holdfast.report.ledger.notices import notice_text
from holdfast.report.ledger.rankledger import RankLedger
from holdfast.report.ledger.timeledger import TimeLedger

_UNSEEN = frozenset({BatchFed, StepTraced, MemoryUsed, WeightsDigest, CheckpointCaptured})
"""What each rank writes in steps, and a live view does not show: nearly all of a long journal."""
_MAX_CAUSE_CHARS = 200
_MAX_CURVE_POINTS = 4096  # of the curve; beyond it every other one is dropped
_PACE_WINDOW_STEPS = 64  # steps over which the pace is measured


@dataclass(frozen=True)
class ProgressLine:
    """A line for people: when, in seconds of running time, and what; `mood` is good, bad, plain."""

    at: float
    text: str
    mood: str = "plain"


@dataclass
class RunProgress:
    """`observe` costs microseconds. Read the fields; nothing here draws or prints."""

    total_steps: int
    run: str = ""
    state: str = (
        "starting"  # starting, training, recovering, waiting ..., finished, stopped, paused, failed
    )
    generation: int = 0
    step: int = 0
    loss: float = float("nan")
    learning_rate: float = float("nan")
    tokens_per_second: float = 0.0
    unit: str = "tokens"  # that it counts
    metrics: Mapping[str, float] = field(default_factory=dict)  # means of the newest step
    workers: dict[int, str] = field(default_factory=dict)  # rank -> starting, training, lost, held
    nodes: dict[str, bool] = field(default_factory=dict)  # all that ever took part -> does it now
    spares: set[str] = field(default_factory=set)  # nodes that wait for a place
    losses: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Nodes that were lost and are not back -> when, in seconds since 1970, and why."""
    rung: int = -1  # of the recovery ladder that the generation took
    validation: Evaluated | None = None
    checkpoint: tuple[CheckpointCommitted, float] | None = None  # and when, in running time
    lines: deque[ProgressLine] = field(default_factory=lambda: deque(maxlen=50))
    curve: list[tuple[int, float]] = field(default_factory=list)  # (step, loss) that count
    ranks: RankLedger = field(default_factory=RankLedger)
    book: IncidentBook = field(default_factory=IncidentBook)
    imported_from: str = ""  # folder that the run's first weights came from
    first_weights: str = "initial weights"  # what a run without imported ones begins with
    _ignored_settings: set[str] = field(default_factory=set)
    _save_problems: set[int] = field(default_factory=set)  # unsaved steps since the last commit
    _awaited: set[str] = field(default_factory=set)  # shards that a batch waits for
    _missing_roles: set[str] = field(default_factory=set)  # that a line has named
    _pauses: bool = False  # whether the stop of this session is a pause
    _kernel: str = ""  # of full attention
    _attention: str = ""  # how documents are kept apart
    _stride: int = 1
    _pace: deque[tuple[float, int]] = field(
        default_factory=lambda: deque(maxlen=_PACE_WINDOW_STEPS)
    )

    @property
    def ledger(self) -> TimeLedger:
        return self.ranks.time

    @property
    def is_over(self) -> bool:
        return self.state in ("finished", "stopped", "paused", "failed")

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the present pace, validations included; None if unknown."""
        if len(self._pace) < 2:
            return None
        (begun, first), (now, last) = self._pace[0], self._pace[-1]
        if last <= first or now <= begun:
            return None
        return (self.total_steps - self.step) * (now - begun) / (last - first)

    def observe(self, record: Record) -> list[ProgressLine]:
        """Take one record; return what to report to the user."""
        self.ranks.observe(record)
        elapsed = self.ledger.running
        ended = self.book.observe(record, self.ledger.wall)
        if type(record.event) in _UNSEEN:
            return []
        told = [] if ended is None else [ProgressLine(elapsed, _incident_cost(ended), "good")]
        if isinstance(record.event, StepDone):
            self._step(record.event, record.time)
            told += _skipped_lines(record.event, elapsed)
        elif (found := self._take(record, record.event, elapsed)) is not None:
            told.append(found)
        self.lines.extend(told)
        return told

    def _step(self, event: StepDone, at: float) -> None:
        if self.book.current is None and not self.is_over:  # not a late report of a lost generation
            self.state = "training"
            self.workers = dict.fromkeys(self.workers, "training")
        self.step, self.loss, self.learning_rate = event.step, event.loss, event.learning_rate
        self.unit, self.metrics = event.unit, event.metrics
        self._pace.append((at, event.step))
        if event.seconds > 0:
            rate = event.tokens / event.seconds
            old = self.tokens_per_second
            self.tokens_per_second = rate if old == 0 else 0.9 * old + 0.1 * rate
        if event.step % self._stride == 0:
            self.curve.append((event.step, event.loss))
        if len(self.curve) > _MAX_CURVE_POINTS:
            self._stride *= 2
            self.curve = [point for point in self.curve if point[0] % self._stride == 0]

    def _take(self, record: Record, event: Event, elapsed: float) -> ProgressLine | None:
        match event:
            case RunStarted():
                self.run, self.state, self._pauses = event.run, "starting", False
            case PauseBegun():
                self._pauses = True
            case GenerationStarted():
                return self._generation(record.generation, event, elapsed)
            case WorkerStarted():
                self.workers[event.rank] = "starting"
            case WorkerReady():
                self.workers[event.rank] = "ready"
            case WorkerLost():
                if self.is_over or record.generation < 1:
                    return None  # a new session found no worker of the last one
                if record.generation >= self.generation:
                    self.workers[event.rank] = "lost"
                    self.state = "recovering"
                if event.node:
                    self.losses[event.node] = record.time, event.cause
                loss = WorkerLoss(event.rank, event.cause, event.noticed_by, event.node)
                return ProgressLine(elapsed, f"{loss.description}: {event.cause}", "bad")
            case MajorityLacked():
                mood = "bad" if event.nodes else "good"
                self.state = "waiting for a majority" if event.nodes else "recovering"
                return ProgressLine(elapsed, notice_text(event), mood)
            case SparesChanged():
                self._take_spares(set(event.nodes))
            case WorkerHeld():
                if record.generation == self.generation and event.rank in self.workers:
                    self.workers[event.rank] = "held"
            case Evaluated():
                self.validation = event
                number = format_validation(event.loss, event.bits_per_byte)
                return ProgressLine(elapsed, f"validation after step {event.step}: {number}")
            case CheckpointCommitted():
                self.checkpoint = (event, elapsed)
                text = f"checkpoint of step {event.step} committed ({format_bytes(event.bytes)})"
                if event.place:
                    text += f" in {event.place}; the next start brings it back to the run folder"
                again = "checkpoints can be saved again: " if self._save_problems else ""
                self._save_problems.clear()
                return ProgressLine(elapsed, again + text)
            case CheckpointSkipped() | CheckpointFailed():
                # Each step has one line, whatever further ranks say of it.
                if event.step in self._save_problems:
                    return None
                self._save_problems.add(event.step)
                return ProgressLine(elapsed, notice_text(event), "bad")
            case SaveInterval():
                return ProgressLine(elapsed, event.reason)
            case AttentionChosen():
                known, self._attention = self._attention, event.way
                if known == event.way:
                    return None  # every generation reports it
                text = f"documents are kept apart by {event.way}: {event.reason}"
                return ProgressLine(elapsed, text)
            case AttentionKernel():
                last_kernel, self._kernel = self._kernel, event.kernel
                if last_kernel == event.kernel:
                    return None
                return ProgressLine(elapsed, f"attention: {event.kernel} on {event.device}")
            case RunBranched():
                return ProgressLine(elapsed, notice_text(event))
            case RunFinished():
                self.state = "finished"
                return ProgressLine(elapsed, f"finished after step {event.step}", "good")
            case RunStopped():
                self.state = "paused" if self._pauses else "stopped"
                return ProgressLine(elapsed, f"stopped after step {event.step} ({event.reason})")
            case _:
                if isinstance(event, RunFailed):
                    self.state = "failed"
                text = "" if self._is_repeated(event) else notice_text(event)
                return ProgressLine(elapsed, text, "bad") if text else None
        return None

    def _take_spares(self, spares: set[str]) -> None:
        gone = self.spares - spares
        self.nodes |= {name: self.nodes.get(name, False) for name in (*gone, *sorted(spares))}
        for name in spares:
            self.losses.pop(name, None)
        self.spares = spares

    def _is_repeated(self, event: Event) -> bool:
        """Whether another rank or an earlier generation has reported the same."""
        if isinstance(event, SettingIgnored):
            is_known = event.key in self._ignored_settings
            self._ignored_settings.add(event.key)
            return is_known
        if isinstance(event, ShardAwaited):
            if bool(event.reason) == (event.key in self._awaited):
                return True
            self._awaited ^= {event.key}
        if isinstance(event, RoleMissing):  # each trainer says so
            is_known = event.role in self._missing_roles
            self._missing_roles.add(event.role)
            return is_known
        return isinstance(event, RoleExited)  # the report has it

    def _generation(self, number: int, event: GenerationStarted, elapsed: float) -> ProgressLine:
        again = self.generation > 0
        self.generation, self.step = number, event.step
        ranks = event.topology.get("nodes", ())
        self.workers = dict.fromkeys(range(len(ranks)), "starting")
        before = {name for name, there in self.nodes.items() if there}
        self.nodes |= dict.fromkeys(self.nodes, False) | dict.fromkeys(ranks, True)
        self.spares -= set(ranks)
        for name in ranks:
            self.losses.pop(name, None)
        self.rung = event.rung
        self.curve = [point for point in self.curve if point[0] <= event.step]
        self._pace.clear()
        self.state = "recovering" if self.book.current is not None else "starting"
        origin = f"from the state after step {event.step}"
        if not event.step:
            origin = f"from {self.first_weights}"
            if event.restored_from is not None:
                origin = f"from the weights imported from {self.imported_from or 'another trainer'}"
        text = f"{format_plural(len(self.workers), 'worker')} {origin} (generation {number})"
        text += _describe_node_changes(before, set(ranks)) if before else _describe_nodes(ranks)
        text += f"; cause: {_shorten(event.cause)}" if event.cause else ""
        return ProgressLine(elapsed, text, "plain" if again or not event.step else "good")


def _shorten(cause: str) -> str:
    """Return a cause on one line. The rest, which may come from a library, is in the logs."""
    line = cause.strip().partition("\n")[0]
    return line if len(line) <= _MAX_CAUSE_CHARS else f"{line[:_MAX_CAUSE_CHARS]}..."


def _skipped_lines(event: StepDone, elapsed: float) -> list[ProgressLine]:
    """Say that a step changed nothing, and why."""
    if not event.skipped_at:
        return []
    text = f"step {event.step} skipped: a gradient overflowed at loss scale {event.skipped_at:,.0f}"
    return [ProgressLine(elapsed, text)]


def _incident_cost(ended: Incident) -> str:
    seconds, still = ended.seconds or 0.0, ended.stood_still_s
    lost = format_plural(ended.steps_lost, "step")
    cost = format_duration(seconds if still is None else still)
    if ended.rung < 0:
        return f"recovered in {format_duration(seconds)}, {lost} done again"
    if ended.is_planned:
        return f"{ended.title}: training stood still for {cost}"
    return f"recovered: {describe_rung(ended.rung)}, stood still for {cost}, {lost} done again"


def _describe_nodes(ranks: Iterable[str]) -> str:
    """On which nodes a run begins, where it has several."""
    names = list(dict.fromkeys(ranks))
    return f", on {', '.join(names)}" if len(names) > 1 else ""


def _describe_node_changes(before: set[str], now: set[str]) -> str:
    came, gone = ", ".join(sorted(now - before)), ", ".join(sorted(before - now))
    return (f"; left out: {gone}" if gone else "") + (f"; taken in: {came}" if came else "")
