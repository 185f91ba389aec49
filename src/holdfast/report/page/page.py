"""One self-contained HTML page about a run: nothing is fetched, and only tooltips are executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from holdfast.errors import RunFolderError
from holdfast.events import CompletionsShown
from holdfast.report.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_plural,
    format_si,
)
from holdfast.report.history.history import History
from holdfast.report.history.summary import utilisations
from holdfast.report.ledger.experts import heat_map, load_note
from holdfast.report.ledger.transfers import transfer_note
from holdfast.report.page import charts, tables, timeline
from holdfast.report.page.charts import small_charts
from holdfast.report.page.css import SCRIPT, style_sheet
from holdfast.report.page.svg import on_both, thin_points
from holdfast.report.page.tables import plan_table
from holdfast.wire.store.publish import replace_file

_STATES = {
    "empty": "not started",
    "running": "running",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "lost": "interrupted",
}

REFRESH_S = 10  # Seconds after which a browser loads the page of a run that trains again

_UNIT = re.compile(r"(?<=\d) (?=(s|ms|µs|min|h|d|B|[KMGT]iB)\b)")  # no line break before a unit


def write_result(path: Path, text: str, what: str = "report", option: str = "--output") -> None:
    """Write a file that the user asked for, atomically. option: names it on the command line.
    Raises RunFolderError when the path cannot be written."""
    if path.is_dir():
        raise RunFolderError(
            f"the {what} cannot be written: this is a folder",
            where=str(path),
            remedy=f"name a file in it with {option}",
        )
    try:
        replace_file(path, text)
    except OSError as error:
        raise RunFolderError(
            f"the {what} cannot be written ({error.strerror})",
            where=str(path),
            remedy=f"name another place with {option}"
            if path.parent.exists()
            else f"make the folder first: mkdir -p {shlex.quote(str(path.parent))}",
        ) from error


def render_page(
    history: History,
    resolved: Mapping[str, Any],
    *,
    baselines: Mapping[str, float] | None = None,
    samples: Sequence[str] = (),
    device: str | None = None,
    written_at: float | None = None,
) -> str:
    """The page as text. The page of a run that trains loads itself again.

    resolved: what `resolved.json` holds (config, origins); empty is allowed. baselines: name ->
    bits per byte of counting alone, drawn with the curve. samples: text that the model wrote.
    device: the accelerator's name, for its utilisation. written_at: seconds since 1970; the page of
    a run that trains says so.
    """
    counts = dict(baselines or {})
    title = history.run or "run"
    parts = [_header(history, written_at), _tiles(history, counts, resolved, device)]
    if history.steps:
        parts.append(
            _section(
                "Loss",
                "Mean over each global batch, and the validation text. A step that was lost "
                "and done again appears once in the curve, and as a ghost where it was lost.",
                on_both(lambda canvas: charts.curve(history, counts, canvas)),
            )
        )
        note, charted = transfer_note(history.transfers), small_charts(history)
        parts.append(_section("Learning rate, gradient norm, memory", note, charted))
    if metrics := history.metrics:
        advice = "<br>".join(escape(each.advice) for each in metrics if each.advice)
        note = advice or "Means of each step. All with a healthy range are inside it."
        parts.append(_section("Metrics of the objective", note, charts.metric_charts(history)))
    if history.experts:
        note = load_note(history.experts, history.dropped_choices, history.loads_with_copies)
        parts.append(_card("Load of the experts", note, heat_map(history.experts)))
    if history.generations:
        parts.append(
            _section(
                "What happened when",
                "Throughput, and beneath it each membership (generation), incident, change of "
                "nodes, checkpoint and validation. Pauses between sessions are cut out.",
                on_both(lambda canvas: timeline.timeline(history, canvas)),
            )
        )
    if history.wall > 0:
        parts.append(
            _section("Where the time went", _goodput_note(history), tables.time_spent(history))
        )
    if history.exchanges:
        note = "Of a median step of worker 0. Exposed: the passes waited. The rest is hidden."
        parts.append(_card("Exchanges between workers", note, tables.exchanges_table(history)))
    parts += _records(history)
    if history.tasks:
        note = "Scores of checkpoints (holdfast evaluate, evaluate.tasks), the newest first."
        parts.append(_card("Tasks", note, tables.tasks_table(history)))
    parts += _completions(history.completions)
    parts += _samples(samples)
    parts += _configuration(history, resolved)
    parts.append(
        "<footer>Made by Holdfast from the run's journal alone. Times are on the agent's clock. "
        "Goodput: time spent computing steps that count, divided by the wall time. Tokens/s: "
        "median over the steps that count.</footer>"
    )
    is_live = history.state == "running"
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if is_live else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">{refresh}'
        f"<title>{escape(title)} · Holdfast</title><style>{style_sheet()}</style></head>"
        f'<body><main>{"".join(parts)}</main><div id="tip"></div>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _configuration(history: History, resolved: Mapping[str, Any]) -> list[str]:
    """The section of the resolved values; none without them."""
    if not resolved.get("config"):
        return []
    values = tables.configuration_table(resolved)
    body = f"<details><summary>all values</summary>{values}</details>"
    words = []
    if history.branch:
        parent = escape(history.branch.parent)
        words.append(f"continues <code>{parent}</code> after step {history.branch.step}")
    if history.dataset_version:
        words.append(f"dataset <code>{escape(history.dataset_version)}</code>")
    if history.config_hash:
        words.append(f"configuration <code>{escape(history.config_hash)}</code>")
    return [_section("Configuration", ", ".join(words), f'<div class="card">{body}</div>')]


def _section(title: str, note: str, body: str) -> str:
    about = f'<p class="note">{_UNIT.sub("&nbsp;", note)}</p>' if note else ""
    return f"<section><h2>{title}</h2>{about}{body}</section>"


def _header(history: History, written_at: float | None) -> str:
    began = ""
    if history.sessions:
        at = datetime.fromtimestamp(history.sessions[0].began_at, UTC)
        began = f"began {at:%d %B %Y, %H:%M} UTC"
    reason = history.sessions[-1].reason if history.sessions else ""
    if history.state == "running" and written_at is not None:
        reason = f"as of {datetime.fromtimestamp(written_at, UTC):%H:%M:%S} UTC"
    words = [
        began,
        format_plural(len(history.sessions), "session"),
        format_plural(len(history.generations), "membership"),
        escape(reason),
    ]
    return (
        f'<header><h1>{escape(history.run or "run")}<span class="state {history.state}">'
        f'{_STATES[history.state]}</span></h1><p class="lead">{" · ".join(filter(None, words))}</p>'
        + "".join(f'<p class="note">{escape(hole)}</p>' for hole in history.holes)
        + "</header>"
    )


def _tiles(
    history: History,
    baselines: Mapping[str, float],
    resolved: Mapping[str, Any],
    device: str | None,
) -> str:
    tiles = [_quality_tile(history, baselines)] if history.evaluations else []
    again = (
        f"{format_si(history.recomputed_tokens)} more done again"
        if history.recomputed_tokens
        else ""
    )
    if history.fates:
        named = (
            f"{format_si(count)} {fate.replace('_', ' ')}" for fate, count in history.fates.items()
        )
        again = "<br>".join(filter(None, (f"outer.mode free: {', '.join(named)}", again)))
    times = [i.seconds for i in history.breaks if i.seconds is not None]
    lost = sum(i.steps_lost for i in history.breaks)
    number = len(history.breaks)
    more = f"{format_duration(median(times))} to recover (median)<br>" if times else ""
    more += f"{format_plural(lost, 'step')} done again" if number else ""
    tiles += [
        (
            format_plural(history.last_step, "step"),
            f"{format_si(history.tokens)} {history.unit}",
            again,
        ),
        (
            format_duration(history.wall - history.time["stopped"]),
            "running time",
            f"and {format_duration(history.time['stopped'])} stopped"
            if history.time["stopped"]
            else "",
        ),
        (
            f"{format_si(history.tokens_per_second)}<small> {history.unit}/s</small>",
            "median over the steps",
            "<br>".join(
                f"{format_percent(u.ratio)} of peak, {u.convention}: {escape(u.formula)}"
                for u in utilisations(history, resolved, device)
            ),
        ),
        (
            format_percent(history.goodput_running),
            "goodput",
            f"{format_percent(history.goodput)} with the pauses" if history.time["stopped"] else "",
        ),
        (format_count(number), "incident" if number == 1 else "incidents", more),
    ]
    boxes = "".join(
        f'<div class="tile"><b>{value}</b><span>{label}</span>'
        + (f"<i>{more}</i>" if more else "")
        + "</div>"
        for value, label, more in tiles
    )
    return f'<div class="tiles">{boxes}</div>'


def _quality_tile(history: History, baselines: Mapping[str, float]) -> tuple[str, str, str]:
    last, best = history.evaluations[-1], history.best_evaluation
    notes = [f"{escape(name)} counts {bits:.2f}" for name, bits in baselines.items()]
    if best is not None and best.step != last.step:
        number = best.loss if best.bits_per_byte is None else best.bits_per_byte
        notes.append(f"best {number:.3f} after step {format_count(best.step)}")
    value = f"{last.loss:.3f}<small> loss</small>"
    if last.bits_per_byte is not None:
        value = f"{last.bits_per_byte:.3f}<small> bits/byte</small>"
    return value, f"validation after step {format_count(last.step)}", "<br>".join(notes)


def _goodput_note(history: History) -> str:
    again = history.time["rework"] + history.time["recovery"]
    note = "Every second of the run stands in one class; the classes add up to the wall time."
    if idle := history.ranks.fleet_totals()["idle"]:
        note += (
            f" Of all ranks together, {format_duration(idle)} were idle, so the goodput of the "
            f"fleet is {format_percent(history.goodput_fleet)}."
        )
    if not history.breaks:
        return note
    return (
        f"{note} What broke cost "
        f"{format_duration(again)}: {format_duration(history.time['recovery'])} of recovery and "
        f"{format_duration(history.time['rework'])} of steps done again."
    )


def _records(history: History) -> list[str]:
    out = []
    if history.plan is not None:
        note = (
            f"The membership of generation {history.plan.generation}: medians of "
            f"{format_plural(history.plan.steps, 'step')} of rank 0. Speeds of devices: "
            f"{history.plan.source}."
        )
        out.append(_card("Planned and measured", note, plan_table(history.plan)))
    if history.morphs:
        note = "Planned and measured after each change of layout, and the training loss around it."
        lines = "".join(f"<li>{escape(morph.sentence())}</li>" for morph in history.morphs)
        out.append(_card("Changes of layout", note, f"<ul>{lines}</ul>"))
    if history.breaks:
        out.append(
            _card(
                "Incidents",
                "From the moment the agent noticed to the first new step.",
                tables.incidents_table(history),
            )
        )
    if history.changes:
        note = "Nodes and workers that came, or left in time; nothing broke."
        out.append(_card("Changes of membership", note, tables.changes_table(history)))
    if history.checkpoints:
        total = sum(c.blocked for c in history.checkpoints)
        note = (
            f"{format_plural(len(history.checkpoints), 'checkpoint')} of "
            f"{format_bytes(history.checkpoints[-1].bytes)}; training was blocked for "
            f"{format_duration(total)} in all."
        )
        out.append(_card("Checkpoints", note, tables.checkpoints_table(history)))
    if history.cadence:
        out.append(
            _card("When to save", "The decisions in force, by tier.", tables.cadence_table(history))
        )
    if history.generations:
        out.append(_card("Memberships", "", tables.generations_table(history)))
    if history.notices:
        out.append(_card("Notices", "", tables.notices_table(history)))
    return out


def _card(title: str, note: str, body: str) -> str:
    return _section(title, note, f'<div class="card">{body}</div>')


MAX_COMPLETIONS = 24
"""Groups of completions on the page: the first, the newest, and some between."""


def _completions(shown: Sequence[CompletionsShown]) -> list[str]:
    if not shown:
        return []
    cards = []
    for group in thin_points(shown, MAX_COMPLETIONS, lambda group: max(group.rewards, default=0)):
        rewards = [f"{reward:8.3g}  " for reward in group.rewards] or [""] * len(group.replies)
        replies = "\n".join(map("".join, zip(rewards, group.replies, strict=True)))
        note = ", filtered" if group.is_filtered else ""
        head = f"step {group.step}, prompt {group.prompt}{note}: {group.asked}"
        cards.append(f'<div class="card sample"><pre>{escape(head)}\n{escape(replies)}</pre></div>')
    note = "One group every few steps: each completion, after its reward."
    return [_section("Completions", note, "".join(cards))]


def _samples(samples: Sequence[str]) -> list[str]:
    if not samples:
        return []
    cards = "".join(f'<div class="card sample"><pre>{escape(s)}</pre></div>' for s in samples)
    return [_section("Samples", "Written by the model as it stands.", cards)]
