"""`holdfast runs`: find runs by their tags, see what they cost, and raise a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, RunArgument
from holdfast.cli.read_errors import explain_read_errors
from holdfast.errors import ConfigError, UserError
from holdfast.launch.run.runs import open_run
from holdfast.policy.budget import LIMITS, amount, effective_limits
from holdfast.policy.spending import meter_of
from holdfast.show.output import print_json, print_table, say
from holdfast.wire.journal import read_journal
from holdfast.wire.raised_budget import read_raises, write_raise
from holdfast_platform.observe.runs import STATES, RunEntry, RunsRegistry, default_registry

app = make_app("Find runs by their tags, see what they cost, and raise a budget.")

Registry = Annotated[
    Path | None,
    typer.Option(help="the registry's file; none: holdfast/runs.sqlite in $XDG_STATE_HOME"),
]
Places = Annotated[
    list[str],
    typer.Argument(metavar="<place> ...", help="run folder, folder of runs, or a bucket's address"),
]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", help="KEY=VALUE that a run has; may be repeated")
]


def parse_tags(given: Sequence[str] | None) -> dict[str, str]:
    """Return key -> value. Raises ConfigError for a word without an =."""
    found = {}
    for word in given or ():
        key, equal, value = word.partition("=")
        if not (key and equal):
            raise ConfigError(
                f"{word!r} is not KEY=VALUE",
                where="--tag",
                remedy="write a key, =, and the value that the run has",
            )
        found[key] = value
    return found


def _open(registry: Path | None) -> RunsRegistry:
    return RunsRegistry(registry or default_registry())


@app.command()
def add(places: Places, registry: Registry = None) -> None:
    """Remember run folders, or folders with runs in them. New runs there show by themselves.

    \b
    Example:
      holdfast runs add runs
    """
    for place in places:
        found = _open(registry).add(place)
        say(f"{place}: {len(found)} {'run' if len(found) == 1 else 'runs'}")


@app.command()
def forget(places: Places, registry: Registry = None) -> None:
    """Forget places and their runs. Nothing in them changes.

    \b
    Example:
      holdfast runs forget runs
    """
    for place in places:
        if not _open(registry).forget(place):
            raise UserError(
                "the registry does not know this place",
                where=place,
                remedy="see what it knows: holdfast runs list",
            )


@app.command("list")
def list_runs(
    tag: Tags = None,
    state: Annotated[str, typer.Option(help=", ".join(STATES))] = "",
    anew: Annotated[
        bool, typer.Option("--anew", help="read each journal again, even one that has not grown")
    ] = False,
    registry: Registry = None,
    json: Json = False,
) -> None:
    """List the runs in all places that were added, the newest first.

    A row comes from the run's journal, and is read again when that has grown.

    \b
    Example:
      holdfast runs list --tag team=search
    """
    wanted = parse_tags(tag)
    if state and state not in STATES:
        raise ConfigError(
            f"{state} is no state", where="--state", remedy=f"use one of: {', '.join(STATES)}"
        )
    rows = [
        entry
        for entry in _open(registry).refresh(anew=anew)
        if entry.has(wanted) and state in ("", entry.state)
    ]
    if json:
        print_json([asdict(entry) for entry in rows])
        return
    if not rows:
        say("no run is listed: add a folder with holdfast runs add, or give other filters")
    print_table(
        [
            (
                e.place,
                e.state,
                f"{e.step:,} of {e.steps:,}",
                _date(e.began),
                f"{e.node_hours:,.2f}",
                e.cost,
                _words(e),
            )
            for e in rows
        ],
        head=("run", "state", "step", "began", "node-hours", "$", "tags"),
    )
    for entry in rows:
        if entry.error:
            say(f"{entry.place}: {entry.error}")


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M") if at else ""


def _words(entry: RunEntry) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(entry.tags.items()))


@app.command()
def budget(
    run: RunArgument,
    max_cost: Annotated[
        float | None, typer.Option(help="US dollars of all sessions together", min=0.0)
    ] = None,
    max_node_hours: Annotated[
        float | None, typer.Option(help="node-hours of all sessions together", min=0.0)
    ] = None,
    json: Json = False,
) -> None:
    """Show what a run has used of its budget, or raise a limit. A run at work continues with it.

    A limit can only rise. It lies in the run store, so it holds for later sessions, too.

    \b
    Example:
      holdfast runs budget runs/my-run --max-cost 200
    """
    found = open_run(run)
    given = {"max_cost": max_cost, "max_node_hours": max_node_hours}
    raises = {name: value for name, value in given.items() if value is not None}
    with explain_read_errors(found.place):
        limits = effective_limits(found.config.budget, read_raises(found.store))
        for name, value in raises.items():
            if name not in limits:
                raise ConfigError(
                    f"this run has no budget.{name}, so there is nothing to raise",
                    where=f"--{name.replace('_', '-')}",
                    remedy=f"start it with budget.{name}={value:g}",
                )
            if value <= limits[name]:
                raise ConfigError(
                    f"budget.{name} is {limits[name]:g} already, and a limit can only rise",
                    where=f"--{name.replace('_', '-')}",
                    remedy="name a larger number, or stop the run: holdfast down RUN",
                )
        if raises:
            write_raise(found.store, raises)
        spent = meter_of(read_journal(found.store)).spent()
    limits |= raises
    if json:
        print_json({"limits": limits, **asdict(spent)})
        return
    rows = [
        (f"budget.{name}", amount(name, getattr(spent, what)), amount(name, limits[name]))
        if name in limits
        else (f"budget.{name}", amount(name, getattr(spent, what)), "no limit")
        for name, what in LIMITS.items()
    ]
    print_table(rows, head=("limit", "used", "of"))
    if spent.unpriced_hours:
        say(f"{spent.unpriced_hours:.4g} node-hours have no price (plan.cluster)")
