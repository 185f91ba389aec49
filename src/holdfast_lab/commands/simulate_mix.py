"""`holdfast simulate mix`: the cheapest spot and on-demand nodes that meet a deadline."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.api.progress import LongWork
from holdfast.errors import ConfigError
from holdfast.show.output import print_json, print_table, say
from holdfast_lab.commands.trace import read_bytes
from holdfast_lab.engine.settings import refuse_repeated
from holdfast_lab.engine.spot_mix import (
    MixResult,
    MixSearch,
    Work,
    ZoneOffer,
    node_counts,
    prices_of,
    search_mix,
)
from holdfast_lab.traces.events import EventStream
from holdfast_lab.traces.node_changes import ReadOptions
from holdfast_lab.traces.reading import read_stream

_LETTER = re.compile(r"-?[a-z]$")

ZoneFiles = Annotated[
    list[str], typer.Option("--zone", help="NAME=FILE: a trace of a zone's spot nodes; repeatable")
]
Deadline = Annotated[
    float, typer.Option(min=0.01, max=10_000, help="hours from the begin to the end")
]
OnDemand = Annotated[
    float | None, typer.Option(min=1e-6, max=1e6, help="dollars an hour of an on-demand node")
]
SpotPrices = Annotated[
    list[str] | None,
    typer.Option("--spot", help="NAME=DOLLARS an hour, of a zone or a region; repeatable"),
]
PriceTable = Annotated[
    Path | None, typer.Option("--prices", help="a table of prices by machine type and region")
]
PricesFrom = Annotated[
    str,
    typer.Option(
        help="date at which the zones' files begin, as 2023-08-27; default: that of --prices"
    ),
]


def mix(
    zone: ZoneFiles,
    work: Annotated[float, typer.Option(min=0.01, max=1e7, help="node-hours to do")],
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="most nodes at a time")],
    deadline: Deadline,
    on_demand: OnDemand = None,
    spot: SpotPrices = None,
    prices: PriceTable = None,
    machine: Annotated[str, typer.Option(help="the machine type in --prices")] = "",
    prices_from: PricesFrom = "",
    in_time: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="share of replays that end in time")
    ] = 0.95,
    replays: Annotated[int, typer.Option(min=1, max=10_000, help="begins to replay")] = 200,
    seed: Annotated[int, typer.Option(help="of the draw of the begins")] = 0,
    tick: Annotated[
        float, typer.Option(min=0.01, max=1000, help="hours between two decisions")
    ] = 0.25,
    change: Annotated[
        float, typer.Option(min=0.0, max=1000, help="hours that a change of nodes costs the run")
    ] = 0.02,
    move: Annotated[
        float, typer.Option(min=0.0, max=1e6, help="dollars of a move between regions")
    ] = 0.0,
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
    for option, named in (("--zone", zone), ("--spot", spot or [])):
        refuse_repeated([text.partition("=")[0] for text in named], option)
    files, fixed = dict(map(_zone_of, zone)), dict(map(_price_of, spot or []))
    _refuse_unused(files, fixed, prices, machine, prices_from)
    streams = {name: _stream(path) for name, path in files.items()}
    ticks = max(1, int(min(each.seconds for each in streams.values()) / 3600 / tick))
    priced = _Prices(on_demand, fixed, machine, tick, ticks)
    if prices is not None:
        priced.read(prices, prices_from)
    zones = [priced.offer(name, node_counts(each, tick, ticks)) for name, each in streams.items()]
    draw = random.Random(f"{seed}/mix")
    starts = [draw.randrange(ticks) for _ in range(replays)]
    with LongWork("replaying mixes"):
        found = search_mix(zones, asked, starts, in_time)
    if json:
        print_json(_as_json(found))
    else:
        _show(found, asked)
    return 0 if found.best is not None else 1


def _refuse_unused(
    zones: Iterable[str], spot: Iterable[str], prices: Path | None, machine: str, begin: str
) -> None:
    """Raise ConfigError for an option that has no effect, or lacks another one."""
    known = sorted({*zones, *map(region_of, zones)})
    for name in spot:
        if name not in known:
            raise ConfigError(
                f"{name} is the name of no --zone",
                where="--spot",
                remedy=f"use one of: {', '.join(known)}",
            )
    if prices is None and (machine or begin):
        raise ConfigError(
            f"--{'machine' if machine else 'prices-from'} has no effect without --prices",
            where="command line",
            remedy="leave it out, or add --prices FILE",
        )
    if prices is not None and not machine:
        raise ConfigError(
            "the table has prices of several machine types",
            where="--prices",
            remedy="add --machine TYPE",
        )


def region_of(zone: str) -> str:
    """A zone's name without its last letter: us-east-1c and us-east1-b."""
    return _LETTER.sub("", zone) or zone


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
    if not name or not 0 <= price <= 1e6:
        raise ConfigError(
            f"{text!r} is no price", where="--spot", remedy="write NAME=DOLLARS: us-east-1=0.61"
        )
    return name, price


class _Prices:
    def __init__(
        self, on_demand: float | None, spot: dict[str, float], machine: str, tick: float, ticks: int
    ):
        self._on_demand, self._spot, self._machine = on_demand, spot, machine
        self._tick, self._ticks = tick, ticks
        self._table: EventStream | None = None
        self._from_s = 0.0

    def read(self, path: Path, begin: str) -> None:
        self._table = _stream(path)
        if begin:
            first = _date(self._table.header.t0[:10], "--prices")
            self._from_s = _date(begin, "--prices-from") - first
            if not 0 <= self._from_s <= self._table.seconds:
                days = datetime.fromtimestamp(first + self._table.seconds, UTC)
                raise ConfigError(
                    f"{begin} is outside of {path}",
                    where="--prices-from",
                    remedy=f"give a date from {self._table.header.t0[:10]} to {days:%Y-%m-%d}",
                )

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
