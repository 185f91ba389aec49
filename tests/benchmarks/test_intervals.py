"""The replay of saves over a trace, against arithmetic by hand, brute force and Daly's formula."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from math import inf
from xml.dom import minidom

import pytest
from benchmarks.lab.interval import COSTS, Job, drawing, jobs, measure, shown, summary
from benchmarks.lab.intervals import (
    LostTime,
    RunSpell,
    belief_path,
    failure_rate,
    job_spells,
    lost_by_adaptive,
    lost_by_fixed,
    lost_by_two_tiers,
    poisson,
    rotate_spells,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.policy.saving.failure_rate import FailureRate
from holdfast.policy.saving.interval import IntervalBounds, lost_time_share, young_interval
from holdfast_lab.traces import synthetic
from holdfast_lab.traces.reading import load_trace
from tests.support.ranks import ROOT

WIDE = IntervalBounds(0.01, 86400.0)


def test_by_hand() -> None:
    """100 s with a save of 2 s after every 30 s: three saves, 4 s are redone."""
    assert lost_by_fixed([RunSpell(100, True)], 30, 2, 10) == LostTime(6, 4, 0, 100, 3)
    assert lost_by_fixed([RunSpell(100, False)], 30, 2, 10) == LostTime(6, 0, 0, 100, 3)
    assert lost_by_fixed([RunSpell(95, True)], 30, 2, 10) == LostTime(
        5, 30, 0, 95, 2
    )  # the third is torn
    assert lost_by_fixed([RunSpell(20, True)], 30, 2, 10) == LostTime(0, 20, 0, 20, 0)
    twice = lost_by_fixed([RunSpell(100, True), RunSpell(8, True), RunSpell(45, True)], 30, 2, 10)
    assert twice == LostTime(8, 7, 18, 153, 4)


def _brute(found: list[RunSpell], seconds: float, cost: float, recovery: float) -> LostTime:
    """Save by save."""
    waste, broken = LostTime(), False
    for spell in found:
        start = min(recovery, spell.seconds) if broken else 0.0
        at, open_, saving, saves = start, 0.0, 0.0, 0
        while True:
            if at + seconds > spell.seconds:
                open_ = spell.seconds - at
                break
            if at + seconds + cost > spell.seconds:
                open_, saving = seconds, saving + spell.seconds - at - seconds
                break
            at, saving, saves = at + seconds + cost, saving + cost, saves + 1
        waste += LostTime(saving, open_ if spell.failed else 0.0, start, spell.seconds, saves)
        broken = spell.failed
    return waste


histories = st.lists(
    st.builds(RunSpell, st.integers(1, 4000).map(float), st.booleans()), min_size=1, max_size=6
)


@given(histories, st.integers(1, 600), st.integers(1, 40), st.integers(0, 90))
def test_it_equals_brute_force(
    found: list[RunSpell], seconds: int, cost: int, recovery: int
) -> None:
    assert lost_by_fixed(found, seconds, cost, recovery) == _brute(found, seconds, cost, recovery)
    same = lost_by_two_tiers(found, seconds, 10**9, (cost, 0.0), recovery)
    assert same.redone == lost_by_fixed(found, seconds, cost, recovery).redone
    assert same.saving == lost_by_fixed(found, seconds, cost, recovery).saving


@given(histories, st.integers(2, 600), st.integers(1, 40), st.integers(0, 90))
@settings(deadline=None)
def test_an_adaptive_policy_that_never_changes_its_mind_is_a_fixed_one(
    found: list[RunSpell], seconds: int, cost: int, recovery: int
) -> None:
    # Off the grid of seconds: a failure may end at the instant of a save.
    found = [replace(spell, seconds=spell.seconds + 0.37) for spell in found]
    bounds = IntervalBounds(seconds, seconds)
    path = belief_path(found, FailureRate.from_prior())
    mine, want = (
        lost_by_adaptive(found, path, cost, recovery, bounds),
        lost_by_fixed(found, seconds, cost, recovery),
    )
    assert mine.saving == pytest.approx(want.saving)
    assert mine.redone == pytest.approx(want.redone)
    assert (mine.running, mine.recovering, mine.saves) == (
        want.running,
        want.recovering,
        want.saves,
    )


@pytest.mark.parametrize("cost", [0.05, 5.0, 60.0])
def test_random_failures_lose_what_dalys_formula_says(cost: float) -> None:
    draw = random.Random(1)
    found = [RunSpell(draw.expovariate(1 / 900), True) for _ in range(20000)]
    interval = young_interval(cost, 1 / 900)
    waste = lost_by_fixed(found, interval, cost, 0.0)
    useful = waste.running - waste.saving - waste.redone
    assert (waste.saving + waste.redone) / useful == pytest.approx(
        lost_time_share(interval, cost, 1 / 900), rel=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize("mtbf", [300.0, 6 * 3600.0])
def test_the_adaptive_policy_is_within_five_per_cent_on_random_failures(mtbf: float) -> None:
    found = job_spells(poisson(2, mtbf=mtbf, failures=1200), 4)
    path, rate = belief_path(found, FailureRate.from_prior()), failure_rate(found)
    for cost in (0.005, 1.5):
        best = min(
            lost_by_fixed(found, young_interval(cost, rate) * 1.1**k, cost, 30).by_policy
            for k in range(-12, 13)
        )
        assert lost_by_adaptive(found, path, cost, 30, WIDE).by_policy < 1.05 * best


def test_a_trace_becomes_spells() -> None:
    """Two nodes of three are used; the third stands in; then none is there for a minute."""
    text = "0,add,a\n0,add,b\n100000,add,c\n300000,remove,a\n300000,remove,b\n"
    text += "500000,remove,c\n560000,add,d\n900000,add,e\n"
    trace = load_trace(text, "a.csv")
    found = job_spells(trace, 2, seed=1)
    assert [spell.failed for spell in found] == [True, True, False]
    assert sum(s.seconds + s.idle for s in found) == pytest.approx(900)
    assert found[0].nodes == 2
    assert found[1].nodes == 1
    assert found[2].idle >= 60
    exact = job_spells(load_trace(text.replace("560000", "500500"), "a.csv"), 1)
    assert sum(s.failed for s in exact) <= 2


def test_a_burst_is_one_failure_and_nodes_that_are_not_used_do_not_matter() -> None:
    trace = synthetic.spot_pool(4)
    everyone = job_spells(trace, 32, seed=1)
    instants = sum(bool(gone) for _, gone, _ in trace.instants())
    assert sum(s.failed for s in everyone) == pytest.approx(instants, abs=2)
    few = job_spells(trace, 2, seed=1)
    assert 0 < sum(s.failed for s in few) < instants / 3


def test_a_rotated_history_has_the_same_time_and_failures() -> None:
    found = job_spells(synthetic.spot_pool(4), 8)
    for share in (0.0, 0.3, 0.99):
        other = rotate_spells(found, share)
        assert sum(s.seconds for s in other) == pytest.approx(sum(s.seconds for s in found))
        assert sum(s.failed for s in other) == sum(s.failed for s in found)
    assert not rotate_spells(found, 0.3)[-1].failed


def test_a_job_that_never_runs_loses_nothing() -> None:
    assert (
        job_spells(load_trace('{"data": [0, 0], "metadata": {"gap_seconds": 5}}', "a.json"), 4)
        == ()
    )
    assert LostTime().by_policy == LostTime().total == 0.0
    assert lost_by_adaptive((), (), 1.0, 1.0, IntervalBounds(1, inf)) == LostTime()


# --- the benchmark of the interval ----------------------------------------------------------------
def test_a_job_gives_a_row_a_cost_and_a_picture() -> None:
    trace = synthetic.spot_pool(1, days=0.5)
    assert [job.nodes for job in jobs([trace], 2, 4000, 60.0, 5400.0)] == [32, 8, 2]
    rows = measure(Job(trace, 16, 2, 4000, 60.0, 5400.0))
    assert [row.cost for row in rows] == list(COSTS)
    for row in rows:
        assert row.best_waste == min(waste for _, waste in row.curve) <= row.known
        assert 0.7 < row.ratio < 1.3
        assert row.adaptive < min(row.others[:2])
        assert f"{row.ratio:.3f}" in shown(row)
        assert ("MISSED" in shown(row)) is not row.passed
    assert f"of {len(COSTS)} cases within 1.05" in summary(rows)
    assert len(minidom.parseString(drawing(rows)).getElementsByTagName("circle")) == 1


def test_too_few_failures_are_not_judged() -> None:
    assert measure(Job(synthetic.spot_pool(1, days=0.1), 2, 2, 4000, 60.0, 5400.0)) == []


@pytest.mark.slow
def test_without_data_it_says_what_is_missing() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.lab.interval", "--phases", "2", "--only", "Poisson"],
        cwd=ROOT,
        env={"PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "no real traces: set HOLDFAST_DATA or --traces to a folder" in found.stdout, found.stderr
    assert "synthetic Poisson failures, seed 2" in found.stdout
