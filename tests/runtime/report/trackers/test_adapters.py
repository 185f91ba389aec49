"""W&B, MLflow and TensorBoard's reader, each where it is installed: nothing here installs them."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.report.trackers.process import RETRY_EXIT_CODE
from holdfast.report.trackers.registry import is_installed
from tests.runtime.report.trackers.test_process import (
    deliver,
    following,
    log_of,
    python_path,
    spec_of,
)
from tests.support.journal_builder import append_records, loss_at, lossy_run
from tests.support.ranks import ROOT, wait_until

SESSIONS = 2


def deliver_in_sessions(folder: Path, tracker: str, **environment: str) -> None:
    """Deliver the run of `lossy_run` by one process for each session, as a resumed run does."""
    records = lossy_run().records
    split = next(i for i, record in enumerate(records) if record.generation == 3)
    for part in (records[:split], records[split:]):
        append_records(folder, part)
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


@contextmanager
def mlflow_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """MLflow's own server; entered once it answers."""
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--backend-store-uri", f"sqlite:///{folder}/server.db"],
        cwd=folder,
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0):
                return True
        except OSError:
            return False

    try:
        wait_until(answers, 300.0, "MLflow's server")
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("mlflow"), reason="needs mlflow")
def test_a_server_of_mlflow_that_stops_and_dies(tmp_path: Path) -> None:
    """The server is suspended, killed, and started again while the run goes through it."""
    from mlflow.tracking import MlflowClient

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    records = lossy_run().records
    uri = f"http://127.0.0.1:{port}"
    options = {"mode": "online", "uri": uri, "experiment": "lossy"}
    spec = spec_of(tmp_path, "mlflow", timeout_s=30.0, options=options)
    hasty = spec_of(tmp_path, "mlflow", timeout_s=5.0, options=options)
    with mlflow_server(tmp_path, port) as server:
        append_records(tmp_path, records[:30])
        assert deliver(spec, 300.0) == 0, log_of(tmp_path)
        append_records(tmp_path, records[30:45])
        os.killpg(server.pid, signal.SIGSTOP)
        assert deliver(hasty, 300.0) == RETRY_EXIT_CODE, log_of(tmp_path)
        assert "start() took longer than 5 s; this is tried again" in log_of(tmp_path)
        os.killpg(server.pid, signal.SIGCONT)
        with following(spec) as process:
            client: Any = MlflowClient(uri)
            (run,) = _runs(client)
            wait_until(
                lambda: client.get_metric_history(run.info.run_id, "train/loss")[-1].step > 10,
                300.0,
                "the second part",
            )
            os.killpg(server.pid, signal.SIGKILL)
            append_records(tmp_path, records[45:])
            assert process.wait(300.0) == RETRY_EXIT_CODE, log_of(tmp_path)
    with mlflow_server(tmp_path, port):
        assert deliver(spec, 300.0) == 0, log_of(tmp_path)
        (run,) = _runs(client)
        assert run.info.status == "FINISHED"
        found = client.get_metric_history(run.info.run_id, "train/loss")
        assert sorted(metric.step for metric in found) == list(range(1, 31))


def _runs(client: Any) -> list[Any]:
    experiment = client.get_experiment_by_name("lossy")
    return list(client.search_runs([experiment.experiment_id]))


def _without_curve(path: Path) -> str:
    value = json.loads(path.read_text())
    return json.dumps(value | {"positions": {}, "curve": {"starts": {}, "delivered": {}}})


@pytest.mark.skipif(not is_installed("wandb"), reason="needs wandb")
def test_wandb_has_one_run_with_each_step_once(tmp_path: Path) -> None:
    """Read back from the offline files, by W&B's own messages."""
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


@pytest.mark.skipif(not is_installed("wandb"), reason="needs wandb")
def test_wandb_loses_no_step_if_all_of_its_processes_are_killed(tmp_path: Path) -> None:
    records = lossy_run().records
    split = next(i for i, record in enumerate(records) if record.generation == 3)
    append_records(tmp_path, records[:split])
    folder = tmp_path / "trackers" / "wandb" / "wandb"
    spec = spec_of(tmp_path, "wandb", timeout_s=120.0)
    with following(spec) as process:
        wait_until(lambda: list(folder.glob("*/started")), 120.0, "the session")
        os.killpg(process.pid, signal.SIGKILL)
    append_records(tmp_path, records[split:])
    assert deliver(spec) == 0, log_of(tmp_path)
    found = sorted(folder.glob("offline-run-*/*.wandb"))
    assert len(found) == SESSIONS
    steps = {step for path in found for step in _wandb_steps(path)}
    assert sorted(steps) == list(range(1, 31))


@pytest.mark.skipif(not is_installed("wandb"), reason="needs wandb")
def test_attempts_to_reach_a_server_of_wandb_leave_one_folder(tmp_path: Path) -> None:
    append_records(tmp_path, lossy_run().records)
    options = {"mode": "online", "project": "mine"}
    secrets = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0123456789" * 4}
    spec = spec_of(tmp_path, "wandb", timeout_s=8.0, options=options)
    for _ in range(2):
        assert deliver(spec, 120.0, **secrets) == RETRY_EXIT_CODE, log_of(tmp_path)
    assert len(list((tmp_path / "trackers" / "wandb" / "wandb").glob("run-*"))) == 1
    assert deliver(spec_of(tmp_path, "wandb", timeout_s=120.0), **secrets) == 0, log_of(tmp_path)
    (path,) = (tmp_path / "trackers" / "wandb" / "wandb").glob("*run-*/*.wandb")
    assert _wandb_steps(path) == list(range(1, 31))


def _wandb_steps(path: Path) -> list[int]:
    """Return the steps of the rows that have a loss of training."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in _leveldb_records(path.read_bytes()):
        record: Any = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        if "train/loss" in row:
            found.append(int(row["step"]))
    return found


def _leveldb_records(data: bytes) -> list[bytes]:
    """Split a file of W&B: LevelDB's log format, after a head of 7 bytes in the first block."""
    block, at, part, found = 32768, 7, b"", []
    while at + 7 <= len(data):
        if block - at % block < 7:  # the rest of a block is padding
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            found.append(part)
            part = b""
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
