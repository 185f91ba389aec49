"""Promise 1 for runs that change. A longer run is the run of that length. A branch with another
learning rate is another run from its first step on."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.events import StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import Outcome, apart, start, within, write_run_file
from tests.support.marks import in_campaign
from tests.support.ranks import DEADLINE_S, wait_until


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


def trained(run_file: Path, name: str, *settings: str) -> Path:
    """Train in a folder of that name."""
    folder = run_file.parent / name
    apart("train", run_file, f"folder={folder}", *settings, deadline=DEADLINE_S).succeeds()
    return folder


def rates(folder: Path) -> dict[int, float]:
    events = [record.event for record in read_journal(FolderStore(folder))]
    return {e.step: e.learning_rate for e in events if isinstance(e, StepDone)}


def audited(folder: Path) -> str:
    audit = within("data", "audit", folder).succeeds()
    return audit.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("train.schedule.kind=constant", id="constant"),
        in_campaign("train.schedule.steps=5", id="a schedule with a length of its own"),
    ],
)
def test_a_longer_run_is_the_run_of_that_length(schedule: str, run_file: Path) -> None:
    settings = (schedule, "train.schedule.warmup_steps=2")
    longer = trained(run_file, "longer", *settings, "train.steps=7")
    trained(run_file, "longer", *settings, "train.steps=14")
    at_once = trained(run_file, "at-once", *settings, "train.steps=14")
    within("checkpoint", "diff", longer, at_once).succeeds()
    assert "56 samples in 14 steps: none missing, none twice" in audited(longer)


@pytest.mark.slow
def test_a_branch_with_another_rate_differs_from_its_first_step_on(run_file: Path) -> None:
    settings = ("train.schedule.kind=constant", "train.schedule.warmup_steps=0")
    parent = trained(run_file, "parent", *settings)
    branch = run_file.parent / "branch"
    within(
        "branch", parent, "--at", "3", "--to", branch, "train.optimizer.learning_rate=1e-4"
    ).succeeds()
    apart("train", branch / "run.yaml", deadline=DEADLINE_S).succeeds()
    assert rates(branch) == dict.fromkeys((4, 5, 6), 1e-4)
    assert rates(parent) == dict.fromkeys(range(1, 7), 3e-3)
    assert within("checkpoint", "diff", f"{parent}@6", f"{branch}@6").code == 1
    assert within("checkpoint", "diff", f"{parent}@3", f"{branch}@3").code == 0
    assert "12 samples in 3 steps (4 to 6)" in audited(branch)
    assert "24 samples in 6 steps" in audited(parent)


@pytest.mark.slow
def test_a_run_that_is_training_can_be_branched(run_file: Path) -> None:
    """Both end alike, to the bit, and the parent is not disturbed."""
    parent, branch = run_file.parent / "parent", run_file.parent / "branch"
    settings = ("train.steps=400", "checkpoint.keep_every=10", "checkpoint.every_steps=10")
    process = start("train", run_file, f"folder={parent}", *settings)
    try:
        made: list[Outcome] = []

        def branched() -> bool:
            if (parent / "commits").is_dir():
                made.append(within("branch", parent, "--at", "20", "--to", branch))
            return bool(made) and made[-1].code == 0

        wait_until(branched)
        assert process.poll() is None, "the parent still trains"
        _, told = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, told
    finally:
        process.kill()
    apart("train", branch / "run.yaml", deadline=DEADLINE_S).succeeds()
    within("checkpoint", "diff", f"{parent}@400", f"{branch}@400").succeeds()
    assert "1,520 samples in 380 steps (21 to 400)" in audited(branch)
