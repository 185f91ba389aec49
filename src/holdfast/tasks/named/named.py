"""The optimizer's class and the schedule's function that a run file names by their path.

They lie in the task's folder (`task.folder`, the run file's folder by default) or in an installed
package. A child process asks them first (`tasks/child.py`). The workers load them, and compare the
source with what the child found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from holdfast.config.loading.fields import as_path, value_at
from holdfast.config.loading.identity import SOURCE_KEYS
from holdfast.config.run import RunConfig
from holdfast.config.sections.optimizer import OptimizerConfig
from holdfast.config.sections.task import TaskConfig
from holdfast.core.lr_schedule import RateFunction
from holdfast.errors import ConfigError, TaskError
from holdfast.tasks.task.ask import OPTIMIZER_KEY, SCHEDULE_KEY, describe_named
from holdfast.tasks.task.loading import import_module, source_digest, user_code
from holdfast.training.optimizers.make_optimizer import UserParts
from holdfast.training.optimizers.torch_optimizer import MakeOptimizer


def load_user_parts(config: RunConfig) -> UserParts:
    """Load what the run file names. Raises UserError, also if its source is not the run's."""
    train, found = config.train, UserParts()
    if train.optimizer.is_class:
        found = UserParts(load_optimizer(config))
    if train.schedule.is_function:
        found = UserParts(found.optimizer, load_schedule(config))
    _refuse_other_source(config)
    return found


def load_optimizer(config: RunConfig) -> MakeOptimizer:
    """Return what makes the run file's class of `torch.optim.Optimizer`. Raises ConfigError."""
    optimizer = config.train.optimizer
    kind = _load(optimizer.name, config.task.folder, OPTIMIZER_KEY)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(
            f"{optimizer.name} is no subclass of torch.optim.Optimizer",
            where=OPTIMIZER_KEY,
            remedy="name a class that is, for example torch.optim.RMSprop",
        )
    return make_of_class(kind, optimizer)


def make_of_class(kind: type[Any], optimizer: OptimizerConfig) -> MakeOptimizer:
    """What makes a class with the run file's arguments."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        with one_sentence(OPTIMIZER_KEY, f"{optimizer.name} cannot be made"):
            made: torch.optim.Optimizer = kind(
                groups, **({"lr": optimizer.learning_rate} | optimizer.args)
            )
        return made

    return make


def load_schedule(config: RunConfig) -> RateFunction:
    """Return the run file's function of the step, which raises ConfigError where it fails or
    returns no number."""
    name, more = config.train.schedule.kind, config.train.schedule.args
    function = _load(name, config.task.folder, SCHEDULE_KEY)
    if not callable(function):
        raise ConfigError(
            f"{name} is no function", where=SCHEDULE_KEY, remedy="name one of (step, steps)"
        )

    def rate(step: int, steps: int) -> float:
        with one_sentence(SCHEDULE_KEY, f"{name}({step}, {steps}) failed"):
            value = function(step, steps, **more)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"{name}({step}, {steps}) returned {value!r}",
                where=SCHEDULE_KEY,
                remedy="return a finite number that is not negative, a multiple of "
                "train.optimizer.learning_rate",
            )
        return float(value)

    return rate


def source_of(name: str, folder: str) -> str:
    """Digest of the source of something that is loaded. What comes with torch has none, as our own
    optimizers have none."""
    if name.startswith("torch."):
        return ""
    module, _ = _split(name)
    return source_digest(TaskConfig(name=f"{module}:x", folder=folder))


def sources_of(config: RunConfig) -> dict[str, str]:
    """Key of a digest -> the digest, of what the run file names by a path."""
    train, found = config.train, dict[str, str]()
    if train.optimizer.is_class:
        found["train.optimizer.source"] = source_of(train.optimizer.name, config.task.folder)
    if train.schedule.is_function:
        found["train.schedule.source"] = source_of(train.schedule.kind, config.task.folder)
    return found


def _refuse_other_source(config: RunConfig) -> None:
    """A process may have imported more of the folder than a child that imports these alone. So the
    child decides."""
    expected = {key: value_at(config, as_path(key)) for key in SOURCE_KEYS}
    found = sources_of(config)
    fresh = found if found.items() <= expected.items() else describe_named(config)
    for key in found:
        if fresh[key] != expected[key]:
            name = SOURCE_KEYS[key]
            raise ConfigError(
                f"the source of {value_at(config, as_path(name))} has changed since this run was "
                "started",
                where=name,
                remedy="put the files back, or begin another run: holdfast train RUN.yaml "
                "folder=NEW",
            )


def _split(name: str) -> tuple[str, str]:
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    return module, attribute


def _load(name: str, folder: str, key: str) -> Any:
    module_name, attribute = _split(name)
    with one_sentence(key):
        module = import_module(module_name, folder)
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(
            f"module {module_name} ({module.__file__}) has no {attribute}",
            where=key,
            remedy="name something that is in it",
        )
    return found


@contextmanager
def one_sentence(key: str, what: str = "") -> Iterator[None]:
    """Make one sentence, which names the key, of what goes wrong in a user's code."""
    try:
        with user_code(what) if what else nullcontext():
            yield
    except TaskError as error:
        raise ConfigError(error.message, where=key, remedy=error.remedy) from error.__cause__
