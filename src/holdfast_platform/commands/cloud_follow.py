"""`holdfast cloud follow` and `end`: a run's instances at EC2, by the cheapest mix."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from holdfast.api.start import SCREEN
from holdfast.cli.launch import for_all_nodes, launch_request
from holdfast.config.loading.load import load_config
from holdfast.errors import HoldfastError, UserError
from holdfast.events import RunFinished
from holdfast.launch.owners.owner import LaunchRequest
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import run_folder_of
from holdfast.launch.start.begin import Start, begin_run
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.regions import refuse_region
from holdfast.plan.catalogue import CATALOGUE_FILE, MachineType, Offer, load_catalogue
from holdfast.report.history.progress import RunProgress
from holdfast.report.ledger.ordering import order_records
from holdfast.show.output import say
from holdfast.wire.journal import read_journal
from holdfast.wire.secret import SECRET_SOURCE_VARIABLE, open_secret
from holdfast.wire.secret_managers.aws import AwsService
from holdfast.wire.secret_managers.request import SecretManagerError, ask
from holdfast.wire.store.run_location import store_of_run
from holdfast_platform.clouds.ec2 import Ec2Fleet, InstanceSettings
from holdfast_platform.clouds.follow import Follower, Goal, Progress
from holdfast_platform.clouds.job_specs import join_line

RunFile = Annotated[Path, typer.Argument(help="the run file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value ...")]
Machine = Annotated[str, typer.Option(help="EC2's type of machine, a row of the catalogue")]
Region = Annotated[str, typer.Option(help="such as us-east-1; left out: AWS_REGION")]


def follow(
    run_file: RunFile,
    work: Annotated[float, typer.Option(min=1e-6, help="hours of one node for the entire run")],
    machine: Machine,
    image: Annotated[str, typer.Option(help="AMI with Holdfast")],
    secret: Annotated[str, typer.Option(help="the run's secret in AWS Secrets Manager")],
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, max=1024, help="most nodes at a time")] = 1,
    least: Annotated[int, typer.Option(min=1, help="least nodes")] = 1,
    finish_by: Annotated[
        float | None,
        typer.Option(min=0.0, help="hours from the first start of this command; none: no deadline"),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="US dollars, at which all nodes end; none: all")
    ] = None,
    change: Annotated[
        float, typer.Option(min=0.0, help="hours that a change of nodes costs the run")
    ] = 0.05,
    every: Annotated[float, typer.Option(min=0.1, help="seconds between two choices")] = 60.0,
    region: Region = "",
    subnet: Annotated[str, typer.Option(help="of the instances; left out: the account's")] = "",
    profile: Annotated[
        str, typer.Option(help="instance profile that reads the bucket and the secret")
    ] = "",
    catalogue: Annotated[
        Path, typer.Option(help="prices, read again before each choice")
    ] = CATALOGUE_FILE,
    ask_prices: Annotated[
        bool, typer.Option("--ask-prices", help="ask EC2 for spot prices in place of the file's")
    ] = False,
) -> int:
    """Order and end a run's EC2 instances by the cheapest mix.

    It works until the run is finished.

    The run must lie in a bucket. Prices, instances and progress are read before each choice. A
    reclaimed node is replaced. The mix changes only if that saves 10 %. Ctrl-C ends this command
    and no instance; start the command again to take them over, or end them with 'holdfast cloud
    end'. At the end of the run, and at --budget, all instances end.

    \b
    Example:
      holdfast cloud follow run.yaml --work 40 --machine p5.48xlarge --image ami-0a --secret me \\
        --nodes 4 --finish-by 24 --budget 2000
    """
    from holdfast.machine.hardware import detect_hardware

    refuse_too_many(least, nodes)
    service = _service(region)
    row = _row(catalogue, machine, service.region)
    given = [*(overrides or []), f"launch.nodes={nodes}"]
    loaded = for_all_nodes(load_config(run_file, given), devices=row.count)
    refuse_region(loaded.config.governance, service.region)
    folder = run_folder_of(loaded.config)
    refuse_folder(launch_request(loaded, folder), loaded.where("folder"))
    watch = HolderWatch(folder, say)
    facts = Facts(detect_hardware(), several=True)
    begun = begin_run(Start(loaded, facts, folder, watch, SCREEN, yes=True))
    open_secret(folder, say=say)
    request = launch_request(begun.loaded, folder)
    fleet = Ec2Fleet(service, request.location, InstanceSettings(image, machine, subnet, profile))

    def offers() -> Sequence[Offer]:
        found = _row(catalogue, machine, service.region).offers(nodes)
        price = fleet.spot_price() if ask_prices else None
        return [replace(o, price=price) if o.spot and price is not None else o for o in found]

    follower = Follower(
        fleet,
        Goal(work, least, nodes, finish_by, change, budget),
        folder,
        offers,
        lambda: _progress(folder, begun.loaded.config.train.steps),
        lambda node: _script(request, node, service.region, secret),
        lambda line: say(f"{datetime.now():%H:%M:%S} {line}"),
    )
    where = ["--region", region] if region else []
    end_words = ["holdfast", "cloud", "end", str(run_file), *(overrides or []), *where]
    return _loop(follower, every, shlex.join(end_words))


def end(run_file: RunFile, overrides: Overrides = None, region: Region = "") -> int:
    """End the EC2 instances that 'cloud follow' ordered for a run.

    \b
    Example:
      holdfast cloud end run.yaml
    """
    config = load_config(run_file, overrides or []).config
    fleet = Ec2Fleet(_service(region), config.run_place, InstanceSettings("", ""))
    try:
        live = [each for each in fleet.instances() if each.is_live]
        fleet.end([each.id for each in live])
    except SecretManagerError as error:
        raise _refused(error) from None
    for each in live:
        say(f"ended {each.node} ({each.id})")
    if not live:
        say("no instance of this run is left")
    return 0


def _loop(follower: Follower, every: float, end_command: str) -> int:
    """Follow until the end. Whatever ends the loop early, say which instances are left."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        while (code := follower.round()) is None:
            time.sleep(every)
        return code
    except BaseException as error:
        _say_what_runs(follower, end_command)
        if isinstance(error, KeyboardInterrupt):
            return 130
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _say_what_runs(follower: Follower, end_command: str) -> None:
    try:
        for line in follower.running_words():
            say(line)
    except (SecretManagerError, HoldfastError) as error:
        say(f"the cloud does not say what is at work ({error})")
    say(f"take them over with the same command; end them with: {end_command}")


def _service(region: str) -> AwsService:
    environ = dict(os.environ) | ({"AWS_REGION": region} if region else {})
    try:
        return AwsService("ec2", environ, ask)
    except SecretManagerError as error:
        raise _refused(error) from None


def _refused(error: SecretManagerError) -> UserError:
    return UserError(
        f"EC2 refuses or does not answer ({error})",
        where="--region",
        remedy="name the region, and give credentials as AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY",
    )


def _row(catalogue: Path, machine: str, region: str) -> MachineType:
    rows = [e for e in load_catalogue(catalogue) if e.cloud == "aws" and e.type == machine]
    for each in rows:
        if each.region == region:
            return each
    known = ", ".join(sorted({e.region for e in rows}))
    raise UserError(
        f"the catalogue has no prices of {machine} in {region}",
        where="--region" if rows else "--machine",
        remedy=f"use one of {known}, or name a file that has them with --catalogue"
        if rows
        else "see 'holdfast cloud offers --cloud aws', or name a file with --catalogue",
    )


def refuse_too_many(least: int, nodes: int) -> None:
    """Raises UserError if --least is above --nodes."""
    if least > nodes:
        raise UserError(
            f"{least} nodes are more than the {nodes} of --nodes",
            where="--least",
            remedy=f"use {nodes} or less",
        )


def refuse_folder(request: LaunchRequest, where: str) -> None:
    if "://" not in request.location:
        raise UserError(
            "machines of a cloud cannot reach a folder of this machine",
            where=where,
            remedy="use a bucket, such as folder=s3://BUCKET/RUN",
        )


def _script(request: LaunchRequest, node: str, region: str, secret: str) -> str:
    """Return what an instance runs when it starts."""
    return (
        "#!/bin/sh\n"
        f"export AWS_REGION={shlex.quote(region)}\n"
        f"export {SECRET_SOURCE_VARIABLE}={shlex.quote(f'aws:{secret}')}\n"
        f"{join_line(request, node)}\n"
    )


def _progress(folder: Path, steps: int) -> Progress:
    found, is_finished = RunProgress(steps), False
    for record in order_records(read_journal(store_of_run(folder))):
        found.observe(record)
        is_finished = is_finished or (
            isinstance(record.event, RunFinished) and record.event.step >= steps
        )
    at_work = {node for node, is_there in found.nodes.items() if is_there}
    return Progress(found.step, steps, frozenset(at_work | found.spares), is_finished)
