"""`holdfast plan`: which layout a run would get on which machines, and what that costs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, Overrides, RunFile, refuse_beside
from holdfast.cli.plan_alternatives import print_alternatives
from holdfast.cli.plan_request import PlanRequest, read_plan_request
from holdfast.cli.plan_rounds import print_rounds, read_round_request
from holdfast.cli.plan_table import (
    loss_as_json,
    neighbours_as_json,
    next_plans_as_json,
    plan_as_json,
    print_comparison,
    print_loss,
    print_neighbours,
    print_next_plans,
    print_plan,
    print_timeline,
    write_timeline,
)
from holdfast.errors import ConfigError
from holdfast.plan.explain.what_if import FORMS, after_loss
from holdfast.show.output import print_json, say

_NEXT_KEY = re.compile(r",(?=[\w.]+=)")  # The comma between two overrides, and not that of a list

app = make_app("Show which layout a run would get, and what that costs. Starts nothing.")


@app.command()
def plan(
    run_file: RunFile,
    overrides: Overrides = None,
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
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--compare", help="two run files, or two sets of overrides as layout.tp=8,layout.pp=2"
        ),
    ] = None,
    what_if: Annotated[
        str | None, typer.Option("--what-if", help=f"what would be left: {FORMS}")
    ] = None,
    sites: Annotated[
        str,
        typer.Option(
            "--sites",
            help="outer.learners: sites as SITESxWORKERS@MBIT_S,LATENCY_MS in place of "
            "cluster.sites, for example 2x1@100,20",
        ),
    ] = "",
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured", help="outer.learners: a run whose inner steps give the seconds of one"
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="write one step's timeline as SVG")
    ] = None,
    json: Json = False,
) -> None:
    """Choose the layout of a run, and show its runners-up, time, memory, money and energy.

    Degrees that the run file gives are kept. Starts nothing and needs no device. With
    outer.learners, it shows the rounds of its sites: their time, bytes and money by codec.

    \b
    Example:
      holdfast plan run.yaml
      holdfast plan run.yaml --cluster 16x8xH100-80
      holdfast plan run.yaml layout.tp=8 --cluster cluster.yaml --objective tokens_per_usd
      holdfast plan run.yaml --cluster 16x8xH100-80 --what-if lost=3 --svg step.svg
      holdfast plan run.yaml --cluster 8xH100-80 --compare layout.tp=8 layout.pp=4,layout.tp=2
      holdfast plan run.yaml outer.learners=4 --sites 2x1@100,20
    """
    asked = [*(overrides or []), *([f"plan.objective={objective}"] if objective else [])]
    if compare is not None:
        if svg is not None or what_if is not None:
            raise ConfigError(
                "--compare shows two plans, and --svg and --what-if are about one",
                where="--compare",
                remedy="use them in a call of their own",
            )
        _compare(run_file, asked, cluster or "", compare, json=json)
        return
    rounds = read_round_request(run_file, asked, cluster or "", sites, measured)
    if rounds is not None:
        refuse_beside("outer.learners", {"--what-if": what_if, "--svg": svg})
        print_rounds(rounds, ["holdfast", "train", str(run_file), *asked], json=json)
        return
    request = read_plan_request(run_file, asked, cluster or "")
    if what_if is not None:  # a loss that cannot be is refused before the plan is printed
        after_loss(request.plan.problem.cluster, what_if)
    for note in request.notes:
        say(note)
    if json:
        value = plan_as_json(request) | {
            "neighbours": neighbours_as_json(request),
            "next_plans": next_plans_as_json(request),
        }
        if what_if is not None:
            value["what_if"] = loss_as_json(request, what_if)
        print_json(value)
    else:
        print_plan(request)
        print_timeline(request)
        print_neighbours(request)
        print_next_plans(request)
        if what_if is not None:
            print_loss(request, what_if)
        _print_next(request, run_file, asked, cluster)
    if svg is not None:
        write_timeline(request, svg)


def _print_next(
    request: PlanRequest, run_file: Path, asked: list[str], cluster: str | None
) -> None:
    """Print better layouts of other objectives, and the command that trains the chosen one."""
    place = ["--cluster", cluster] if cluster else []

    def plan_with(override: str) -> str:
        key = override.partition("=")[0]
        rest = [each for each in asked if each.partition("=")[0] != key]
        return shlex.join(["holdfast", "plan", str(run_file), *place, *rest, override])

    print_alternatives(request, plan_with)
    auto = [] if request.loaded.config.layout.mode == "auto" else ["layout.mode=auto"]
    if cluster:  # other machines than this one
        place = ["--on", "slurm", f"plan.cluster={cluster}"]
        words = shlex.join(["holdfast", "launch", str(run_file), *place, *asked, *auto])
        print(f"next: {words} (or --on ray, kubernetes, ssh)")
        return
    print(f"next: {shlex.join(['holdfast', 'train', str(run_file), *asked, *auto])}")


def _compare(
    run_file: Path, asked: list[str], cluster: str, both: tuple[str, str], *, json: bool
) -> None:
    """Print two plans part by part: of two run files, or of one with other overrides."""
    requests = [(text, _request_of(run_file, asked, cluster, text)) for text in both]
    for note in dict.fromkeys(note for _, request in requests for note in request.notes):
        say(note)
    if json:
        print_json({text: plan_as_json(request) for text, request in requests})
    else:
        print_comparison(requests)


def _request_of(run_file: Path, asked: list[str], cluster: str, text: str) -> PlanRequest:
    if "=" in text and not Path(text).exists():
        return read_plan_request(run_file, [*asked, *_NEXT_KEY.split(text)], cluster)
    return read_plan_request(Path(text), asked, cluster)
