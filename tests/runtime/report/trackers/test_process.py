"""The process of a tracker, as an agent starts it: real journals, real kills, real servers."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from holdfast.core.data.lineage import split_effective
from holdfast.events import StepDone
from holdfast.report.trackers.process import RETRY_EXIT_CODE, TrackerSpec
from holdfast.report.trackers.tracker import Tracker
from holdfast.wire.child_command import module_command
from tests.runtime.report.test_metrics import as_tensorboard_shows
from tests.support.journal_builder import append_records, loss_at, lossy_run
from tests.support.ranks import DEADLINE_S, ROOT, wait_until
from tests.support.tracker_server import TRACKER, TrackerServer

SECRETIVE = "tests.support.tracker_server:SecretiveTracker"


def spec_of(folder: Path, tracker: str, **values: Any) -> TrackerSpec:
    log = str(folder / "logs" / "tracker.log")
    return TrackerSpec(tracker, "demo", str(folder), log=log, **values)


def python_path(*folders: Path) -> str:
    """Return these folders, and those of this process."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


@contextmanager
def following(spec: TrackerSpec, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A tracker's process. The end of its `stdin` means that nothing more comes."""
    process = subprocess.Popen(
        module_command("holdfast.report.trackers.process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), **environment},
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(spec.to_json_line())
    process.stdin.flush()
    try:
        yield process
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


def deliver(spec: TrackerSpec, deadline: float = DEADLINE_S, **environment: str) -> int:
    """Deliver what the journal has; return the exit code."""
    with following(spec, **environment) as process:
        assert process.stdin is not None
        process.stdin.close()
        return process.wait(deadline)


def log_of(folder: Path) -> str:
    return (folder / "logs" / "tracker.log").read_text()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def has_step(path: Path, step: int) -> bool:
    return path.exists() and any(row["step"] == str(step) for row in rows(path))


def is_complete(folder: Path) -> None:
    """Both files have the run of `lossy_run`: each step once, and the values that count."""
    train = rows(folder / "trackers" / "csv" / "train.csv")
    assert [int(row["step"]) for row in train] == list(range(1, 31))
    losses = [float(row["train/loss"]) for row in train]
    assert losses == pytest.approx([loss_at(step) for step in range(1, 31)])
    generations = {int(row["step"]): float(row["run/generation"]) for row in train}
    assert [generations[step] for step in (10, 11, 20, 21)] == [1, 2, 2, 3]
    validation = rows(folder / "trackers" / "csv" / "validation.csv")
    assert [int(row["step"]) for row in validation] == [10, 30]


def test_csv_of_a_finished_run(tmp_path: Path) -> None:
    append_records(tmp_path, lossy_run().records)
    assert deliver(spec_of(tmp_path, "csv")) == 0, log_of(tmp_path)
    is_complete(tmp_path)
    before = (tmp_path / "trackers" / "csv" / "train.csv").read_bytes()
    assert deliver(spec_of(tmp_path, "csv")) == 0  # there is nothing more
    assert (tmp_path / "trackers" / "csv" / "train.csv").read_bytes() == before


def test_killed_while_it_follows(tmp_path: Path) -> None:
    """Rows that no stored position covers, and half a row, are written again."""
    records = lossy_run().records
    table = tmp_path / "trackers" / "csv" / "train.csv"
    for place in (30, 45, len(records)):
        append_records(tmp_path, records[:place])
        with following(spec_of(tmp_path, "csv")) as process:
            effective, _ = split_effective(records[:place])
            newest = max(r.event.step for r in effective if isinstance(r.event, StepDone))
            wait_until(partial(has_step, table, newest), DEADLINE_S, f"step {newest} in the file")
            process.send_signal(signal.SIGKILL)
            process.wait()
        with table.open("a") as file:
            file.write("9999,1.0,2.5\n31,0.")
        for path in (tmp_path / "journal").rglob("*.jsonl"):
            path.unlink()
    append_records(tmp_path, records)
    assert deliver(spec_of(tmp_path, "csv")) == 0, log_of(tmp_path)
    is_complete(tmp_path)


def test_tensorboard_shows_one_continuous_curve_over_restarts_and_sessions(tmp_path: Path) -> None:
    records = lossy_run().records
    split = next(i for i, record in enumerate(records) if record.generation == 3)
    for part in (records[:split], records[split:]):
        append_records(tmp_path, part)
        assert deliver(spec_of(tmp_path, "tensorboard")) == 0, log_of(tmp_path)
    folder = tmp_path / "tensorboard"
    losses = as_tensorboard_shows(folder, "train/loss")
    assert [step for step, _ in losses] == list(range(1, 31))
    assert [loss for _, loss in losses] == pytest.approx([loss_at(s) for s in range(1, 31)])
    generations = dict(as_tensorboard_shows(folder, "run/generation"))
    assert [generations[step] for step in (10, 11, 20, 21)] == [1, 2, 2, 3]
    assert [s for s, _ in as_tensorboard_shows(folder, "validation/bits_per_byte")] == [10, 30]


def test_a_server_that_hangs_refuses_dies_and_returns(tmp_path: Path) -> None:
    """Each failure ends the process with the code that asks for another one; nothing is lost."""
    append_records(tmp_path, lossy_run().records)
    with TrackerServer() as server:
        spec = spec_of(tmp_path, TRACKER, options={"url": server.url}, timeout_s=60.0)
        for mode, each in (("hang", replace(spec, timeout_s=5.0)), ("refuse", spec), ("die", spec)):
            server.mode = mode
            assert deliver(each) == RETRY_EXIT_CODE, log_of(tmp_path)
            assert server.requests[mode]
        log = log_of(tmp_path)
        assert "start() took longer than 5 s; this is tried again" in log
        assert "HTTPError: HTTP Error 503" in log
        assert log.count("Traceback") == 1  # of the answer that was cut off
        server.mode = "ok"
        assert deliver(spec) == 0, log_of(tmp_path)
        assert server.steps() == list(range(1, 31))
        assert server.steps("validation") == [10, 30]
        keys = {message["start"] for message in server.messages if "start" in message}
        assert len(keys) == 1  # one run in the other program
        assert server.messages[-1] == {"finish": "finished"}
    assert deliver(spec) == RETRY_EXIT_CODE  # nothing listens


def test_a_server_that_dies_in_the_middle(tmp_path: Path) -> None:
    records = lossy_run().records
    append_records(tmp_path, records[:30])
    with TrackerServer() as server:
        spec = spec_of(tmp_path, TRACKER, options={"url": server.url}, timeout_s=20.0)
        with following(spec) as process:
            wait_until(lambda: server.steps()[-1:] == [10], what="the first part")
            server.mode = "die"
            append_records(tmp_path, records[30:])
            assert process.wait(DEADLINE_S) == RETRY_EXIT_CODE
        server.mode = "ok"
        assert deliver(spec) == 0, log_of(tmp_path)
        assert server.steps() == list(range(1, 31))


def test_keys_of_other_programs_reach_no_file(tmp_path: Path) -> None:
    append_records(tmp_path, lossy_run().records[:5])
    secrets = {"WANDB_API_KEY": "0123456789abcdef", "MLFLOW_TRACKING_PASSWORD": "hunter22"}
    assert deliver(spec_of(tmp_path, SECRETIVE), **secrets) == RETRY_EXIT_CODE
    log = log_of(tmp_path)
    for part in ("key ***", "child ***", "refused: https://***@host/", "Traceback"):
        assert part in log
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) >= 4  # journal, log, lock, position
    for path in found:
        for value in secrets.values():
            assert value.encode() not in path.read_bytes(), path


def test_one_process_serves_a_tracker(tmp_path: Path) -> None:
    append_records(tmp_path, lossy_run().records)
    with following(spec_of(tmp_path, "csv")):
        lock = tmp_path / "trackers" / "csv" / "train.csv"
        wait_until(lock.exists, what="the first process")
        assert deliver(spec_of(tmp_path, "csv")) == RETRY_EXIT_CODE
        assert "another process serves the tracker csv of this run" in log_of(tmp_path)


def test_mistakes_end_it_for_good(tmp_path: Path) -> None:
    append_records(tmp_path, lossy_run().records[:5])
    assert deliver(spec_of(tmp_path, "csv", options={"foldr": "x"})) == 2
    assert "the tracker csv has no option 'foldr'; its options: folder" in log_of(tmp_path)
    assert deliver(spec_of(tmp_path, "json:dumps")) == 2
    assert "the tracker json:dumps is not a subclass of" in log_of(tmp_path)
    (tmp_path / "trackers" / "csv").mkdir(parents=True)
    (tmp_path / "trackers" / "csv" / "cursor.json").write_text("{}")
    assert deliver(spec_of(tmp_path, "csv")) == 2
    assert "this is not the position of a tracker; remove the file" in log_of(tmp_path)


def test_a_refusal_that_does_not_pass_ends_it_with_its_reason(tmp_path: Path) -> None:
    append_records(tmp_path, lossy_run().records[:5])
    with TrackerServer() as server:
        server.mode = "403"
        spec = spec_of(tmp_path, TRACKER, options={"url": server.url})
        done = subprocess.run(
            module_command("holdfast.report.trackers.process"),
            input=spec.to_json_line(),
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONPATH": python_path(ROOT)},
        )
    assert done.returncode == 2, log_of(tmp_path)
    sentence = done.stdout.decode()
    assert "HTTPError: HTTP Error 403: Forbidden, and this does not pass by itself" in sentence
    assert sentence.endswith("correct logging.options")
    assert sentence in log_of(tmp_path)


@pytest.mark.parametrize("status", [*range(400, 430), 451, *range(500, 505)])
def test_statuses_that_pass_are_tried_again(status: int) -> None:
    is_lasting = status < 500 and status not in (408, 425, 429)
    told = [
        HTTPError("http://host", status, "no", Message(), None),
        RuntimeError(f"API request failed with error code {status} != 200"),
        RuntimeError(f"Failed to get resume status: returned error {status}: {{}}"),
    ]
    for error in told:
        assert Tracker().is_refusal(error) is is_lasting
        caused = RuntimeError("it failed")
        caused.__cause__ = error
        assert Tracker().is_refusal(caused) is is_lasting
    for other in (ConnectionError("refused"), TimeoutError(), RuntimeError("in 404 steps")):
        assert not Tracker().is_refusal(other)


def test_an_installed_tracker_is_found_by_its_entry_point(tmp_path: Path) -> None:
    site = tmp_path / "site" / "other-1.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (site / "entry_points.txt").write_text(f"[holdfast.trackers]\nmine = {TRACKER}\n")
    append_records(tmp_path / "run", lossy_run().records)
    paths = python_path(ROOT, site.parent)
    with TrackerServer() as server:
        spec = spec_of(tmp_path / "run", "mine", options={"url": server.url})
        assert deliver(spec, PYTHONPATH=paths) == 0, log_of(tmp_path / "run")
        assert server.steps() == list(range(1, 31))


def test_nothing_is_written_where_the_run_folder_is_not_mounted(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert deliver(spec_of(tmp_path / "run", "csv")) == RETRY_EXIT_CODE
    assert list((tmp_path / "run").iterdir()) == []


def test_the_callback_of_the_documentation(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guide" / "trackers.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "my_callbacks.py").write_text(code)
    append_records(tmp_path / "run", lossy_run().records)
    limit = loss_at(30) / 2  # no loss is below
    spec = spec_of(tmp_path / "run", "my_callbacks:Alarm", options={"limit": str(limit)})
    assert deliver(spec, PYTHONPATH=python_path(ROOT, tmp_path)) == 0, log_of(tmp_path / "run")
    log = log_of(tmp_path / "run")
    assert f"the loss of step 30 is {loss_at(30)}" in log
    assert "worker 1 was lost: " in log


def test_the_process_needs_no_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, holdfast.report.trackers as room\n"
        "for m in pkgutil.iter_modules(room.__path__):"
        " importlib.import_module(f'holdfast.report.trackers.{m.name}')\n"
        "print(sorted({'torch', 'wandb', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
