"""Values that hold until the next, over time: as an SVG file of its own, and as text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from holdfast.report.formatting import format_duration
from holdfast.report.live.braille import braille
from holdfast.report.page.svg import Scale, line, path, tag, text, ticks, time_ticks

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900.0, 320.0, 60.0, 20.0, 40.0, 40.0
_STYLE = "\n".join(
    (
        "text { font: 13px sans-serif; fill: #333 }",
        ".end { text-anchor: end } .mid { text-anchor: middle }",
        ".grid { stroke: #ddd } .gap { fill: #f3e6c8 }",
        "path { fill: none; stroke: #1f6fb2; stroke-width: 1.5 }",
    )
)
Points = Sequence[tuple[float, float]]


def steps_svg(
    points: Points, seconds: float, title: str, gaps: Sequence[tuple[float, float]] = ()
) -> str:
    """One line of steps. gaps: times of which nothing is known."""
    most = max((value for _, value in points), default=1.0) or 1.0
    x = Scale(0.0, seconds or 1.0, _LEFT, _WIDTH - _RIGHT)
    y = Scale(0.0, 1.05 * most, _HEIGHT - _BOTTOM, _TOP)
    parts = [tag("style", _STYLE), text(_LEFT, 20.0, title)]
    for start, stop in gaps:
        parts.append(
            tag(
                "rect",
                "",
                x=x(start),
                y=_TOP,
                width=x(stop) - x(start),
                height=_HEIGHT - _BOTTOM - _TOP,
                class_="gap",
            )
        )
    for value in ticks(0.0, most, 5):
        parts.append(line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), class_="grid"))
        parts.append(text(_LEFT - 8, y(value) + 4, f"{value:g}", class_="end"))
    for at in time_ticks(seconds):
        parts.append(text(x(at), _HEIGHT - 12, format_duration(at), class_="mid"))
    corners = []
    before = None
    for at, value in points:
        if before is not None:
            corners.append((x(at), y(before)))
        corners.append((x(at), y(value)))
        before = value
    if before is not None:
        corners.append((x(seconds), y(before)))
    parts.append(path(corners))
    view = f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}"
    return tag("svg", "".join(parts), xmlns="http://www.w3.org/2000/svg", viewBox=view)


def steps_text(points: Points, seconds: float, width: int = 72, height: int = 8) -> list[str]:
    """Lines of characters, with the largest and the smallest value on the left."""
    times = [at for at, _ in points]
    moments = [seconds * k / (4 * width) for k in range(4 * width)]
    values = [points[max(0, bisect_right(times, at) - 1)][1] for at in moments]
    low, high = min(values), max(values)
    rows = braille(values, width, height)
    labels = [f"{high:,.4g}", *[""] * (height - 2), f"{low:,.4g}"]
    wide = max(map(len, labels))
    return [f"{label:>{wide}} {row}" for label, row in zip(labels, rows, strict=True)]
