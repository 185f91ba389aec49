"""All tiers of a run: how failures are shared out, what each tier costs, which are due."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.sections.checkpoint import CheckpointConfig
from holdfast.config.sections.peers import PeerConfig
from holdfast.events import (
    CheckpointCommitted,
    CheckpointRestored,
    CheckpointUploaded,
    Event,
    Record,
    SnapshotKept,
    StepDone,
)
from holdfast.policy.saving.destinations import why_save_now
from holdfast.policy.saving.failure_classes import PRIOR_FAILURE_COUNTS, FailureClassCounts
from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.policy.saving.interval import IntervalBounds, SaveCost
from holdfast.policy.saving.retention import removable_steps
from holdfast.policy.saving.tier_durations import MEASURED_SAVES, TierDurations, TierMeasurements
from holdfast.policy.saving.tiers import (
    BUCKET,
    DISK,
    MEMORY,
    PEERS,
    SaveCosts,
    TierSettings,
    decide_intervals,
    due_tiers,
)

BOUNDS = {tier: IntervalBounds(1.0, 1800.0) for tier in range(4)}
PEER = PeerConfig(name="stage", address="127.0.0.1:7600")


# --- classes of failures --------------------------------------------------------------------------
@given(st.sets(st.integers(0, 3), min_size=1), st.lists(st.integers(0, 3), max_size=20))
def test_every_failure_is_some_tiers_and_the_highest_takes_what_none_survives(
    tiers: set[int], seen: list[int]
) -> None:
    classes = FailureClassCounts()
    for level in seen:
        classes = classes.with_failure(level)
    found = classes.rate_by_tier(1e-3, sorted(tiers))
    assert set(found) == tiers
    assert sum(found.values()) == pytest.approx(1e-3)
    below = sum(count for level, count in enumerate(classes.counts) if level <= min(tiers))
    if len(tiers) > 1:
        assert found[min(tiers)] == pytest.approx(1e-3 * below / sum(classes.counts))


def test_what_was_seen_moves_the_shares() -> None:
    classes = FailureClassCounts()
    for _ in range(8):
        classes = classes.with_failure(1)
    assert (
        classes.rate_by_tier(1.0, (0, 1))[1]
        > 0.85
        > FailureClassCounts().rate_by_tier(1.0, (0, 1))[1]
    )
    assert sum(PRIOR_FAILURE_COUNTS) == pytest.approx(2)


# --- measured -------------------------------------------------------------------------------------
def _record(event: Event) -> Record:
    return Record(1, "mover", 0, 1e9, event)


def test_the_last_saves_of_each_tier_are_measured() -> None:
    measured = TierMeasurements()
    assert measured.durations() == TierDurations()
    assert measured.bytes_per_second(DISK) is None
    measured.observe(_record(CheckpointCommitted("k", 10**9, 500.0)))
    for _ in range(MEASURED_SAVES):
        measured.observe(_record(CheckpointCommitted("k", 10**9, 5.0)))
    measured.observe(_record(SnapshotKept("stage", 10**9, 2.0, spared=5 * 10**8)))
    measured.observe(_record(CheckpointUploaded("k", 0, 0.5)))  # an earlier mover had sent it
    measured.observe(_record(StepDone(1.0, 1, 0.1, 0.1, 3.0)))
    saves = {DISK: 5.0, PEERS: 2.0, BUCKET: 0.5}
    # Never read: as long as a complete save. Half of the snapshot was not sent.
    assert measured.durations() == TierDurations(saves, saves | {PEERS: 4.0})
    assert measured.bytes_per_second(DISK) == pytest.approx(2e8)
    assert measured.bytes_per_second(PEERS) == pytest.approx(2.5e8)
    assert measured.bytes_per_second(BUCKET) is None
    assert measured.usual_step_s == 3.0
    for took, sources in (
        (0.1, {"memory": 1}),
        (9.0, {"memory": 1, "peer b": 1}),
        (70.0, {"run store": 1}),
        (1e6, {}),  # nothing was read
    ):
        measured.observe(_record(CheckpointRestored(0, "k", 2, took, sources=sources)))
    read = {MEMORY: 0.1, PEERS: 9.0, DISK: 70.0, BUCKET: 0.5}
    assert measured.durations() == TierDurations(saves, read)
    assert TierDurations.from_json(measured.durations().to_json()) == measured.durations()


# --- which tiers there are, and which are decided -------------------------------------------------
def test_the_run_file_says_which_tiers_there_are_and_which_are_decided() -> None:
    plain = TierSettings.from_config(CheckpointConfig())
    assert (plain.present[-1], plain.automatic - {MEMORY}) == (DISK, frozenset())
    rules = CheckpointConfig(
        interval="adaptive",
        memory_every_steps=5,
        peers=(PEER,),
        peer_every_steps="auto",
        bucket="s3://bucket/run",
    )
    found = TierSettings.from_config(rules)
    assert found.present == (MEMORY, PEERS, DISK, BUCKET)
    assert found.automatic == {PEERS, DISK}
    alone = rules.model_copy(update={"machine": PEER, "memory_every_steps": 0, "bucket": ""})
    assert TierSettings.from_config(alone).present == (DISK,)  # nobody is his own peer


def test_slow_restores_from_the_run_store_make_snapshots_on_peers_worth_having() -> None:
    """A snapshot on a peer costs 0.6 s and a durable save 2 ms. What a loss costs decides."""
    tiers = TierSettings((PEERS, DISK), frozenset((PEERS, DISK)), BOUNDS)
    costs = SaveCosts({PEERS: SaveCost(0.6), DISK: SaveCost(0.002)})
    rate = FailureRate.from_prior()
    for _ in range(20):
        rate = rate.with_observation(3600, failures=1)

    def peers_s(store_s: float) -> float:
        durations = TierDurations(restore_s={PEERS: 4.0, DISK: store_s})
        made = decide_intervals(tiers, costs, durations, rate, FailureClassCounts(), 1, {}, {})
        assert ("a restore takes" in made[DISK].reason) == (store_s > 0)
        return made[PEERS].seconds

    assert peers_s(0.0) == peers_s(10.0) == inf
    assert peers_s(100.0) < 200


def test_the_disk_is_never_left_out_below_the_bucket() -> None:
    rules = CheckpointConfig(
        interval="adaptive",
        memory_every_steps=0,
        bucket="s3://bucket/run",
        bucket_every_seconds="auto",
    )
    never = FailureClassCounts((1e-9, 1e-9, 1e-9, 1.0))  # only the bucket would help
    made = decide_intervals(
        TierSettings.from_config(rules),
        SaveCosts(),
        TierDurations(),
        FailureRate.from_prior(),
        never,
        1,
        {},
        {},
    )
    assert made[DISK].seconds < inf
    assert made[BUCKET].seconds < inf


def test_a_reason_names_the_tier_and_what_is_known() -> None:
    rules = CheckpointConfig(interval="adaptive", memory_every_steps="auto")
    hazard = FailureRate.from_prior().with_observation(3600, failures=1)
    made = decide_intervals(
        TierSettings.from_config(rules),
        SaveCosts(),
        TierDurations(),
        hazard,
        FailureClassCounts(),
        2,
        {},
        {},
    )
    assert made[MEMORY].reason.startswith("tier 0 is saved every ")
    assert "(1 failure in 60 min on 2 nodes)" in made[DISK].reason
    assert "save of tier 0" in made[DISK].reason


# --- costs ----------------------------------------------------------------------------------------
def test_a_tier_costs_what_its_saves_cost_beside_the_snapshots() -> None:
    """Every step is captured, for 2 ms; each tenth goes to the disk, which costs 100 ms more in its
    step and 50 in the next."""
    costs = SaveCosts()
    for step in range(200):
        durable, after = step % 10 == 5, step % 10 == 6
        took = 1.002 + 0.1 * durable + 0.05 * after
        costs = costs.with_step(took, (DISK if durable else MEMORY, 0.002))
    assert costs.cost_s(MEMORY, MEMORY) == pytest.approx(0.002)
    assert costs.cost_s(DISK, MEMORY) == pytest.approx(0.1, abs=0.06)
    assert costs.cost_s(DISK, None) >= 0.002
    assert costs.cost_s(BUCKET, MEMORY) == SaveCosts().cost_s(
        BUCKET, None
    )  # nothing seen: the prior


# --- due ------------------------------------------------------------------------------------------
TIERS = TierSettings((MEMORY, PEERS, DISK, BUCKET), frozenset((MEMORY, PEERS, DISK, BUCKET)), {})


def _due(elapsed: dict[int, float], made: frozenset[int] = frozenset()) -> frozenset[int]:
    every = {MEMORY: 10.0, PEERS: 30.0, DISK: 100.0, BUCKET: 1000.0}
    return due_tiers(TIERS, every, elapsed, made)


def test_a_tier_rides_with_the_save_of_a_lower_one_that_is_nearest_to_its_time() -> None:
    early = {MEMORY: 10.0, PEERS: 20.0, DISK: 20.0, BUCKET: 20.0}
    assert _due(early) == {MEMORY}
    assert _due(early | {PEERS: 26.0}) == {MEMORY, PEERS}
    assert _due(early | {PEERS: 26.0, DISK: 96.0}) == {MEMORY, PEERS, DISK}
    assert _due(early | {MEMORY: 2.0}) == frozenset()
    assert _due(early | {MEMORY: 2.0, DISK: 100.0}) == {DISK}  # in its own time, with nobody


def test_the_bucket_gets_what_the_disk_gets() -> None:
    late = {MEMORY: 1.0, PEERS: 1.0, DISK: 50.0, BUCKET: 5000.0}
    assert _due(late) == frozenset()
    assert BUCKET in _due(late, frozenset((DISK,)))


# --- when a durable save is due -------------------------------------------------------------------
def test_steps_end_and_stop() -> None:
    saved, reasons = 0, {}
    for step in range(1, 26):
        reason = why_save_now(step, 25, every_steps=10, last_saved=saved)
        if reason is not None:
            saved, reasons[step] = step, reason
    assert reasons == {10: "steps", 20: "steps", 25: "end"}
    assert why_save_now(7, 25, every_steps=10, is_stopping=True) == "stop"
    assert why_save_now(7, 25, every_steps=0) is None
    assert why_save_now(25, 25, every_steps=0) == "end"


def test_nothing_is_saved_twice() -> None:
    assert why_save_now(10, 25, every_steps=10, last_saved=10) is None
    assert why_save_now(10, 25, every_steps=10, last_saved=10, is_stopping=True) is None


def test_seconds() -> None:
    def at(seconds: float) -> str | None:
        return why_save_now(3, 25, every_steps=0, every_seconds=60, seconds_since_save=seconds)

    assert at(59.9) is None
    assert at(60.0) == "seconds"
    assert why_save_now(3, 25, every_steps=0, every_seconds=0, seconds_since_save=1e9) is None


# --- retention ------------------------------------------------------------------------------------
def test_keeps_the_newest_and_every_nth() -> None:
    assert removable_steps([10, 20, 30, 40, 50], keep_last=2) == [10, 20, 30]
    assert removable_steps([10, 20, 30, 40, 50], keep_last=1, keep_every=20) == [10, 30]


def test_never_removes_the_newest_verified() -> None:
    assert removable_steps([10, 20, 30, 40], keep_last=1, verified=[10, 20]) == [10, 30]
    assert removable_steps([10, 20, 30, 40], keep_last=1, verified=[40]) == [10, 20, 30]


def test_refuses_to_keep_nothing() -> None:
    with pytest.raises(ValueError, match="keep_last"):
        removable_steps([1], keep_last=0)


@given(
    st.sets(st.integers(0, 200)), st.integers(1, 5), st.integers(0, 7), st.sets(st.integers(0, 200))
)
def test_repeating_it_removes_nothing_more(
    steps: set[int], last: int, every: int, verified: set[int]
) -> None:
    gone = set(removable_steps(steps, last, every, verified))
    left = steps - gone
    assert gone <= steps
    assert len(left) >= min(last, len(steps))
    assert removable_steps(left, last, every, verified) == []
