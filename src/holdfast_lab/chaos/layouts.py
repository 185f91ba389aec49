"""Layouts that a run is disturbed in, by name: the axes of the parity matrix and products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod

from holdfast.errors import UserError
from holdfast.layout import AXES


@dataclass(frozen=True)
class ChaosLayout:
    """layout: settings below `layout.`. nodes, ranks_per_node: how the ranks are spread. is_exact:
    only data replicas change when nodes go or come, so the curve stays bit-equal."""

    name: str
    layout: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    is_exact: bool = False
    is_pipelined: bool = False
    has_shared_state: bool = False

    @property
    def has_experts(self) -> bool:
        """Return True if it spreads experts, which the model must then have."""
        return any(each.startswith("ep=") and each != "ep=1" for each in self.layout)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def settings(self) -> list[str]:
        return [f"layout.{each}" for each in self.layout] + [
            f"cluster.places={self.ranks_per_node}"
        ]

    @property
    def tolerance(self) -> float:
        return 0.0 if self.is_exact else 1e-10


def _make_layout(name: str, nodes: int, places: int, *degrees: str) -> ChaosLayout:
    split = [each for each in degrees if not each.endswith("=1")]  # 1 splits nothing
    return ChaosLayout(
        name,
        (f"workers={nodes * places}", *degrees),
        nodes,
        places,
        is_exact=not split,
        is_pipelined=any("pp" in each for each in split),
        has_shared_state=bool(split),
    )


CHAOS_LAYOUTS: Mapping[str, ChaosLayout] = {
    shape.name: shape
    for shape in (
        _make_layout("replicated", 4, 1),
        _make_layout("dp_shard", 4, 1, "dp_shard=2"),
        _make_layout("tp", 4, 1, "tp=2"),
        _make_layout("tp-by", 4, 1, "tp=2", "tp_by.attention=1"),
        _make_layout("cp", 4, 1, "cp=2"),
        _make_layout("ep", 4, 1, "dp_shard=2", "ep=2"),
        _make_layout("ep-cp", 4, 1, "dp_shard=2", "cp=2", "ep=4"),
        _make_layout("pp", 4, 1, "pp=2"),
        _make_layout("interleaved", 4, 1, "pp=2", "schedule=interleaved"),
        _make_layout("zbv", 4, 1, "pp=2", "schedule=zbv"),
        _make_layout("zero", 4, 1, "dp_shard=2", "zero=1"),
        _make_layout("mixed", 4, 2, "pp=2", "tp=2"),
        _make_layout("uneven", 3, 1, "replicas=[{tp: 2}, {tp: 1}]"),
        _make_layout("two", 2, 1),
        _make_layout("wide", 4, 2, "dp_shard=2"),
    )
}


def parse_layout(text: str, nodes: int = 0) -> ChaosLayout:
    """A name of `SHAPES`, or degrees such as "tp=2,workers=4". nodes: over how many; 0: as named,
    or one a rank. Raises UserError for other text, or ranks that make no complete replicas."""
    text = ",".join(each.strip() for each in text.split(","))
    if text in CHAOS_LAYOUTS:
        shape = CHAOS_LAYOUTS[text]
        if not nodes or nodes == shape.nodes:
            return shape
        ranks, degrees = shape.ranks, list(shape.layout[1:])
    else:
        ranks, degrees = _parse_degrees(text, nodes)
        nodes = nodes or ranks
    if nodes < 1 or ranks % nodes:
        raise UserError(
            f"{ranks} ranks cannot be spread evenly over {nodes} nodes",
            where="--nodes",
            remedy=f"use {max((n for n in range(1, nodes + 1) if ranks % n == 0), default=ranks)}",
        )
    return _make_layout(text, nodes, ranks // nodes, *degrees)


def parse_natural(text: str) -> int | None:
    """A plain number of ASCII digits, or None."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def _parse_degrees(text: str, nodes: int) -> tuple[int, list[str]]:
    found: dict[str, int] = {}
    for each in text.split(","):
        key, equals, value = each.partition("=")
        known = key in ("workers", *AXES, "ep", "zero")
        if not (known and equals and parse_natural(value)):
            raise UserError(
                f"{each!r} is no layout",
                where="--layout",
                remedy=f"use one of {', '.join(CHAOS_LAYOUTS)}, or degrees such as tp=2,workers=4",
            )
        found[key] = int(value)
    replica = prod(found.get(axis, 1) for axis in AXES)
    ranks = found.pop("workers", 2 * replica)
    if ranks % replica:
        even = lcm(replica, max(nodes, 1))  # on each node as many
        near = [n for n in (ranks // even * even, (ranks // even + 1) * even) if n]
        raise UserError(
            f"workers={ranks} make no whole replicas of {replica}",
            where="--layout",
            remedy=f"use {' or '.join(f'workers={n}' for n in near)}",
        )
    return ranks, [f"{key}={value}" for key, value in found.items()]
