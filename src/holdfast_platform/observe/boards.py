"""Three boards for Grafana, as JSON: executive, on-call and debug.

A query of a board names metrics of the catalogue. A test runs each query against the metrics of a
real run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.config.run import RunConfig
from holdfast.core.devices import is_accelerator

_RUN = 'run_id=~"$run"'
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


@dataclass(frozen=True)
class Panel:
    """One picture. queries: legend -> PromQL, in which RUN stands for the chosen runs."""

    title: str
    unit: str  # of Grafana
    queries: Mapping[str, str]
    kind: str = "timeseries"


def _latest(name: str, *labels: str) -> str:
    by = ", ".join(("run_id", *labels))
    return f"max by ({by}) (holdfast_{name}{{RUN}})"


def _rate(name: str, *labels: str, window: str = "5m") -> str:
    by = ", ".join(("run_id", *labels))
    return f"max by ({by}) (rate(holdfast_{name}{{RUN}}[{window}]))"


def _mean(name: str, *labels: str) -> str:
    return f"{_rate(f'{name}_sum', *labels)} / {_rate(f'{name}_count', *labels)}"


def _quantile(share: float) -> str:
    return f"histogram_quantile({share}, {_rate('step_seconds_bucket', 'le')})"


_FIRING = 'count(ALERTS{alertstate="firing",RUN}) or on () vector(0)'
_STATE = Panel("State", "none", {"{{run_id}} {{state}}": f"{_latest('run_state', 'state')} == 1"})
_GOODPUT = Panel("Goodput", "percentunit", {"{{run_id}}": _latest("goodput_ratio")})
_LOSS = Panel("Loss", "none", {"train {{run_id}}": _latest("loss")})
_SPEED = Panel("Tokens a second", "none", {"{{run_id}}": _latest("tokens_per_second")})
_LATENCY = Panel(
    "Step latency", "s", {f"p{int(100 * share)}": _quantile(share) for share in (0.5, 0.95, 0.99)}
)


def _executive(config: RunConfig, is_priced: bool) -> list[Panel]:
    panels = [
        _STATE,
        Panel(
            "Done", "percentunit", {"{{run_id}}": f"{_latest('step')} / {_latest('target_steps')}"}
        ),
        Panel("Time to complete", "s", {"{{run_id}}": _latest("remaining_seconds")}),
        _GOODPUT,
        Panel("Time by class", "s", {"{{class}}": _latest("goodput_seconds", "class")}),
        _SPEED,
        _LOSS,
        Panel(
            "Requeues and preemptions",
            "none",
            {"requeues": _latest("requeues_total"), "preemptions": _latest("preemptions_total")},
        ),
        Panel("Alerts that fire", "none", {"alerts": _FIRING}, "stat"),
    ]
    if is_priced:
        panels.append(
            Panel("Cost by class", "currencyUSD", {"{{class}}": _latest("cost_usd", "class")})
        )
    return panels


def _on_call(config: RunConfig, is_priced: bool) -> list[Panel]:
    return [
        Panel("Alerts that fire", "none", {"alerts": _FIRING}, "stat"),
        _STATE,
        Panel(
            "Age of the newest step",
            "s",
            {
                "age": f"time() - {_latest('progress_timestamp_seconds')}",
                "limit": _latest("progress_limit_seconds"),
            },
        ),
        _LATENCY,
        Panel(
            "Workers",
            "none",
            {
                "workers": _latest("world_size"),
                "asked for": _latest("target_world_size"),
                "slow": _latest("slow_workers"),
                "agents that answer": _latest("agents_answering"),
            },
        ),
        Panel(
            "Losses and recoveries",
            "none",
            {
                "lost, {{noticed_by}}": _latest("worker_losses_total", "noticed_by"),
                "recovery {{result}}": _latest("recoveries_total", "result"),
            },
        ),
        Panel(
            "Work at risk",
            "s",
            {
                "at risk": _latest("work_at_risk_seconds"),
                "longest so far": _latest("checkpoint_interval_seconds"),
            },
        ),
        Panel(
            "Checkpoints",
            "none",
            {"tier {{tier}} {{result}}": _latest("checkpoints_total", "tier", "result")},
        ),
        Panel("Save takes", "s", {"tier {{tier}}": _mean("checkpoint_duration_seconds", "tier")}),
        Panel("Answers", "none", {"{{instance}}": 'up{job=~"holdfast-.*"}'}),
    ]


def _debug(config: RunConfig, is_priced: bool) -> list[Panel]:
    panels = [
        Panel("Seconds of a step", "s", {"{{phase}}": _mean("step_duration_seconds", "phase")}),
        _LATENCY,
        _SPEED,
        _LOSS,
        Panel("Gradient norm", "none", {"{{run_id}}": _latest("grad_norm")}),
        Panel("Learning rate", "none", {"{{run_id}}": _latest("learning_rate")}),
        Panel("Memory of a worker", "bytes", {"rank {{rank}}": _latest("memory_bytes", "rank")}),
        Panel("Samples read", "none", {"{{run_id}}": _latest("data_position")}),
        Panel(
            "Training blocked by saves", "s", {"{{run_id}}": _mean("checkpoint_blocking_seconds")}
        ),
        Panel("Generation", "none", {"{{run_id}}": _latest("generation")}),
        Panel(
            "Memberships begun",
            "none",
            {"{{reason}}": _latest("membership_changes_total", "reason")},
        ),
        Panel(
            "Steps that were not finite", "none", {"{{run_id}}": _latest("nonfinite_steps_total")}
        ),
        Panel(
            "Refused requests",
            "none",
            {"all": "sum(holdfast_refused_requests_total{RUN}) or on () vector(0)"},
        ),
    ]
    if is_accelerator(config.device):
        devices = "by (instance, device)"
        for title, unit, name in (
            ("Device utilisation", "percentunit", "utilisation_ratio"),
            ("Device memory", "bytes", "memory_used_bytes"),
            ("Device power", "watt", "power_watts"),
        ):
            query = f"max {devices} (holdfast_device_{name}{{RUN}})"
            panels.append(Panel(title, unit, {"{{instance}} {{device}}": query}))
    return panels


_BOARDS = {"executive": _executive, "on-call": _on_call, "debug": _debug}


def boards(config: RunConfig, *, is_priced: bool) -> dict[str, dict[str, Any]]:
    """Return the boards by name. What a run does not have gets no panel: prices and devices."""
    return {name: _board(name, make(config, is_priced)) for name, make in _BOARDS.items()}


def queries_of(board: Mapping[str, Any]) -> list[str]:
    """Return the queries of a board, for all runs."""
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [query.replace("$run", ".+") for query in found]


def _board(name: str, panels: list[Panel]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "title": f"Holdfast: {name}",
        "uid": f"holdfast-{name}",
        "tags": ["holdfast"],
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": source,
                    "query": "label_values(holdfast_run_info, run_id)",
                    "multi": True,
                    "includeAll": True,
                    "allValue": ".+",
                },
            ]
        },
        "panels": [_panel(number, panel, source) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel, source: Mapping[str, str]) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    place = {"x": _WIDTH * column, "y": _HEIGHT * row, "w": _WIDTH, "h": _HEIGHT}
    return {
        "id": number + 1,
        "title": panel.title,
        "type": panel.kind,
        "gridPos": place,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query.replace("RUN", _RUN), "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }
