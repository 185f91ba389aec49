"""`holdfast report RUN --compare OTHER`: two runs side by side, each real or simulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.json_parsing import parse_json
from holdfast.errors import HoldfastError
from holdfast.launch.run.holder import HolderWatch, is_holder_gone
from holdfast.launch.run.runs import Run, open_run
from holdfast.report.formatting import format_plural
from holdfast.report.history.comparison import (
    Decision,
    RunComparison,
    RunFacts,
    compare_runs,
    facts_of,
)
from holdfast.report.history.history import History, read_history
from holdfast.report.ledger.incidents import RECOVERY_RUNGS
from holdfast.report.ledger.timeledger import CLASSES
from holdfast.show.output import print_json, print_table
from holdfast.wire.store.run_store import SIMULATED_FILE

Form = Callable[[float], str]

_TIERS = {0: "own memory", 1: "other nodes", 2: "the disk", 3: "the bucket"}


def compare(run: Run, other: Path, *, json: bool) -> None:
    """Print the comparison of two runs. Raises UserError."""
    theirs = open_run(other)
    a, b = history_of(run), history_of(theirs)
    found = compare_runs(_facts(run, a), _facts(theirs, b), a, b)
    if json:
        print_json(found.to_json())
    else:
        _print(found)


def history_of(run: Run) -> History:
    """The history of a run. It was interrupted if no process holds it any more."""
    history = read_history(run.store)
    if history.state == "running" and is_holder_gone(HolderWatch(run.folder)):
        return history.as_interrupted()
    return history


def _facts(run: Run, history: History) -> RunFacts:
    return facts_of(history, run.place, _totals(run) if run.is_simulated else None)


def _totals(run: Run) -> dict[str, Any]:
    """What the engine knows and no journal has; empty if the file is missing or damaged."""
    try:
        found = parse_json(run.store.get(SIMULATED_FILE))
    except (HoldfastError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# --- printing -----------------------------------------------------------------------------------
def _print(found: RunComparison) -> None:
    for letter, run in (("A", found.one), ("B", found.other)):
        kind = "simulated" if run.is_simulated else "real"
        print(f"{letter}: {run.place}: {run.run}, {kind}, {run.state}")
    print()
    print_table(_rows(found), ("", "A", "B", "B - A", "B/A - 1"))
    print()
    print(_words_of_decisions(found))
    for tier in found.tiers:
        both = (run.intervals_s.get(tier) for run in (found.one, found.other))
        words = " and ".join("no save" if s is None else f"{s:,.3g} s" for s in both)
        print(f"the last interval between saves into {_TIERS.get(tier, tier)} differs: {words}")


def _rows(found: RunComparison) -> list[tuple[str, ...]]:
    one, other = found.one.numbers(), found.other.numbers()
    names: list[tuple[str, str, Form]] = [
        ("wall time s", "wall_s", _number),
        ("steps kept", "steps", _whole),
        ("tokens kept", "tokens", _whole),
        ("tokens kept a second", "tokens_per_s", _number),
        ("tokens done again", "tokens_again", _whole),
        ("goodput", "goodput", _percent),
        ("interruptions", "interruptions", _whole),
    ]
    for rung in sorted({*found.one.by_rung, *found.other.by_rung}):
        words = RECOVERY_RUNGS.get(rung, "no recovery")
        label = f"  rung {rung}: {words}" if rung >= 0 else f"  {words}"
        names.append((label, f"by_rung.{rung}", _whole))
    names += [("planned changes", "changes", _whole), ("steps lost", "lost_steps", _whole)]
    for label, name in _SPREADS:
        names += [(f"{label}, {key}", f"{name}.{key}", _number) for key in _QUANTILES]
    names += [("node-hours with work", "node_hours", _number)]
    names += [("$", "usd", _number), ("kWh", "kwh", _number), ("kg CO2", "co2_kg", _number)]
    names += [(f"{label.replace('_', ' ')} s", f"seconds.{label}", _number) for label in CLASSES]
    return [
        _row(label, one.get(name), other.get(name), form, name)
        for label, name, form in names
        if one.get(name) or other.get(name) or name in _ALWAYS
    ]


_SPREADS = (
    ("RPO steps", "rpo_steps"),
    ("RPO s", "rpo_s"),
    ("RTO s", "rto_s"),
    ("stall s", "stall_s"),
)
_QUANTILES = ("p50", "p95", "worst")
_ALWAYS = ("steps", "tokens", "goodput", "interruptions", "lost_steps")


def _row(
    label: str, a: float | None, b: float | None, form: Form, name: str
) -> tuple[str, str, str, str, str]:
    if name.startswith(("by_rung.", "seconds.")):
        a, b = a or 0.0, b or 0.0
    if a is None or b is None:
        one, other = (form(value) if value is not None else "-" for value in (a, b))
        return label, one, other, "", ""
    share = f"{100 * (b / a - 1):+.1f} %" if a else ""
    sign = "+" if b > a else "" if b == a else "-"
    return label, form(a), form(b), sign + form(abs(b - a)), share


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _words_of_decisions(found: RunComparison) -> str:
    first = found.first
    if first is None:
        return f"all {format_plural(found.decisions[0], 'decision')} agree: rung, nodes, steps lost"
    agree = f"{format_plural(first.index - 1, 'decision')} agree; " if first.index > 1 else ""
    return (
        f"{agree}decision {first.index} is the first that differs:\n"
        f"  A: {_decision_words(first.one)}\n  B: {_decision_words(first.other)}"
    )


def _decision_words(decision: Decision | None) -> str:
    if decision is None:
        return "none, the run has no more"
    rung = f"rung {decision.rung}" if decision.rung >= 0 else "no rung"
    return (
        f"at {decision.elapsed:,.1f} s, generation {decision.generation} ({decision.reason}): "
        f"{rung}, {format_plural(decision.nodes, 'node')}, after step {decision.step:,}, "
        f"{format_plural(decision.lost_steps, 'step')} lost"
    )
