"""Policies or layouts side by side: where the time went, and a value with its interval, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.report.svg import Scale, line, tag, text

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 900.0, 240.0, 30.0, 70.0, 34.0
_COLOURS = {
    "productive": "#2e8b57",
    "checkpoint": "#e0a030",
    "startup": "#8e7cc3",
    "recovery": "#c0392b",
    "rework": "#e67e6b",
    "stopped": "#bbbbbb",
    "other": "#777777",
}
_STYLE = "\n".join(
    (
        "text { font: 13px sans-serif; fill: #333 }",
        ".end { text-anchor: end } .mid { text-anchor: middle }",
        ".grid { stroke: #ddd } .value { stroke: #111; stroke-width: 2 }",
    )
)


@dataclass(frozen=True)
class Bar:
    """shares: of the wall time, by class of `report/timeledger.py`. value, low, high: in [0, 1]."""

    name: str
    shares: Mapping[str, float]
    value: float
    low: float
    high: float


def bars_svg(title: str, bars: Sequence[Bar]) -> str:
    """A bar for each, of shares of the time; a mark on it for the value G and its interval."""
    x = Scale(0.0, 1.0, _LEFT, _WIDTH - _RIGHT)
    bottom = _TOP + _ROW * len(bars)
    parts = [tag("style", _STYLE), text(10.0, 20.0, title), *_key()]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(line(x(value), _TOP - 6, x(value), bottom, class_="grid"))
        parts.append(text(x(value), bottom + 18, f"{value:.0%}", class_="mid"))
    for index, bar in enumerate(bars):
        parts += _row(bar, _TOP + _ROW * index, x)
    view = f"0 0 {_WIDTH:.0f} {bottom + 34:.0f}"
    return tag("svg", "".join(parts), xmlns="http://www.w3.org/2000/svg", viewBox=view)


def _row(bar: Bar, top: float, x: Scale) -> Iterator[str]:
    yield text(_LEFT - 8, top + 18, bar.name, class_="end")
    at = 0.0
    for label, colour in _COLOURS.items():
        share = bar.shares.get(label, 0.0)
        if share > 0:
            width = x(at + share) - x(at)
            yield tag("rect", x=x(at), y=top + 4, width=width, height=18.0, fill=colour)
        at += share
    middle = top + 27
    yield line(x(bar.low), middle, x(bar.high), middle, class_="value")
    yield line(x(bar.value), top + 2, x(bar.value), middle + 3, class_="value")


def _key() -> Iterator[str]:
    for index, (label, colour) in enumerate(_COLOURS.items()):
        left = 10 + 105.0 * index
        yield tag("rect", x=left, y=34.0, width=12.0, height=12.0, fill=colour)
        yield text(left + 17, 45.0, label)
    yield text(10 + 105.0 * len(_COLOURS), 45.0, "mark: G")
