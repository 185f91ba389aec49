"""`holdfast train`: from a run file to a trained model."""

from __future__ import annotations

import os
import platform
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.dispatch import app as make_app
from holdfast.cli.dispatch import crash_log_in
from holdfast.cli.output import print_line, say
from holdfast.cli.progress import StageProgress
from holdfast.config.load import LoadedConfig, Origin, load_config
from holdfast.errors import ConfigError, LayoutError
from holdfast.launch.run_folder import (
    identity,
    is_begun_by_other,
    refuse_alone,
    refuse_in_use,
    refuse_other,
    set_aside,
    write_description,
)
from holdfast.launch.runs import read_resolved
from holdfast.layout import Layout
from holdfast.plan.hardware import HardwareInfo, cpp_compiler, detect_hardware
from holdfast.plan.layouts import layouts_of, max_workers

if TYPE_CHECKING:
    from holdfast.data.dataset import Dataset

app = make_app("Start or resume the run that a run file describes.")


@app.command()
def train(
    run_file: Annotated[Path, typer.Argument(help="the run file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="start over; the old folder is moved aside")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="print the journal as JSON lines instead of a view")
    ] = False,
) -> int:
    """Start or resume the run described by a run file.

    The dataset is prepared first if it is not there. Ctrl-C saves and leaves (exit code 0);
    a second Ctrl-C leaves at once.

    \b
    Example:
      holdfast train run.yaml
      holdfast train run.yaml train.steps=200 layout.workers=4
      holdfast train run.yaml --fresh
    """
    machine = detect_hardware()
    loaded = plan_for_machine(load_config(run_file, overrides or []), machine)
    folder = Path(loaded.config.run_folder)
    with crash_log_in(folder):
        return _train_in_folder(loaded, machine, folder, fresh=fresh, json=json)


def _train_in_folder(
    loaded: LoadedConfig, machine: HardwareInfo, folder: Path, *, fresh: bool, json: bool
) -> int:
    from holdfast.cli.views import RunViews
    from holdfast.launch import local

    several = bool(loaded.config.cluster.node)  # one node of several: another may be there already
    before = identity(folder)  # what two nodes with --fresh both find, only one of them moves
    if several:
        refuse_alone(folder)
    if fresh or not several:
        refuse_in_use(folder)
    dataset = prepare_and_check_dataset(loaded, wait=several)
    loaded = with_vocabulary(loaded, dataset, None if fresh else folder)
    beside = fresh and several and is_begun_by_other(folder, before, loaded, dataset.version)
    ours = before if several else identity(folder)
    if fresh and not beside and (old := set_aside(folder, ours)) is not None:
        say(f"the old run folder is now {old}")
    refuse_other(folder, loaded, dataset.version)
    if several:
        refuse_alone(folder)  # the dataset may have taken its time
    if (last := finished_step(folder, loaded.config.train.steps)) is not None:
        say(
            f"this run is finished: all {last} steps are done; see it with: holdfast report "
            f"{folder}, or start over with --fresh"
        )
        if json:
            print_line({"finished": True, "step": last, "folder": str(folder)})
        return 0
    begins = read_resolved(folder) is None
    write_description(folder, loaded, machine, dataset.folder, dataset.version)
    if begins and (named := loaded.origins["model.dim"]).kind == "model folder":
        command = ["holdfast", "checkpoint", "import", loaded.name, "--from", named.place]
        say(
            f"model.from gives the shape alone: this run begins from initial weights. Those of "
            f"{named.place} come into a new folder=... by: "
            f"{shlex.join([*command, *loaded.overrides])}"
        )
    with RunViews(loaded.config, folder, dataset.version, machine, json=json) as views:
        code = local.train_locally(
            loaded,
            observers=views.observers,
            render_metrics=views.render_metrics,
            say=views.say,
            dataset_version=dataset.version,
            fresh=fresh,
        )
    if code == 0 and finished_step(folder, loaded.config.train.steps) is not None:
        say(f"finished; the report: holdfast report {folder}")
    return code


def prepare_and_check_dataset(loaded: LoadedConfig, wait: bool = False) -> Dataset:
    """Return the run's dataset, prepared if it is missing, and checked against its checksums.
    `wait`: for another process that is preparing it."""
    from holdfast.data.prepare import prepare_dataset
    from holdfast.data.verify import check_dataset

    with StageProgress() as progress:
        dataset = prepare_dataset(loaded.config.data, progress.say, progress.show, wait=wait)
    check_dataset(dataset)
    return dataset


def plan_for_machine(loaded: LoadedConfig, machine: HardwareInfo) -> LoadedConfig:
    """Fill in what the run file leaves to the machine: device and number of workers.

    Raises ConfigError for what this machine cannot do, LayoutError for what no machine can.
    """
    config, found = loaded.config, len(machine.accelerators)
    if config.device == "auto":
        device = "cuda" if found else "cpu"
        loaded = loaded.with_planned({"device": device}, f"{found} accelerators on {machine.node}")
    if config.layout.workers == 0:
        on_gpu = loaded.config.device == "cuda"
        why = "more than one GPU has not been run yet" if on_gpu else "one on a CPU"
        loaded = loaded.with_planned({"layout.workers": max_workers(config, 1)}, why)
    workers = loaded.config.layout.workers
    if loaded.config.device == "cuda" and workers > found:
        raise ConfigError(
            f"layout.workers is {workers}, but this machine has {found} accelerators",
            where=_origin_of(loaded, "layout.workers"),
            remedy=f"use {found}, or device=cpu" if found else "use device=cpu",
        )
    if loaded.config.device == "cuda" and workers > 1:
        alone = config.layout.least_workers == 1  # else degrees ask for more, whatever workers says
        raise ConfigError(
            f"layout.workers is {workers}, but more than one worker on cuda has not been run yet",
            where=_origin_of(loaded, "layout.workers"),
            remedy="use 1, or device=cpu" if alone else "use a layout of one rank, or device=cpu",
        )
    if (
        loaded.config.train.compile
        and loaded.config.device == "cpu"
        and (cpp_compiler(os.environ) is None)
    ):
        raise ConfigError(
            "train.compile needs a C++ compiler on a CPU, and there is none on the PATH",
            where=_origin_of(loaded, "train.compile"),
            remedy="install g++, name another in CXX, or use train.compile=false",
        )
    if platform.system() == "Darwin" and workers > 1:
        raise ConfigError(
            "on macOS one worker is supported",
            where=_origin_of(loaded, "layout.workers"),
            remedy="use 1",
        )
    checked_layouts(loaded)
    return loaded


def checked_layouts(loaded: LoadedConfig) -> tuple[Layout, ...]:
    """One Layout a replica. Raises LayoutError at the line of the run file, or the override, that
    asks for what cannot work."""
    try:
        return layouts_of(loaded.config)
    except LayoutError as error:
        where = _origin_of(loaded, error.where or "layout.workers")
        raise LayoutError(error.message, where=where, remedy=error.remedy) from None


def with_vocabulary(
    loaded: LoadedConfig, dataset: Dataset, run_folder: Path | None = None
) -> LoadedConfig:
    """If the model has no vocabulary of its own, give it that of the run in `run_folder`, or the
    dataset's. Raises ConfigError for a model that does not know all of the dataset's tokens."""
    from holdfast.data.vocabulary import needed_size

    given, size = loaded.config.model.vocab_size, dataset.vocab_size
    if given == 0 and (known := _known_vocabulary(run_folder, dataset.version)):
        loaded = loaded.with_planned({"model.vocab_size": known}, "that of the run")
        given = known
    if given == 0:
        return loaded.with_planned({"model.vocab_size": size}, "the dataset's")
    if given < size:
        needed = needed_size(dataset.tokenizer_path, dataset.end, dataset.begin)
        if given < needed:
            raise ConfigError(
                f"model.vocab_size {given} is smaller than the dataset's vocabulary of {needed}",
                where=_origin_of(loaded, "model.vocab_size"),
                remedy=f"use {needed}, or 0 for the dataset's",
            )
        say(
            f"the tokenizer has {size} ids and the model {given}: those from {given} on are "
            "special tokens that no text becomes"
        )
    return loaded


def _known_vocabulary(run_folder: Path | None, dataset_version: str) -> int:
    """Of a run that was begun or imported there, on this dataset; 0 if there is none."""
    stored = read_resolved(run_folder) if run_folder is not None else None
    if stored is None or stored.get("dataset", {}).get("version") != dataset_version:
        return 0
    size = stored["config"].get("model", {}).get("vocab_size")
    return size if isinstance(size, int) else 0


def finished_step(folder: Path, steps: int) -> int | None:
    """The last step, when the journal says that the run is finished and counts up to there."""
    from holdfast.core.data.lineage import split_effective
    from holdfast.events import RunFinished
    from holdfast.wire.journal import read_journal
    from holdfast.wire.store.run_store import FolderStore

    if not folder.is_dir():
        return None
    effective, _ = split_effective(read_journal(FolderStore(folder)))
    done = [r.event.step for r in effective if isinstance(r.event, RunFinished)]
    return max((step for step in done if step >= steps), default=None)


def _origin_of(loaded: LoadedConfig, key: str) -> str:
    origin = loaded.origins.get(key, Origin("default"))  # a list of sections has no origin itself
    return (
        f"command line: {origin.place}"
        if origin.kind == "command line"
        else (origin.place if origin.kind == "file" else loaded.name)
    )
