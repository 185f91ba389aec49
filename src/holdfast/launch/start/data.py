"""The data of a run: what a task has, or a prepared dataset, and what the model takes from it."""

from __future__ import annotations

import shlex
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.config.run import RunConfig
from holdfast.data.prepare.dataset_match import needed_vocabulary
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.read.vocabulary import describe_difference
from holdfast.data.stream.batch import Batches
from holdfast.data.stream.coverage import describe_use, passes_text
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.dataset_location import dataset_exists, open_dataset
from holdfast.data.stream.verify import check_dataset
from holdfast.errors import ConfigError, DataError
from holdfast.launch.run.auto_layout import (
    by_microbatch_size,
    choose_layout,
    refuse_absent_machines,
)
from holdfast.launch.run.branch_config import batch_schedule
from holdfast.launch.run.lora_run import check_base, check_first_weights
from holdfast.launch.run.reference_run import (
    check_reference_model,
    check_rollout_reference,
    completions_teacher_values,
    describe_reference,
    refuse_other_rows,
)
from holdfast.launch.run.rounds import by_codec
from holdfast.launch.run.run_folder import dataset_version_in
from holdfast.launch.run.runs import read_resolved, run_folder_of
from holdfast.launch.run.task_run import ask_named, ask_task
from holdfast.launch.start.facts import Facts, Screen, resolve, with_planned
from holdfast.launch.start.machine import checked_layouts, refuse_unfit_machine
from holdfast.launch.start.rollout import describe_changed_rewards, plan_rollout
from holdfast.machine.hardware import detect_hardware
from holdfast.rollout.roles.devices import describe_roles

SMALLEST = "the smallest world"  # The reason of a number of workers that was left to the machine


@dataclass(frozen=True)
class RunData:
    """The data of a run."""

    version: str  # of the dataset, or as the task names it
    location: str  # folder or address
    use: tuple[str, ...] = ()  # lines about how much of it is read


def prepare_and_check_dataset(
    loaded: LoadedConfig, screen: Screen, *, wait: bool = False
) -> Dataset:
    """Return the run's dataset, prepared if it is missing, and checked against its checksums.
    wait: for another process that is preparing it."""
    with screen.open_progress() as progress:
        dataset = prepare_dataset(loaded.config.data, progress.say, progress.show, wait=wait)
    check_dataset(dataset)
    return dataset


def _vocabulary(loaded: LoadedConfig, dataset: Dataset, stored: int = 0) -> PlannedValues:
    """Return the vocabulary of a model that has none of its own: that of the stored run, or the
    dataset's. stored: 0 if the stored run has none. Raises ConfigError for a model that does not
    know all of the dataset's tokens."""
    values: PlannedValues = {}
    size = loaded.config.model.vocab_size
    if size == 0:
        if not stored:
            return {"model.vocab_size": (dataset.vocab_size, "the dataset's")}
        size, values = stored, {"model.vocab_size": (stored, "that of the run")}
    if size < dataset.vocab_size and size < (needed := needed_vocabulary(dataset)):
        raise ConfigError(
            f"model.vocab_size {size} is smaller than the dataset's vocabulary of {needed}",
            where=loaded.where("model.vocab_size"),
            remedy=f"use {needed}, or 0 for the dataset's",
        )
    return values


def with_vocabulary(loaded: LoadedConfig, dataset: Dataset, screen: Screen) -> LoadedConfig:
    """Fill in the vocabulary from a dataset that is prepared, for a run that is only looked at.
    Raises ConfigError for a model that does not know all of its tokens."""
    loaded = loaded.with_values(_vocabulary(loaded, dataset))
    for line in describe_vocabulary(loaded, dataset):
        screen.say(line)
    return loaded


def describe_vocabulary(loaded: LoadedConfig, dataset: Dataset) -> list[str]:
    """Return a line about a tokenizer with more ids than the model has rows."""
    size = loaded.config.model.vocab_size
    if loaded.config.task.name or size >= dataset.vocab_size:
        return []
    return [
        f"the tokenizer has {dataset.vocab_size} ids and the model {size}: those from {size} on "
        "are special tokens that no text becomes"
    ]


def _stored_vocabulary(facts: Facts, dataset_version: str) -> int:
    """Return that of a run that was begun or imported on this dataset; 0 if there is none."""
    if (facts.stored or {}).get("dataset", {}).get("version") != dataset_version:
        return 0
    size = facts.stored_config.get("model", {}).get("vocab_size")
    return size if isinstance(size, int) else 0


def refuse_other_tokenizer(source: Path, dataset: Dataset) -> None:
    """Raises DataError when a model's folder has a tokenizer that is not the dataset's. Every token
    would mean something else than the weights have learnt."""
    theirs = source / "tokenizer.json"
    if theirs.is_file() and (difference := describe_difference(theirs, dataset.tokenizer_path)):
        raise DataError(
            f"the dataset in {dataset.place} was tokenised with another tokenizer: {difference}",
            where=str(theirs),
            remedy=f"add {shlex.quote(f'data.tokenizer.path={theirs}')} and name another "
            "data.folder",
        )


def by_epochs(loaded: LoadedConfig, count_samples: Callable[[], int]) -> PlannedValues:
    """Return the steps of `train.epochs`. Raises ConfigError next to `train.steps`, and for a task
    that does not say how many samples it has."""
    train, origin = loaded.config.train, loaded.origins["train.steps"]
    if not train.epochs:
        return {}
    if origin.kind in ("file", "command line"):
        raise ConfigError(
            f"train.epochs {train.epochs:g} and train.steps {train.steps} both say how long the "
            "run is",
            where=loaded.where("train.epochs"),
            remedy="remove one of the two",
        )
    if not (samples := count_samples()):
        raise ConfigError(
            f"{loaded.config.task.label} does not say how many samples a pass has",
            where=loaded.where("train.epochs"),
            remedy="use train.steps",
        )
    wanted, schedule = train.epochs * samples, batch_schedule(train)
    steps = bisect_left(range(1, 2**40), wanted, key=lambda step: schedule.position(step + 1)) + 1
    why = f"train.epochs {train.epochs:g}: {samples:,} samples a pass"
    return {"train.steps": (steps, why), "train.epochs": (0.0, why)}


def by_source_ends(loaded: LoadedConfig, dataset: Dataset | None) -> PlannedValues:
    """Return the steps that the sources have samples for, if the run would have more of them.
    Raises ConfigError if that is none."""
    config = loaded.config
    if dataset is None or all(source.at_end == "repeat" for source in config.data.sources):
        return {}
    batches = Batches(dataset, config.data, config.train, config.seed)
    order, position = batches.order, batches.schedule.position
    if position(config.train.steps + 1) <= order.length:
        return {}
    steps = bisect_right(range(2, 2**40), order.length, key=position)
    name = dataset.source_names[order.stopped_by]
    number = [source.mix_name for source in config.data.sources].index(name)
    key = f"data.sources.{number}.at_end"
    why = f"{key}: {config.data.sources[number].at_end}: source {name} ends at sample "
    why += f"{order.length:,} of the run"
    if not steps:
        raise ConfigError(
            f"{why}, so there is no step",
            where=loaded.where(key),
            remedy="use a smaller train.batch_size, more passes, or at_end: repeat",
        )
    return {"train.steps": (steps, why)}


def _samples_of_pass(loaded: LoadedConfig, dataset: Dataset | None) -> int:
    config = loaded.config
    if config.rollout.is_on:
        return config.rollout.count * config.rollout.samples
    if dataset is None:
        return config.task.samples
    return sum(Batches(dataset, config.data, config.train, config.seed).order.sizes)


def describe_passes(config: RunConfig) -> list[str]:
    """A line about how often a run reads the samples of a task."""
    steps, samples = config.train.steps, config.task.samples
    if config.rollout.is_on:
        samples = config.rollout.count * config.rollout.samples
    if not samples:
        return []
    read = batch_schedule(config.step_train).position(steps + 1)
    return [
        f"{steps:,} steps: {read:,} samples, {passes_text(read / samples)} over {samples:,} samples"
    ]


def _refuse_features(loaded: LoadedConfig) -> None:
    """Raises ConfigError if the built-in decoder is to read images or recordings."""
    kind = loaded.config.data.features.kind
    if kind != "none" and not loaded.config.task.name:
        raise ConfigError(
            f"data.features.kind {kind} is for a model of yours, and the built-in decoder reads "
            "texts alone",
            where=loaded.where("data.features.kind"),
            remedy="name it with task (docs/guide/images-and-audio.md), or remove data.features",
        )


def with_layout(
    loaded: LoadedConfig, facts: Facts, *, smallest: bool = False
) -> tuple[LoadedConfig, Facts]:
    """Fill in layout and microbatch; the vocabulary is known. smallest: workers that are left to
    the machine are the fewest that the layout allows. Raises UserError."""
    facts = replace(facts, layout=choose_layout(loaded, facts))
    loaded = with_planned(loaded, facts.layout.values)
    layout = loaded.config.layout
    if smallest and layout.workers == 0:
        loaded = loaded.with_values({"layout.workers": (layout.least_workers, SMALLEST)})
    return resolve(loaded, facts, (by_microbatch_size, by_codec)), facts


def prepare_run_data(
    loaded: LoadedConfig, facts: Facts, run_folder: Path, screen: Screen, *, fresh: bool
) -> tuple[LoadedConfig, Facts, RunData]:
    """Return the configuration with what follows from the data, the task and the plan, and the
    data. If the run has several nodes, another one may prepare the dataset. Raises UserError.

    A later question needs an earlier answer, so their order counts. The caller validates the result
    once, at the end."""
    if loaded.config.task.name:
        loaded = with_planned(loaded, ask_task(loaded, screen.say))
    loaded = with_planned(loaded, ask_named(loaded))
    dataset = None
    if not loaded.config.task.has_own_data:
        refuse_other_rows(loaded)
        _refuse_features(loaded)
    if not loaded.config.task.name:
        named = loaded.config.model.weights
        loaded = with_planned(loaded, check_first_weights(loaded, facts.stored_config))
        if named and not (loaded.config.model.weights or loaded.config.model.weights_checksum):
            screen.say(f"this run began with initial weights: those of {named} are not read")
    rollout = loaded.config.rollout.is_on
    if rollout:
        loaded = with_planned(loaded, plan_rollout(loaded))
        loaded = with_planned(loaded, completions_teacher_values(loaded, facts.stored_config))
        screen.say(describe_roles(loaded.config, loaded.config.layout.workers or 1))
        for line in describe_changed_rewards(loaded, facts.stored_config):
            screen.say(line)
        if loaded.config.lora.rank:
            loaded = with_planned(loaded, check_base(loaded, facts.stored_config))
        loaded = with_planned(loaded, check_rollout_reference(loaded, facts.stored_config))
    elif not loaded.config.task.has_own_data:
        dataset = prepare_and_check_dataset(loaded, screen, wait=facts.several)
    if dataset is not None and not loaded.config.task.name:
        stored = _stored_vocabulary(facts, dataset.version)
        loaded = with_planned(loaded, _vocabulary(loaded, dataset, stored))
        for line in describe_vocabulary(loaded, dataset):
            screen.say(line)
        if loaded.config.model.weights:
            refuse_other_tokenizer(Path(loaded.config.model.weights), dataset)
        if loaded.config.lora.rank:
            base = check_base(loaded, facts.stored_config)
            refuse_other_tokenizer(Path(str(base["lora.base"][0])), dataset)
            loaded = with_planned(loaded, base)
        if named := loaded.config.objective.reference.model:
            refuse_other_tokenizer(Path(named), dataset)
        reference = check_reference_model(loaded, facts.stored_config, dataset, run_folder)
        loaded = with_planned(loaded, reference)
    loaded = with_planned(loaded, by_epochs(loaded, partial(_samples_of_pass, loaded, dataset)))
    for key, (value, why) in (ended := by_source_ends(loaded, dataset)).items():
        screen.say(f"{key} is {value}, not {loaded.config.train.steps}: {why}")
    loaded = with_planned(loaded, ended)
    before = loaded
    loaded, facts = with_layout(loaded, facts)
    refuse_absent_machines(before, loaded, facts)
    task = loaded.config.task
    if dataset is None:
        passes = tuple(describe_passes(loaded.config))
        if rollout:
            return loaded, facts, RunData(loaded.config.rollout.version, "", passes)
        return loaded, facts, RunData(task.data, task.folder, passes)
    if not facts.several:
        refuse_unfit_machine(loaded, facts.hardware)
    checked_layouts(loaded)  # again: how many microbatches there are is known from now on
    config = loaded.config
    version = dataset.version if fresh else dataset_version_in(run_folder, dataset)
    use = describe_use(dataset, config.data, config.step_train, config.seed)
    use += describe_reference(config, dataset, bool(facts.stored_config.get("objective")))
    return loaded, facts, RunData(version, dataset.location, tuple(use))


# --- a run that is only looked at ---------------------------------------------------------------
def with_prepared_vocabulary(loaded: LoadedConfig, screen: Screen) -> LoadedConfig:
    """Fill in the dataset's vocabulary, and the steps of `train.epochs`, if the dataset is
    prepared. Raises ConfigError."""
    if loaded.config.rollout.is_on:
        loaded = loaded.with_values(plan_rollout(loaded))
        loaded = loaded.with_values(completions_teacher_values(loaded, None))
        screen.say(describe_roles(loaded.config, loaded.config.layout.workers or 1))
        return loaded.with_values(by_epochs(loaded, partial(_samples_of_pass, loaded, None)))
    data, train = loaded.config.data, loaded.config.train
    if not dataset_exists(data.folder, data):
        if train.epochs:
            screen.say(
                f"the dataset is not prepared: train.epochs {train.epochs:g} is shown as "
                f"{train.steps:,} steps; prepare it with: holdfast data prepare RUN.yaml"
            )
        return loaded
    dataset = open_dataset(data.folder, data)
    loaded = with_vocabulary(loaded, dataset, screen)
    loaded = loaded.with_values(by_epochs(loaded, partial(_samples_of_pass, loaded, dataset)))
    return loaded.with_values(by_source_ends(loaded, dataset))


def plan_to_look(loaded: LoadedConfig) -> tuple[LoadedConfig, Facts]:
    """Fill in layout and microbatch, as a start would. A number of workers that is left to the
    machine becomes the smallest one. Raises UserError."""
    facts = Facts(detect_hardware(), stored=read_resolved(run_folder_of(loaded.config)))
    loaded, facts = with_layout(loaded, facts, smallest=True)
    return loaded.validated(), facts
