"""The page's tables, each a pure function from history to HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from holdfast.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_plural,
)
from holdfast.report.history.history import Generation, History
from holdfast.report.ledger.exchanges import EXCHANGES
from holdfast.report.ledger.incidents import Incident, describe_rung
from holdfast.report.ledger.planned import PlanComparison
from holdfast.report.ledger.timeledger import CLASSES
from holdfast.report.page.css import class_colour

_OPEN_ROWS = 12  # rows of a long table that stand open
_MARKUP = re.compile(r"<[^>]*>")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Iterable[int] = (),
    marked: Iterable[int] = (),
) -> str:
    """Return a table. On a narrow screen each cell becomes a line with its column's name.

    Cells are markup already. numbers: columns that are set to the right. marked: rows that stand
    out.
    """
    right, given = set(numbers), set(marked)
    heads = "".join(
        f'<th class="n">{h}</th>' if i in right else f"<th>{h}</th>" for i, h in enumerate(head)
    )
    body = "".join(
        f"<tr{' class=given' if number in given else ''}>"
        + "".join(_cell(head[i], cell, i in right) for i, cell in enumerate(cells))
        + "</tr>"
        for number, cells in enumerate(rows)
    )
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _cell(name: str, content: str, is_number: bool) -> str:
    is_empty = not _MARKUP.sub("", content).strip()
    kinds = " ".join(["n"] * is_number + ["none"] * is_empty)
    kind = f' class="{kinds}"' if kinds else ""
    return f'<td{kind} data-label="{escape(name)}"><div>{content}</div></td>'


def time_spent(history: History) -> str:
    """A bar of the running time, and a table of all of it; classes without a second are left out.

    Shares are of the running time: a night between two sessions would hide everything else.
    """
    stopped = history.time["stopped"]
    running = max(history.wall - stopped, 1e-9)
    shown = [
        (name, seconds)
        for name, seconds in history.time.items()
        if name != "stopped" and seconds / running >= 5e-5
    ]
    bar = "".join(
        f'<div style="flex:{max(seconds / running, 0.002):.4f};background:{class_colour(name)}" '
        f'data-tip="{name.replace("_", " ")}: {format_duration(seconds)}, '
        f'{format_percent(seconds / running)}">'
        "</div>"
        for name, seconds in shown
    )
    rows = [
        _time_row(name, seconds, format_percent(seconds / running)) for name, seconds in shown
    ] + [(_bold("running time"), _bold(format_duration(running)), _bold("100 %"), "")]
    if stopped > 0:
        rows.append(_time_row("stopped", stopped, ""))
        rows.append((_bold("wall time"), _bold(format_duration(history.wall)), "", ""))
    return (
        f'<div class="bar">{bar}</div><div class="card">'
        + table(("", "time", "share", "spent on"), rows, (1, 2))
        + "</div>"
    )


def _time_row(name: str, seconds: float, share: str) -> tuple[str, str, str, str]:
    swatch = f'<span class="swatch" style="background:{class_colour(name)}"></span>'
    about = f'<span class="soft">{CLASSES[name]}</span>'
    return swatch + name.replace("_", " "), format_duration(seconds), share, about


def exchanges_table(history: History) -> str:
    """Seconds of each kind of exchange in a step, and those that the passes waited for."""
    rows = [
        (
            each.kind,
            format_duration(each.seconds),
            format_duration(each.exposed),
            format_percent(each.exposed / each.seconds) if each.seconds else "",
            f'<span class="soft">{EXCHANGES.get(each.kind, "")}</span>',
        )
        for each in history.exchanges
    ]
    return table(("", "under way", "exposed", "share", "what"), rows, (1, 2, 3))


def _bold(content: str) -> str:
    return f"<b>{content}</b>"


def incidents_table(history: History) -> str:
    rows = []
    for i in history.breaks:
        phases = ", ".join(
            f"{name} {format_duration(seconds)}" for name, seconds in i.phases.items()
        )
        rows.append(
            (
                format_duration(i.began),
                escape(i.title),
                _rung(i),
                format_count(i.reached),
                format_count(i.steps_lost),
                format_duration(i.seconds) if i.seconds is not None else "never",
                f'<span class="soft">{phases}<br>{escape(i.source)}</span>',
            )
        )
    head = (
        "at",
        "what happened",
        "recovery",
        "after step",
        "steps done again",
        "until a new step",
        "of which",
    )
    return table(head, rows, (0, 3, 4, 5))


def changes_table(history: History) -> str:
    """Planned changes of nodes and workers."""
    rows = [
        (
            format_duration(i.began),
            escape(i.title),
            _rung(i),
            format_count(i.reached),
            format_duration(i.stood_still_s) if i.stood_still_s is not None else "",
        )
        for i in history.changes
    ]
    head = ("at", "what changed", "how", "after step", "training waited")
    return _folded_table(head, rows, (0, 3, 4))


def _rung(incident: Incident) -> str:
    return describe_rung(incident.rung) if incident.rung >= 0 else ""


def checkpoints_table(history: History) -> str:
    rows = []
    for c in reversed(history.checkpoints):
        fate = [f"restored {format_plural(c.restored, 'time')}"] if c.restored else []
        fate += ["removed"] if c.removed else []
        rows.append(
            (
                format_count(c.step),
                str(c.generation),
                format_bytes(c.bytes),
                format_duration(c.blocked),
                format_duration(c.seconds),
                f'<span class="soft">{", ".join(fate)}</span>',
            )
        )
    head = ("step", "membership (generation)", "size", "training blocked", "until committed", "")
    return _folded_table(head, rows, (0, 1, 2, 3, 4))


def tasks_table(history: History) -> str:
    rows = [
        (
            escape(task.task),
            format_count(task.step),
            escape(task.metric),
            f"{task.score:.4f}",
            format_count(task.items),
            escape(", ".join(f"{name} {value:.4g}" for name, value in task.metrics.items())),
        )
        for task in sorted(history.tasks, key=lambda task: (-task.step, task.task))
    ]
    return _folded_table(("task", "step", "metric", "score", "items", "more"), rows, (1, 3, 4))


def cadence_table(history: History) -> str:
    """One line a tier whose cadence the run decides."""
    rows = [
        (
            str(d.tier),
            format_duration(d.seconds) if d.seconds else "never",
            format_count(d.step),
            escape(d.reason),
        )
        for d in history.cadence
    ]
    return table(("tier", "saved every", "since step", "because"), rows, (0, 1, 2))


def generations_table(history: History) -> str:
    rows = [
        (
            str(g.number),
            escape(g.reason.replace("_", " ")),
            str(g.workers),
            escape(", ".join(g.nodes)),
            f"{format_count(g.first)} to {format_count(g.last)}" if g.last else "none",
            f'<span class="soft">{escape(_origin(g))}</span>',
        )
        for g in reversed(history.generations)
    ]
    head = ("membership (generation)", "because of", "workers", "nodes", "steps", "began from")
    return _folded_table(head, rows, (0, 2))


def _origin(generation: Generation) -> str:
    if generation.live:
        return "what the processes held"
    return generation.restored_from or "initial weights"


def notices_table(history: History) -> str:
    rows = [
        (format_duration(n.elapsed), str(n.generation), escape(n.text)) for n in history.notices
    ]
    return _folded_table(("at", "membership", "what"), rows, (0, 1))


def configuration_table(resolved: Mapping[str, Any]) -> str:
    """Every value with who decided it; those that a person gave stand out."""
    origins: Mapping[str, Mapping[str, str]] = resolved.get("origins", {})
    rows, given = [], []
    for number, (key, value) in enumerate(flatten(resolved.get("config", {}))):
        origin = origins.get(key) or _parent_origin(key, origins)
        kind, place = origin.get("kind", ""), origin.get("place", "")
        if kind in ("file", "command line"):
            given.append(number)
        shown = f"{kind} ({place})" if place else kind
        rows.append(
            (
                f"<code>{escape(key)}</code>",
                f"<code>{escape(str(value))}</code>",
                f'<span class="soft">{escape(shown)}</span>',
            )
        )
    return table(("key", "value", "decided by"), rows, marked=given)


def flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return dotted keys and their values; a list is one value."""
    out: list[tuple[str, Any]] = []
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, Mapping) and inner:
            out += flatten(inner, f"{key}.")
        else:
            out.append((key, inner))
    return out


def _parent_origin(key: str, origins: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    """A list or an empty section has the origin of its first part, or of what holds it."""
    for name, origin in origins.items():
        if name.startswith((f"{key}.", f"{key}[")):
            return origin
    while "." in key:
        key = key.rpartition(".")[0]
        if key in origins:
            return origins[key]
    return {}


def _folded_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int]
) -> str:
    """The first rows open, the rest behind a click."""
    numbers = tuple(numbers)
    out = table(head, rows[:_OPEN_ROWS], numbers)
    if len(rows) > _OPEN_ROWS:
        rest = table(head, rows[_OPEN_ROWS:], numbers)
        out += f"<details><summary>{len(rows) - _OPEN_ROWS} more</summary>{rest}</details>"
    return out


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
