"""Numbers that are known of the public files, read from the folder that HOLDFAST_DATA names.

The files are not part of the project. Without the folder these tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.node_changes import DEFAULTS
from holdfast_lab.traces.reading import read_stream
from holdfast_lab.traces.summary import Churn, churn_of

FOLDER = Path(os.environ.get("HOLDFAST_DATA", "no folder"))

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="needs a folder with public traces: set HOLDFAST_DATA"
)


def read(pattern: str) -> EventStream:
    [path] = FOLDER.glob(pattern)
    return read_stream(path.read_bytes(), path.name, DEFAULTS)


def churn(pattern: str) -> Churn:
    return churn_of(read(pattern))


def test_named_nodes_of_a_spot_pool() -> None:
    found = read("churn/bamboo/p3-trace.csv")
    machines = churn_of(found)
    assert (len(found.events), machines.most, machines.at_end) == (344, 32, 10)
    assert machines.node_days == pytest.approx(11.380, abs=0.001)
    assert machines.bursts == {1: 39, 2: 13, 3: 15, 4: 7, 5: 1, 6: 4}


def test_dated_counts() -> None:
    found = read("churn/bamboo/gcp-a100-*.txt")
    machines = churn_of(found)
    assert (found.header.rows, machines.lost, max(machines.bursts)) == (268, 154, 36)
    assert machines.node_days == pytest.approx(64.51, abs=0.01)


@pytest.mark.parametrize(
    ("pattern", "lost", "drops"),
    [
        ("availability-16-node-us-west-2a", 1473, 145),
        ("availability-16-node-us-east-2b", 910, 136),
        ("preemption-4-node-us-east-1f", 195, 136),
    ],
)
def test_ticks(pattern: str, lost: int, drops: int) -> None:
    machines = churn(f"churn/skypilot/{pattern}.json")
    assert (machines.lost, sum(machines.bursts.values())) == (lost, drops)


def test_counts_lists_and_intervals_agree_with_the_named_nodes() -> None:
    named = churn("churn/bamboo/p3-trace.csv")
    assert churn("churn/parcae/p3.csv").bursts == named.bursts
    assert churn("churn/parcae/liveput_res/bert*.json").bursts == named.bursts
    assert churn("churn/parcae/bert/trace_hh*.txt").lost == 19


def test_lives_and_failures() -> None:
    from holdfast_lab.traces.lives import read_lives

    [path] = FOLDER.glob("churn/gcp-preemptible-lifetimes/*.csv")
    lives = read_lives(path.read_text(), path.name)
    assert (len(lives), sum(taken for _, taken in lives)) == (1442, 717)
    outages = read("failures/lanl/*.csv.xz")
    assert (outages.header.rows, len(outages.header.extra["systems"])) == (23739, 23)
    stays = read("failures/titan-gpu-life/data/gc_full.csv")
    assert stays.header.extra["causes"] == {"DBE": 4826, "OTB": 1541}
    assert churn("failures/llama3*.csv").lost == 419


@pytest.mark.parametrize(
    ("name", "rows", "slowdown"),
    [("AR", 117216, 1.973), ("SE", 107328, 1.537), ("ST", 6784, 1.179)],
)
def test_jitter(name: str, rows: int, slowdown: float) -> None:
    assert read(f"jitter/*/data/trace-{name}.parquet").header.rows == rows
    steps = read(f"jitter/*/data/result-{name}.json")
    assert steps.header.extra["slowdown"] == pytest.approx(slowdown, abs=0.001)


def test_prices_carbon_and_links() -> None:
    prices = read("price/gcp-spot-price-history/*.csv")
    assert prices.header.rows == 7411
    assert len({(e.zone, e.gpu) for e in prices.events}) == 462
    grids = sorted(FOLDER.glob("carbon/carbon-eia-dcrl/*.csv"))
    assert [_rows(path) for path in grids] == [8760] * 8
    assert _rows(*FOLDER.glob("carbon/carbon-vessim-watttime/*.csv")) == 8928
    links = "network/skyplane-network"
    assert read(f"{links}/throughput.csv").header.rows == 7053
    assert read(f"{links}/latency.csv").header.rows == 8010


def _rows(*paths: Path) -> int:
    return sum(read_stream(path.read_bytes(), path.name).header.rows for path in paths)


def test_every_file_of_churn_and_carbon_is_read() -> None:
    for path in _churn_and_prices():
        read_stream(path.read_bytes(), path.name)


def _churn_and_prices() -> Iterable[Path]:
    for room in ("churn/bamboo", "churn/parcae", "churn/skypilot", "carbon"):
        yield from (
            p for p in (FOLDER / room).rglob("*.*") if p.suffix in (".csv", ".txt", ".json")
        )
