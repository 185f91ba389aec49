"""The estimate of how often a run breaks: converges, follows, and forgets what no longer holds."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.policy.saving.failure_rate import NODE_MTBF, Hazard, duration

HOUR = 3600.0


def _live(hazard: Hazard, draw: random.Random, mtbf: float, failures: int) -> Hazard:
    for _ in range(failures):
        hazard = hazard.after(draw.expovariate(1 / mtbf), failures=1)
    return hazard


@pytest.mark.parametrize("mtbf", [600.0, 5 * HOUR, 200 * HOUR])
def test_it_converges_on_a_poisson_stream_of_any_rate(mtbf: float) -> None:
    """An interval by the estimate, over the time after 30 failures, costs under 4 % more than one
    by the true rate: (x + 1 / x) / 2, where x is the ratio of the intervals."""
    worse = spent = 0.0
    for seed in (1, 2, 3):
        draw = random.Random(seed)
        hazard = _live(Hazard.prior(), draw, mtbf, 30)
        for _ in range(60):
            gap = draw.expovariate(1 / mtbf)
            for _ in range(8):
                hazard = hazard.after(gap / 8)
                ratio = (hazard.rate() * mtbf) ** 0.5
                worse, spent = worse + gap / 8 * (ratio + 1 / ratio) / 2, spent + gap / 8
            hazard = hazard.after(0.0, failures=1)
    assert worse / spent < 1.04


@pytest.mark.parametrize("wrong", [0.01, 100.0])
def test_a_prior_that_is_a_hundred_times_off_is_forgotten_in_ten_failures(wrong: float) -> None:
    ratios = []
    for seed in range(7):
        hazard = _live(Hazard.prior(wrong * HOUR), random.Random(seed), HOUR, 10)
        ratios.append(hazard.after(HOUR / 2).rate() * HOUR)
    assert 1 / 2.5 < sorted(ratios)[3] < 2.5


def test_it_follows_a_rise_within_five_failures() -> None:
    """120 times more often."""
    for seed in range(5):
        draw = random.Random(seed)
        hazard = _live(Hazard.prior(), draw, 20 * HOUR, 50)
        found = 1 / _live(hazard, draw, 600.0, 5).rate()
        assert found < 3.5 * 600


def test_it_follows_a_fall_within_a_day() -> None:
    """120 times more rarely: the quiet itself is the evidence."""
    hazard = _live(Hazard.prior(), random.Random(1), 600.0, 50)
    assert 1 / hazard.after(24 * HOUR).rate() > 10 * HOUR


def test_old_evidence_fades_at_the_pace_of_the_failures() -> None:
    """Bursts long ago matter no more after a steady history; a usual gap changes little."""
    busy, calm = _live(Hazard.prior(), random.Random(1), 300.0, 60), Hazard.prior()
    for _ in range(40):
        busy, calm = busy.after(2 * HOUR, failures=1), calm.after(2 * HOUR, failures=1)
    assert busy.rate() == pytest.approx(calm.rate(), rel=0.1)
    assert busy.after(2 * HOUR).rate() > 0.6 * busy.rate()
    assert busy.after(400 * HOUR).rate() < 0.05 * busy.rate()


def test_without_any_failure_the_rate_falls_as_time_passes() -> None:
    hazard, found = Hazard.prior(), []
    for _ in range(20):
        hazard = hazard.after(6 * HOUR)
        found.append(hazard.rate())
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1 / (100 * HOUR)


def test_more_nodes_are_at_more_risk_but_some_go_together() -> None:
    """Twice the rate on four times the nodes."""
    hazard = Hazard.prior().after(HOUR, nodes=8, failures=1)
    assert hazard.rate(32) == pytest.approx(2 * hazard.rate(8))
    assert hazard.rate(8) == pytest.approx(Hazard.prior().after(2 * HOUR, 2, 1).rate(2) * 2)
    assert hazard.failures == 1


@given(st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 2)), max_size=12), st.floats(0.25, 64))
@settings(deadline=None, max_examples=60)
def test_it_is_a_sound_value_whatever_happens(seen: list[tuple[float, int]], nodes: float) -> None:
    hazard = Hazard.prior()
    for seconds, failures in seen:
        before = hazard.rate(nodes)
        hazard = hazard.after(seconds, nodes)
        assert seconds == 0 or hazard.rate(nodes) < before * 1.05
        hazard = hazard.after(0.0, nodes, failures)
        assert 0 < hazard.rate(nodes) < float("inf")
        assert sum(hazard.weights) == pytest.approx(1)
    assert Hazard.from_json(json.loads(json.dumps(hazard.to_json()))) == hazard


def test_a_clouds_statistic_makes_a_prior() -> None:
    """One in five within a day: a weak prior, so the first failures overrule it."""
    mean = 24 * HOUR / -math.log(1 - 0.2)
    hazard = Hazard.prior(mean)
    assert 1 / hazard.rate() == pytest.approx(mean, rel=0.15)
    assert 1 / _live(hazard, random.Random(1), HOUR, 10).rate() < 20 * HOUR


def test_a_state_of_other_rates_begins_anew() -> None:
    told = Hazard.prior(HOUR).after(50.0, failures=1).to_json()
    told["weights"] = [1.0]
    assert Hazard.from_json(told) == Hazard.prior(HOUR)
    with pytest.raises(ValueError, match="must be positive"):
        Hazard.prior(0.0)


def test_evidence_is_said_in_words() -> None:
    assert Hazard.prior().after(7200).evidence == "no failure in 2 h"
    assert Hazard.prior().after(7200, failures=1).evidence == "1 failure in 2 h"
    assert [duration(s) for s in (0.004, 16.53, 200, 9000, 4e5, float("inf"))] == [
        "4 ms", "16.5 s", "3.33 min", "2.5 h", "4.63 days", "ever",
    ]  # fmt: skip
    assert NODE_MTBF == 1.5 * HOUR
