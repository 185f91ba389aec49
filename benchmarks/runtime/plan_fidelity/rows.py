"""Reads files of measured rows, and refuses what it cannot use with file, line and remedy."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import DataError
from holdfast.plan.hardware.cluster import NodePool
from holdfast.plan.hardware.devices import GIB, DeviceType, device_named
from holdfast.plan.hardware.link import load_links

NOT_STATED = {"", "n/a", "na", "none", "nan"}

DOMAIN = 64
"""Devices of a rack of GB200 or GB300 that a job uses as one node: 64 of 72, as its degrees are
powers of two."""

SAME_MEMORY = 0.12
"""Difference in memory within which a name with a size means a device of the table. Of one device
makers and clouds state 180 and 192 GB."""

NETWORK = (
    ("GB300", "ib-xdr"),
    ("B300", "ib-xdr"),
    ("GB200", "ib-ndr"),
    ("B200", "ib-ndr"),
    ("GH200", "ib-ndr"),
    ("H200", "ib-ndr"),
    ("H100", "ib-ndr"),
    ("A100", "ib-hdr"),
    ("MI3", "ib-ndr"),
)
"""Assumed network of one device: no row states it. All that are not named: an eighth of 100 Gbit/s,
as clouds give eight of them."""


@dataclass(frozen=True)
class Row:
    """Cells of one line. place: file and line."""

    place: str
    cells: Mapping[str, str]

    def text(self, *names: str) -> str:
        """The first of these columns that the row states; "": none."""
        for name in names:
            cell = self.cells.get(name, "").strip()
            if cell.lower() not in NOT_STATED:
                return cell
        return ""

    def number(self, *names: str, default: float | None = None) -> float:
        """Raises DataError for a cell without a positive number, or for a missing one without
        default."""
        text = self.text(*names)
        if not text:
            if default is not None:
                return default
            raise DataError(
                f"the column {names[0]!r} is empty or missing",
                where=self.place,
                remedy="state a number there",
            )
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise DataError(
                f"{text!r} in {names[0]!r} is no positive number",
                where=self.place,
                remedy="write it like 4096",
            )
        return value

    def whole(self, *names: str, default: int | None = None) -> int:
        value = self.number(*names, default=default)
        if value != int(value):
            raise DataError(
                f"{value:g} in {names[0]!r} is no whole number",
                where=self.place,
                remedy=f"write {round(value)}",
            )
        return int(value)


def read_rows(path: Path) -> list[Row]:
    """Raises DataError for a file that is no table of rows."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot be read as text: {error}", where=str(path), remedy="give a CSV file"
        ) from None
    lines = csv.reader(text.splitlines())
    header = [name.strip() for name in next(lines, [])]
    rows = []
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        place = f"{path}:{lines.line_num}"
        if len(cells) != len(header):
            raise DataError(
                f"{len(cells)} cells where the header names {len(header)} columns",
                where=place,
                remedy="put cells that hold a comma in quotes",
            )
        rows.append(Row(place, dict(zip(header, cells, strict=True))))
    if not rows:
        raise DataError("has no rows", where=str(path), remedy="give a CSV file with a header")
    return rows


def device_of(row: Row, name: str, devices: Mapping[str, DeviceType]) -> DeviceType:
    """The device of a name as publishers write it: a100_80gb, DGX-H100."""
    plain = re.sub(r"^(DGX|HGX)[-_ ]", "", name.strip(), flags=re.I).upper().replace(" ", "-")
    sized = re.fullmatch(r"([A-Z0-9-]+?)[-_](?:SXM[0-9]*[-_])?([0-9]+)GB", plain)
    name = sized[1] if sized else plain.replace("_", "-")
    memory = float(sized[2]) if sized else 0.0
    found = [
        device
        for device in devices.values()
        if (
            name in (device.name, *device.aliases) or (sized and device.name.startswith(name + "-"))
        )
        and (not memory or abs(device.memory_bytes / GIB / memory - 1) < SAME_MEMORY)
    ]
    if found:
        return found[0]
    return device_named(f"{name}-{sized[2]}" if sized else name, devices, where=row.place)


def pool_of(device: DeviceType, number: int) -> NodePool:
    """Nodes of eight devices, or racks of GB200 and GB300."""
    links = load_links()
    in_node = DOMAIN if device.name.startswith("GB") else 8
    inside = links[device.scale_up_link or device.host_link].link
    outside = links["ethernet-100"].link.shared_by(8)
    for start, name in NETWORK:
        if device.name.startswith(start):
            outside = links[name].link
            break
    in_node = min(in_node, number)
    return NodePool("rows", -(-number // in_node), in_node, device.name, inside, outside)


def missing_columns(rows: Sequence[Row], needed: Sequence[str]) -> list[str]:
    return [name for name in needed if name not in rows[0].cells]
