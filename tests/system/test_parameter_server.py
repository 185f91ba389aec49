"""Runs with parameter servers, from outside. What the journal says of their updates is within the
bounds, and it is enough to compute the same weights again."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.data.lineage import split_effective
from holdfast.events import GenerationStarted, ServerUpdates, UpdatesAdapted, WorkerLost
from holdfast.policy.server_updates import UpdateRule
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.checkpoints import newest_tensors
from tests.support.commands import start, within
from tests.support.followed_run import FollowedRun
from tests.support.marks import in_campaign

STEPS, BATCH = 10, 12
SETTINGS = (
    f"train.batch_size={BATCH}",
    "train.microbatch_size=1",
    "train.evaluate.every=0",
    "train.schedule.warmup_steps=2",
    "train.digest_every=1",
    "checkpoint.every_steps=100000",
    "cluster.threads_per_worker=1",
)


def _train(run_file: Path, folder: Path, *settings: str, steps: int = STEPS) -> FollowedRun:
    given = f"folder={folder}", *SETTINGS, f"train.steps={steps}", *settings
    return FollowedRun(folder, start("train", run_file, *given))


def _updates(folder: Path) -> Iterator[ServerUpdates]:
    """The updates of each step that counts."""
    for record in split_effective(read_journal(FolderStore(folder)))[0]:
        if isinstance(record.event, ServerUpdates):
            yield record.event


def _check_updates(folder: Path, steps: int, batch: int, bound: int) -> int:
    """Each server applied each microbatch of each step once, within the bounds. Return the number
    of stale steps' updates."""
    seen, stale = set[int](), 0
    for event in _updates(folder):
        if event.step in seen:  # told twice, around a loss
            continue
        seen.add(event.step)
        workers = len(event.updates)
        for rows in event.updates:
            assert sorted(row[2] for row in rows) == list(range(batch))
            if event.is_synchronous:
                assert all(row[3] == 0 for row in rows)
                continue
            rule = UpdateRule(batch, False, 1, bound)
            stale += len(rows)
            first = rows[0][0]
            assert [row[0] for row in rows] == list(range(first, first + batch))
            assert max(row[3] for row in rows) <= rule.largest_staleness(workers)
            _check_leads(rows, workers, first, bound)
    assert sorted(seen) == list(range(1, steps + 1))
    return stale


def _check_leads(rows: list[list[int]], workers: int, first: int, bound: int) -> None:
    """When a worker got its weights, no other one with work was more than `bound` behind."""
    totals = [sum(row[1] == k for row in rows) for k in range(workers)]
    done = [[0] * workers]
    for row in rows:
        done.append([count + (row[1] == k) for k, count in enumerate(done[-1])])
    for at, (number, worker, _, staleness, _) in enumerate(rows):
        there = done[number - staleness - first]
        others = [c for k, c in enumerate(there) if k != worker and c < totals[k]]
        assert done[at][worker] == there[worker], "its own updates are never missing"
        assert there[worker] - min(others, default=there[worker]) <= bound


@pytest.mark.parametrize("mode", ["bounded_stale", in_campaign("switching")])
def test_a_disturbed_run_stays_in_bounds_and_can_be_replayed(
    run_file: Path, tmp_path: Path, mode: str
) -> None:
    folder, more = tmp_path / "run", ("server.update_microbatches=2", "server.staleness=1")
    if mode == "switching":
        more = (*more[:1], "server.straggling=0.2")
    run = _train(run_file, folder, f"server.mode={mode}", "layout.workers=3", *more)
    run.until(lambda record: isinstance(record.event, ServerUpdates) and record.event.step >= 3)
    os.kill(run.pids[2], signal.SIGKILL)
    run.finish()
    assert len(run.events(WorkerLost)) == 1
    assert run.events(GenerationStarted)[-1].step >= 3, "no checkpoint was made, and no step lost"
    stale = _check_updates(folder, STEPS, BATCH, 1 if mode == "bounded_stale" else 2)
    assert stale or mode == "switching"
    samples = f"{STEPS * BATCH:,} samples in {STEPS} steps: none missing, none twice"
    assert samples in within("data", "audit", folder).succeeds().out
    replayed = within("audit", "replay", folder, "--step", "3", "--step", str(STEPS))
    assert "hashes of the weights are equal" in replayed.succeeds().out


def test_synchronous_updates_grow_alike_on_any_number_of_workers(
    run_file: Path, tmp_path: Path
) -> None:
    found, grown, steps = [], [], 30
    synchronous = "server.mode=synchronous", "server.update_microbatches=2"
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        more = "server.max_update_microbatches=4", "server.noise_decay=0"
        settings = *synchronous, f"layout.workers={workers}", *more
        run = _train(run_file, folder, *settings, steps=steps)
        run.finish()
        assert not _check_updates(folder, steps, BATCH, 0)
        found.append(newest_tensors(folder, steps))
        grown.append([(e.step, e.width, e.noise_scale) for e in run.events(UpdatesAdapted)])
    assert found[0] == found[1]
    assert grown[0] == grown[1]
    assert [width for _, width, _ in grown[0]] == [4]


UPDATES = int(os.environ.get("HOLDFAST_SERVER_UPDATES", "100000"))


@pytest.mark.slow
def test_staleness_in_a_hundred_thousand_updates_of_workers_that_stall(
    run_file: Path, tmp_path: Path
) -> None:
    """A worker is stopped for a moment now and then, which makes the other ones wait for it."""
    folder, batch, bound, chooser = tmp_path / "run", 500, 3, random.Random(5)
    steps = -(-UPDATES // batch)
    more = f"train.batch_size={batch}", "train.digest_every=0", f"server.staleness={bound}"
    run = _train(
        run_file, folder, "server.mode=bounded_stale", "layout.workers=2", *more, steps=steps
    )
    for record in run.records():
        if isinstance(record.event, ServerUpdates) and record.event.step < steps:
            pid = run.pids[chooser.randrange(2)]
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(chooser.uniform(0.0, 0.2), os.kill, (pid, signal.SIGCONT)).start()
    run.finish()
    assert _check_updates(folder, steps, batch, bound) == 2 * steps * batch
