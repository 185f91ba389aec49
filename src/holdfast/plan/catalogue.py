"""What clouds sell: a small table of types of machines, with prices and the date of each row.

The table that comes along is `catalogue.csv`. Its head names the sources. Prices change, so a file
of the same form may take its place.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import date
from math import isfinite, log
from pathlib import Path
from typing import Any

from holdfast.errors import DataError

CATALOGUE_FILE = Path(__file__).with_name("catalogue.csv")
HOURS_PER_MONTH = 730.0


@dataclass(frozen=True)
class Offer:
    """What one zone sells of one kind."""

    name: str  # unique
    spot: bool  # may be taken back
    price: float  # US dollars an hour for a node
    available: int  # nodes that the cloud has now
    speed: float = 1.0  # of a node, relative to other offers (nodes of a run should be alike)
    losses_per_hour: float = 0.0  # of one node


@dataclass(frozen=True)
class MachineType:
    """One type of machine in one region: a row of the table."""

    cloud: str
    region: str
    type: str
    accelerator: str
    count: int  # accelerators of a node
    tflops: float  # their dense peak in bf16, in all
    on_demand: float  # US dollars an hour
    spot: float  # US dollars an hour
    reclaimed_per_month: float  # share of spot nodes that the cloud takes back in a month
    date: date

    @property
    def losses_per_hour(self) -> float:
        """Of one spot node. A monthly share f is at best a rate of -ln(1-f) a month: losses come in
        bursts."""
        return -log(1 - self.reclaimed_per_month) / HOURS_PER_MONTH

    @property
    def name(self) -> str:
        return f"{self.cloud}/{self.region}/{self.type}"

    def offers(self, most: int) -> list[Offer]:
        """Spot and on-demand nodes of this type, `most` of each."""
        return [
            Offer(f"{self.name}/spot", True, self.spot, most, 1.0, self.losses_per_hour),
            Offer(f"{self.name}/on-demand", False, self.on_demand, most),
        ]


COLUMNS = tuple(each.name for each in fields(MachineType))
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "count": int,
    **dict.fromkeys(("tflops", "on_demand", "spot", "reclaimed_per_month"), float),
    "date": date.fromisoformat,
}


def load_catalogue(path: Path = CATALOGUE_FILE) -> list[MachineType]:
    """Raises DataError, with the line, for a file that is no catalogue."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "it is not text"
        raise DataError(
            f"the catalogue cannot be read ({words})",
            where=str(path),
            remedy="name a CSV file, or leave --catalogue out",
        ) from None
    rows = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and line[0] != "#"]
    found = csv.DictReader(line for _, line in rows)
    if tuple(found.fieldnames or ()) != COLUMNS:
        raise DataError(
            "this is not a catalogue",
            where=str(path),
            remedy=f"give it the head {','.join(COLUMNS)}",
        )
    return [
        _machine_type(row, f"{path}:{number}")
        for row, (number, _) in zip(found, rows[1:], strict=False)
    ]


def _machine_type(row: dict[str, str | None], where: str) -> MachineType:
    text = {column: (row.get(column) or "").strip() for column in COLUMNS}
    try:
        found = MachineType(*[_PARSERS.get(name, str)(cell) for name, cell in text.items()])
    except ValueError as error:
        raise DataError(
            f"a value of this row cannot be read ({error})",
            where=where,
            remedy="write numbers, and the date as 2026-07-22",
        ) from None
    numbers = (found.count, found.tflops, found.on_demand, found.spot)
    if not all(isfinite(n) and n > 0 for n in numbers) or not 0 <= found.reclaimed_per_month < 1:
        raise DataError(
            "a number of this row is not possible",
            where=where,
            remedy="count, tflops and prices are above 0, reclaimed_per_month is from 0 to below 1",
        )
    return found


def cheapest_first(types: Iterable[MachineType]) -> list[MachineType]:
    """By the spot price of a TFLOP/s."""
    return sorted(types, key=lambda t: (t.spot / t.tflops, t.cloud, t.region, t.type))
