"""Prometheus metrics, derived from the same records as everything else.

Names begin with `holdfast_`, units are base units. Steps carry no label, because one series a step
would be too many: the pair (generation, step) is two gauges. A step that is repeated after a
restart counts as replayed, so the sums over a resumed run are those of one continuous run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from holdfast.events import (
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
    PeerFailed,
    Record,
    RequestsRefused,
    RunStarted,
    SnapshotKept,
    StepDone,
    UploadFailed,
)
from holdfast.machine.device_readings import DeviceReading, read_devices
from holdfast.report.ledger.incidents import IncidentBook
from holdfast.report.ledger.ordering import order_records
from holdfast.report.ledger.timeledger import TimeLedger
from holdfast.report.ledger.transfers import TransferSum, add_transfers

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_BYTES = tuple(float(10**power) for power in range(5, 14))
_PEERS, _DISK, _BUCKET = "1", "2", "3"  # tiers: peers' memory; a folder on a disk; a bucket
_PHASES = {
    "compute": "forward_backward",
    "reduce": "comm",
    "apply": "optimizer",
    "capture": "checkpoint_block",
}


_RUN_GAUGES: dict[str, tuple[str, ...]] = {
    "step": ("Newest step that is applied everywhere",),
    "generation": ("Number of the membership that trains",),
    "last_step_timestamp_seconds": ("When the newest step was reported",),
    "session_start_timestamp_seconds": ("When this session began",),
    "world_size": ("Workers of the newest generation",),
    "loss": ("Training loss of the newest step, nats per token",),
    "val_loss": ("Newest validation loss, nats per token",),
    "val_bits_per_byte": ("Newest validation loss, bits per byte of text",),
    "objective_mean": ("Mean of the newest step, as docs/guide/post-training.md names it", "name"),
    "grad_norm": ("Global gradient norm of the newest step, before clipping",),
    "learning_rate": ("Learning rate of the newest step",),
    "tokens_per_second": ("Tokens of the newest step over its seconds",),
    "data_position": ("Samples of the global order that were consumed",),
    "mfu_ratio": (
        "Model FLOP utilisation, by the convention named: full "
        "counts all attention, causal halves it, task is what a task says",
        "convention",
    ),
    "transfers_hidden_ratio": (
        "Share of the seconds of copies to other places in which no worker waited, so far",
        "state",
    ),
    "goodput_ratio": ("Useful training time over wall time", "window"),
    # A gauge, not a counter: steps that must be done again move from productive to rework.
    "goodput_seconds": ("Wall time by class; the classes add up to it", "class"),
    "work_at_risk_seconds": ("Training since the last committed checkpoint",),
    "checkpoint_last_success_timestamp_seconds": ("When the newest checkpoint was committed",),
}
_COUNTERS: dict[str, tuple[str, ...]] = {
    "tokens": ("Tokens trained on; replayed is the visible cost of failures", "kind"),
    "nonfinite_steps": ("Steps stopped by a NaN or an infinity",),
    "refused_requests": (
        "Requests that a listener refused; told with the journal, once a minute",
        "listener",
        "reason",
    ),
    "membership_changes": ("Generations begun", "reason"),
    "checkpoints": ("Checkpoints by fate", "tier", "result"),
}
_HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "step_duration_seconds": (
        "Seconds of each step by phase; the phases add up to the step",
        "phase",
    ),
    "exchange_duration_seconds": (
        "Seconds of each step in which an exchange was under way, and exposed ones; CPUs only",
        "kind",
        "part",
    ),
    "recovery_duration_seconds": ("Seconds from a loss to the first new step, by part", "phase"),
    "checkpoint_blocking_seconds": ("Seconds that training was blocked",),
    "checkpoint_duration_seconds": (
        "Seconds from the first captured header to the commit",
        "tier",
        "stage",
    ),
    "checkpoint_bytes": ("Bytes of committed checkpoints", "tier"),
}
"""Name after `holdfast_` -> its help text, and its labels after `run_id`."""
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
        self._transfers: dict[str, TransferSum] = {}  # by kind of state
        self._committed = 0  # newest committed step
        self._at_risk: list[tuple[int, float]] = []  # steps since the last commit, their seconds
        about = "Always 1; its labels describe the run"
        names, words = ("run_id", *(info or {})), (info or {}).values()
        described = Gauge("holdfast_run_info", about, names, registry=self._registry)
        described.labels(run_id, *words).set(1)
        self._gauges = {
            name: Gauge(f"holdfast_{name}", about, ("run_id", *labels), registry=self._registry)
            for name, (about, *labels) in _RUN_GAUGES.items()
            if self._flops or name != "mfu_ratio"
        }
        self._counters = {
            name: Counter(f"holdfast_{name}", about, ("run_id", *labels), registry=self._registry)
            for name, (about, *labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(
                f"holdfast_{name}",
                about,
                ("run_id", *labels),
                buckets=_BYTES if name.endswith("bytes") else _SECONDS,
                registry=self._registry,
            )
            for name, (about, *labels) in _HISTOGRAMS.items()
        }

    def observe(self, record: Record) -> None:
        with self._lock:
            self._ledger.observe(record)
            ended = self._book.observe(record, self._ledger.wall)
            if ended is not None:
                for phase, seconds in ended.phases.items():
                    self._observe("recovery_duration_seconds", seconds, phase)
            self._take(record)

    def replay(self, records: Iterable[Record]) -> None:
        """Take the records of older sessions, so that totals and curves continue from them."""
        for record in order_records(records):
            self.observe(record)

    def newest_steps(self) -> tuple[int, int]:
        """Return the newest step, and the newest committed one."""
        with self._lock:
            return self._highest, self._committed

    def render(self) -> bytes:
        """Prometheus text format, version 0.0.4."""
        with self._lock:
            for name, seconds in self._ledger.totals().items():
                self._set("goodput_seconds", seconds, name)
            self._set("goodput_ratio", self._ledger.goodput, "run")
            self._set("work_at_risk_seconds", sum(seconds for _, seconds in self._at_risk))
            return generate_latest(self._registry)

    # --- one record -------------------------------------------------------------------------
    def _take(self, record: Record) -> None:
        event = record.event
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
        elif isinstance(event, RunStarted):
            self._set("session_start_timestamp_seconds", record.time)
        elif isinstance(event, GenerationStarted):
            self._set("generation", record.generation)
            self._set("world_size", len(event.topology.get("nodes", ())))
            self._count("membership_changes", 1, event.reason)
            self._at_risk = [pair for pair in self._at_risk if pair[0] <= event.step]
        elif isinstance(event, NonFinite):
            self._count("nonfinite_steps", 1)
        elif isinstance(event, MemoryUsed):
            self._transfers = add_transfers(self._transfers, event)
            for kind in event.transfers:
                self._set("transfers_hidden_ratio", self._transfers[kind].hidden, kind)
        elif isinstance(event, RequestsRefused):
            for listener, reasons in event.counts.items():
                for reason, number in reasons.items():
                    self._count("refused_requests", number, listener, reason)
        else:
            self._checkpoint(record)

    def _step(self, record: Record, event: StepDone) -> None:
        again = event.step <= self._highest
        self._highest = max(self._highest, event.step)
        self._count("tokens", event.tokens, "replayed" if again else "unique")
        self._at_risk.append((event.step, event.seconds))
        self._set("step", event.step)
        self._set("last_step_timestamp_seconds", record.time)
        self._set("loss", event.loss)
        self._set("grad_norm", event.grad_norm)
        self._set("learning_rate", event.learning_rate)
        for name, value in event.metrics.items():
            self._set("objective_mean", value, name)
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
        self._gauges[gauge].labels(self._run_id, *labels).set(value)

    def _count(self, counter: str, amount: float, *labels: str) -> None:
        self._counters[counter].labels(self._run_id, *labels).inc(amount)

    def _observe(self, histogram: str, value: float, *labels: str) -> None:
        self._histograms[histogram].labels(self._run_id, *labels).observe(value)


READ_EVERY_S = 10.0
"""Least time between two calls of the tool: each costs some 0.1 s of a processor."""

_GAUGES = (
    ("utilisation_ratio", "utilisation", "Share of the last sample in which a kernel ran"),
    ("memory_used_bytes", "memory_used_bytes", "Memory in use, of all processes"),
    ("memory_total_bytes", "memory_total_bytes", "Memory that the device has"),
    ("power_watts", "power_w", "Power that the device draws"),
    ("temperature_celsius", "temperature_c", "Temperature of the device"),
    (
        "uncorrected_memory_errors",
        "uncorrected_errors",
        "Uncorrected ECC errors since the driver was loaded",
    ),
)


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
        for title, field, about in _GAUGES:
            gauge = GaugeMetricFamily(
                f"holdfast_device_{title}", about, labels=("run_id", "device", "name")
            )
            for reading in self._readings:
                value = getattr(reading, field)
                if value is not None:
                    gauge.add_metric((self._run_id, reading.index, reading.name), value)
            if gauge.samples:
                yield gauge
        when = GaugeMetricFamily(
            "holdfast_device_read_timestamp_seconds", "When they were read", labels=("run_id",)
        )
        when.add_metric((self._run_id,), self._read_at)
        yield when
