"""What has to be known of a task, an optimizer and a schedule before a run begins."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from holdfast.config.loading.load import LoadedConfig, PlannedValues
from holdfast.config.sections import optimizer as optimizer_section
from holdfast.config.sections.optimizer import BUILT_IN, OptimizerConfig
from holdfast.config.sections.task import SCRIPT_TASK
from holdfast.core.sharding.run_table import run_parameters
from holdfast.errors import ConfigError, TaskError
from holdfast.tasks.task.ask import BASE_CHECKSUM, OPTIMIZER_KEY, describe_named, describe_task

PLANNED_KEYS = (
    "source",
    "data",
    "samples",
    "validation",
    "flops",
    "parameters",
    "sharding",
    "blocks",
    "positions",
)
Say = Callable[[str], None]
GIVEN = ("file", "command line")  # kinds of origins
_BY_OPTIMIZER = ("train.optimizer.", "train.schedule.")
_OF_THE_DECODER = ("model.", "data.")
CLIP_NORM = "train.optimizer.clip_norm"  # no option of torch's optimizers


def ask_task(loaded: LoadedConfig, say: Say = lambda line: None) -> PlannedValues:
    """Return what a child process finds out about the task: its parameters, its data and the
    digest of its source. `say` gets what the user should know of a script. Raises TaskError, and
    ConfigError for a run file that gives them."""
    for key in PLANNED_KEYS:
        origin = loaded.origins[f"task.{key}"]
        if origin.kind in GIVEN:
            raise ConfigError(
                f"task.{key} is worked out from the task",
                where=loaded.where(f"task.{key}"),
                remedy="remove it",
            )
    for key in ("base", "adapter"):
        if getattr(loaded.config.lora, key):
            raise ConfigError(
                f"lora.{key} is for the built-in decoder, and a task gives its own values",
                where=loaded.where(f"lora.{key}"),
                remedy="return the values from initial(), and remove lora.from and lora.base",
            )
    values = describe_in(loaded, loaded.config.task.folder or loaded.base or ".", say)
    if loaded.config.task.name == SCRIPT_TASK:
        refuse_keys_of_the_script(loaded)
    return values


def refuse_keys_of_the_script(loaded: LoadedConfig, kinds: Sequence[str] = GIVEN) -> None:
    """Raises ConfigError for a given key of something that a script has itself. kinds: of the
    origins that count as given."""
    given = [key for key, origin in loaded.origins.items() if origin.kind in kinds]
    for key in given:
        if key.startswith(_BY_OPTIMIZER) and key != CLIP_NORM:
            raise ConfigError(
                f"{key} is decided by the script's optimizer",
                where=loaded.where(key),
                remedy="remove it, and change the script",
            )
        if key.startswith(_OF_THE_DECODER):
            raise ConfigError(
                f"{key} is for the built-in decoder and its texts: a script has a model and data "
                "of its own",
                where=loaded.where(key),
                remedy="remove it",
            )


def describe_in(loaded: LoadedConfig, folder: str, say: Say = lambda line: None) -> PlannedValues:
    """Return the same for the task in `folder`, whatever the run file gives. Raises TaskError."""
    is_script = loaded.config.task.name == SCRIPT_TASK
    place = {"task.folder": (os.path.abspath(folder), "the run file's folder")}
    loaded = loaded.with_values(place)
    try:
        found = describe_task(loaded.config)
    except TaskError as error:
        key = error.where or "task"
        is_argument = key.startswith("task.args")
        where = loaded.where(key if is_argument else "task.name")
        where += f": {key}" if is_argument else ""
        if is_script:  # a line of the script, or what it may not ask for
            where = str(loaded.config.task.args["script"]) if key == "task" else key
        raise TaskError(error.message, where=where, remedy=error.remedy) from None
    for line in found.get("notes", ()):
        say(line)
    values = {f"task.{key}": found[key] for key in PLANNED_KEYS}
    for key, value in found["train"].items():
        if loaded.origins[key].kind not in GIVEN:  # a given value comes before the script's
            values[key] = value
    if BASE_CHECKSUM in found:
        values[f"lora.{BASE_CHECKSUM}"] = found[BASE_CHECKSUM]
    why = f"given by {loaded.config.task.label}"
    return place | {key: (value, why) for key, value in values.items()}


PLANNED = (
    *(f"train.optimizer.{key}" for key in optimizer_section.PLANNED_KEYS),
    "train.schedule.source",
)


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


def _patterns(optimizer: OptimizerConfig) -> Iterator[tuple[str, str]]:
    for index, group in enumerate(optimizer.groups):
        yield f"train.optimizer.groups.{index}.match", group.match
    default = BUILT_IN["muon"].options["adamw_for"]
    if optimizer.adamw_for != default:
        yield from (("train.optimizer.adamw_for", pattern) for pattern in optimizer.adamw_for)
