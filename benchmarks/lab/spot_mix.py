"""The cheapest mix of spot and on-demand nodes over three zones that meets a deadline.

    python -m benchmarks.lab.spot_mix [--replays 200]

Availability is what SkyPilot's authors recorded on AWS (p3.2xlarge). Prices are the savings of the
spot advisor for this machine in each region. A second table has the spot prices of GCP's A100 by
day in their place. A mix is searched on replays that begin in the first half of the record. Then
the same mix is judged on those of the second half. The bar: at least 15 % cheaper than on-demand
nodes alone, at no more than 10 % longer makespan. HOLDFAST_DATA names the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.runtime.interrupting import run_main
from holdfast_lab.commands.simulate_mix import region_of
from holdfast_lab.engine.spot_mix import (
    MixResult,
    Work,
    ZoneOffer,
    node_counts,
    prices_of,
    search_mix,
    try_mix,
)
from holdfast_lab.traces.node_changes import ReadOptions
from holdfast_lab.traces.reading import read_stream

CHURN = "churn/skypilot"
ADVISOR = "price/aws-spot-advisor/spot-advisor-data.json"
PRICES = "price/gcp-spot-price-history/gcp_gpu_spot_prices_2023-05_2026-07.csv"
ON_DEMAND = 3.06
"""Dollars an hour of a p3.2xlarge (constant of Bamboo's simulator)."""
MOVE_USD = 0.09
"""4.4 GB of state to another region of AWS at $0.02 a GB."""
TICK_H = 0.25
CHEAPER, LONGER = 0.15, 0.10


@dataclass(frozen=True)
class Scenario:
    """zones: names of files, with the GCP region whose prices the second table takes."""

    name: str
    zones: Mapping[str, tuple[str, str]]
    nodes: int
    begin: str


SCENARIOS = (
    Scenario(
        "16 nodes, three zones of three regions",
        {
            "us-east-2b": ("availability-16-node-us-east-2b", "us-east1"),
            "us-west-2a": ("availability-16-node-us-west-2a", "us-west1"),
            "us-east-1f": ("preemption-4-node-us-east-1f", "us-central1"),
        },
        16,
        "2023-08-27",
    ),
    Scenario(
        "3 nodes, three zones of one region",
        {
            f"us-east-1{letter}": (f"availability-1-node-us-east-1{letter}", "us-central1")
            for letter in "acd"
        },
        3,
        "2023-05-08",
    ),
    Scenario(
        "2 nodes, three zones of two regions",
        {
            "us-west-2a": ("availability-1-node-us-west-2a", "us-west1"),
            "us-west-2b": ("availability-1-node-us-west-2b", "us-west1"),
            "us-east-1c": ("availability-1-node-us-east-1c", "us-central1"),
        },
        2,
        "2023-05-08",
    ),
)


def data_folder() -> Path:
    folder = os.environ.get("HOLDFAST_DATA")
    if not folder or not (Path(folder) / CHURN).exists():
        sys.exit(
            "benchmarks.lab.spot_mix needs the public records of SkyPilot (churn/skypilot) and "
            "prices "
            "(price/); set HOLDFAST_DATA to the folder that holds them"
        )
    return Path(folder)


def offers_of(folder: Path, scenario: Scenario, is_gcp: bool) -> list[ZoneOffer]:
    read = {
        zone: read_stream((folder / CHURN / f"{file}.json").read_bytes(), file, ReadOptions())
        for zone, (file, _) in scenario.zones.items()
    }
    ticks = int(min(stream.seconds for stream in read.values()) / 3600 / TICK_H)
    advisor = json.loads((folder / ADVISOR).read_text("utf-8"))["spot_advisor"]
    prices = read_stream((folder / PRICES).read_bytes(), "prices.csv", ReadOptions())
    first = _day(prices.header.t0[:10])
    offers = []
    for zone, stream in read.items():
        counts, region = node_counts(stream, TICK_H, ticks), region_of(zone)
        if is_gcp:
            from_s = _day(scenario.begin) - first
            spot, demand = prices_of(
                prices, scenario.zones[zone][1], "a2-highgpu-1g", TICK_H, ticks, from_s
            )
        else:
            saving = advisor[region]["Linux"]["p3.2xlarge"]["s"] / 100
            spot, demand = [ON_DEMAND * (1 - saving)] * ticks, [ON_DEMAND] * ticks
        offers.append(ZoneOffer(zone, region, counts, spot, demand))
    return offers


def _day(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()


def begins(ticks: range, number: int, seed: int) -> list[int]:
    draw = random.Random(f"{seed}/spot-mix")
    return [draw.choice(ticks) for _ in range(number)]


def compared(result: MixResult, alone: MixResult) -> tuple[float, float]:
    """(dollars, hours) beyond on-demand nodes alone, as shares."""
    return result.usd / alone.usd - 1, result.hours / alone.hours - 1


def show(zones: Sequence[ZoneOffer], work: Work, replays: int) -> None:
    half = len(zones[0].counts) // 2
    first, second = begins(range(half), replays, 0), begins(range(half, 2 * half), replays, 1)
    found = search_mix(zones, work, first)
    if found.best is None:
        print(f"{work.deadline_h:7.1f}  no mix ends in time in 95 % of the replays")
        return
    best = found.best
    later = try_mix(zones, work, best.plan, second)
    alone = try_mix(zones, work, found.on_demand.plan, second)
    usd, hours = compared(best, found.on_demand)
    usd_later, hours_later = compared(later, alone)
    held = "yes" if usd_later <= -CHEAPER and hours_later <= LONGER else "NO"
    print(
        f"{work.deadline_h:7.1f}{best.usd:10,.0f}{usd:+8.1%}{hours:+8.1%}{best.in_time:8.1%}"
        f" |{later.usd:10,.0f}{usd_later:+8.1%}{hours_later:+8.1%}{later.in_time:8.1%}"
        f"   {held:<5}{best.plan.words}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--hours", type=float, default=24.0, help="of work on all nodes")
    given = parser.parse_args()
    folder = data_folder()
    for scenario in SCENARIOS:
        for is_gcp in (False, True):
            zones = offers_of(folder, scenario, is_gcp)
            words = "GCP A100 by day" if is_gcp else "AWS p3.2xlarge, advisor"
            shares = ", ".join(
                f"{zone.name} {sum(zone.counts) / len(zone.counts):.2f}" for zone in zones
            )
            print(f"\n{scenario.name}; prices: {words}; mean of spot nodes: {shares}")
            print(
                "deadline, then $, against on demand, makespan, in time: searched | held out, bar"
            )
            for factor in (1.05, 1.1, 1.25, 1.5, 2.0):
                node_hours = given.hours * scenario.nodes
                work = Work(
                    node_hours, scenario.nodes, factor * given.hours, TICK_H, move_usd=MOVE_USD
                )
                show(zones, work, given.replays)


if __name__ == "__main__":
    run_main(main)
