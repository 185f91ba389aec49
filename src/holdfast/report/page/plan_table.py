"""The page's table of a plan and what was measured."""

from __future__ import annotations

from html import escape

from holdfast.report.formatting import format_bytes, format_duration, format_percent
from holdfast.report.ledger.planned import PlanComparison
from holdfast.report.page.tables import table


def plan_table(found: PlanComparison) -> str:
    """The comparison as a table of the page."""
    rows = [
        _row(part.name, part.predicted, part.measured)
        for part in found.parts
        if part.predicted or part.measured
    ]
    within = [
        (f'<span class="soft">of the passes: {escape(key)}</span>', format_duration(s), "", "")
        for key, s in found.within.items()
    ]
    head = (
        "<b>step</b>",
        *(f"<b>{c}</b>" for c in _row("", found.predicted_s, found.measured_s)[1:]),
    )
    memory = [
        (
            "memory" + (" (measured: the whole process)" if found.is_process else ""),
            format_bytes(found.predicted_bytes),
            format_bytes(found.measured_bytes) if found.measured_bytes else "",
            "",
        )
    ]
    return table(
        ("", "planned", "measured", "plan / measured - 1"),
        [head, *rows[:1], *within, *rows[1:], *memory],
        (1, 2, 3),
    )


def _row(name: str, predicted: float, measured: float) -> tuple[str, str, str, str]:
    error = format_percent(predicted / measured - 1) if predicted and measured else ""
    return name, format_duration(predicted) if predicted else "", format_duration(measured), error
