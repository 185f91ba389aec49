"""Several nodes that share no disk: everything that they share is in a bucket. `holdfast chaos`
with the run store in a bucket: the same verdicts as in a folder."""

from __future__ import annotations

import json
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.checkpoint.restore.catalog import list_commits
from holdfast.events import RunFinished, StepDone
from holdfast.wire.journal import read_contents
from holdfast.wire.store.run_store import FolderStore
from tests.support import s3
from tests.support.checkpoints import tensors_of
from tests.support.commands import apart
from tests.support.nodes import losses_of_one_worker, prepared
from tests.support.separate_nodes import ENDPOINT, separate_nodes

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("s3_credentials")]

SETTINGS = ("layout.workers=3", "train.evaluate.every=0", "checkpoint.every_steps=50")
OUTAGE_S = 125.0


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return prepared(tmp_path / "here")


def test_a_node_is_killed_and_another_joins(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Curve and parameters are those of a run in a folder, and each sample is used once."""
    steps = "train.steps=1500"
    with separate_nodes(run_file, ["a", "b", "c"], *SETTINGS, steps) as nodes:
        nodes.start("a")
        nodes.wait_until(lambda: nodes.store.list("resolved.json"), "the run has not begun")
        nodes.join("b", "c")
        nodes.wait_step(20, nodes={"a", "b", "c"})
        nodes.power_off("b")
        nodes.wait_step(40, nodes={"a", "c"})
        nodes.join("b")  # an empty machine, which prepares its own dataset
        nodes.wait_step(60, nodes.newest, nodes={"a", "b", "c"})
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert nodes.events(RunFinished)
        losses = nodes.losses()
        bits = tensors_of(nodes.store, 1500)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        apart("data", "audit", nodes.outside).succeeds()
        assert not read_contents(nodes.store).unreadable
    assert losses == losses_of_one_worker(run_file, *SETTINGS, steps)
    (folder,) = run_file.parent.glob("alone*")
    assert bits == tensors_of(FolderStore(folder), 1500)


def test_a_bucket_that_is_away_for_two_minutes_costs_no_step(run_file: Path) -> None:
    with separate_nodes(run_file, ["a", "b", "c"], *SETTINGS, "train.steps=1000000") as nodes:
        nodes.start("a")
        nodes.wait_until(lambda: nodes.store.list("resolved.json"), "the run has not begun")
        nodes.join("b", "c")
        nodes.wait_step(60, nodes={"a", "b", "c"})
        generation = nodes.newest
        nodes.network.cut(ENDPOINT)
        begun, began_at = time.monotonic(), time.time()
        nodes.wait_until(lambda: time.monotonic() - begun > OUTAGE_S, "")
        ended_at = time.time()
        nodes.network.heal(ENDPOINT)
        last = max(nodes.losses())
        nodes.wait_step(last + 50)
        within = [
            record.time
            for record in nodes.records()
            if isinstance(record.event, StepDone) and began_at < record.time < ended_at
        ]
        assert max(after - before for before, after in pairwise(within)) < 5
        assert within[-1] > ended_at - 5
        assert nodes.newest == generation
        saved = list_commits(nodes.store)[0]
        nodes.wait_until(lambda: list_commits(nodes.store)[0] != saved, "nothing is saved again")
        nodes.signal("a", signal.SIGTERM)
        nodes.signal("b", signal.SIGTERM)
        nodes.signal("c", signal.SIGTERM)
        assert set(nodes.end().values()) == {0}, nodes.story()
        assert "the journal cannot be written, its records are kept" in nodes.said


@pytest.mark.slow
@pytest.mark.usefixtures("s3_credentials")
def test_a_broken_run_in_a_bucket_comes_to_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = s3.location(s3.server())
    faults = "4 kill,agent,coordinator,everything"
    apart(
        *("chaos", "--faults", faults, "--layout", "two", "--out", tmp_path / "out"),
        *("--store", store),
        deadline=600,
    ).succeeds()
    (result,) = json.loads((tmp_path / "out" / "result.json").read_text())["runs"]
    assert result["recovered"], result
    assert not result["tracebacks"]
    assert not (tmp_path / "out" / "runs" / result["run"] / "run.d" / "terms").exists()
    refused = apart("chaos", "--faults", "rotten-disk", "--store", store, "--out", tmp_path / "o")
    refused.refuses("the run store is a bucket")
