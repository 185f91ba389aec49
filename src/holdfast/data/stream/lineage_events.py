"""Lineage as events of OpenLineage 2.0.2: sources -> dataset -> checkpoints of runs.

An event is a JSON object that any server of OpenLineage takes. Identifiers follow from versions and
runs, so the same lineage gives the same events. Times are those of the manifest's file and of the
journal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from holdfast.data.stream.dataset import MANIFEST, Dataset
from holdfast.events import CheckpointCommitted, Record

PRODUCER = "urn:holdfast"
_EVENT = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
_FACETS = "https://openlineage.io/spec/facets"
_VERSION = f"{_FACETS}/1-0-1/DatasetVersionDatasetFacet.json#/$defs/DatasetVersionDatasetFacet"
_CUSTOM = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunFacet"


def dataset_event(dataset: Dataset) -> dict[str, Any]:
    """Return the event of a dataset's preparation. Its run has the recipes of the stages."""
    sources = zip(
        dataset.manifest["sources"], dataset.source_places, dataset.source_paths, strict=True
    )
    inputs = [
        _dataset("file", place or path or source["kind"], source["xxh3"])
        for source, place, path in sources
    ]
    stages = dataset.manifest["settings"].get("stages", [])
    recipes = [json.dumps(stage, sort_keys=True) for stage in stages]
    time = (dataset.folder / MANIFEST).stat().st_mtime
    facets = {"holdfast_stages": _facet(_CUSTOM, recipes=recipes)}
    return _event("data prepare", dataset.version, time, "COMPLETE", inputs, [_of(dataset)], facets)


def run_events(
    dataset: Dataset, run_id: str, place: str, records: Iterable[Record]
) -> Iterator[dict[str, Any]]:
    """Yield the start of a run on a dataset, and an event for each checkpoint that it committed.
    place: of its run store."""
    is_begun = False
    for record in records:
        if not is_begun:
            is_begun = True
            yield _event("train", run_id, record.time, "START", [_of(dataset)], [], {})
        if isinstance(record.event, CheckpointCommitted):
            made = [_dataset("file", f"{record.event.place or place}/{record.event.key}", "")]
            yield _event("train", run_id, record.time, "RUNNING", [_of(dataset)], made, {})


def _of(dataset: Dataset) -> dict[str, Any]:
    return _dataset("file", dataset.place, dataset.version)


def _dataset(namespace: str, name: str, version: str) -> dict[str, Any]:
    facets = {"version": _facet(_VERSION, datasetVersion=version)} if version else {}
    return {"namespace": namespace, "name": name, "facets": facets}


def _facet(schema: str, **values: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": schema, **values}


def _event(
    job: str,
    identity: str,
    time: float,
    kind: str,
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    facets: dict[str, Any],
) -> dict[str, Any]:
    return {
        "eventType": kind,
        "eventTime": datetime.fromtimestamp(time, UTC).isoformat(),
        "run": {"runId": str(uuid5(NAMESPACE_URL, f"{job} {identity}")), "facets": facets},
        "job": {"namespace": "holdfast", "name": job, "facets": {}},
        "inputs": inputs,
        "outputs": outputs,
        "producer": PRODUCER,
        "schemaURL": _EVENT,
    }
