"""Run folders and journal lines that an older version wrote. This version reads them, resumes from
them, and writes them the same. tests/golden/README.md describes them and how they were made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.cli.main import main
from holdfast.events import from_json, to_json
from tests.support.ranks import DEADLINE_S

GOLDEN = Path(__file__).parent.parent / "golden"
STEPS = 12
PROSE = ("text", "title", "sentence")
"""Of reports and audits: sentences for people, which may change."""


@dataclass(frozen=True)
class Run:
    """A golden run folder. reached: the newest step that is saved; None: the run is finished.
    settings: those of the resumed run. skips: True if its generations leave out data."""

    name: str
    reached: int | None
    settings: tuple[str, ...] = ()
    skips: bool = False
    journal: bool = True


HALFWAY = Run("halfway", 5)
COPIED = Run("copied", 5, journal=False)
CUT = Run(
    "cut",
    3,
    (
        "cluster.node=a",
        "cluster.places=2",
        "cluster.beat_seconds=0.5",
        "cluster.settle_seconds=0.5",
        "cluster.alone_seconds=3",
    ),
    skips=True,
)
NODES = Run("nodes", None)
RUNS = [pytest.param(run, id=run.name) for run in (HALFWAY, COPIED, CUT, NODES)]
UNFINISHED = [
    pytest.param(HALFWAY, id="halfway", marks=pytest.mark.slow),
    pytest.param(COPIED, id="copied", marks=pytest.mark.slow),
    pytest.param(CUT, id="cut"),
]


def holdfast(folder: Path, *arguments: str, code: int = 0) -> str:
    """What a command prints that is started in `folder`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment.pop("HOLDFAST_SECRET_FILE", None)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def read(folder: Path, *arguments: str) -> Any:
    """What a command that reads a run prints as JSON. It runs in this process: a start costs more
    than the reading."""
    printed = StringIO()
    with chdir(folder), redirect_stdout(printed):
        code = main([*arguments, "--json"])
    assert code == 0, printed.getvalue()[-2000:]
    return json.loads(printed.getvalue())


def without_prose(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_prose(item) for key, item in value.items() if key not in PROSE}
    return [without_prose(item) for item in value] if isinstance(value, list) else value


def expected(name: str) -> Any:
    return json.loads((GOLDEN / "expected" / f"{name}.json").read_text())


def this_machine() -> dict[str, str]:
    """Return what the last bits of a loss depend on, apart from the code."""
    cores = Path("/proc/cpuinfo")
    lines = cores.read_text().splitlines() if cores.exists() else []
    model = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    capability = torch.backends.cpu.get_cpu_capability()
    return {"torch": torch.__version__, "capability": capability, "processor": model.strip()}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy that a test may continue; the run folders are next to their dataset and run file."""
    return shutil.copytree(GOLDEN / "runs", tmp_path / "runs")


# --- run folders --------------------------------------------------------------------------------
@pytest.mark.parametrize("run", RUNS)
def test_a_run_folder_says_what_it_said(run: Run, place: Path) -> None:
    found = {
        "list": read(place, "checkpoint", "list", run.name),
        "show": read(place, "checkpoint", "show", run.name),
        "verify": read(place, "checkpoint", "verify", run.name),
        "report": without_prose(read(place, "report", run.name)),
    }
    if run.journal:
        found["audit"] = without_prose(read(place, "data", "audit", run.name))
    assert found == expected(run.name)
    holdfast(place, "report", run.name)
    assert (place / run.name / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("run", UNFINISHED)
def test_a_run_goes_on_where_it_was(run: Run, place: Path) -> None:
    before = {path.name for path in (place / run.name / "generations").iterdir()}
    told = holdfast(place, "train", "run.yaml", f"folder={run.name}", *run.settings, "--json")
    records = [json.loads(line) for line in told.splitlines() if line]
    events = [(record["kind"], record["event"]) for record in records if "event" in record]

    started = [event for kind, event in events if kind == "generation_started"]
    assert [(event["reason"], event["step"]) for event in started] == [("resume", run.reached)]
    kinds = {kind for kind, _ in events}
    assert "run_finished" in kinds
    assert not kinds & {"checkpoint_rejected", "source_rejected", "worker_lost", "run_failed"}

    losses = {str(event["step"]): event["loss"] for kind, event in events if kind == "step_done"}
    assert run.reached is not None
    assert list(losses) == [str(step) for step in range(run.reached + 1, STEPS + 1)]
    wanted = expected("losses")
    if wanted["machine"] == this_machine():
        assert losses == wanted[run.name], "to the last bit"
    else:  # other kernels add in another order
        assert losses == pytest.approx(wanted[run.name], rel=1e-4)

    objects = place / run.name / "generations"
    new = [path for path in sorted(objects.iterdir()) if path.name not in before]
    assert len(new) == 1
    now, old = json.loads(new[0].read_text()), json.loads((objects / max(before)).read_text())
    assert ("skips" in old) == run.skips
    assert now.get("skips") == old.get("skips"), "what is left out is left out for good"

    verified = read(place, "checkpoint", "verify", run.name)
    assert [one["problems"] for one in verified] == [[]] * len(verified)
    assert verified
    assert read(place, "report", run.name)["state"] == "finished"


def test_a_finished_run_is_finished(place: Path) -> None:
    told = holdfast(place, "train", "run.yaml", f"folder={NODES.name}", "cluster.node=a", "--json")
    assert json.loads(told) == {"finished": True, "step": STEPS, "folder": NODES.name}


# --- the journal --------------------------------------------------------------------------------
EVENTS = (GOLDEN / "events.jsonl").read_text().splitlines()
EACH_EVENT = [pytest.param(line, id=json.loads(line)["kind"]) for line in EVENTS]


@pytest.mark.parametrize("line", EACH_EVENT)
def test_an_event_is_read_and_written_the_same(line: str) -> None:
    record = from_json(json.loads(line))
    assert record is not None, "a kind that is known"
    assert json.dumps(to_json(record), separators=(",", ":"), allow_nan=True) == line


def test_the_journals_of_the_runs_are_read_and_written_the_same() -> None:
    segments = sorted((GOLDEN / "runs").glob("*/journal/*/*.jsonl"))
    assert segments
    for segment in segments:
        for line in segment.read_text().splitlines():
            record = from_json(json.loads(line))
            assert record is not None
            assert json.dumps(to_json(record), separators=(",", ":"), allow_nan=True) == line
