"""`holdfast cost`: what runs cost, by kind and by tag, and whether a bill agrees."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Json, named_argument
from holdfast.cli.read_errors import explain_read_errors
from holdfast.errors import ConfigError, UserError, use_one_of
from holdfast.launch.run.runs import open_run
from holdfast.show.output import print_json, print_table, say
from holdfast_platform.observe.costs import KINDS, Cost, RunUse, costs_by, to_cents, use_of
from holdfast_platform.observe.focus import COSTS, read_bill
from holdfast_platform.observe.reconcile import REMAINDER
from holdfast_platform.observe.reconcile import reconcile as take_apart
from holdfast_platform.observe.runs import RunsRegistry, default_registry

N = TypeVar("N", Decimal, Fraction)

app = make_app("Show what runs cost, and compare that with a bill.")

Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="<run> ...", help="run folders, buckets or run files; none: all of 'runs list'"
    ),
]


def _uses(runs: Sequence[str] | None) -> list[RunUse]:
    """Read the runs that are named, or those of the registry."""
    if runs:
        named = [named_argument("run", word) for word in runs]
    else:
        entries = RunsRegistry(default_registry()).refresh()
        named = [named_argument("run", entry.place) for entry in entries if not entry.error]
        if not named:
            raise UserError(
                "no run is named, and the registry has none",
                where="command line",
                remedy="name run folders, or add them: holdfast runs add FOLDER",
            )
    found: dict[str, RunUse] = {}
    for each in named:
        run = open_run(each)
        if run.is_simulated:
            say(f"{run.place} is simulated: no machine was paid for its hours")
        with explain_read_errors(run.place):
            found[run.place] = use_of(run)
    return list(found.values())


@app.command()
def show(
    runs: Runs = None,
    by: Annotated[str, typer.Option(metavar="TAG", help="sum up by the values of a tag")] = "",
    json: Json = False,
) -> None:
    """Show what runs cost: useful, rework, waiting and idle dollars.

    A row is a run, or with --by a value of a tag. Node-hours come from the journals, prices are
    those that were in force then.

    \b
    Example:
      holdfast cost show runs/a runs/b
      holdfast cost show --by team
    """
    costs = costs_by(_uses(runs), by)
    if json:
        print_json([_as_json(by or "run", key, cost) for key, cost in costs.items()])
        return
    cells = to_cents({(k, kind): v for k, c in costs.items() for kind, v in c.dollars.items()})
    rows = [
        (
            key or f"(no {by})",
            f"{float(cost.hours):,.2f}",
            *(
                "-" if amount is None else f"{amount:,.2f}"
                for amount in _amounts([cells[key, kind] for kind in KINDS], cost)
            ),
        )
        for key, cost in costs.items()
    ]
    print_table(rows, head=(by or "run", "node-hours", *(f"{kind} $" for kind in KINDS), "$"))
    unpriced = sum((cost.unpriced_hours for cost in costs.values()), Fraction(0))
    if unpriced:
        say(f"{float(unpriced):,.2f} node-hours have no price (plan.cluster), and are not in it")


def _as_json(name: str, key: str, cost: Cost) -> dict[str, Any]:
    amounts = _amounts(list(cost.dollars.values()), cost)
    *dollars, total = (None if amount is None else float(amount) for amount in amounts)
    hours = {"node_hours": float(cost.hours), "unpriced_hours": float(cost.unpriced_hours)}
    return {name: key, **hours, "usd": dict(zip(KINDS, dollars, strict=True)), "total_usd": total}


def _amounts(by_kind: Sequence[N], cost: Cost) -> list[N | None]:
    """Return the amounts by kind, and their sum; each is None if no hour has a price."""
    if cost.hours and cost.hours == cost.unpriced_hours:
        return [None] * (len(by_kind) + 1)
    amounts: list[N | None] = list(by_kind)
    amounts.append(sum(by_kind[1:], by_kind[0]))
    return amounts


@app.command()
def reconcile(
    bill: Annotated[Path, typer.Argument(metavar="<bill.csv>", help="in the form of FOCUS 1.x")],
    runs: Runs = None,
    column: Annotated[str, typer.Option(help=f"the cost to take: {', '.join(COSTS)}")] = COSTS[0],
    within: Annotated[
        float, typer.Option(min=0.0, help="US dollars of a remainder that is taken as none")
    ] = 0.0,
    json: Json = False,
) -> int:
    """Take a bill apart by runs, to the cent. Exit code 1 if a remainder is left.

    A machine is found by ResourceId or ResourceName: HOLDFAST_RESOURCE_ID of the node, or its name.
    The remainder was billed for the machines of the runs, and no run explains it. It is time
    outside of the runs, charges that are not by the hour, taxes and credits.

    \b
    Example:
      holdfast cost reconcile bill.csv runs/a runs/b
    """
    if column not in COSTS:
        raise ConfigError(
            f"{column!r} is no cost of a bill", where="--column", remedy=use_one_of(COSTS, column)
        )
    charges, unread = read_bill(bill, column)
    found = take_apart(charges, _uses(runs))
    cents = to_cents(found.parts)
    left = sum((v for k, v in cents.items() if k[0] in REMAINDER), Decimal("0.00"))
    if json:
        print_json(
            {
                "total": str(to_cents({"": found.total})[""]),
                "parts": [{"of": key, "usd": str(value)} for key, value in cents.items() if value],
                "remainder": str(left),
                "runs": {
                    place: {
                        "billed": str(to_cents({"": run.total})[""]),
                        "journal": str(to_cents({"": run.journal})[""]),
                        "unpriced_hours": float(run.unpriced_hours),
                        "unbilled_hours": float(run.unbilled_hours),
                    }
                    for place, run in found.runs.items()
                },
            }
        )
        return 1 if abs(left) > Decimal(repr(within)) else 0
    columns = (*KINDS, "by tag")
    rows = []
    for place, run in found.runs.items():
        own = [cents["run", place, kind] for kind in columns]
        journal = to_cents({"": run.journal})[""]
        machine_time = sum(own[:-1], Decimal(0))
        rows.append((place, *own, sum(own, Decimal(0)), journal, machine_time - journal))
    print_table(rows, head=("run", *columns, "billed $", "journal $", "difference"))
    print()
    rest = [(" ".join(key), value) for key, value in cents.items() if key[0] != "run" and value]
    print_table([*rest, ("the bill", sum(cents.values(), Decimal(0)))], head=("not of a run", "$"))
    print(f"\nremainder: ${left:,.2f} of machines of these runs, which no run explains")
    for place, run in found.runs.items():
        if run.unbilled_hours:
            say(f"{place}: {float(run.unbilled_hours):,.4g} node-hours are in no row of the bill")
        if run.unpriced_hours:
            say(
                f"{place}: {float(run.unpriced_hours):,.4g} node-hours have no price in its journal"
            )
    if unread:
        say(unread)
    return 1 if abs(left) > Decimal(repr(within)) else 0
