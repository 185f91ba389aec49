"""Rules for Prometheus and routes for Alertmanager, from the catalogues of metrics and alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.report.alerts.catalogue import Alert, Severity
from holdfast.report.alerts.expression import (
    BY_RUN,
    EVALUATE_EVERY_S,
    Increase,
    LostShare,
    format_window,
    record_name,
    to_promql,
)
from holdfast.report.live.catalogue import CATALOGUE, RUN_LABEL

RUNBOOKS = "docs"
REPEAT_S: Mapping[Severity, float] = {"page": 4 * 3600, "ticket": 86400, "chat": 7 * 86400}
"""Seconds until Alertmanager repeats what still fires."""


def rule_groups(
    alerts: Sequence[Alert], runbooks: str = RUNBOOKS, scale: float = 1.0
) -> dict[str, Any]:
    """Return the content of a file of rules.

    Args:
        runbooks: address or path that the runbooks lie below.
        scale: factor of all windows, waits and intervals, for tests.
    """
    interval = format_window(EVALUATE_EVERY_S * scale)
    return {
        "groups": [
            {"name": "holdfast-records", "interval": interval, "rules": _records(alerts)},
            {
                "name": "holdfast-alerts",
                "interval": interval,
                "rules": [_alert_rule(alert, runbooks, scale) for alert in alerts],
            },
        ]
    }


def _records(alerts: Iterable[Alert]) -> list[dict[str, str]]:
    """Return the rules that make one series of what several nodes show. A window over the series of
    one node would miss what another one shows."""
    windowed = {
        name: None
        for alert in alerts
        for part in alert.expression
        for term in part.terms
        if isinstance(term, Increase | LostShare)
        for name in term.metrics[:1]
    }
    rules = []
    for name in windowed:
        spec = CATALOGUE[name]
        labels = ", ".join((RUN_LABEL, *spec.labels))
        expression = f"max by ({labels}) ({spec.exposed})"
        if name == "goodput_seconds":  # a run that is over loses no time
            running = f'max {BY_RUN} (holdfast_run_state{{state="running"}}) == 1'
            expression += f" and on ({RUN_LABEL}) ({running})"
        rules.append({"record": record_name(spec), "expr": expression})
    return rules


def _alert_rule(alert: Alert, runbooks: str, scale: float) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": to_promql(alert.expression, scale)}
    if alert.wait_s:
        rule["for"] = format_window(alert.wait_s * scale)
    return rule | {
        "labels": {"severity": alert.severity, "cause": alert.cause, **alert.labels},
        "annotations": {
            "summary": alert.summary.format(run="{{ $labels.run_id }}"),
            "runbook_url": f"{runbooks}/{alert.runbook}",
        },
    }


def prometheus_config(observer: str, alertmanager: str, scale: float = 1.0) -> dict[str, Any]:
    """Return Prometheus's configuration. observer: address of the observer, which has the run's
    metrics and names the agents."""
    interval = format_window(EVALUATE_EVERY_S * scale)
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval}
        | ({"scrape_timeout": interval} if scale < 1 else {}),
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": [
            {"job_name": "holdfast-observer", "static_configs": [{"targets": [observer]}]},
            {
                "job_name": "holdfast-agents",
                "http_sd_configs": [
                    {"url": f"http://{observer}/targets", "refresh_interval": interval}
                ],
            },
        ],
    }


def alertmanager_config(receivers: Mapping[Severity, str], scale: float = 1.0) -> dict[str, Any]:
    """Return Alertmanager's configuration: a message for each run and cause.

    receivers: address of a webhook by severity; "" for none.
    """
    routes = [
        {
            "matchers": [f'severity="{severity}"'],
            "receiver": severity,
            "group_wait": format_window((30 if severity == "page" else 120) * scale),
            "repeat_interval": format_window(REPEAT_S[severity]),
        }
        for severity in receivers
    ]
    return {
        "route": {
            "receiver": "chat",
            "group_by": [RUN_LABEL, "cause"],
            "group_wait": format_window(30 * scale),
            "group_interval": format_window(300 * scale),
            "routes": routes,
        },
        # What pages needs no ticket of the same cause.
        "inhibit_rules": [
            {
                "source_matchers": ['severity="page"'],
                "target_matchers": ['severity=~"ticket|chat"'],
                "equal": [RUN_LABEL, "cause"],
            }
        ],
        "receivers": [
            {
                "name": severity,
                **({"webhook_configs": [{"url": url, "send_resolved": True}]} if url else {}),
            }
            for severity, url in receivers.items()
        ],
    }
