"""The estimate of how often a run breaks: converges, follows, and forgets what no longer holds."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.events import (
    Event,
    GenerationStarted,
    Record,
    RunFinished,
    RunStopped,
    StepDone,
    WorkerHeld,
    WorkerLost,
    WorkerReady,
)
from holdfast.policy.saving.failure_classes import PRIOR_FAILURE_COUNTS, FailureHistory
from holdfast.policy.saving.failure_rate import PRIOR_NODE_MTBF_S, FailureRate, format_duration

HOUR = 3600.0


def _live(hazard: FailureRate, draw: random.Random, mtbf: float, failures: int) -> FailureRate:
    for _ in range(failures):
        hazard = hazard.with_observation(draw.expovariate(1 / mtbf), failures=1)
    return hazard


@pytest.mark.parametrize("mtbf", [600.0, 5 * HOUR, 200 * HOUR])
def test_it_converges_on_a_poisson_stream_of_any_rate(mtbf: float) -> None:
    """An interval by the estimate, over the time after 30 failures, costs under 4 % more than one
    by the true rate: (x + 1 / x) / 2, where x is the ratio of the intervals."""
    worse = spent = 0.0
    for seed in (1, 2, 3):
        draw = random.Random(seed)
        hazard = _live(FailureRate.from_prior(), draw, mtbf, 30)
        for _ in range(60):
            gap = draw.expovariate(1 / mtbf)
            for _ in range(8):
                hazard = hazard.with_observation(gap / 8)
                ratio = (hazard.failures_per_second() * mtbf) ** 0.5
                worse, spent = worse + gap / 8 * (ratio + 1 / ratio) / 2, spent + gap / 8
            hazard = hazard.with_observation(0.0, failures=1)
    assert worse / spent < 1.04


@pytest.mark.parametrize("wrong", [0.01, 100.0])
def test_a_prior_that_is_a_hundred_times_off_is_forgotten_in_ten_failures(wrong: float) -> None:
    ratios = []
    for seed in range(7):
        hazard = _live(FailureRate.from_prior(wrong * HOUR), random.Random(seed), HOUR, 10)
        ratios.append(hazard.with_observation(HOUR / 2).failures_per_second() * HOUR)
    assert 1 / 2.5 < sorted(ratios)[3] < 2.5


def test_it_follows_a_rise_within_five_failures() -> None:
    """120 times more often."""
    for seed in range(5):
        draw = random.Random(seed)
        hazard = _live(FailureRate.from_prior(), draw, 20 * HOUR, 50)
        found = 1 / _live(hazard, draw, 600.0, 5).failures_per_second()
        assert found < 3.5 * 600


def test_it_follows_a_fall_within_a_day() -> None:
    """120 times more rarely: the quiet itself is the evidence."""
    hazard = _live(FailureRate.from_prior(), random.Random(1), 600.0, 50)
    assert 1 / hazard.with_observation(24 * HOUR).failures_per_second() > 10 * HOUR


def test_old_evidence_fades_at_the_pace_of_the_failures() -> None:
    """Bursts long ago matter no more after a steady history; a usual gap changes little."""
    busy, calm = (
        _live(FailureRate.from_prior(), random.Random(1), 300.0, 60),
        FailureRate.from_prior(),
    )
    for _ in range(40):
        busy, calm = (
            busy.with_observation(2 * HOUR, failures=1),
            calm.with_observation(2 * HOUR, failures=1),
        )
    assert busy.failures_per_second() == pytest.approx(calm.failures_per_second(), rel=0.1)
    assert busy.with_observation(2 * HOUR).failures_per_second() > 0.6 * busy.failures_per_second()
    assert (
        busy.with_observation(400 * HOUR).failures_per_second() < 0.05 * busy.failures_per_second()
    )


def test_without_any_failure_the_rate_falls_as_time_passes() -> None:
    hazard, found = FailureRate.from_prior(), []
    for _ in range(20):
        hazard = hazard.with_observation(6 * HOUR)
        found.append(hazard.failures_per_second())
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1 / (100 * HOUR)


def test_before_anything_is_known_the_rate_grows_with_the_root_of_the_number_of_nodes() -> None:
    prior = FailureRate.from_prior()
    assert prior.failures_per_second(16) == pytest.approx(4 * prior.failures_per_second(1))
    hazard = prior.with_observation(HOUR, nodes=8, failures=1)
    assert hazard.failures_per_second(16) > hazard.failures_per_second(8)
    assert hazard.failures == 1


@pytest.mark.parametrize(("exponent", "least", "most"), [(0.0, 0.8, 1.5), (1.0, 10.0, 16.5)])
def test_it_learns_how_the_rate_grows_with_the_number_of_nodes(
    exponent: float, least: float, most: float
) -> None:
    """4 nodes and 64 by turns, 16 times as many: the rates differ by 16 to the exponent."""
    draw, hazard = random.Random(3), FailureRate.from_prior()
    for number in range(60):
        nodes = 4 * 16 ** (number % 2)
        gap = draw.expovariate((nodes / 4) ** exponent / HOUR)
        hazard = hazard.with_observation(gap, nodes, failures=1)
    assert least < hazard.failures_per_second(64) / hazard.failures_per_second(4) < most


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 2)), max_size=12), st.floats(0.25, 64))
@settings(deadline=None, max_examples=60)
def test_it_is_a_sound_value_whatever_happens(seen: list[tuple[float, int]], nodes: float) -> None:
    hazard = FailureRate.from_prior()
    for seconds, failures in seen:
        before = hazard.failures_per_second(nodes)
        hazard = hazard.with_observation(seconds, nodes)
        assert seconds == 0 or hazard.failures_per_second(nodes) < before * 1.05
        hazard = hazard.with_observation(0.0, nodes, failures)
        assert 0 < hazard.failures_per_second(nodes) < float("inf")
        assert sum(map(sum, hazard.weights)) == pytest.approx(1)
    assert FailureRate.from_json(json.loads(json.dumps(hazard.to_json()))) == hazard


def test_a_clouds_statistic_makes_a_prior() -> None:
    """One in five within a day: a weak prior, so the first failures overrule it."""
    mean = 24 * HOUR / -math.log(1 - 0.2)
    hazard = FailureRate.from_prior(mean)
    assert 1 / hazard.failures_per_second() == pytest.approx(mean, rel=0.15)
    assert 1 / _live(hazard, random.Random(1), HOUR, 10).failures_per_second() < 20 * HOUR


def test_a_state_of_other_rates_begins_anew() -> None:
    told = FailureRate.from_prior(HOUR).with_observation(50.0, failures=1).to_json()
    for other in ([1.0], [[1.0], [0.0]]):
        told["weights"] = other
        assert FailureRate.from_json(told) == FailureRate.from_prior(HOUR)
    with pytest.raises(ValueError, match="must be positive"):
        FailureRate.from_prior(0.0)


def test_evidence_is_said_in_words() -> None:
    assert (
        FailureRate.from_prior().with_observation(7200).evidence_on(1)
        == "no failure in 2 h on 1 node"
    )
    assert (
        FailureRate.from_prior().with_observation(7200, failures=1).evidence_on(2)
        == "1 failure in 2 h on 2 nodes"
    )
    assert [format_duration(s) for s in (0.004, 16.53, 200, 9000, 4e5, float("inf"))] == [
        "4 ms",
        "16.5 s",
        "3.33 min",
        "2.5 h",
        "4.63 days",
        "ever",
    ]
    assert PRIOR_NODE_MTBF_S == 1.5 * HOUR


# --- what a journal says about how often its run breaks -------------------------------------------
DONE = StepDone(loss=1.0, tokens=1, grad_norm=1.0, learning_rate=0.1, seconds=1.0, step=1)
TWO_NODES = GenerationStarted({"nodes": ["a", "a", "b"]}, "start")


def _seen(generations: list[list[tuple[float, Event]]]) -> FailureRate:
    return _all_seen(generations).failure_rate


def _all_seen(generations: list[list[tuple[float, Event]]]) -> FailureHistory:
    """What is known when the generation after the last has begun."""
    seen = FailureHistory(FailureRate.from_prior())
    for number, found in enumerate([*generations, [(0.0, TWO_NODES)]], start=1):
        for sequence, (at, event) in enumerate(found):
            seen.observe(Record(number, "agent", sequence, 1e9 + at, event))
    return seen


def test_a_lost_worker_leaves_its_nodes_memory_and_silence_takes_it() -> None:
    begun: list[tuple[float, Event]] = [(0, TWO_NODES), (2, WorkerReady(0, 1.0)), (90, DONE)]
    lost = _all_seen([[*begun, (91, WorkerLost(1, 7, "SIGKILL", "exit"))]]).failure_classes.counts
    silent = _all_seen([begun]).failure_classes.counts
    assert lost == (PRIOR_FAILURE_COUNTS[0] + 1, *PRIOR_FAILURE_COUNTS[1:])
    assert silent == (
        PRIOR_FAILURE_COUNTS[0],
        PRIOR_FAILURE_COUNTS[1] + 1,
        *PRIOR_FAILURE_COUNTS[2:],
    )
    stopped = _all_seen([[*begun, (91, WorkerHeld(1, 3, None, "an error"))]]).failure_classes.counts
    assert stopped == lost
    assert (
        _all_seen([[*begun, (91, RunStopped("SIGTERM"))]]).failure_classes.counts
        == PRIOR_FAILURE_COUNTS
    )


def test_time_at_risk_is_from_ready_to_the_loss_on_all_nodes() -> None:
    lost = WorkerLost(1, 7, "SIGKILL", "exit")
    found = _seen(
        [
            [
                (0, TWO_NODES),
                (5, WorkerReady(0, 1.0)),
                (8, WorkerReady(1, 1.0)),
                (50, DONE),
                (108, lost),
            ],
            [(0, TWO_NODES), (10, WorkerReady(0, 1.0)), (60, DONE), (61, lost), (62, lost)],
        ]
    )
    assert (found.failures, found.seconds) == (2, pytest.approx(152))
    want = FailureRate.from_prior().with_observation(100, 2, 1).with_observation(52, 2, 1)
    assert found.failures_per_second() == pytest.approx(want.failures_per_second())


def test_leaving_is_no_failure_but_a_session_without_a_last_word_is() -> None:
    begun: list[tuple[float, Event]] = [(0, TWO_NODES), (2, WorkerReady(0, 1.0)), (90, DONE)]
    assert _seen([[*begun, (91, RunStopped("SIGTERM"))]]).failures == 0
    assert _seen([[*begun, (91, RunFinished())]]).failures == 0
    assert _seen([begun]).failures == 1


def test_a_generation_that_never_became_ready_says_nothing() -> None:
    assert (
        _seen([[(0, TWO_NODES), (9, WorkerLost(0, 1, "exit 1", "exit"))]])
        == FailureRate.from_prior()
    )
