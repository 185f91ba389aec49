"""The public names of the package, and the modules that define them.

`holdfast.train` is two things: the room of the step engine, which Python binds in the package when
it is imported, and the public function. So the room is made callable when it is bound.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

HOMES = {
    "Batch": "holdfast.tasks.task.task",
    "Checkpoint": "holdfast.api.reading",
    "Controller": "holdfast_platform.pods.controller",
    "Normal": "holdfast.core.sharding.parameters",
    "Ones": "holdfast.core.sharding.parameters",
    "RunFile": "holdfast.api.run_file",
    "Samples": "holdfast.tasks.task.task",
    "Task": "holdfast.tasks.task.task",
    "TaskError": "holdfast.errors",
    "TrainingResult": "holdfast.api.training",
    "UserError": "holdfast.errors",
    "Zeros": "holdfast.core.sharding.parameters",
    "batches": "holdfast.api.reading",
    "follow": "holdfast.api.reading",
    "journal": "holdfast.api.reading",
    "load_run_file": "holdfast.api.run_file",
    "open_checkpoint": "holdfast.api.reading",
    "run": "holdfast.tasks.scripts.own_loop",
    "summary": "holdfast.api.reading",
    "train": "holdfast.api.training",
}
"""Public name -> the module that defines it."""


def load(name: str) -> object:
    """Return a public name's value. Raises KeyError."""
    return getattr(import_module(HOMES[name]), name)


class CallableRoom(ModuleType):
    """A room with the name of a public function."""

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        function: Any = load(self.__name__.rpartition(".")[2])
        return function(*args, **keywords)


class Package(ModuleType):
    """The package `holdfast`."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in HOMES and type(value) is ModuleType:
            value.__class__ = CallableRoom
        super().__setattr__(name, value)
