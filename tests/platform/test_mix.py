"""The cheapest mix that ends in time: against brute force, with its two guards."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from holdfast.plan.catalogue import Offer
from holdfast_platform.clouds.mix import FASTEST, KEPT, LAST_MOMENT, PATIENT, Mix, Need, choose_mix

SPOT = Offer("a/spot", True, 2.0, 8, losses_per_hour=0.01)
CHEAP = Offer("b/spot", True, 1.0, 2, losses_per_hour=0.05)
DEMAND = Offer("a/on-demand", False, 6.0, 8)
ALL = (SPOT, CHEAP, DEMAND)


def brute_force(offers: tuple[Offer, ...], need: Need) -> float:
    """The least cost of any mix that ends in time, by the definition alone."""
    best = inf
    for counts in product(*(range(offer.available + 1) for offer in offers)):
        if not need.min_nodes <= sum(counts) <= need.max_nodes:
            continue
        both = list(zip(counts, offers, strict=True))
        work = sum(n * o.speed for n, o in both)
        work *= max(0.0, 1 - need.loss_h * sum(n * o.losses_per_hour for n, o in both))
        hours = need.work / work if work else inf
        if hours <= need.hours_left:
            best = min(best, hours * sum(n * o.price for n, o in both))
    return best


def test_the_choice_costs_as_little_as_the_best_of_all_mixes() -> None:
    draw = random.Random(7)
    compared = 0
    for _ in range(300):
        offers = tuple(
            Offer(
                f"{i}",
                spot := draw.random() < 0.6,
                draw.uniform(0.5, 3) if spot else draw.uniform(3, 9),
                draw.randint(0, 4),
                losses_per_hour=draw.uniform(0, 0.05) if spot else 0.0,
            )
            for i in range(3)
        )
        need = Need(draw.uniform(10, 60), draw.uniform(8, 30), 1, draw.randint(1, 8), 0.02, 0.0)
        found, best = choose_mix(offers, need), brute_force(offers, need)
        if found is None or not found.in_time or found.reason == LAST_MOMENT:
            assert found is not None or best == inf
            continue
        compared += 1
        assert best <= found.cost <= best * 1.01, (offers, need)
    assert compared > 100


def chosen(offers: tuple[Offer, ...], need: Need, now: dict[str, int] | None = None) -> Mix:
    found = choose_mix(offers, need, now or {})
    assert found is not None
    return found


def test_without_a_deadline_the_run_gets_all_nodes_at_the_least_price() -> None:
    found = chosen(ALL, Need(100, max_nodes=8))
    assert found.nodes == {"a/spot": 6, "b/spot": 2}


def test_on_demand_nodes_are_added_only_as_far_as_the_deadline_asks() -> None:
    need = Need(work=100, hours_left=9.0, max_nodes=16, change_h=0.0, loss_h=0.0)
    found = chosen(ALL, need)
    assert found.in_time
    assert found.nodes == {"a/spot": 8, "b/spot": 2, "a/on-demand": 2}


def test_spot_is_left_before_on_demand_alone_would_be_too_late() -> None:
    early = chosen(ALL, Need(work=40, hours_left=6.0, max_nodes=8, change_h=0.2))
    late = chosen(ALL, Need(work=40, hours_left=5.3, max_nodes=8, change_h=0.2))
    assert "a/spot" in early.nodes
    assert (late.nodes, late.reason) == ({"a/on-demand": 8}, LAST_MOMENT)


def test_a_deadline_that_no_mix_meets_gets_the_fastest() -> None:
    found = chosen(ALL, Need(work=1000, hours_left=1.0, max_nodes=8))
    assert (found.in_time, found.reason) == (False, FASTEST)
    assert found.size == 8


def test_a_small_saving_is_no_reason_to_change_and_a_large_one_is() -> None:
    now = {"a/spot": 4}
    need = Need(work=40, hours_left=30.0, min_nodes=4, max_nodes=4, change_h=0.1)
    a_bit = Offer("c/spot", True, 1.9, 4, losses_per_hour=0.01)
    much = Offer("c/spot", True, 1.2, 4, losses_per_hour=0.01)
    kept = chosen((SPOT, DEMAND, a_bit), need, now)
    changed = chosen((SPOT, DEMAND, much), need, now)
    assert (kept.nodes, kept.reason) == (now, KEPT)
    assert changed.nodes == {"c/spot": 4}


def test_a_run_that_decides_again_waits_for_spot_until_slack_is_used_up() -> None:
    none = replace(SPOT, available=0)
    patient = Need(work=40, hours_left=12.0, max_nodes=8, change_h=0.2, decide_h=0.25)
    waits = chosen((none, DEMAND), patient)
    some = chosen((replace(SPOT, available=3), DEMAND), patient)
    late = chosen((none, DEMAND), replace(patient, hours_left=5.9))
    assert (waits.nodes, waits.reason) == ({}, PATIENT)
    assert some.nodes == {"a/spot": 3}
    assert late.nodes == {"a/on-demand": 8}


def test_nodes_that_are_gone_are_replaced() -> None:
    gone = Offer("a/spot", True, 2.0, 1, losses_per_hour=0.01)
    need = Need(work=40, hours_left=30.0, min_nodes=4, max_nodes=4)
    found = chosen((gone, CHEAP, DEMAND), need, {"a/spot": 4})
    assert found.nodes == {"a/spot": 1, "b/spot": 2, "a/on-demand": 1}


def test_too_few_nodes_are_no_mix() -> None:
    assert choose_mix((CHEAP,), Need(work=1, min_nodes=3, max_nodes=4)) is None
    assert choose_mix((), Need(work=1)) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_run_on_offers_that_come_and_go_ends_before_its_deadline(seed: int) -> None:
    """Spot of a made-up market; on-demand is always there. Each hour a new choice."""
    draw = random.Random(seed)
    need = Need(work=8 * 20.0, hours_left=40.0, max_nodes=8, change_h=0.02, decide_h=1.0)
    left, hour, now, paid = need.work, 0.0, dict[str, int](), 0.0
    spot = 4
    while left > 0:
        spot = min(8, max(0, spot + draw.choice((-4, -1, 0, 0, 1, 2))))
        offers = (Offer("s", True, 2.0, spot, losses_per_hour=0.1), DEMAND)
        found = chosen(offers, replace(need, work=left, hours_left=need.hours_left - hour), now)
        change = need.change_h if now and dict(found.nodes) != now else 0.0
        now = dict(found.nodes)
        left -= found.size * (1 - change)
        paid += sum(n * (2.0 if name == "s" else 6.0) for name, n in now.items())
        hour += 1.0
    assert hour <= need.hours_left + 1
    assert paid < need.work * 6.0, "dearer than on-demand nodes alone"
