"""Parcae's forecast and optimiser against definitions, and its files."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from benchmarks.lab import rival_workloads as workloads
from benchmarks.lab.rival_workloads import GridCost
from benchmarks.lab.saved_parcae import layout_changes, offline_decisions, parse_saved

from holdfast.errors import DataError
from holdfast.plan.hardware.tables import read_rows
from holdfast_lab.engine.interfaces import Costs
from holdfast_lab.engine.loop import Limits, Simulation
from holdfast_lab.engine.table_cost import linear_cost
from holdfast_lab.rivals.grid_cost import ListedGrid, as_grid
from holdfast_lab.rivals.liveput import INTERVAL_S, LiveputOptimizer, SharedMigration, keep_chance
from holdfast_lab.rivals.parcae import (
    ForecastBounds,
    MinutelyPolicy,
    fit_differences,
    forecast,
    forecast_chooser,
    without_excursions,
)
from holdfast_lab.traces.events import TraceEvent

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
