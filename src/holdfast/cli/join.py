"""`holdfast join`: another machine takes part in a run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.api.early_end import crash_log_in, early_signals_answered
from holdfast.api.start import SCREEN
from holdfast.api.views import RunViews
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.options import JournalJson, run_path
from holdfast.config.loading import yaml_tree
from holdfast.config.loading.identity import refuse_other_run
from holdfast.config.loading.load import LoadedConfig, load_config, resolve_config
from holdfast.data.stream.dataset_location import open_dataset
from holdfast.data.stream.verify import check_dataset
from holdfast.errors import RunFolderError
from holdfast.launch import local
from holdfast.launch.node.addresses import refuse_foreign_address
from holdfast.launch.node.node_name import default_node_name
from holdfast.launch.node.node_place import MACHINE_KEYS, by_place
from holdfast.launch.node.trackers import refuse_bad_tasks, refuse_missing_trackers
from holdfast.launch.run.bucket_run import place_word, require_secret
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.lora_run import joining_weights
from holdfast.launch.run.pausing import refuse_bad_pause, train_between_pauses
from holdfast.launch.run.resume_checks import ensure_end_is_intact
from holdfast.launch.run.run_folder import dataset_version_in, refuse_alone
from holdfast.launch.run.runs import RESOLVED_FILE, read_resolved, run_folder_of
from holdfast.launch.run.task_run import describe_in, describe_named_in
from holdfast.launch.start.begin import finished_step
from holdfast.launch.start.data import prepare_and_check_dataset
from holdfast.launch.start.facts import Facts, resolve
from holdfast.launch.start.machine import by_device, refuse_unfit_machine
from holdfast.launch.start.regions import refuse_other_regions
from holdfast.show.output import say
from holdfast.wire.store.run_location import (
    bucket_of_run,
    location_of_run,
    store_of_run,
    where_of_run,
)

ADDRESS_KEYS = ("cluster.interface", "cluster.gloo_interface", "checkpoint.peer_interface")

app = make_app("Take part in a run on several machines.")


@app.command()
def join(
    folder: Annotated[
        Path,
        typer.Argument(
            help="the run folder, on a disk that all nodes share; or the run's bucket",
            parser=run_path,
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="of this node alone: cluster.key=value, device=...")
    ] = None,
    node: Annotated[
        str,
        typer.Option(help="name of this node; left out: that of Slurm, of the pod, or the machine"),
    ] = "",
    json: JournalJson = False,
) -> int:
    """Take part in the run of a run folder, as one node of several, until it is over.

    Only the run folder and the secret in it are needed. The leader is found there; if there is
    none, this node leads. A node that is asked to leave (Ctrl-C, SIGTERM) leaves the run, which
    continues without it. The same command takes it in again.

    \b
    Example:
      holdfast train run.yaml cluster.node=first cluster.places=1     on one machine
      holdfast join runs/my-run --node second cluster.places=1        on another one
    """
    from holdfast.machine.hardware import detect_hardware

    stored = read_resolved(folder)
    if folder.is_file():
        run = place_word(run_folder_of(load_config(folder).config))
        raise RunFolderError(
            "a node joins by the folder of a run, and this is a run file",
            where=str(folder),
            remedy=f"name the folder: holdfast join {run}",
        )
    if stored is None:
        raise RunFolderError(
            "no run has been started here",
            where=where_of_run(folder),
            remedy="start one with: holdfast train RUN_FILE cluster.node=NAME",
        )
    require_secret(folder)
    refuse_alone(folder, HolderWatch(folder, say))
    name = node or default_node_name(os.environ)
    machine = detect_hardware()
    given = [f"cluster.node={name}", f"folder={location_of_run(folder)}"]
    given += [f"{key}=auto" for key in ADDRESS_KEYS]  # the stored ones are the first node's
    given += [f"{key}=''" for key in MACHINE_KEYS]
    given += _own(overrides or [])
    if dataset := stored.get("dataset", {}).get("folder"):
        given.append(f"data.folder={dataset}")
    loaded = resolve_config(yaml_tree.dump(stored["config"]), str(folder / RESOLVED_FILE), given)
    loaded = resolve(loaded, Facts(machine, os.environ), (by_device, by_place)).validated()
    if _is_finished(folder, loaded):
        return 0
    refuse_unfit_machine(loaded, machine)
    refuse_other_regions(loaded)
    refuse_foreign_address(loaded.config.cluster)
    refuse_missing_trackers(loaded)
    refuse_bad_tasks(loaded)
    refuse_bad_pause(loaded)
    loaded, version = _with_data(loaded, stored, folder)
    again = ["holdfast", "join", location_of_run(folder), "--node", name, *(overrides or ())]

    def session(is_first: bool) -> int:
        with RunViews(loaded.config, folder, version, machine, json=json) as views:
            return local.train_locally(
                loaded,
                observers=views.observers,
                render_metrics=views.render_metrics,
                seen_progress=views.seen_progress,
                say=views.say,
                say_last=views.say_last,
                dataset_version=version,
                resume=shlex.join(again),
            )

    with early_signals_answered(), crash_log_in(folder):
        return train_between_pauses(loaded.config, folder, say, session)


def _is_finished(folder: Path, loaded: LoadedConfig) -> bool:
    """Return True, and say so, if all steps of the run are done."""
    if (last := finished_step(folder, loaded.config.train.steps)) is None:
        return False
    ensure_end_is_intact(folder, last, loaded.config.checkpoint.bucket, say)
    place = place_word(folder)
    say(f"this run is finished: all {last} steps are done; see: holdfast report {place}")
    return True


def _with_data(
    loaded: LoadedConfig, stored: dict[str, Any], folder: Path
) -> tuple[LoadedConfig, str]:
    """The configuration with this node's own reading of the task, and the version of the data.

    Raises UserError, also where this node has another source of the task."""
    before, modules = loaded, loaded.config.task.folder
    loaded = loaded.with_values(describe_named_in(loaded, modules))
    if loaded.config.task.name:
        loaded = loaded.with_values(describe_in(loaded, modules))
    if loaded is not before:
        loaded = loaded.validated()
        refuse_other_run(stored["config"], loaded.config, str(folder))
    loaded = loaded.with_values(joining_weights(loaded, store_of_run(folder))).validated()
    if loaded.config.has_own_data:
        rollout = loaded.config.rollout
        return loaded, rollout.version if rollout.is_on else loaded.config.task.data
    if bucket_of_run(folder):  # no disk is shared, so this node may have to prepare its own
        prepared = prepare_and_check_dataset(loaded, SCREEN, wait=True)
        return loaded, dataset_version_in(folder, prepared)
    data = loaded.config.data
    dataset = open_dataset(data.folder, data, ask=True)
    if dataset.cache is not None:
        check_dataset(dataset)
    return loaded, dataset_version_in(folder, dataset)


OF_ALL_NODES = ("cluster.workers_per_device", "cluster.backend")
"""Keys of `cluster` that decide by which library ranks of different nodes meet."""


def _own(overrides: list[str]) -> list[str]:
    """Raises RunFolderError for a setting of the entire run: all nodes have to agree on it."""
    for override in overrides:
        key = override.partition("=")[0]
        is_own = key.startswith("cluster.") and key not in OF_ALL_NODES
        if not is_own and key not in (
            "device",
            "data.cache",
            "data.cache_gb",
            "checkpoint.peer_advertise",
            "task.folder",
            "model.weights",
            "lora.base",
            "pause.file",
            *ADDRESS_KEYS,
            *MACHINE_KEYS,
        ):
            raise RunFolderError(
                f"{key} belongs to the run, and cannot differ for one node",
                where=override,
                remedy="give this key to holdfast train, and only keys of this node here",
            )
    return overrides
