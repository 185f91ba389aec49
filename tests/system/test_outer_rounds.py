"""Learners that train apart, from outside: the hash of every round is that of an undisturbed run,
whatever becomes of the workers that compute them.

A schedule is drawn from a seed. It has the number of workers, the rounds after which one of them
gets SIGKILL or SIGSTOP, and the round after which all leave. The run then continues with another
number. `HOLDFAST_OUTER_SCHEDULES` says how many schedules are tried.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from itertools import islice
from pathlib import Path

import pytest

from holdfast.core.round_bytes import bytes_to_each
from holdfast.core.sharding.state_table import learner_shares
from holdfast.elastic.protocol.fault_orders import FaultOrder, FaultOrders
from holdfast.events import (
    ChangeLeftOut,
    GenerationStarted,
    LearnerChecked,
    OuterRound,
    Record,
    WorkerLost,
    WorkerStarted,
)
from holdfast.launch.run.rounds import values_of_change
from holdfast.launch.run.runs import open_run
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.checkpoints import newest_tensors
from tests.support.commands import Outcome, apart, start, within
from tests.support.followed_run import FollowedRun

ROUNDS, LEARNERS, INNER_STEPS, BATCH = 20, 3, 8, 6
SETTINGS = (
    f"train.steps={ROUNDS}",
    f"train.batch_size={BATCH}",
    "train.evaluate.every=0",
    "train.schedule.warmup_steps=2",
    f"outer.learners={LEARNERS}",
    f"outer.every_steps={INNER_STEPS}",
    "checkpoint.every_steps=1000",
    "checkpoint.memory_every_steps=1",
    "cluster.threads_per_worker=1",
)
HOWS = {
    "none": (),
    "int4": ("outer.codec.name=int4",),
    "topk": ("outer.codec.name=topk",),
    "fragments": ("outer.fragments=2", f"outer.every_steps={2 * INNER_STEPS}", "model.layers=2"),
    "overlap": ("outer.overlap_steps=3",),
}
HOWS["both"] = (*HOWS["fragments"], *HOWS["overlap"])
"""By name, more settings; a round has as many inner steps with each."""
SAMPLES = f"{ROUNDS * BATCH * INNER_STEPS:,} samples in {ROUNDS} steps: none missing, none twice"


def hashes(folder: Path) -> dict[int, set[str]]:
    """The hashes of each round that any worker has written."""
    found: dict[int, set[str]] = {}
    for record in read_journal(FolderStore(folder)):
        if isinstance(record.event, OuterRound):
            found.setdefault(record.event.step, set()).add(record.event.sha256)
    return found


def _alone(run_file: Path, how: str) -> Path:
    """The folder of an undisturbed run, whose one worker computes all learners."""
    folder = run_file.parent / f"outer-{how}"
    if not folder.exists():
        run = FollowedRun(folder, _train(run_file, folder, 1, how))
        run.finish()
    return folder


@pytest.mark.parametrize("how", ["none", "both"])
def test_a_worker_that_is_killed_changes_no_round(run_file: Path, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "killed"
    run = FollowedRun(folder, _train(run_file, folder, 2, how))
    run.until(lambda record: _is_done(record, 4))
    os.kill(run.pids[1], signal.SIGKILL)
    run.finish()
    assert len(run.events(WorkerLost)) == 1
    _check(folder, _alone(run_file, how))
    hosts = {(e.rank, tuple(e.learners)) for e in run.events(OuterRound) if e.step == ROUNDS}
    assert sum(len(learners) for _, learners in hosts) == LEARNERS
    assert "equal" in within("audit", "replay", folder, "--step", "2").succeeds().out
    if how == "none":
        _check_plan(run_file, folder, run.events(OuterRound))
    else:
        _check_bytes(folder, run.events(OuterRound))


def _check_bytes(folder: Path, rounds: list[OuterRound]) -> None:
    """Two rounds, with a fragment each, send together what one round without fragments does."""
    sent = {e.step: e.sent_bytes for e in rounds if e.rank == 0 and e.step in (2, 3)}
    values = values_of_change(open_run(folder).config)
    (to_each,) = set(bytes_to_each(learner_shares(LEARNERS, 2), values, 0))
    assert sum(sent.values()) == pytest.approx(to_each, rel=0.02)
    assert max(sent.values()) < 0.55 * to_each


def _check_plan(run_file: Path, folder: Path, rounds: list[OuterRound]) -> None:
    """What the workers sent is what `holdfast plan` predicts, and it reads the run's seconds."""
    more = ("--sites", "2x1@100,20", "--measured", folder, "--json")
    plan = json.loads(within("plan", run_file, *SETTINGS, *more).succeeds().out)
    none, *coded = plan["rounds"]
    measured = {event.sent_bytes for event in rounds if event.step < 4}
    to_each = bytes_to_each(learner_shares(LEARNERS, 2), plan["values"], 0)
    assert sorted(measured) == pytest.approx(sorted(set(to_each)), rel=0.02)
    assert none["sent_bytes"] == max(to_each)
    assert 0 < plan["inner_step_s"] < 60
    assert all(cost["leaving_bytes"] < none["leaving_bytes"] for cost in coded)


@pytest.mark.slow
def test_a_worker_that_sends_a_wrong_change_is_named(run_file: Path, tmp_path: Path) -> None:
    """It multiplies the change of one of its learners by -10, once. The round is applied without
    that learner, and `holdfast explain` names the rank."""
    folder, faults = tmp_path / "cheated", FaultOrders(tmp_path / "faults")
    faults.prepare()
    faults.arm(FaultOrder(1, "cheat", "wrong change", "changed", step=5, rank=1))
    more = ("outer.trust.checks=1", f"cluster.faults={faults.folder}", "layout.workers=2")
    run = FollowedRun(folder, start("train", run_file, f"folder={folder}", *SETTINGS, *more))
    run.finish()
    (out,) = run.events(ChangeLeftOut)
    assert (out.step, out.rank, out.count) == (5, 1, 1)
    verdicts = [event.verdict for event in run.events(LearnerChecked)]
    assert sorted(verdicts) == ["differs"] + ["equal"] * (ROUNDS * LEARNERS - 1)
    found = hashes(folder)
    assert all(len(of_round) == 1 for of_round in found.values())
    alone = hashes(_alone(run_file, "none"))
    assert [step for step in found if found[step] == alone[step]] == [1, 2, 3, 4]
    assert "rank 1 computed learner" in within("explain", folder).out


@pytest.mark.slow
def test_a_wrong_change_may_stop_the_run(run_file: Path, tmp_path: Path) -> None:
    folder, faults = tmp_path / "stopped", FaultOrders(tmp_path / "faults")
    faults.prepare()
    faults.arm(FaultOrder(1, "cheat", "wrong change", "changed", step=5, rank=1))
    words = "outer.trust.checks=1", "outer.trust.on_mismatch=stop", "layout.workers=2"
    more = (f"folder={folder}", *SETTINGS, f"cluster.faults={faults.folder}", *words)
    ended = apart("train", run_file, *more)
    assert ended.code not in (0, None)
    assert "round 5: rank 1" in ended.err + ended.out
    assert max(hashes(folder)) == 4, "the round was not applied"


def test_the_codec_of_auto_is_the_fastest_at_the_start_and_then_fixed(
    run_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "auto"
    words = (f"folder={folder}", *SETTINGS, "layout.workers=2", "outer.codec.name=auto")
    refused = within("plan", run_file, *words)
    assert refused.code == 2
    words = (*words, "train.schedule.steps=9")
    for steps, mbit_s in ((1, 1), (2, 10**6)):
        sites = f"cluster.sites=[{{name: a, mbit_s: {mbit_s}}}, {{name: b, mbit_s: {mbit_s}}}]"
        run = apart("train", run_file, *words, f"train.steps={steps}", sites).succeeds()
        assert "outer.codec.name is int4" in run.err + run.out
        resolved = json.loads((folder / "resolved.json").read_text())
        assert resolved["config"]["outer"]["codec"]["name"] == "int4"


SCHEDULES = int(os.environ.get("HOLDFAST_OUTER_SCHEDULES", "4"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_any_schedule_of_losses_and_returns_has_the_same_rounds(
    run_file: Path, tmp_path: Path, seed: int
) -> None:
    how = list(HOWS)[seed % len(HOWS)]
    chooser, folder = random.Random(seed), tmp_path / "disturbed"
    points = sorted(chooser.sample(range(1, ROUNDS - 6), 4))
    leave_at = points.pop(chooser.randrange(len(points)))
    faults = {point: chooser.choice((signal.SIGKILL, signal.SIGSTOP)) for point in points}
    before = {point: fault for point, fault in faults.items() if point < leave_at}
    after = {point: fault for point, fault in faults.items() if point > leave_at}
    _disturb(run_file, folder, how, chooser, before, leave_at).succeeds()
    _disturb(run_file, folder, how, chooser, after, None).succeeds()
    lost = [r.event for r in read_journal(FolderStore(folder)) if isinstance(r.event, WorkerLost)]
    assert len(lost) >= len(faults)
    _check(folder, _alone(run_file, how))


def _disturb(
    run_file: Path,
    folder: Path,
    how: str,
    chooser: random.Random,
    faults: dict[int, signal.Signals],
    leave_at: int | None,
) -> Outcome:
    """Train with a number of workers that is drawn, and hit one of them after each of some
    rounds."""
    before = len(read_journal(FolderStore(folder))) if folder.exists() else 0
    process = _train(run_file, folder, chooser.choice((1, 2, 3)), how)
    run, due, pids, hit = FollowedRun(folder, process), dict(faults), dict[int, int](), 0
    for record in islice(run.records(), before, None):
        event = record.event
        if isinstance(event, GenerationStarted):  # a worker that stays has another rank
            came_from = enumerate(event.came_from or ())
            pids = {rank: pids[was] for rank, was in came_from if was is not None}
        if isinstance(event, WorkerStarted):
            pids[event.rank] = event.pid
        # Late reports of a generation that was already hit do not count.
        if not isinstance(event, OuterRound) or record.generation <= hit or not pids:
            continue
        if due and event.step >= min(due):
            try:
                os.kill(pids[chooser.choice(sorted(pids))], due[min(due)])
            except ProcessLookupError:
                continue  # it was replaced, and the journal will say so
            hit = record.generation
            del due[min(due)]
        elif not due and leave_at is not None and event.step >= leave_at:
            leave_at = None
            process.send_signal(signal.SIGTERM)
    ended = run.end()
    assert not due, f"the run ended before the rounds {sorted(due)}: {ended.err}"
    return ended


def _train(run_file: Path, folder: Path, workers: int, how: str) -> subprocess.Popen[str]:
    more = f"layout.workers={workers}", *HOWS[how]
    return start("train", run_file, f"folder={folder}", *SETTINGS, *more)


def _is_done(record: Record, step: int) -> bool:
    return isinstance(record.event, OuterRound) and record.event.step >= step


def _check(folder: Path, alone: Path) -> None:
    """Every round, all state at the end and the ledger are those of the undisturbed run."""
    expected = hashes(alone)
    assert sorted(expected) == list(range(1, ROUNDS + 1))
    assert all(len(found) == 1 for found in expected.values())
    assert len(set.union(*expected.values())) == ROUNDS, "the weights move in each round"
    assert hashes(folder) == expected
    assert newest_tensors(folder, ROUNDS) == newest_tensors(alone, ROUNDS)
    assert SAMPLES in within("data", "audit", folder).succeeds().out
