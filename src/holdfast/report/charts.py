"""The page's two charts: the curve against steps and tokens, and what happened when."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from holdfast.report import svg
from holdfast.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_si,
)
from holdfast.report.formatting import format_clock as moment
from holdfast.report.history import History, StepPoint
from holdfast.report.svg import Scale, line, path, tag, text, thin_points

WIDTH = 980.0
_LEFT, _RIGHT = 52.0, 58.0
_MAX_POINTS = 900  # points drawn of one line

Points = list[tuple[float, float, str]]  # x, y, what the tooltip says


def figure(drawing: str, points: Points, height: float, label: str, keys: str = "") -> str:
    """Return the drawing with its key, its tooltips and a name for screen readers."""
    overlay = line(0, 0, 0, height, class_="cross") + tag("circle", class_="spot", r=3.5)
    picture = tag(
        "svg",
        drawing + overlay,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        aria_label=label,
    )
    data = json.dumps([[round(x, 1), round(y, 1), t] for x, y, t in points], ensure_ascii=False)
    safe = data.replace("</", "<\\/")
    script = f'<script type="application/json" class="points">{safe}</script>'
    return f"<figure>{keys}{picture}{script}</figure>"


# --- the curve ------------------------------------------------------------------------------
@dataclass(frozen=True)
class _CurveFrame:
    """Scales of the curve. `ratio` is bits per byte of one nat per token, None if unknown."""

    x: Scale
    y: Scale
    top: float
    bottom: float
    ratio: float | None


def curve(history: History, baselines: Mapping[str, float]) -> str:
    """Loss (left) and bits per byte (right) against steps (below) and tokens (above).

    Both axes hold for every point, because on one dataset bits per byte are nats per token times a
    constant. The constant is text tokens per byte / ln 2, taken from the validations. baselines:
    name -> bits per byte of counts on the same validation text.
    """
    height, keys = 400.0, _curve_keys(history, baselines)
    frame = _frame(history, baselines, 34.0, height - 34.0)
    shown = thin_points(history.steps, _MAX_POINTS, lambda p: p.loss)
    parts = [_curve_axes(history, frame), _baselines(frame, baselines)]
    for incident in history.incidents:
        x = frame.x(incident.reached)
        parts.append(
            tag(
                "g",
                line(x, frame.top, x, frame.bottom, class_="incident")
                + line(x, frame.top, x, frame.bottom, stroke="transparent", stroke_width=12),
                data_tip=f"{incident.title}\nafter step {incident.reached}",
            )
        )
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
    points = [(frame.x(p.step), frame.y(p.loss), _step_tip(p, frame.ratio)) for p in shown]
    return figure("".join(parts), points, height, "loss against steps", keys)


def _frame(
    history: History, baselines: Mapping[str, float], top: float, bottom: float
) -> _CurveFrame:
    found = [e.bits_per_byte / e.loss for e in history.evaluations if e.loss > 0]
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
        Scale(first, last, _LEFT, WIDTH - _RIGHT),
        Scale(low - margin, high + margin, bottom, top),
        top,
        bottom,
        ratio,
    )


def _curve_axes(history: History, frame: _CurveFrame) -> str:
    x, y, parts = frame.x, frame.y, []
    for value in svg.ticks(y.low, y.high):
        parts.append(line(_LEFT, y(value), WIDTH - _RIGHT, y(value), class_="grid"))
        parts.append(text(_LEFT - 9, y(value) + 4, f"{value:g}", class_="end"))
    if frame.ratio:
        for value in svg.ticks(y.low * frame.ratio, y.high * frame.ratio):
            at = y(value / frame.ratio)
            parts.append(line(WIDTH - _RIGHT, at, WIDTH - _RIGHT + 4, at, class_="axis"))
            parts.append(text(WIDTH - _RIGHT + 9, at + 4, f"{value:g}"))
        parts.append(text(WIDTH, 12, "bits per byte", class_="end"))
    for value in svg.ticks(x.low, x.high, 8):
        parts.append(text(x(value), frame.bottom + 18, format_count(round(value)), class_="mid"))
    parts.append(text(WIDTH - _RIGHT, frame.bottom + 32, "steps", class_="end"))
    parts.append(_token_axis(history.steps, frame))
    parts.append(text(0, 12, "nats per token"))
    parts.append(line(_LEFT, frame.bottom, WIDTH - _RIGHT, frame.bottom, class_="axis"))
    return "".join(parts)


def _token_axis(steps: Sequence[StepPoint], frame: _CurveFrame) -> str:
    """Tokens seen, above the plot; not evenly spaced when the batch was warmed up."""
    if not steps:
        return ""
    totals, parts = [p.total_tokens for p in steps], []
    for value in svg.ticks(0, totals[-1], 5)[1:]:
        point = steps[min(bisect_left(totals, value), len(steps) - 1)]
        x = frame.x(point.step)
        if _LEFT + 90 < x < WIDTH - _RIGHT - 60:
            parts.append(line(x, frame.top, x, frame.top + 4, class_="axis"))
            parts.append(text(x, frame.top - 7, f"{format_si(value)} tokens", class_="mid"))
    return "".join(parts)


def _baselines(frame: _CurveFrame, baselines: Mapping[str, float]) -> str:
    if not frame.ratio:
        return ""
    parts = []
    for name, bits in baselines.items():
        y = frame.y(bits / frame.ratio)
        parts.append(line(_LEFT, y, WIDTH - _RIGHT, y, class_="baseline"))
        label = f"{name} counts {bits:.2f}"
        parts.append(text(WIDTH - _RIGHT - 8, y - 6, label, class_="end baseline-label"))
    return "".join(parts)


def _evaluations(history: History, frame: _CurveFrame) -> str:
    points = [(frame.x(e.step), frame.y(e.loss)) for e in history.evaluations]
    dots = [
        tag(
            "circle",
            cx=x,
            cy=y,
            r=4.0,
            class_="dot",
            data_tip=f"validation after step {e.step}\n{e.loss:.4f} nats per token"
            f"\n{e.bits_per_byte:.4f} bits per byte",
        )
        for (x, y), e in zip(points, history.evaluations, strict=True)
    ]
    return path(points, class_="evaluation") + "".join(dots if len(dots) <= 60 else dots[-1:])


def _curve_keys(history: History, baselines: Mapping[str, float]) -> str:
    keys = [("training", "accent", "solid")]
    if history.evaluations:
        keys.append(("validation", "evaluation", "solid"))
        keys += [("counts on the same text", "baseline", "dashed")] if baselines else []
    if history.rework:
        keys.append(("lost and done again", "ghost", "dotted"))
    if history.incidents:
        keys.append(("incident", "bad", "dotted"))
    spans = "".join(
        f'<span style="--key:var(--{colour});--stroke:{stroke}">{name}</span>'
        for name, colour, stroke in keys
    )
    return f'<div class="keys">{spans}</div>'


def _step_tip(point: StepPoint, ratio: float | None) -> str:
    bits = f"  ({point.loss * ratio:.3f} bits per byte)" if ratio else ""
    rate = f"\n{format_si(point.tokens / point.seconds)} tokens/s" if point.seconds > 0 else ""
    return (
        f"step {format_count(point.step)}, generation {point.generation}"
        f"\n{point.loss:.4f} nats per token{bits}"
        f"\ngradient norm {point.grad_norm:.3g}, learning rate {point.learning_rate:.3g}{rate}"
    )


# --- what happened when ---------------------------------------------------------------------
class _RunClock:
    """Run time without the pauses between sessions: a night off must not squeeze the picture."""

    def __init__(self, history: History) -> None:
        self.pauses = [
            (before.until, after.began)
            for before, after in zip(history.sessions, history.sessions[1:], strict=False)
            if after.began - before.until > 0
        ]
        self.total = max(self(history.wall), 1e-3)

    def __call__(self, elapsed: float) -> float:
        return elapsed - sum(min(elapsed, b) - a for a, b in self.pauses if elapsed > a)


def timeline(history: History) -> str:
    """Throughput over time, and beneath it generations, incidents, checkpoints, validations."""
    clock, top, bottom = _RunClock(history), 28.0, 190.0
    x = Scale(0, clock.total, _LEFT, WIDTH - 12)
    shown = thin_points([p for p in history.steps if p.seconds > 0], _MAX_POINTS, _rate)
    rates = sorted(_rate(p) for p in history.steps if p.seconds > 0)
    # One step that took almost no time would flatten the rest of the curve, so it is cut off at the
    # top.
    best = rates[min(len(rates) - 1, int(0.98 * len(rates)))] if rates else 1.0
    y = Scale(0, best * 1.15, bottom, top)
    parts = [_speed_axes(clock, x, y, top, bottom)]
    parts += [_incident_wash(history, clock, x, top, bottom)]
    parts += _speed_lines(shown, clock, x, y)
    for piece in history.rework:
        ghost = [_point_position(p, clock, x, y) for p in piece if p.seconds > 0]
        parts.append(path(ghost, class_="ghost"))
    lanes, height = _lanes(history, clock, x, bottom + 40)
    parts.append(lanes)
    for start, stop in clock.pauses:
        at = x(clock(start))
        parts.append(
            tag(
                "g",
                line(at, top, at, height - 12, class_="break"),
                data_tip=f"stopped for {format_duration(stop - start)}",
            )
        )
    points = [(*_point_position(p, clock, x, y), _step_tip(p, None)) for p in shown]
    return figure("".join(parts), points, height, "throughput and events against time")


def _rate(point: StepPoint) -> float:
    return point.tokens / point.seconds


def _point_position(point: StepPoint, clock: _RunClock, x: Scale, y: Scale) -> tuple[float, float]:
    return x(clock(point.elapsed)), max(y(_rate(point)), y.stop)


def _speed_lines(shown: Sequence[StepPoint], clock: _RunClock, x: Scale, y: Scale) -> list[str]:
    """Each step faintly, the mean boldly; a restart breaks both lines."""
    parts = []
    for _, group in groupby(shown, key=lambda p: p.generation):
        piece = list(group)
        spots = [_point_position(p, clock, x, y) for p in piece]
        means = svg.smooth([_rate(p) for p in piece], max(1.0, len(shown) / 30))
        parts.append(path(spots, class_="train"))
        mean_line = [(at, max(y(m), y.stop)) for (at, _), m in zip(spots, means, strict=True)]
        parts.append(path(mean_line, class_="smooth"))
    return parts


def _speed_axes(clock: _RunClock, x: Scale, y: Scale, top: float, bottom: float) -> str:
    parts = [text(0, 12, "tokens/s")]
    for value in svg.ticks(0, y.high, 4):
        parts.append(line(_LEFT, y(value), x.stop, y(value), class_="grid"))
        parts.append(text(_LEFT - 9, y(value) + 4, format_si(value), class_="end"))
    for value in svg.time_ticks(clock.total):
        parts.append(text(x(value), bottom + 18, moment(value), class_="mid"))
    return "".join(parts)


def _incident_wash(history: History, clock: _RunClock, x: Scale, top: float, bottom: float) -> str:
    parts = []
    for incident in history.incidents:
        start = x(clock(incident.began))
        stop = x(clock(incident.recovered if incident.recovered is not None else history.wall))
        parts.append(
            tag(
                "rect",
                x=start,
                y=top,
                width=max(1.5, stop - start),
                height=bottom - top,
                class_="wash",
            )
        )
    return "".join(parts)


def _lanes(history: History, clock: _RunClock, x: Scale, y: float) -> tuple[str, float]:
    """Rows of marks; returns them and where they end."""
    parts = []
    starts = [g.elapsed for g in history.generations]
    for index, generation in enumerate(history.generations):
        start = x(clock(generation.elapsed))
        stop = x(clock(_generation_end(history, index, starts)))
        label = f"{generation.number}" if stop - start < 120 else f"generation {generation.number}"
        box = tag(
            "rect",
            x=start,
            y=y,
            width=max(1.0, stop - start - 1),
            height=18.0,
            rx=3,
            class_="lane alt" if index % 2 else "lane",
        )
        if stop - start > 16:
            box += text(start + 6, y + 13, label, class_="on-lane")
        steps = f"steps {generation.first} to {generation.last}" if generation.last else "no step"
        tip = (
            f"generation {generation.number} ({generation.reason.replace('_', ' ')})\n"
            f"{format_plural(generation.workers, 'worker')}, {steps}"
        )
        parts.append(tag("g", box, data_tip=tip))
    y += 30
    if history.incidents:
        parts.append(_incident_lane(history, clock, x, y))
        y += 30
    marks: list[tuple[float, str, str]] = [
        (
            c.elapsed,
            "tick",
            f"checkpoint of step {c.step}\n{format_bytes(c.bytes)} in "
            f"{format_duration(c.seconds)}, training blocked {format_duration(c.blocked)}",
        )
        for c in history.checkpoints
    ]
    marks += [
        (
            e.elapsed,
            "tick eval",
            f"validation after step {e.step}\n{e.bits_per_byte:.3f} bits per"
            f" byte, {format_duration(e.seconds)}",
        )
        for e in history.evaluations
    ]
    for elapsed, kind, tip in marks:
        at = x(clock(elapsed))
        mark = line(at, y - 4, at, y + 10, class_=kind)
        parts.append(
            tag(
                "g",
                mark + line(at, y - 4, at, y + 10, stroke="transparent", stroke_width=9),
                data_tip=tip,
            )
        )
    parts.append(_lane_labels(history, y))
    return "".join(parts), y + 44


def _incident_lane(history: History, clock: _RunClock, x: Scale, y: float) -> str:
    """A box per incident, named where there is room to its right or left."""
    spans = [
        (x(clock(i.began)), x(clock(i.recovered if i.recovered is not None else history.wall)))
        for i in history.incidents
    ]
    parts, free = [], 0.0
    for index, (incident, (start, stop)) in enumerate(zip(history.incidents, spans, strict=True)):
        how_long = "" if incident.seconds is None else format_duration(incident.seconds)
        tip = (
            f"{incident.title}\n{format_plural(incident.steps_lost, 'step')} done again\n"
            f"{how_long or 'not'} until the first new step"
        )
        box = tag(
            "rect", x=start, y=y - 4, width=max(3.0, stop - start), height=14.0, rx=2, class_="span"
        )
        label = f"{incident.title}, {how_long}" if how_long else incident.title
        wide = 6.4 * len(label) + 12
        limit = spans[index + 1][0] if index + 1 < len(spans) else WIDTH
        if stop + wide < limit:
            box += text(stop + 6, y + 7, label)
            free = stop + wide
        elif start - wide > free:
            box += text(start - 6, y + 7, label, class_="end")
            free = stop
        else:
            free = stop
        parts.append(tag("g", box, data_tip=tip))
    return "".join(parts)


def _lane_labels(history: History, y: float) -> str:
    keys = []
    if history.checkpoints:
        keys.append(("checkpoint", "tick"))
    if history.evaluations:
        keys.append(("validation", "tick eval"))
    parts = []
    for index, (name, kind) in enumerate(keys):
        x = _LEFT + index * 110
        parts.append(line(x, y + 22, x, y + 34, class_=kind))
        parts.append(text(x + 8, y + 32, name))
    return "".join(parts)


def _generation_end(history: History, index: int, starts: Sequence[float]) -> float:
    """A generation ends where it broke, where its session ended, or where the next began."""
    number = history.generations[index].number
    ends = [i.began for i in history.incidents if i.generation == number]
    ends += [s.until for s in history.sessions if s.until > starts[index]]
    ends += starts[index + 1 : index + 2]
    return min(ends, default=history.wall)
