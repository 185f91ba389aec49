"""The curve of a run over the number of devices, as an SVG file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2

from holdfast.report.formatting import format_count
from holdfast.report.page.svg import Scale, line, path, tag, text
from holdfast_lab.scale.scale_curve import Curve, Point, shown_knee

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900.0, 420.0, 60.0, 70.0, 50.0, 50.0
_STYLE = "\n".join(
    (
        "text { font: 13px sans-serif; fill: #333 }",
        ".end { text-anchor: end } .mid { text-anchor: middle }",
        ".grid { stroke: #ddd } .axis { stroke: #888 }",
        "path { fill: none; stroke-width: 2 }",
        ".efficiency { stroke: #1f6fb2 } .kept { stroke: #1f6fb2; stroke-dasharray: 5 4 }",
        ".exposed { stroke: #c0392b } .usd { stroke: #2e8b57 }",
        ".knee { stroke: #555; stroke-dasharray: 2 3 }",
    )
)


@dataclass(frozen=True)
class _Line:
    """One quantity. name: for the key, and its class in the style sheet."""

    name: str
    label: str
    curve: Curve
    value: Callable[[Point], float]


def scale_svg(curve: Curve, kept: Curve, title: str) -> str:
    """Efficiency, exposed communication and dollars over devices, with both knees."""
    first, last = curve.points[0].devices, curve.points[-1].devices
    x = Scale(log2(first), log2(max(last, 2 * first)), _LEFT, _WIDTH - _RIGHT)
    share = Scale(0.0, 1.1, _HEIGHT - _BOTTOM, _TOP)
    lines = [
        _Line("efficiency", "efficiency", curve, curve.efficiency),
        _Line("kept", "efficiency, degrees kept", kept, kept.efficiency),
        _Line("exposed", "exposed communication", curve, lambda point: point.exposed),
    ]
    parts = [tag("style", _STYLE), text(_LEFT, 20.0, title), *_axes(curve.points, x, share)]
    parts += [_drawn(each, x, share) for each in lines]
    parts += _dollars(curve, x)
    parts += _knees(curve, kept, x)
    parts += _keys([(each.name, each.label) for each in lines] + [("usd", "$ for 1e9 tokens")])
    view = f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}"
    return tag("svg", "".join(parts), xmlns="http://www.w3.org/2000/svg", viewBox=view)


def _axes(points: Sequence[Point], x: Scale, share: Scale) -> Iterable[str]:
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        yield line(_LEFT, share(value), _WIDTH - _RIGHT, share(value), class_="grid")
        yield text(_LEFT - 8, share(value) + 4, f"{value:.0%}", class_="end")
    for point in points:
        at = x(log2(point.devices))
        yield text(at, _HEIGHT - _BOTTOM + 18, format_count(point.devices), class_="mid")
    yield text(_WIDTH - 4, _HEIGHT - 12, "devices", class_="end")


def _drawn(each: _Line, x: Scale, y: Scale) -> str:
    points = ((x(log2(p.devices)), y(min(1.1, each.value(p)))) for p in each.curve.points)
    return path(points, class_=each.name)


def _dollars(curve: Curve, x: Scale) -> list[str]:
    priced = [(point.devices, point.usd) for point in curve.points if point.usd is not None]
    if not priced:
        return []
    most = max(usd for _, usd in priced)
    y = Scale(0.0, 1.1 * most, _HEIGHT - _BOTTOM, _TOP)
    labels = [
        text(_WIDTH - _RIGHT + 8, y(value) + 4, f"${value:,.3g}") for value in (most / 2, most)
    ]
    return [path(((x(log2(n)), y(usd)) for n, usd in priced), class_="usd"), *labels]


def _knees(curve: Curve, kept: Curve, x: Scale) -> Iterable[str]:
    for each, name, height in ((curve, "knee", 0.0), (kept, "knee, degrees kept", 16.0)):
        if (knee := shown_knee(each)) is not None:
            at = x(log2(knee.devices))
            yield line(at, _TOP - 10 + height, at, _HEIGHT - _BOTTOM, class_="knee")
            yield text(at + 4, _TOP + height, name)


def _keys(keys: Sequence[tuple[str, str]]) -> Iterable[str]:
    for index, (name, label) in enumerate(keys):
        left = _LEFT + 200 * index
        yield path([(left, _HEIGHT - 16), (left + 22, _HEIGHT - 16)], class_=name)
        yield text(left + 28, _HEIGHT - 12, label)
