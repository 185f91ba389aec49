"""Trains large language models on machines that come and go.

The public names are those of `__init__.pyi`; docs/python.md explains them. Each is loaded when it
is first asked for, so that importing this package imports no torch.
"""

from importlib import import_module
from importlib.metadata import version

__all__ = [
    "Batch",
    "Normal",
    "Ones",
    "Samples",
    "Task",
    "TaskError",
    "UserError",
    "Zeros",
]

__HOMES = {
    "Batch": "holdfast.tasks.task",
    "Normal": "holdfast.core.sharding.parameters",
    "Ones": "holdfast.core.sharding.parameters",
    "Samples": "holdfast.tasks.task",
    "Task": "holdfast.tasks.task",
    "TaskError": "holdfast.errors",
    "UserError": "holdfast.errors",
    "Zeros": "holdfast.core.sharding.parameters",
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
