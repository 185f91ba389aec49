"""The one catalogue of alerts, as data. Rules for Prometheus and a run's own alerts come from it.

An alert that has no case that fires, no silent one, no one that clears or no runbook fails a test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from holdfast.report.alerts.expression import (
    Above,
    Age,
    Expression,
    Increase,
    Latest,
    Number,
    Times,
)

Severity = Literal["page", "ticket", "chat"]
SEVERITIES: tuple[Severity, ...] = ("page", "ticket", "chat")


@dataclass(frozen=True)
class Alert:
    """One alert of the catalogue."""

    name: str
    expression: Expression
    severity: Severity
    cause: str  # alerts of one cause are one message
    summary: str  # for people; {run} is the run's name
    wait_s: float = 0.0  # how long the expression has to hold
    labels: Mapping[str, str] = field(default_factory=dict)  # that tell alerts of one name apart

    @property
    def runbook(self) -> str:
        """The page of the documentation, below docs/."""
        return f"runbooks/{re.sub('(?<!^)(?=[A-Z])', '-', self.name).lower()}.md"

    @property
    def key(self) -> str:
        """The name, with what tells it from other alerts of the name; fit for an object's key."""
        words = [self.name, *self.labels.values()]
        return re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(words)).strip("-")

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the catalogue of metrics that the expression uses."""
        return tuple(dict.fromkeys(name for part in self.expression for name in part.metrics))


_RUNNING = Above(Latest("run_state", {"state": "running"}), Number(0))


def _some(term: Increase | Latest, more_than: float = 0.0) -> Above:
    return Above(term, Number(more_than))


_ALERTS = (
    Alert(
        "RunStuck",
        (Above(Age("progress_timestamp_seconds"), Latest("progress_limit_seconds")), _RUNNING),
        "page",
        "progress",
        "{run} has done no step for longer than its limit",
    ),
    Alert(
        "RunLost",
        (Above(Number(1), Latest("agents_answering")), _RUNNING),
        "page",
        "progress",
        "no agent of {run} answers, and the run is not over",
        wait_s=60,
    ),
    Alert(
        "RunFailed",
        (_some(Latest("run_state", {"state": "failed"})),),
        "page",
        "progress",
        "{run} has failed",
    ),
    Alert(
        "RestartLoop",
        (_some(Increase("recoveries", {"result": "failed"}, 900), 1.5),),
        "page",
        "progress",
        "{run} loses workers again before it has done a step",
    ),
    Alert(
        "WorkerLost",
        (_some(Increase("worker_losses", {}, 600)),),
        "chat",
        "workers",
        "{run} lost a worker; the rest continues, or is about to",
    ),
    Alert(
        "WorkersMissing",
        (Above(Latest("target_world_size"), Latest("world_size")), _RUNNING),
        "ticket",
        "workers",
        "{run} trains with fewer workers than its run file asks for",
        wait_s=300,
    ),
    Alert(
        "NetworkFault",
        (_some(Increase("worker_losses", {"noticed_by": "heartbeat"}, 900)),),
        "ticket",
        "network",
        "a node of {run} fell silent: it is lost, or cannot be reached",
    ),
    Alert(
        "WorkerSlow",
        (_some(Latest("slow_workers")),),
        "ticket",
        "speed",
        "a worker of {run} is slower than the rest",
    ),
    Alert(
        "DataWaiting",
        (
            Above(
                Increase("goodput_seconds", {"class": "data_wait"}, 600), Number(120, scaled=True)
            ),
        ),
        "ticket",
        "speed",
        "{run} spends over a fifth of its time waiting for data",
    ),
    Alert(
        "NodePreempted",
        (_some(Increase("preemptions", {}, 600)),),
        "chat",
        "preemption",
        "a node of {run} got a notice to go",
    ),
    Alert(
        "RunRequeued",
        (_some(Increase("requeues", {}, 600)),),
        "chat",
        "preemption",
        "{run} was started again and resumed",
    ),
    Alert(
        "SaveFailing",
        (_some(Increase("checkpoints", {"tier": "2", "result": "failed"}, 900)),),
        "ticket",
        "checkpoints",
        "a save of {run} failed",
    ),
    Alert(
        "UploadFailing",
        (_some(Increase("checkpoints", {"tier": "3", "result": "failed"}, 900)),),
        "ticket",
        "checkpoints",
        "checkpoints of {run} do not reach the bucket",
    ),
    Alert(
        "CheckpointCorrupt",
        (_some(Increase("checkpoints", {"tier": "2", "result": "corrupt"}, 3600)),),
        "ticket",
        "checkpoints",
        "{run} refused a checkpoint that is damaged",
    ),
    Alert(
        "WorkAtRisk",
        (
            Above(Latest("work_at_risk_seconds"), Times(4, Latest("checkpoint_interval_seconds"))),
            _RUNNING,
        ),
        "page",
        "checkpoints",
        "{run} has trained four times as long as usual without a checkpoint",
        wait_s=60,
    ),
    Alert(
        "LossDiverging",
        (Above(Latest("loss_recent"), Times(1.5, Latest("loss_best"))), _some(Latest("loss_best"))),
        "page",
        "loss",
        "the loss of {run} is half as large again as its best",
    ),
    Alert(
        "StepNotFinite",
        (_some(Increase("nonfinite_steps", {}, 900)),),
        "ticket",
        "loss",
        "a step of {run} had a NaN or an infinity; it was not applied",
    ),
    Alert(
        "StateDiffers",
        (_some(Increase("state_differences", {}, 3600)),),
        "page",
        "loss",
        "ranks of {run} hold different values of the same state",
    ),
)
ALERTS: Mapping[str, Alert] = {alert.name: alert for alert in _ALERTS}
"""By name."""
