"""The tracker `mlflow`: one run of MLflow over all sessions.

Offline, it writes a database in the tracker's folder, because current releases refuse the older
folder of files. A value that is logged again has the same name, step and time. MLflow keeps such a
value once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from holdfast.report.trackers.tracker import RunInfo, Tracker, mode_problems

_URI = "MLFLOW_TRACKING_URI"
_DATABASE = re.compile(r"\w+(\+\w+)?:///")
_KEY_TAG = "holdfast.key"
_MAX_BATCH = 1000  # Values that one request may carry (`log_batch`)
_MAX_PARAM_BATCH = 100
_MAX_PARAM_CHARS = 6000
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

_SERVERS = ("databricks", "databricks-uc", "uc")  # addresses that are no URL
_MAX_NAME_CHARS = 500  # of an experiment


class MlflowTracker(Tracker):
    option_names = ("mode", "uri", "experiment")
    places = (
        "logging.mlflow.uri, logging.mlflow.experiment, and MLFLOW_TRACKING_USERNAME, "
        "MLFLOW_TRACKING_PASSWORD or MLFLOW_TRACKING_TOKEN of the environment"
    )

    @classmethod
    def problems(
        cls, options: Mapping[str, str], environment: Mapping[str, str]
    ) -> Iterator[tuple[str, str, str]]:
        yield from mode_problems(options)
        given = options.get("uri")
        uri = given or environment.get(_URI) or ""
        if options.get("mode") != "online":
            if given:
                yield "uri", "mode offline uses no address", "use mode online, or remove it"
        elif not uri:
            remedy = f"set it to the server's address, or set {_URI} in the environment"
            yield "uri", f"mode online needs an address, and {_URI} has none, either", remedy
        elif uri not in _SERVERS and not urlsplit(uri).netloc and not _DATABASE.match(uri):
            what = "" if given else f" of {_URI}"
            yield "uri", f"{uri!r}{what} is no address of a server", "use the form http://host:5000"
        if len(options.get("experiment", "")) > _MAX_NAME_CHARS:
            what = f"the name has more than {_MAX_NAME_CHARS} characters"
            yield "experiment", what, "use a shorter name"

    def start(self, info: RunInfo) -> None:
        tracking: Any = import_module("mlflow.tracking")
        self._entities: Any = import_module("mlflow.entities")
        uri: str | None = f"sqlite:///{info.folder.absolute()}/mlflow.db"
        if info.options.get("mode") == "online":
            uri = info.options.get("uri") or None  # None: MLFLOW_TRACKING_URI
        self._client = tracking.MlflowClient(tracking_uri=uri)
        name = info.options.get("experiment") or "holdfast"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            artifacts = (
                None
                if info.options.get("mode") == "online"
                else str((info.folder / "artifacts").absolute())
            )
            number = self._client.create_experiment(name, artifact_location=artifacts)
        else:
            number = experiment.experiment_id
        self._waiting: list[Any] = []
        self._run_id = self._find_or_create(number, info)

    def _find_or_create(self, experiment: str, info: RunInfo) -> str:
        found = self._client.search_runs([experiment], f"tags.`{_KEY_TAG}` = '{info.key}'")
        if found:
            run_id = str(found[0].info.run_id)
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        run = self._client.create_run(experiment, tags={_KEY_TAG: info.key}, run_name=info.name)
        params = [
            self._entities.Param(key, str(value)[:_MAX_PARAM_CHARS])
            for key, value in info.config.items()
        ]
        for part in _parts(params, _MAX_PARAM_BATCH):
            self._client.log_batch(run.info.run_id, params=part)
        return str(run.info.run_id)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        self._waiting += [
            self._entities.Metric(name, value, int(time * 1000), step)
            for name, value in values.items()
        ]
        if len(self._waiting) >= _MAX_BATCH:
            self.flush()

    def flush(self) -> None:
        for part in _parts(self._waiting, _MAX_BATCH):
            self._client.log_batch(self._run_id, metrics=part)
        self._waiting = []

    def finish(self, reason: str) -> None:
        status = _STATUS.get(reason)
        if status is not None:
            self._client.set_terminated(self._run_id, status)


def _parts(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
