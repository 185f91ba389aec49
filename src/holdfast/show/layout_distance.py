"""`holdfast layout distance`: how much dearer it is to send far than near."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Annotated, Any

import typer

from holdfast.errors import UserError
from holdfast.plan.hardware.cluster_file import read_cluster
from holdfast.plan.hardware.distance import HUNDREDFOLD, hundredfold_gbit_s, times_dearer
from holdfast.plan.hardware.link import Link
from holdfast.plan.placing.domains import ASSUMED_LINKS, LEVELS, links_of, named_links
from holdfast.report.formatting import format_bytes, format_duration
from holdfast.show.output import print_json, print_table

SIZES = (2**10, 2**16, 2**20, 2**24, 2**30)
MEANING = {
    "node": "in a node",
    "rack": "between nodes of a rack",
    "zone": "between racks",
    "region": "between zones",
    "world": "between regions",
}
USUAL_DEVICES = 8
"""Of a node whose links are assumed."""


def distance(
    ranks: Annotated[int, typer.Option(min=2, max=1_000_000, help="ranks of a ring")] = 16,
    size: Annotated[
        list[int] | None, typer.Option(help="bytes of a message; may be repeated")
    ] = None,
    cluster: Annotated[
        str, typer.Option(help="a cluster file or short form, whose links count; none: assumed")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what a message costs at each distance.

    The costs are those of a message alone and in a ring's all-reduce, compared with a message
    inside a node. The last column says which bandwidth of a node makes a ring a hundred times
    dearer. Links that no cluster names are assumed (docs/guide/nodes.md names the sources): they
    rank layouts, and time none.

    \b
    Example:
      holdfast layout distance --ranks 8 --size 100000000 --cluster 8x8xH100-80
    """
    if any(each < 1 for each in size or ()):
        raise UserError("a message has at least 1 byte", where="--size", remedy="use 1 or more")
    machines = read_cluster(cluster) if cluster else None
    named = named_links(machines) if machines else {}
    links = links_of(machines) if machines else ASSUMED_LINKS
    devices = max(pool.devices for pool in machines.pools) if machines else USUAL_DEVICES
    rows = _rows(links, ranks, tuple(size) if size else SIZES, devices)
    if json:
        print_json(rows)
        return
    table = [
        (
            format_bytes(row["bytes"]),
            MEANING[row["level"]] + ("" if row["level"] in named else " *"),
            format_duration(row["message_s"]),
            _times(row["message_ratio"]),
            format_duration(row["ring_s"]),
            _times(row["ring_ratio"]),
            _limit(row),
        )
        for row in rows
    ]
    head = ("bytes", "distance", "message", "against a node", f"ring of {ranks}", "against a node")
    print_table(table, head=(*head, "a hundred times up to"))
    if len(named) < len(LEVELS):
        print("* assumed: across_racks, zones and between of a cluster file name them")
    print(f"The last column is the bandwidth of a node, which {devices} devices share.")


def _limit(row: Mapping[str, Any]) -> str:
    limit = row["hundredfold_gbit_s"]
    if row["level"] == "node":
        return ""
    return "any bandwidth" if limit == inf else f"{limit:,.3g} Gbit/s"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} x" if ratio >= HUNDREDFOLD else f"{ratio:.3g} x"


def _rows(
    links: Mapping[str, Link], ranks: int, sizes: tuple[int, ...], devices: int
) -> list[dict[str, Any]]:
    near = links["node"]
    return [
        {
            "bytes": size,
            "level": level,
            "message_s": links[level].message_s(size),
            "message_ratio": links[level].message_s(size) / near.message_s(size),
            "ring_s": links[level].allreduce_s(size, ranks),
            "ring_ratio": times_dearer(near, links[level], size, ranks),
            "hundredfold_gbit_s": hundredfold_gbit_s(near, links[level], size, ranks, devices),
        }
        for size in sizes
        for level in LEVELS
    ]
