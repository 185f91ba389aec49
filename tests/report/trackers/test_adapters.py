"""W&B, MLflow and TensorBoard's reader, each where it is installed: nothing here installs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.report.trackers.registry import is_installed
from tests.report.trackers.test_process import deliver, log_of, python_path, spec_of, write_journal
from tests.support.journal_builder import loss_at, lossy_run
from tests.support.ranks import ROOT

SESSIONS = 2


def deliver_in_sessions(folder: Path, tracker: str, **environment: str) -> None:
    """Deliver the run of `lossy_run` by one process for each session, as a resumed run does."""
    records = lossy_run().records
    split = next(i for i, record in enumerate(records) if record.generation == 3)
    for part in (records[:split], records[split:]):
        write_journal(folder, part)
        assert deliver(spec_of(folder, tracker, timeout_s=120.0), **environment) == 0, log_of(
            folder
        )


@pytest.mark.skipif(not is_installed("mlflow"), reason="needs mlflow")
def test_mlflow_has_one_run_with_each_step_once(tmp_path: Path) -> None:
    deliver_in_sessions(tmp_path, "mlflow")
    # Values that no stored position covers are sent again.
    (tmp_path / "trackers" / "mlflow" / "cursor.json").write_text(
        _without_curve(tmp_path / "trackers" / "mlflow" / "cursor.json")
    )
    assert deliver(spec_of(tmp_path, "mlflow", timeout_s=120.0)) == 0, log_of(tmp_path)
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(f"sqlite:///{tmp_path}/trackers/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("holdfast")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    losses = sorted(
        (metric.step, metric.value)
        for metric in client.get_metric_history(run.info.run_id, "train/loss")
    )
    assert [step for step, _ in losses] == list(range(1, 31))
    assert [loss for _, loss in losses] == pytest.approx([loss_at(s) for s in range(1, 31)])


def _without_curve(path: Path) -> str:
    import json

    value = json.loads(path.read_text())
    return json.dumps(value | {"positions": {}, "curve": {"starts": {}, "delivered": {}}})


@pytest.mark.skipif(not is_installed("wandb"), reason="needs wandb")
def test_wandb_has_one_run_with_each_step_once(tmp_path: Path) -> None:
    """Read back from the offline files, by W&B's own reader."""
    deliver_in_sessions(tmp_path, "wandb", WANDB_API_KEY="0123456789" * 4)
    found = sorted((tmp_path / "trackers" / "wandb" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(found) == SESSIONS
    assert len({path.stem for path in found}) == 1  # one run
    steps: list[int] = []
    for path in found:
        steps += _wandb_steps(path)
    assert sorted(steps) == list(range(1, 31))
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"0123456789" * 4 not in path.read_bytes(), path


def _wandb_steps(path: Path) -> list[int]:
    """Return the steps of the rows that have a loss of training."""
    import json

    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store: Any = DataStore()
    store.open_for_scan(str(path))
    found = []
    while (data := store.scan_data()) is not None:
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        if "train/loss" in row:
            found.append(int(row["step"]))
    return found


@pytest.mark.skipif(not is_installed("tensorboard"), reason="needs tensorboard")
def test_tensorboard_itself_reads_the_event_files(tmp_path: Path) -> None:
    deliver_in_sessions(tmp_path, "tensorboard")
    code = (
        "import sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0})\n"
        "found.Reload()\n"
        "print([event.step for event in found.Scalars('train/loss')])\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "tensorboard")],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert done.stdout.strip() == str(list(range(1, 31)))
