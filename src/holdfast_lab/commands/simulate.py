"""`holdfast simulate`: what a trace of machines would do to a run, and to other policies."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from holdfast.api.progress import LongWork
from holdfast.cli.dispatch import app as make_app
from holdfast.config.loading.load import load_config
from holdfast.plan.objective.energy import pools_without_price
from holdfast.show.output import check_target, print_json, print_table, say, write_text
from holdfast_lab.charts.study_charts import stacked_svg
from holdfast_lab.commands.output_paths import explained_out_errors, only_writer
from holdfast_lab.commands.simulate_admission import admission
from holdfast_lab.commands.simulate_mix import mix
from holdfast_lab.commands.trace import Gpu, Zones, read_each
from holdfast_lab.engine.interfaces import LABELS
from holdfast_lab.engine.study import METRICS, Estimate, Outcome, estimate
from holdfast_lab.traces.node_changes import ReadOptions

if TYPE_CHECKING:
    from holdfast_lab.engine.asked_study import StudyResult
    from holdfast_lab.traces.events import EventStream

RUN = "run"

RunFile = Annotated[Path, typer.Argument(help="the run file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value ...")]
Traces = Annotated[
    list[Path] | None,
    typer.Option(
        help="a file of any kind that `holdfast trace` reads, also of prices or carbon; repeatable"
    ),
]
Maker = Annotated[
    Literal["spot", "gang", "lives", "failures"] | None,
    typer.Option(help="a synthetic trace in place of a file; one for each seed"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="name=value: a setting of docs/studies/simulate.md, or of the generator of --make; "
        "repeatable",
    ),
]
Days = Annotated[
    float | None,
    typer.Option(min=0.01, max=36500, help="length of --make in days; default: the generator's"),
]
Machines = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="a cluster file, or NODESxDEVICESxNAME; default: plan.cluster, or this machine",
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        help="holdfast (the default), powered-down, steady-cap, carbon-cap, carbon-pause, "
        "carbon-cap-pause "
        "(docs/studies/energy.md), restart, torchft, bamboo, varuna, parcae or acute; repeatable"
    ),
]
Sweeps = Annotated[
    list[str] | None,
    typer.Option(help="key=a,b,c: a setting of --set, or a key of the run file; repeatable"),
]
Seeds = Annotated[int, typer.Option(min=1, help="histories to simulate")]
UntilDone = Annotated[
    bool, typer.Option("--until-done", help="repeat the trace until the run is done")
]
Out = Annotated[
    Path | None,
    typer.Option(help="a new folder: a run for `holdfast report`, and each finished replay"),
]
JournalOf = Annotated[
    Path | None,
    typer.Option("--journal", help="a run whose own recoveries price the rungs of the ladder"),
]
Svg = Annotated[Path | None, typer.Option(help="a file to write: the comparison as a chart")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


class RunFileFirst(TyperGroup):
    """A group whose first argument may be a run file in place of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "-h", "--help"):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


app = make_app(
    "Simulate a run on machines that come and go: holdfast simulate RUN --trace FILE. "
    "Starts nothing."
)
app.info.cls = RunFileFirst


@app.callback()
def simulate() -> None:
    """Simulate a run on machines that come and go: holdfast simulate RUN --trace FILE."""


@app.command(RUN)
def run_file(
    run_file: RunFile,
    overrides: Overrides = None,
    trace: Traces = None,
    zone: Zones = None,
    gpu: Gpu = "",
    make: Maker = None,
    given: Settings = None,
    days: Days = None,
    cluster: Machines = "",
    policy: Policies = None,
    sweep: Sweeps = None,
    seeds: Seeds = 1,
    until_done: UntilDone = False,
    journal: JournalOf = None,
    out: Out = None,
    svg: Svg = None,
    json: Json = False,
) -> None:
    """Replay a trace through a run's plan and policies. For a run with outer.learners, replay the
    rounds of its sites.

    The table has kept tokens, goodput, lost work, recoveries, traffic, money and energy. With more
    than one history it has their means, and 95 % intervals by bootstrap. docs/studies/simulate.md
    says how time is counted, and what the model leaves out. A table of prices or carbon is one more
    --trace.

    \b
    Example:
      holdfast simulate run.yaml --cluster 16x8xA100-80 --trace p3.csv
      holdfast simulate run.yaml --trace p3.csv --policy holdfast --policy restart --seeds 5
      holdfast simulate run.yaml --trace p3.csv --sweep store_interval_s=60,300,900
      holdfast simulate run.yaml --make failures --days 90 --out simulated
    """
    from holdfast.cli.plan_request import read_plan_request  # slow to import
    from holdfast_lab.commands.simulate_rounds import refuse_options, simulate_rounds
    from holdfast_lab.engine.asked_study import Asked, refuse_no_trace, study_of

    def read() -> list[EventStream]:
        return read_each([*asked.traces], ReadOptions(gpu=gpu), [*asked.zones])

    if svg is not None:
        check_target(svg, "--svg", [run_file, *(trace or ()), Path(cluster)])
    asked = Asked(
        run_file=run_file,
        overrides=tuple(overrides or ()),
        cluster=cluster,
        traces=tuple(trace or ()),
        zones=tuple(zone or ()),
        gpu=gpu,
        made=make or "",
        days=days,
        given=tuple(given or ()),
        policies=tuple(policy or ("holdfast",)),
        sweeps=tuple(sweep or ()),
        seeds=seeds,
        is_until_done=until_done,
        journal=journal,
        out=out,
    )
    if load_config(run_file, list(asked.overrides)).config.outer.is_on:
        refuse_options(asked, {"--svg": svg})
        refuse_no_trace(asked)
        simulate_rounds(asked, read(), json=json)
        return
    with only_writer(out), explained_out_errors(out or Path()):
        study = study_of(
            asked,
            lambda keys: read_plan_request(run_file, [*asked.overrides, *keys], cluster),
            read,
            LongWork("planning"),
        )
    for note in study.notes:
        say(note)
    if json:
        print_json(as_json(study))
    else:
        print_outcomes(study)
    if svg is not None:
        write_text(svg, comparison_svg(study))


app.command()(mix)
app.command()(admission)

# --- what it prints -------------------------------------------------------------------------------
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
_LEGEND = (
    "goodput: share of the time that trained tokens that are kept. G: kept tokens, of those that "
    "the nodes alive\ncould train without failures. RPO p95: seconds of work that a loss takes; "
    "RTO p95: seconds until training\ncontinues; 95 % of the losses are below. saved: written to "
    "stores"
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
    print(_LEGEND)
    if not study.asked.is_until_done:
        steps = study.request.loaded.config.train.steps
        print(
            f"sums are of the complete history, not of the run's {steps:,} steps: for those add "
            "--until-done"
        )
    print(f"next: {shlex.join(_next_plan(study))}")


def _next_plan(study: StudyResult) -> list[str]:
    """The command of the run's plan. After losses it asks for goodput in place of time, because
    the layout of the fastest step may lose most to them."""
    asked, overrides = study.asked, list(study.asked.overrides)
    has_losses = any(ledger.interruptions for each in study.outcomes for ledger in each.ledgers)
    if has_losses and study.request.loaded.config.plan.objective == "time":
        overrides = [each for each in overrides if not each.startswith("plan.objective=")]
        overrides.append("plan.objective=goodput")
    where = ["--cluster", asked.cluster] if asked.cluster else []
    return ["holdfast", "plan", str(asked.run_file), *where, *overrides]


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
    """What is simulated; None for dollars if no price is known."""
    unpriced = pools_without_price(study.request.problem.cluster)
    return {
        "run": study.request.loaded.config.name,
        "machines": study.request.machines.name,
        "trace": study.trace,
        "outcomes": [
            {
                "policy": outcome.case.words,
                "estimates": {
                    metric: None
                    if unpriced and metric.startswith("usd") and not found.mean
                    else {"mean": found.mean, "low": found.low, "high": found.high}
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
