"""`holdfast train`: from a run file to a trained model."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.confirm import confirm_cost
from holdfast.cli.dispatch import app as make_app
from holdfast.cli.dispatch import crash_log_in
from holdfast.cli.early_signals import early_signals_answered
from holdfast.cli.options import Fresh, JournalJson, Yes
from holdfast.cli.progress import StageProgress
from holdfast.config.loading.load import LoadedConfig, load_config
from holdfast.errors import ConfigError, LayoutError
from holdfast.launch.node.devices import (
    default_places,
    describe_devices,
    refuse_devices,
    refuse_float8,
)
from holdfast.launch.node.node_place import with_place
from holdfast.launch.node.trackers import refuse_missing_trackers
from holdfast.launch.run.auto_layout import AutoLayout, with_auto_layout
from holdfast.launch.run.bucket_run import (
    begin_again_word,
    place_word,
    probe_run_store,
    require_secret,
)
from holdfast.launch.run.holder import HolderWatch
from holdfast.launch.run.lora_run import describe_lora, with_lora
from holdfast.launch.run.microbatch_size import describe_microbatch, with_microbatch_size
from holdfast.launch.run.named_parts import with_named_parts
from holdfast.launch.run.resume_checks import (
    ensure_end_is_intact,
    refuse_branch_without_state,
    refuse_unfit_state,
)
from holdfast.launch.run.run_folder import (
    dataset_version_in,
    is_begun_by_other,
    refuse_alone,
    refuse_in_use,
    refuse_old_base,
    refuse_other,
    run_id,
    set_aside,
    with_stored_places,
    write_description,
)
from holdfast.launch.run.runs import read_resolved, run_folder_of
from holdfast.launch.run.task_run import with_task
from holdfast.launch.run.unlike_node import refuse_unlike_node
from holdfast.layout import Layout
from holdfast.machine.hardware import HardwareInfo, cpp_compiler, detect_hardware
from holdfast.plan.placing.layouts import layouts_of, max_workers
from holdfast.show.output import print_line, say
from holdfast.wire.store.run_location import where_of_run

if TYPE_CHECKING:
    from holdfast.data.stream.dataset import Dataset
    from holdfast.launch.ranks.launchers import LauncherPlace

app = make_app("Start or resume the run that a run file describes.")


@app.command()
def train(
    run_file: Annotated[Path, typer.Argument(help="the run file")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ...")] = None,
    fresh: Fresh = False,
    yes: Yes = False,
    json: JournalJson = False,
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
    return start_run(run_file, overrides or [], fresh=fresh, json=json, yes=yes)


def start_run(
    run_file: Path | None,
    overrides: Sequence[str],
    *,
    fresh: bool = False,
    json: bool = False,
    yes: bool = False,
    before_joining: Callable[[], None] | None = None,
) -> int:
    """As the command `train`; return its exit code. run_file: None for the defaults and the
    overrides. Of the processes of a launcher, one of each node trains. before_joining: called once
    the node's processes run; the node joins when it returns. Raises UserError."""
    from holdfast.launch.ranks.launched_config import with_launcher
    from holdfast.launch.ranks.local_ranks import as_one_node

    def start(place: LauncherPlace | None) -> int:
        machine = detect_hardware()
        loaded = with_launcher(load_config(run_file, overrides), place)
        loaded = with_place(plan_for_machine(loaded, machine))
        folder = run_folder_of(loaded.config)
        with crash_log_in(folder):
            return _train_in_folder(
                loaded,
                machine,
                folder,
                place,
                fresh=fresh,
                json=json,
                yes=yes,
                before_joining=before_joining,
            )

    with early_signals_answered():
        return as_one_node(start)


def _train_in_folder(
    loaded: LoadedConfig,
    machine: HardwareInfo,
    folder: Path,
    place: LauncherPlace | None,
    *,
    fresh: bool,
    json: bool,
    yes: bool,
    before_joining: Callable[[], None] | None = None,
) -> int:
    from holdfast.cli.views import RunViews
    from holdfast.launch import local
    from holdfast.launch.ranks.roll_call import call_roll
    from holdfast.wire.store.run_location import store_of_run

    several = bool(loaded.config.cluster.node)  # one node of several: another may be there already
    watch = HolderWatch(folder, say)
    refuse_missing_trackers(loaded)
    begun = begin_run(loaded, machine, folder, watch, fresh=fresh, several=several, yes=yes)
    if begun.last_step is not None:
        if json:
            print_line({"finished": True, "step": begun.last_step, "folder": str(folder)})
        return 0
    loaded, version = begun.loaded, begun.dataset_version
    if place is not None and several:
        call_roll(store_of_run(folder), place, loaded.config.launch.gather_seconds)
    with RunViews(loaded.config, folder, version, machine, json=json) as views:
        code = local.train_locally(
            loaded,
            observers=views.observers,
            render_metrics=views.render_metrics,
            say=views.say,
            say_last=views.say_last,
            dataset_version=version,
            fresh=fresh,
            watch=watch,
            before_joining=before_joining,
        )
    if code == 0 and finished_step(folder, loaded.config.train.steps) is not None:
        say(f"finished; the report: holdfast report {place_word(folder)}")
    return code


@dataclass(frozen=True)
class BegunRun:
    """A run whose dataset is prepared and whose description lies in its folder.

    last_step: of a run that is finished, which is said; then nothing was written."""

    loaded: LoadedConfig
    dataset_version: str
    last_step: int | None = None


def begin_run(
    loaded: LoadedConfig,
    machine: HardwareInfo,
    folder: Path,
    watch: HolderWatch,
    *,
    fresh: bool,
    several: bool,
    yes: bool = False,
) -> BegunRun:
    """Prepare the data of a run and write its description, or check those that are there.

    watch: what is known of the folder's holder. several: the run has several nodes, and one of
    them may be at work already. yes: whatever it costs. Raises UserError."""
    probe_run_store(folder)
    refuse_old_base(loaded)
    refuse_branch_without_state(folder, loaded, fresh)
    before = run_id(folder)  # what two nodes with --fresh both find, only one of them moves
    if several:
        if before is not None:
            require_secret(folder)
        refuse_alone(folder, watch)
    if fresh or not several:
        refuse_in_use(folder, watch)
    loaded, data = prepare_run_data(loaded, machine, folder, fresh=fresh, several=several)
    version = data.version
    beside = fresh and several and is_begun_by_other(folder, before, loaded, version)
    if fresh and not beside and (old := set_aside(folder, before, watch)) is not None:
        say(f"the old run folder is now {old}")
    refuse_other(folder, loaded, version)
    loaded = with_stored_places(folder, loaded)
    if several:
        refuse_alone(folder, watch)  # the dataset may have taken its time
    if (last := finished_step(folder, loaded.config.train.steps)) is not None:
        ensure_end_is_intact(folder, last, loaded.config.checkpoint.bucket, say)
        say(
            f"this run is finished: all {last} steps are done; see it with: holdfast report "
            f"{place_word(folder)}, or {begin_again_word(folder)}"
        )
        return BegunRun(loaded, version, last)
    refuse_unfit_state(folder, loaded.config)
    if several:
        refuse_unlike_node(folder, loaded, watch)
    begins = read_resolved(folder) is None
    for line in data.plan.about:
        say(line)
    if begins and not yes:
        confirm_cost(loaded, data.plan.usd)
    about = describe_start(loaded, data.use, begins=begins)
    if begins:
        about = [f"a new run in {where_of_run(folder.resolve())}", *about]
    if not write_description(folder, loaded, machine, data.location, version) and several:
        require_secret(folder)  # another node may have begun the run just now
    for line in about:
        say(line)
    return BegunRun(loaded, version)


@dataclass(frozen=True)
class RunData:
    """The data of a run. location: folder or address. use: lines about how much of it is read."""

    version: str
    location: str
    use: tuple[str, ...]
    plan: AutoLayout


def prepare_run_data(
    loaded: LoadedConfig, machine: HardwareInfo, run_folder: Path, *, fresh: bool, several: bool
) -> tuple[LoadedConfig, RunData]:
    """Return the configuration with what follows from the data, the task and the plan, and the
    data.

    several: the run has several nodes. Another one may prepare the dataset. Raises UserError."""
    known = None if fresh else run_folder
    task = loaded.config.task
    if task.name:
        loaded = with_named_parts(with_task(loaded))
        task = loaded.config.task
        if task.has_own_data:
            loaded, plan = with_auto_layout(loaded, machine, known, several=several)
            return loaded, RunData(task.data, task.folder, (), plan)
    from holdfast.data.stream.coverage import describe_use

    if not task.name:
        loaded = with_named_parts(loaded)
    dataset = prepare_and_check_dataset(loaded, wait=several)
    if not task.name:
        loaded = with_vocabulary(loaded, dataset, known)
    if loaded.config.lora.rank and not task.name:
        from holdfast.cli.checkpoint_import import refuse_other_tokenizer

        loaded = with_lora(loaded, known)
        refuse_other_tokenizer(Path(loaded.config.lora.base), dataset)
    loaded, plan = with_auto_layout(loaded, machine, known, several=several)
    loaded = with_microbatch_size(loaded, known)
    if not several:
        refuse_unfit_machine(loaded, machine)
    checked_layouts(loaded)  # again: how many microbatches there are is known from now on
    config = loaded.config
    version = dataset.version if fresh else dataset_version_in(run_folder, dataset)
    use = describe_use(dataset, config.data, config.train, config.seed)
    return loaded, RunData(version, dataset.location, tuple(use), plan)


def prepare_and_check_dataset(loaded: LoadedConfig, wait: bool = False) -> Dataset:
    """Return the run's dataset, prepared if it is missing, and checked against its checksums.
    `wait`: for another process that is preparing it."""
    from holdfast.data.prepare.prepare import prepare_dataset
    from holdfast.data.stream.verify import check_dataset

    with StageProgress() as progress:
        dataset = prepare_dataset(loaded.config.data, progress.say, progress.show, wait=wait)
    check_dataset(dataset)
    return dataset


def describe_start(loaded: LoadedConfig, use: Sequence[str], begins: bool = False) -> list[str]:
    """Lines about what of the run file can never take effect, and the run's `use` of its data.
    begins: the run starts for the first time."""
    from holdfast.config.loading.no_effect import find_without_effect
    from holdfast.options.registry import option_keys

    lora = describe_lora(loaded.config)
    origin = _describe_model_origin(loaded) if begins and not lora else []
    size, devices = describe_microbatch(loaded), describe_devices(loaded)
    bits = [line for option in option_keys() for line in option.notices(loaded.config.layout)]
    return [*find_without_effect(loaded), *size, *use, *origin, *lora, *devices, *bits]


def _describe_model_origin(loaded: LoadedConfig) -> list[str]:
    """A line for a run that takes its model's shape, and so far no weights, from a folder."""
    named = loaded.origins["model.dim"]
    if named.kind != "model folder":
        return []
    other = [one for one in loaded.overrides if not one.startswith("folder=")]
    command = [
        *("holdfast", "checkpoint", "import", loaded.name, "--from", named.place),
        *other,
        f"folder={loaded.config.run_folder}-imported",
    ]
    return [
        "model.from gives the shape alone: this run begins from initial weights. Those of "
        f"{named.place} come into a run of their own by: {shlex.join(command)}"
    ]


def plan_for_machine(loaded: LoadedConfig, machine: HardwareInfo) -> LoadedConfig:
    """Fill in what the run file leaves to the machine: device and number of workers.

    Raises ConfigError for what this machine cannot do, LayoutError for what no machine can.
    """
    loaded, config = with_device(loaded, machine), loaded.config
    if config.layout.workers == 0:
        places, why = default_places(loaded.config, machine)
        loaded = loaded.with_planned({"layout.workers": max_workers(config, places)}, why)
    refuse_unfit_machine(loaded, machine)
    checked_layouts(loaded)
    return loaded


def refuse_unfit_machine(loaded: LoadedConfig, machine: HardwareInfo) -> None:
    """Raises ConfigError for what this machine cannot do. Its device is known."""
    refuse_devices(loaded, machine)
    refuse_float8(loaded, machine)
    config = loaded.config
    if config.train.compile and config.device == "cpu" and cpp_compiler(os.environ) is None:
        raise ConfigError(
            "train.compile needs a C++ compiler on a CPU, and there is none on the PATH",
            where=loaded.where("train.compile"),
            remedy="install g++, name another in CXX, or use train.compile=false",
        )
    if platform.system() == "Darwin" and config.layout.workers > 1:
        raise ConfigError(
            "on macOS one worker is supported",
            where=loaded.where("layout.workers"),
            remedy="use 1",
        )


def with_device(loaded: LoadedConfig, machine: HardwareInfo) -> LoadedConfig:
    """Fill in this machine's device if the run leaves it open."""
    if loaded.config.device != "auto":
        return loaded
    found = machine.accelerators
    device = found[0].kind if found else "cpu"
    return loaded.with_planned({"device": device}, f"{len(found)} accelerators on {machine.node}")


def checked_layouts(loaded: LoadedConfig) -> tuple[Layout, ...]:
    """One Layout a replica. Raises LayoutError at the line of the run file, or the override, that
    asks for what cannot work."""
    try:
        return layouts_of(loaded.config)
    except LayoutError as error:
        where = loaded.where(error.where or "layout.workers")
        raise LayoutError(error.message, where=where, remedy=error.remedy) from None


def with_vocabulary(
    loaded: LoadedConfig, dataset: Dataset, run_folder: Path | None = None
) -> LoadedConfig:
    """If the model has no vocabulary of its own, give it that of the run in `run_folder`, or the
    dataset's. Raises ConfigError for a model that does not know all of the dataset's tokens."""
    from holdfast.data.prepare.dataset_match import needed_vocabulary

    given, size = loaded.config.model.vocab_size, dataset.vocab_size
    if given == 0 and (known := _known_vocabulary(run_folder, dataset.version)):
        loaded = loaded.with_planned({"model.vocab_size": known}, "that of the run")
        given = known
    if given == 0:
        return loaded.with_planned({"model.vocab_size": size}, "the dataset's")
    if given < size:
        needed = needed_vocabulary(dataset)
        if given < needed:
            raise ConfigError(
                f"model.vocab_size {given} is smaller than the dataset's vocabulary of {needed}",
                where=loaded.where("model.vocab_size"),
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
    from holdfast.wire.store.run_location import store_of_run

    if not folder.is_dir():
        return None
    effective, _ = split_effective(read_journal(store_of_run(folder)))
    done = [r.event.step for r in effective if isinstance(r.event, RunFinished)]
    return max((step for step in done if step >= steps), default=None)
