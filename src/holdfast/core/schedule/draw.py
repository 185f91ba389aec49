"""Draws a timed schedule: as text, one row a rank and time to the right, and as SVG.

    rank 0  F0 F1 ......B0--- ...B1---   bubble 33.3%, in flight 2
    rank 1  ...F0 B0--- F1 B1--- ......  bubble 33.3%, in flight 1

A cell is as wide as it takes time. With more than one stage a rank the label says which one
(`2F0`), otherwise the rank does. To the right of each row are the rank's bubble and the most
activations that it keeps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from holdfast.core.schedule.table import (
    Action,
    ActionKind,
    OverlappedActions,
    Schedule,
    ScheduleCell,
    actions_of,
)
from holdfast.core.schedule.timing import ScheduledSpan, Timeline

# kind -> (meaning, fill of the SVG, character that fills the rest of a cell of text)
KIND_STYLES: dict[ActionKind, tuple[str, str, str]] = {
    ActionKind.FORWARD: ("forward", "#7fb2e5", "_"),
    ActionKind.BACKWARD: ("backward", "#f2b279", "-"),
    ActionKind.BACKWARD_INPUT: ("backward, input", "#f2d37a", "~"),
    ActionKind.BACKWARD_WEIGHT: ("backward, weight", "#a8d5a2", "="),
}
_IDLE = "."
_MAX_ROW_CHARACTERS = 400  # characters of a text row, whatever the durations


def draw_text(schedule: Schedule, timeline: Timeline, columns: int | None = None) -> str:
    """The timeline in characters, `columns` wide (default: as wide as the labels need).

    Labels that do not fit are cut; actions narrower than a character are not seen.
    """
    labels = _CellLabels(schedule)
    scale = _scale(labels, timeline, columns)
    rows = [_row(labels, spans, timeline.makespan, scale) for spans in timeline.spans]
    width = len(f"rank {schedule.ranks - 1}")
    lines = [_title(schedule, timeline)]
    for rank, row in enumerate(rows):
        lines.append(f"{f'rank {rank}':<{width}}  {row}  {_figures(timeline, rank)}")
    legend = [f"{kind} {KIND_STYLES[kind][0]}" for kind in _kinds(schedule)]
    number = "stage, kind, microbatch" if labels.with_stage else "kind, microbatch"
    lines.append(f"{', '.join(legend)}, {_IDLE} idle; a label is {number}")
    return "\n".join(lines)


def draw_svg(schedule: Schedule, timeline: Timeline, width: int = 1200) -> str:
    """The timeline as one standalone SVG document, `width` pixels for the makespan."""
    labels = _CellLabels(schedule)
    left, top, high, gap, right = 70, 34, 30, 6, 190
    scale = width / timeline.makespan if timeline.makespan else 0.0
    bottom = top + schedule.ranks * (high + gap)
    total = (left + width + right, bottom + 62)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total[0]}" height="{total[1]}" '
        f'viewBox="0 0 {total[0]} {total[1]}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(_title(schedule, timeline))}</title>",
        f'<rect width="{total[0]}" height="{total[1]}" fill="#ffffff"/>',
        f'<text x="{left}" y="20" font-size="14">{escape(_title(schedule, timeline))}</text>',
    ]
    for rank, spans in enumerate(timeline.spans):
        y = top + rank * (high + gap)
        middle = y + high / 2 + 4
        parts.append(f'<text x="8" y="{middle:g}">rank {rank}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{high}" fill="#eeeeee"/>')
        for span in spans:
            parts += _boxes(labels, span, left, y, high, scale)
        figures = escape(_figures(timeline, rank))
        parts.append(f'<text x="{left + width + 10}" y="{middle:g}">{figures}</text>')
    parts += _axis(timeline.makespan, left, width, bottom)
    parts += _legend(schedule, left, bottom + 34)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


class _CellLabels:
    """Return a cell's label: `F0`, or `2F0` if a rank has several stages."""

    def __init__(self, schedule: Schedule):
        self.with_stage = schedule.stages > schedule.ranks

    def label_of(self, action: Action) -> str:
        return str(action) if self.with_stage else f"{action.kind}{action.microbatch}"

    def label_of_cell(self, cell: ScheduleCell) -> str:
        return "+".join(self.label_of(action) for action in actions_of(cell))


def _kinds(schedule: Schedule) -> list[ActionKind]:
    used = {a.kind for row in schedule.actions for cell in row for a in actions_of(cell)}
    return [kind for kind in KIND_STYLES if kind in used]


def _title(schedule: Schedule, timeline: Timeline) -> str:
    mean = sum(timeline.bubble) / len(timeline.bubble)
    return (
        f"{schedule.name}: {schedule.stages} stages on {schedule.ranks} ranks, "
        f"{_microbatches(schedule)}, makespan {float(timeline.makespan):.6g}, "
        f"bubble {mean:.1%}"
    )


def _microbatches(schedule: Schedule) -> str:
    if not schedule.is_open:
        return f"{schedule.microbatches} microbatches"
    row = [action for cell in schedule.actions[0] for action in actions_of(cell)]
    count = sum(action.kind is ActionKind.BACKWARD for action in row)
    return f"{count} microbatches a step, of which one is drawn"


def _figures(timeline: Timeline, rank: int) -> str:
    return f"bubble {timeline.bubble[rank]:.1%}, in flight {timeline.in_flight[rank]}"


def _scale(labels: _CellLabels, timeline: Timeline, columns: int | None) -> float:
    """Characters per unit of time: every label fits with a space, up to a widest row."""
    if not timeline.makespan:
        return 0.0
    if columns is not None:
        return columns / timeline.makespan
    needs = (
        (len(labels.label_of_cell(span.cell)) + 1) / (span.stop - span.start)
        for spans in timeline.spans
        for span in spans
        if span.stop > span.start
    )
    fits = max(needs, default=1.0)
    return min(fits, _MAX_ROW_CHARACTERS / timeline.makespan)


def _row(labels: _CellLabels, spans: Sequence[ScheduledSpan], makespan: float, scale: float) -> str:
    characters = [_IDLE] * round(makespan * scale)
    for span in spans:
        start, stop = round(span.start * scale), round(span.stop * scale)
        label, fill = (
            labels.label_of_cell(span.cell),
            KIND_STYLES[actions_of(span.cell)[-1].kind][2],
        )
        cell = label[: stop - start].ljust(stop - start, fill)
        if stop - start > len(label):
            cell = cell[:-1] + " "  # neighbours stay apart
        characters[start:stop] = cell
    return "".join(characters)


def _boxes(
    labels: _CellLabels, span: ScheduledSpan, left: float, y: float, high: float, scale: float
) -> list[str]:
    """A rectangle with its label and a tooltip; the parts of an overlapped cell are stacked."""
    parts: list[str] = []
    actions = actions_of(span.cell)
    tall = high / len(actions)
    x, wide = left + span.start * scale, (span.stop - span.start) * scale
    title = f"{span.cell} from {float(span.start):.6g} to {float(span.stop):.6g}"
    for place, action in enumerate(actions):
        above = y + place * tall
        parts.append(
            f'<rect x="{x:.2f}" y="{above:.2f}" width="{wide:.2f}" height="{tall:.2f}" '
            f'fill="{KIND_STYLES[action.kind][1]}" stroke="#ffffff">'
            f"<title>{escape(title)}</title></rect>"
        )
        label = labels.label_of(action)
        size = next((size for size in (12, 10, 8) if wide >= 0.6 * size * len(label) + 1), None)
        if size is not None:
            size = min(size, 10) if isinstance(span.cell, OverlappedActions) else size
            parts.append(
                f'<text x="{x + wide / 2:.2f}" y="{above + tall / 2 + 4:.2f}" '
                f'text-anchor="middle" pointer-events="none" font-size="{size}">{label}</text>'
            )
    return parts


def _axis(makespan: float, left: float, width: float, y: float) -> list[str]:
    """Time under the rows: begin, quarters, end."""
    marks = [quarter / 4 for quarter in range(5)]
    return [
        f'<text x="{left + mark * width:g}" y="{y + 12:g}" text-anchor="middle" '
        f'fill="#555555">{float(makespan * mark):.4g}</text>'
        for mark in marks
    ]


def _legend(schedule: Schedule, left: float, y: float) -> list[str]:
    parts: list[str] = []
    entries = [
        (f"{kind}: {KIND_STYLES[kind][0]}", KIND_STYLES[kind][1]) for kind in _kinds(schedule)
    ]
    x = left
    for words, fill in [*entries, ("idle", "#eeeeee")]:
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="14" height="14" fill="{fill}"/>')
        parts.append(f'<text x="{x + 20:g}" y="{y + 12:g}">{words}</text>')
        x += 44 + 7 * len(words)
    return parts
