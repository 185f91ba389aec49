"""The engine on small traces whose outcome can be worked out by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from math import expm1, inf, sqrt

import pytest

from holdfast.errors import ConfigError
from holdfast.policy.saving.tiers import DISK
from holdfast_lab.engine.holdfast import HoldfastRules, holdfast
from holdfast_lab.engine.interfaces import (
    NOTHING,
    SAVE,
    STAY,
    Change,
    Costs,
    Decision,
    SavePlan,
    TierSave,
    Transition,
    View,
)
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.progress import Progress
from holdfast_lab.engine.settings import as_number
from holdfast_lab.engine.study import Case, estimate, histories_of, repeated, run_case
from holdfast_lab.engine.table_cost import TableCost, linear_cost
from holdfast_lab.traces.events import EventStream, TraceEvent, TraceHeader, check_events

COSTS = Costs(
    state_bytes=40e9,
    peer_bandwidth=50e9,
    detection_s=5,
    start_s=20,
    communicator_s=1,
    idle_watts=100,
    busy_watts=500,
)


@dataclass
class RestartAlways:
    """Restarts from the last save after every loss."""

    cost: TableCost
    interval: float
    blocked: float
    restart: float
    durable: float = 0.0
    name: str = "restart"

    def decide(self, view: View, change: Change) -> Decision:
        point = self.cost.point(len(view.nodes))
        if change.lost:
            pauses = (("recovery", self.restart),)
            return Decision(Transition(point, pauses, SAVE, (DISK,), reason="restart"))
        return Decision(Transition(point, (), NOTHING)) if view.point is None else STAY

    def saves(self, view: View) -> SavePlan:
        return SavePlan((TierSave(DISK, self.interval, self.blocked, self.durable, 1.0),))

    def slowdown(self, view: View) -> float:
        return 1.0


def joins(number: int, at: float = 0.0) -> list[TraceEvent]:
    return [TraceEvent(at, "join", f"n{index}", value=1.0) for index in range(number)]


def one_node(step: float = 1.0) -> TableCost:
    return linear_cost(1, 100.0, 100.0 * step, COSTS)


def test_a_loss_costs_the_work_since_the_save_and_the_restart() -> None:
    cost = one_node()
    events = [*joins(1), TraceEvent(105.5, "fail", "n0"), TraceEvent(105.5 + 40, "recover", "n0")]
    policy = RestartAlways(cost, interval=30, blocked=2, restart=10)
    ledger = Simulation(cost, policy, Limits(1000)).run(events)
    # Saves end at 32, 64 and 96 s; 9 full steps and half a step of work come after the third.
    assert ledger.lost_s.total == pytest.approx(9.5)
    assert ledger.lost_steps.total == pytest.approx(9.5)
    assert ledger.seconds["rework"] == pytest.approx(9)
    assert ledger.seconds["stopped"] == pytest.approx(30)  # the restart took the first ten
    assert sum(ledger.seconds.values()) == pytest.approx(1000)
    assert ledger.tokens == pytest.approx(100 * ledger.seconds["productive"])


def test_a_save_counts_when_it_is_durable() -> None:
    cost = one_node()
    events = [*joins(2), TraceEvent(70.0, "preempt", "n0")]
    policy = RestartAlways(cost, interval=30, blocked=0, restart=10, durable=15)
    ledger = Simulation(cost, policy, Limits(100)).run(events)
    assert ledger.lost_s.total == pytest.approx(40)  # the save of 60 s was under way
    assert ledger.tokens == pytest.approx(100 * (30 + 20))


@pytest.mark.parametrize(("interval", "step"), [(7.0, 1.0), (3.0, 0.0), (50.0, 4.0)])
def test_the_closed_form_equals_walking_in_small_pieces(interval: float, step: float) -> None:
    def run(pieces: int) -> Progress:
        progress = Progress(step * 10.0)
        progress.set_rate(10.0)
        saves = (TierSave(1, interval, 0.25, 1.0, 5.0), TierSave(2, 3 * interval, 1.5, 20.0, 7.0))
        progress.set_plan(SavePlan(saves))
        for index in range(pieces):
            progress.advance(index * 4000 / pieces, 4000 / pieces)
        return progress

    whole, walked = run(1), run(977)
    assert whole.tokens == pytest.approx(walked.tokens)
    assert whole.blocked == pytest.approx(walked.blocked)
    assert whole.saves == walked.saves
    assert whole.bytes == pytest.approx(walked.bytes)
    lost = whole.return_to_save(4000.0, [2])
    assert lost.tokens == pytest.approx(walked.return_to_save(4000.0, [2]).tokens)


def fails_at_random(rate: float, seed: int) -> list[TraceEvent]:
    draw, at = random.Random(seed), 0.0
    events = joins(1)
    for index in range(30_000):
        at += draw.expovariate(rate)
        events.append(TraceEvent(at, "preempt", f"n{index}"))
        events.append(TraceEvent(at, "join", f"n{index + 1}", value=1.0))
        if at > 2e7:
            break
    return events


def test_fixed_interval_and_random_failures_give_dalys_wall_time() -> None:
    mean, interval, blocked, restart = 4000.0, 600.0, 30.0, 120.0
    cost = linear_cost(1, 1.0, 0.0, COSTS)

    @dataclass
    class Poisson(RestartAlways):
        """Failures may also hit a restart: it begins again."""

    wall = tokens = 0.0
    for seed in range(3):
        policy = Poisson(cost, interval, blocked, restart)
        ledger = Simulation(cost, policy, Limits(2e7)).run(fails_at_random(1 / mean, seed))
        wall, tokens = wall + ledger.wall_s, tokens + ledger.tokens
    # Daly, FGCS 22(3), 2006, equation 20.
    expected = mean * (expm1(restart / mean) + 1) * expm1((interval + blocked) / mean) / interval
    assert wall / tokens == pytest.approx(expected, rel=0.01)


def test_every_second_has_one_label_and_nothing_is_kept_twice() -> None:
    ledger = _spot_run(seed=3)
    assert sum(ledger.seconds.values()) == pytest.approx(80_000.0, abs=1e-3)
    assert min(ledger.seconds.values()) >= 0
    assert 0 < ledger.tokens < ledger.ideal_tokens
    assert ledger.interruptions == ledger.lost_s.count > 30
    assert ledger.node_s >= ledger.used_node_s > 0


def _spot_run(seed: int, peers: bool = True, max_interval: float = 1800.0) -> Ledger:
    draw, at, number = random.Random(seed), 0.0, 12
    events, there = joins(12), [f"n{index}" for index in range(12)]
    while at < 80_000:
        at += draw.expovariate(1 / 500)
        if draw.random() < 0.5 and len(there) > 1:
            for _ in range(draw.choice((1, 1, 2, 3))):
                if there:
                    gone = there.pop(draw.randrange(len(there)))
                    events.append(TraceEvent(at, "preempt", gone))
        else:
            there.append(f"n{number}")
            events.append(TraceEvent(at, "join", f"n{number}", value=1.0))
            number += 1
    events.sort(key=lambda event: event.key)
    cost = linear_cost(12, 1200.0, 12_000.0, COSTS, nodes_per_replica=3)
    rules = HoldfastRules(peers=peers, max_interval_s=max_interval)
    return Simulation(cost, holdfast(cost, rules), Limits(80_000.0)).run(events)


def test_holdfast_loses_a_step_where_a_replica_is_left() -> None:
    cost = linear_cost(4, 400.0, 4000.0, COSTS, nodes_per_replica=2)
    events = [*joins(4), TraceEvent(1004.0, "preempt", "n0")]
    ledger = Simulation(cost, holdfast(cost), Limits(2000)).run(events)
    assert ledger.by_reason == {"continues": 1}
    assert ledger.lost_s.total < 10
    assert ledger.seconds["rework"] == 0


def test_holdfast_reads_memory_or_the_store_where_no_replica_is_left() -> None:
    cost = TableCost(
        [linear_cost(n, 100.0 * n, 1000.0, COSTS, n).points[-1] for n in (2, 3, 4)], COSTS
    )
    one = [*joins(4), TraceEvent(1004.0, "preempt", "n0")]
    two = [*one, TraceEvent(1004.0, "preempt", "n1")]
    rules = HoldfastRules(peer_interval_s=10.0)
    memory = Simulation(cost, holdfast(cost, rules), Limits(2000)).run(one)
    store = Simulation(cost, holdfast(cost, rules), Limits(2000)).run(two)
    assert memory.by_reason == {"from_memory": 1}
    assert store.by_reason == {"from_store": 1}
    assert store.read_bytes[DISK] == COSTS.state_bytes
    assert store.rto_s.mean > memory.rto_s.mean


def test_a_notice_in_time_loses_nothing() -> None:
    cost = linear_cost(4, 400.0, 4000.0, COSTS, nodes_per_replica=4)
    cost = TableCost([*cost.points, *linear_cost(3, 300.0, 4000.0, COSTS, 3).points], COSTS)
    notice = TraceEvent(1000.0, "notice", "n1", value=30.0)
    true = [*joins(4), notice, TraceEvent(1030.0, "preempt", "n1")]
    kept = Simulation(cost, holdfast(cost), Limits(3000)).run(true)
    assert kept.interruptions == 0
    assert kept.tokens_lost == 0
    missed = Simulation(cost, holdfast(cost), Limits(3000)).run([*joins(4), true[-1]])
    assert missed.tokens_lost > 0
    assert kept.tokens > missed.tokens


def test_a_run_that_is_done_ends_at_the_moment_of_its_last_token() -> None:
    cost = one_node()
    policy = RestartAlways(cost, interval=30, blocked=2, restart=10)
    ledger = Simulation(cost, policy, Limits(1e9, tokens=100_000.0)).run(joins(1))
    assert ledger.finished
    assert ledger.wall_s == pytest.approx(1000 + 2 * 33)


def test_dollars_follow_the_prices_of_the_events() -> None:
    cost = one_node()
    events = [
        *joins(2),
        TraceEvent(0.0, "price", value=2.0),
        TraceEvent(3600.0, "price", value=8.0),
    ]
    events += [TraceEvent(0.0, "carbon", value=500.0)]
    events.sort(key=lambda event: event.key)
    policy = RestartAlways(cost, inf, 0, 10)
    ledger = Simulation(cost, policy, Limits(7200.0)).run(events)
    assert ledger.usd == pytest.approx(2 * 2 + 2 * 8)
    assert ledger.kwh == pytest.approx(2 * 0.5 + 2 * 0.1)
    assert ledger.grams_co2 == pytest.approx(1.2 * 500)


def test_a_slow_node_slows_the_run_until_it_recovers() -> None:
    cost = linear_cost(2, 200.0, 200.0, COSTS)
    events = [
        *joins(2),
        TraceEvent(100.0, "slow", "n1", value=2.0),
        TraceEvent(300.0, "recover", "n1"),
    ]
    policy = holdfast(cost, HoldfastRules(peers=False, store_interval_s=1e6))
    ledger = Simulation(cost, policy, Limits(1000.0)).run(events)
    started = ledger.seconds["startup"]
    assert ledger.tokens == pytest.approx(200 * (1000 - started) - 200 * 100, rel=1e-6)


def test_intervals_of_the_policy_follow_the_failures_that_it_sees() -> None:
    quiet = linear_cost(4, 400.0, 400.0, COSTS, nodes_per_replica=4)
    ledger = Simulation(quiet, holdfast(quiet), Limits(30 * 86_400.0)).run(joins(4))
    early = Simulation(quiet, holdfast(quiet), Limits(86_400.0)).run(joins(4))
    assert ledger.saves[DISK] < 10 * early.saves[DISK]
    assert sqrt(ledger.seconds["checkpoint"]) < ledger.seconds["productive"]


# --- histories of a trace, and runs to their end --------------------------------------------------
STUDY_COSTS = Costs(state_bytes=1e9)


def stream(nodes: int, seconds: float = 1000.0) -> EventStream:
    events = [TraceEvent(0.0, "join", f"n{index}", value=1.0) for index in range(nodes)]
    events.append(TraceEvent(600.0, "preempt", "n0"))
    return EventStream(TraceHeader("test", seconds=seconds), tuple(events))


def test_a_history_is_a_part_of_the_trace_with_the_nodes_at_its_start() -> None:
    first, last = histories_of(stream(3), 2)
    assert (first.seconds, last.seconds) == (750.0, 750.0)
    assert [event.kind for event in last.events] == ["join"] * 3 + ["preempt"]
    assert (first.events[-1].t_s, last.events[-1].t_s) == (600.0, 350.0)


def test_a_repeated_trace_is_one_that_can_be() -> None:
    events = list(islice(repeated(stream(3)), 20))
    check_events(events, [""] * len(events))
    assert [event.t_s for event in events if event.node == "n0#1"] == [1000.0, 1600.0]


def test_a_run_is_done_after_as_many_repetitions_as_it_needs() -> None:
    cost = linear_cost(2, 200.0, 200.0, STUDY_COSTS)
    ledger = run_case(Case("ours", holdfast, cost), [stream(2)], 2_000_000.0).ledgers[0]
    assert ledger.finished
    assert 10_000 < ledger.wall_s < 15_000


def test_a_run_that_never_starts_is_given_up_after_one_pass() -> None:
    cost = TableCost(linear_cost(4, 400.0, 400.0, STUDY_COSTS, 4).points, STUDY_COSTS)
    ledger = run_case(Case("ours", holdfast, cost), [stream(2)], 1000.0).ledgers[0]
    assert not ledger.finished
    assert ledger.seconds["stopped"] == pytest.approx(1000.0)


def test_the_interval_of_a_mean_holds_it() -> None:
    found = estimate([1.0, 2.0, 3.0, 6.0])
    assert found.low < found.mean == 3.0 < found.high
    assert estimate([5.0]).low == estimate([5.0]).high == 5.0


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("peers", "2", "give 0 or 1"),
        ("missed_share", "1.5", "give a number from 0 to 1"),
        ("store_bandwidth", "0", "give a number above 0"),
        ("nodes", "0", "give a whole number from 1 to 100000"),
        ("spares", "2.5", "give a whole number from 0 to 100000"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(name: str, text: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{text}'; {remedy}"):
        as_number(name, text, "--set")
