"""The one catalogue of metrics: name, unit, type, labels and meaning of each.

`/metrics` is made from it (`live/metrics.py`), and so are alerts, rules, boards and
docs/reference/metrics.md. A name that is not here can be used in none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.report.ledger.rankledger import RANK_CLASSES
from holdfast.report.ledger.timeledger import CLASSES

Kind = Literal["gauge", "counter", "histogram"]
Source = Literal["run", "device", "observer"]

PREFIX = "holdfast_"
RUN_LABEL = "run_id"

RESULTS = ("ok", "failed", "skipped", "corrupt")
TIERS = ("1", "2", "3")  # peers' memory; a folder on a disk; a bucket


@dataclass(frozen=True)
class MetricSpec:
    """One metric of the catalogue."""

    name: str  # without PREFIX and without the suffixes that Prometheus adds
    unit: str  # "" for a number without one
    kind: Kind
    meaning: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Label -> its values. (): they come from the run. Otherwise a counter begins at 0 for each."""
    source: Source = "run"  # observer: of `holdfast observe RUN --serve HOST:PORT` alone

    @property
    def full_name(self) -> str:
        """The name as the client library takes it, without a counter's suffix."""
        return f"{PREFIX}{self.name}"

    @property
    def exposed(self) -> str:
        """The name of its samples; of a histogram the common part."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"

    @property
    def sample_names(self) -> tuple[str, ...]:
        """The names that a query may use."""
        if self.kind != "histogram":
            return (self.exposed,)
        return tuple(f"{self.exposed}{suffix}" for suffix in ("_bucket", "_sum", "_count"))


RUN_STATES = ("running", "finished", "stopped", "failed")
_GAUGES = (
    MetricSpec("step", "", "gauge", "Newest step that is applied everywhere"),
    MetricSpec("target_steps", "", "gauge", "Steps that the run is to do"),
    MetricSpec("generation", "", "gauge", "Number of the membership that trains"),
    MetricSpec(
        "last_step_timestamp_seconds", "seconds", "gauge", "When the newest step was reported"
    ),
    MetricSpec(
        "progress_timestamp_seconds",
        "seconds",
        "gauge",
        "When the newest step, the newest generation or this session began, whichever is newest",
    ),
    MetricSpec("session_start_timestamp_seconds", "seconds", "gauge", "When this session began"),
    MetricSpec(
        "progress_limit_seconds",
        "seconds",
        "gauge",
        "Age of the newest step above which the run counts as stuck (cluster.progress_seconds)",
    ),
    MetricSpec("run_state", "", "gauge", "1 for the state of the run", {"state": RUN_STATES}),
    MetricSpec("recovering", "", "gauge", "1 from a loss or a start to the next step, otherwise 0"),
    MetricSpec("remaining_seconds", "seconds", "gauge", "Time to the last step at today's pace"),
    MetricSpec("world_size", "", "gauge", "Workers of the newest generation"),
    MetricSpec("target_world_size", "", "gauge", "Workers that the run file asks for"),
    MetricSpec("loss", "nats", "gauge", "Training loss of the newest step, nats per token"),
    MetricSpec(
        "loss_best", "nats", "gauge", "Smallest mean of 20 steps' training loss, nats per token"
    ),
    MetricSpec("loss_recent", "nats", "gauge", "Mean of the newest 20 steps' loss, nats per token"),
    MetricSpec("val_loss", "nats", "gauge", "Newest validation loss, nats per token"),
    MetricSpec(
        "val_bits_per_byte", "bits", "gauge", "Newest validation loss, bits per byte of text"
    ),
    MetricSpec(
        "objective_mean",
        "",
        "gauge",
        "Mean of the newest step, as docs/guide/post-training.md names it",
        {"name": ()},
    ),
    MetricSpec(
        "grad_norm", "", "gauge", "Global gradient norm of the newest step, before clipping"
    ),
    MetricSpec("learning_rate", "", "gauge", "Learning rate of the newest step"),
    MetricSpec("tokens_per_second", "", "gauge", "Tokens of the newest step over its seconds"),
    MetricSpec("data_position", "", "gauge", "Samples of the global order that were consumed"),
    MetricSpec("epochs", "", "gauge", "Passes over the data so far, if its size is known"),
    MetricSpec(
        "mfu_ratio",
        "ratio",
        "gauge",
        "Model FLOP utilisation, by the convention named: full "
        "counts all attention, causal halves it, task is what a task says",
        {"convention": ()},
    ),
    MetricSpec(
        "transfers_hidden_ratio",
        "ratio",
        "gauge",
        "Share of the seconds of copies to other places in which no worker waited, so far",
        {"state": ()},
    ),
    MetricSpec(
        "goodput_ratio", "ratio", "gauge", "Useful training time over wall time", {"window": ()}
    ),
    # A gauge, not a counter: steps that must be done again move from productive to rework.
    MetricSpec(
        "goodput_seconds",
        "seconds",
        "gauge",
        "Wall time by class; the classes add up to it",
        {"class": tuple(CLASSES)},
    ),
    MetricSpec(
        "cost_usd",
        "dollars",
        "gauge",
        "Price of the nodes by class of time, at the prices that the nodes told the run",
        {"class": tuple(RANK_CLASSES)},
    ),
    MetricSpec(
        "work_at_risk_seconds", "seconds", "gauge", "Training since the last committed checkpoint"
    ),
    MetricSpec(
        "checkpoint_interval_seconds",
        "seconds",
        "gauge",
        "Longest training between two committed checkpoints of this session so far",
    ),
    MetricSpec(
        "checkpoint_last_success_timestamp_seconds",
        "seconds",
        "gauge",
        "When the newest checkpoint was committed",
    ),
    MetricSpec(
        "memory_bytes",
        "bytes",
        "gauge",
        "Memory of a worker's process, newest sample",
        {"rank": ()},
    ),
    MetricSpec("slow_workers", "", "gauge", "Workers that are judged slow, or take no part for it"),
)
_COUNTERS = (
    MetricSpec(
        "tokens",
        "",
        "counter",
        "Tokens trained on; replayed is the visible cost of failures",
        {"kind": ("unique", "replayed")},
    ),
    MetricSpec("nonfinite_steps", "", "counter", "Steps stopped by a NaN or an infinity"),
    MetricSpec(
        "refused_requests",
        "",
        "counter",
        "Requests that a listener refused; told with the journal, once a minute",
        {"listener": (), "reason": ()},
    ),
    MetricSpec("membership_changes", "", "counter", "Generations begun", {"reason": ()}),
    MetricSpec("requeues", "", "counter", "Sessions that resumed the run"),
    MetricSpec("preemptions", "", "counter", "Nodes that got a notice to go"),
    MetricSpec(
        "worker_losses",
        "",
        "counter",
        "Workers lost, by what noticed it. heartbeat: the node fell silent; node: its agent ended",
        {"noticed_by": ("exit", "peer", "halt", "heartbeat", "node", "stuck")},
    ),
    MetricSpec("state_differences", "", "counter", "Comparisons of state in which ranks differed"),
    MetricSpec(
        "recoveries",
        "",
        "counter",
        "Recoveries: ok did a new step, failed broke before one",
        {"result": ("ok", "failed")},
    ),
    MetricSpec("notices_unanswered", "", "counter", "Times that the source of notices was silent"),
    MetricSpec(
        "transfer_bytes",
        "bytes",
        "counter",
        "Copies of state between a device and other places, by kind of state",
        {"state": ()},
    ),
    MetricSpec(
        "checkpoints", "", "counter", "Checkpoints by fate", {"tier": TIERS, "result": RESULTS}
    ),
)
_HISTOGRAMS = (
    MetricSpec("step_seconds", "seconds", "histogram", "Seconds of each step"),
    MetricSpec(
        "step_duration_seconds",
        "seconds",
        "histogram",
        "Seconds of each step by phase; the phases add up to the step",
        {"phase": ()},
    ),
    MetricSpec(
        "exchange_duration_seconds",
        "seconds",
        "histogram",
        "Seconds of each step in which an exchange was under way, and exposed ones; CPUs only",
        {"kind": (), "part": ()},
    ),
    MetricSpec(
        "recovery_duration_seconds",
        "seconds",
        "histogram",
        "Seconds from a loss to the first new step, by part",
        {"phase": ()},
    ),
    MetricSpec(
        "checkpoint_blocking_seconds", "seconds", "histogram", "Seconds that training was blocked"
    ),
    MetricSpec(
        "checkpoint_duration_seconds",
        "seconds",
        "histogram",
        "Seconds from the first captured header to the commit",
        {"tier": (), "stage": ()},
    ),
    MetricSpec(
        "checkpoint_bytes", "bytes", "histogram", "Bytes of committed checkpoints", {"tier": ()}
    ),
)
_DEVICE = (
    MetricSpec(
        "device_utilisation_ratio",
        "ratio",
        "gauge",
        "Share of the last sample in which a kernel ran",
    ),
    MetricSpec("device_memory_used_bytes", "bytes", "gauge", "Memory in use, of all processes"),
    MetricSpec("device_memory_total_bytes", "bytes", "gauge", "Memory that the device has"),
    MetricSpec("device_power_watts", "watts", "gauge", "Power that the device draws"),
    MetricSpec(
        "device_temperature_celsius", "degrees Celsius", "gauge", "Temperature of the device"
    ),
    MetricSpec(
        "device_uncorrected_memory_errors",
        "",
        "gauge",
        "Uncorrected ECC errors since the driver was loaded",
    ),
)
_DEVICE_LABELS: Mapping[str, tuple[str, ...]] = {"device": (), "name": ()}


def _specs() -> tuple[MetricSpec, ...]:
    devices = (
        MetricSpec(d.name, d.unit, d.kind, d.meaning, _DEVICE_LABELS, "device") for d in _DEVICE
    )
    return (
        MetricSpec("run_info", "", "gauge", "Always 1; its labels describe the run", {"model": ()}),
        *_GAUGES,
        *_COUNTERS,
        *_HISTOGRAMS,
        *devices,
        MetricSpec(
            "device_read_timestamp_seconds",
            "seconds",
            "gauge",
            "When the devices were read",
            source="device",
        ),
        MetricSpec(
            "agents_answering",
            "",
            "gauge",
            "Agents of the newest generation that answer",
            source="observer",
        ),
    )


CATALOGUE: Mapping[str, MetricSpec] = {spec.name: spec for spec in _specs()}
"""By name."""


@dataclass(frozen=True)
class Indicator:
    """One of the service indicators that operators ask for, and the query that shows it."""

    name: str
    query: str


_PER_RUN = "max by (run_id)"
INDICATORS = (
    Indicator("job success", "max by (run_id, state) (holdfast_run_state)"),
    Indicator("time to complete", f"{_PER_RUN} (holdfast_remaining_seconds)"),
    Indicator("throughput", f"{_PER_RUN} (holdfast_tokens_per_second)"),
    Indicator("device utilisation", "avg by (run_id, device) (holdfast_device_utilisation_ratio)"),
    Indicator(
        "step latency p50, p95, p99",
        "histogram_quantile(0.95, max by (run_id, le) (rate(holdfast_step_seconds_bucket[10m])))",
    ),
    Indicator(
        "checkpoint latency",
        "max by (run_id, tier) (rate(holdfast_checkpoint_duration_seconds_sum[1h])) / "
        "max by (run_id, tier) (rate(holdfast_checkpoint_duration_seconds_count[1h]))",
    ),
    Indicator("checkpoint success", "max by (run_id, tier, result) (holdfast_checkpoints_total)"),
    Indicator(
        "network throughput", "max by (run_id, state) (rate(holdfast_transfer_bytes_total[10m]))"
    ),
    Indicator(
        "gradient-sync time",
        'max by (run_id) (rate(holdfast_step_duration_seconds_sum{phase="comm"}[10m])) / '
        'max by (run_id) (rate(holdfast_step_duration_seconds_count{phase="comm"}[10m]))',
    ),
    Indicator("preemptions", f"{_PER_RUN} (holdfast_preemptions_total)"),
    Indicator("resume success", "max by (run_id, result) (holdfast_recoveries_total)"),
    Indicator("loss", f"{_PER_RUN} (holdfast_loss)"),
    Indicator(
        "cost per epoch",
        "sum by (run_id) (max by (run_id, class) (holdfast_cost_usd)) / "
        "max by (run_id) (holdfast_epochs)",
    ),
    Indicator("waste", "max by (run_id, class) (holdfast_goodput_seconds)"),
    Indicator("requeues", f"{_PER_RUN} (holdfast_requeues_total)"),
)
