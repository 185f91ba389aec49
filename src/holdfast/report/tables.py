"""The page's tables, each a pure function from history to HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from holdfast.report.css import class_colour
from holdfast.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_plural,
)
from holdfast.report.history import Generation, History
from holdfast.report.incidents import RECOVERY_RUNGS
from holdfast.report.timeledger import CLASSES

_OPEN_ROWS = 12  # rows of a long table that stand open


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """Cells are markup already. `numbers`: columns that are set to the right."""
    right = set(numbers)

    def row(cells: Sequence[str], cell: str) -> str:
        return "".join(
            f'<{cell} class="n">{c}</{cell}>' if i in right else f"<{cell}>{c}</{cell}>"
            for i, c in enumerate(cells)
        )

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{row(head, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


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


def _bold(content: str) -> str:
    return f"<b>{content}</b>"


def incidents_table(history: History) -> str:
    rows = []
    for i in history.incidents:
        phases = ", ".join(
            f"{name} {format_duration(seconds)}" for name, seconds in i.phases.items()
        )
        rung = f"{i.rung}: {RECOVERY_RUNGS[i.rung]}" if i.rung in RECOVERY_RUNGS else ""
        rows.append(
            (
                format_duration(i.began),
                escape(i.title),
                rung,
                format_count(i.reached),
                format_count(i.steps_lost),
                format_duration(i.seconds) if i.seconds is not None else "never",
                f'<span class="soft">{phases}<br>{escape(i.source)}</span>',
            )
        )
    head = (
        "at",
        "what happened",
        "rung",
        "after step",
        "steps done again",
        "until a new step",
        "of which",
    )
    return table(head, rows, (0, 3, 4, 5))


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
    head = ("step", "generation", "size", "training blocked", "until committed", "")
    return _folded_table(head, rows, (0, 1, 2, 3, 4))


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
    head = ("generation", "because of", "workers", "nodes", "steps", "began from")
    return _folded_table(head, rows, (0, 2))


def _origin(generation: Generation) -> str:
    """Return the start of a generation."""
    if generation.live:
        return "what the processes held"
    return generation.restored_from or "initial weights"


def notices_table(history: History) -> str:
    rows = [
        (format_duration(n.elapsed), str(n.generation), escape(n.text)) for n in history.notices
    ]
    return _folded_table(("at", "generation", "what"), rows, (0, 1))


def configuration_table(resolved: Mapping[str, Any]) -> str:
    """Every value with who decided it; those that a person gave stand out."""
    origins: Mapping[str, Mapping[str, str]] = resolved.get("origins", {})
    rows = []
    for key, value in flatten(resolved.get("config", {})):
        origin = origins.get(key) or _parent_origin(key, origins)
        kind, place = origin.get("kind", ""), origin.get("place", "")
        given = kind in ("file", "command line")
        shown = f"{kind} ({place})" if place else kind
        rows.append(
            f"<tr{' class=given' if given else ''}><td><code>{escape(key)}</code></td>"
            f"<td><code>{escape(str(value))}</code></td>"
            f'<td class="soft">{escape(shown)}</td></tr>'
        )
    return (
        '<div class="scroll"><table><thead><tr><th>key</th><th>value</th><th>decided by</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


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
