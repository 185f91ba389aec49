"""Prometheus metrics, derived from the same records as everything else.

Names begin with `holdfast_`, units are base units. Steps carry no label, because one series a step
would be too many: the pair (generation, step) is two gauges. A step that is repeated after a
restart counts as replayed, so the sums over a resumed run are those of one continuous run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from holdfast.events import (
    BatchFed,
    CheckpointCaptured,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSkipped,
    CheckpointUploaded,
    Evaluated,
    GenerationStarted,
    NonFinite,
    PeerFailed,
    Record,
    RequestsRefused,
    RunStarted,
    SnapshotKept,
    StepDone,
    UploadFailed,
)
from holdfast.report.ledger.incidents import IncidentBook
from holdfast.report.ledger.ordering import order_records
from holdfast.report.ledger.timeledger import TimeLedger

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_BYTES = tuple(float(10**power) for power in range(5, 14))
_PEERS, _DISK, _BUCKET = "1", "2", "3"  # tiers: peers' memory; a folder on a disk; a bucket
_PHASES = {
    "compute": "forward_backward",
    "reduce": "comm",
    "apply": "optimizer",
    "capture": "checkpoint_block",
}


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
    ) -> None:
        self._registry = CollectorRegistry()
        self._run_id = run_id
        self._flops = dict(flops_per_token or {}) if peak_flops else {}
        self._peak = peak_flops or 1.0
        self._lock = threading.Lock()
        self._ledger = TimeLedger()
        self._book = IncidentBook()
        self._highest = 0  # newest step ever done
        self._at_risk: list[tuple[int, float]] = []  # steps since the last commit, their seconds
        self._create_gauges(info or {})
        self._create_counters()
        self._create_histograms()

    def observe(self, record: Record) -> None:
        with self._lock:
            self._ledger.observe(record)
            ended = self._book.observe(record, self._ledger.wall)
            if ended is not None:
                for phase, seconds in ended.phases.items():
                    self._observe(self._recovery, seconds, phase)
            self._take(record)

    def replay(self, records: Iterable[Record]) -> None:
        """Take the records of older sessions, so that totals and curves continue from them."""
        for record in order_records(records):
            self.observe(record)

    def render(self) -> bytes:
        """Prometheus text format, version 0.0.4."""
        with self._lock:
            for name, seconds in self._ledger.totals().items():
                self._set(self._seconds, seconds, name)
            self._set(self._goodput, self._ledger.goodput, "run")
            self._set(self._risk, sum(seconds for _, seconds in self._at_risk))
            return generate_latest(self._registry)

    # --- one record -------------------------------------------------------------------------
    def _take(self, record: Record) -> None:
        event = record.event
        if isinstance(event, StepDone):
            self._step(record, event)
        elif isinstance(event, Evaluated):
            self._set(self._val_loss, event.loss)
            if event.bits_per_byte is not None:
                self._set(self._val_bits, event.bits_per_byte)
        elif isinstance(event, BatchFed):
            stops = [entry["stop"] for entry in event.entries]
            if stops:
                self._set(self._position, max(stops))
        elif isinstance(event, RunStarted):
            self._set(self._started, record.time)
        elif isinstance(event, GenerationStarted):
            self._set(self._generation, record.generation)
            self._set(self._world, len(event.topology.get("nodes", ())))
            self._count(self._membership, 1, event.reason)
            self._at_risk = [pair for pair in self._at_risk if pair[0] <= event.step]
        elif isinstance(event, NonFinite):
            self._count(self._nonfinite, 1)
        elif isinstance(event, RequestsRefused):
            for listener, reasons in event.counts.items():
                for reason, number in reasons.items():
                    self._count(self._refused, number, listener, reason)
        else:
            self._checkpoint(record)

    def _step(self, record: Record, event: StepDone) -> None:
        again = event.step <= self._highest
        self._highest = max(self._highest, event.step)
        self._count(self._tokens, event.tokens, "replayed" if again else "unique")
        self._at_risk.append((event.step, event.seconds))
        values = (
            (self._step_gauge, event.step),
            (self._last_step, record.time),
            (self._loss, event.loss),
            (self._norm, event.grad_norm),
            (self._rate, event.learning_rate),
        )
        for gauge, value in values:
            self._set(gauge, value)
        named = {_PHASES.get(name, name): seconds for name, seconds in event.phases.items()}
        named["other"] = max(0.0, event.seconds - sum(event.phases.values()))
        for phase, seconds in named.items():
            self._observe(self._duration, seconds, phase)
        if event.seconds > 0:
            speed = event.tokens / event.seconds
            self._set(self._speed, speed)
            for convention, flops in self._flops.items():
                self._set(self._mfu, speed * flops / self._peak, convention)

    def _checkpoint(self, record: Record) -> None:
        event = record.event
        if isinstance(event, CheckpointCaptured) and event.rank == 0:
            self._observe(self._blocking, event.seconds)
        elif isinstance(event, CheckpointCommitted):
            self._count(self._checkpoints, 1, _DISK, "ok")
            self._observe(self._saving, event.seconds, _DISK, "commit")
            self._observe(self._size, event.bytes, _DISK)
            self._set(self._last_commit, record.time)
            self._at_risk = [pair for pair in self._at_risk if pair[0] > event.step]
        elif isinstance(event, CheckpointFailed):
            self._count(self._checkpoints, 1, _DISK, "failed")
        elif isinstance(event, CheckpointSkipped):
            self._count(self._checkpoints, 1, _DISK, "skipped")
        elif isinstance(event, CheckpointRejected):
            self._count(self._checkpoints, 1, _DISK, "corrupt")
        elif isinstance(event, SnapshotKept):
            self._count(self._checkpoints, 1, _PEERS, "ok")
            self._count(self._checkpoints, event.skipped, _PEERS, "skipped")
            self._observe(self._saving, event.seconds, _PEERS, "copy")
            self._observe(self._size, event.bytes, _PEERS)
        elif isinstance(event, PeerFailed):
            self._count(self._checkpoints, 1, _PEERS, "failed")
        elif isinstance(event, CheckpointUploaded):
            self._count(self._checkpoints, 1, _BUCKET, "ok")
            self._observe(self._saving, event.seconds, _BUCKET, "copy")
            self._observe(self._size, event.bytes, _BUCKET)
        elif isinstance(event, UploadFailed):
            self._count(self._checkpoints, 1, _BUCKET, "failed")

    # --- the registry -----------------------------------------------------------------------
    def _create_gauges(self, info: dict[str, str]) -> None:
        gauge = self._gauge
        described = gauge("run_info", "Always 1; its labels describe the run", *info)
        self._set(described, 1, *info.values())
        self._step_gauge = gauge("step", "Newest step that is applied everywhere")
        self._generation = gauge("generation", "Number of the membership that trains")
        self._last_step = gauge("last_step_timestamp_seconds", "When the newest step was reported")
        self._started = gauge("session_start_timestamp_seconds", "When this session began")
        self._world = gauge("world_size", "Workers of the newest generation")
        self._loss = gauge("loss", "Training loss of the newest step, nats per token")
        self._val_loss = gauge("val_loss", "Newest validation loss, nats per token")
        self._val_bits = gauge("val_bits_per_byte", "Newest validation loss, bits per byte of text")
        self._norm = gauge("grad_norm", "Global gradient norm of the newest step, before clipping")
        self._rate = gauge("learning_rate", "Learning rate of the newest step")
        self._speed = gauge("tokens_per_second", "Tokens of the newest step over its seconds")
        self._position = gauge("data_position", "Samples of the global order that were consumed")
        if self._flops:
            self._mfu = gauge(
                "mfu_ratio",
                "Model FLOP utilisation, by the convention named: full "
                "counts all attention, causal halves it, task is what a task says",
                "convention",
            )
        self._goodput = gauge("goodput_ratio", "Useful training time over wall time", "window")
        # A gauge, not a counter: steps that must be done again move from productive to rework.
        self._seconds = gauge(
            "goodput_seconds", "Wall time by class; the classes add up to it", "class"
        )
        self._risk = gauge("work_at_risk_seconds", "Training since the last committed checkpoint")
        self._last_commit = gauge(
            "checkpoint_last_success_timestamp_seconds", "When the newest checkpoint was committed"
        )

    def _create_counters(self) -> None:
        counter = self._counter
        self._tokens = counter(
            "tokens", "Tokens trained on; replayed is the visible cost of failures", "kind"
        )
        self._nonfinite = counter("nonfinite_steps", "Steps stopped by a NaN or an infinity")
        self._refused = counter(
            "refused_requests",
            "Requests that a listener refused; told with the journal, once a minute",
            "listener",
            "reason",
        )
        self._membership = counter("membership_changes", "Generations begun", "reason")
        self._checkpoints = counter("checkpoints", "Checkpoints by fate", "tier", "result")

    def _create_histograms(self) -> None:
        histogram = self._buckets
        self._duration = histogram(
            "step_duration_seconds",
            "Seconds of each step by phase; the phases add up to the step",
            _SECONDS,
            "phase",
        )
        self._recovery = histogram(
            "recovery_duration_seconds",
            "Seconds from a loss to the first new step, by part",
            _SECONDS,
            "phase",
        )
        self._blocking = histogram(
            "checkpoint_blocking_seconds", "Seconds that training was blocked", _SECONDS
        )
        self._saving = histogram(
            "checkpoint_duration_seconds",
            "Seconds from the first captured header to the commit",
            _SECONDS,
            "tier",
            "stage",
        )
        self._size = histogram("checkpoint_bytes", "Bytes of committed checkpoints", _BYTES, "tier")

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(f"holdfast_{name}", about, ("run_id", *labels), registry=self._registry)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"holdfast_{name}", about, ("run_id", *labels), registry=self._registry)

    def _buckets(self, name: str, about: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(
            f"holdfast_{name}", about, ("run_id", *labels), buckets=buckets, registry=self._registry
        )

    def _set(self, gauge: Gauge, value: float, *labels: str) -> None:
        gauge.labels(self._run_id, *labels).set(value)

    def _count(self, counter: Counter, amount: float, *labels: str) -> None:
        counter.labels(self._run_id, *labels).inc(amount)

    def _observe(self, histogram: Histogram, value: float, *labels: str) -> None:
        histogram.labels(self._run_id, *labels).observe(value)
