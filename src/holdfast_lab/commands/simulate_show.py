"""How `holdfast simulate` shows its outcomes: a table, JSON, a chart."""

from __future__ import annotations

from typing import Any

from holdfast.show.output import print_table
from holdfast_lab.charts.study_charts import stacked_svg
from holdfast_lab.engine.asked_study import StudyResult
from holdfast_lab.engine.interfaces import LABELS
from holdfast_lab.engine.study import METRICS, Estimate, Outcome, estimate

_COLUMNS = (
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("goodput", "goodput", "{:.1%}"),
    ("G", "g", "{:.1%}"),
    ("losses", "interruptions", "{:.0f}"),
    ("work lost s", "lost_work_s", "{:,.0f}"),
    ("RPO p95 s", "rpo_p95_s", "{:.3g}"),
    ("RTO p95 s", "rto_p95_s", "{:.3g}"),
    ("saved TB", "stored_tb", "{:.3g}"),
)
_PRICED = (("$", "usd", "{:,.0f}"), ("$/1e9 tokens", "usd_per_1e9_tokens", "{:,.2f}"))
_ENERGY = (("kWh", "kwh", "{:,.0f}"), ("kg CO2", "co2_kg", "{:,.0f}"))


def print_outcomes(study: StudyResult) -> None:
    """A row for each policy and point of a sweep."""
    first = study.outcomes[0]
    print(_title(study))
    columns = [*_COLUMNS]
    for more in (_PRICED, _ENERGY):
        columns += [each for each in more if any(_mean(o, each[1]) for o in study.outcomes)]
    if study.asked.is_until_done:
        columns.insert(0, ("makespan h", "makespan_s", "{:,.1f}"))
    rows = [
        [outcome.case.words, *(_cell(outcome, name, form) for _, name, form in columns)]
        for outcome in study.outcomes
    ]
    print_table(rows, ("policy", *(head for head, _, _ in columns)))
    if len(first.ledgers) > 1:
        print("means, with 95 % bootstrap intervals of the mean; the columns from losses on: means")
    for outcome in study.outcomes:
        print(f"{outcome.case.words}: {_seconds_words(outcome)}")


def _title(study: StudyResult) -> str:
    ledger = study.outcomes[0].ledgers[0]
    plan = study.outcomes[0].case.cost.point(study.outcomes[0].case.cost.wanted)
    layout = plan.layout if plan else "no layout"
    number = len(study.outcomes[0].ledgers)
    histories = "one history" if number == 1 else f"{number} histories"
    return (
        f"{study.request.loaded.config.name}: {layout} on {study.request.machines.name}; "
        f"{study.trace}, {histories} of {ledger.wall_s / 3600:,.1f} h"
    )


def _mean(outcome: Outcome, metric: str) -> float:
    return _estimate(outcome, metric).mean


def _estimate(outcome: Outcome, metric: str) -> Estimate:
    return estimate(outcome.values(metric))


def _cell(outcome: Outcome, metric: str, form: str) -> str:
    found = _estimate(outcome, metric)
    scale = 3600.0 if metric == "makespan_s" else 1.0
    shown = form.format(found.mean / scale)
    has_interval = metric in ("tokens_per_s", "goodput", "g", "makespan_s", "usd")
    if len(outcome.ledgers) > 1 and has_interval:
        shown += f" [{form.format(found.low / scale)}, {form.format(found.high / scale)}]"
    return shown


def _seconds_words(outcome: Outcome) -> str:
    """Shares of the wall time by label, the largest first."""
    wall = sum(ledger.wall_s for ledger in outcome.ledgers)
    if not wall:
        return "no time passed"
    shares = {
        label: sum(ledger.seconds[label] for ledger in outcome.ledgers) / wall for label in LABELS
    }
    ordered = sorted(shares, key=lambda label: -shares[label])
    return ", ".join(f"{label} {shares[label]:.2%}" for label in ordered if shares[label] > 5e-5)


def as_json(study: StudyResult) -> dict[str, Any]:
    return {
        "run": study.request.loaded.config.name,
        "machines": study.request.machines.name,
        "trace": study.trace,
        "outcomes": [
            {
                "policy": outcome.case.words,
                "estimates": {
                    metric: {"mean": found.mean, "low": found.low, "high": found.high}
                    for metric in METRICS
                    for found in (_estimate(outcome, metric),)
                },
                "histories": [ledger.to_json() for ledger in outcome.ledgers],
            }
            for outcome in study.outcomes
        ],
    }


def comparison_svg(study: StudyResult) -> str:
    """The use of each policy's time, and its capacity-normalised goodput with its interval."""
    rows, marks = dict[str, list[float]](), dict[str, tuple[float, float, float]]()
    for outcome in study.outcomes:
        wall = sum(ledger.wall_s for ledger in outcome.ledgers) or 1.0
        name, found = outcome.case.words, _estimate(outcome, "g")
        rows[name] = [
            sum(ledger.seconds[label] for ledger in outcome.ledgers) / wall for label in LABELS
        ]
        marks[name] = found.mean, found.low, found.high
    return stacked_svg(f"{_title(study)}. Mark: G", LABELS, rows, marks)
