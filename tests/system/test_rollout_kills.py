"""A run that generates its data is killed again and again, and makes the same to the bit.

One worker and one actor run undisturbed. Another run has two trainers, four actors and a scorer.
Actors, scorers, trainers and the coordinator's agent get SIGKILL at random moments. Each start has
another number of actors. Completions (by the hashes of what was fed), rewards, losses and weights
are those of the undisturbed run, and each completion has one fate.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.events import RoleExited
from holdfast.wire.journal import read_journal
from holdfast.wire.store.run_store import FolderStore
from tests.support.checkpoints import newest_tensors
from tests.support.commands import within
from tests.support.rollout_run import RolloutRun, write_run_file, write_teacher

KILLS = int(os.environ.get("ROLLOUT_KILLS", "20"))
"""Kills of one run."""
RUNS = int(os.environ.get("ROLLOUT_RUNS", "20"))
"""Runs that are killed once, at a random moment."""
SEED = int(os.environ.get("ROLLOUT_SEED", "5"))
"""Draws these moments and the numbers of actors."""


OBJECTIVES = {
    0: ("objective.beta=0.1", "rollout.source_column=size"),
    1: ("objective.kind=rloo", "objective.beta=0.1", "objective.entropy_coef=0.01"),
    2: ("objective.kind=ppo", "model.score_head=also", "objective.whiten_advantages=true"),
}
"""By lag: what reads completions with a reference or a head of values, or all rows of a step."""


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_kills_of_all_roles_change_no_bit(tmp_path: Path, lag: int) -> None:
    steps = 2 * KILLS
    settings = (f"rollout.lag={lag}", f"train.steps={steps}", *OBJECTIVES[lag])
    run_file = write_run_file(tmp_path)
    alone = RolloutRun(run_file, tmp_path / "alone", settings)
    alone.finish()
    more = ("layout.workers=2", "rollout.actors=4")
    killed = RolloutRun(run_file, tmp_path / "killed", (*settings, *more))
    killed.disturb(KILLS, random.Random(20261128 + lag))
    print(f"lag {lag}: {dict(killed.killed)}, agents after steps {killed.resumed_from}")
    assert sum(killed.killed.values()) == KILLS, "it was over before all kills: raise the steps"
    _expect_same(alone, killed, steps)


@pytest.mark.slow
def test_each_completion_has_one_fate_whenever_a_run_is_killed(tmp_path: Path) -> None:
    """Groups without variance are drawn again, and passes end within steps."""
    settings = ("rollout.filter=no_variance", "rollout.redraws=2", "train.steps=12")
    settings += ("train.batch_size=24", "checkpoint.every_steps=3")
    run_file = write_run_file(tmp_path)
    alone = RolloutRun(run_file, tmp_path / "alone", settings)
    alone.finish()
    chooser = random.Random(SEED)
    for number in range(RUNS):
        more = ("layout.workers=2", f"rollout.actors={chooser.randint(1, 4)}")
        killed = RolloutRun(run_file, tmp_path / f"killed-{number}", (*settings, *more))
        killed.disturb(1, chooser, pause_s=20.0)
        print(number, dict(killed.killed))
        _expect_same(alone, killed, 12)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_a_student_learns_from_a_teacher_of_its_completions(tmp_path: Path, lag: int) -> None:
    """Trainers read completions with the teacher: kills change no bit, and the divergence falls."""
    steps = max(24, 2 * KILLS)
    run_file = write_run_file(tmp_path)
    write_teacher(tmp_path / "teacher")
    teacher = f"reference: {{model: {tmp_path / 'teacher'}}}"
    settings = (f"rollout.lag={lag}", f"train.steps={steps}", "rollout.rewards=[]")
    settings += (f"objective={{kind: distill, {teacher}, top_k: 8, beta: 0.5}}",)
    settings += ("train.optimizer.learning_rate=1e-2",)
    alone = RolloutRun(run_file, tmp_path / "alone", settings)
    alone.finish()
    divergence = [metrics["divergence"] for _, (_, metrics) in sorted(alone.curve().items())]
    first, last = sum(divergence[:5]) / 5, sum(divergence[-5:]) / 5
    print(f"mean divergence of the first five steps {first:.3f}, of the last five {last:.3f}")
    assert last < 0.8 * first
    more = ("layout.workers=2", "rollout.actors=4")
    killed = RolloutRun(run_file, tmp_path / "killed", (*settings, *more))
    killed.disturb(KILLS, random.Random(20261129 + lag))
    print(f"lag {lag}: {dict(killed.killed)}, agents after steps {killed.resumed_from}")
    assert sum(killed.killed.values()) == KILLS, "it was over before all kills: raise the steps"
    _expect_same(alone, killed, steps)


@pytest.mark.slow
def test_a_killed_actor_loses_less_than_one_completion(tmp_path: Path) -> None:
    """With four completions under way. The tokens that it lost are counted, and the next actor
    continues from those that it had handed in."""
    length = 400
    settings = (f"rollout.max_tokens={length}", "rollout.slots=4", "train.steps=2")
    settings += (f"data.sequence_length={length + 8}", f"model.max_position={length + 64}")
    run_file = write_run_file(tmp_path)
    alone = RolloutRun(run_file, tmp_path / "alone", settings)
    alone.finish()
    killed = RolloutRun(run_file, tmp_path / "killed", settings)
    killed.start()
    chooser, seen = random.Random(3), set[int]()
    assert killed.process is not None
    while killed.process.poll() is None and len(seen) < 12:
        fresh = [pid for pid in killed.pids("actor") if pid not in seen]
        if fresh:
            time.sleep(chooser.uniform(0.5, 1.5))
            with suppress(ProcessLookupError):
                os.kill(fresh[0], signal.SIGKILL)
            seen.add(fresh[0])
    killed.finish()
    _expect_same(alone, killed, 2)
    events = [record.event for record in read_journal(FolderStore(killed.folder))]
    lost = [event.tokens for event in events if isinstance(event, RoleExited)]
    print(f"tokens lost with each actor: {lost}")
    assert all(0 <= (tokens or 0) <= length for tokens in lost)
    assert any(lost)


def _expect_same(alone: RolloutRun, killed: RolloutRun, steps: int) -> None:
    assert alone.curve() == killed.curve()
    fed, others = alone.fed(), killed.fed()
    assert len(fed) >= steps
    # Of a trainer that was lost with its last report the agent wrote entries without groups.
    assert {at: fed[at] for at in others} == others
    assert newest_tensors(alone.folder, steps) == newest_tensors(killed.folder, steps)
    audit = within("data", "audit", killed.folder).succeeds()
    assert "none missing, none twice" in audit.out
