"""How often to save: the formulas, their bounds, several tiers, what a save is seen to cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from math import inf, sqrt

import pytest
from benchmarks.lab.intervals import RunSpell, lost_by_two_tiers
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.policy.saving.interval import (
    IntervalBounds,
    IntervalDecision,
    SaveCost,
    TierCost,
    daly_interval,
    lost_time_share,
    young_interval,
)
from holdfast.policy.saving.tier_choice import decide_tiers

WIDE = IntervalBounds(1e-6, 1e9)
costs = st.floats(1e-3, 100)
rates = st.floats(1e-8, 1e-2)


def decide_tier(
    cost: TierCost,
    rate: float,
    bounds: IntervalBounds,
    evidence: Callable[[], str] | None = None,
    current: IntervalDecision | None = None,
) -> IntervalDecision:
    """The decision of a run that has one tier."""
    before = {} if current is None else {cost.tier: current}
    [made] = decide_tiers([cost], {cost.tier: rate}, bounds, evidence=evidence, current=before)
    return made


# --- one tier -------------------------------------------------------------------------------------
@given(costs, rates)
def test_it_is_youngs_where_a_save_costs_little_and_the_optimum_everywhere(
    cost: float, rate: float
) -> None:
    if cost * rate < 1e-6:
        assert daly_interval(cost, rate) == pytest.approx(sqrt(2 * cost / rate), rel=1e-3)
    if cost * rate < 1:  # Daly's formula is a series: within 1 % of the least loss up to here
        best = min(
            lost_time_share(young_interval(cost, rate) * 1.02**k, cost, rate)
            for k in range(-120, 80)
        )
        assert lost_time_share(daly_interval(cost, rate), cost, rate) <= best * 1.01


def test_the_worked_figures() -> None:
    """127 preemptions a day: a save of 1.5 s every 45 s loses 6.6 %; one of 5 ms every 2.6 s."""
    assert young_interval(1.5, 1 / 680) == pytest.approx(45.2, abs=0.1)
    assert young_interval(0.005, 1 / 680) == pytest.approx(2.61, abs=0.01)
    assert lost_time_share(daly_interval(1.5, 1 / 680), 1.5, 1 / 680) == pytest.approx(
        0.068, abs=0.002
    )
    assert daly_interval(1.0, 0.0) == inf
    assert daly_interval(100.0, 1 / 30) == 30.0  # a save costs more than two failures are apart


@given(costs, rates, st.floats(1.01, 10))
def test_it_falls_with_the_hazard_and_grows_with_the_cost(
    cost: float, rate: float, factor: float
) -> None:
    assert daly_interval(cost, rate * factor) <= daly_interval(cost, rate)
    if cost * factor * rate < 0.1:
        assert daly_interval(cost * factor, rate) > daly_interval(cost, rate)


@given(costs, rates, st.floats(0.1, 50), st.floats(0, 5000), st.floats(0, 100))
def test_a_decision_stays_within_the_bounds_and_says_so(
    cost: float, rate: float, least: float, span: float, durable: float
) -> None:
    bounds = IntervalBounds(least, least + span)
    found = decide_tier(TierCost(2, cost, durable), rate, bounds)
    assert least <= found.seconds <= least + span
    assert found.seconds >= min(durable, bounds.max_seconds)
    if found.seconds != pytest.approx(daly_interval(cost, rate)):
        assert any(word in found.reason for word in ("min_seconds", "max_seconds", "durable after"))


def test_a_reason_is_one_sentence_with_its_numbers() -> None:
    hazard = FailureRate.from_prior().with_observation(7200, nodes=4, failures=1)
    cost = SaveCost().with_step(1.0).with_step(1.2, blocked=0.2)
    seen = hazard.evidence_on(4)
    found = decide_tier(
        TierCost(2, cost.cost_s),
        hazard.failures_per_second(4),
        IntervalBounds(1, 3600),
        evidence=lambda: seen,
    )
    assert found.reason.startswith("tier 2 is saved every ")
    for part in (
        "a save costs 200 ms",
        "one failure is expected",
        "(1 failure in 2 h on 4 nodes)",
        "of the time is then lost",
    ):
        assert part in found.reason
    assert "\n" not in found.reason
    quiet = decide_tier(TierCost(2, 0.2), 0.0, IntervalBounds(1, 3600))
    assert quiet.seconds == 3600
    assert "no failure is expected; the best interval would be ever" in quiet.reason


def test_a_decision_stands_until_a_better_one_is_worth_it() -> None:
    first = decide_tier(TierCost(2, 1.0), 1e-3, WIDE)
    assert decide_tier(TierCost(2, 1.0), 1.15e-3, WIDE, current=first) is first
    later = decide_tier(TierCost(2, 1.0), 1.5e-3, WIDE, current=first)
    assert later.seconds < 0.9 * first.seconds


def test_bounds_that_cannot_be_are_refused() -> None:
    for least, most in ((0.0, 1.0), (2.0, 1.0)):
        with pytest.raises(ValueError, match="bounds of an interval"):
            IntervalBounds(least, most)


# --- several tiers --------------------------------------------------------------------------------
def test_each_tier_has_its_own_optimum_and_multiples_nest() -> None:
    found = decide_tiers(
        [TierCost(3, 20.0), TierCost(0, 0.01), TierCost(1, 0.5)], {0: 1e-3, 1: 2e-4, 3: 1e-6}, WIDE
    )
    assert [d.tier for d in found] == [0, 1, 3]
    for decision, (cost, rate) in zip(
        found, ((0.01, 1e-3), (0.5, 2e-4), (20.0, 1e-6)), strict=True
    ):
        assert decision.seconds == pytest.approx(young_interval(cost, rate), rel=0.2)
    for below, above in itertools.pairwise(found):
        assert above.seconds / below.seconds == pytest.approx(round(above.seconds / below.seconds))
        assert f"save of tier {below.tier}" in above.reason


def test_a_tier_that_costs_more_than_it_spares_is_left_out() -> None:
    same = decide_tiers([TierCost(0, 1.0), TierCost(3, 1.0)], {0: 1e-4, 3: 1e-4}, WIDE)
    assert same[0].seconds == inf
    assert "cost more than they spare with those of tier 3" in same[0].reason
    assert same[1].seconds == pytest.approx(young_interval(1.0, 2e-4), rel=0.01)
    rare = decide_tiers([TierCost(0, 0.01), TierCost(3, 5.0)], {0: 1e-9, 3: 1e-4}, WIDE)
    assert rare[0].seconds == inf


@given(st.lists(st.tuples(costs, rates), min_size=1, max_size=4), st.data())
def test_leaving_tiers_out_never_loses_more_than_any_other_choice(
    tiers: list[tuple[float, float]], data: st.DataObject
) -> None:
    prices = [TierCost(k, cost) for k, (cost, _) in enumerate(tiers)]
    found = decide_tiers(prices, {k: rate for k, (_, rate) in enumerate(tiers)}, WIDE)
    used = [d.tier for d in found if d.seconds < inf]
    assert used[-1] == len(tiers) - 1
    others = data.draw(st.sets(st.integers(0, len(tiers) - 1))) | {len(tiers) - 1}

    def loss(chosen: list[int]) -> float:
        total, floor = 0.0, -1
        for tier in chosen:
            total += sqrt(2 * tiers[tier][0] * sum(r for _, r in tiers[floor + 1 : tier + 1]))
            floor = tier
        return total

    assert loss(used) <= loss(sorted(others)) * (1 + 1e-9)


@given(costs, costs, rates, rates, st.floats(0, 1000), st.floats(0, 1000), st.floats(0, 1000))
def test_of_two_choices_of_tiers_the_one_with_the_least_waste_is_taken(
    low: float, high: float, often: float, seldom: float, near: float, far: float, late: float
) -> None:
    """Worked out by hand: saves, lost work, and the wait for the save and for the restore."""
    prices = [TierCost(1, low, 0.0, near), TierCost(2, high, late, far)]
    made = decide_tiers(prices, {1: often, 2: seldom}, WIDE)

    def upper(rate: float) -> float:
        t = max(young_interval(high, rate), late)
        return high / t + rate * (t / 2 + late + far)

    both = sqrt(2 * low * often) + often * near + upper(seldom)
    alone = upper(often + seldom)
    if both < alone * (1 - 1e-9):
        assert made[0].seconds < inf
    elif alone < both * (1 - 1e-9):
        assert made[0].seconds == inf


def test_a_fixed_interval_counts_with_the_work_that_it_loses() -> None:
    """A save into the store each hour: the tier below spares most of the half hour."""
    prices, rates = [TierCost(1, 1.0), TierCost(2, 1.0)], {1: 1e-4, 2: 1e-6}
    [peers] = decide_tiers(prices, rates, WIDE, fixed_intervals={2: 3600.0})
    assert peers.seconds == pytest.approx(young_interval(1.0, 1e-4), rel=0.01)
    [peers] = decide_tiers(prices, rates, WIDE, fixed_intervals={2: 60.0})
    assert peers.seconds == inf


def test_what_no_tier_survives_is_refused() -> None:
    with pytest.raises(ValueError, match="does not survive"):
        decide_tiers([TierCost(0, 1.0)], {1: 1e-3}, WIDE)
    with pytest.raises(ValueError, match="one cost"):
        decide_tiers([TierCost(0, 1.0), TierCost(0, 2.0)], {0: 1e-3}, WIDE)


@pytest.mark.parametrize(
    ("lower", "upper", "often", "seldom"), [(0.05, 2.0, 1 / 600, 1 / 6000), (0.5, 20, 1e-3, 5e-5)]
)
def test_two_tiers_are_as_good_as_the_best_of_a_sweep_of_the_replay(
    lower: float, upper: float, often: float, seldom: float
) -> None:
    draw = random.Random(5)
    history = []
    for _ in range(400):
        level = int(draw.random() < seldom / (often + seldom))
        history.append(RunSpell(draw.expovariate(often + seldom), True, level=level))

    def loss(seconds: float, every: int) -> float:
        return lost_by_two_tiers(history, seconds, every, (lower, upper), 0.0).by_policy

    # In the replay an upper save is one beside the lower, as decide_tiers has it.
    low, high = decide_tiers([TierCost(0, lower), TierCost(1, upper)], {0: often, 1: seldom}, WIDE)
    mine = loss(low.seconds, round(high.seconds / low.seconds))
    base = young_interval(lower, often)
    every0 = young_interval(upper, seldom) / base
    swept = [
        loss(base * a, max(1, round(every0 * b)))
        for a in (0.4, 0.55, 0.75, 1.0, 1.35, 1.8)
        for b in (0.4, 0.6, 0.8, 1.0, 1.3, 1.7)
    ]
    assert mine <= 1.03 * min(swept)


def test_a_choice_of_tiers_stands_as_long_as_it_is_as_good() -> None:
    prices = [TierCost(0, 0.01), TierCost(3, 1.0)]
    first = {d.tier: d for d in decide_tiers(prices, {0: 1e-3, 3: 1e-4}, WIDE)}
    near = decide_tiers(prices, {0: 1.1e-3, 3: 1.1e-4}, WIDE, current=first)
    assert all(made is first[made.tier] for made in near)
    far = decide_tiers(prices, {0: 4e-3, 3: 4e-4}, WIDE, current=first)
    assert all(made.seconds < 0.6 * first[made.tier].seconds for made in far)
    # A tier that is hardly worth it any more is not left out at once, and comes back no sooner.
    edge = 0.99 * 1e-4 * ((1 + 0.1**2 / 4) ** 2 - 1)  # where both choices lose the same
    for kept in (first, {0: IntervalDecision(0, inf, lambda: "left out"), 3: first[3]}):
        found = decide_tiers(prices, {0: edge, 3: 1e-4}, WIDE, current=kept)
        assert (found[0].seconds == inf) == (kept[0].seconds == inf)


def test_a_tier_of_the_run_file_takes_its_failures_and_gets_no_decision() -> None:
    prices = [TierCost(0, 1.0), TierCost(2, 1.0), TierCost(3, 1.0)]
    rates = {0: 1e-3, 2: 1e-4, 3: 1e-5}
    found = {
        d.tier: d
        for d in decide_tiers(prices, rates, WIDE, fixed_intervals={0: 7.0}, required=(2,))
    }
    assert set(found) == {2, 3}
    assert found[2].seconds == pytest.approx(young_interval(1.0, 1e-4), rel=0.05)
    assert found[2].seconds / 7.0 == pytest.approx(round(found[2].seconds / 7.0))
    assert "save of tier 0" in found[2].reason


# --- what a save costs ----------------------------------------------------------------------------
def test_the_cost_is_what_the_steps_around_a_save_took_longer() -> None:
    """A step of 1 s; a save blocks for 10 ms, and 0.3 s more are lost to its copy and its write."""
    draw = random.Random(3)
    cost = SaveCost()
    assert cost.cost_s == 0.2
    for index in range(60):
        noise = draw.gauss(0, 0.01)
        if index % 6 == 3:
            cost = cost.with_step(1.21 + noise, blocked=0.01)
        elif index % 6 == 4:
            cost = cost.with_step(1.1 + noise)
        else:
            cost = cost.with_step(1.0 + noise)
    assert cost.cost_s == pytest.approx(0.31, abs=0.02)


def test_no_tier_is_asked_to_save_before_it_is_done_with_the_last() -> None:
    rate, bounds = (
        FailureRate.from_prior().with_observation(600, failures=30).failures_per_second(),
        IntervalBounds(0.1, 3600),
    )
    assert decide_tier(TierCost(3, 0.01), rate, bounds).seconds < 5
    slow = decide_tier(TierCost(3, 0.01, 42.0), rate, bounds)
    assert slow.seconds == 42
    assert "but a save is durable after 42 s only" in slow.reason


def test_noise_and_one_hiccup_do_not_hide_that_a_save_is_cheap() -> None:
    draw = random.Random(4)
    cost = SaveCost()
    for index in range(200):
        took = 1.0 + draw.gauss(0, 0.002) + (30.0 if index == 100 else 0.0)
        cost = cost.with_step(took, blocked=0.005 if index % 10 == 0 else None)
    assert cost.cost_s < 0.012


def test_a_save_at_every_step_still_has_a_cost() -> None:
    cost = SaveCost()
    for _ in range(20):
        cost = cost.with_step(1.0, blocked=0.05)
    assert cost.cost_s == pytest.approx(0.05)


def test_nothing_is_decided_by_one_value_of_another_tier() -> None:
    found = decide_tier(TierCost(3, 1.0), 1e-3, WIDE)
    assert (found.tier, found.seconds) == (3, daly_interval(1.0, 1e-3))
    assert found == decide_tier(TierCost(3, 1.0), 1e-3, WIDE)
