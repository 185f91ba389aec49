"""`holdfast audit replay`: a stranger computes steps of a copied run again, in fresh processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tarfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from tests.runtime.cli.conftest import Trained, trained
from tests.support import followed_run
from tests.support.commands import apart, within, write_run_file
from tests.support.recorded_run import ARCHIVE, STEPS, UNITS, disturbed_run
from tests.system.test_golden import GOLDEN, expected, this_machine

__all__ = ["trained"]
EMULATED = os.environ.get("HOLDFAST_EMULATED_PYTHON", "")


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


def judge(found: dict, is_like: bool) -> None:  # type: ignore[type-arg]
    """All hashes are equal on a like processor; elsewhere the distance is small and stated."""
    if is_like:
        assert all(step["recorded"] == step["replayed"] for step in found["steps"])
        assert found["loss_distance"] == 0
    else:
        assert found["unlike"]
        assert found["loss_distance"] < 1e-6
        assert found["weight_distance"] < 1e-6


def test_a_run_of_another_machine_is_computed_again(tmp_path: Path) -> None:
    """20 random steps of the run in the archive, which lost workers and its agent. Its ledger is
    edited at step 13."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    change_events(tmp_path / "run", "batch_fed", 13, edit_ledger)
    chosen = sorted({13, *random.Random(5).sample([s for s in range(1, STEPS + 1) if s != 13], 19)})
    words = [word for step in chosen for word in ("--step", str(step))]
    done = within(
        "audit", "replay", tmp_path / "run", *words, "--data", tmp_path / "dataset", "--json"
    )
    assert done.code == 1, done.err
    found = json.loads(done.out)
    assert [(step["step"], step["end"]) for step in found["steps"]] == [(n, n) for n in chosen]
    assert {step["compared_with"] for step in found["steps"]} == {"digest"}
    assert [(p["kind"], p["step"]) for p in found["problems"]] == [("ledger", 13)]
    judge(found, is_like=not found["unlike"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("nodes", 12), ("halfway", 5), ("cut", 3)])
def test_steps_of_golden_runs_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, steps: int
) -> None:
    """These runs were made on a machine with AVX2 alone. Their journals name no processor."""
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    shutil.copytree(GOLDEN / "runs", tmp_path / "runs")
    words = [word for step in range(1, steps + 1) for word in ("--step", str(step))]
    with chdir(tmp_path / "runs"):
        done = within("audit", "replay", name, *words, "--data", "dataset", "--json").succeeds()
    found = json.loads(done.out)
    assert [step["step"] for step in found["steps"]] == list(range(1, steps + 1))
    made_on, here = expected("losses")["machine"], this_machine()
    judge(found, is_like=all(made_on[k] == here[k] for k in ("torch", "processor")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "emulated",
    ["", pytest.param(EMULATED, marks=pytest.mark.skipif(not EMULATED, reason="names no python"))],
    ids=["here", "emulated"],
)
def test_twenty_random_steps_of_a_disturbed_run_have_the_recorded_hashes(
    emulated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """emulated: an interpreter that runs on another processor (docs/guide/replay.md)."""
    keys = ("train.steps=60", "checkpoint.every_steps=15")
    with monkeypatch.context() as patched:
        if emulated:
            patched.setattr(sys, "executable", emulated)
            patched.setattr(followed_run, "DEADLINE", 1500.0)
        disturbed_run(
            tmp_path / "made", keys, agent_at=24, kill_at=33, **(UNITS if emulated else {})
        )
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
        if emulated and kind != "batch_fed":
            continue  # on an unlike processor, a bound judges numbers
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
