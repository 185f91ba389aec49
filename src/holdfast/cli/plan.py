"""`holdfast plan`: which layout a run would get on which machines, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.output import print_json, say
from holdfast.cli.plan_request import PlanRequest, read_plan_request
from holdfast.cli.plan_table import plan_as_json, print_plan

app = make_app("Show which layout a run would get, and what that costs. Starts nothing.")


@app.command()
def plan(
    run_file: Annotated[Path, typer.Argument(help="the run file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            help="the machines: a cluster file, a short form as 16x8xH100-80, or here; none: "
            "plan.cluster, or this machine",
        ),
    ] = None,
    objective: Annotated[
        str | None, typer.Option("--objective", help="the same as plan.objective=WORD")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Choose the layout of a run, and show its runners-up, time, memory, money and energy.

    Degrees that the run file gives are kept. Starts nothing and needs no device.

    \b
    Example:
      holdfast plan run.yaml
      holdfast plan run.yaml --cluster 16x8xH100-80
      holdfast plan run.yaml layout.tp=8 --cluster cluster.yaml --objective tokens_per_usd
    """
    asked = [*(overrides or []), *([f"plan.objective={objective}"] if objective else [])]
    request = read_plan_request(run_file, asked, cluster or "")
    for note in request.notes:
        say(note)
    _show(request, json=json)


def _show(request: PlanRequest, *, json: bool) -> None:
    if json:
        print_json(plan_as_json(request))
    else:
        print_plan(request)
