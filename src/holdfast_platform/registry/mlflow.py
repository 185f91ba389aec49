"""MLflow's model registry behind the same methods (extra `mlflow`).

A version's files are artifacts of a run of MLflow. The index is a tag of the registered model, and
the promoted version has the alias `promoted`. MLflow replaces a tag without a comparison, so two
writers at the same instant are not told apart as in a folder or a bucket.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from holdfast.evaluation.results import TaskResult, TaskResults
from holdfast.model.new_folder import new_folder
from holdfast_platform.registry.registry import Decide, Registry, RegistryError, State, sha256_of

ALIAS, INDEX = "promoted", "holdfast.index"
_EXPERIMENT = "holdfast-registry"


class MlflowRegistry(Registry):
    """The registered model `name` of a server, or of a database: uri None: MLFLOW_TRACKING_URI."""

    def __init__(self, name: str, uri: str | None = None):
        self._name = name
        self._client: Any = import_module("mlflow.tracking").MlflowClient(
            tracking_uri=uri, registry_uri=uri
        )
        errors: Any = import_module("mlflow.exceptions")
        self._error = errors.MlflowException

    def state(self) -> State:
        state = State()
        try:
            tags = self._client.get_registered_model(self._name).tags
            for entry in json.loads(tags.get(INDEX, "[]")):
                version = self._client.get_model_version(self._name, str(entry["version"]))
                if entry["kind"] == "add":
                    entry |= json.loads(version.tags["holdfast.entry"])
                state.take(entry)
        except self._error as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # else there is no such model yet
                raise RegistryError(
                    f"MLflow refuses or does not answer ({error.error_code})",
                    where=f"mlflow:{self._name}",
                    remedy="see that MLFLOW_TRACKING_URI names a server at work",
                ) from None
        return state

    def add(self, folder: Path, source: Mapping[str, Any]) -> int:
        with suppress(self._error):
            self._client.create_registered_model(self._name)
        experiment = self._client.get_experiment_by_name(_EXPERIMENT)
        number = experiment.experiment_id if experiment else None
        run = self._client.create_run(number or self._client.create_experiment(_EXPERIMENT))
        self._client.log_artifacts(run.info.run_id, str(folder), "model")
        self._client.set_terminated(run.info.run_id)
        files = {
            path.name: {"sha256": sha256_of(path), "bytes": path.stat().st_size}
            for path in folder.iterdir()
            if path.is_file()
        }
        made = self._client.create_model_version(
            self._name,
            f"{run.info.artifact_uri}/model",
            run.info.run_id,
            tags={"holdfast.entry": json.dumps({"files": files, "source": dict(source)})},
        )
        self.record(lambda _: {"kind": "add", "version": int(made.version)})
        return int(made.version)

    def record(self, decide: Decide) -> dict[str, Any]:
        state = self.state()
        entry = {**decide(state), "time": round(time.time(), 3)}
        tags = self._client.get_registered_model(self._name).tags
        kept = {key: entry[key] for key in ("kind", "version", "time")}
        index = [*json.loads(tags.get(INDEX, "[]")), kept]
        self._client.set_registered_model_tag(self._name, INDEX, json.dumps(index))
        if entry["kind"] != "add":
            version = str(entry["version"])
            self._client.set_registered_model_alias(self._name, ALIAS, version)
            verdict = json.dumps(entry.get("gate", {}))
            self._client.set_model_version_tag(self._name, version, "holdfast.gate", verdict)
        return entry

    def fetch(self, version: int, to: Path) -> None:
        run = self._client.get_model_version(self._name, str(version)).run_id
        with TemporaryDirectory() as folder, new_folder(to) as partial:
            for path in Path(self._client.download_artifacts(run, "model", folder)).iterdir():
                copyfile(path, partial / path.name)

    def results(self, version: int) -> TaskResults:
        run = self._client.get_model_version(self._name, str(version)).run_id
        return _Artifacts(self._client, run)


class _Artifacts:
    """Results as artifacts of a version's run."""

    def __init__(self, client: Any, run: str):
        self._client, self._run = client, run

    def get(self, task: str, digest: str) -> TaskResult | None:
        path = f"results/{task}-{digest}.json"
        if path not in {file.path for file in self._client.list_artifacts(self._run, "results")}:
            return None
        with TemporaryDirectory() as folder:
            text = Path(self._client.download_artifacts(self._run, path, folder)).read_text("utf-8")
        return TaskResult.from_json(json.loads(text))

    def put(self, result: TaskResult) -> None:
        path = f"results/{result.task}-{result.digest}.json"
        self._client.log_text(self._run, json.dumps(result.to_json()), path)
