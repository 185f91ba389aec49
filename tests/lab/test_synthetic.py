"""Each generator reproduces the statistic it is there for, and the same seed the same trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import mean, pstdev

import pytest
from benchmarks.lab.intervals import poisson

from holdfast_lab.traces import synthetic
from holdfast_lab.traces.node_changes import Trace


def _drops(trace: Trace) -> list[int]:
    return [len(gone) for _, gone, _ in trace.instants() if gone]


@pytest.mark.parametrize(
    "make",
    [
        synthetic.spot_pool,
        synthetic.gang_offers,
        synthetic.bathtub_lives,
        synthetic.cluster_failures,
    ],
)
def test_the_same_seed_gives_the_same_trace_in_order(make: Callable[[int], Trace]) -> None:
    one, again, other = make(1), make(1), make(2)
    assert one == again
    assert one.changes != other.changes
    assert list(one.changes) == sorted(one.changes)
    names = [change.node for change in one.changes if change.kind == "join"]
    assert names
    assert one.changes[-1].seconds <= one.seconds


def test_a_spot_pool_loses_two_nodes_a_burst_and_its_rate_swings() -> None:
    trace = synthetic.spot_pool(3, days=8)
    assert 1.8 < mean(_drops(trace)) < 2.5
    quarter = 6 * 3600
    per = [0] * int(trace.seconds // quarter + 1)
    for at, gone, _ in trace.instants():
        per[int(at // quarter)] += bool(gone)
    busy, quiet = sum(per[0::2]), sum(per[1::2])
    assert 3 < busy / quiet < 8


def test_a_gang_is_mostly_there_in_whole_or_not_at_all() -> None:
    drops = _drops(synthetic.gang_offers(3, days=40))
    assert 0.3 < sum(d == 16 for d in drops) / len(drops) < 0.55


def test_bathtub_lives_end_early_or_at_the_wall() -> None:
    born: dict[str, float] = {}
    lives = []
    for change in synthetic.bathtub_lives(3, nodes=64, days=20).changes:
        if change.kind == "join":
            born[change.node] = change.seconds
        else:
            lives.append((change.seconds - born[change.node]) / 3600)
    assert 0.25 < sum(life < 3 for life in lives) / len(lives) < 0.45
    assert 0.4 < sum(life > 23.9 for life in lives) / len(lives) < 0.65
    assert max(lives) <= 24.1


def test_failures_of_a_cluster_cluster_in_time_and_on_few_nodes() -> None:
    trace = synthetic.cluster_failures(3)
    at = [change.seconds for change in trace.changes if change.kind == "go"]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert pstdev(gaps) / mean(gaps) > 1.25
    assert 0.8 < len(at) / 512 / 1.2 < 1.25
    counts: dict[str, int] = {}
    for change in trace.changes:
        if change.kind == "go":
            counts[change.node] = counts.get(change.node, 0) + 1
    assert max(counts.values()) > 8 * mean(counts.values())


def test_poisson_failures_have_a_spread_of_one() -> None:
    trace = poisson(3, mtbf=100.0, failures=4000)
    at = [change.seconds for change in trace.changes if change.kind == "go"]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert mean(gaps) == pytest.approx(100, rel=0.06)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(1, rel=0.08)
