"""`holdfast launch`: have the owner of machines start a run on several nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.early_signals import early_signals_answered
from holdfast.cli.options import Fresh
from holdfast.cli.output import say
from holdfast.cli.train import begin_run, checked_layouts
from holdfast.config.load import LoadedConfig, load_config
from holdfast.errors import RunFolderError
from holdfast.launch.holder import HolderWatch
from holdfast.launch.runs import run_folder_of
from holdfast.plan.layouts import max_workers
from holdfast.wire.store.run_location import bucket_of_run

if TYPE_CHECKING:
    from holdfast.launch.owner import LaunchRequest

app = make_app("Have the owner of machines start a run on several nodes.")


@app.command()
def launch(
    run_file: Annotated[Path, typer.Argument(help="the run file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    on: Annotated[
        str, typer.Option(help="local, ssh, slurm, ray or kubernetes; left out: launch.on")
    ] = "",
    nodes: Annotated[int, typer.Option(help="nodes of the run; left out: launch.nodes")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would be submitted, and submit nothing")
    ] = False,
    fresh: Fresh = False,
) -> int:
    """Begin or resume a run on machines of an owner: a scheduler, a cluster, a host file.

    The dataset is prepared here, and the run's description is written into its run store. Then the
    owner starts 'holdfast join' on each node. The command returns as soon as the owner has
    accepted the job.

    \b
    Example:
      holdfast launch run.yaml --on local --nodes 2 cluster.places=1
      holdfast launch run.yaml --on slurm --nodes 4 --dry-run
      holdfast status run.yaml; holdfast logs run.yaml; holdfast down run.yaml
    """
    from holdfast.launch.owners.choose import open_owner
    from holdfast.plan.hardware import detect_hardware

    given = list(overrides or [])
    given += [f"launch.on={on}"] if on else []
    given += [f"launch.nodes={nodes}"] if nodes else []
    loaded = _for_all_nodes(load_config(run_file, given))
    folder = run_folder_of(loaded.config)
    owner = open_owner(loaded.config.launch.on)
    if dry_run:
        print(owner.describe(_request(loaded, folder)), end="")
        return 0
    with early_signals_answered():
        begun = begin_run(
            loaded, detect_hardware(), folder, HolderWatch(folder, say), fresh=fresh, several=True
        )
        if begun.last_step is not None:
            return 0
        _make_secret(folder)
        _refuse_running(folder)
        job = owner.submit(_request(begun.loaded, folder))
        job.write(folder)
    say(f"{job.owner} has accepted {job.nodes} nodes as {job.job}; follow them with:")
    for command in ("status", "logs", "watch", "down"):
        say(f"  holdfast {command} {run_file}")
    return 0


def _for_all_nodes(loaded: LoadedConfig) -> LoadedConfig:
    """The configuration with as many workers as fit on all nodes, if the run file leaves them open.

    Each node finds out its own device (`device: auto`)."""
    config = loaded.config
    if config.layout.workers == 0:
        places = config.launch.nodes * (config.cluster.places or 1)
        why = f"{config.launch.nodes} nodes of {config.cluster.places or 1} places"
        loaded = loaded.with_planned({"layout.workers": max_workers(config, places)}, why)
    checked_layouts(loaded)
    return loaded


def _request(loaded: LoadedConfig, folder: Path) -> LaunchRequest:
    from holdfast.launch.owner import LaunchRequest

    config = loaded.config
    return LaunchRequest(
        name=config.name,
        location=bucket_of_run(folder) or str(folder.absolute()),
        folder=folder.absolute(),
        secret_file=(folder / "secret").absolute(),
        config=config,
        nodes=config.launch.nodes,
        spares=config.launch.spares,
        overrides=(f"cluster.places={config.cluster.places or 1}",),
    )


def _make_secret(folder: Path) -> None:
    from holdfast.wire.secret import open_secret

    open_secret(folder, say=say)


def _refuse_running(folder: Path) -> None:
    """Raises RunFolderError if a job of this run still has nodes."""
    from holdfast.launch.owner import JOB_FILE, NodeState, OwnedJob
    from holdfast.launch.owners.choose import open_owner

    if not (folder / JOB_FILE).exists():
        return
    job = OwnedJob.read(folder)
    states = {each.state for each in open_owner(job.owner).status(job)}
    if states & {NodeState.RUNNING, NodeState.WAITING}:
        raise RunFolderError(
            f"{job.owner} still has nodes of this run (job {job.job})",
            where=str(folder),
            remedy=f"end them first with: holdfast down {folder}",
        )
