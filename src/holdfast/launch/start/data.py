"""The data of a run: what a task has, or a prepared dataset, and what the model takes from it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.data.prepare.dataset_match import needed_vocabulary
from holdfast.data.prepare.prepare import prepare_dataset
from holdfast.data.read.vocabulary import describe_difference
from holdfast.data.stream.coverage import describe_use
from holdfast.data.stream.dataset import Dataset
from holdfast.data.stream.verify import check_dataset
from holdfast.errors import ConfigError, DataError
from holdfast.launch.run.auto_layout import by_layout, choose_layout
from holdfast.launch.run.lora_run import check_base
from holdfast.launch.run.microbatch_size import by_microbatch_size
from holdfast.launch.run.named_parts import ask_named
from holdfast.launch.run.run_folder import dataset_version_in
from holdfast.launch.run.task_run import ask_task
from holdfast.launch.start.facts import Facts
from holdfast.launch.start.machine import checked_layouts, refuse_unfit_machine
from holdfast.launch.start.resolve import Stage, resolve, run_stages
from holdfast.launch.start.screen import Screen


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


def by_vocabulary(loaded: LoadedConfig, facts: Facts) -> PlannedValues:
    """Return the vocabulary of a model that has none of its own: that of the stored run, or the
    dataset's. Raises ConfigError for a model that does not know all of the dataset's tokens."""
    dataset = facts.dataset
    if dataset is None or loaded.config.task.name:
        return {}
    return _vocabulary(loaded, dataset, _stored_vocabulary(facts, dataset.version))


def _vocabulary(loaded: LoadedConfig, dataset: Dataset, stored: int = 0) -> PlannedValues:
    """As `by_vocabulary`. stored: the vocabulary of the stored run; 0: it has none."""
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
    Raises ConfigError as `by_vocabulary`."""
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


def _task_facts(loaded: LoadedConfig, facts: Facts, screen: Screen) -> Facts:
    return replace(facts, task=ask_task(loaded)) if loaded.config.task.name else facts


def _named_facts(loaded: LoadedConfig, facts: Facts, screen: Screen) -> Facts:
    return replace(facts, named=ask_named(loaded))


def _data_facts(loaded: LoadedConfig, facts: Facts, screen: Screen) -> Facts:
    if loaded.config.task.has_own_data:
        return facts
    dataset = prepare_and_check_dataset(loaded, screen, wait=facts.several)
    return replace(facts, dataset=dataset)


def _base_facts(loaded: LoadedConfig, facts: Facts, screen: Screen) -> Facts:
    if facts.dataset is None or loaded.config.task.name:
        return facts
    for line in describe_vocabulary(loaded, facts.dataset):
        screen.say(line)
    if not loaded.config.lora.rank:
        return facts
    base = check_base(loaded, facts.stored_config)
    refuse_other_tokenizer(Path(str(base["lora.base"][0])), facts.dataset)
    return replace(facts, base=base)


def _layout_facts(loaded: LoadedConfig, facts: Facts, screen: Screen) -> Facts:
    return replace(facts, layout=choose_layout(loaded, facts))


BY_DATA = (
    Stage(_task_facts, (lambda loaded, facts: facts.task,)),
    Stage(_named_facts, (lambda loaded, facts: facts.named,)),
    Stage(_data_facts, (by_vocabulary,)),
    Stage(_base_facts, (lambda loaded, facts: facts.base,)),
)
BY_LAYOUT = Stage(_layout_facts, (by_layout,))
"""The vocabulary is known before."""


def prepare_run_data(
    loaded: LoadedConfig, facts: Facts, run_folder: Path, screen: Screen, *, fresh: bool
) -> tuple[LoadedConfig, Facts, RunData]:
    """Return the configuration with what follows from the data, the task and the plan, and the
    data. If the run has several nodes, another one may prepare the dataset. Raises UserError."""
    loaded, facts = run_stages(loaded, facts, (*BY_DATA, BY_LAYOUT), screen)
    loaded = resolve(loaded, facts, (by_microbatch_size,))
    task, dataset = loaded.config.task, facts.dataset
    if dataset is None:
        return loaded, facts, RunData(task.data, task.folder)
    if not facts.several:
        refuse_unfit_machine(loaded, facts.hardware)
    checked_layouts(loaded)  # again: how many microbatches there are is known from now on
    config = loaded.config
    version = dataset.version if fresh else dataset_version_in(run_folder, dataset)
    use = describe_use(dataset, config.data, config.train, config.seed)
    return loaded, facts, RunData(version, dataset.location, tuple(use))
