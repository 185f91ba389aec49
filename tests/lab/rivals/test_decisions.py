"""What the policies of other trainers decide, on traces whose outcome can be worked out by hand."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from benchmarks.lab import rival_workloads as workloads
from benchmarks.lab.rival_workloads import HIERARCHIES, MULTI_LEVEL, OVERLAPPED, GridCost
from benchmarks.lab.saved_parcae import (
    layout_changes,
    offline_decisions,
    parse_saved,
    saved_chooser,
)

from holdfast.errors import ConfigError, DataError
from holdfast.plan.hardware.tables import read_rows
from holdfast_lab.engine.interfaces import Costs, Policy
from holdfast_lab.engine.ledger import Ledger
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.table_cost import linear_cost
from holdfast_lab.rivals.acute import ACUTE, HierarchyPolicy
from holdfast_lab.rivals.bamboo import RENDEZVOUS_S, BambooPolicy
from holdfast_lab.rivals.grid_cost import ListedGrid, YoungSaves, as_grid
from holdfast_lab.rivals.liveput import INTERVAL_S, LiveputOptimizer, SharedMigration, keep_chance
from holdfast_lab.rivals.parcae import (
    ForecastBounds,
    MinutelyPolicy,
    fit_differences,
    forecast,
    forecast_chooser,
    without_excursions,
)
from holdfast_lab.rivals.registry import POLICIES, policy_named
from holdfast_lab.rivals.restart import RestartPolicy
from holdfast_lab.rivals.torchft import TorchftPolicy
from holdfast_lab.rivals.varuna import WAIT_S, VarunaPolicy
from holdfast_lab.traces.events import TraceEvent, in_order

COSTS = Costs(
    state_bytes=40e9,
    detection_s=5.0,
    start_s=20.0,
    regroup_s=1.0,
    communicator_s=2.0,
    store_bandwidth=10e9,
    node_store_bandwidth=10e9,
    peer_bandwidth=10e9,
    save_pause_s=0.0,
    sent_share=0.01,
)
LOAD_S = 4.0
"""Seconds in which one replica loads the state."""


def grid(costs: Costs = COSTS) -> GridCost:
    """100 tokens a second for each node, less 1 for each stage: the shallowest layout wins."""
    rates = {
        (dp, pp): dp * pp * 100.0 - pp for pp in (2, 4, 8) for dp in range(1, 17) if dp * pp <= 16
    }
    return GridCost(rates, 1000.0, 64, costs)


def joins(number: int, at: float = 0.0, first: int = 0) -> list[TraceEvent]:
    return [TraceEvent(at, "join", f"n{first + i:03d}", value=1.0) for i in range(number)]


def loss(at: float, *nodes: int) -> list[TraceEvent]:
    return [TraceEvent(at, "preempt", f"n{node:03d}") for node in nodes]


def simulated(policy: Policy, cost: GridCost, seconds: float, *events: TraceEvent) -> Ledger:
    return Simulation(cost, policy, Limits(seconds)).run(in_order(events))


def test_young_interval_follows_the_failures_that_were_seen():
    saves = YoungSaves(prior_s=1000.0)
    assert saves.interval_s(2.0, 0.0) == pytest.approx((2 * 2.0 * 1000.0) ** 0.5)
    for _ in range(3):
        saves.saw_failure()
    assert saves.interval_s(2.0, 1000.0) == pytest.approx((2 * 2.0 * 2000.0 / 4) ** 0.5)


def test_a_restart_ends_all_processes_and_goes_back_to_the_checkpoint():
    cost = grid()
    found = simulated(RestartPolicy(cost), cost, 1000.0, *joins(4), *loss(500.0, 1))
    assert found.interruptions == 1
    # 2 replicas load at first, one after the loss
    started = 20 + 1 + 2 + 2 * LOAD_S
    recovered = 5 + 20 + 1 + 2 + LOAD_S
    assert found.seconds["startup"] == pytest.approx(started)
    assert found.seconds["recovery"] == pytest.approx(recovered, abs=1000.0 / 396)
    assert found.seconds["rework"] > 0
    assert found.lost_s.most > LOAD_S  # a save is usable only when it is durable


def test_torchft_loses_a_step_and_a_group_and_takes_the_healed_group_back():
    cost = grid()
    events = (*joins(8), *loss(100.0, 3), *joins(1, 200.0, first=8))
    found = simulated(TorchftPolicy(cost, stages=2), cost, 1000.0, *events)
    assert found.seconds["rework"] == 0
    assert found.lost_s.most < 1000.0 / cost.rates[4, 2]  # less than a step
    paused = (5 + 1 + 2) + (1 + 2)  # three groups continue; the fourth joins again
    assert found.seconds["recovery"] == pytest.approx(paused, abs=1000.0 / cost.rates[4, 2])
    healed = 200.0 + 40 / 2 / 10  # its two nodes copy their halves of the state
    started = 20 + 1 + 2 + 4 * LOAD_S
    expected = (
        (100.0 - started) * cost.rates[4, 2]
        + (healed - 108.0) * cost.rates[3, 2]
        + (1000.0 - healed - 3.0) * cost.rates[4, 2]
    )
    blocked = found.seconds["checkpoint"] * cost.rates[4, 2]
    assert found.tokens == pytest.approx(expected - blocked, abs=1001.0)


def test_torchft_without_a_group_goes_back_to_the_checkpoint():
    cost = grid()
    found = simulated(TorchftPolicy(cost, stages=2), cost, 1000.0, *joins(4), *loss(500.0, 0, 2))
    assert found.by_reason["no group left"] == 1
    assert found.seconds["rework"] > 0


def test_bamboo_loses_nothing_with_a_stand_in_until_it_reconfigures():
    cost = grid()
    policy = BambooPolicy(cost, stages=4, overhead=0.0)
    found = simulated(policy, cost, 1000.0, *joins(9), *loss(500.0, 2))
    assert found.tokens_lost == 0
    assert found.by_reason["neighbour stands in"] == 1
    # a node waits, so that it reconfigures after one step at two thirds of the speed
    assert found.by_reason["reconfigures"] == 1
    moved = 40 / 4 / 10
    assert found.seconds["recovery"] == pytest.approx((5 + 1 + 2) + RENDEZVOUS_S + 2 + moved)
    slow = 1.5 * cost.shaped(2, 4).step_s
    started = 20 + 1 + 2 + 2 * LOAD_S
    trained = 1000.0 - started - found.seconds["recovery"] - found.seconds["checkpoint"] - slow
    assert found.tokens == pytest.approx(trained * cost.rates[2, 4] + 1000.0, rel=1e-3)


def test_bamboo_fails_when_two_neighbours_go():
    cost = grid()
    policy = BambooPolicy(cost, stages=4, overhead=0.0)
    apart = simulated(policy, cost, 1000.0, *joins(8), *loss(500.0, 0, 2))
    assert "fatal failure" not in apart.by_reason
    policy = BambooPolicy(cost, stages=4, overhead=0.0)
    near = simulated(policy, cost, 1000.0, *joins(8), *loss(500.0, 1, 2))
    assert near.by_reason["fatal failure"] == 1
    assert near.tokens_lost > 0
    assert near.tokens < apart.tokens


def test_bamboo_pays_for_the_forward_pass_that_the_bubble_does_not_hide():
    cost = grid()
    exposed = 1 / 3 - 3 / (32 + 3)  # two pipelines of four stages, 32 microbatches each
    paid = simulated(BambooPolicy(cost, stages=4), cost, 500.0, *joins(8))
    free = simulated(BambooPolicy(cost, stages=4, overhead=0.0), cost, 500.0, *joins(8))
    assert free.tokens / paid.tokens == pytest.approx(1 + exposed, rel=1e-3)


def test_varuna_waits_after_a_loss_and_a_notice_spares_its_work():
    cost = grid()
    plain = simulated(VarunaPolicy(cost), cost, 1000.0, *joins(4), *loss(500.0, 1))
    recovered = 5 + WAIT_S + 20 + 1 + 2 + LOAD_S
    step = 1000.0 / cost.rates[2, 2]
    assert plain.seconds["recovery"] == pytest.approx(recovered, abs=step)
    assert plain.seconds["rework"] > 0
    notice = TraceEvent(440.0, "notice", "n001", value=60.0)
    warned = simulated(VarunaPolicy(cost), cost, 1000.0, *joins(4), notice, *loss(500.0, 1))
    assert warned.seconds["rework"] == 0


def test_a_saved_schedule_is_followed_and_no_loss_goes_back_further_than_a_step():
    cost = grid()
    schedule = [(4, 2)] * 5 + [(2, 4)] * 20
    policy = MinutelyPolicy(cost, saved_chooser(schedule))
    found = simulated(policy, cost, 1200.0, *joins(8), *loss(650.0, 0))
    assert found.by_reason == {"start": 1, "changes depth": 1, "migrates": 1}
    assert found.tokens_lost <= 1000.0
    # to four stages: groups and a quarter of the state; after the loss: one replica is complete
    paused = (1 + 2 + 1) + (5 + 1 + 2)
    assert found.seconds["recovery"] == pytest.approx(paused, abs=3.0)


def test_hierarchies_in_closed_form():
    nbytes = 667e6
    assert MULTI_LEVEL.checkpoint_s(nbytes) == pytest.approx(0.0667 + 667 / 16e3 + 6.67)
    assert OVERLAPPED.durable_s(nbytes) == pytest.approx({1: 0.5336, 2: 6.67})
    assert ACUTE.durable_s(nbytes)[2] == pytest.approx(0.5336 + 6.67)
    assert 1 - ACUTE.pause_s(nbytes) / MULTI_LEVEL.pause_s(nbytes) == pytest.approx(0.531)
    shorter = 1 - ACUTE.checkpoint_s(nbytes) / MULTI_LEVEL.checkpoint_s(nbytes)
    assert shorter > 0.433  # what its authors report on average


def test_a_stable_node_keeps_more_work_than_storage_alone():
    costs = Costs(state_bytes=1e9, start_s=5.0)
    cost = grid(costs)
    lost = {}
    for hierarchy in HIERARCHIES:
        policy = HierarchyPolicy(cost, hierarchy, interval_s=5.0)
        found = simulated(policy, cost, 600.0, *joins(4), *loss(303.0, 1))
        lost[hierarchy.name] = found.lost_s.most
    names = [hierarchy.name for hierarchy in HIERARCHIES]
    assert lost[names[2]] < lost[names[0]]
    assert lost[names[3]] <= lost[names[2]]


# --- every policy on random traces ---------------------------------------------------------------
class Watched(Simulation):
    """Checks after each decision that the run uses nodes that are there, each once."""

    def check(self) -> None:
        assert len(set(self.used)) == len(self.used)
        assert set(self.used) <= set(self.nodes)


def random_trace(seed: int) -> list[TraceEvent]:
    draw = random.Random(seed)
    events, alive, made = joins(12), [f"n{i:03d}" for i in range(12)], 12
    at = 0.0
    while at < 4000.0:
        at += draw.expovariate(1 / 90.0)
        if alive and draw.random() < 0.5:
            gone = draw.sample(alive, min(len(alive), draw.choice((1, 1, 2, 4, 12))))
            events += [TraceEvent(at, "preempt", name) for name in gone]
            alive = [name for name in alive if name not in gone]
        else:
            many = draw.choice((1, 1, 2, 8))
            events += joins(many, at, made)
            alive += [f"n{made + i:03d}" for i in range(many)]
            made += many
    return list(in_order(events))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_policy_accounts_for_every_second(name: str, seed: int):
    cost = grid()
    run = Watched(cost, policy_named(name)(cost), Limits(4000.0))
    checked = []
    inner = run.policy.saves

    def saves(view):
        run.check()
        checked.append(view.now)
        return inner(view)

    run.policy.saves = saves
    found = run.run(random_trace(seed))
    assert checked
    assert found.wall_s == pytest.approx(4000.0)
    assert 0 < found.tokens <= found.ideal_tokens


def test_an_unknown_policy_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"there is no policy 'oobleck'.*use .*holdfast"):
        policy_named("oobleck")


# --- Parcae's forecast and optimiser against definitions, and its files ---------------------------
ROWS = read_rows(Path(workloads.__file__).with_name("parcae_throughput.csv"))


def test_the_measured_grids_have_the_published_best_layouts():
    bert = workloads.measured_grid(ROWS, workloads.BERT_LARGE)
    assert len(bert.shapes) == 62
    assert bert.point(32).layout == "8 x 4"
    assert bert.point(1) is None
    assert bert.point(32).step_s == pytest.approx(1.842692, rel=1e-4)
    gpt = workloads.measured_grid(ROWS, workloads.GPT_6_7B)
    assert gpt.point(24).layout == "2 x 12"
    assert gpt.point(23).layout == "1 x 16"


def test_the_closed_form_is_near_the_measured_grid_but_for_one_row():
    gpt = workloads.measured_grid(ROWS, workloads.GPT_6_7B)
    errors = {
        shape: workloads.pipeline_rate(workloads.V100_PIPELINE, *shape) / rate - 1
        for shape, rate in gpt.rates.items()
    }
    assert errors.pop((2, 16)) > 0.3  # measured slower than on half of the nodes
    assert max(abs(error) for error in errors.values()) < 0.08


@pytest.mark.parametrize(("nodes", "dp", "pp", "lost"), [(6, 2, 3, 2), (7, 2, 3, 3), (8, 4, 2, 3)])
def test_the_chance_to_keep_copies_is_that_of_all_draws(nodes: int, dp: int, pp: int, lost: int):
    for wanted in range(dp + 2):
        draws = list(itertools.combinations(range(nodes), lost))
        good = 0
        for gone in draws:
            left = [dp] * pp
            for node in gone:
                if node < dp * pp:
                    left[node % pp] -= 1
            good += min(left) >= wanted
        assert keep_chance(nodes, dp, pp, lost, wanted) == pytest.approx(good / len(draws))


def test_a_forecast_follows_a_steady_fall_within_its_bounds():
    fall = [30, 29, 28, 27, 26, 25, 24, 23]
    assert fit_differences(fall) == (-1.0, 0.0)
    ahead = forecast(fall, [1] * 8, 8, ForecastBounds(8, 32), random.Random(1))
    assert ahead[0] in (22, 23)  # a long fall is believed in part
    assert all(a >= b for a, b in itertools.pairwise(ahead))
    assert forecast([9] * 8, [0] * 8, 4, ForecastBounds(), random.Random(1)) == [9] * 4


def test_short_excursions_are_smoothed():
    assert without_excursions([5, 5, 9, 5, 5, 5]) == [5] * 6
    assert without_excursions([8, 7, 3, 4, 5]) == [3, 3, 3, 4, 5]


def test_the_dynamic_programme_finds_what_all_sequences_show():
    rates = {(dp, pp): 10.0 * dp * pp - pp**2 for pp in (1, 2, 3) for dp in (1, 2, 3)}
    cost = GridCost(rates, 100.0, 12, Costs(state_bytes=300e9, peer_bandwidth=1e10))
    optimizer = LiveputOptimizer(cost, SharedMigration(cost.costs), min_share=0.0)
    draw = random.Random(3)
    for _ in range(12):
        nodes = draw.randint(3, 9)
        shape = draw.choice([each for each in cost.shapes if each[0] * each[1] <= nodes])
        ahead, now = [], nodes
        for _ in range(3):
            new = draw.randint(3, 9)
            ahead.append((max(0, new - now), max(0, now - new)))
            now = new

        def work(sequence, nodes=nodes, shape=shape, ahead=ahead):
            total, at, now = 0.0, shape, nodes
            for layout, (joined, lost) in zip(sequence, ahead, strict=True):
                if layout[0] * layout[1] > now + joined - lost:
                    return -1.0
                seconds = optimizer._cost(at, now, lost, layout)
                total += cost.rates[layout] * max(0.0, INTERVAL_S - seconds)
                at, now = layout, now + joined - lost
            return total

        best = max(work(sequence) for sequence in itertools.product(cost.shapes, repeat=3))
        first = optimizer.choose(nodes, shape, ahead)
        rest = itertools.product(cost.shapes, repeat=2)
        assert max(work((first, *others)) for others in rest) == pytest.approx(best)


def saved_file(minutes: int = 30) -> str:
    items, before = [], 0
    for minute in range(minutes):
        nodes = 18 if minute < 10 or minute >= 20 else 12
        items.append(
            {
                "interval": [before, max(0, nodes - before), max(0, before - nodes)],
                "duration": 60000,
                "throughut-opt": [4, 4] if nodes == 18 else [6, 2],
                "liveput-truth": [4, 4] if nodes == 18 else [6, 2],
                "liveput-predict": [6, 2],
            }
        )
        before = nodes
    return json.dumps(items)


def test_saved_decisions_are_read_and_made_again():
    saved = parse_saved(saved_file(), "x.json")
    assert layout_changes(saved.by_kind["throughput"]) == 2
    cost = workloads.measured_grid(ROWS, workloads.BERT_LARGE)
    optimizer = LiveputOptimizer(cost, SharedMigration(cost.costs))
    mine = offline_decisions(saved, optimizer, 12, knows=True)
    assert tuple(mine) == saved.by_kind["liveput, future known"]


@pytest.mark.parametrize("text", ["[]x", '[{"interval": [0, 1, 0]}]', "{}", '[{"interval": 3}]'])
def test_a_file_of_another_form_is_refused(text: str):
    with pytest.raises(DataError, match=r"x\.json: this is no file of Parcae's decisions; give"):
        parse_saved(text, "x.json")


def test_a_forecast_drives_a_run_on_a_model_that_lists_no_layouts():
    cost = linear_cost(8, 800.0, 1000.0, Costs(state_bytes=1e9), nodes_per_replica=2)
    grid = as_grid(cost)
    assert isinstance(grid, ListedGrid)
    assert grid.shapes == ((1, 2), (2, 2), (3, 2), (4, 2))
    policy = MinutelyPolicy(grid, forecast_chooser(grid))
    events = [TraceEvent(0.0, "join", f"n{i}", value=1.0) for i in range(8)]
    events += [TraceEvent(600.0, "preempt", "n3")]
    found = Simulation(cost, policy, Limits(1200.0)).run(events)
    assert found.g > 0.9
    assert found.by_reason["migrates"] == 1
