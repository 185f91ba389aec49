"""Trains large language models on machines that come and go.

The public names are those of `__init__.pyi`; docs/python.md explains them. Each is loaded when it
is first asked for, so that importing this package imports no torch.
"""

from importlib import import_module
from importlib.metadata import version

__all__ = [
    "Batch",
    "Checkpoint",
    "Normal",
    "Ones",
    "Samples",
    "Task",
    "TaskError",
    "TrainingResult",
    "UserError",
    "Zeros",
    "follow",
    "journal",
    "open_checkpoint",
    "report",
    "train",
]

__HOMES = {
    "Batch": "holdfast.tasks.task",
    "Checkpoint": "holdfast.api.reading",
    "Normal": "holdfast.core.sharding.parameters",
    "Ones": "holdfast.core.sharding.parameters",
    "Samples": "holdfast.tasks.task",
    "Task": "holdfast.tasks.task",
    "TaskError": "holdfast.errors",
    "TrainingResult": "holdfast.api.training",
    "UserError": "holdfast.errors",
    "Zeros": "holdfast.core.sharding.parameters",
    "follow": "holdfast.api.reading",
    "journal": "holdfast.api.reading",
    "open_checkpoint": "holdfast.api.reading",
    "report": "holdfast.api.reading",
    "train": "holdfast.api.training",
}
"""Public name -> the module that defines it."""


def __getattr__(name: str) -> object:
    """Return a public name, or `__version__`; each is looked up when it is asked for."""
    if name == "__version__":
        return version("holdfast")
    if name in __HOMES:
        return getattr(import_module(__HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
