"""A run's own evaluation of its alerts: the catalogue's expressions over the samples it keeps.

Prometheus is not needed for it. What it cannot see is the loss of the process that evaluates, and
so of all machines at once. That takes an observer elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry

from holdfast.report.alerts.catalogue import Alert
from holdfast.report.alerts.expression import SampleHistory
from holdfast.report.live.catalogue import CATALOGUE, RUN_LABEL

_NO_END = "0001-01-01T00:00:00Z"  # of an alert that fires, as Alertmanager writes it


@dataclass(frozen=True)
class Change:
    """An alert that has begun or ended to fire."""

    alert: Alert
    fired_at: float  # seconds since the epoch
    resolved_at: float | None  # None: it fires

    @property
    def status(self) -> str:
        return "firing" if self.resolved_at is None else "resolved"


class AlertEvaluator:
    """Samples the metrics of one run and says which alerts fire."""

    def __init__(self, alerts: Sequence[Alert]) -> None:
        self._alerts = alerts
        windows = [part.window_s for alert in alerts for part in alert.expression]
        self.longest_window_s = max(windows, default=0.0)
        self._history = SampleHistory(self.longest_window_s)
        self._names = {
            name
            for alert in alerts
            for metric in alert.metrics
            for name in CATALOGUE[metric].sample_names
        }
        self._since: dict[str, float] = {}  # alerts whose expression holds -> since when

    def add_sample(self, now: float, registry: CollectorRegistry) -> None:
        """Keep the values of all metrics that alerts use. now: seconds since the epoch."""
        self._history.add(now, registry, self._names)

    def firing(self, now: float) -> dict[str, float]:
        """Return the keys of the alerts that fire now, with the time since which they hold."""
        for alert in self._alerts:
            if all(part.holds(self._history, now) for part in alert.expression):
                self._since.setdefault(alert.key, now)
            else:
                self._since.pop(alert.key, None)
        return {
            alert.key: self._since[alert.key]
            for alert in self._alerts
            if alert.key in self._since and now - self._since[alert.key] >= alert.wait_s
        }


def find_changes(
    alerts: Iterable[Alert], firing: Mapping[str, float], told: Mapping[str, float], now: float
) -> list[Change]:
    """Return what a receiver does not know yet. told: alerts that it takes for firing."""
    changes = []
    for alert in alerts:
        if alert.key in firing and alert.key not in told:
            changes.append(Change(alert, firing[alert.key], None))
        elif alert.key in told and alert.key not in firing:
            changes.append(Change(alert, told[alert.key], now))
    return changes


def webhook_body(run: str, changes: Sequence[Change]) -> dict[str, Any]:
    """Return a message of Alertmanager's webhook format, version 4. changes: of one cause."""
    cause = changes[0].alert.cause
    alerts = [_alert_json(run, change) for change in changes]
    is_firing = any(change.resolved_at is None for change in changes)
    first = alerts[0]
    return {
        "version": "4",
        "groupKey": f'{{}}:{{{RUN_LABEL}="{run}", cause="{cause}"}}',
        "truncatedAlerts": 0,
        "status": "firing" if is_firing else "resolved",
        "receiver": "holdfast",
        "groupLabels": {RUN_LABEL: run, "cause": cause},
        "commonLabels": _common([alert["labels"] for alert in alerts]),
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": first["generatorURL"],
        "alerts": alerts,
    }


def _common(values: Sequence[Mapping[str, str]]) -> dict[str, str]:
    return {k: v for k, v in values[0].items() if all(each.get(k) == v for each in values)}


def _alert_json(run: str, change: Change) -> dict[str, Any]:
    alert = change.alert
    labels = {"alertname": alert.name, RUN_LABEL: run, "severity": alert.severity}
    return {
        "status": change.status,
        "labels": labels | {"cause": alert.cause} | dict(alert.labels),
        "annotations": {
            "summary": alert.summary.format(run=run),
            "runbook_url": f"docs/{alert.runbook}",
        },
        "startsAt": _time(change.fired_at),
        "endsAt": _NO_END if change.resolved_at is None else _time(change.resolved_at),
        "generatorURL": "",
        "fingerprint": alert.key,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
