"""docs/reference/metrics.md: the catalogues of metrics and alerts, as `make docs` writes them."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.report.alerts.catalogue import ALERTS
from holdfast.report.alerts.expression import to_promql
from holdfast.report.formatting import format_duration
from holdfast.report.live.catalogue import CATALOGUE, INDICATORS, MetricSpec

_HEAD = """\
# Metrics and alerts

<!-- written by: make docs -->

All of this comes from two catalogues in the code: `report/live/catalogue.py` and
`report/alerts/catalogue.py`. [How to use it](../guide/observe.md).

## Metrics

Each has the label `run_id`, the run's name. Agents show them at `/metrics`. Only the observer
(`holdfast observe RUN --serve HOST:PORT`) shows those from `observer`, and only nodes with
accelerators those from `device`.
"""
_SOURCES = {"run": "", "device": "device", "observer": "observer"}


def page() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *_metrics(), "", *_indicators(), "", *_alerts(), ""])


def _metrics() -> Iterator[str]:
    yield "| metric | type | unit | labels | from | meaning |"
    yield "|---|---|---|---|---|---|"
    for spec in CATALOGUE.values():
        labels = "; ".join(_label(spec, label) for label in spec.labels)
        cells = (f"`{spec.exposed}`", spec.kind, spec.unit, labels, _SOURCES[spec.source])
        yield f"| {' | '.join(cells)} | {spec.meaning} |"


def _label(spec: MetricSpec, label: str) -> str:
    values = spec.labels[label]
    return f"`{label}`: {', '.join(values)}" if values else f"`{label}`"


def _indicators() -> Iterator[str]:
    yield "## Indicators"
    yield ""
    yield "| indicator | query |"
    yield "|---|---|"
    for one in INDICATORS:
        yield f"| {one.name} | `{one.query}` |"


def _alerts() -> Iterator[str]:
    yield "## Alerts"
    yield ""
    yield "Alerts of one cause and one run are one message. Those of objectives are not listed."
    yield ""
    yield "| alert | severity | cause | holds for | meaning | expression |"
    yield "|---|---|---|---|---|---|"
    for alert in ALERTS.values():
        wait = format_duration(alert.wait_s) if alert.wait_s else ""
        name = f"[{alert.name}](../{alert.runbook})"
        summary = alert.summary.format(run="the run")
        query = to_promql(alert.expression)
        cells = (name, alert.severity, alert.cause, wait, summary, f"`{query}`")
        yield f"| {' | '.join(cells)} |"
