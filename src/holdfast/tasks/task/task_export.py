"""The trained parameters of a task as safetensors, under names of the task's own.

`MergedTaskWeights` has trained adapters merged in, for an export or to continue a text.
"""

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


from typing import Any

from torch import Tensor

from holdfast.config.run import RunConfig
from holdfast.core.sharding.adapters import DOWN, UP
from holdfast.model.lora import merged
from holdfast.tasks.task.initial import first_values, frozen_values, refuse_other_values
from holdfast.tasks.task.module import meta_module, tied_names


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


class MergedTaskWeights:
    """The parameters of a task's module, and its merged buffers. What the adapters are for is held
    in memory.

    trained: what a checkpoint of the run has. A parameter of several layers has one name, unless an
    adapter makes its layers unlike: then it has all its names. Raises TaskError if the task's own
    values are not those of the run.
    """

    def __init__(self, config: RunConfig, trained: Shaped) -> None:
        task = load_task(config.task)
        self._trained, self._scale = trained, config.lora.scale
        self._frozen = frozen_values(task, first_values(task, config.seed))
        refuse_other_values(self._frozen, config.lora.base_checksum)
        self._layers = frozenset(
            name.removesuffix(f".{DOWN}") for name in trained.names if name.endswith(f".{DOWN}")
        )
        module = meta_module(task)
        names = [name for name, _ in module.named_parameters()]
        for group in tied_names(module):
            if any(self._layer_of(name) is not None for name in group):
                names += group[1:]
        self._buffers = [name for name in trained.names if not name.endswith((DOWN, UP))]
        self.names = (*names, *self._buffers)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a parameter or a merged buffer."""
        return (
            self._trained.shape(name) if name in self._buffers else tuple(self._frozen[name].shape)
        )

    def dtype(self, name: str) -> Any:
        """That of the run's state."""
        return self._trained.dtype(self._trained.names[0])

    def whole(self, name: str) -> Tensor:
        """The complete tensor."""
        shape = self.shape(name)
        return self.box(name, (0,) * len(shape), shape)

    def box(self, name: str, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """A part of a tensor."""
        if name in self._buffers:
            return self._trained.box(name, offsets, lengths)
        place = tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))
        base = self._frozen[name][place].to(self.dtype(name))
        layer = self._layer_of(name)
        if layer is None:
            return base
        rank = self._trained.shape(f"{layer}.{DOWN}")[0]
        down = self._trained.box(f"{layer}.{DOWN}", (0, offsets[1]), (rank, lengths[1]))
        up = self._trained.box(f"{layer}.{UP}", (offsets[0], 0), (lengths[0], rank))
        return merged(base, down, up, self._scale)

    def _layer_of(self, name: str) -> str | None:
        """The layer whose adapter changes a parameter."""
        layer, _, last = name.rpartition(".")
        return layer if last == "weight" and layer in self._layers else None
