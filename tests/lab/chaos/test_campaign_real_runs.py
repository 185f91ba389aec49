"""`holdfast chaos` itself: real agents, real faults, drawn from a seed; and what it refuses."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holdfast.events import FaultInjected, GenerationStarted, StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support import sample_tasks
from tests.support.commands import apart, within

DEADLINE = 900
KINDS = "kill raise memory exit hang capture two two-kinds again recovery mover template agent"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "faults"),
    [
        pytest.param(["replicated", "tp"], 8, id="replicated,tp"),
        pytest.param(["replicated", "tp", "dp_shard"], 20, id="all", marks=pytest.mark.slow),
    ],
)
def test_faults_are_recovered_from_and_not_repeated(
    tmp_path: Path, layouts: list[str], faults: int
) -> None:
    """Two runs of 8 faults; `make campaign` does three of 20, and `make chaos` 1,000."""
    runs = len(layouts)
    arguments = (
        "chaos",
        "--out",
        tmp_path / "out",
        "--seed",
        "11",
        "--nodes",
        "2",
        "--no-network",
        "--layout",
        ",".join(layouts),
        "--faults",
        f"{faults * runs} {KINDS}",
    )
    found = apart(*arguments, deadline=DEADLINE)
    assert found.code == 0, found.out + found.err
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["recovered"]
    assert result["faults"] >= (faults - 3) * runs
    assert [run["layout"] for run in result["runs"]] == layouts
    for run in result["runs"]:
        _each_hit_where_it_says(run, tmp_path / "out" / "runs" / run["run"] / "run")
    again = apart(*arguments)
    assert again.code == 0
    assert again.err.count("done before") == runs


def _traced(rows: list[dict[str, Any]], root: Path) -> tuple[dict[str, Any], Path]:
    """Return the run of two nodes with these faults, as its result says, and its folder."""
    trace, out = root / "faults.jsonl", root / "out"
    trace.write_text("\n".join(map(json.dumps, rows)))
    where = ("--layout", "dp_shard", "--nodes", "2", "--out", out, "--no-network")
    found = apart("chaos", "--trace", trace, *where, deadline=DEADLINE)
    assert found.code == 0, found.out + found.err
    (run,) = json.loads((out / "result.json").read_text())["runs"]
    return run, out / "runs" / run["run"] / "run"


@pytest.mark.slow
def test_the_node_that_leads_is_killed_in_each_transition_of_a_commit(tmp_path: Path) -> None:
    points = ("reduced", "voted", "applying", "applied")
    rows = [{"step": 4 + 4 * n, "fault": "commit", "point": p} for n, p in enumerate(points)]
    run, folder = _traced(rows, tmp_path)
    assert [(f["point"], f["outcome"]) for f in run["faults"]] == [
        (point, "recovered") for point in points
    ]
    _each_hit_where_it_says(run, folder)


@pytest.mark.slow
def test_the_run_folder_is_out_of_reach_for_two_minutes(tmp_path: Path) -> None:
    """Steps are done all the while; what is to be written waits."""
    rows = [{"step": 5, "fault": "run-store-long"}, {"step": 40, "fault": "kill"}]
    run, folder = _traced(rows, tmp_path)
    assert [f["outcome"] for f in run["faults"]] == ["recovered", "recovered"]
    assert run["faults"][0]["seconds"] > 115
    done = [
        record.time
        for record in read_journal(FolderStore(folder))
        if isinstance(record.event, StepDone) and 5 <= record.event.step <= 25
    ]
    assert max(later - one for one, later in pairwise(sorted(done))) < 30


@pytest.mark.slow
def test_damaged_checkpoints_and_a_suspended_mover(tmp_path: Path) -> None:
    """A mover is suspended, and soon after all workers restore the steps captured meanwhile. Then
    the newest checkpoint is damaged in each way."""
    kinds = (
        "mover-stop",
        "workers",
        "rotten-disk",
        "cut-checkpoint",
        "lost-checkpoint",
        "replayed-checkpoint",
        "rotten-checkpoint",
    )
    steps = (23, 26, 33, 44, 55, 66, 77)
    rows = [{"step": step, "fault": kind} for step, kind in zip(steps, kinds, strict=True)]
    run, folder = _traced(rows, tmp_path)
    assert [(f["fault"], f["outcome"]) for f in run["faults"]] == [
        (kind, "recovered") for kind in kinds
    ]
    _each_hit_where_it_says(run, folder)


def _each_hit_where_it_says(run: dict[str, Any], folder: Path) -> None:
    """By the journal of the run itself."""
    counted = [fault for fault in run["faults"] if fault["outcome"] == "recovered"]
    records = read_journal(FolderStore(folder))
    told = {r.event.number: r.event for r in records if isinstance(r.event, FaultInjected)}
    for fault in counted:
        event = told[10 * fault["number"]]
        assert (event.step, event.point) == (fault["step"], fault["point"])
    started = [r for r in records if isinstance(r.event, GenerationStarted)]
    assert len(started) > len(counted) / 2


def test_what_makes_no_sense_is_refused_in_a_sentence() -> None:
    within("chaos", "--faults", "earthquake").refuses("no fault 'earthquake'", "--faults", "kill")
    within("chaos", "--layout", "diagonal").refuses("no layout", "--layout", "replicated")
    within("chaos", "--layout", "tp", "--nodes", "3").refuses("spread evenly", "--nodes")
    within("chaos", "--shard", "3/2").refuses("--shard", "1/2")
    within("chaos", "--faults", "1", "--shard", "2/2").refuses("--shard", "of 1 runs in all")
    within("chaos", "--trace", "nowhere.jsonl").refuses("nowhere.jsonl")


def test_faults_that_can_never_happen_are_refused_before_anything_starts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("chaos", "--no-network", "--out", out)
    within(*arguments, "--layout", "two", "--faults", "1 pipeline").refuses(
        "pipeline (the layout has no pipeline)", "two", "--faults"
    )
    within(*arguments, "--layout", "pp,replicated", "--faults", "pipeline").refuses("replicated")
    within(*arguments, "--faults", "partition,delay").refuses("partition (", "delay (", "off")
    trace = tmp_path / "faults.jsonl"
    trace.write_text('{"fault": "agent", "step": 5, "target": "zebra"}')
    within(*arguments, "--trace", trace).refuses("faults.jsonl:1", "no node 'zebra'", "a, b, c, d")
    trace.write_text('{"step": 5, "fault": "kill", "target": "b"}')
    within(*arguments, "--trace", trace).refuses("faults.jsonl:1", "kill cannot be aimed")
    for step in ("Infinity", "1e400", "NaN", "0", "2.5"):
        trace.write_text(f'{{"step": {step}, "fault": "kill"}}')
        within(*arguments, "--trace", trace).refuses("faults.jsonl:1", "not a fault at a step")
    assert not out.exists()


def test_arguments_that_are_no_numbers_files_or_folders_are_refused(tmp_path: Path) -> None:
    within("chaos", "--faults", "\u00b2").refuses("--faults", "no fault")
    within("chaos", "--shard", "\u00b2/3").refuses("--shard")
    within("chaos", "--layout", "tp=\u00b2,workers=4").refuses("--layout", "'tp=\u00b2'")
    within("chaos", "--nodes", "-3").refuses("--nodes")
    file = tmp_path / "file"
    file.touch()
    within("chaos", "--out", file).refuses("--out", str(file))
    out = tmp_path / "out"
    within("chaos", "train.optimizer.learning_rate=0.5", "--out", out).refuses(
        "train.optimizer.learning_rate=0.5", "no such run file"
    )
    assert not out.exists()


def test_the_faults_are_listed_with_what_they_do() -> None:
    found = within("chaos", "--list")
    assert found.code == 0
    assert "kill               a worker is killed (SIGKILL)" in found.out
    assert "zombie" in found.out


# --- models of other people under faults ----------------------------------------------------------
RUN_FILE = Path(str(sample_tasks.__file__)).with_suffix(".yaml")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Normed", "Gpt2", "EncoderDecoder", "Tied"])
def test_a_task_recovers_from_faults_with_equal_bits(name: str, tmp_path: Path) -> None:
    chosen = ["--faults", "8", "--layout", "two", "--no-network", "--out", str(tmp_path / "out")]
    found = apart("chaos", RUN_FILE, f"task.name=sample_tasks:{name}", *chosen, deadline=1200)
    assert found.code == 0, found.out + found.err
    assert "1 of 1 runs recovered" in found.err
