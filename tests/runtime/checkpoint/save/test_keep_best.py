"""Checkpoints with the lowest validation loss stay."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from holdfast.checkpoint.save.retention import (
    BEST_PREFIX,
    RetentionRules,
    keep_lowest,
    kept_steps,
    removable_commits,
)
from holdfast.core.format.manifest import commit_key, parse_commit_key
from holdfast.elastic.agent.best_checkpoints import BestCheckpoints
from holdfast.events import Evaluated, Record
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.commands import within, write_run_file


def committed(store: FolderStore, *steps: int) -> None:
    for step in steps:
        store.create(commit_key(1, step), b"")


def test_the_lowest_losses_stay_and_a_coming_checkpoint_releases_none(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    committed(store, 10, 20, 30)
    for step, loss in ((10, 3.0), (20, 1.5), (25, 0.1), (30, 2.0)):
        keep_lowest(store, 2, {step: loss})
    assert kept_steps(store) == {20, 30}, "step 25 was validated and never saved"
    keep_lowest(store, 2, {40: 1.0})
    assert kept_steps(store) == {20, 30, 40}, "the checkpoint of step 40 may still come"
    committed(store, 40)
    keep_lowest(store, 2, {})
    assert kept_steps(store) == {20, 40}
    keys = removable_commits(store, RetentionRules(1), (), ())
    assert [place[0] for key in keys if (place := parse_commit_key(key))] == [30, 10]


def test_a_step_that_is_done_again_has_its_newest_loss(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    committed(store, 10, 20)
    keep_lowest(store, 1, {10: 1.0})
    keep_lowest(store, 1, {10: 2.0})
    assert store.get(f"{BEST_PREFIX}10") == b"2.0"
    keep_lowest(store, 1, {20: 1.5})
    assert kept_steps(store) == {20}


def test_losses_of_earlier_sessions_count(tmp_path: Path) -> None:
    """The first session was killed before it stored a loss."""
    store = FolderStore(tmp_path)
    committed(store, 10, 20, 30)
    losses = ((10, 1.0), (20, 2.0), (20, 3.0), (30, 2.5))
    events = [Evaluated(loss, None, 1.0, 0.1, step=step) for step, loss in losses]
    records = [Record(1, "agent", at, float(at), event) for at, event in enumerate(events)]

    async def resume() -> None:
        best = BestCheckpoints(store, 2, print)
        best.load(records[:3])
        best.observe(records[3])
        await best.finish()

    asyncio.run(resume())
    assert kept_steps(store) == {10, 30}


@pytest.mark.slow
def test_a_run_keeps_its_best_checkpoints(tmp_path: Path) -> None:
    """A rate that is too high lets the loss rise after the best step."""
    run_file = write_run_file(tmp_path)
    within(
        *(
            "train",
            run_file,
            "train.steps=60",
            "checkpoint.every_steps=4",
            "train.evaluate.every=4",
        ),
        *("checkpoint.keep_last=1", "checkpoint.keep_best=2", "train.schedule.kind=constant"),
        "train.optimizer.learning_rate=0.3",
    ).succeeds()
    store = FolderStore(tmp_path / "run")
    events = [record.event for record in read_journal(store)]
    losses = {event.step: event.loss for event in events if isinstance(event, Evaluated)}
    best = sorted(losses, key=lambda step: losses[step])[:2]
    there = {place[0] for key in store.list("commits/") if (place := parse_commit_key(key))}
    assert max(best) < 60, "the test needs a run that gets worse"
    assert {*best, 60} <= there
    assert kept_steps(store) == set(best)
    listed = json.loads(within("checkpoint", "list", tmp_path / "run", "--json").succeeds().out)
    told = {row["step"]: row["validation_loss"] for row in listed if "validation_loss" in row}
    assert told == {step: losses[step] for step in best}
    assert len(there) <= 5, "the rest is removed, but for those that were verified or came last"
