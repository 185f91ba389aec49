"""A draft of a post-mortem, from a run's journal alone: the same journal gives the same bytes.

Each sentence about the run names the record that it comes from. What the journal does not say is a
question at the end, for a person to answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from holdfast.events import Record
from holdfast.report.causes.explain import explain
from holdfast.report.causes.finding import MODES, Finding, Mode
from holdfast.report.formatting import format_duration, format_percent, format_plural
from holdfast.report.history.history import History, build_history
from holdfast.report.ledger.incidents import RECOVERY_RUNGS, Incident
from holdfast_platform.observe.costs import KINDS, costs_by, to_cents, use_of_records


def draft_postmortem(records: Sequence[Record]) -> str:
    """Return the draft as Markdown."""
    history, findings = build_history(records), explain(records)
    parts = [
        f"# Post-mortem: {history.run}\n",
        *_summary(history),
        *_root(findings),
        *_timeline(history, findings),
        *_repeated(history),
        *_cost(records, history.run),
        *_questions(history, findings),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _summary(history: History) -> Iterator[str]:
    state = {
        "running": "was interrupted, unless it is at work (ask holdfast status). Its journal ends",
        "empty": "has not begun, and stands",
        "stopped": "was stopped",
    }.get(history.state, history.state)
    yield (
        f"The run {state} after step {history.last_step:,}. Of its wall time of "
        f"{format_duration(history.wall)}, {format_percent(history.goodput)} computed steps that "
        f"count. It had {format_plural(len(history.breaks), 'incident')}.\n"
    )


def _root(findings: Sequence[Finding]) -> Iterator[str]:
    yield "## Root event\n"
    if not findings:
        yield "The journal shows no failure.\n"
        return
    first = findings[0]
    yield f"{_clock(first.time)}: {first.sentence}\n"
    yield from (f"- `{item.place}`: {item.text}" for item in first.evidence)
    yield f"- runbook: `docs/runbooks/{MODES[first.mode].runbook}.md`\n"


def _timeline(history: History, findings: Sequence[Finding]) -> Iterator[str]:
    zero = history.sessions[0].began_at if history.sessions else 0.0
    clock = "are UTC, by the clock of the agent that wrote the record"
    if zero < _FIRST_REAL_TIME_S:
        clock = "count from the start of the simulation: nothing was trained"
    yield f"## Timeline\n\nTimes {clock}.\n"
    rows = [
        (finding.time, f"{finding.sentence} (`{finding.evidence[0].place}`)")
        for finding in findings
    ]
    for incident in history.incidents:
        rows.append((zero + incident.began, f"{incident.title}, after step {incident.reached:,}."))
        if incident.recovered is not None:
            rows.append((zero + incident.recovered, _recovery(incident)))
    for session in history.sessions:
        rows.append((session.began_at, "A session began."))
        if session.ended != "running":
            why = f" ({session.reason})" if session.reason else ""
            rows.append((zero + session.until, f"The session {_ENDS[session.ended]}{why}."))
    yield "| time | what happened |\n|---|---|"
    yield from (f"| {_clock(time)} | {_cell(text)} |" for time, text in sorted(rows))
    yield ""


_FIRST_REAL_TIME_S = 1e9
"""No record of a training is older. The clock of a simulated run begins at 0."""
_ENDS = {"finished": "finished", "stopped": "stopped", "failed": "failed", "lost": "was lost"}


def _recovery(incident: Incident) -> str:
    seconds = "an unknown time" if incident.seconds is None else format_duration(incident.seconds)
    how = RECOVERY_RUNGS.get(incident.rung, "no recovery")
    return f"Training continued after {seconds}: {how}."


def _repeated(history: History) -> Iterator[str]:
    yield "## Repeated work\n"
    steps = sum(len(piece) for piece in history.rework)
    yield (
        f"{format_plural(steps, 'step')} were done again, which is "
        f"{format_duration(history.time['rework'])} and {history.recomputed_tokens:,.0f} "
        f"{history.unit}. Recovery took {format_duration(history.time['recovery'])} more.\n"
    )
    yield "| rank | useful s | rework s | recovery s | idle s |\n|---|---:|---:|---:|---:|"
    for rank, seconds in history.ranks.totals().items():
        shown = (seconds[name] for name in ("productive", "rework", "recovery", "idle"))
        yield f"| {rank} | " + " | ".join(f"{value:,.2f}" for value in shown) + " |"
    yield ""


def _cost(records: Sequence[Record], run: str) -> Iterator[str]:
    yield "## Cost\n"
    (cost,) = costs_by([use_of_records(records, run, run)], "").values()
    if not cost.total:
        yield "The journal has no prices (`plan.cluster` of the run file names them).\n"
        return
    cents = to_cents(dict(cost.dollars))
    parts = ", ".join(f"{kind} ${cents[kind]:,.2f}" for kind in KINDS)
    yield f"${sum(cents.values()):,.2f} for {float(cost.hours):,.2f} node-hours: {parts}."
    if cost.unpriced_hours:
        yield f"{float(cost.unpriced_hours):,.2f} node-hours have no price, and are not in it."
    yield ""


def _questions(history: History, findings: Sequence[Finding]) -> Iterator[str]:
    yield "## Open questions\n"
    asked = [
        f"What caused it at {_clock(finding.time)}: {finding.cause} What would tell: "
        f"{MODES[finding.mode].would_tell}."
        for finding in findings
        if not finding.is_certain or finding.mode is Mode.NOT_KNOWN
    ]
    if history.state == "running":
        asked.append("Is the run at work, or were all its agents lost? Ask `holdfast status RUN`.")
    asked += [
        f"Why did training not continue after {_clock_of(history, incident)}?"
        for incident in history.breaks
        if incident.recovered is None and history.state != "running"
    ]
    asked += [sentence[0].upper() + sentence[1:] + "." for sentence in history.holes]
    yield from (f"- {question}" for question in dict.fromkeys(asked))
    yield "- Who noticed it, and how? The journal does not say."
    yield "- What keeps it from happening again?"


def _clock_of(history: History, incident: Incident) -> str:
    return _clock(history.sessions[0].began_at + incident.began if history.sessions else 0.0)


def _clock(time: float) -> str:
    """Return a time as UTC, to the millisecond; of a simulation as days, hours, minutes and
    seconds."""
    if time < _FIRST_REAL_TIME_S:
        days, rest = divmod(time, 86_400)
        return f"day {days:.0f}, {rest // 3600:02.0f}:{rest // 60 % 60:02.0f}:{rest % 60:06.3f}"
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.replace("|", "\\|").split())
