"""`holdfast simulate`: what a trace of machines would do to a run, and to other policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from holdfast.cli.dispatch import app as make_app
from holdfast.show.output import (
    check_target,
    explained_out_errors,
    only_writer,
    print_json,
    say,
    write_text,
)
from holdfast_lab.commands.simulate_admission import admission
from holdfast_lab.commands.simulate_mix import mix

RUN = "run"

RunFile = Annotated[Path, typer.Argument(help="the run file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value ...")]
Traces = Annotated[
    list[Path] | None,
    typer.Option(
        help="a file of any kind that `holdfast trace` reads, also of prices or carbon; repeatable"
    ),
]
Zones = Annotated[
    list[str] | None,
    typer.Option(
        "--zone", help="a name for the zone of each file, or the choice of one; repeatable"
    ),
]
Gpu = Annotated[
    str, typer.Option("--gpu", help="a name for the type of device, or the choice of one")
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
        help="holdfast (the default), restart, torchft, bamboo, varuna, parcae or acute; repeatable"
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
    """Replay a trace through a run's plan and policies.

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
    from holdfast_lab.commands.simulate_inputs import StudyInputs
    from holdfast_lab.commands.simulate_show import as_json, comparison_svg, print_outcomes
    from holdfast_lab.engine.asked_study import Asked, study_of

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
    with only_writer(out), explained_out_errors(out or Path()):
        study = study_of(asked, StudyInputs(asked))
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
