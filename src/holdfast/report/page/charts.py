"""The curve of a run: loss against steps and tokens."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from holdfast.report.formatting import format_bytes, format_count, format_si
from holdfast.report.history.history import EvaluationPoint, History, MemoryPoint, StepPoint
from holdfast.report.page import svg
from holdfast.report.page.svg import (
    WIDE,
    Canvas,
    Points,
    Scale,
    figure,
    grid,
    key_line,
    line,
    mark,
    path,
    step_tip,
    tag,
    text,
    thin_points,
)


@dataclass(frozen=True)
class _CurveFrame:
    """Scales of the curve. `ratio` is bits per byte of one nat per token, None if unknown."""

    canvas: Canvas
    x: Scale
    y: Scale
    top: float
    bottom: float
    ratio: float | None


def curve(history: History, baselines: Mapping[str, float], canvas: Canvas) -> str:
    """Loss (left) and bits per byte (right) against steps (below) and tokens (above).

    Both axes hold for every point, because on one dataset bits per byte are nats per token times a
    constant. The constant is text tokens per byte / ln 2, taken from the validations. baselines:
    name -> bits per byte of counts on the same validation text.
    """
    keys = [("training", "accent", "solid")]
    if history.evaluations:
        keys.append(("validation", "evaluation", "solid"))
        keys += [("counts on the same text", "baseline", "dashed")] if baselines else []
    if history.rework:
        keys.append(("lost and done again", "ghost", "dotted"))
    if history.breaks:
        keys.append(("incident", "bad", "dotted"))
    if history.changes:
        keys.append(("nodes came or left in time", "change", "dotted"))
    height = 400.0 if canvas is WIDE else 300.0
    frame = _frame(history, baselines, canvas, 34.0, height - 34.0)
    shown = thin_points(history.steps, canvas.max_points, lambda p: p.loss)
    parts = [_curve_axes(history, frame), _baselines(frame, baselines)]
    for incident in history.incidents:
        x, kind = frame.x(incident.reached), "change" if incident.is_planned else "incident"
        tip = f"{incident.title}\nafter step {incident.reached}"
        parts.append(mark(x, frame.top, frame.bottom, kind, tip, reach=12))
    parts.append(path(((frame.x(p.step), frame.y(p.loss)) for p in shown), class_="train"))
    for piece in history.rework:
        lost = [
            (frame.x(p.step), frame.y(p.loss)) for p in thin_points(piece, 200, lambda p: p.loss)
        ]
        parts.append(path(lost, class_="ghost"))
    means = svg.smooth([p.loss for p in shown], max(1.0, len(shown) / 40))
    smooth_line = [(frame.x(p.step), frame.y(m)) for p, m in zip(shown, means, strict=True)]
    parts.append(path(smooth_line, class_="smooth"))
    parts.append(_evaluations(history, frame))
    points = [(frame.x(p.step), frame.y(p.loss), step_tip(p, frame.ratio)) for p in shown]
    return figure("".join(parts), points, height, "loss against steps", canvas, key_line(keys))


def _frame(
    history: History, baselines: Mapping[str, float], canvas: Canvas, top: float, bottom: float
) -> _CurveFrame:
    found = [
        e.bits_per_byte / e.loss
        for e in history.evaluations
        if e.loss > 0 and e.bits_per_byte is not None
    ]
    ratio = found[-1] if found else None
    values = [p.loss for p in history.steps if math.isfinite(p.loss)]
    values += [e.loss for e in history.evaluations]
    if ratio:
        values += [bits / ratio for bits in baselines.values()]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = max((high - low) * 0.05, 0.02)
    last = max(history.last_step, max((p.step for r in history.rework for p in r), default=1), 1)
    first = history.steps[0].step - 1 if history.steps else 0
    return _CurveFrame(
        canvas,
        Scale(first, last, canvas.start, canvas.stop),
        Scale(low - margin, high + 1.7 * margin, bottom, top),
        top,
        bottom,
        ratio,
    )


def _curve_axes(history: History, frame: _CurveFrame) -> str:
    x, y, parts, canvas = frame.x, frame.y, list[str](), frame.canvas
    left, right = canvas.start, canvas.stop
    parts += grid(svg.ticks(y.low, y.high), y, left, right, lambda value: f"{value:g}")
    if frame.ratio:
        for value in svg.ticks(y.low * frame.ratio, y.high * frame.ratio):
            at = y(value / frame.ratio)
            parts.append(line(right, at, right + 4, at, class_="axis"))
            parts.append(text(right + 9, at + 4, f"{value:g}"))
        parts.append(text(canvas.width, 12, "bits per byte", class_="end"))
    for value in svg.ticks(x.low, x.high, canvas.labels(8)):
        parts.append(text(x(value), frame.bottom + 18, format_count(round(value)), class_="mid"))
    parts.append(text(right, frame.bottom + 32, "steps", class_="end"))
    parts.append(_token_axis(history.steps, frame))
    label = "nats per token"
    if history.unit != "tokens":
        label = f"loss per {history.unit.removesuffix('s')}"
    parts.append(text(0, 12, label))
    parts.append(line(left, frame.bottom, right, frame.bottom, class_="axis"))
    return "".join(parts)


def _token_axis(steps: Sequence[StepPoint], frame: _CurveFrame) -> str:
    """Tokens seen, above the plot; not evenly spaced when the batch was warmed up."""
    if not steps:
        return ""
    totals, parts, unit = [p.total_tokens for p in steps], list[str](), steps[-1].unit
    canvas = frame.canvas
    for value in svg.ticks(0, totals[-1], canvas.labels(5))[1:]:
        point = steps[min(bisect_left(totals, value), len(steps) - 1)]
        x = frame.x(point.step)
        if canvas.start + 90 < x < canvas.stop - 60:
            parts.append(line(x, frame.top, x, frame.top + 4, class_="axis"))
            parts.append(text(x, frame.top - 7, f"{format_si(value)} {unit}", class_="mid"))
    return "".join(parts)


def _baselines(frame: _CurveFrame, baselines: Mapping[str, float]) -> str:
    if not frame.ratio:
        return ""
    parts, left, right = list[str](), frame.canvas.start, frame.canvas.stop
    for name, bits in baselines.items():
        y = frame.y(bits / frame.ratio)
        parts.append(line(left, y, right, y, class_="baseline"))
        label = f"{name} counts {bits:.2f}"
        parts.append(text(right - 8, y - 6, label, class_="end baseline-label"))
    return "".join(parts)


def _validation_tip(found: EvaluationPoint) -> str:
    if found.bits_per_byte is None:
        return f"loss {found.loss:.4f}"
    return f"{found.loss:.4f} nats per token\n{found.bits_per_byte:.4f} bits per byte"


def _evaluations(history: History, frame: _CurveFrame) -> str:
    points = [(frame.x(e.step), frame.y(e.loss)) for e in history.evaluations]
    dots = [
        tag(
            "circle",
            cx=x,
            cy=y,
            r=4.0,
            class_="dot",
            data_tip=f"validation after step {e.step}\n" + _validation_tip(e),
        )
        for (x, y), e in zip(points, history.evaluations, strict=True)
    ]
    return path(points, class_="evaluation") + "".join(dots if len(dots) <= 60 else dots[-1:])


SMALL = Canvas("small", 330.0, 58.0, 10.0, 300, 90.0)
_TOP, _BOTTOM, _HEIGHT = 14.0, 150.0, 174.0
_MAX_RANKS = 16  # Workers whose memory is drawn; of more, those that take the most

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
        on_device = any(sample.device_bytes for sample in history.memory)
        drawings.append(
            _chart(
                ("device memory of each worker, at most" if on_device else "memory of each worker"),
                history,
                lines,
                _short_bytes,
                unit,
                True,
            )
        )
    return f'<div class="small">{"".join(drawings)}</div>'


def _metric(name: str, point: StepPoint) -> float:
    return point.metrics[name]


def metric_charts(history: History) -> str:
    """Return a drawing of each metric of the objective."""
    drawings = []
    for name in (each.name for each in history.metrics):
        having = [point for point in history.steps if name in point.metrics]
        thin = thin_points(having, SMALL.max_points, partial(_metric, name))
        points = [_point(point, point.metrics[name], name) for point in thin]
        drawings.append(_chart(name, history, [points], _short))
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
    ticks = [tick * unit for tick in svg.ticks(y.low / unit, y.high / unit, 4)]
    parts = grid(ticks, y, SMALL.start, SMALL.stop, label)
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


def _short(value: float) -> str:
    """An axis label of at most seven characters."""
    return "0" if abs(value) < 1e-12 else f"{value:.3g}"


def _short_bytes(value: float) -> str:
    return "0" if value < 1 else format_bytes(value).replace(".0 ", " ")
