"""`holdfast cloud trials`: one job of SageMaker for each setting of a run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from holdfast.api.start import SCREEN
from holdfast.cli.launch import for_all_nodes, launch_request
from holdfast.config.loading.load import load_config
from holdfast.errors import UserError
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.runs import run_folder_of
from holdfast.launch.start.begin import Start, begin_run
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.regions import refuse_region
from holdfast.show.output import print_table, say
from holdfast.wire.secret import open_secret
from holdfast.wire.secret_managers.aws import AwsService
from holdfast.wire.secret_managers.request import SecretManagerError, ask
from holdfast_platform.clouds.job_specs import ServiceSettings, job_name, sagemaker_job
from holdfast_platform.clouds.sagemaker import ENDED, SageMakerJobs
from holdfast_platform.commands.cloud_follow import refuse_folder

MAX_TRIALS = 100  # SageMaker's default quota of jobs at a time is lower for most types


def trials(
    run_file: Annotated[Path, typer.Argument(help="the run file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    each: Annotated[
        list[str] | None,
        typer.Option("--each", help="key=a,b,c: a trial for each value; repeatable: all pairs"),
    ] = None,
    image: Annotated[str, typer.Option(help="container image with Holdfast")] = "",
    machine: Annotated[str, typer.Option(help="SageMaker's type of node")] = "",
    role: Annotated[str, typer.Option(help="ARN of the role of the jobs")] = "",
    secret: Annotated[str, typer.Option(help="the runs' secret in AWS Secrets Manager")] = "",
    count: Annotated[int, typer.Option(min=0, help="accelerators of a node")] = 0,
    spot: Annotated[bool, typer.Option("--spot", help="machines that may be taken back")] = False,
    hours: Annotated[float, typer.Option(min=0.1, help="the service ends a job then")] = 24.0,
    region: Annotated[str, typer.Option(help="left out: AWS_REGION")] = "",
    stop: Annotated[
        bool, typer.Option("--stop", help="stop the trials that have not ended")
    ] = False,
) -> int:
    """Submit a run's trials as jobs of SageMaker, and show their states.

    With --each, each trial is a run of its own in the bucket, next to the run's place, and one job.
    A trial that was submitted before is left as it is. Without --each, the command shows the
    trials. Exit code 1 if a trial failed.

    \b
    Example:
      holdfast cloud trials run.yaml --each train.optimizer.learning_rate=1e-3,3e-4 \\
        --machine ml.g5.xlarge --image ECR-IMAGE --role ROLE-ARN --secret my-run
      holdfast cloud trials run.yaml
      holdfast cloud trials run.yaml --stop
    """
    given = overrides or []
    first = for_all_nodes(load_config(run_file, given), devices=count)
    asked = launch_request(first, run_folder_of(first.config))
    prefix = job_name(asked)[:50].rstrip("-")
    needed = {"--image": image, "--machine": machine, "--role": role, "--secret": secret}
    if each and (missing := [option for option, value in needed.items() if not value]):
        raise UserError(
            f"a job needs {missing[0]}", where=missing[0], remedy=f"add {missing[0]} VALUE"
        )
    if stop and each:
        raise UserError("--stop submits nothing", where="--each", remedy="leave one of them out")
    grid = _grid(each or [])
    if grid:
        refuse_region(first.config.governance, region or os.environ.get("AWS_REGION", ""))
        refuse_folder(asked, first.where("folder"))
    settings = ServiceSettings(
        image, machine, "", count, region, role, spot=spot, hours=hours, secret=secret
    )
    environ = dict(os.environ) | ({"AWS_REGION": region} if region else {})
    try:
        service = AwsService("sagemaker", environ, ask, host="api.sagemaker")
        jobs = SageMakerJobs(service, prefix)
        before = {trial.job for trial in jobs.trials()}
        for number, chosen in enumerate(grid):
            if f"{prefix}-{number}" in before:
                say(f"{prefix}-{number} was submitted before")
                continue
            _submit(jobs, f"{prefix}-{number}", run_file, given, chosen, settings)
        found = jobs.trials()
        if stop:
            for trial in found:
                if trial.status not in ENDED:
                    jobs.stop(trial.job)
                    say(f"asked SageMaker to stop {trial.job}")
            found = jobs.trials()
    except SecretManagerError as error:
        raise UserError(
            f"SageMaker refuses or does not answer ({error})",
            where="--region",
            remedy="name the region, and give credentials of a user who may create training jobs",
        ) from None
    rows = [
        (each.job, " ".join(f"{k}={v}" for k, v in each.settings.items()), each.status, each.detail)
        for each in found
    ]
    print_table(rows, ("job", "settings", "status", "detail"))
    return 1 if any(trial.status == "Failed" for trial in found) else 0


def _grid(each: Sequence[str]) -> list[dict[str, str]]:
    """Return the settings of each trial; none without --each."""
    axes: dict[str, list[str]] = {}
    for text in each:
        key, _, values = text.partition("=")
        found = [value for value in values.split(",") if value]
        if not key or not found or key in axes or len(set(found)) < len(found):
            raise UserError(
                f"{text!r} names no settings, or some twice",
                where="--each",
                remedy="write KEY=A,B,C once for a key: train.optimizer.learning_rate=1e-3,3e-4",
            )
        axes[key] = found
    grid = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(grid) > MAX_TRIALS:
        raise UserError(
            f"{len(grid)} trials are too many", where="--each", remedy=f"use {MAX_TRIALS} or fewer"
        )
    return grid if axes else []


def _submit(
    jobs: SageMakerJobs,
    job: str,
    run_file: Path,
    given: Sequence[str],
    chosen: Mapping[str, str],
    settings: ServiceSettings,
) -> None:
    """Begin the trial's run in the bucket, then submit its job."""
    from holdfast.machine.hardware import detect_hardware

    words = [*given, *(f"{key}={value}" for key, value in chosen.items())]
    place, mark, query = load_config(run_file, words).config.run_place.partition("?")
    number = job.rpartition("-")[2]
    words.append(f"folder={place.rstrip('/')}-trial-{number}{mark}{query}")
    loaded = for_all_nodes(load_config(run_file, words), devices=settings.count)
    folder = run_folder_of(loaded.config)
    refuse_folder(launch_request(loaded, folder), loaded.where("folder"))
    facts = Facts(detect_hardware(), several=True)
    begun = begin_run(Start(loaded, facts, folder, HolderWatch(folder, say), SCREEN, yes=True))
    open_secret(folder, say=say)
    body = sagemaker_job(launch_request(begun.loaded, folder), settings)
    jobs.create(body | {"TrainingJobName": job, "HyperParameters": dict(chosen)})
    say(f"submitted {job}: {shlex.join(f'{key}={value}' for key, value in chosen.items())}")
