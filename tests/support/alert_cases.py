"""Cases of each alert for promtool: series in which it stays silent, fires, and clears.

A series is written as promtool's `values`: a number and how often it is repeated, every 15 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INTERVAL_S = 15
RUN = 'run_id="demo"'


@dataclass(frozen=True)
class AlertCase:
    """series: metric with labels -> values. The times are minutes from the first value."""

    series: Mapping[str, str]
    silent: float  # although something like the alert's cause is there
    fires: float
    clears: float
    labels: Mapping[str, str] = field(default_factory=dict)


def _series(name: str, values: str, **labels: str) -> tuple[str, str]:
    inside = ",".join([RUN, *(f'{key}="{value}"' for key, value in labels.items())])
    return f"holdfast_{name}{{{inside}}}", values


def _counter(name: str, before: int, **labels: str) -> AlertCase:
    """One more after 10 minutes. before: what the counter had before Prometheus saw it."""
    return AlertCase(
        dict([_series(name, f"{before}x39 {before + 1}x400", **labels)]), 9.5, 10.75, 90
    )


RUNNING = _series("run_state", "1x400", state="running")
CASES: Mapping[str, AlertCase] = {
    "RunStuck": AlertCase(
        # Steps for 10 minutes, then none for 20, then steps again. The limit is 10 minutes.
        dict(
            [
                RUNNING,
                _series("progress_limit_seconds", "600x400"),
                _series("progress_timestamp_seconds", "0+15x40 600x79 1800+15x100"),
            ]
        ),
        silent=19.5,
        fires=21,
        clears=31,
    ),
    "RunLost": AlertCase(
        # A single round without an answer is silent.
        dict([RUNNING, _series("agents_answering", "4x20 0 4x19 0x20 4x100")]),
        silent=5.25,
        fires=12,
        clears=16,
    ),
    "RunFailed": AlertCase(
        dict([_series("run_state", "0x39 1x20 0x100", state="failed")]),
        silent=9,
        fires=10.5,
        clears=16,
    ),
    "RestartLoop": AlertCase(
        # One failed recovery is no loop.
        dict([_series("recoveries_total", "0x39 1x19 2x200", result="failed")]),
        silent=12,
        fires=16,
        clears=40,
    ),
    "WorkerLost": _counter("worker_losses_total", 3, noticed_by="exit"),
    "WorkersMissing": AlertCase(
        # For four minutes, then for ten.
        dict(
            [
                RUNNING,
                _series("target_world_size", "4x400"),
                _series("world_size", "4x20 3x16 4x20 3x40 4x100"),
            ]
        ),
        silent=9,
        fires=20,
        clears=25,
    ),
    "NetworkFault": _counter("worker_losses_total", 0, noticed_by="heartbeat"),
    "WorkerSlow": AlertCase(
        dict([_series("slow_workers", "0x39 1x20 0x100")]), silent=9, fires=10.5, clears=16
    ),
    "DataWaiting": AlertCase(
        # A tenth of the time, then half of it, then none.
        dict(
            [
                RUNNING,
                _series(
                    "goodput_seconds", "0+1.5x80 127.5+7.5x60 577.5x200", **{"class": "data_wait"}
                ),
            ]
        ),
        silent=20,
        fires=30,
        clears=50,
    ),
    "NodePreempted": _counter("preemptions_total", 0),
    "RunRequeued": _counter("requeues_total", 0),
    "SaveFailing": _counter("checkpoints_total", 0, tier="2", result="failed"),
    "UploadFailing": _counter("checkpoints_total", 0, tier="3", result="failed"),
    "CheckpointCorrupt": _counter("checkpoints_total", 0, tier="2", result="corrupt"),
    "WorkAtRisk": AlertCase(
        # Three times the longest interval so far, then five times.
        dict(
            [
                RUNNING,
                _series("checkpoint_interval_seconds", "100x400"),
                _series("work_at_risk_seconds", "300x39 500x20 0x100"),
            ]
        ),
        silent=9,
        fires=12,
        clears=16,
    ),
    "LossDiverging": AlertCase(
        dict([_series("loss_best", "2x400"), _series("loss_recent", "2.9x39 3.1x20 2.5x100")]),
        silent=9,
        fires=11,
        clears=16,
    ),
    "StepNotFinite": _counter("nonfinite_steps_total", 0),
    "StateDiffers": _counter("state_differences_total", 0),
}


def promtool_test(name: str, case: AlertCase, rules: str) -> dict[str, Any]:
    """Return a file for `promtool test rules`: nothing, one alert, nothing."""

    def at(minutes: float, fires: bool) -> dict[str, Any]:
        return {
            "eval_time": f"{round(minutes * 60)}s",
            "alertname": name,
            "exp_alerts": [{"exp_labels": {RUN_LABEL: "demo"}}] if fires else [],
        }

    return {
        "rule_files": [rules],
        "evaluation_interval": f"{INTERVAL_S}s",
        "tests": [
            {
                "interval": f"{INTERVAL_S}s",
                "input_series": [
                    {"series": series, "values": values} for series, values in case.series.items()
                ],
                "alert_rule_test": [
                    at(case.silent, False),
                    at(case.fires, True),
                    at(case.clears, False),
                ],
            }
        ],
    }


RUN_LABEL = "run_id"
