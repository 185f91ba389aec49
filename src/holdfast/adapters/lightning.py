"""Trains a `LightningModule` by Holdfast's loop.

In a script that `holdfast run` starts, `fit(module, dataset, steps=...)` takes the place of
`Trainer(...).fit(module)`. `training_step` and `configure_optimizers` are the module's. Steps,
recovery and checkpoints are Holdfast's. A hook that could change the curve is refused by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import default_collate

from holdfast.errors import TaskError
from holdfast.tasks.scripts.own_loop import MapDataset, run

_WHERE = "holdfast.adapters.lightning"

_REFUSED_HOOKS = (
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
"""Hooks that Lightning's trainer calls in training, and Holdfast does not."""

Weight = Callable[[Any], int]
Collate = Callable[[Any], Any]


def fit(
    module: Any,
    dataset: MapDataset,
    *,
    steps: int,
    batch_size: int,
    microbatch_size: int,
    version: str | None = None,
    collate: Collate = default_collate,
    weight: Weight | None = None,
    clip_norm: float = 0.0,
) -> None:
    """Train `module` for `steps` steps; afterwards it has the result. Raises TaskError.

    Args:
        module: a LightningModule with `training_step` and `configure_optimizers`. `training_step`
            gets a batch and the number of steps before.
        dataset: map-style. Its items are what `collate` takes.
        batch_size: samples of a step, over all workers. microbatch_size: of one batch.
        version: names the dataset's content, if it has no attribute `version`.
        weight: the number of things that the loss of a batch is the mean of; by default its
            samples.
        clip_norm: largest global norm of the gradient; 0: no clipping.
    """
    current = run()
    base = import_module("lightning.pytorch").LightningModule
    if not isinstance(module, base):
        raise _refused(f"{type(module).__name__} is no LightningModule", "derive it from that")
    if not module.automatic_optimization:
        raise _refused(
            "the module sets automatic_optimization=False",
            "write the loop yourself with holdfast.run()",
        )
    for name in _REFUSED_HOOKS:
        if getattr(type(module), name) is not getattr(base, name):
            raise _refused(
                f"{type(module).__name__}.{name} is not called by Holdfast, and could change the "
                "curve",
                "remove it, or write the loop yourself with holdfast.run()",
            )
    kind, done = type(module), [0]
    counters = {"global_step": property(lambda _: done[0]), "current_epoch": property(_no_epoch)}
    module.__class__ = type(kind.__name__, (kind,), counters)
    module.to(current.device)
    module.train()
    optimizer, scheduler = _chosen_optimizer(module.configure_optimizers())
    current.keep(module, optimizer, scheduler, clip_norm=clip_norm)
    for step in current.steps(steps, batch_size=batch_size, microbatch_size=microbatch_size):
        done[0] = step.number - 1
        named = step.batches(
            dataset, version=version, collate=lambda items: _as_named(collate(items))
        )
        for tensors in named:
            batch = _as_collated(tensors)
            parts = len(next(iter(tensors.values()))) if weight is None else weight(batch)
            step.backward(_loss(module.training_step(batch, step.number - 1)) * parts, parts)
        step.apply()
    module.__class__ = kind
    module.eval()


_POSITION, _SINGLE = "item ", "batch"
"""Names of the tensors of a batch that is a sequence of tensors, or one tensor."""


def _no_epoch(module: Any) -> int:
    raise _refused("the module reads current_epoch, and steps are counted", "read global_step")


def _as_named(batch: Any) -> Mapping[str, Tensor]:
    """Return the batch as a dict. Raises TaskError for one that is not flat."""
    if isinstance(batch, Tensor):
        return {_SINGLE: batch}
    if isinstance(batch, Mapping):
        named = dict(batch)
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        named = {f"{_POSITION}{number}": value for number, value in enumerate(batch)}
    else:
        named = {}
    if not named or not all(isinstance(value, Tensor) for value in named.values()):
        raise _refused(
            f"a collated batch is {type(batch).__name__}, and not flat",
            "let collate return a tensor, or a list or a dict of tensors",
        )
    return named


def _as_collated(tensors: Mapping[str, Tensor]) -> Any:
    """Return the batch as `collate` made it: the inverse of `_as_named`."""
    first = next(iter(tensors))
    if first == _SINGLE and len(tensors) == 1:
        return tensors[_SINGLE]
    return list(tensors.values()) if first.startswith(_POSITION) else dict(tensors)


def _chosen_optimizer(answer: Any) -> tuple[Optimizer, Any]:
    """Return the optimizer and the scheduler, or None, of `configure_optimizers`. Raises
    TaskError for more than one, and for a scheduler that does not count steps."""
    optimizers, schedulers = answer, None
    if isinstance(answer, Mapping):
        optimizers, schedulers = answer.get("optimizer"), answer.get("lr_scheduler")
    elif isinstance(answer, tuple) and not all(isinstance(one, Optimizer) for one in answer):
        if len(answer) != 2:
            raise _refused(
                f"configure_optimizers() returned {len(answer)} values",
                "return an optimizer, or ([optimizer], [scheduler])",
            )
        optimizers, schedulers = answer
    optimizer, scheduler = _single(optimizers, "optimizer"), _single(schedulers, "lr_scheduler")
    interval = "epoch"
    if isinstance(scheduler, Mapping):
        scheduler, interval = scheduler["scheduler"], scheduler.get("interval", interval)
    if not isinstance(optimizer, Optimizer):
        raise _refused(
            f"configure_optimizers() returned {type(answer).__name__}", "return an optimizer"
        )
    if scheduler is not None and interval != "step":
        raise _refused(
            f"the interval of the lr_scheduler is {interval!r}",
            'return {"scheduler": ..., "interval": "step"}',
        )
    return optimizer, scheduler


def _single(found: Any, what: str) -> Any:
    if isinstance(found, list | tuple):
        if len(found) > 1:
            raise _refused(f"configure_optimizers() returned {len(found)} of {what}", "return one")
        return found[0] if found else None
    return found


def _loss(answer: Any) -> Tensor:
    loss = answer.get("loss") if isinstance(answer, Mapping) else answer
    if not isinstance(loss, Tensor):
        raise _refused(
            f"training_step() returned {type(answer).__name__}", 'return the loss, or {"loss": ...}'
        )
    return loss


def _refused(what: str, remedy: str) -> TaskError:
    return TaskError(what, where=_WHERE, remedy=remedy)
