"""The public names of the package, and the modules that define them."""

from __future__ import annotations

from importlib import import_module
from warnings import warn

HOMES = {
    "Batch": "holdfast.tasks.task.task",
    "Checkpoint": "holdfast.api.reading",
    "Normal": "holdfast.core.sharding.parameters",
    "Ones": "holdfast.core.sharding.parameters",
    "PipelineTask": "holdfast.tasks.task.task",
    "RunFile": "holdfast.api.training",
    "Samples": "holdfast.tasks.task.task",
    "Task": "holdfast.tasks.task.task",
    "TaskError": "holdfast.errors",
    "TrainingResult": "holdfast.api.training",
    "UserError": "holdfast.errors",
    "Zeros": "holdfast.core.sharding.parameters",
    "batches": "holdfast.api.reading",
    "follow": "holdfast.api.reading",
    "journal": "holdfast.api.reading",
    "load_run_file": "holdfast.api.training",
    "open_checkpoint": "holdfast.api.reading",
    "run": "holdfast.api.alone",
    "summary": "holdfast.api.reading",
    "train": "holdfast.api.training",
}
"""Public name -> the module that defines it."""

MOVED = {"Controller": "holdfast_platform.pods.controller"}
"""Name that was public until version 0.1 -> the module of another package that has it now."""


def load_moved(name: str) -> object:
    """Return a moved name's value, and warn with its new place. Raises ModuleNotFoundError."""
    warn(
        f"holdfast.{name} goes with the next version; use: from {MOVED[name]} import {name}",
        FutureWarning,
        stacklevel=3,
    )
    return getattr(import_module(MOVED[name]), name)


def load(name: str) -> object:
    """Return a public name's value. Raises KeyError."""
    return getattr(import_module(HOMES[name]), name)
