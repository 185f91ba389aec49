"""The benchmark of the interval: rows, verdict, picture, and what it says without data."""

from __future__ import annotations

import subprocess
import sys
from xml.dom import minidom

import pytest
from benchmarks.lab.interval import COSTS, Job, drawing, jobs, measure, shown, summary

from holdfast_lab.traces import synthetic
from tests.support.ranks import ROOT


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
