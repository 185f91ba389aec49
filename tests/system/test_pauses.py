"""A run that waits while a signal is high ends with the bits of an undisturbed one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.events import PauseBegun, RunStarted, StepDone
from holdfast.wire.journal import read_journal
from holdfast.wire.store.publish import replace_file
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import start, within, write_run_file
from tests.support.followed_run import FollowedRun, assert_same_bits
from tests.support.ranks import wait_until

PLAIN = ("checkpoint.every_steps=0", "train.evaluate.every=0", "layout.workers=2")


def say(file: Path, value: float) -> None:
    """Let the signal have this value from now on."""
    time = datetime.now(UTC) - timedelta(seconds=1)
    replace_file(file, f"time,grams\n{time.isoformat()},{value}\n")


@pytest.mark.slow
@pytest.mark.parametrize("node", ["", "first"])
def test_a_run_waits_for_a_better_hour_and_continues_to_the_same_bits(
    tmp_path: Path, node: str
) -> None:
    run_file, signal = write_run_file(tmp_path), tmp_path / "grams.csv"
    say(signal, 500)  # a start in a bad hour trains until its first step
    steps = ("train.steps=150", *([f"cluster.node={node}"] if node else []))
    pause = (f"pause.file={signal}", "pause.above=400", "pause.below=300")
    run = FollowedRun(tmp_path / "run", start("train", run_file, *PLAIN, *steps, *pause))
    run.until(lambda record: isinstance(record.event, PauseBegun))
    wait_until(lambda: "paused at step" in within("status", tmp_path / "run").out, what="the pause")
    say(signal, 350)  # below the one limit only
    replace_file(signal, "time,grams\n2026-01")  # half of it: no pause ends
    say(signal, 250)
    run.until(lambda record: isinstance(record.event, StepDone) and record.event.step >= 20)
    say(signal, 401)
    run.until(lambda record: isinstance(record.event, PauseBegun) and record.event.value == 401)
    say(signal, 300)
    assert run.end().code == 0
    events = [record.event for record in read_journal(FolderStore(tmp_path / "run"))]
    assert sum(isinstance(event, RunStarted) for event in events) == 3
    done = [event.step for event in events if isinstance(event, StepDone)]
    assert done == list(range(1, 151)), "a pause repeats no step"

    within("train", run_file, *PLAIN, *steps, f"folder={tmp_path}/undisturbed").succeeds()
    assert_same_bits(tmp_path / "run", tmp_path / "undisturbed", 150)


def test_limits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    run_file, signal = write_run_file(tmp_path), tmp_path / "grams.csv"
    say(signal, 500)
    within("train", run_file, f"pause.file={signal}").refuses_last("pause.file", code=2)
    both = ("pause.above=4", "pause.below=5")
    within("config", "show", run_file, *both).refuses_last("use 4", code=2)
    missing = (f"pause.file={tmp_path}/none.csv", "pause.above=4", "train.steps=5")
    within("train", run_file, *missing).refuses_last("pause.file=FILE", code=2)
