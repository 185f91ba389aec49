"""Small pieces of hand-made SVG: scales, ticks, paths. No state, no style (that is in the CSS)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

from holdfast.report.formatting import format_si
from holdfast.report.history.history import StepPoint

T = TypeVar("T")
Label = Callable[[float], str]  # a value of an axis -> its text


@dataclass(frozen=True)
class Scale:
    """Maps values [low, high] onto pixels [start, stop], linearly."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return self.start + share * (self.stop - self.start)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round values inside [low, high], roughly `about` of them: steps of 1, 2 or 5 x 10^k."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / max(1, about)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def time_ticks(seconds: float, about: int = 7) -> list[float]:
    """Return round moments in [0, seconds]: full seconds, minutes, hours or days."""
    few = (1, 2, 5, 10, 15, 30)
    units = [unit * size for size in (1, 60) for unit in few]
    units += [3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800]
    step = next((u for u in units if seconds / u <= about), units[-1])
    return [float(index * step) for index in range(int(seconds / step) + 1)]


def tag(name: str, content: str = "", /, **attributes: Any) -> str:
    """One element. `class_` is class, underscores are hyphens, floats get one decimal, None is
    left out. The content is markup already; `text` escapes."""
    parts = [name]
    for key, value in attributes.items():
        if value is None:
            continue
        shown = f"{value:.1f}" if isinstance(value, float) else str(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    return f"<{' '.join(parts)}>{content}</{name}>"


def text(x: float, y: float, content: str, **attributes: Any) -> str:
    return tag("text", escape(content), x=float(x), y=float(y), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> str:
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def rect(x: float, y: float, width: float, height: float, **attributes: Any) -> str:
    return tag(
        "rect", x=float(x), y=float(y), width=float(width), height=float(height), **attributes
    )


def mark(x: float, top: float, bottom: float, kind: str, tip: str, reach: int) -> str:
    """A vertical line with a tooltip. reach: pixels around it that the pointer may be in."""
    wide = line(x, top, x, bottom, stroke="transparent", stroke_width=reach)
    return tag("g", line(x, top, x, bottom, class_=kind) + wide, data_tip=tip)


def grid(values: Iterable[float], y: Scale, left: float, right: float, label: Label) -> list[str]:
    """A horizontal line for each value, with its label on the left."""
    parts = []
    for value in values:
        parts.append(line(left, y(value), right, y(value), class_="grid"))
        parts.append(text(left - 8, y(value) + 4, label(value), class_="end"))
    return parts


def path(points: Iterable[tuple[float, float]], **attributes: Any) -> str:
    """A line through the points; a point that is not finite breaks it."""
    words, pen_down = [], False
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen_down = False
            continue
        words.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = True
    return tag("path", d="".join(words), **attributes) if words else ""


def thin_points(points: Sequence[T], max_points: int, value: Callable[[T], float]) -> list[T]:
    """At most about `max_points` of the points, the lowest and the highest of each bin kept, so
    that a spike is never thinned away."""
    if len(points) <= max_points:
        return list(points)
    bins = max(1, max_points // 2)
    kept: list[T] = []
    for index in range(bins):
        part = points[index * len(points) // bins : (index + 1) * len(points) // bins]
        ends = {id(p): p for p in (min(part, key=value), max(part, key=value))}
        kept += [p for p in part if id(p) in ends]
    return kept


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Mean over about `window` values around each: exponential means from both ends, averaged,
    so that the line does not lag behind the curve. Values that are not finite are passed over."""
    ahead = _exponential(values, window)
    behind = _exponential(values[::-1], window)[::-1]
    return [(a + b) / 2 for a, b in zip(ahead, behind, strict=True)]


def _exponential(values: Sequence[float], window: float) -> list[float]:
    """Exponential mean without the pull to zero at its start (Kingma and Ba, 2015, section 3)."""
    decay = 1 - 2 / (window + 1) if window > 1 else 0.0
    mean, weight, out = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            mean = decay * mean + (1 - decay) * value
            weight = decay * weight + (1 - decay)
        out.append(mean / weight if weight else math.nan)
    return out


Points = list[tuple[float, float, str]]  # x, y, what the tooltip says


@dataclass(frozen=True)
class Canvas:
    """A drawing's width, margins and detail, in pixels. `name` is its class in the style sheet."""

    name: str
    width: float
    left: float
    right: float
    max_points: int  # of one line
    label_px: float  # from one label of an axis to the next, at least

    @property
    def start(self) -> float:
        return self.left

    @property
    def stop(self) -> float:
        return self.width - self.right

    def labels(self, most: int) -> int:
        """Return how many labels the horizontal axis has room for, `most` at most."""
        return max(2, min(most, int((self.stop - self.start) / self.label_px)))


WIDE = Canvas("wide", 980.0, 52.0, 58.0, 900, 90.0)
NARROW = Canvas("narrow", 350.0, 44.0, 44.0, 300, 80.0)
"""For a screen on which text of the wide drawing would be too small to read."""


def on_both(draw: Callable[[Canvas], str]) -> str:
    """Return the drawing for wide and for narrow screens; the style sheet shows one of them."""
    return draw(WIDE) + draw(NARROW)


def figure(
    drawing: str, points: Points, height: float, label: str, canvas: Canvas, keys: str = ""
) -> str:
    """Return the drawing with its key, its tooltips and a name for screen readers."""
    overlay = line(0, 0, 0, height, class_="cross") + tag("circle", class_="spot", r=3.5)
    picture = tag(
        "svg",
        drawing + overlay,
        viewBox=f"0 0 {canvas.width:.0f} {height:.0f}",
        role="img",
        aria_label=label,
    )
    data = json.dumps([[round(x, 1), round(y, 1), t] for x, y, t in points], ensure_ascii=False)
    safe = data.replace("</", "<\\/")
    script = f'<script type="application/json" class="points">{safe}</script>'
    return f'<figure class="{canvas.name}">{keys}{picture}{script}</figure>'


def key_line(keys: list[tuple[str, str, str]]) -> str:
    """Return the key of a drawing: (name, colour, stroke) of each kind of line."""
    spans = "".join(
        f'<span style="--key:var(--{colour});--stroke:{stroke}">{name}</span>'
        for name, colour, stroke in keys
    )
    return f'<div class="keys">{spans}</div>'


def step_tip(point: StepPoint, ratio: float | None) -> str:
    """Return the tooltip of a step. ratio: bits per byte of one nat per token, None if unknown."""
    bits = f"  ({point.loss * ratio:.3f} bits per byte)" if ratio else ""
    rate = (
        f"\n{format_si(point.tokens / point.seconds)} {point.unit}/s" if point.seconds > 0 else ""
    )
    return (
        f"step {point.step:,}, membership {point.generation}"
        f"\n{point.loss:.4f} {point.loss_unit}{bits}"
        f"\ngradient norm {point.grad_norm:.3g}, learning rate {point.learning_rate:.3g}{rate}"
    )
