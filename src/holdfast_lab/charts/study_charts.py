"""Charts that compare several ways to do the same, each as an SVG file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast.report.page.svg import Scale, line, path, tag, text, ticks

_WIDTH, _LEFT, _RIGHT, _TOP = 900.0, 110.0, 30.0, 50.0
_BAR, _GAP, _KEY = 26.0, 14.0, 22.0
_LETTER = 7.0  # pixels of a letter, about
COLOURS = (
    *("#1f6fb2", "#9ecae1", "#f0a830", "#d1495b", "#7b6ba8"),
    *("#3b8f6b", "#8c564b", "#bdbdbd", "#333333", "#17a2a2"),
)
_STYLE = "\n".join(
    (
        "text { font: 13px sans-serif; fill: #333 }",
        ".end { text-anchor: end } .mid { text-anchor: middle }",
        ".grid { stroke: #ddd } .bound { stroke: #333; stroke-width: 1.5 }",
        "path { fill: none; stroke-width: 2 }",
    )
)


def stacked_svg(
    title: str,
    parts: Sequence[str],
    rows: Mapping[str, Sequence[float]],
    marks: Mapping[str, tuple[float, float, float]] | None = None,
) -> str:
    """Shares of a total, one bar for each row. rows: name -> a share for each of `parts`. marks:
    name -> (value, low, high) of a share that is drawn on the bar, with its interval."""
    marks = marks or {}
    most = max((sum(shares) for shares in rows.values()), default=1.0) or 1.0
    most = max(most, *(high for _, _, high in marks.values()), 0.0)
    left = max(_LEFT, _LETTER * max(map(len, rows), default=0) + 20)
    x = Scale(0.0, most, left, _WIDTH - _RIGHT)
    bottom = _TOP + len(rows) * (_BAR + _GAP)
    drawn = list(_grid(x, bottom, lambda value: f"{value:.0%}"))
    for place, (name, shares) in enumerate(rows.items()):
        top, at = _TOP + place * (_BAR + _GAP), 0.0
        drawn.append(text(left - 10, top + 18, name, class_="end"))
        for colour, share in zip(_colours(), shares, strict=False):
            width = x(at + share) - x(at)
            drawn.append(_rect(x(at), top, width, _BAR, colour))
            at += share
        if name in marks:
            value, low, high = map(x, marks[name])
            drawn.append(line(low, top + _BAR / 2, high, top + _BAR / 2, class_="bound"))
            drawn.append(line(value, top - 3, value, top + _BAR + 3, class_="bound"))
    keys = _keys(parts, bottom + 40)
    return _picture(title, [*drawn, *keys], bottom + 50 + _KEY * ((len(parts) + 3) // 4))


def intervals_svg(
    title: str, unit: str, names: Sequence[str], rows: Mapping[str, Sequence[tuple[float, float]]]
) -> str:
    """Means with intervals: of each row one bar for each of `names`. rows: name -> (mean, half the
    width of the interval)."""
    most = max((mean + half for row in rows.values() for mean, half in row), default=1.0) or 1.0
    x = Scale(0.0, 1.02 * most, _LEFT, _WIDTH - _RIGHT)
    thick = _BAR / 2
    height = len(names) * thick + _GAP
    bottom = _TOP + len(rows) * height
    drawn = list(_grid(x, bottom, lambda value: f"{value:g}"))
    drawn.append(text(_WIDTH - _RIGHT, bottom + 36, unit, class_="end"))
    for place, (name, row) in enumerate(rows.items()):
        top = _TOP + place * height
        drawn.append(text(_LEFT - 10, top + thick * len(names) / 2 + 4, name, class_="end"))
        for k, (colour, (mean, half)) in enumerate(zip(_colours(), row, strict=False)):
            drawn.append(_rect(x(0), top + k * thick, x(mean) - x(0), thick - 2, colour))
            if half:
                low, high = x(max(0.0, mean - half)), x(mean + half)
                middle = top + (k + 0.5) * thick - 1
                drawn.append(line(low, middle, high, middle, class_="bound"))
    return _picture(
        title, [*drawn, *_keys(names, bottom + 56)], bottom + 66 + _KEY * ((len(names) + 3) // 4)
    )


def exceeded_svg(title: str, unit: str, rows: Mapping[str, Sequence[float]]) -> str:
    """Share of the values that exceed a bound, over the bound, one line for each row."""
    most = max((max(values) for values in rows.values() if values), default=1.0) or 1.0
    bottom = _TOP + 300.0
    x = Scale(0.0, most, _LEFT, _WIDTH - _RIGHT)
    y = Scale(0.0, 1.0, bottom, _TOP)
    drawn = list(_grid(x, bottom, lambda value: f"{value:g}"))
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawn.append(line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), class_="grid"))
        drawn.append(text(_LEFT - 10, y(value) + 4, f"{value:.0%}", class_="end"))
    drawn.append(text(_WIDTH - _RIGHT, bottom + 36, unit, class_="end"))
    for colour, values in zip(_colours(), rows.values(), strict=False):
        drawn.append(path(_corners(sorted(values), x, y), stroke=colour))
    keys = _keys(list(rows), bottom + 56)
    return _picture(title, [*drawn, *keys], bottom + 66 + _KEY * ((len(rows) + 3) // 4))


def _corners(ordered: Sequence[float], x: Scale, y: Scale) -> Iterable[tuple[float, float]]:
    above = 1.0
    yield x(0.0), y(above)
    for number, value in enumerate(ordered, start=1):
        yield x(value), y(above)
        above = 1 - number / len(ordered)
        yield x(value), y(above)


def _colours() -> Iterable[str]:
    while True:
        yield from COLOURS


def _grid(x: Scale, bottom: float, label: Callable[[float], str]) -> Iterable[str]:
    for value in ticks(x.low, x.high, 8):
        yield line(x(value), _TOP - 6, x(value), bottom, class_="grid")
        yield text(x(value), bottom + 18, label(value), class_="mid")


def _rect(left: float, top: float, width: float, height: float, colour: str) -> str:
    return tag("rect", x=left, y=top, width=max(0.0, width), height=height, fill=colour)


def _keys(names: Sequence[str], top: float) -> Iterable[str]:
    for place, (name, colour) in enumerate(zip(names, _colours(), strict=False)):
        left, down = _LEFT + 190.0 * (place % 4), top + _KEY * (place // 4)
        yield _rect(left, down - 10, 12.0, 12.0, colour)
        yield text(left + 18, down, name)


def _picture(title: str, parts: Sequence[str], height: float) -> str:
    content = "".join((tag("style", _STYLE), text(_LEFT, 24.0, title), *parts))
    view = f"0 0 {_WIDTH:.0f} {height:.0f}"
    return tag("svg", content, xmlns="http://www.w3.org/2000/svg", viewBox=view)
