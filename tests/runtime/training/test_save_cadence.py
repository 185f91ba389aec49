"""An adaptive interval in the loop: rank 0 decides, all save alike, the journal says why.

The clock is the test's own: every look at it is a second later.
"""

from __future__ import annotations

from itertools import count, pairwise
from typing import Any

import pytest

from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.config.sections.peers import PeerConfig
from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.policy.saving.tier_durations import TierDurations
from holdfast.policy.saving.tiers import BUCKET, DISK, MEMORY, PEERS
from holdfast.training.engine.save_cadence import FailureStats, SaveCadence
from holdfast.training.engine.vote import Wishes
from tests.runtime.training.test_runner import STEPS, World, _config, _session, loop_of
from tests.support.ranks import RankContext, rank_values

RULES = CheckpointConfig(interval="adaptive", min_seconds=1, max_seconds=100)


def _steps(cadence: SaveCadence, steps: int, cost: float = 0.0) -> list[float]:
    """Steps of a second, of which each third saves and takes `cost` longer; seconds, by step."""
    now, out = 0.0, []
    for step in range(steps):
        saved = step % 3 == 2
        now += 1.0 + cost * saved
        if saved:
            cadence.record_save(now, [DISK])
        cadence.tick(now, cost * saved, is_usual=True)
        out.append(cadence.interval_s(DISK))
    return out


def test_a_fixed_interval_is_the_run_files() -> None:
    fixed = SaveCadence(CheckpointConfig(every_seconds=7), FailureStats(), 1, 0.0)
    assert _steps(fixed, 5) == [7] * 5
    assert CheckpointConfig(every_steps=9).by_steps == 9
    assert RULES.by_steps == 0


def test_dear_saves_and_quiet_runs_are_saved_more_rarely_and_each_change_has_a_reason() -> None:
    cheap, dear = (SaveCadence(RULES, FailureStats(), 1, 0.0) for _ in range(2))
    assert _steps(dear, 200, 0.8)[-1] > 2 * _steps(cheap, 200, 0.01)[-1]
    broken = FailureRate.from_prior().with_observation(600, failures=12)
    often = SaveCadence(RULES, FailureStats(broken), 1, 0.0)
    seldom = SaveCadence(RULES, FailureStats(), 1, 0.0)
    assert _steps(often, 30, 0.01)[-1] < _steps(seldom, 30, 0.01)[-1]
    [told] = SaveCadence(RULES, FailureStats(broken), 1, 0.0).tick(1.0, 0.0, is_usual=True)
    assert told.tier == 2
    assert "(12 failures in 10 min on 1 node)" in told.reason


def test_a_decision_is_told_once_and_a_validation_is_no_cost() -> None:
    cadence = SaveCadence(RULES, FailureStats(), 1, 0.0)
    assert len(cadence.tick(1.0, 0.0, is_usual=True)) == 1
    assert cadence.tick(2.0, 0.0, is_usual=True) == []
    calm = _steps(SaveCadence(RULES, FailureStats(), 1, 0.0), 60, 0.01)[-1]
    now, disturbed = 0.0, SaveCadence(RULES, FailureStats(), 1, 0.0)
    for step in range(60):
        saved, validated = step % 3 == 2, step % 5 == 4
        now += 1.0 + 0.01 * saved + 20.0 * validated
        if saved:
            disturbed.record_save(now, [DISK])
        disturbed.tick(now, 0.01 * saved, is_usual=not validated)
    assert disturbed.interval_s(DISK) < 2.5 * calm


ALL = CheckpointConfig(
    interval="adaptive",
    min_seconds=1,
    max_seconds=1e5,
    memory_every_steps="auto",
    peer_every_steps="auto",
    bucket="s3://bucket/run",
    bucket_every_seconds="auto",
    peers=(PeerConfig(name="stage", address="127.0.0.1:7600"),),
)


def _simulated(rules: CheckpointConfig, steps: int, slow: dict[int, float]) -> dict[int, list[int]]:
    """The steps, of a second each, that were saved into each tier. slow: seconds until a save into
    a tier is done; a snapshot blocks for a millisecond, copies and writes slow a step down."""
    stats = FailureStats(FailureRate.from_prior().with_observation(7200, failures=2))
    cadence, now, behind = SaveCadence(rules, stats, 1, 0.0), 0.0, 0.0
    saved: dict[int, list[int]] = {tier: [] for tier in range(4)}
    for step in range(1, steps + 1):
        now, behind = now + 1.0 + behind, 0.0
        cadence.tick(now, 0.001, is_usual=True, durations=TierDurations(slow))
        if due := cadence.due_tiers(now):
            due |= {MEMORY}  # whatever is captured is a snapshot first
            cadence.record_save(now, due)
            for tier in due:
                saved[tier].append(step)
            behind = 0.001 + 0.02 * (PEERS in due) + 0.3 * (DISK in due)
    return saved


def test_every_tier_has_its_own_cadence_and_the_bucket_gets_some_of_the_disks() -> None:
    saved = _simulated(ALL, 6000, {PEERS: 3.0, DISK: 10.0, BUCKET: 900.0})
    count = {tier: len(steps) for tier, steps in saved.items()}
    assert count[MEMORY] > count[PEERS] > count[DISK] > count[BUCKET] > 1
    assert set(saved[BUCKET]) < set(saved[DISK])
    assert min(b - a for a, b in pairwise(saved[BUCKET])) > 600  # none before it is done


def test_what_the_run_file_fixes_is_left_alone_and_the_others_reckon_with_it() -> None:
    rules = ALL.model_copy(update={"interval": "fixed", "every_steps": 50})
    cadence = SaveCadence(rules, FailureStats(), 1, 0.0)
    assert {decision.tier for decision in cadence.tick(1.0, 0.0, is_usual=True)} == {0, 1, 3}
    assert DISK not in cadence.due_tiers(1e6)
    assert BUCKET not in cadence.due_tiers(1e6)
    assert {DISK, BUCKET} <= cadence.due_tiers(1e6, already_due=[DISK])
    alone = SaveCadence(RULES, FailureStats(), 1, 0.0)
    beside = SaveCadence(RULES.model_copy(update={"memory_every_steps": 1}), FailureStats(), 1, 0.0)
    for cadence in (alone, beside):
        cadence.tick(1.0, 0.0, is_usual=True)
    # Snapshots take the failures of processes off the disk.
    assert beside.interval_s(DISK) > 1.2 * alone.interval_s(DISK)


def test_a_save_that_was_not_begun_stays_due() -> None:
    cadence = SaveCadence(CheckpointConfig(every_steps=0, every_seconds=5), FailureStats(), 1, 0.0)
    assert cadence.due_tiers(4.0) == frozenset()
    assert cadence.due_tiers(5.0) == cadence.due_tiers(6.0) == {DISK}
    cadence.record_save(6.0, [DISK])
    assert cadence.due_tiers(10.0) == frozenset()


def _run(rank: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    session = _session(rank, config)
    world, ticks = World(), count()
    with session.loader(0) as loader:
        stats = FailureStats(FailureRate.from_prior().with_observation(3600, failures=2))
        clock = lambda: float(next(ticks))  # noqa: E731
        loop_of(session, world, start_step=0, clock=clock, stats=stats).run(loader)
    session.close()
    told = [[e.step, e.tier, e.seconds, e.reason] for e in world.events("save_interval")]
    into = {
        step: [into.is_durable, into.to_peers, into.to_bucket] for step, into in world.into.items()
    }
    return {"saved": sorted(world.saved), "told": told, "into": sorted(into.items())}


def test_all_ranks_save_into_the_same_tiers(tmp_path: Any) -> None:
    made = _config(
        tmp_path,
        interval="adaptive",
        min_seconds=4,
        max_seconds=4,
        memory_every_steps="auto",
        peer_every_steps="auto",
        peers=[{"name": "stage", "address": "127.0.0.1:7600"}],
        bucket="s3://bucket/run",
        bucket_every_seconds=1e6,
    )
    first, second = rank_values(_run, 2, {"config": made})
    assert first["into"] == second["into"]
    into = dict(first["into"])
    assert into[STEPS] == [True, True, True]  # what is left behind goes everywhere
    assert {tier for _, tier, _, _ in first["told"]} == {0, 1, 2}
    durable = [step for step, (durable, _, _) in into.items() if durable]
    assert 1 < len(durable) <= len(into)
    assert not any(uploaded for step, (_, _, uploaded) in into.items() if step < STEPS)


@pytest.mark.parametrize("seconds", [1.0, 1e6])
def test_rank_0_decides_and_all_save_alike(tmp_path: Any, seconds: float) -> None:
    made = _config(
        tmp_path, interval="adaptive", min_seconds=seconds, max_seconds=seconds, every_steps=1
    )
    first, second = rank_values(_run, 2, {"config": made})
    # every_steps is not used: with an endless interval only the end is saved.
    due = list(range(1, STEPS + 1)) if seconds == 1 else [STEPS]
    assert first["saved"] == second["saved"] == due
    assert second["told"] == []
    [[step, tier, told, reason]] = first["told"]
    assert (step, tier, told) == (1, 2, seconds)
    assert "2 failures in" in reason


class _Full(World):
    """A world whose steps take a second and where one rank has no room at some of them."""

    def __init__(self, full: set[int]):
        super().__init__()
        self.now, self._full = 0, full

    def requests(self, step: int) -> Wishes:
        self.now = step
        return super().requests(step)

    def has_free_slot(self) -> bool:
        return self.now not in self._full


def _owed(rank: RankContext, config: dict[str, Any]) -> dict[str, Any]:
    session = _session(rank, config)
    world = _Full({3, 4} if rank.rank == 1 else set())
    with session.loader(0) as loader:
        loop_of(session, world, start_step=0, clock=lambda: float(world.now)).run(loader)
    session.close()
    skipped = [event.step for event in world.events("checkpoint_skipped")]
    return {"saved": sorted(world.saved), "skipped": skipped}


def test_a_save_by_the_clock_that_found_no_slot_is_owed_at_the_next_step(tmp_path: Any) -> None:
    """Due after three seconds; a rank has no room then, nor a step later: the fifth is saved."""
    made = _config(tmp_path, every_steps=0, every_seconds=3)
    first, second = rank_values(_owed, 2, {"config": made})
    assert first == {"saved": [5, STEPS], "skipped": [3]}
    assert second == {"saved": [5, STEPS], "skipped": []}
