"""What has to be known of a run's optimizer and schedule before the run begins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.config.sections.optimizer import BUILT_IN, PLANNED_KEYS, OptimizerConfig
from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.core.sharding.run_table import run_parameters
from holdfast.errors import ConfigError, TaskError
from holdfast.tasks.task.ask import OPTIMIZER_KEY, describe_named

PLANNED = (*(f"train.optimizer.{key}" for key in PLANNED_KEYS), "train.schedule.source")


def ask_named(loaded: LoadedConfig) -> PlannedValues:
    """Return what a child process finds out about the classes and functions of the run file. Check
    its patterns of names first. Raises UserError."""
    for key in PLANNED:
        _, section, name = key.split(".")
        value = getattr(getattr(loaded.config.train, section), name)
        if value and loaded.origins[key].kind in ("file", "command line"):
            raise ConfigError(
                f"{key} is worked out from what the run file names",
                where=loaded.where(key),
                remedy="remove it",
            )
    refuse_patterns_of_nothing(loaded)
    return describe_named_in(loaded, loaded.config.task.folder or loaded.base or ".")


def describe_named_in(loaded: LoadedConfig, folder: str) -> PlannedValues:
    """Return the same for modules in `folder`, whatever the run file gives."""
    train = loaded.config.train
    is_named = train.optimizer.is_class or train.schedule.is_function
    if not is_named or loaded.config.task.name == SCRIPT_TASK:  # which keeps its own
        return {}
    place = {"task.folder": (os.path.abspath(folder), "the run file's folder")}
    loaded = loaded.with_values(place)
    try:
        answer = describe_named(loaded.config)
    except TaskError as error:
        where = loaded.where(error.where or OPTIMIZER_KEY)
        raise ConfigError(error.message, where=where, remedy=error.remedy) from None
    why = "those of what the run file names"
    return place | {key: (value, why) for key, value in answer.items()}


def refuse_patterns_of_nothing(loaded: LoadedConfig) -> None:
    """Raises ConfigError for a pattern that no parameter's name matches."""
    names = [row.name for row in run_parameters(loaded.config)]
    for key, pattern in _patterns(loaded.config.train.optimizer):
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        near = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0) or names[:3]
        raise ConfigError(
            f"{key} {pattern!r} matches none of the {len(names)} parameters",
            where=loaded.where(key),
            remedy=f"the nearest names are {', '.join(near)}",
        )


def _patterns(optimizer: OptimizerConfig) -> Iterator[tuple[str, str]]:
    for index, group in enumerate(optimizer.groups):
        yield f"train.optimizer.groups.{index}.match", group.match
    default = BUILT_IN["muon"].options["adamw_for"]
    if optimizer.adamw_for != default:
        yield from (("train.optimizer.adamw_for", pattern) for pattern in optimizer.adamw_for)
