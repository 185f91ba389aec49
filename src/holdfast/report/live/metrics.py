"""Prometheus metrics, derived from the same records as everything else.

Their names, units, labels and meanings are those of `live/catalogue.py`. Steps carry no label,
because one series a step would be too many: the pair (generation, step) is two gauges. A step that
is repeated after a restart counts as replayed, so the sums over a resumed run are those of one
continuous run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase

from holdfast.config.run import RunConfig
from holdfast.elastic.agent.health import STALLED_AFTER_TIMEOUTS
from holdfast.events import (
    NOT_HEARD,
    BatchFed,
    CheckpointCaptured,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSkipped,
    CheckpointUploaded,
    Evaluated,
    Event,
    GenerationStarted,
    MemoryUsed,
    NonFinite,
    NoticeReceived,
    NoticesUnheard,
    PeerFailed,
    Record,
    RequestsRefused,
    RunFailed,
    RunFinished,
    RunStarted,
    RunStopped,
    SnapshotKept,
    SparesChanged,
    StateDiffers,
    StepDone,
    UploadFailed,
    WorkerLost,
    WorkerPaced,
)
from holdfast.machine.device_readings import DeviceReading, read_devices
from holdfast.policy.spending import SpendMeter
from holdfast.report.ledger.incidents import IncidentBook
from holdfast.report.ledger.nodetimes import dollars_by_class
from holdfast.report.ledger.ordering import order_records
from holdfast.report.ledger.rankledger import RankLedger
from holdfast.report.ledger.transfers import TransferSum, add_transfers
from holdfast.report.live.catalogue import CATALOGUE, PREFIX, RUN_LABEL, RUN_STATES, MetricSpec

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_BYTES = tuple(float(10**power) for power in range(5, 14))
_PEERS, _DISK, _BUCKET = "1", "2", "3"  # tiers: peers' memory; a folder on a disk; a bucket
_PHASES = {
    "compute": "forward_backward",
    "reduce": "comm",
    "apply": "optimizer",
    "capture": "checkpoint_block",
}


_FATES: dict[type[Event], tuple[str, str]] = {
    CheckpointCommitted: (_DISK, "ok"),
    CheckpointFailed: (_DISK, "failed"),
    CheckpointSkipped: (_DISK, "skipped"),
    CheckpointRejected: (_DISK, "corrupt"),
    SnapshotKept: (_PEERS, "ok"),
    PeerFailed: (_PEERS, "failed"),
    CheckpointUploaded: (_BUCKET, "ok"),
    UploadFailed: (_BUCKET, "failed"),
}
"""Kind of event -> tier and result of a checkpoint."""


_LOSS_WINDOW = 20  # steps over whose mean a loss is compared
_PACE_WINDOW = 64  # steps over which the pace is measured
_ENDS: dict[type[Event], str] = {
    RunFinished: "finished",
    RunStopped: "stopped",
    RunFailed: "failed",
}
_KINDS: dict[str, type[MetricWrapperBase]] = {"gauge": Gauge, "counter": Counter}


@dataclass(frozen=True)
class RunFacts:
    """What the run file says and no record does. 0: not known."""

    steps: int = 0  # that the run is to do
    workers: int = 0  # that the run file asks for
    progress_limit_s: float = 0.0  # age of the newest step of a run that is stuck
    epoch_samples: int = 0  # of one pass over the data

    @staticmethod
    def of(config: RunConfig) -> RunFacts:
        """Return what a run's configuration says."""
        return RunFacts(
            config.train.steps,
            config.layout.workers,
            STALLED_AFTER_TIMEOUTS * config.cluster.progress_seconds,
            config.task.samples,
        )


class RunMetrics:
    """Observer of records; `render()` is what `/metrics` answers.

    info: labels of `holdfast_run_info`, such as model, git, dataset.
    flops_per_token: by convention; with `peak_flops` (of all devices) gives utilisation.
    """

    def __init__(
        self,
        run_id: str,
        info: dict[str, str] | None = None,
        *,
        flops_per_token: dict[str, float] | None = None,
        peak_flops: float | None = None,
        facts: RunFacts | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._run_id, self._facts = run_id, facts or RunFacts()
        self._flops = dict(flops_per_token or {}) if peak_flops else {}
        self._peak = peak_flops or 1.0
        self._lock = threading.Lock()
        self._ranks, self._meter = RankLedger(), SpendMeter()
        self._ledger = self._ranks.time
        self._book = IncidentBook()
        self._highest = 0  # newest step ever done
        self._transfers: dict[str, TransferSum] = {}  # by kind of state
        self._committed = 0  # newest committed step
        self._at_risk: list[tuple[int, float]] = []  # steps since the last commit, their seconds
        self._members: frozenset[str] = frozenset()  # names of its nodes
        self._losses: deque[float] = deque(maxlen=_LOSS_WINDOW)
        self._best = float("inf")  # smallest mean of `_losses`
        self._interval = 0.0  # longest training between two commits
        self._pace: deque[tuple[float, int]] = deque(maxlen=_PACE_WINDOW)  # times, steps
        self._slow: set[tuple[str, int]] = set()  # nodes and processes of slow workers
        names, words = (RUN_LABEL, *(info or {})), (info or {}).values()
        about = CATALOGUE["run_info"].meaning
        described = Gauge(f"{PREFIX}run_info", about, names, registry=self.registry)
        described.labels(run_id, *words).set(1)
        self._metrics = {
            name: self._make(spec)
            for name, spec in CATALOGUE.items()
            if spec.source == "run" and name != "run_info"
            if self._flops or name != "mfu_ratio"
        }
        for name, value in {
            "target_steps": self._facts.steps,
            "target_world_size": self._facts.workers,
            "progress_limit_seconds": self._facts.progress_limit_s,
        }.items():
            if value:
                self._set(name, value)

    def _make(self, spec: MetricSpec) -> MetricWrapperBase:
        """Return a metric. A counter whose labels have known values begins at 0 for each. (A rate
        does not see the first increase of a series that was not there.)"""
        names = (RUN_LABEL, *spec.labels)
        if spec.kind == "histogram":
            buckets = _BYTES if spec.unit == "bytes" else _SECONDS
            return Histogram(
                spec.full_name, spec.meaning, names, buckets=buckets, registry=self.registry
            )
        made = _KINDS[spec.kind](spec.full_name, spec.meaning, names, registry=self.registry)
        if spec.kind == "counter":
            for values in product(*spec.labels.values()):
                made.labels(self._run_id, *values)
        return made

    def observe(self, record: Record) -> None:
        with self._lock:
            self._ranks.observe(record)
            self._meter.observe(record)
            before = self._book.current
            ended = self._book.observe(record, self._ledger.wall)
            if ended is not None:
                self._count("recoveries", 1, "ok")
                for phase, seconds in ended.phases.items():
                    self._observe("recovery_duration_seconds", seconds, phase)
            elif before is not None and self._book.current not in (None, before):
                first = self._book.current is not None and self._book.current.began != before.began
                self._count("recoveries", int(first), "failed")
            self._take(record)

    def replay(self, records: Iterable[Record]) -> None:
        """Take the records of older sessions, so that totals and curves continue from them."""
        for record in order_records(records):
            self.observe(record)

    def newest_steps(self) -> tuple[int, int]:
        """Return the newest step, and the newest committed one."""
        with self._lock:
            return self._highest, self._committed

    def set_agents(self, answering: int) -> None:
        """Say how many agents answer. An agent itself cannot know it, and has no such metric."""
        with self._lock:
            if "agents_answering" not in self._metrics:
                self._metrics["agents_answering"] = self._make(CATALOGUE["agents_answering"])
            self._set("agents_answering", answering)

    def refresh(self) -> CollectorRegistry:
        """Bring the sums up to date; return the registry with all samples."""
        with self._lock:
            for name, seconds in self._ledger.totals().items():
                self._set("goodput_seconds", seconds, name)
            self._set("goodput_ratio", self._ledger.goodput, "run")
            self._set("work_at_risk_seconds", sum(seconds for _, seconds in self._at_risk))
            dollars = dollars_by_class(self._ranks, self._meter.stays)
            for name, value in (dollars or {}).items():
                self._set("cost_usd", value, name)
            return self.registry

    def render(self) -> bytes:
        """Prometheus text format, version 0.0.4."""
        return generate_latest(self.refresh())

    # --- one record -------------------------------------------------------------------------
    def _take(self, record: Record) -> None:
        event = record.event
        if isinstance(event, StepDone | Evaluated | RunStarted | GenerationStarted):
            self._set("progress_timestamp_seconds", record.time)
        if isinstance(event, StepDone):
            self._step(record, event)
        elif isinstance(event, Evaluated):
            self._set("val_loss", event.loss)
            if event.bits_per_byte is not None:
                self._set("val_bits_per_byte", event.bits_per_byte)
        elif isinstance(event, BatchFed):
            stops = [entry["stop"] for entry in event.entries]
            if stops:
                self._set("data_position", max(stops))
                if self._facts.epoch_samples:
                    self._set("epochs", max(stops) / self._facts.epoch_samples)
        elif isinstance(event, RunStarted):
            self._set("session_start_timestamp_seconds", record.time)
            self._slow = set()
            self._count("requeues", int(event.resumed))
            self._enter("running")
            self._set("recovering", 1)
        elif isinstance(event, GenerationStarted):
            self._generation(record, event)
        elif type(event) in _ENDS:
            self._enter(_ENDS[type(event)])
        elif isinstance(event, NonFinite):
            self._count("nonfinite_steps", 1)
        elif isinstance(event, MemoryUsed):
            self._transfers = add_transfers(self._transfers, event)
            self._set("memory_bytes", event.bytes, str(event.rank))
            for kind, (nbytes, _, _) in event.transfers.items():
                self._count("transfer_bytes", nbytes, kind)
                self._set("transfers_hidden_ratio", self._transfers[kind].hidden, kind)
        elif isinstance(event, RequestsRefused):
            for listener, reasons in event.counts.items():
                for reason, number in reasons.items():
                    self._count("refused_requests", number, listener, reason)
        elif not self._trouble(event):
            self._checkpoint(record)

    def _trouble(self, event: Event) -> bool:
        """Take a loss, a notice or a judgement; return False for any other event."""
        match event:
            case WorkerLost():
                known = CATALOGUE["worker_losses"].labels["noticed_by"]
                how = event.noticed_by if event.noticed_by in known else "stuck"
                if how == "heartbeat" and not event.cause.startswith(NOT_HEARD):
                    how = "node"  # its agent has ended, or the node was left out
                self._count("worker_losses", 1, how)
                self._set("recovering", 1)
                lost = {(event.node, event.pid)} if event.pid else set()
                self._slow = {
                    worker
                    for worker in self._slow - lost
                    if event.pid or worker[0] != event.node  # a lost node has no process number
                }
                self._judge()
            case NoticeReceived():
                self._count("preemptions", max(1, len(event.nodes)))
            case NoticesUnheard():
                self._count("notices_unanswered", 1)
            case StateDiffers():
                self._count("state_differences", 1)
            case WorkerPaced():
                is_slow = event.pace in ("slow", "standby", "out")
                (self._slow.add if is_slow else self._slow.discard)((event.node, event.pid))
                self._judge()
            case SparesChanged():  # a slow worker that waits may have left
                there = self._members.union(event.nodes)
                self._slow = {worker for worker in self._slow if worker[0] in there}
                self._judge()
            case _:
                return False
        return True

    def _judge(self) -> None:
        self._set("slow_workers", len(self._slow))

    def _enter(self, state: str) -> None:
        for name in RUN_STATES:
            self._set("run_state", int(name == state), name)

    def _generation(self, record: Record, event: GenerationStarted) -> None:
        nodes = event.topology.get("nodes", ())
        self._members = frozenset(nodes)
        self._set("generation", record.generation)
        self._set("world_size", len(nodes))
        self._judge()
        self._set("recovering", 1)
        self._count("membership_changes", 1, event.reason)
        self._at_risk = [pair for pair in self._at_risk if pair[0] <= event.step]
        self._pace.clear()

    def _step(self, record: Record, event: StepDone) -> None:
        again = event.step <= self._highest
        self._highest = max(self._highest, event.step)
        self._count("tokens", event.tokens, "replayed" if again else "unique")
        self._at_risk.append((event.step, event.seconds))
        self._set("step", event.step)
        self._set("recovering", 0)
        self._set("last_step_timestamp_seconds", record.time)
        self._set("loss", event.loss)
        self._losses.append(event.loss)
        self._set("loss_recent", fmean(self._losses))
        if len(self._losses) == _LOSS_WINDOW:
            self._best = min(self._best, fmean(self._losses))
            self._set("loss_best", self._best)
        self._set("grad_norm", event.grad_norm)
        self._set("learning_rate", event.learning_rate)
        self._pace.append((record.time, event.step))
        (begun, first), (now, last) = self._pace[0], self._pace[-1]
        if self._facts.steps and last > first and now > begun:
            pace = (now - begun) / (last - first)
            self._set("remaining_seconds", max(0, self._facts.steps - event.step) * pace)
        for name, value in event.metrics.items():
            self._set("objective_mean", value, name)
        self._observe("step_seconds", event.seconds)
        named = {_PHASES.get(name, name): seconds for name, seconds in event.phases.items()}
        named["other"] = max(0.0, event.seconds - sum(event.phases.values()))
        for phase, seconds in named.items():
            self._observe("step_duration_seconds", seconds, phase)
        for kind, both in event.exchanges.items():
            for part, seconds in zip(("under_way", "exposed"), both, strict=True):
                self._observe("exchange_duration_seconds", seconds, kind, part)
        if event.seconds > 0:
            speed = event.tokens / event.seconds
            self._set("tokens_per_second", speed)
            for convention, flops in self._flops.items():
                self._set("mfu_ratio", speed * flops / self._peak, convention)

    def _checkpoint(self, record: Record) -> None:
        event = record.event
        if fate := _FATES.get(type(event)):
            self._count("checkpoints", 1, *fate)
        if isinstance(event, CheckpointCaptured) and event.rank == 0:
            self._observe("checkpoint_blocking_seconds", event.seconds)
        elif isinstance(event, CheckpointCommitted):
            saved = sum(seconds for step, seconds in self._at_risk if step <= event.step)
            self._interval = max(self._interval, saved)
            self._set("checkpoint_interval_seconds", self._interval)
            self._committed = max(self._committed, event.step)
            self._observe("checkpoint_duration_seconds", event.seconds, _DISK, "commit")
            self._observe("checkpoint_bytes", event.bytes, _DISK)
            self._set("checkpoint_last_success_timestamp_seconds", record.time)
            self._at_risk = [pair for pair in self._at_risk if pair[0] > event.step]
        elif isinstance(event, SnapshotKept):
            self._count("checkpoints", event.skipped, _PEERS, "skipped")
            self._observe("checkpoint_duration_seconds", event.seconds, _PEERS, "copy")
            self._observe("checkpoint_bytes", event.bytes, _PEERS)
        elif isinstance(event, CheckpointUploaded):
            self._observe("checkpoint_duration_seconds", event.seconds, _BUCKET, "copy")
            self._observe("checkpoint_bytes", event.bytes, _BUCKET)

    def _set(self, gauge: str, value: float, *labels: str) -> None:
        self._metrics[gauge].labels(self._run_id, *labels).set(value)  # type: ignore[attr-defined]

    def _count(self, counter: str, amount: float, *labels: str) -> None:
        self._metrics[counter].labels(self._run_id, *labels).inc(amount)  # type: ignore[attr-defined]

    def _observe(self, histogram: str, value: float, *labels: str) -> None:
        self._metrics[histogram].labels(self._run_id, *labels).observe(value)  # type: ignore[attr-defined]


READ_EVERY_S = 10.0
"""Least time between two calls of the tool: each costs some 0.1 s of a processor."""

_READINGS = {
    "device_utilisation_ratio": "utilisation",
    "device_memory_used_bytes": "memory_used_bytes",
    "device_memory_total_bytes": "memory_total_bytes",
    "device_power_watts": "power_w",
    "device_temperature_celsius": "temperature_c",
    "device_uncorrected_memory_errors": "uncorrected_errors",
}
"""Metric -> field of `DeviceReading`."""


class DeviceMetrics:
    """`render()` gives the newest numbers at once, and has them read again where they are old."""

    def __init__(
        self,
        run_id: str,
        read: Callable[[], Sequence[DeviceReading]] = read_devices,
        *,
        read_every_s: float = READ_EVERY_S,
    ) -> None:
        self._run_id, self._read, self._read_every_s = run_id, read, read_every_s
        self._readings: Sequence[DeviceReading] = ()
        self._read_at: float | None = None  # seconds since the epoch
        self._due = 0.0  # of the monotonic clock
        self._thread: threading.Thread | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """Prometheus text format. The first answer has no devices: their numbers are being read."""
        busy = self._thread is not None and self._thread.is_alive()
        if not busy and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._read_every_s
            self._thread = threading.Thread(target=self._refresh, name="devices", daemon=True)
            self._thread.start()
        return generate_latest(self._registry)

    def _refresh(self) -> None:
        readings = self._read()
        if readings:
            self._readings, self._read_at = readings, time.time()

    def collect(self) -> Iterator[Metric]:
        """The gauges of every device; the registry calls it."""
        if self._read_at is None:
            return
        for name, field in _READINGS.items():
            spec = CATALOGUE[name]
            gauge = GaugeMetricFamily(
                spec.full_name, spec.meaning, labels=(RUN_LABEL, *spec.labels)
            )
            for reading in self._readings:
                value = getattr(reading, field)
                if value is not None:
                    gauge.add_metric((self._run_id, reading.index, reading.name), value)
            if gauge.samples:
                yield gauge
        spec = CATALOGUE["device_read_timestamp_seconds"]
        when = GaugeMetricFamily(spec.full_name, spec.meaning, labels=(RUN_LABEL,))
        when.add_metric((self._run_id,), self._read_at)
        yield when
