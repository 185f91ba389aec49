"""`holdfast simulate mix`: the cheapest spot and on-demand nodes that meet a deadline."""

from __future__ import annotations

import random
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.output import print_json, print_table, say
from holdfast.cli.trace import read_bytes
from holdfast.errors import ConfigError
from holdfast.simulate.spot_mix import (
    MixResult,
    MixSearch,
    Work,
    ZoneOffer,
    node_counts,
    prices_of,
    search_mix,
)
from holdfast.simulate.traces.events import EventStream
from holdfast.simulate.traces.node_changes import ReadOptions
from holdfast.simulate.traces.reading import read_stream

_LETTER = re.compile(r"-?[a-z]$")


def mix(
    zone: Annotated[
        list[str],
        typer.Option("--zone", help="NAME=FILE: a zone's spot nodes by time; repeat it"),
    ],
    work: Annotated[float, typer.Option(min=0.01, help="node-hours to do")],
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="most nodes at a time")],
    deadline: Annotated[float, typer.Option(min=0.01, help="hours from the begin")],
    on_demand: Annotated[
        float | None, typer.Option(min=0.0, help="dollars an hour of an on-demand node")
    ] = None,
    spot: Annotated[
        list[str] | None,
        typer.Option("--spot", help="NAME=DOLLARS an hour, of a zone or a region; repeatable"),
    ] = None,
    prices: Annotated[
        Path | None, typer.Option("--prices", help="a table of prices by machine type and region")
    ] = None,
    machine: Annotated[str, typer.Option(help="the machine type in --prices")] = "",
    prices_from: Annotated[
        str, typer.Option(help="date in --prices at which the zones' files begin; none: its first")
    ] = "",
    in_time: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="share of replays that end in time")
    ] = 0.95,
    replays: Annotated[int, typer.Option(min=1, max=10_000, help="begins to replay")] = 200,
    seed: Annotated[int, typer.Option(help="of the begins")] = 0,
    tick: Annotated[float, typer.Option(min=0.01, help="hours between two decisions")] = 0.25,
    change: Annotated[
        float, typer.Option(min=0.0, help="hours that a change of nodes costs the run")
    ] = 0.02,
    move: Annotated[float, typer.Option(min=0.0, help="dollars of a move between regions")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Search the cheapest mix that ends in time in most replays.

    It tries every set of zones, shares of on-demand nodes, and how early and for how long on-demand
    nodes fill up. A replay begins at a random moment of the recorded time. Exit code 1 if no mix
    ends in time often enough.

    \b
    Example:
      holdfast simulate mix --zone a=a.json --spot a=1 --on-demand 3 --work 9 --nodes 2 --deadline 6
    """
    asked = Work(work, nodes, deadline, tick, change, move)
    streams = {name: _stream(path) for name, path in map(_zone_of, zone)}
    ticks = max(1, int(min(each.seconds for each in streams.values()) / 3600 / tick))
    priced = _Prices(on_demand, dict(_price_of(text) for text in spot or ()), machine, tick, ticks)
    if prices is not None:
        priced.read(prices, prices_from)
    zones = [priced.offer(name, node_counts(each, tick, ticks)) for name, each in streams.items()]
    draw = random.Random(f"{seed}/mix")
    starts = [draw.randrange(ticks) for _ in range(replays)]
    found = search_mix(zones, asked, starts, in_time)
    if json:
        print_json(_as_json(found))
    else:
        _show(found, asked)
    return 0 if found.best is not None else 1


def region_of(zone: str) -> str:
    """A zone's name without its last letter: us-east-1c and us-east1-b."""
    return _LETTER.sub("", zone)


def _zone_of(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(
            f"{text!r} is no zone", where="--zone", remedy="write NAME=FILE: us-east-1c=c.json"
        )
    return name, Path(path)


def _stream(path: Path) -> EventStream:
    return read_stream(read_bytes(path), str(path), ReadOptions())


def _price_of(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        price = float(value)
    except ValueError:
        price = -1.0
    if not name or not 0 <= price < float("inf"):
        raise ConfigError(
            f"{text!r} is no price", where="--spot", remedy="write NAME=DOLLARS: us-east-1=0.61"
        )
    return name, price


class _Prices:
    """The prices of each zone."""

    def __init__(
        self,
        on_demand: float | None,
        spot: dict[str, float],
        machine: str,
        tick: float,
        ticks: int,
    ):
        self._on_demand, self._spot, self._machine = on_demand, spot, machine
        self._tick, self._ticks = tick, ticks
        self._table: EventStream | None = None
        self._from_s = 0.0

    def read(self, path: Path, begin: str) -> None:
        self._table = _stream(path)
        if begin:
            first = _date(self._table.header.t0[:10], "--prices")
            self._from_s = max(0.0, _date(begin, "--prices-from") - first)

    def offer(self, name: str, counts: list[int]) -> ZoneOffer:
        region, ticks = region_of(name), self._ticks
        fixed = self._spot.get(name, self._spot.get(region))
        if self._table is not None and fixed is None:
            spot, demand = prices_of(
                self._table, region, self._machine, self._tick, ticks, self._from_s
            )
            if self._on_demand is not None:
                demand = [self._on_demand] * ticks
            return ZoneOffer(name, region, counts, spot, demand)
        if fixed is None or self._on_demand is None:
            raise ConfigError(
                f"zone {name} has no price",
                where="--spot",
                remedy=f"add --spot {region}=DOLLARS and --on-demand DOLLARS, or --prices FILE "
                "with --machine TYPE",
            )
        return ZoneOffer(name, region, counts, [fixed] * ticks, [self._on_demand] * ticks)


def _date(text: str, where: str) -> float:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ConfigError(
            f"{text!r} is no date", where=where, remedy="write it as 2023-08-27"
        ) from None


# --- printing -----------------------------------------------------------------------------------
def _show(found: MixSearch, work: Work) -> None:
    alone = found.on_demand
    results = [alone, *found.by_zones]
    results.sort(key=lambda result: result.usd)
    rows = [
        (
            result.plan.words,
            f"{result.usd:,.2f}",
            f"{100 * (result.usd / alone.usd - 1):+.1f} %",
            f"{result.hours:.2f}",
            f"{100 * (result.hours / alone.hours - 1):+.1f} %",
            f"{100 * result.in_time:.1f} %",
        )
        for result in results
    ]
    print_table(rows, ("the best of each set of zones", "$", "", "hours", "", "in time"))
    if found.best is None:
        say("no mix ends in time often enough")
        return
    best = found.best
    say(
        f"cheapest of {found.tried} mixes: {best.plan.words}; ${best.usd:,.2f} in {best.hours:.2f} "
        f"h, of {work.deadline_h:g} h"
    )


def _as_json(found: MixSearch) -> dict[str, Any]:
    def one(result: MixResult | None) -> dict[str, Any] | None:
        if result is None:
            return None
        return {
            "plan": asdict(result.plan),
            "usd": result.usd,
            "hours": result.hours,
            "in_time": result.in_time,
        }

    return {
        "best": one(found.best),
        "on_demand": one(found.on_demand),
        "by_zones": [one(result) for result in found.by_zones],
        "tried": found.tried,
    }
