"""The story of a run, read back from its journal.

`read(store)` gives one continuous curve (the steps that still count), what was done twice, what
broke and for how long, and where every second went. It derives from the journal and from nothing
else, so it can be made at any time, also while the run continues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from holdfast.checkpoint.restore.catalog import list_commits, step_of
from holdfast.core.data.data_ledger import uncovered_ranges
from holdfast.core.data.learner_fates import FATES, count_fates, read_fates
from holdfast.core.data.lineage import split_effective
from holdfast.core.expert_load import ExpertsRouted
from holdfast.events import (
    CheckpointCaptured,
    CheckpointCommitted,
    CheckpointRemoved,
    CompletionsShown,
    Evaluated,
    GenerationStarted,
    MemoryUsed,
    OuterRound,
    Record,
    RoleExited,
    RunBranched,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    SaveInterval,
    StepDone,
    TaskEvaluated,
)
from holdfast.report.ledger.exchanges import ExchangeBook, ExchangeSeconds
from holdfast.report.ledger.experts import ExpertLoad, RankLoads
from holdfast.report.ledger.incidents import Incident, IncidentBook
from holdfast.report.ledger.metric_advice import MetricSummary, summarise_metrics
from holdfast.report.ledger.notices import notice_text
from holdfast.report.ledger.ordering import order_records
from holdfast.report.ledger.planned import Morph, PlanBook, PlanComparison
from holdfast.report.ledger.rankledger import RankLedger, RankTimes
from holdfast.report.ledger.transfers import TransferSum, add_transfers
from holdfast.wire import journal
from holdfast.wire.store.run_store import RunStore
from holdfast.wire.term import newest_term


@dataclass(frozen=True)
class StepPoint:
    """One step done. `elapsed` is the run's time when the agent heard of it."""

    step: int
    generation: int
    elapsed: float
    loss: float  # nats per token
    tokens: float
    total_tokens: float  # of this step and all before it that count
    grad_norm: float
    learning_rate: float
    seconds: float
    unit: str = "tokens"  # that `tokens` counts
    metrics: Mapping[str, float] = field(default_factory=dict)  # means of an objective's sums

    @property
    def loss_unit(self) -> str:
        """What the loss is a mean of."""
        return "nats per token" if self.unit == "tokens" else f"per {self.unit.removesuffix('s')}"


@dataclass(frozen=True)
class EvaluationPoint:
    step: int
    generation: int
    elapsed: float
    loss: float
    bits_per_byte: float | None
    tokens: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)  # as of `StepPoint`


@dataclass(frozen=True)
class MemoryPoint:
    """A sample of one worker's memory. device_bytes: 0 for a worker without a device."""

    step: int
    generation: int
    rank: int
    bytes: int
    device_bytes: int

    @property
    def shown_bytes(self) -> int:
        """Bytes on the device, which is what runs out there; of the process without one."""
        return self.device_bytes or self.bytes


@dataclass(frozen=True)
class Generation:
    """A membership: `first` is the first step it computed, `last` the last (0: none)."""

    number: int
    reason: str
    elapsed: float
    start_step: int
    restored_from: str | None
    workers: int
    first: int = 0
    last: int = 0
    nodes: tuple[str, ...] = ()
    live: bool = False  # it continued with what processes held


@dataclass(frozen=True)
class RunSession:
    """From one start of `holdfast train` to its end; `ended` says how."""

    began: float
    until: float
    began_at: float  # seconds since the epoch, on that session's clock
    ended: str  # running, finished, stopped, failed, lost
    reason: str = ""


@dataclass(frozen=True)
class CheckpointRow:
    """A committed checkpoint. `blocked`: seconds that training stalled for it."""

    step: int
    generation: int
    elapsed: float
    key: str
    bytes: int
    seconds: float
    blocked: float
    restored: int = 0  # generations that began from it
    removed: bool = False


@dataclass(frozen=True)
class RunNotice:
    """Something a person should know that is not an incident."""

    elapsed: float
    generation: int
    kind: str  # the event's kind
    text: str


@dataclass(frozen=True)
class History:
    """Everything that the views show. All `elapsed` are seconds since the first RunStarted."""

    run: str
    config_hash: str
    dataset_version: str
    state: str  # empty, running, finished, stopped, failed, lost
    steps: tuple[StepPoint, ...]
    rework: tuple[tuple[StepPoint, ...], ...]  # one piece of lost curve per broken generation
    evaluations: tuple[EvaluationPoint, ...]
    generations: tuple[Generation, ...]
    sessions: tuple[RunSession, ...]
    incidents: tuple[Incident, ...]
    checkpoints: tuple[CheckpointRow, ...]
    notices: tuple[RunNotice, ...]
    time: dict[str, float]  # seconds by class of timeledger.CLASSES
    wall: float
    cadence: tuple[SaveInterval, ...] = ()  # the newest decision of each tier
    branch: RunBranched | None = None  # which run, and which step of it, this one continues
    holes: tuple[str, ...] = ()  # sentences: what the journal should have and does not tell
    memory: tuple[MemoryPoint, ...] = ()  # of all workers, in the order of the journal
    transfers: Mapping[str, TransferSum] = field(default_factory=dict)  # by kind of state
    experts: Mapping[int, list[int]] = field(default_factory=dict)  # block -> choices by expert
    dropped_choices: int = 0  # of these, for lack of capacity
    loads_with_copies: Mapping[int, RankLoads] = field(default_factory=dict)  # by block
    rungs: Mapping[int, int] = field(default_factory=dict)  # by generation; -1: no recovery
    plan: PlanComparison | None = None  # and what was measured, of the newest generation
    morphs: tuple[Morph, ...] = ()  # changes of layout, in order
    exchanges: tuple[ExchangeSeconds, ...] = ()  # of a step of rank 0, by kind
    completions: tuple[CompletionsShown, ...] = ()  # examples, by step
    tasks: tuple[TaskEvaluated, ...] = ()  # by task and step
    roles_lost: tuple[RoleExited, ...] = ()  # processes of actors and scorers
    ranks: RankTimes = field(default_factory=RankTimes)
    fates: Mapping[str, int] = field(default_factory=dict)  # tokens by fate, in outer.mode free

    @property
    def lost_tokens(self) -> int:
        """Tokens that lost actors had drawn and not handed in: those that are known."""
        return sum(each.tokens or 0 for each in self.roles_lost)

    @property
    def metrics(self) -> tuple[MetricSummary, ...]:
        """The metrics of the objective over the steps that count."""
        return summarise_metrics([point.metrics for point in self.steps])

    @property
    def breaks(self) -> tuple[Incident, ...]:
        """The incidents in which something broke."""
        return tuple(i for i in self.incidents if not i.is_planned)

    @property
    def changes(self) -> tuple[Incident, ...]:
        """The planned changes of nodes and workers."""
        return tuple(i for i in self.incidents if i.is_planned)

    @property
    def predictions(self) -> dict[str, int]:
        """How many planned moves predictions led to, and how many of their alarms were false."""
        kinds = Counter(notice.kind for notice in self.notices)
        return {"moves": kinds["predicted_move"], "false_alarms": kinds["prediction_failed"]}

    @property
    def last_step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    @property
    def tokens(self) -> float:
        """Tokens of the steps that count."""
        return self.steps[-1].total_tokens if self.steps else 0

    @property
    def unit(self) -> str:
        """What `tokens` counts."""
        return self.steps[-1].unit if self.steps else "tokens"

    @property
    def recomputed_tokens(self) -> float:
        """Tokens that were computed a second time: the visible cost of failures."""
        return sum(point.tokens for piece in self.rework for point in piece)

    @property
    def goodput(self) -> float:
        """Useful training time / wall time."""
        return self.time["productive"] / self.wall if self.wall > 0 else 0.0

    @property
    def goodput_running(self) -> float:
        """The same, over the time in which something ran."""
        up = self.wall - self.time["stopped"]
        return self.time["productive"] / up if up > 0 else 0.0

    @property
    def goodput_fleet(self) -> float:
        """Useful rank-seconds / all rank-seconds, of places without a worker too."""
        totals = self.ranks.fleet_totals()
        return totals["productive"] / (sum(totals.values()) or 1.0)

    @property
    def best_evaluation(self) -> EvaluationPoint | None:
        return min(self.evaluations, key=lambda e: e.loss, default=None)

    def as_interrupted(self) -> History:
        """The same run once it is known that no trainer is at work any more."""
        *before, last = self.sessions
        sessions = (*before, replace(last, ended="lost"))
        return replace(self, state="lost", sessions=sessions)

    @property
    def tokens_per_second(self) -> float:
        """Median over the steps that count, so that a pause does not show."""
        rates = sorted(p.tokens / p.seconds for p in self.steps if p.seconds > 0)
        return rates[len(rates) // 2] if rates else 0.0


def read_history(store: RunStore) -> History:
    """The history of the run in `store`: what can be read of its journal."""
    contents = journal.read_contents(store)
    history = build_history(contents.records)
    holes = [contents.unreadable_sentence(), _missing_steps_sentence(history)]
    commits = list_commits(store)
    begun = history.last_step or history.branch
    if commits and not begun and newest_term(store)[0]:  # a copy has no journal
        holes.append(
            f"the journal tells of no step, though there is a checkpoint of step "
            f"{step_of(commits[0])}: the journal was removed, or is another run's"
        )
    return replace(history, holes=tuple(hole for hole in holes if hole))


def _missing_steps_sentence(history: History) -> str:
    """Return which steps have no record, though later ones have; "" if there are none."""
    known = [(point.step, point.step + 1) for point in history.steps]
    if not known:
        return ""
    missing = uncovered_ranges(known, known[0][0], known[-1][1])
    if not missing:
        return ""
    named = [f"{low}" if high == low + 1 else f"{low} to {high - 1}" for low, high in missing[:3]]
    more = f" and {len(missing) - 3} more gaps" if len(missing) > 3 else ""
    return (
        f"the journal has no line of step {', '.join(named)}{more}. The run store took no lines "
        "then, and the agent that kept them was lost or has not written them yet"
    )


def build_history(records: Iterable[Record]) -> History:
    """The history that these records tell, in whatever order they come."""
    ordered = order_records(records)
    effective, _ = split_effective(ordered)
    counted = {id(record) for record in effective}
    builder = _HistoryBuilder()
    for record in ordered:
        builder.observe(record, id(record) in counted)
    return builder.history()


def rung_prices(history: History) -> dict[int, float]:
    """Return by rung of the ladder the most seconds beyond a step until training continued.

    They contain the bytes that were moved and the communicators of this run. A rung that the run
    never took is not in it.
    """
    step_s = {point.step: point.seconds for point in history.steps}
    prices: dict[int, float] = {}
    for incident in history.incidents:
        waited = incident.stood_still_s if incident.is_planned else incident.seconds
        if incident.rung < 0 or waited is None or incident.restart_step is None:
            continue
        price = max(0.0, waited - step_s.get(incident.restart_step + 1, 0.0))
        prices[incident.rung] = max(price, prices.get(incident.rung, 0.0))
    return prices


@dataclass
class _HistoryBuilder:
    ranks: RankLedger = field(default_factory=RankLedger)
    exchanges: ExchangeBook = field(default_factory=ExchangeBook)
    book: IncidentBook = field(default_factory=IncidentBook)
    started: RunStarted | None = None
    steps: dict[int, StepPoint] = field(default_factory=dict)
    rework: dict[int, list[StepPoint]] = field(default_factory=dict)
    evaluations: dict[int, EvaluationPoint] = field(default_factory=dict)
    generations: dict[int, Generation] = field(default_factory=dict)
    rungs: dict[int, int] = field(default_factory=dict)
    sessions: list[RunSession] = field(default_factory=list)
    checkpoints: dict[str, CheckpointRow] = field(default_factory=dict)
    blocked: dict[tuple[int, int], float] = field(default_factory=dict)
    notices: list[RunNotice] = field(default_factory=list)
    cadence: dict[int, SaveInterval] = field(default_factory=dict)
    branch: RunBranched | None = None
    memory: list[MemoryPoint] = field(default_factory=list)
    transfers: dict[str, TransferSum] = field(default_factory=dict)
    experts: ExpertLoad = field(default_factory=ExpertLoad)
    plan: PlanBook = field(default_factory=PlanBook)
    completions: dict[int, CompletionsShown] = field(default_factory=dict)  # by step
    tasks: dict[tuple[str, int], TaskEvaluated] = field(default_factory=dict)
    roles_lost: list[RoleExited] = field(default_factory=list)
    fates: dict[int, dict[str, int]] = field(default_factory=dict)  # by round

    def observe(self, record: Record, counts: bool) -> None:
        before = self.ranks.time.wall
        self.ranks.observe(record)
        elapsed = self.ranks.time.wall
        self.book.observe(record, elapsed)
        self.plan.observe(record)
        event = record.event
        if isinstance(event, RunStarted):
            self.started = event
            if self.sessions and self.sessions[-1].ended == "running":
                self._end_session(before, "lost", "")
            self.sessions.append(RunSession(elapsed, elapsed, record.time, "running"))
        elif isinstance(event, RunFinished):
            self._end_session(elapsed, "finished", event.script_error)
        elif isinstance(event, RunStopped):
            self._end_session(elapsed, "stopped", event.reason)
        elif isinstance(event, RunFailed):
            self._end_session(elapsed, "failed", event.reason)
        elif isinstance(event, GenerationStarted):
            self._generation(record.generation, event, elapsed)
        elif isinstance(event, StepDone):
            self._step(record.generation, event, elapsed, counts)
        elif isinstance(event, MemoryUsed):
            self.transfers = add_transfers(self.transfers, event)
            self.memory.append(
                MemoryPoint(
                    event.step, record.generation, event.rank, event.bytes, event.device_bytes
                )
            )
        elif isinstance(event, ExpertsRouted):
            self.experts.add(event)
        elif isinstance(event, Evaluated):
            if counts:
                self.evaluations[event.step] = EvaluationPoint(
                    event.step,
                    record.generation,
                    elapsed,
                    event.loss,
                    event.bits_per_byte,
                    event.tokens,
                    event.seconds,
                    event.metrics,
                )
        else:
            self._checkpoint(record, elapsed)
            if isinstance(event, RunBranched):
                self.branch = event
            if isinstance(event, CompletionsShown):
                self.completions[event.step] = event
            if isinstance(event, TaskEvaluated) and counts:
                self.tasks[event.task, event.step] = event
            if isinstance(event, RoleExited):
                self.roles_lost.append(event)
            if isinstance(event, OuterRound) and event.fates and counts:
                self.fates[event.step] = count_fates(read_fates(event.fates))
            if isinstance(event, SaveInterval):
                self.cadence[event.tier] = event
            text = notice_text(event)
            if text:
                self.notices.append(RunNotice(elapsed, record.generation, event.kind, text))

    def _tokens_by_fate(self) -> dict[str, int]:
        rounds = self.fates.values()
        return {fate: sum(tokens[fate] for tokens in rounds) for fate in FATES if rounds}

    def _end_session(self, elapsed: float, ended: str, reason: str) -> None:
        if self.sessions:
            last = self.sessions[-1]
            self.sessions[-1] = RunSession(last.began, elapsed, last.began_at, ended, reason)

    def _generation(self, number: int, event: GenerationStarted, elapsed: float) -> None:
        key = event.restored_from
        ranks = event.topology.get("nodes", ())
        self.generations[number] = Generation(
            number,
            event.reason,
            elapsed,
            event.step,
            key,
            len(ranks),
            nodes=tuple(dict.fromkeys(ranks)),
            live=event.came_from is not None,
        )
        self.rungs[number] = event.rung
        if key in self.checkpoints:
            row = self.checkpoints[key]
            self.checkpoints[key] = replace(row, restored=row.restored + 1)

    def _step(self, generation: int, event: StepDone, elapsed: float, counts: bool) -> None:
        point = StepPoint(
            event.step,
            generation,
            elapsed,
            event.loss,
            event.tokens,
            0,
            event.grad_norm,
            event.learning_rate,
            event.seconds,
            event.unit,
            event.metrics,
        )
        if counts:
            self.exchanges.add(event)
            self.steps[event.step] = point
        else:
            self.rework.setdefault(generation, []).append(point)
        if generation in self.generations:
            g = self.generations[generation]
            first = g.first or event.step
            self.generations[generation] = replace(g, first=first, last=max(g.last, event.step))

    def _checkpoint(self, record: Record, elapsed: float) -> None:
        event, place = record.event, (record.generation, record.event.step)
        if isinstance(event, CheckpointCaptured):
            self.blocked[place] = max(self.blocked.get(place, 0.0), event.seconds)
        elif isinstance(event, CheckpointCommitted):
            self.checkpoints[event.key] = CheckpointRow(
                event.step,
                record.generation,
                elapsed,
                event.key,
                event.bytes,
                event.seconds,
                blocked=0.0,  # see `_rows`
            )
        elif isinstance(event, CheckpointRemoved) and event.key in self.checkpoints:
            self.checkpoints[event.key] = replace(self.checkpoints[event.key], removed=True)

    def _rows(self) -> tuple[CheckpointRow, ...]:
        """Return the rows; the time that a save blocked training may be reported after it."""
        blocked = self.blocked
        rows = (
            replace(row, blocked=blocked.get((row.generation, row.step), 0.0))
            for row in self.checkpoints.values()
        )
        return tuple(sorted(rows, key=lambda row: (row.step, row.generation)))

    def history(self) -> History:
        wall = self.ranks.time.wall
        if self.sessions and self.sessions[-1].ended == "running":
            self._end_session(wall, "running", "")
        steps = list[StepPoint]()
        total: float = 0
        for step in sorted(self.steps):
            total += self.steps[step].tokens
            steps.append(replace(self.steps[step], total_tokens=total))
        last = self.sessions[-1].ended if self.sessions else "empty"
        started = self.started or RunStarted("", "", "")
        return History(
            started.run,
            started.config_hash,
            started.dataset_version,
            last,
            tuple(steps),
            tuple(tuple(sorted(piece, key=lambda p: p.step)) for piece in self.rework.values()),
            tuple(self.evaluations[s] for s in sorted(self.evaluations)),
            tuple(self.generations[g] for g in sorted(self.generations)),
            tuple(self.sessions),
            tuple(self.book.incidents),
            self._rows(),
            tuple(self.notices),
            self.ranks.time.totals(),
            wall,
            tuple(self.cadence[tier] for tier in sorted(self.cadence)),
            branch=self.branch,
            memory=tuple(self.memory),
            transfers=self.transfers,
            experts=self.experts.by_block,
            dropped_choices=self.experts.dropped,
            loads_with_copies=self.experts.with_copies,
            rungs=self.rungs,
            plan=self.plan.comparison(),
            exchanges=self.exchanges.rows(),
            morphs=self.plan.morphs(),
            completions=tuple(self.completions[s] for s in sorted(self.completions)),
            tasks=tuple(self.tasks[key] for key in sorted(self.tasks)),
            roles_lost=tuple(self.roles_lost),
            ranks=self.ranks.times(),
            fates=self._tokens_by_fate(),
        )
