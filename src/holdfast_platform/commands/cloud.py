"""`holdfast cloud`: what clouds sell, the cheapest mix for a run, and jobs of managed services."""

from __future__ import annotations

import json as json_module
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.launch import for_all_nodes, launch_request
from holdfast.config.loading import yaml_tree
from holdfast.config.loading.load import load_config
from holdfast.errors import UserError, use_one_of
from holdfast.launch.run.runs import run_folder_of
from holdfast.launch.start.regions import refuse_region
from holdfast.plan.catalogue import CATALOGUE_FILE, MachineType, cheapest_first, load_catalogue
from holdfast.report.formatting import format_duration
from holdfast.show.output import print_json, print_table, say
from holdfast_platform.clouds.job_specs import JOBS, ServiceSettings
from holdfast_platform.clouds.mix import Mix, Need, choose_mix
from holdfast_platform.commands.cloud_follow import end, follow, refuse_folder, refuse_too_many
from holdfast_platform.commands.cloud_trials import trials

NEED_SECRET = ("sagemaker", "vertex", "azure-ml", "runpod")
NEED_MACHINE = ("sagemaker", "vertex", "azure-ml")
_HOUR_S = 3600

Catalogue = Annotated[
    Path, typer.Option(help="a CSV of the same form, in place of the one that comes along")
]
Accelerator = Annotated[str, typer.Option(help="one kind alone, such as H100")]
Cloud = Annotated[str, typer.Option(help="aws or gcp; left out: both")]

app = make_app("Show what clouds sell, and write jobs for managed services.")


@app.command()
def offers(
    accelerator: Accelerator = "",
    cloud: Cloud = "",
    catalogue: Catalogue = CATALOGUE_FILE,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """List types of machines, the cheapest first.

    The order is that of the spot price for the speed.
    Prices are as old as their row says. A lost share is what the cloud takes back in a month.

    \b
    Example:
      holdfast cloud offers --accelerator H100
    """
    found = _types(catalogue, accelerator, cloud)
    if json:
        print_json([asdict(each) for each in found])
        return
    rows = [
        (
            f"{each.cloud} {each.region}",
            each.type,
            f"{each.count} {each.accelerator}",
            f"{each.spot:.2f}",
            f"{each.on_demand:.2f}",
            f"{1000 * each.spot / each.tflops:.2f}",
            f"{each.reclaimed_per_month:.0%}",
            each.date.isoformat(),
        )
        for each in found
    ]
    prices = ("spot $/h", "on demand", "spot $/PFLOP/s h")
    print_table(rows, ("region", "type", "devices", *prices, "lost", "as of"))


@app.command()
def mix(
    work: Annotated[float, typer.Option(min=0.0, help="node-hours that are left")],
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="most nodes at a time")],
    finish_by: Annotated[
        float | None, typer.Option(min=0.0, help="hours from now; none: no deadline")
    ] = None,
    least: Annotated[int, typer.Option(min=1, help="least nodes")] = 1,
    spot: Annotated[
        int | None, typer.Option(min=0, help="spot nodes that the cloud has now; none: all")
    ] = None,
    accelerator: Accelerator = "",
    cloud: Cloud = "",
    catalogue: Catalogue = CATALOGUE_FILE,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> int:
    """Choose the cheapest nodes that end in time.

    For each type: how many spot and how many on-demand nodes.
    Without a deadline the run gets all nodes. Exit code 1 if no mix ends in time.

    \b
    Example:
      holdfast cloud mix --work 400 --nodes 8 --finish-by 72 --accelerator H100
    """
    if not math.isfinite(work):
        raise UserError("the work is not finite", where="--work", remedy="use a number of hours")
    refuse_too_many(least, nodes)
    need = Need(work, float("inf") if finish_by is None else finish_by, least, nodes)
    chosen: list[tuple[MachineType, Mix]] = []
    for each in _types(catalogue, accelerator, cloud):
        sold = [
            replace(offer, available=spot) if spot is not None and offer.spot else offer
            for offer in each.offers(nodes)
        ]
        if (found := choose_mix(sold, need)) is not None:
            chosen.append((each, found))
    chosen.sort(key=lambda pair: (not pair[1].in_time, pair[1].cost))
    if json:
        print_json(
            [
                {"cloud": each.cloud, "region": each.region, "type": each.type} | asdict(found)
                for each, found in chosen
            ]
        )
    else:
        rows = [
            (
                f"{each.cloud} {each.region} {each.type}",
                ", ".join(f"{n} {name.rpartition('/')[2]}" for name, n in found.nodes.items()),
                format_duration(found.hours * _HOUR_S),
                f"{found.cost:,.0f}",
                found.reason if found.in_time else f"TOO LATE: {found.reason}",
            )
            for each, found in chosen
        ]
        print_table(rows, ("machines", "nodes", "time", "$", "why"))
    return 0 if chosen and chosen[0][1].in_time else 1


@app.command()
def spec(
    run_file: Annotated[Path, typer.Argument(help="the run file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    service: Annotated[str, typer.Option("--for", help=f"one of {', '.join(JOBS)}")] = "",
    image: Annotated[str, typer.Option(help="container image with Holdfast")] = "",
    machine: Annotated[
        str, typer.Option(help="type of node, as the service calls it (Azure ML: its cluster)")
    ] = "",
    accelerator: Annotated[str, typer.Option(help="such as H100; left out: CPUs")] = "",
    count: Annotated[int, typer.Option(min=0, help="accelerators of a node")] = 0,
    region: Annotated[str, typer.Option(help="left out: the service's choice")] = "",
    role: Annotated[str, typer.Option(help="SageMaker: ARN; Vertex: service account")] = "",
    spot: Annotated[bool, typer.Option("--spot", help="machines that may be taken back")] = False,
    hours: Annotated[float, typer.Option(min=0.1, help="the service ends the job then")] = 24.0,
    secret: Annotated[
        str, typer.Option(help="the run's secret in the cloud's own manager of secrets")
    ] = "",
) -> None:
    """Write the job of a service that starts a run's nodes.

    The service's own tools submit it.
    Each node runs 'holdfast join'. Begin the run first, on a machine of yours, with 'holdfast
    launch' or 'holdfast train'. Then its description and its dataset lie in the bucket.

    \b
    Example:
      holdfast cloud spec run.yaml --for skypilot --image me/holdfast --accelerator H100 --count 8
    """
    if service not in JOBS:
        raise UserError(
            f"{service!r} is no service that is known", where="--for", remedy=use_one_of(list(JOBS))
        )
    for option, value, is_needed in (
        ("--image", image, True),
        ("--secret", secret, service in NEED_SECRET),
        ("--machine", machine, service in NEED_MACHINE),
        ("--role", role, service == "sagemaker"),
    ):
        if is_needed and not value:
            raise UserError(f"{service} needs {option}", where=option, remedy=f"add {option} VALUE")
    loaded = for_all_nodes(load_config(run_file, overrides or []), devices=count)
    refuse_region(loaded.config.governance, region)
    request = launch_request(loaded, run_folder_of(loaded.config))
    refuse_folder(request, loaded.where("folder"))
    settings = ServiceSettings(
        image, machine, accelerator, count, region, role, spot, hours, secret
    )
    body = JOBS[service](request, settings)
    is_yaml = service in ("skypilot", "azure-ml")  # as the service's tool reads it
    sys.stdout.write(yaml_tree.dump(body) if is_yaml else json_module.dumps(body, indent=2) + "\n")
    if service == "sagemaker" and spot:
        say("SageMaker takes back all spot nodes of a job at once; the run resumes after it")


app.command()(follow)
app.command()(end)
app.command()(trials)


def _types(catalogue: Path, accelerator: str, cloud: str) -> list[MachineType]:
    found = load_catalogue(catalogue)
    kept = [e for e in found if accelerator in ("", e.accelerator) and cloud in ("", e.cloud)]
    if not kept:
        kinds, clouds = sorted({e.accelerator for e in found}), sorted({e.cloud for e in found})
        raise UserError(
            "no such machine is in the catalogue",
            where="--accelerator" if accelerator else "--cloud",
            remedy=f"use one of {', '.join(kinds)}; clouds: {', '.join(clouds)}",
        )
    return cheapest_first(kept)
