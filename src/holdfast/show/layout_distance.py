"""`holdfast layout distance`: how much dearer it is to send far than near."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.errors import UserError
from holdfast.plan.placing.domains import ASSUMED_LINKS, LEVELS
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
HUNDREDFOLD = 100


def distance(
    ranks: Annotated[int, typer.Option(min=2, max=1_000_000, help="ranks of a ring")] = 16,
    size: Annotated[
        list[int] | None, typer.Option(help="bytes of a message; may be repeated")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what a message costs at each distance.

    The costs are those of a message alone and in a ring's all-reduce, compared with a message
    inside a node. The links are assumed (docs/guide/nodes.md names the sources): they rank layouts,
    and time none.

    \b
    Example:
      holdfast layout distance --ranks 16 --size 1000000
    """
    if any(each < 1 for each in size or ()):
        raise UserError("a message has at least 1 byte", where="--size", remedy="use 1 or more")
    rows = _rows(ranks, tuple(size) if size else SIZES)
    if json:
        print_json(rows)
        return
    head = ("bytes", "distance", "message", "against a node", f"ring of {ranks}", "against a node")
    print_table(
        [
            (
                format_bytes(row["bytes"]),
                MEANING[row["level"]],
                format_duration(row["message_s"]),
                _times(row["message_ratio"]),
                format_duration(row["ring_s"]),
                _times(row["ring_ratio"]),
            )
            for row in rows
        ],
        head=head,
    )
    for level in LEVELS:
        sizes = [
            row["bytes"]
            for row in rows
            if row["level"] == level and max(row["message_ratio"], row["ring_ratio"]) >= HUNDREDFOLD
        ]
        if sizes:
            print(f"a hundred times dearer {MEANING[level]}: from {format_bytes(min(sizes))}")


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} x" if ratio >= HUNDREDFOLD else f"{ratio:.3g} x"


def _rows(ranks: int, sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    near = ASSUMED_LINKS["node"]
    return [
        {
            "bytes": size,
            "level": level,
            "message_s": link.message_s(size),
            "message_ratio": link.message_s(size) / near.message_s(size),
            "ring_s": link.allreduce_s(size, ranks),
            "ring_ratio": link.allreduce_s(size, ranks) / near.allreduce_s(size, ranks),
        }
        for size in sizes
        for level in LEVELS
        for link in (ASSUMED_LINKS[level],)
    ]
