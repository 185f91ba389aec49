"""What commands, supervisor and nodes of a run on Ray store for each other at Ray's head.

One of them writes a value, and the rest reads it as often as needed. So none has to reach another
one directly, and each can be started again at any time. Ray is imported when a value
is read or written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from holdfast.launch.owners.ray.plan import (
    NAMESPACE,
    Group,
    JobStatus,
    NodeReport,
    PlacedGroup,
    RaySpec,
)

SEPARATOR = ","  # Between the names of nodes in a placement group's name


def group_name(job: str, group: Group) -> str:
    return f"{job}/{SEPARATOR.join(group)}"


def placed_groups(job: str) -> dict[Group, PlacedGroup]:
    """Return the placement groups of a job that Ray has."""
    start = f"{job}/"
    table = import_module("ray.util").placement_group_table().values()
    return {
        tuple(str(one["name"]).removeprefix(start).split(SEPARATOR)): PlacedGroup(
            str(one["placement_group_id"]), one["state"] == "CREATED"
        )
        for one in table
        if str(one["name"]).startswith(start) and one["state"] != "REMOVED"
    }


class RayBoard:
    """The values of one job. `ray.init` must have been called, or this process is an actor."""

    def __init__(self, job: str) -> None:
        self.job = job
        self._store: Any = import_module("ray.experimental.internal_kv")

    def read_spec(self) -> RaySpec | None:
        found = self._get("spec")
        return None if found is None else RaySpec.from_json(json.loads(found))

    def write_spec(self, spec: RaySpec) -> None:
        self._put("spec", json.dumps(spec.to_json()))

    def read_status(self) -> JobStatus | None:
        found = self._get("status")
        return None if found is None else JobStatus.from_json(json.loads(found))

    def write_status(self, status: JobStatus) -> None:
        self._put("status", json.dumps(status.to_json()))

    def read_reports(self) -> dict[str, NodeReport]:
        found = ((node, self._get(f"node/{node}")) for node in self._nodes())
        return {n: NodeReport.from_json(json.loads(text)) for n, text in found if text is not None}

    def write_report(self, node: str, report: NodeReport) -> None:
        self._put(f"node/{node}", json.dumps(report.to_json()))

    def forget_report(self, node: str) -> None:
        self._delete(f"node/{node}")

    def clear(self) -> None:
        """Forget the job."""
        for key in ("spec", "status", *(f"node/{node}" for node in self._nodes())):
            self._delete(key)

    def _nodes(self) -> Iterator[str]:
        start = f"{self.job}/node/"
        for key in self._store._internal_kv_list(start, namespace=NAMESPACE):
            yield key.decode().removeprefix(start)

    def _get(self, name: str) -> bytes | None:
        found: bytes | None = self._store._internal_kv_get(
            f"{self.job}/{name}", namespace=NAMESPACE
        )
        return found

    def _put(self, name: str, text: str) -> None:
        self._store._internal_kv_put(
            f"{self.job}/{name}", text.encode(), overwrite=True, namespace=NAMESPACE
        )

    def _delete(self, name: str) -> None:
        self._store._internal_kv_del(f"{self.job}/{name}", namespace=NAMESPACE)
