"""The trained parameters of a task as safetensors, under names of the task's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from holdfast.config.sections.task import TaskConfig
from holdfast.core.format.hf_names import NameMap, TensorMapping, rename
from holdfast.errors import TaskError
from holdfast.model.huggingface_files import TensorReader, write_files
from holdfast.model.new_folder import new_folder
from holdfast.tasks.task.loading import load_task, user_code
from holdfast.tasks.task.task import Task

if TYPE_CHECKING:
    import torch


class Shaped(TensorReader, Protocol):
    """Parameters, and merged buffers, by name."""

    @property
    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


def export_task(
    to: Path, config: TaskConfig, weights: Shaped, *, dtype: torch.dtype | None, shard_bytes: int
) -> None:
    """Write `model.safetensors`, or several files with an index. A few megabytes are in memory.
    Raises UserError."""
    names = NameMap(tuple(_exported(load_task(config), weights)))
    with new_folder(to) as partial:
        write_files(partial, names, weights, dtype, shard_bytes)


def _exported(task: Task, weights: Shaped) -> list[TensorMapping]:
    """Raises TaskError for names that are no texts, or not distinct, or none."""
    found: dict[str, TensorMapping] = {}
    for ours in weights.names:
        with user_code("exported() failed"):
            theirs = task.exported(ours)
        if theirs is None:
            continue
        if not isinstance(theirs, str) or not theirs or theirs in found:
            what = f"{theirs!r} for {ours}"
            raise TaskError(
                f"exported() returned {what}, as for another one"
                if theirs in found
                else f"exported() returned {what}",
                remedy="return a name of its own for each parameter, or None to leave it out",
            )
        found[theirs] = rename(ours, theirs, weights.shape(ours))
    if not found:
        raise TaskError(
            "exported() returned None for each parameter",
            remedy="return a name for those that are to be written",
        )
    return list(found.values())
