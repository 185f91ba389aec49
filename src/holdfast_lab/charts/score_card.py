"""The card of a score: one drawing, and a page around it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.report.page.svg import line, tag, text

_WIDTH, _ROW, _LEFT, _BAR = 720.0, 26.0, 190.0, 400.0
_INK, _SOFT, _FILL, _BROKEN = "#1d2733", "#8b97a5", "#2f6fb0", "#b3372f"


@dataclass(frozen=True)
class CardRow:
    """A value in [0, 1], or None if it was not measured. interval: 95 %, if there is one."""

    name: str
    title: str
    value: float | None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ScoreCard:
    """What the card says.

    Attributes:
        subject: the trainer or the policy.
        level: of the score; scores of different levels are never compared.
        setting: compression, scenarios and seeds, in a line.
        score: RS in [0, 100], or None.
        interval: its 95 % interval.
        rows: the vector.
        gate: (condition, holds or None, detail).
        notes: sensitivity, the literal formula, costs.
        table: a head and rows of the pairs.
    """

    subject: str
    level: int
    setting: str
    score: float | None
    interval: tuple[float, float] | None
    rows: Sequence[CardRow]
    gate: Sequence[tuple[str, bool | None, str]]
    notes: Sequence[str]
    table: Sequence[Sequence[str]] = ()


def card_svg(card: ScoreCard) -> str:
    """The card as one SVG, in pixels; it needs no style sheet."""
    parts = [_words(16, 34, card.subject, 20, weight="600")]
    parts.append(_words(16, 56, f"Resilience Score, level {card.level}: {card.setting}", 12, _SOFT))
    told = "not measured" if card.score is None else f"{card.score:.1f}"
    parts.append(_words(_WIDTH - 16, 40, told, 30, weight="700", anchor="end"))
    if card.interval is not None:
        low, high = card.interval
        between = f"95 %: {low:.1f} to {high:.1f} without the gate"
        parts.append(_words(_WIDTH - 16, 58, between, 11, _SOFT, anchor="end"))
    y = 84.0
    for row in card.rows:
        parts.append(_bar(row, y))
        y += _ROW
    y += 8
    for name, holds, detail in card.gate:
        mark = {True: "holds", False: "broken", None: "not tested"}[holds]
        colour = _BROKEN if holds is False else _INK
        parts.append(_words(16, y, f"gate: {name}: {mark}", 12, colour))
        parts.append(_words(_LEFT + 120, y, detail[:66], 11, _SOFT))
        y += 20
    return tag(
        "svg",
        tag("rect", width=_WIDTH, height=y + 4, fill="#ffffff") + "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH:.0f} {y + 4:.0f}",
        role="img",
        aria_label=f"Resilience Score of {card.subject}: {told}",
    )


def _bar(row: CardRow, y: float) -> str:
    made = _words(16, y + 4, row.name, 13, weight="600") + _words(72, y + 4, row.title, 11, _SOFT)
    made += tag("rect", x=_LEFT, y=y - 8, width=_BAR, height=14, fill="#e8edf3")
    if row.value is None:
        return made + _words(_LEFT + _BAR + 10, y + 4, "not measured", 12, _SOFT)
    width = _BAR * min(1.0, max(0.0, row.value))
    made += tag("rect", x=_LEFT, y=y - 8, width=round(width, 1), height=14, fill=_FILL)
    if row.interval is not None:
        low, high = (_LEFT + _BAR * min(1.0, max(0.0, end)) for end in row.interval)
        made += line(low, y - 1, high, y - 1, stroke=_INK, stroke_width=2)
    return made + _words(_LEFT + _BAR + 10, y + 4, f"{row.value:.3f}", 13)


def _words(
    x: float,
    y: float,
    content: str,
    size: float,
    colour: str = _INK,
    *,
    weight: str = "400",
    anchor: str = "start",
) -> str:
    return text(
        x,
        y,
        content,
        font_size=size,
        fill=colour,
        font_weight=weight,
        text_anchor=anchor,
        font_family="system-ui, sans-serif",
    )


def card_page(card: ScoreCard) -> str:
    """The card as one HTML file that loads nothing."""
    rows = list(card.table)
    body = card_svg(card) + "".join(f"<p>{html.escape(note)}</p>" for note in card.notes)
    if rows:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
        lines = (
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows[1:]
        )
        body += f"<table><tr>{head}</tr>{''.join(lines)}</table>"
    style = (
        "body{font:14px system-ui,sans-serif;max-width:760px;margin:2em auto;color:#1d2733}"
        "table{border-collapse:collapse;margin-top:1em}td,th{padding:2px 10px;text-align:right}"
        "svg{border:1px solid #d5dce4;border-radius:6px;width:100%}"
    )
    title = html.escape(f"Resilience Score of {card.subject}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{style}</style></head><body>{body}</body></html>\n"
    )
