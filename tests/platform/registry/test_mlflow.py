"""MLflow's registry behind the same methods, with the real library."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.evaluation.results import TaskResult
from holdfast_platform.registry.registry import RegistryError, State
from tests.support.commands import within

pytestmark = pytest.mark.slow


def test_versions_are_promoted_and_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

    from holdfast_platform.registry.mlflow import ALIAS, MlflowRegistry

    monkeypatch.chdir(tmp_path)  # artifacts lie below ./mlruns
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    registry = MlflowRegistry("qa", uri)
    assert registry.state().current is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    within("registry", "list", "mlflow:qa").refuses("there is no registry")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    within("registry", "list", "mlflow:qa").refuses("MLflow refuses or does not answer")
    for text in ("first", "second"):
        folder = tmp_path / text
        folder.mkdir()
        (folder / "config.json").write_text(text)
        registry.add(folder, {"folder": str(folder)})
    for version in (1, 2):

        def decide(state: State, version: int = version) -> dict[str, object]:
            assert state.current == (version - 1 or None)
            return {"kind": "promote", "version": version, "gate": {"bytes": 5}}

        registry.record(decide)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    assert client.get_model_version_by_alias("qa", ALIAS).version in (2, "2")
    assert registry.roll_back()["version"] == 1
    assert client.get_model_version_by_alias("qa", ALIAS).version in (1, "1")
    with pytest.raises(RegistryError, match="no version was promoted before"):
        registry.roll_back()

    again = MlflowRegistry("qa", uri)
    assert again.state().versions[2]["files"]["config.json"]["bytes"] == 6
    again.fetch(again.state().find("promoted"), tmp_path / "fetched")
    assert (tmp_path / "fetched/config.json").read_text() == "first"
    result = TaskResult("t", "d", "accuracy", True, [[1.0, 1.0]], ["yes"])
    assert again.results(1).get("t", "d") is None
    again.results(1).put(result)
    assert again.results(1).get("t", "d") == result
    assert again.results(2).get("t", "d") is None
