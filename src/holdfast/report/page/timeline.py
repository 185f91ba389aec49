"""What happened when: throughput over time, generations, incidents, saves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from holdfast.report.formatting import (
    format_bytes,
    format_duration,
    format_plural,
    format_si,
    format_validation,
)
from holdfast.report.formatting import format_clock as moment
from holdfast.report.history.history import History, StepPoint
from holdfast.report.page import svg
from holdfast.report.page.svg import (
    WIDE,
    Canvas,
    Scale,
    figure,
    grid,
    line,
    mark,
    path,
    rect,
    step_tip,
    tag,
    text,
    thin_points,
)


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


def timeline(history: History, canvas: Canvas) -> str:
    """Throughput over time, and beneath it generations, incidents, checkpoints, validations."""
    clock, top, bottom = _RunClock(history), 28.0, 190.0
    x = Scale(0, clock.total, canvas.start, canvas.width - 12)
    shown = thin_points([p for p in history.steps if p.seconds > 0], canvas.max_points, _rate)
    rates = sorted(_rate(p) for p in history.steps if p.seconds > 0)
    # One step that took almost no time would flatten the rest of the curve, so it is cut off at the
    # top.
    best = rates[min(len(rates) - 1, int(0.98 * len(rates)))] if rates else 1.0
    y = Scale(0, best * 1.15, bottom, top)
    parts = [text(0, 12, f"{history.unit}/s"), *_speed_axes(clock, x, y, canvas)]
    for incident in history.breaks:
        start = x(clock(incident.began))
        stop = x(clock(incident.recovered if incident.recovered is not None else history.wall))
        parts.append(rect(start, top, max(1.5, stop - start), bottom - top, class_="wash"))
    parts += _speed_lines(shown, clock, x, y)
    for piece in history.rework:
        ghost = [_point_position(p, clock, x, y) for p in piece if p.seconds > 0]
        parts.append(path(ghost, class_="ghost"))
    lanes, height = _lanes(history, clock, x, bottom + 40, canvas)
    parts.append(lanes)
    for start, stop in clock.pauses:
        at = x(clock(start))
        gap = line(at, top, at, height - _key_height(canvas) + 12, class_="break")
        parts.append(tag("g", gap, data_tip=f"stopped for {format_duration(stop - start)}"))
    points = [(*_point_position(p, clock, x, y), step_tip(p, None)) for p in shown]
    return figure("".join(parts), points, height, "throughput and events against time", canvas)


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


def _speed_axes(clock: _RunClock, x: Scale, y: Scale, canvas: Canvas) -> list[str]:
    parts = grid(svg.ticks(0, y.high, 4), y, x.start, x.stop, format_si)
    for value in svg.time_ticks(clock.total, canvas.labels(7)):
        parts.append(text(x(value), y.start + 18, moment(value), class_="mid"))
    return parts


def _lanes(
    history: History, clock: _RunClock, x: Scale, y: float, canvas: Canvas
) -> tuple[str, float]:
    """Rows of marks; returns them and where they end."""
    parts = []
    starts = [g.elapsed for g in history.generations]
    for index, generation in enumerate(history.generations):
        start = x(clock(generation.elapsed))
        # A generation ends where it broke, where its session ended, or where the next began.
        number = history.generations[index].number
        ends = [i.began for i in history.incidents if i.generation == number]
        ends += [s.until for s in history.sessions if s.until > starts[index]]
        ends += starts[index + 1 : index + 2]
        stop = x(clock(min(ends, default=history.wall)))
        label = f"{generation.number}" if stop - start < 120 else f"membership {generation.number}"
        kind = "lane alt" if index % 2 else "lane"
        box = rect(start, y, max(1.0, stop - start - 1), 18.0, rx=3, class_=kind)
        if stop - start > 16:
            box += text(start + 6, y + 13, label, class_="on-lane")
        steps = f"steps {generation.first} to {generation.last}" if generation.last else "no step"
        tip = (
            f"{format_plural(generation.workers, 'worker')}, {steps}\n"
            f"generation {generation.number} ({generation.reason.replace('_', ' ')})"
        )
        parts.append(tag("g", box, data_tip=tip))
    y += 30
    if history.incidents:
        parts.append(_incident_lane(history, clock, x, y, canvas))
        y += 30
    # The checkpoints and validations: when, kind of mark, tooltip.
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
            f"validation after step {e.step}\n"
            f"{format_validation(e.loss, e.bits_per_byte)}, {format_duration(e.seconds)}",
        )
        for e in history.evaluations
    ]
    for elapsed, kind, tip in marks:
        parts.append(mark(x(clock(elapsed)), y - 4, y + 10, kind, tip, reach=9))
    parts.append(_lane_labels(history, y, canvas))
    return "".join(parts), y + _key_height(canvas)


def _key_height(canvas: Canvas) -> float:
    """Pixels below the lanes: their key, which has two rows on a narrow screen."""
    return 44.0 if canvas is WIDE else 64.0


def _incident_lane(history: History, clock: _RunClock, x: Scale, y: float, canvas: Canvas) -> str:
    """A box per incident and change of nodes, named where there is room to its right or left."""
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
        kind = "span change" if incident.is_planned else "span"
        box = rect(start, y - 4, max(3.0, stop - start), 14.0, rx=2, class_=kind)
        label = f"{incident.title}, {how_long}" if how_long else incident.title
        wide = 6.4 * len(label) + 12
        limit = spans[index + 1][0] if index + 1 < len(spans) else canvas.width
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


def _lane_labels(history: History, y: float, canvas: Canvas) -> str:
    keys = [
        (name, kind)
        for name, kind, there in (
            ("checkpoint", "tick", history.checkpoints),
            ("validation", "tick eval", history.evaluations),
            ("incident", "tick bad", history.breaks),
            ("nodes changed", "tick change", history.changes),
        )
        if there
    ]
    room = min(110.0, (canvas.width - canvas.start) / max(1, min(2, len(keys))))
    in_row = max(1, int((canvas.width - canvas.start) / room))
    parts = []
    for index, (name, kind) in enumerate(keys):
        x, top = canvas.start + index % in_row * room, y + 22 + index // in_row * 20
        parts.append(line(x, top, x, top + 12, class_=kind))
        parts.append(text(x + 8, top + 10, name))
    return "".join(parts)
