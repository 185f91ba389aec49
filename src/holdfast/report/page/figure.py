"""What all drawings of the page share: two widths, the frame with its tooltips."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.report.formatting import format_si
from holdfast.report.history.history import StepPoint
from holdfast.report.page.svg import line, tag

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
        f"step {point.step:,}, generation {point.generation}"
        f"\n{point.loss:.4f} {point.loss_unit}{bits}"
        f"\ngradient norm {point.grad_norm:.3g}, learning rate {point.learning_rate:.3g}{rate}"
    )
