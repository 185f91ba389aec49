"""`holdfast launch`: have the owner of machines start a run on several nodes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.api.early_end import early_signals_answered
from holdfast.api.start import SCREEN
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import Fresh, Overrides, RunFile, Yes
from holdfast.config.loading.fields import leaves
from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.config.run import RunConfig
from holdfast.config.sections.cluster import AUTO
from holdfast.config.sections.launch import LaunchConfig
from holdfast.errors import RunFolderError
from holdfast.launch.owners.owner import (
    JOB_FILE,
    OWNERS,
    CheckingOwner,
    LaunchRequest,
    OwnedJob,
    OwnerAwayError,
    open_owner,
)
from holdfast.launch.run.bucket_run import place_word
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.launch_claim import claim_launch
from holdfast.launch.run.run_folder import description_put_back
from holdfast.launch.run.runs import read_resolved, run_folder_of
from holdfast.launch.start.begin import Start, begin_run
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.machine import checked_layouts
from holdfast.launch.start.regions import refuse_other_regions
from holdfast.plan.placing.layouts import max_workers
from holdfast.show.output import print_json, say
from holdfast.wire.secret import given_secret_file, open_secret
from holdfast.wire.store.run_location import bucket_of_run

app = make_app("Have the owner of machines start a run on several nodes.")

KEYS_OF_NODES = ("cluster.interface", "cluster.gloo_interface", "checkpoint.peer_interface")
"""Keys that a node does not take from the run's description; `launch` passes them on to each."""


@app.command()
def launch(
    run_file: RunFile,
    overrides: Overrides = None,
    on: Annotated[str, typer.Option(help=f"{', '.join(OWNERS)}; left out: launch.on")] = "",
    nodes: Annotated[
        int | None, typer.Option(help="nodes of the run; left out: launch.nodes")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be submitted, and submit nothing")
    ] = False,
    fresh: Fresh = False,
    yes: Yes = False,
    json: Annotated[bool, typer.Option("--json", help="print the job as JSON")] = False,
) -> int:
    """Begin or resume a run on machines of an owner: a scheduler, a cluster, a host file.

    The dataset is prepared here, and the run's description is written into its run store. Then the
    owner starts 'holdfast join' on each node. The command returns as soon as the owner has
    accepted the job. If a job of the run is at work, the command brings it to the number of nodes
    asked for.

    \b
    Example:
      holdfast launch run.yaml --on local --nodes 2 cluster.places=1
      holdfast launch run.yaml --on slurm --nodes 4 --dry-run
      holdfast status run.yaml
      holdfast logs run.yaml
      holdfast down run.yaml
    """
    from holdfast.machine.hardware import detect_hardware

    given = list(overrides or [])
    given += [f"launch.on={on}"] if on else []
    given += [] if nodes is None else [f"launch.nodes={nodes}"]
    loaded = for_all_nodes(load_config(run_file, given))
    refuse_other_regions(loaded)  # before the run store is asked for a job at work
    folder = run_folder_of(loaded.config)
    owner = open_owner(loaded.config.launch.on)
    if dry_run:
        print(owner.describe(launch_request(loaded, folder)), end="")
        return 0
    with early_signals_answered():
        running = _running_job(folder, loaded.config.launch, fresh=fresh)
        if running is None and isinstance(owner, CheckingOwner):
            owner.check(launch_request(loaded, folder))
        stored = read_resolved(folder) or {}
        facts = Facts(detect_hardware(), several=True)
        watch = HolderWatch(folder, say)
        with description_put_back(folder):
            begun = begin_run(Start(loaded, facts, folder, watch, SCREEN, fresh, yes))
            if begun.last_step is not None:
                return 0
            if running is not None:
                _say_what_stays(stored, begun.loaded.config)
            open_secret(folder, say=say)
            with (folder / "launch.lock").open("a") as one_at_a_time:
                fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
                if running is None:  # another 'launch' may have come first
                    running = _running_job(folder, loaded.config.launch, fresh=False)
                if running is None:
                    claim_launch(folder, loaded.config.launch.on, watch)
                job = _submit(running, launch_request(begun.loaded, folder))
                job.write(folder)
    if json:
        print_json({"owner": job.owner, "job": job.job, "nodes": job.nodes, "folder": str(folder)})
    else:
        say("follow the run with:")
        for command in ("status", "logs", "watch", "down"):
            say(f"  holdfast {command} {place_word(folder)}")
    return 0


def _say_what_stays(stored: Mapping[str, Any], config: RunConfig) -> None:
    """Say which settings of a run's description do not reach the nodes that are at work."""
    workers = int(stored.get("config", {}).get("layout", {}).get("workers", 0))
    if config.layout.workers > workers:
        say(
            f"the nodes at work train with layout.workers={workers}, so further nodes are "
            "spares until 'holdfast down' and 'holdfast launch'; launch.most_nodes plans for more"
        )
    if changed := _changed_settings(stored, config):
        say(
            "the nodes at work keep the settings that they began with; for nodes that start "
            f"later: {', '.join(changed)}"
        )


def _submit(running: OwnedJob | None, request: LaunchRequest) -> OwnedJob:
    """Start the nodes, or bring a job that is at work to the number of nodes asked for."""
    owner = open_owner(request.config.launch.on)
    if running is None:
        job = owner.submit(request)
        nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
        say(f"{job.owner} has accepted {nodes} as job {job.job}")
        return job
    live = sum(each.is_live for each in owner.status(running))
    if live == running.nodes == request.all_nodes:
        say(f"{running.owner} has {live} nodes of this run already, as job {running.job}")
        return running
    job = owner.resize(running, request)
    say(f"{job.owner} brings job {job.job} from {live} to {job.nodes} nodes")
    return job


def _changed_settings(stored: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return the settings that differ from those of the run's description, as KEY=VALUE."""
    before = dict(leaves(stored.get("config", {})))
    after = dict(leaves(config.model_dump(mode="json")))
    return [
        f"{key}={value}"
        for key, value in after.items()
        if before.get(key, value) != value
        and not key.startswith("launch.")
        and key not in ("layout.workers", "cluster.places")
    ]


def for_all_nodes(loaded: LoadedConfig, devices: int = 0) -> LoadedConfig:
    """Fill in the places of a node and the number of workers, if the run file leaves them open.

    A node has a place for each device that its owner is asked for, or its share of the workers. As
    many workers are planned as fit on all nodes. Each node finds out its own device.
    devices: of a node, if `config.launch` does not know them."""
    config = loaded.config
    nodes, workers = max(config.launch.nodes, config.launch.most_nodes), config.layout.workers
    if config.cluster.places == 0:
        devices = devices or config.launch.devices_of_node
        places = devices or max(1, -(-workers // nodes))
        why = "devices of a node" if devices else f"layout.workers of {nodes} nodes"
        loaded = loaded.with_planned({"cluster.places": places}, why)
    if workers == 0:
        places = loaded.config.cluster.places
        why = f"{nodes} nodes of {places} places"
        workers = max_workers(config, nodes * places)
        loaded = loaded.with_planned({"layout.workers": workers}, why)
    checked_layouts(loaded)
    return loaded


def launch_request(loaded: LoadedConfig, folder: Path) -> LaunchRequest:
    config = loaded.config
    cluster, checkpoint = config.cluster, config.checkpoint
    values = (cluster.interface, cluster.gloo_interface, checkpoint.peer_interface)
    own = [f"{k}={v}" for k, v in zip(KEYS_OF_NODES, values, strict=True) if v != AUTO]
    return LaunchRequest(
        name=config.name,
        location=bucket_of_run(folder) or str(folder.absolute()),
        folder=folder.absolute(),
        secret_file=(given_secret_file(os.environ) or folder / "secret").absolute(),
        config=config,
        nodes=config.launch.nodes,
        spares=config.launch.spares,
        overrides=(f"cluster.places={cluster.places}", *own),
    )


def _running_job(folder: Path, wanted: LaunchConfig, *, fresh: bool) -> OwnedJob | None:
    """Return the job of this run that has nodes. Raises RunFolderError if it must end first."""
    if not (folder / JOB_FILE).exists():
        return None
    job = OwnedJob.read(folder)
    try:
        if not any(each.is_live for each in open_owner(job.owner).status(job)):
            return None
    except OwnerAwayError as error:
        if fresh or not _is_elsewhere(job, wanted):
            raise
        say(f"{error.message}; the run resumes elsewhere")
        return None
    if job.released or job.owner != wanted.on or fresh:
        raise RunFolderError(
            f"{job.owner} still has nodes of this run (job {job.job})",
            where=str(folder),
            remedy=f"end them first with: holdfast down {place_word(folder)}",
        )
    return job


def _is_elsewhere(job: OwnedJob, wanted: LaunchConfig) -> bool:
    """Whether the run file names other machines than those of the job."""
    is_ray = wanted.on == "ray"  # no other owner has an address
    address = (wanted.ray.address or os.environ.get("RAY_ADDRESS", "")) if is_ray else ""
    return wanted.on != job.owner or address not in ("", job.details.get("address"))
