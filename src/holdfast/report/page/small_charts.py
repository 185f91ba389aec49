"""Small drawings beneath the curve: learning rate, gradient norm, memory of the workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby

from holdfast.report.formatting import format_bytes, format_count
from holdfast.report.history.history import History, MemoryPoint, StepPoint
from holdfast.report.page import svg
from holdfast.report.page.figure import Canvas, Points, figure
from holdfast.report.page.svg import Scale, line, path, tag, text, thin_points

SMALL = Canvas("small", 330.0, 58.0, 10.0, 300, 90.0)
_TOP, _BOTTOM, _HEIGHT = 14.0, 150.0, 174.0
_MAX_RANKS = 16
"""Workers whose memory is drawn; of more, those that take the most."""

Line = Sequence[tuple[float, float, str]]  # step, value, what the tooltip says


def small_charts(history: History) -> str:
    """Return the drawings of what the journal has, side by side where there is room."""
    steps = thin_points(history.steps, SMALL.max_points, _finite_norm)
    rates = [_point(p, p.learning_rate, "learning rate") for p in steps]
    norms = [_point(p, p.grad_norm, "gradient norm before clipping") for p in steps]
    drawings = [
        _chart("learning rate", history, [rates], _short),
        _chart("gradient norm", history, [norms], _short),
    ]
    if history.memory:
        lines = _memory_lines(history.memory)
        most = max(sample.shown_bytes for sample in history.memory)
        unit = next(unit for unit in (2**30, 2**20, 1) if most >= unit or unit == 1)
        drawings.append(_chart(_memory_title(history), history, lines, _short_bytes, unit, True))
    return f'<div class="small">{"".join(drawings)}</div>'


def _chart(
    title: str,
    history: History,
    lines: list[Line],
    label: Callable[[float], str],
    unit: float = 1.0,
    from_zero: bool = False,
) -> str:
    """One drawing against steps. Values that are not finite break a line. unit: the labels are
    round numbers of it. from_zero: the axis begins there, however little the values differ."""
    values = [y for each in lines for _, y, _ in each if math.isfinite(y)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    low = 0.0 if low > 0 and (from_zero or low < high * 0.9) else low
    margin = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    first = history.steps[0].step - 1 if history.steps else 0
    x = Scale(first, max(history.last_step, 1), SMALL.start, SMALL.stop)
    y = Scale(low - (0.0 if low == 0 else margin), high + margin, _BOTTOM, _TOP)
    parts = []
    for value in (tick * unit for tick in svg.ticks(y.low / unit, y.high / unit, 4)):
        parts.append(line(SMALL.start, y(value), SMALL.stop, y(value), class_="grid"))
        parts.append(text(SMALL.start - 7, y(value) + 4, label(value), class_="end"))
    for value in svg.ticks(x.low, x.high, SMALL.labels(3)):
        kind = "end" if x(value) > SMALL.stop - 16 else "mid"
        parts.append(text(x(value), _BOTTOM + 18, format_count(round(value)), class_=kind))
    parts.append(line(SMALL.start, _BOTTOM, SMALL.stop, _BOTTOM, class_="axis"))
    for each in lines:
        spots = [(x(step), y(value)) for step, value, _ in each]
        parts.append(path(spots, class_="thin"))
        if len(spots) == 1 and math.isfinite(spots[0][1]):
            parts.append(tag("circle", cx=spots[0][0], cy=spots[0][1], r=1.8, class_="point"))
    points: Points = sorted(
        (x(step), y(value), tip)
        for each in lines
        for step, value, tip in each
        if math.isfinite(value)
    )
    caption = f"<figcaption>{title}</figcaption>"
    return figure("".join(parts), points, _HEIGHT, f"{title} against steps", SMALL, caption)


def _point(point: StepPoint, value: float, name: str) -> tuple[float, float, str]:
    return point.step, value, f"step {format_count(point.step)}\n{name} {value:.3g}"


def _finite_norm(point: StepPoint) -> float:
    return point.grad_norm if math.isfinite(point.grad_norm) else 0.0


def _memory_lines(samples: Sequence[MemoryPoint]) -> list[Line]:
    """Return a line for each worker and generation, of the workers that take the most."""
    most: dict[int, int] = {}
    for sample in samples:
        most[sample.rank] = max(most.get(sample.rank, 0), sample.shown_bytes)
    chosen = set(sorted(most, key=lambda rank: (-most[rank], rank))[:_MAX_RANKS])
    kept = sorted(
        (s for s in samples if s.rank in chosen), key=lambda s: (s.rank, s.generation, s.step)
    )
    return [
        [
            (
                s.step,
                float(s.shown_bytes),
                f"step {format_count(s.step)}, rank {s.rank}\n{format_bytes(s.shown_bytes)}",
            )
            for s in thin_points(list(group), SMALL.max_points, lambda s: float(s.shown_bytes))
        ]
        for _, group in groupby(kept, key=lambda s: (s.rank, s.generation))
    ]


def _memory_title(history: History) -> str:
    on_device = any(sample.device_bytes for sample in history.memory)
    return "device memory of each worker, at most" if on_device else "memory of each worker"


def _short(value: float) -> str:
    """An axis label of at most seven characters."""
    return "0" if abs(value) < 1e-12 else f"{value:.3g}"


def _short_bytes(value: float) -> str:
    return "0" if value < 1 else format_bytes(value).replace(".0 ", " ")
