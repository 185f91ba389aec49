"""`holdfast audit replay`: a stranger computes steps of a copied run again, in fresh processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.events import StepDone
from tests.runtime.cli.conftest import Trained, trained
from tests.support.commands import Outcome, apart, start, within, write_run_file
from tests.support.followed_run import FollowedRun

__all__ = ["trained"]


def change_events(run: Path, kind: str, step: int, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    """Change an event of a kind and a step in the journal of a run: one that counts."""
    for path in sorted((run / "journal").glob("*/*.jsonl"), reverse=True):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            record = json.loads(line)
            if record["kind"] == kind and record["event"]["step"] == step:
                change(record["event"])
                lines[number] = json.dumps(record, separators=(",", ":"))
                path.write_text("\n".join(lines) + "\n")
                return
    raise AssertionError(f"no {kind} of step {step}")


def edit_ledger(event: dict) -> None:  # type: ignore[type-arg]
    event["entries"][0]["hash"] = event["entries"][0]["hash"][::-1]


def call_skipped(event: dict) -> None:  # type: ignore[type-arg]
    event["entries"][0] |= {"hash": "", "skipped": "non-finite"}


def copied(root: Path, to: Path) -> tuple[Path, Path]:
    """Copies of a run and of its dataset, where the run does not expect them."""
    shutil.copytree(root / "run", to / "run")
    shutil.copytree(root / "dataset", to / "data")
    return to / "run", to / "data"


def test_a_copied_run_is_computed_again_and_an_edited_entry_is_named(
    trained: Trained, tmp_path: Path
) -> None:
    run, data = copied(trained.root, tmp_path)
    change_events(run, "batch_fed", 5, edit_ledger)
    done = within("audit", "replay", run, "--step", "5", "--data", data, "--json")
    assert done.code == 1, done.err
    found = json.loads(done.out)
    (step,) = found["steps"]
    assert step["start"] < 5  # 3, or the step at which a busy machine saved
    assert (step["end"], step["compared_with"]) == (6, "checkpoint")
    assert step["recorded"] == step["replayed"]
    assert found["unlike"] == []
    (problem,) = found["problems"]
    assert (problem["kind"], problem["step"]) == ("ledger", 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--step", "9"), "which did the steps 1 to 6"),
        (("--step", "1", "--data", "nowhere"), "--data"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    trained: Trained, words: tuple[str, ...], said: str
) -> None:
    within("audit", "replay", trained.folder, *words).refuses_last(said)


def disturbed_run(root: Path) -> None:
    """60 steps of three, two and one workers: three workers and the agent are killed."""
    path = write_run_file(root, 40)
    keys = ("train.steps=60", "checkpoint.every_steps=15", "train.digest_every=1")
    keys += ("train.batch_size=12", "layout.mode=given")

    def train(workers: int, kills: tuple[int, ...], agent_at: int = 0) -> Outcome:
        words = ("train", path, *keys, f"layout.workers={workers}")
        run = FollowedRun(root / "run", start(*words))

        def is_done(step: int) -> None:
            run.until(lambda r: isinstance(r.event, StepDone) and r.event.step >= step)

        for at in kills:
            is_done(at)
            os.kill(run.pids[max(run.pids)], signal.SIGKILL)
        if agent_at:
            is_done(agent_at)
            run.process.kill()
        return run.end()

    train(3, (5, 12), agent_at=24)
    train(2, (33,)).succeeds()


@pytest.mark.slow
def test_twenty_random_steps_of_a_disturbed_run_have_the_recorded_hashes(tmp_path: Path) -> None:
    disturbed_run(tmp_path / "made")
    run, data = copied(tmp_path / "made", tmp_path / "copy")
    shutil.rmtree(tmp_path / "made")
    chosen = sorted(random.Random(4).sample(range(1, 61), 20))
    words = [word for step in chosen for word in ("--step", str(step))]
    done = apart("audit", "replay", run, *words, "--data", data, "--json", deadline=240).succeeds()
    found = json.loads(done.out)
    assert [step["step"] for step in found["steps"]] == chosen
    assert all(step["recorded"] == step["replayed"] for step in found["steps"])
    assert {step["compared_with"] for step in found["steps"]} == {"digest"}
    assert [step["end"] for step in found["steps"]] == chosen
    edits: dict[str, tuple[str, int, Callable[[dict], None]]] = {  # type: ignore[type-arg]
        "ledger: step 38, microbatch ": ("batch_fed", 38, edit_ledger),
        "the run's list of skips does not": ("batch_fed", 20, call_skipped),
        "curve: step 41: loss is": ("step_done", 41, lambda e: e.update(loss=e["loss"] + 1e-9)),
        "weights: step 50: the weights after it": (
            *("weights_digest", 50),
            lambda e: e.update(sha256=e["sha256"][::-1]),
        ),
    }
    for said, (kind, step, change) in edits.items():
        edited = tmp_path / f"edited-{kind}-{step}"
        shutil.copytree(run, edited)
        change_events(edited, kind, step, change)
        done = apart("audit", "replay", edited, "--step", str(step), "--data", data, deadline=90)
        assert done.code == 1, done.err
        assert said in done.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ("layout.workers=2", "layout.tp=2"),
        ("layout.workers=4", "layout.dp_shard=2", "train.microbatch_size=2", "layout.zero=3"),
        ("layout.workers=2", "layout.pp=2", "model.layers=2"),
    ],
)
def test_each_rank_of_a_replica_is_computed(tmp_path: Path, keys: tuple[str, ...]) -> None:
    path = write_run_file(tmp_path)
    keys += ("train.digest_every=1", "layout.mode=given")
    apart("train", path, *keys, deadline=120).succeeds()
    found = json.loads(
        apart("audit", "replay", tmp_path / "run", "--step", "5", "--json", deadline=120)
        .succeeds()
        .out
    )
    assert [step["recorded"] == step["replayed"] for step in found["steps"]] == [True]
