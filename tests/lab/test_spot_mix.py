"""The search for the cheapest mix of spot and on-demand nodes, on records made by hand."""

from __future__ import annotations

import pytest

from holdfast.errors import ConfigError
from holdfast_lab.commands.simulate_mix import region_of
from holdfast_lab.engine.spot_mix import (
    MixPlan,
    Work,
    ZoneOffer,
    all_plans,
    node_counts,
    prices_of,
    search_mix,
    try_mix,
)
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader

TICKS = 400
WORK = Work(node_hours=40.0, nodes=4, deadline_h=12.0, tick_h=0.5, change_h=0.0)


def zone(name: str, counts: list[int], spot: float = 1.0, demand: float = 3.0) -> ZoneOffer:
    many = len(counts)
    return ZoneOffer(name, region_of(name), counts, [spot] * many, [demand] * many)


def test_on_demand_nodes_alone_cost_their_price():
    zones = [zone("east-1a", [0] * TICKS)]
    found = try_mix(zones, WORK, MixPlan((), 4, 0.0, 0.0), [0, 7])
    assert found.hours == pytest.approx(10.0)
    assert found.usd == pytest.approx(4 * 3 * 10)
    assert found.in_time == 1.0


def test_spot_that_is_always_there_is_taken_and_costs_its_price():
    zones = [zone("east-1a", [4] * TICKS)]
    found = search_mix(zones, WORK, range(0, TICKS, 20), plans=all_plans(zones, WORK, 1))
    assert found.best.plan.zones == ("east-1a",)
    assert found.best.usd == pytest.approx(4 * 1 * 10)
    assert found.best.outcomes[0].spot_share == 1.0


def test_on_demand_nodes_fill_up_before_it_is_too_late():
    zones = [zone("east-1a", [0] * TICKS)]  # spot never comes
    work = Work(40.0, 4, 12.0, 0.5, change_h=0.02)
    found = try_mix(zones, work, MixPlan(("east-1a",), 0, 0.0, 100.0), range(5))
    assert found.in_time == 1.0
    assert found.hours > 11.0  # it waited for spot as long as it could


def test_two_zones_of_a_region_are_one_pool_and_the_cheaper_goes_first():
    zones = [zone("east-1a", [2] * TICKS, 1.0), zone("east-1b", [3] * TICKS, 0.5)]
    plan = MixPlan(("east-1a", "east-1b"), 0, 0.0, 0.0)
    found = try_mix(zones, WORK, plan, [0])
    assert found.usd == pytest.approx(10 * (3 * 0.5 + 1 * 1.0))


def test_a_move_to_another_region_is_paid_and_held():
    east, west = [4] * 4 + [0] * 396, [0] * 4 + [4] * 396
    zones = [zone("east-1a", east), zone("west-1a", west)]
    work = Work(40.0, 4, 12.0, 0.5, change_h=0.1, move_usd=5.0)
    plan = MixPlan(("east-1a", "west-1a"), 0, 0.0, 0.0)
    found = try_mix(zones, work, plan, [0]).outcomes[0]
    assert found.moves == 1
    assert found.hours == pytest.approx(10.2)
    assert found.usd == pytest.approx(4 * 10.2 + 5.0)
    held = try_mix(zones, work, MixPlan(plan.zones, 0, 0.0, 50.0), [0]).outcomes[0]
    assert held.moves == 0
    assert held.usd > found.usd


def test_a_rare_market_is_left_for_one_that_meets_the_deadline():
    rare = [4 if tick % 40 == 0 else 0 for tick in range(TICKS)]
    good = [4 if tick % 10 else 0 for tick in range(TICKS)]
    zones = [zone("east-1a", rare, 0.2), zone("west-2a", good, 1.0)]
    plans = all_plans(zones, WORK, 1)
    found = search_mix(zones, WORK, range(0, TICKS, 25), plans=plans)
    assert "west-2a" in found.best.plan.zones
    assert found.best.in_time >= 0.95
    assert found.best.usd < found.on_demand.usd
    assert found.tried == len(plans)


def test_a_deadline_that_no_nodes_can_meet_is_refused_with_one_that_works():
    work = Work(40.0, 4, 9.0)
    with pytest.raises(ConfigError, match=r"need 10\.02 h; give 10\.3 hours or more"):
        search_mix([zone("a-1a", [4] * TICKS)], work, [0])


def test_counts_and_prices_are_read_at_each_tick():
    events = (
        TraceEvent(0.0, "join", "a"),
        TraceEvent(3600.0, "join", "b"),
        TraceEvent(5400.0, "preempt", "a"),
    )
    stream = EventStream(TraceHeader("x"), events)
    assert node_counts(stream, 0.5, 5) == [1, 1, 2, 1, 1]
    prices = EventStream(
        TraceHeader("p", source="p.csv"),
        (
            TraceEvent(0.0, "price", zone="r", gpu="m", value=1.0, extra={"on_demand": 3.0}),
            TraceEvent(7200.0, "price", zone="r", gpu="m", value=2.0, extra={"on_demand": 4.0}),
        ),
    )
    assert prices_of(prices, "r", "m", 1.0, 4) == ([1.0, 1.0, 2.0, 2.0], [3.0, 3.0, 4.0, 4.0])
    assert prices_of(prices, "r", "m", 1.0, 2, from_s=7200.0)[0] == [2.0, 2.0]
    with pytest.raises(ConfigError, match=r"there is no price of 'm' in 'q'; use a zone of r"):
        prices_of(prices, "q", "m", 1.0, 4)
