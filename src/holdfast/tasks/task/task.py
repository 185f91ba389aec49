"""`Task`: what a user writes to train a model of their own. docs/guide/python.md explains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from holdfast.core.sharding.parameters import Normal, Ones, Zeros
from holdfast.errors import TaskError

Batch = Mapping[str, Tensor]
"""One logical microbatch, or a rank's part of it."""

Collate = Callable[[Sequence[Any]], Batch]
"""Makes a batch of samples."""

Initial = Normal | Zeros | Ones | Tensor | None
"""Initial values of a parameter; None: those that the module gave it."""


class Samples(Protocol):
    """A map-style dataset: the same index gives the same sample in each process.

    version: names the content. Change it with the data, as it is a part of the run's identity.
    """

    @property
    def version(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Tensors, arrays and numbers by name."""
        ...


class Task(ABC):
    """What is trained. `task.args` of the run file are the keyword arguments of the class."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Make the module. It is called several times and must make the same each time; most calls
        are on the meta device, where tensors have no values."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of `batch` as a sum over samples (or tokens), not a mean: a scalar."""

    def data(self) -> Samples | None:
        """The training samples. None: the prepared tokens of the run file's section `data`, in
        batches of `inputs`, `targets` (-100: no loss) and, with `data.attention: document`,
        `documents`. With `data.features` they have `features`, too."""
        return None

    def validation(self) -> Samples | None:
        """Samples that are not trained on; None: none, or those of the prepared tokens."""
        return None

    def weight(self, batch: Batch) -> float:
        """What `batch` adds to the divisor of the step's loss and gradient: its samples or tokens,
        or the sum of their weights. A fraction is rounded to a multiple of 2**-32: so sums do not
        depend on their order. It is not asked for prepared tokens: there it is the targets with a
        loss."""
        return len(next(iter(batch.values())))

    def collate(self, items: Sequence[Mapping[str, Any]]) -> Batch:
        """Make a batch of samples. By default the tensors of each name are stacked."""
        return stacked_batch(items)

    def initial(self, name: str, shape: tuple[int, ...]) -> Initial:
        """The initial values of a parameter. A parameter with None gets those of `model()`."""
        return None

    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and merged buffers of a model that was trained before, by name. They come
        before `initial`, and are asked for before the first step alone."""
        return {}

    def vocabulary(self) -> int | None:
        """How many token ids the module knows; None: prepared tokens are not checked."""
        return None

    def flops(self) -> float | None:
        """Floating-point operations of training, forward and backward, for a weight of 1: one
        sample or token, as `weight` counts. None: no utilisation is reported."""
        return None

    def exported(self, name: str) -> str | None:
        """The name of a parameter, or merged buffer, in an exported file; None: it is left out."""
        return name

    def files(self) -> Sequence[Path]:
        """Files that `model()` reads, such as a config: a part of the task's source."""
        return []

    def start_notes(self) -> Sequence[str]:
        """Lines that a run prints before it starts."""
        return []

    def decays(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether weight decay applies to a parameter: by default to matrices."""
        return len(shape) > 1

    def merge(self, buffer: str) -> Literal["mean", "sum"] | None:
        """How a step changes a buffer that forward passes change. It adds the mean or the sum of
        its microbatches' changes, each from the value before the step. None: no pass changes it."""
        return None

    def casts(self, buffer: str) -> bool:
        """Whether the forward pass has a floating-point buffer in the run's precision, as it has
        the parameters. False: in the buffer's own dtype."""
        return True

    def sharding(self) -> Mapping[str, str | tuple[str, int]]:
        """How tensor parallelism (`layout.tp`) cuts layers: {"blocks.*.up": "colwise",
        "blocks.*.down": "rowwise"}. A `*` stands for a part of a name. ("colwise", 8): the dim that
        is cut has 8 parts, such as heads, and each stays in one piece. docs/guide/python.md has the
        styles. Without a table no layout has tp."""
        return {}

    def units(self, model: nn.Module) -> Sequence[nn.Module]:
        """The modules that ZeRO 3 gathers one by one, and that are compiled. Each is used by
        calling it. By default the items of the longest ModuleList."""
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        return list(max(lists, key=len, default=()))


class PipelineTask(Task):
    """A task whose module is a row of blocks, so that pipeline parallelism (`layout.pp`) can give
    each worker some of them. docs/guide/python.md has the rules."""

    @dataclass(frozen=True)
    class Parts:
        """The parts of a module, by names."""

        blocks: str  # a ModuleList, whose items are shared out in order
        before: Sequence[str] = ()  # modules and parameters that `before()` uses
        after: Sequence[str] = ()  # those that `after()` uses; a tied one may be in both

    @abstractmethod
    def pipeline(self) -> Parts:
        """Name the blocks, and what is used before and after them."""

    @abstractmethod
    def before(self, model: nn.Module, batch: Batch) -> Tensor:
        """What the first block gets: a floating-point tensor."""

    @abstractmethod
    def after(self, model: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        """The loss from what the last block gave, as `loss` returns it."""

    def block(self, block: nn.Module, x: Tensor, batch: Batch) -> Tensor:
        """What a block gives: a tensor of the same shape and dtype."""
        out: Tensor = block(x)
        return out

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The three parts one after the other. Training calls the parts."""
        x = self.before(model, batch)
        for block in model.get_submodule(self.pipeline().blocks)._modules.values():
            assert block is not None
            x = self.block(block, x, batch)
        return self.after(model, x, batch)


def stacked_batch(items: Sequence[Any]) -> Batch:
    """Stack the tensors of each name. Raises TaskError and TypeError for what cannot be."""
    if other := [item for item in items if not isinstance(item, Mapping)]:
        kind = type(other[0]).__name__
        raise TaskError(
            f"a sample is a {kind}: return a dict of tensors",
            remedy="or write collate(), which an own loop gives as step.batches(..., collate=)",
        )
    for item in items:
        if item.keys() != items[0].keys():
            raise TypeError(f"samples have unlike names: {[*items[0]]} and {[*item]}")
    return {name: _stacked(name, [item[name] for item in items]) for name in items[0]}


def _stacked(name: str, values: Sequence[Any]) -> Tensor:
    """Stack the values of one name; numbers become int64, float32 or bool."""
    try:
        return torch.stack(
            [
                torch.tensor(value, dtype=torch.float32)
                if isinstance(value, float)
                else torch.as_tensor(value)
                for value in values
            ]
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name!r} of the samples cannot be stacked: {error}") from error
