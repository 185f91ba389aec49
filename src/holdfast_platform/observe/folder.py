"""The folder of `holdfast observe`: what Prometheus, Alertmanager and Grafana need for a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from holdfast.config.run import RunConfig
from holdfast.plan.hardware.cluster_file import HERE, read_cluster
from holdfast.report.alerts.catalogue import ALERTS, Severity
from holdfast.report.alerts.objectives import objective_alerts
from holdfast_platform.observe.boards import boards
from holdfast_platform.observe.rules import (
    RUNBOOKS,
    alertmanager_config,
    prometheus_config,
    rule_groups,
)

OBSERVER_PORT = 9401
PROMETHEUS, ALERTMANAGER = "127.0.0.1:9090", "127.0.0.1:9093"
_IMAGES = {
    "prometheus": "prom/prometheus:v3.7.3",
    "alertmanager": "prom/alertmanager:v0.28.1",
    "grafana": "grafana/grafana:12.2.1",
}
_PROVISIONING = "/etc/grafana/provisioning"


def observe_files(
    config: RunConfig,
    place: str,
    *,
    receivers: Mapping[Severity, str],
    observer: str = f"127.0.0.1:{OBSERVER_PORT}",
    alertmanager: str = ALERTMANAGER,
    runbooks: str = RUNBOOKS,
    step_s: float = 0.0,
    scale: float = 1.0,
) -> tuple[dict[str, str], list[str]]:
    """Return the text of each file by its path in the folder, and what is not written, and why.

    Args:
        place: the run folder or address, for the command of the observer.
        receivers: address of a webhook by severity; "" for none.
        step_s: of a usual step; 0 if it is not known.
        scale: factor of all windows and intervals, for tests.
    """
    of_objectives, reasons = objective_alerts(config.observe.objectives, step_s)
    alerts = [*ALERTS.values(), *of_objectives]
    pools = () if config.plan.cluster in ("", HERE) else read_cluster(config.plan.cluster).pools
    is_priced = any(pool.usd_per_hour is not None for pool in pools)
    files = {
        "prometheus.yml": _yaml(prometheus_config(observer, alertmanager, scale)),
        "rules.yml": _yaml(rule_groups(alerts, runbooks, scale)),
        "alertmanager.yml": _yaml(alertmanager_config(receivers, scale)),
        "compose.yaml": _yaml(_compose(place, observer)),
        "grafana/datasource.yaml": _yaml(_datasource()),
        "grafana/provider.yaml": _yaml(_provider()),
    }
    for name, board in boards(config, is_priced=is_priced).items():
        files[f"grafana/boards/{name}.json"] = json.dumps(board, indent=1) + "\n"
    return files, reasons


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write the files. Raises OSError."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def _yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, width=1000))


def _compose(place: str, observer: str) -> dict[str, Any]:
    """Return a Compose file. All share the host's network, in which agents have their addresses."""

    def service(name: str, volumes: list[str], *command: str) -> dict[str, Any]:
        return {
            "image": _IMAGES[name],
            "network_mode": "host",
            "restart": "unless-stopped",
            "volumes": volumes,
            **({"command": [*command]} if command else {}),
        }

    is_folder = "://" not in place
    target = "/run-folder" if is_folder else place
    return {
        "services": {
            "observer": {
                "image": "${HOLDFAST_IMAGE:-holdfast:1}",
                "network_mode": "host",
                "restart": "unless-stopped",
                "volumes": [f"{place}:/run-folder:ro"] if is_folder else [],
                "command": ["observe", target, "--serve", observer],
            },
            "prometheus": service(
                "prometheus",
                [f"./{name}.yml:/etc/prometheus/{name}.yml:ro" for name in ("prometheus", "rules")],
            ),
            "alertmanager": service(
                "alertmanager", ["./alertmanager.yml:/etc/alertmanager/alertmanager.yml:ro"]
            ),
            "grafana": service(
                "grafana",
                [
                    f"./grafana/datasource.yaml:{_PROVISIONING}/datasources/holdfast.yaml:ro",
                    f"./grafana/provider.yaml:{_PROVISIONING}/dashboards/holdfast.yaml:ro",
                    "./grafana/boards:/var/lib/grafana/dashboards:ro",
                ],
            ),
        }
    }


def _datasource() -> dict[str, Any]:
    source = {"name": "Prometheus", "type": "prometheus", "url": f"http://{PROMETHEUS}"}
    return {"apiVersion": 1, "datasources": [{**source, "isDefault": True}]}


def _provider() -> dict[str, Any]:
    options = {"path": "/var/lib/grafana/dashboards"}
    return {
        "apiVersion": 1,
        "providers": [{"name": "holdfast", "type": "file", "options": options}],
    }
